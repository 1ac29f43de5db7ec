"""Models whose IR version, opsets or imports are not those of their readers or of their nodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from unittest.mock import patch

import onnx
from broken_models import Mutation, parse, plain_model
from onnx import ModelProto, helper

from moe_onnx.spec import DOMAIN
from moe_onnx.validation.file import versions
from moe_onnx.validation.file.runtime_limits import Limits

Edit = Callable[[ModelProto], None]


def function_model() -> ModelProto:
    """A call of a local function over three axes."""
    return parse(
        """
        calls (float[2, 3, 2] x) => (float[2, 3, 2] y) { [call] y = local.Share (x) }
        <domain: "local", opset_import: ["" : 21]>
        Share (a) => (b) { [act] c = Relu (a) [share] b = Softmax (c) }
        """,
        imports=', "local" : 1',
    )


def branch_model() -> ModelProto:
    """A node of another domain, in a branch only."""
    return parse(
        """
        branches (bool c, float[2, 4] x) => (float[2, 4] y) {
            [either] y = If (c) <
                then_branch = a () => (float[2, 4] p) { [fast] p = com.microsoft.FastGelu (x) },
                else_branch = b () => (float[2, 4] q) { [relu] q = Relu (x) }
            >
        }
        """,
        imports=', "com.microsoft" : 1',
    )


def custom_only() -> ModelProto:
    """A model of ascend.moe nodes only, which need not import ONNX's own domain."""
    model = parse(
        """
        custom (float[4, 8] g, int32[4] rows) => (float[2, 8] x) {
            [back] x = ascend.moe.MoeInitRoutingV2Grad <top_k = 2> (g, rows)
        }
        """,
        imports=f', "{DOMAIN}" : 1',
    )
    del model.opset_import[0]
    return model


def import_(domain: str, version: int) -> Edit:
    """Set the import of a domain, or add it."""

    def change(model: ModelProto) -> None:
        found = [entry for entry in model.opset_import if entry.domain == domain]
        entry = found[0] if found else model.opset_import.add(domain=domain)
        entry.version = version

    return change


def again(domain: str, version: int) -> Edit:
    return lambda model: model.opset_import.extend([helper.make_opsetid(domain, version)])


def without(domain: str) -> Edit:
    def change(model: ModelProto) -> None:
        kept = [entry for entry in model.opset_import if entry.domain != domain]
        del model.opset_import[:]
        model.opset_import.extend(kept)

    return change


def renamed(domain: str, other: str) -> Edit:
    def change(model: ModelProto) -> None:
        next(entry for entry in model.opset_import if entry.domain == domain).domain = other

    return change


def ir(version: int) -> Edit:
    return lambda model: setattr(model, "ir_version", version)


def of_function(version: int) -> Edit:
    return lambda model: setattr(model.functions[0].opset_import[0], "version", version)


def _function_without(model: ModelProto) -> None:
    del model.functions[0].opset_import[:]


def _custom_in_function(model: ModelProto) -> None:
    model.functions[0].node[0].domain = "com.microsoft"
    model.functions[0].node[0].op_type = "FastGelu"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _two_in_function(model: ModelProto) -> None:
    model.functions[0].opset_import.append(helper.make_opsetid("ai.onnx", 18))


def _initializer_of_old(model: ModelProto) -> None:
    model.ir_version = 3


OLDER = Limits("1.0.0", 12, {"": 22})


def older_runtime() -> AbstractContextManager[object]:
    """As where the oldest supported onnxruntime reads less than the installed one."""
    return patch.object(versions, "OLDEST", OLDER)


class OlderOnnx:
    """As where onnx is older than onnxruntime."""

    def __init__(self) -> None:
        self.patches = [
            patch.object(onnx, "IR_VERSION", 12),
            patch.object(onnx.defs, "onnx_opset_version", lambda: 22),
        ]

    def __enter__(self) -> None:
        for one in self.patches:
            one.start()

    def __exit__(self, *_: object) -> None:
        for one in self.patches:
            one.stop()


_plain = partial(Mutation, base=plain_model)
_function = partial(Mutation, base=function_model)
_oldest = partial(Mutation, "MO123", around=older_runtime)
_onnx = partial(Mutation, "MO129", base=plain_model, around=OlderOnnx)

MUTATIONS = [
    _plain("MO121", "IR version 99", break_it=ir(99)),
    _plain("MO122", "opset 99", break_it=import_("", 99)),
    _plain("MO122", "an unused import beyond onnxruntime's", break_it=again("com.microsoft", 2)),
    _plain("MO122", "ai.onnx.ml of the future", break_it=again("ai.onnx.ml", 77)),
    _function("MO122", "opset 99 in a function", break_it=of_function(99)),
    _oldest("IR version of a newer runtime", base=plain_model, break_it=ir(13)),
    _oldest("opset of a newer runtime", base=plain_model, break_it=import_("", 24)),
    _oldest("opset of a newer runtime in a function", base=function_model, break_it=of_function(24)),
    _plain("MO124", "no import of the default domain", break_it=renamed("", "other")),
    Mutation("MO124", "no import for a node in a branch", branch_model, without("com.microsoft")),
    Mutation("MO124", "no import of ascend.moe", custom_only, renamed(DOMAIN, "other")),
    _function("MO124", "no import of the function's domain", break_it=without("local")),
    _function("MO125", "a function without imports", break_it=_function_without),
    _function("MO125", "a function without an import of the model's", break_it=_custom_in_function),
    _plain("MO126", "two opsets", break_it=again("", 18)),
    _plain("MO126", "two opsets by an alias", break_it=again("ai.onnx", 18)),
    _function("MO126", "two opsets in a function", break_it=_two_in_function),
    _plain("MO127", "IR version 0", break_it=ir(0)),
    _plain("MO127", "no IR version", break_it=lambda model: model.ClearField("ir_version")),
    _plain("MO127", "no imports at all", break_it=lambda model: model.ClearField("opset_import")),
    _plain("MO127", "opset 0", break_it=import_("", 0)),
    _plain("MO127", "a negative opset", break_it=import_("", -(2**40))),
    _function("MO128", "an older Softmax in a function", break_it=of_function(11)),
    _onnx("IR version of a newer onnx", break_it=ir(13)),
    _onnx("opset of a newer onnx", break_it=import_("", 24)),
    _plain("MO130", "opset 6", break_it=import_("", 6)),
    Mutation("MO131", "ascend.moe version 2", custom_only, import_(DOMAIN, 2)),
    _plain("MO132", "an initializer that is no input", break_it=_initializer_of_old),
]
