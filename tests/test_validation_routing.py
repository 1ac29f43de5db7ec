"""Layers of training graphs that route, or differentiate, by each other's values."""

from __future__ import annotations

import pytest
from broken_models import Mutation, copy_of
from broken_routing import MORE
from onnx import ModelProto

from moe_onnx.validation.findings import Finding
from moe_onnx.validation.subject import Options, open_subject
from moe_onnx.validation.training.routing import routing
from moe_onnx.validation.training.routing_gradients import routing_gradients


def codes(model: ModelProto) -> list[str]:
    subject = open_subject(model, Options())
    found = [*routing(subject), *routing_gradients(subject)]
    return [outcome.code for outcome in found if isinstance(outcome, Finding)]


@pytest.mark.parametrize("mutation", MORE, ids=lambda mutation: mutation.id)
def test_each_node_with_values_of_another_layer_is_one_finding(mutation: Mutation) -> None:
    model = copy_of(mutation.base())
    assert codes(model) == []
    mutation.break_it(model)
    found = codes(model)
    # Where two nodes exchanged their inputs, both are wrong, and what reads them.
    assert len(found) == 1 or "exchanged" in mutation.name
    assert set(found) == {mutation.code}
