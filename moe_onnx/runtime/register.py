"""Making the Python kernels known to plain onnxruntime sessions."""

from __future__ import annotations

import functools

import onnxruntime
from onnx import TensorProto, helper

from moe_onnx.adapters import python_ops
from moe_onnx.spec import DOMAIN, VERSION

_MARK = "moe_onnx.python_ops"


def register(sess_options: onnxruntime.SessionOptions) -> onnxruntime.SessionOptions:
    """Register the Python kernels on session options, so that plain sessions can use them.

    May be called any number of times, also on options on which
    ``register_custom_ops_library(onnxruntime_extensions.get_library_path())`` is called before or after.

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
    return sess_options


def register_the_library_once() -> None:
    """Make a second registration of onnxruntime-extensions on one options object do nothing.

    onnxruntime takes it, and then makes no session of such options ("domain already registered").
    Other libraries are registered as ever.
    """
    original = onnxruntime.SessionOptions.register_custom_ops_library
    if python_ops.UNAVAILABLE or getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def register_custom_ops_library(self: onnxruntime.SessionOptions, library_path: str) -> None:
        is_ours = str(library_path) == python_ops.library_path()
        if is_ours and _is_marked(self):
            return
        original(self, library_path)
        if is_ours:
            self.add_session_config_entry(_MARK, "1")

    setattr(register_custom_ops_library, _MARK, True)
    onnxruntime.SessionOptions.register_custom_ops_library = register_custom_ops_library


def _is_marked(options: onnxruntime.SessionOptions) -> bool:
    try:
        return bool(options.get_session_config_entry(_MARK))
    except RuntimeError:
        return False  # no such entry


def _is_registered(options: onnxruntime.SessionOptions) -> bool:
    if _is_marked(options):
        return True
    # Registered before this package was imported: options do not tell which libraries are on them, but
    # whether a model of ours loads does.
    writes = options.optimized_model_filepath, options.enable_profiling, options.log_severity_level
    options.optimized_model_filepath, options.enable_profiling, options.log_severity_level = (
        "",
        False,
        4,
    )
    try:
        onnxruntime.InferenceSession(_probe(), options, providers=["CPUExecutionProvider"], enable_fallback=0)
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
