"""Whether a router's weights can be negative: the kernel's, which are of a softmax, cannot."""

from __future__ import annotations

import onnx_ir as ir

from moe_onnx.rewrite.fuse.graph import NotThis, is_op

_POSITIVE = ("Abs", "Exp", "Relu", "ReduceL2", "ReduceSumSquare", "Sigmoid", "Softmax", "Softplus", "Sqrt")
_IF_FIRST = (
    "Cast", "CastLike", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reciprocal",
    "ReduceMax", "ReduceMean", "ReduceSum", "Reshape", "Slice", "Split", "Squeeze", "Tile", "TopK",
    "Transpose", "Unsqueeze",
)  # fmt: skip
_IF_ALL = ("Add", "Concat", "Div", "Min", "Mul", "Sum")
_READ = {"ScatterElements": (0, 2), "ScatterND": (0, 2), "Where": (1, 2)}
_READABLE = 1024  # elements


def _fills(node: ir.Node | None) -> float:
    """What a ConstantOfShape is full of."""
    value = None if node is None else node.attributes.get("value")
    return 0.0 if value is None else float(value.as_tensor().numpy().reshape(-1)[0])


def check_never_negative(value: ir.Value, at: ir.Node) -> None:
    """See that no element of a value can be negative.

    Raises:
        NotThis: If one can, or that is not known: names the node where.
    """
    seen, waiting = {value}, [(value, at)]
    while waiting:
        one, reader = waiting.pop()
        if one.dtype == ir.DataType.BOOL:
            continue
        node = one.producer()
        tensor = None if one.is_graph_input() else ir.convenience.get_const_tensor(one)
        if tensor is not None and tensor.size <= _READABLE and not isinstance(tensor, ir.ExternalTensor):
            if (tensor.numpy() >= 0).all():
                continue
            raise NotThis(reader, f"weighs by '{one.name}', which has negative numbers; MoE cannot")
        if is_op(node, *_POSITIVE) or (is_op(node, "ConstantOfShape") and _fills(node) >= 0):
            continue
        places: tuple[int, ...] = ()
        if node is not None and is_op(node, *_IF_FIRST):
            places = (0,)
        elif node is not None and is_op(node, *_IF_ALL):
            places = tuple(range(len(node.inputs)))
        elif node is not None and is_op(node, *_READ):
            places = _READ[node.op_type]
        if node is None or not places:
            what = "is an input" if node is None else f"is made by {node.op_type}"
            raise NotThis(reader, f"weighs by '{one.name}', which {what} and may be negative; MoE cannot")
        for place in places:
            read = node.inputs[place]
            if read is not None and read not in seen:
                seen.add(read)
                waiting.append((read, node))
