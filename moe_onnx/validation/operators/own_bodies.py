"""Functions of a model that are this package's bodies of its operators: known good, and not looked into."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache

from onnx import AttributeProto, FunctionProto, NodeProto

from moe_onnx.adapters.function_body import OLDEST_OPSET, function_body
from moe_onnx.operators import BY_NAME
from moe_onnx.rewrite.legalize import BODY_DOMAIN
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.subject import Scope, Subject, normal_domain

_FIELDS = ("input", "output", "attribute", "attribute_proto", "node")


def own_bodies(subject: Subject) -> Collection[int]:
    """``id`` of the functions of a model that are bodies of this package."""
    return subject.once(_found)


def _found(subject: Subject) -> dict[int, FunctionProto]:
    # The functions stand here as well: an id means something as long as its object lives.
    return {id(function): function for function in subject.model.functions if is_own_body(function)}


def in_own_body(subject: Subject, scope: Scope) -> bool:
    """Whether a scope is, or is inside, a body of this package."""
    return scope.function is not None and id(scope.function) in own_bodies(subject)


def is_own_body(function: FunctionProto) -> bool:
    """Whether a function is this package's body of an operator, names of nodes and remarks aside."""
    if function.name not in BY_NAME or normal_domain(function.domain) not in (DOMAIN, BODY_DOMAIN):
        return False
    opset = next((e.version for e in function.opset_import if not normal_domain(e.domain)), 0)
    if not OLDEST_OPSET <= opset < 2**30:
        return False
    body, skeleton = _body(function.name, opset)
    same = all(getattr(function, field) == getattr(body, field) for field in _FIELDS)
    return same or _skeleton(function) == skeleton


@lru_cache(64)
def _body(name: str, opset: int) -> tuple[FunctionProto, FunctionProto]:
    body = function_body(name, opset)
    return body, _skeleton(body)


def _skeleton(function: FunctionProto) -> FunctionProto:
    bare = FunctionProto()
    for field in _FIELDS:
        getattr(bare, field).extend(getattr(function, field))
    _strip(bare.node)
    return bare


def _strip(nodes: Iterable[NodeProto]) -> None:
    for node in nodes:
        for field in ("name", "doc_string", "metadata_props"):
            node.ClearField(field)
        for attribute in node.attribute:
            attribute.ClearField("doc_string")
            if attribute.type == AttributeProto.GRAPH:
                for field in ("name", "doc_string", "value_info", "metadata_props"):
                    attribute.g.ClearField(field)
                _strip(attribute.g.node)
