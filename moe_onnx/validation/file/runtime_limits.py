"""The newest IR version and opsets that releases of onnxruntime read.

Those of the oldest supported release stand here, as measured. What the installed one reads is asked of it:
a model of one node is loaded, only where a model is beyond what is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import onnxruntime
from onnx import OperatorSetIdProto, TensorProto, helper

from moe_onnx.validation.subject import normal_domain

_QUIET = 4  # onnxruntime's log severity: fatal errors only


@dataclass(frozen=True)
class Limits:
    """The newest IR version, and version of each domain of its own, that an onnxruntime reads.

    Domains that are not onnxruntime's own may have any version.
    """

    version: str
    ir_version: int
    opsets: dict[str, int] = field(default_factory=dict)

    def opset(self, domain: str, otherwise: int) -> int:
        """The newest version of a domain, ``otherwise`` where any will do."""
        return self.opsets.get(domain, otherwise)


# Measured. The version is the lower bound of the package's metadata (a test holds it to that).
OLDEST = Limits(
    "1.32.0",
    14,
    {
        "": 28,
        "ai.onnx.ml": 5,
        "ai.onnx.preview": 1,
        "ai.onnx.preview.training": 1,
        "ai.onnx.training": 1,
        "com.microsoft": 1,
        "com.microsoft.experimental": 1,
        "com.microsoft.nchwc": 1,
        "org.pytorch.aten": 1,
    },
)


def installed_limits(ir_version: int, imports: Iterable[OperatorSetIdProto]) -> Limits:
    """What the installed onnxruntime reads, as far as this IR version and these imports need."""
    newest_ir = OLDEST.ir_version
    if ir_version > newest_ir and loads(ir_version, "", 13):
        newest_ir = ir_version
    opsets = dict(OLDEST.opsets)
    for entry in imports:
        domain = normal_domain(entry.domain)
        if entry.version > opsets.get(domain, entry.version) and loads(10, domain, entry.version):
            opsets[domain] = entry.version
    return Limits(onnxruntime.__version__, newest_ir, opsets)


@cache
def loads(ir_version: int, domain: str, version: int) -> bool:
    """Whether the installed onnxruntime loads a model of one node with this IR version and import."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    node = helper.make_node("Identity", ["x"], ["y"])
    imports = {"": 13} | {domain: version}
    model = helper.make_model(
        helper.make_graph([node], "probe", [value], [made]),
        ir_version=ir_version,
        opset_imports=[helper.make_opsetid(*entry) for entry in imports.items()],
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _QUIET
    options.intra_op_num_threads = 1
    try:
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception:  # onnxruntime's own classes, one for each of its status codes
        return False
    return True
