"""Models broken for one reason each, for the table of mutations and checks.

A :class:`Mutation` names the code that must be found, the intact model it starts from, and how it is broken.
``test_validation.py`` runs all of them: the broken model has the code, the intact one has not. Families of
mutations stand in ``broken_<family>.py`` and register here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx

import moe_onnx
from moe_onnx.build.training_graph import TrainingGraph

FAMILIES: tuple[str, ...] = (
    "broken_external",
    "broken_versions",
    "broken_structure",
    "broken_tensors",
    "broken_ops",
    "broken_hazards",
    "broken_documents",
    "broken_indices",
    "broken_targets",
    "broken_training",
    "broken_routing",
    "broken_foreign",
    "broken_run",
    "broken_full",
    "broken_updates",
)


@dataclass(frozen=True)
class Mutation:
    """One way to break a model.

    Attributes:
        code: The finding that must come of it.
        name: What is done to the model, in words.
        base: A function without arguments that gives the intact model; never changed, ``break_it`` gets
            a copy.
        break_it: Changes the model in place, or returns another one. With ``on_disk`` it gets the path of
            the saved model (``model.onnx`` in an empty folder) instead and may return another path.
        level, target, options: What ``validate`` is asked for.
        also: Codes of severity error that may come of it besides ``code``; any other error fails the test.
        on_disk: See ``break_it``.
        around: Gives a context that holds while both models are validated: other limits, say.
    """

    code: str
    name: str
    base: Callable[[], onnx.ModelProto]
    break_it: Callable[[Any], Any]
    level: str = "static"
    options: tuple[tuple[str, Any], ...] = ()
    also: tuple[str, ...] = ()
    on_disk: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def id(self) -> str:
        return f"{self.code}-{self.name.replace(' ', '_')}"

    def intact(self, folder: Path) -> onnx.ModelProto | Path:
        if not self.on_disk:
            return copy_of(self.base())
        return save_on_disk(self.base(), folder / "model.onnx")

    def broken(self, folder: Path) -> onnx.ModelProto | Path:
        model = self.intact(folder)
        result = self.break_it(model)
        return model if result is None else result


def mutations() -> list[Mutation]:
    """All of all families."""
    return [mutation for name in FAMILIES for mutation in import_module(name).MUTATIONS]


def save_on_disk(model: onnx.ModelProto, path: Path) -> Path:
    """Save a model whose initializers lie in ``model.data`` beside it. (Only raw data can go there.)"""
    model = copy_of(model)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor), tensor.name))
    onnx.save_model(model, path, save_as_external_data=True, location="model.data", size_threshold=0)
    return path


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def parse(body: str, opset: int = 21, imports: str = "") -> onnx.ModelProto:
    """A model from ONNX text without its header."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}{imports}]>\n{body}')


@cache
def training_graph(assembly: str = "step+grad+apply+eval+forward") -> TrainingGraph:
    """A language model of two layers with four experts, dropless, AdamW."""
    config = moe_onnx.MoeLMConfig(
        vocab_size=19,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        tie_word_embeddings=True,
    )
    return moe_onnx.build_training_graph(config, assembly=assembly, optimizer=moe_onnx.AdamW())


def step_model() -> onnx.ModelProto:
    """The training graph ``step`` of the language model: forward, loss, backward and update."""
    return training_graph().models["step"]


def grad_model() -> onnx.ModelProto:
    return training_graph().models["grad"]


def plain_model() -> onnx.ModelProto:
    """Three standard nodes, a weight of 4 x 3 and a bias."""
    return parse("""
        plain (float[n, 4] x) => (float[n, 3] y)
        <float[4, 3] weight = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float[3] bias = {1, 2, 3}>
        {
            [project] product = MatMul (x, weight)
            [shift] shifted = Add (product, bias)
            [activate] y = Relu (shifted)
        }
    """)


def gradient_node(model: onnx.ModelProto, op: str) -> onnx.NodeProto:
    """The first node of an operator in the main graph."""
    return next(node for node in model.graph.node if node.op_type == op)
