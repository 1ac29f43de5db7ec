"""OpSpec -> onnxruntime-extensions Python custom op, behind the guard that keeps the process alive.

The only importer of ``onnxruntime_extensions``. The whole domain is registered once per process: a
second registration leaves dangling pointers in sessions that exist (SIGSEGV).

Each operator is registered in two domains. ``ascend.moe`` is for plain ``onnxruntime`` sessions. A
Python op is told neither its node nor its session, so ``moe_onnx.InferenceSession`` moves its nodes
to ``SESSION_DOMAIN``, whose ops take both as attributes; that is how an error finds its way back.

The package may be imported again, its modules deleted: the ops then still belong to the first import.
All they hold is a :class:`Post`, through which they ask the import that made the session.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from moe_onnx.adapters.interrupts import hold_off_inside, interrupt_later
from moe_onnx.adapters.reference_evaluator import absent_output
from moe_onnx.errors import ModelError
from moe_onnx.kernels import PYTHON_KERNELS, PythonKernel
from moe_onnx.operators import BY_NAME
from moe_onnx.operators._arrays import Array
from moe_onnx.spec import DOMAIN, OpSpec

# onnxruntime-extensions tells protobuf, by the environment, to be the one in pure Python (0.15). This process
# has loaded it already; in every process that it starts, reading a model would take five times as long.
_PROTOBUF = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
_protobuf_before = os.environ.get(_PROTOBUF)
try:
    import onnxruntime_extensions as _extensions
    from onnxruntime_extensions import PyCustomOpDef, onnx_op
    from onnxruntime_extensions._ocos import Opdef

    UNAVAILABLE = ""
except ImportError as _error:  # the numpy functions and the function bodies work without it
    UNAVAILABLE = f"onnxruntime-extensions cannot be imported ({_error}); pip install onnxruntime-extensions"
finally:
    if _protobuf_before is None:
        os.environ.pop(_PROTOBUF, None)
    else:
        os.environ[_PROTOBUF] = _protobuf_before

SESSION_DOMAIN = "moe_onnx.session"
SERVED = frozenset(kernel.name for kernel in PYTHON_KERNELS)
_LOG = logging.getLogger("moe_onnx")


_LOAD_BITS = 40  # sessions of one import


class Post:
    """What all imports of this package in a process share: it lives on the registered ops.

    ``serves`` are the functions that do what an op does, by the number of their import; errors that
    ops could not raise wait here until the session that ran them asks for them.
    """

    def __init__(self) -> None:
        self.serves: dict[int, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self._errors: list[tuple[int, int, str, BaseException]] = []

    def join(self, serve: Callable[..., Any]) -> itertools.count[int]:
        """Serve the sessions numbered by the returned counter, and all that have no number."""
        with self._lock:
            load = len(self.serves) + 1
            self.serves[load] = serve
        return itertools.count((load << _LOAD_BITS) + 1)

    def serve_of(self, session: int | None) -> Callable[..., Any]:
        """The function of the import that made the session; of the last one if no import did."""
        return self.serves.get((session or 0) >> _LOAD_BITS) or self.serves[len(self.serves)]

    def put(self, session: int, node: str, error: BaseException) -> None:
        """Keep an error for the session whose op raised it."""
        with self._lock:
            self._errors.append((session, threading.get_ident(), node, error))

    def take(self, session: int, *, any_thread: bool) -> list[tuple[str, BaseException]]:
        """Remove and return this session's errors, of this thread or of all."""
        if not self._errors:  # as after nearly every run; an op's error is there before its run ends
            return []
        me = threading.get_ident()
        with self._lock:
            mine = [e for e in self._errors if e[0] == session and (any_thread or e[1] == me)]
            self._errors = [e for e in self._errors if e not in mine]
        return [(node, error) for _, _, node, error in mine]


def _the_post() -> Post:
    """The one that an earlier import left on the ops, or a new one."""
    ops = [] if UNAVAILABLE else Opdef._odlist.values()
    found = (getattr(op.body, "moe_onnx_post", None) for op in ops)
    return next((post for post in found if post is not None), None) or Post()


def library_path() -> str:
    """Path of the custom-op library that serves the Python ops.

    Raises:
        ModelError: If onnxruntime-extensions is not installed.
    """
    if UNAVAILABLE:
        raise ModelError(f"The Python kernels are unavailable: {UNAVAILABLE}.")
    return str(_extensions.get_library_path())


def register_python_ops() -> None:
    """Register all Python kernels with onnxruntime-extensions, once per process."""
    if UNAVAILABLE:
        return
    caller = getattr(_extensions._ocos, "_on_pyop_invocation", None)
    if caller is not None:  # a private name: without it Ctrl-C is as dangerous as it was
        hold_off_inside(caller.__code__)
    if any(hasattr(op.body, "moe_onnx_post") for op in Opdef._odlist.values()):
        return  # the ops of an earlier import serve this one too
    for kernel in PYTHON_KERNELS:
        spec = BY_NAME[kernel.name]
        has_map = any(arg.type_var == "M" for arg in spec.inputs)
        for floats in (PyCustomOpDef.dt_float, PyCustomOpDef.dt_double):
            for maps in (PyCustomOpDef.dt_bool, PyCustomOpDef.dt_int8)[: 2 if has_map else 1]:
                types = {"T": floats, "TP": floats, "M": maps, "I": PyCustomOpDef.dt_int32}
                attrs = {a.name: PyCustomOpDef.dt_int64 for a in spec.attributes if a.kind != "ints"}
                inputs = [types[arg.type_var] for arg in spec.inputs]
                outputs = [types[arg.type_var] for arg in spec.outputs]
                dtype = np.dtype(np.float32 if floats == PyCustomOpDef.dt_float else np.float64)
                extra = {
                    "node": PyCustomOpDef.dt_string,
                    "session": PyCustomOpDef.dt_int64,
                    "restore_shape": PyCustomOpDef.dt_string,
                }
                for domain, more in ((DOMAIN, {}), (SESSION_DOMAIN, extra)):
                    onnx_op(
                        op_type=f"{domain}::{spec.name}",
                        inputs=inputs,
                        outputs=outputs,
                        attrs={**attrs, **more},
                    )(_op(spec.name, dtype))


class _Direct:
    """An output that skips the list detour of onnxruntime-extensions.

    The library calls ``.shape`` and ``.flatten().tolist()`` on what an op returns, and takes any
    sequence with a buffer for the list: 34 times faster than a list, and a fourteenth of its memory.
    """

    __slots__ = ("_array", "shape")

    def __init__(self, array: Array) -> None:
        self._array = array
        self.shape = array.shape

    def flatten(self) -> _Direct:
        return self

    def tolist(self) -> Array:
        return self._array


def _op(name: str, dtype: np.dtype[Any]) -> Callable[..., Any]:
    """The body of a Python op."""
    post = POST

    def body(*inputs: Array, **attributes: Any) -> Any:
        session = attributes.pop("session", None)
        return post.serve_of(session)(name, dtype, session, inputs, attributes)

    body.moe_onnx_post = post  # type: ignore[attr-defined]
    return body


def _serve(
    name: str,
    dtype: np.dtype[Any],
    session: int | None,
    inputs: tuple[Array, ...],
    attributes: dict[str, Any],
) -> Any:
    """What a Python op does. Whatever happens in it, no exception leaves: that ends the process."""
    spec, kernel = BY_NAME[name], _KERNELS[name]
    node = _text(attributes.pop("node", ""))
    try:
        shape = _text(attributes.pop("restore_shape", ""))
        if shape:
            attributes["restore_shape"] = [int(size) for size in shape.split(",")]
        result = kernel.run(*inputs, **attributes)
        values = list(result) if isinstance(result, tuple) else [result]
        full = [absent_output(spec, i, inputs) if v is None else v for i, v in enumerate(values)]
        return _pack([np.ascontiguousarray(value, dtype) for value in full])
    except BaseException as error:
        return _fail(spec, kernel, dtype, inputs, attributes, session, node, error)


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _pack(arrays: Sequence[Array]) -> Any:
    outputs = tuple(_Direct(array) for array in arrays)
    return outputs if len(outputs) > 1 else outputs[0]


def _fail(
    spec: OpSpec,
    kernel: PythonKernel,
    dtype: np.dtype[Any],
    inputs: Sequence[Array],
    attributes: dict[str, Any],
    session: int | None,
    node: str,
    error: BaseException,
) -> Any:
    """Park or log the error; give NaN of the right shape, or nothing at all if even that fails."""
    # A log handler may raise, or memory may be out: the process must live all the same.
    with suppress(BaseException):
        if session is not None:
            POST.put(session, node, error)
        elif isinstance(error, KeyboardInterrupt):
            interrupt_later()
    with suppress(BaseException):
        if session is None:
            _LOG.error("%s failed, its outputs are NaN: %s: %s", spec.name, type(error).__name__, error)
    try:
        return _pack([np.full(shape, np.nan, dtype) for shape in kernel.rough_shapes(inputs, attributes)])
    except BaseException:
        ranks = [len(arg.axes.split()) for arg in spec.outputs]
        return _pack([np.empty((0,) * rank, dtype) for rank in ranks])


_KERNELS = {kernel.name: kernel for kernel in PYTHON_KERNELS}
POST = _the_post()
SESSION_NUMBERS = POST.join(_serve)
