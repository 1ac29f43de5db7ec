"""The ``ascend.moe`` nodes of a model, as the checks of the source documents read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from moe_onnx.errors import MoeOnnxError
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN, Dim, OpSpec, Shape, TensorInfo, presence
from moe_onnx.validation.subject import Scope, Subject

Array = NDArray[Any]
_MOST_ELEMENTS = 1 << 22  # of a constant that is looked at: indices and maps, never weights


@dataclass(frozen=True)
class MoeNode:
    """A node of an operator of this package, whose arity and kinds of attributes are right.

    Attributes:
        scope, node: Where it stands.
        spec: Its operator.
        inputs: What is known of each input of the operator, None where the node names none.
        attributes: As written in the node.
    """

    scope: Scope
    node: NodeProto
    spec: OpSpec
    inputs: tuple[TensorInfo | None, ...]
    attributes: dict[str, Any]

    @cached_property
    def checked(self) -> MoeOnnxError | tuple[dict[str, Any], list[TensorInfo | None]]:
        """All attributes and what is known of the outputs; or the rule that the node breaks."""
        try:
            return self.spec.check(self.inputs, self.attributes)
        except MoeOnnxError as error:
            return error

    @property
    def legal(self) -> dict[str, Any] | None:
        """All attributes, None where the node breaks a rule."""
        return self.checked[0] if isinstance(self.checked, tuple) else None

    @cached_property
    def settings(self) -> dict[str, Any] | None:
        """All attributes, also where sizes are wrong; None where an attribute is."""
        try:
            return self.spec.check_attributes(self.attributes)
        except MoeOnnxError:
            return None

    @property
    def is_padded(self) -> bool:
        """Whether it is in one of the drop/pad modes."""
        settings = self.settings or {}
        return bool(settings.get("drop_and_pad") or settings.get("drop_pad_mode", 0) % 2)

    @property
    def place(self) -> str:
        """How a finding names it."""
        return self.scope.place(self.node)

    def name(self, argument: str) -> str:
        """The tensor that the node takes for an argument, ``""`` for none."""
        at = self._at(argument)
        return self.node.input[at] if at < len(self.node.input) else ""

    def info(self, argument: str) -> TensorInfo | None:
        """What is known of an argument; None where it is absent, also as an empty constant."""
        info = self.inputs[self._at(argument)]
        optional = self.spec.inputs[self._at(argument)].optional
        return None if info is None or (optional and presence(info) is False) else info

    def shape(self, argument: str) -> Shape:
        """The shape of an argument, None where it is absent or unknown."""
        info = self.info(argument)
        return None if info is None else info.shape

    def dim(self, argument: str, axis: int) -> int | None:
        """A size of an argument, None where it is unknown."""
        shape = self.shape(argument)
        size = shape[axis] if shape is not None and len(shape) > axis else None
        return size if isinstance(size, int) else None

    def constant(self, argument: str) -> Array | None:
        """The values of an argument that is a constant in the file."""
        name = self.name(argument)
        return constant(self.scope, name) if name else None

    def _at(self, argument: str) -> int:
        return next(i for i, arg in enumerate(self.spec.inputs) if arg.name == argument)


def moe_nodes(subject: Subject) -> list[MoeNode]:
    """Every node of an operator of this package that is spelt right and not a template.

    Left out are nodes that the checks of operators refuse (too many inputs, attributes of another
    kind), and in functions those whose attributes are the function's.
    """
    return subject.once(_moe_nodes)


def _moe_nodes(subject: Subject) -> list[MoeNode]:
    return list(_each_node(subject))


def _each_node(subject: Subject) -> Iterator[MoeNode]:
    for scope, node in subject.nodes():
        if node.domain != DOMAIN or (spec := BY_NAME.get(node.op_type)) is None:
            continue
        attributes = _attributes(spec, node)
        if attributes is None or len(node.input) > len(spec.inputs):
            continue
        types = subject.types(scope)
        infos = [types.get(name, TensorInfo("", None)) if name else None for name in node.input]
        infos += [None] * (len(spec.inputs) - len(infos))
        yield MoeNode(scope, node, spec, tuple(_legal_sizes(info) for info in infos), attributes)


def _attributes(spec: OpSpec, node: NodeProto) -> dict[str, Any] | None:
    """The attributes of a node; None where one is missing, of another kind, unknown, or a reference."""
    kinds = {a.name: AttributeProto.INTS if a.kind == "ints" else AttributeProto.INT for a in spec.attributes}
    found: dict[str, Any] = {}
    for attribute in node.attribute:
        if kinds.get(attribute.name) != attribute.type or attribute.ref_attr_name:
            return None
        found[attribute.name] = helper.get_attribute_value(attribute)
    missing = [attr.name for attr in spec.attributes if attr.required and attr.name not in found]
    return None if missing else found


def _legal_sizes(info: TensorInfo | None) -> TensorInfo | None:
    """A file may say that a size is -1, which is no size: it is unknown."""
    if info is None or info.shape is None or not any(isinstance(d, int) and d < 0 for d in info.shape):
        return info
    return replace(info, shape=tuple(None if isinstance(d, int) and d < 0 else d for d in info.shape))


def constant(scope: Scope, name: str) -> Array | None:
    """The values of an initializer or of a Constant node; None where they are not in the file or too many."""
    tensor = scope.initializer(name)
    if tensor is None:
        made = scope.producer(name)
        if made is None or made[1].op_type != "Constant" or made[1].domain not in ("", "ai.onnx"):
            return None
        for attribute in made[1].attribute:
            if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
                tensor = attribute.t
            elif attribute.name == "value_ints" and attribute.type == AttributeProto.INTS:
                return np.array(attribute.ints, np.int64)
    return None if tensor is None else values(tensor)


def values(tensor: onnx.TensorProto) -> Array | None:
    """The values of a tensor; None where they are elsewhere, too many, or not what its header says."""
    if tensor.data_location == TensorProto.EXTERNAL or any(dim < 0 for dim in tensor.dims):
        return None
    if prod(tensor.dims) > _MOST_ELEMENTS:
        return None
    try:
        found: Array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError):
        return None  # the checks of the structure say so
    return found


def product(sizes: Iterable[Dim]) -> int | None:
    """The product of sizes, None where one is unknown."""
    total = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        total *= size
    return total
