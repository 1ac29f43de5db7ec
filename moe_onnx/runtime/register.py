"""Making the Python kernels known to plain onnxruntime sessions."""

from __future__ import annotations

import onnxruntime
from onnx import TensorProto, helper

from moe_onnx.adapters import python_ops
from moe_onnx.spec import DOMAIN, VERSION

_MARK = "moe_onnx.python_ops"


def register(sess_options: onnxruntime.SessionOptions) -> onnxruntime.SessionOptions:
    """Register the Python kernels on session options, so that plain sessions can use them.

    May be called any number of times, also on options on which
    ``register_custom_ops_library(onnxruntime_extensions.get_library_path())`` was called before.
    (The other way round, onnxruntime refuses the second registration when a session is made.)

    Args:
        sess_options: Options to register on.

    Returns:
        The same options.

    Raises:
        ModelError: If onnxruntime-extensions is not installed.
    """
    path = python_ops.library_path()
    if not _is_registered(sess_options):
        sess_options.register_custom_ops_library(path)
        sess_options.add_session_config_entry(_MARK, "1")
    return sess_options


def _is_registered(options: onnxruntime.SessionOptions) -> bool:
    try:
        if options.get_session_config_entry(_MARK):
            return True
    except RuntimeError:
        pass  # no such entry
    # Options do not tell which libraries are on them, but whether a model of ours loads does.
    writes = options.optimized_model_filepath, options.enable_profiling, options.log_severity_level
    options.optimized_model_filepath, options.enable_profiling, options.log_severity_level = (
        "",
        False,
        4,
    )
    try:
        onnxruntime.InferenceSession(_probe(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return False
    finally:
        options.optimized_model_filepath, options.enable_profiling, options.log_severity_level = writes
    return True


def _probe() -> bytes:
    float_, int_ = TensorProto.FLOAT, TensorProto.INT32
    node = helper.make_node(
        "MoeInitRoutingV2Grad",
        ["g", "i"],
        ["y"],
        domain=DOMAIN,
        top_k=1,
        drop_pad_mode=0,
        active_num=0,
    )
    graph = helper.make_graph(
        [node],
        "probe",
        [
            helper.make_tensor_value_info("g", float_, [1, 1]),
            helper.make_tensor_value_info("i", int_, [1]),
        ],
        [helper.make_tensor_value_info("y", float_, [1, 1])],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    data: bytes = model.SerializeToString()
    return data
