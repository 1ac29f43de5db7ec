"""Making the kernels known to plain onnxruntime sessions.

Native and Python kernels are two implementations of one domain, and onnxruntime knows a domain once. It
takes a second library for it without a word, and then makes no session of such options: with "Domain
already set in registry", or "Conflicting with a registered kernel". So that is refused when it is done.
"""

from __future__ import annotations

import functools
import os

import onnxruntime
from onnx import TensorProto, helper

from moe_onnx.adapters import python_ops
from moe_onnx.errors import OptionError
from moe_onnx.kernels import native
from moe_onnx.runtime.routes import best, check_kernels
from moe_onnx.spec import DOMAIN, VERSION

_MARK = "moe_onnx.kernels"
_NAMES = {
    "native": "the native kernels of moe_onnx",
    "python": "onnxruntime-extensions, with the Python kernels of moe_onnx in it,",
}


def register(sess_options: onnxruntime.SessionOptions, kernels: str = "auto") -> onnxruntime.SessionOptions:
    """Register kernels on session options, so that plain sessions can use them.

    May be called any number of times, also on options on which ``register_custom_ops_library`` is
    called, before or after, with the same library.

    Args:
        sess_options: Options to register on.
        kernels: ``"native"``, ``"python"`` (operators of onnxruntime-extensions), or ``"auto"``: what
            the options have already, else native kernels if there are any, else Python ones.

    Returns:
        The same options.

    Raises:
        OptionError: If ``kernels`` is none of these, or the options have the other kind already.
        ModelError: If the kernels are not available here; says why, and what to install.
    """
    check_kernels(kernels, ("auto", "native", "python"))
    before = registered(sess_options)
    if kernels == "auto":
        kernels = _best_beside(before, "native", "python")
    if before == kernels:
        return sess_options
    if before:
        raise _conflict(before, kernels)
    path = native.native_library_path() if kernels == "native" else python_ops.library_path()
    sess_options.register_custom_ops_library(path)
    return sess_options


def choose(kernels: str, options: onnxruntime.SessionOptions | None, *order: str) -> str:
    """What ``kernels`` means where ``"auto"`` is what the options have already, else the first available."""
    if kernels != "auto":
        return kernels
    return _best_beside(registered(options) if options is not None else "", *order)


def _best_beside(before: str, *order: str) -> str:
    """The first available route, of those that options with the kernels ``before`` leave."""
    return best(*(route for route in order if not before or route in (before, "body")))


def registered(options: onnxruntime.SessionOptions) -> str:
    """Which kernels these options have: ``"native"``, ``"python"`` or ``""``."""
    mark = _mark(options)
    # Registered before this package was imported: options do not tell which libraries are on them, but
    # whether a model of ours loads does. No Python op takes 16 bits.
    if mark or not _loads(options, TensorProto.FLOAT):
        return mark
    return "native" if _loads(options, TensorProto.FLOAT16) else "python"


def register_each_once() -> None:
    """Make a second registration of one library on one options object do nothing, and one of both fail.

    Other libraries are registered as ever.
    """
    original = onnxruntime.SessionOptions.register_custom_ops_library
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def register_custom_ops_library(self: onnxruntime.SessionOptions, library_path: str) -> None:
        kernels, before = _kernels_in(library_path), _mark(self)
        if kernels and before == kernels:
            return
        if kernels and before:
            raise _conflict(before, kernels)
        original(self, library_path)
        if kernels:
            self.add_session_config_entry(_MARK, kernels)

    setattr(register_custom_ops_library, _MARK, True)
    onnxruntime.SessionOptions.register_custom_ops_library = register_custom_ops_library


def _kernels_in(path: str) -> str:
    """Which kernels a library holds, ``""`` if none of ours."""
    real = os.path.realpath(path)
    if not python_ops.UNAVAILABLE and real == os.path.realpath(python_ops.library_path()):
        return "python"
    return "native" if native.is_native_library(path) else ""


def _conflict(before: str, wanted: str) -> OptionError:
    return OptionError(
        f"These session options have {_NAMES[before]} registered already; {_NAMES[wanted]} cannot be added: "
        f"both are the domain '{DOMAIN}', and onnxruntime makes no session of options that have it twice. "
        "Use new SessionOptions for one of them. Where a model needs other operators of "
        "onnxruntime-extensions as well, run it without native kernels: with that library alone, or by "
        "moe_onnx.InferenceSession(..., kernels='python') or kernels='body'."
    )


def _mark(options: onnxruntime.SessionOptions) -> str:
    try:
        return str(options.get_session_config_entry(_MARK))
    except RuntimeError:
        return ""  # no such entry


def _loads(options: onnxruntime.SessionOptions, elem_type: int) -> bool:
    writes = options.optimized_model_filepath, options.enable_profiling, options.log_severity_level
    options.optimized_model_filepath, options.enable_profiling, options.log_severity_level = (
        "",
        False,
        4,
    )
    try:
        model, providers = _probe(elem_type), ["CPUExecutionProvider"]
        onnxruntime.InferenceSession(model, options, providers=providers, enable_fallback=0)
    except Exception:
        return False
    finally:
        options.optimized_model_filepath, options.enable_profiling, options.log_severity_level = writes
    return True


def _probe(elem_type: int = TensorProto.FLOAT) -> bytes:
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
            helper.make_tensor_value_info("g", elem_type, [1, 1]),
            helper.make_tensor_value_info("i", TensorProto.INT32, [1]),
        ],
        [helper.make_tensor_value_info("y", elem_type, [1, 1])],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    data: bytes = model.SerializeToString()
    return data
