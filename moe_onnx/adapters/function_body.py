"""OpSpec -> FunctionProto: an operator's decomposition in standard ONNX ops."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection

import onnx
import onnx.parser

from moe_onnx.errors import ModelError, OptionError
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import DOMAIN, OpSpec

OLDEST_OPSET = 18  # ScatterElements with reduction="max"


def function_body(op: str, opset: int = OLDEST_OPSET) -> onnx.FunctionProto:
    """The body of the operator ``op``, in standard ops, for models that import ``ai.onnx`` ``opset``.

    onnx demands that a function imports the very opset its model does. The nodes that check a rule
    are named after it: the runtime prints that name when the rule is broken.

    Raises:
        OptionError: If there is no such operator.
        ModelError: If the opset is older than 18.
    """
    spec = BY_NAME.get(op)
    if spec is None:
        raise OptionError(f"function_body: op must be one of {', '.join(BY_NAME)}, got {op!r}.")
    if opset < OLDEST_OPSET:
        raise ModelError(
            f"{spec.name}: the function body needs ai.onnx opset >= {OLDEST_OPSET}, the model imports "
            f"{opset}. Convert the model with onnx.version_converter first.",
            op=spec.name,
        )
    function = onnx.FunctionProto()
    function.CopyFrom(_parsed(spec.name, spec.body, opset))
    function.doc_string = f"{spec.summary}\n\n{spec.formula}"
    return function


@functools.lru_cache(maxsize=64)
def _parsed(op: str, body: str, opset: int) -> onnx.FunctionProto:
    """The parsed text of a body with its nodes named: every session and every graph of bodies needs it."""
    rules = dict(re.findall(r"^\s*(\w+) = .*# check: (.+)$", body, re.MULTILINE))
    text = _without_comments(body)
    function = onnx.parser.parse_function(f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\n{text}')
    _name_nodes(function.node, op, rules)
    return function


def missing_bodies(model: onnx.ModelProto, used: Collection[str], opset: int) -> list[onnx.FunctionProto]:
    """The bodies of the operators among ``used`` that a model does not have yet, by name."""
    present = {function.name for function in model.functions if function.domain == DOMAIN}
    return [function_body(name, opset) for name in sorted({*used} - present) if name in BY_NAME]


def body_text(spec: OpSpec) -> str:
    """The ONNX text of a body without its comments, which onnx's parser does not know."""
    return _without_comments(spec.body)


def _without_comments(body: str) -> str:
    return "\n".join(line.split("#")[0] for line in body.splitlines())


def _name_nodes(nodes: object, prefix: str, rules: dict[str, str]) -> None:
    for node in nodes:  # type: ignore[attr-defined]
        rule = rules.get(node.output[0])
        node.name = f"{prefix}: {rule}" if rule else f"{prefix}/{node.output[0]}"
        for attr in node.attribute:
            if attr.type == onnx.AttributeProto.GRAPH:
                _name_nodes(attr.g.node, prefix, rules)
