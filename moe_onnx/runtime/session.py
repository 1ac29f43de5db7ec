"""``moe_onnx.InferenceSession``: onnxruntime's session, with the operators of this package in it."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError, EncodeError

from moe_onnx.adapters import python_ops
from moe_onnx.errors import BodyCheckError, DtypeError, ModelError, MoeOnnxError
from moe_onnx.rewrite.legalize import BODY_DOMAIN, Legalized, legalize, uses_domain
from moe_onnx.runtime.interrupts import interrupts_deferred
from moe_onnx.runtime.native_errors import native_error
from moe_onnx.runtime.ort_values import BFLOAT16_TENSOR, NUMPY_DTYPES, arrays_of, to_ort_value
from moe_onnx.runtime.register import choose, register
from moe_onnx.runtime.routes import check_kernels

_FOLDER = "session.model_external_initializers_file_folder_path"
_TWICE = ("Conflicting with a registered kernel", "Domain already set in registry")
_RULE = re.compile(r"Name:'(?:_inlfunc_\w*?_)?(Moe\w+): ([^']+)'")


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """An ``onnxruntime.InferenceSession`` that runs models with ``ascend.moe`` operators.

    It registers what the model can use, fills in omitted attributes, absent optional inputs and
    missing function bodies, casts where a kernel lacks a dtype, and raises the errors of operators
    as what they are. bfloat16 goes in and out as ``ml_dtypes`` arrays. Models without such operators
    are passed on as they are.

    Args:
        path_or_bytes: A path, the bytes of a model, or a ``ModelProto``.
        sess_options: Session options; a library of kernels is registered on them if need be. What they
            have been given stays: use others for a session by other kernels.
        providers: As in onnxruntime; CPUExecutionProvider by default.
        provider_options: As in onnxruntime.
        kernels: ``"native"``: all operators by the library in C++ (all dtypes, all checks, errors that
            name position and value). ``"python"``: the backward operators as Python custom ops, with
            the same checks. ``"body"``: the function bodies only, in standard ops. ``"auto"``: what
            ``sess_options`` have already, else the first of these that is available.

    Attributes:
        moe_kernels: How many nodes each kind of kernel runs.
        moe_notes: What was changed in the model for it, and why.

    Raises:
        OptionError: If ``kernels`` is none of these, or ``sess_options`` have other kernels already.
        ModelError: If those kernels are not available here; says why.
        ModelError, AttributeValueError: If an ``ascend.moe`` node is wrong.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str] | onnx.ModelProto,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        kernels: str = "auto",
        **kwargs: Any,
    ) -> None:
        check_kernels(kernels)
        self._number = next(python_ops.SESSION_NUMBERS)
        self.moe_kernels: dict[str, int] = {"native": 0, "python": 0, "body": 0}
        self.moe_notes: list[str] = []
        options = sess_options if sess_options is not None else onnxruntime.SessionOptions()
        self._lock = threading.Lock() if _is_parallel(options) else None
        model, folder = _load(path_or_bytes)
        source: Any = path_or_bytes
        if model is not None and uses_domain(model):
            kernels = choose(kernels, sess_options, "native", "python", "body")
            done = _legalize(model, kernels, self._number)
            self.moe_kernels |= {
                "native": done.native_nodes,
                "python": done.python_nodes,
                "body": done.body_nodes,
            }
            self.moe_notes = done.notes
            if done.native_nodes or done.python_nodes:
                register(options, kernels)
            if folder is not None and _has_external_data(model):
                options.add_session_config_entry(_FOLDER, folder)
            source = _encode(done.model)
        elif isinstance(source, onnx.ModelProto):
            source = _encode(source)
        elif isinstance(source, os.PathLike):
            source = os.fspath(source)
        try:
            super().__init__(source, options, providers, provider_options, **kwargs)
        except Exception as error:
            if own := native_error(str(error)):
                raise own from error
            if not any(text in str(error) for text in _TWICE):
                raise
            raise ModelError(
                "The session options already had the library of onnxruntime-extensions registered, before "
                "the operators of moe_onnx were in it, or a library of kernels twice, before moe_onnx was "
                "imported. Import moe_onnx first and use new SessionOptions with moe_onnx.register."
            ) from error
        self._inputs = {arg.name: arg.type for arg in self.get_inputs()}
        self._outputs = {arg.name: arg.type for arg in self.get_outputs()}

    def run(self, output_names: Any, input_feed: Mapping[str, Any], run_options: Any = None) -> list[Any]:
        """As in onnxruntime. bfloat16 inputs and outputs are ``ml_dtypes.bfloat16`` arrays."""
        for name, value in input_feed.items():
            _check_feed(name, value, self._inputs)
        wanted = list(output_names) if output_names else list(self._outputs)
        types = {name: self._outputs.get(name, "") for name in wanted}
        if BFLOAT16_TENSOR not in (*self._inputs.values(), *types.values()):
            return self._guarded(super().run, output_names, input_feed, run_options)  # type: ignore[no-any-return]
        missing = [name for name in self._inputs if name not in input_feed]
        if missing:
            raise ModelError(f"Required inputs {missing} are missing from the feed {sorted(input_feed)}.")
        for name, kind in types.items():
            if kind and not kind.startswith("tensor("):
                raise ModelError(
                    f"Output '{name}' is a {kind}, which onnxruntime does not give out beside bfloat16. "
                    "Leave it out of output_names, or cast the bfloat16 inputs and outputs in the model."
                )
        feed = {n: to_ort_value(v, self._inputs.get(n, "")) for n, v in input_feed.items()}
        values = self._guarded(super().run_with_ort_values, wanted, feed, run_options)
        return arrays_of(wanted, values, feed)

    def run_with_ort_values(
        self, output_names: Any, input_dict_ort_values: Any, run_options: Any = None
    ) -> Any:
        """As in onnxruntime."""
        return self._guarded(super().run_with_ort_values, output_names, input_dict_ort_values, run_options)

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """As in onnxruntime."""
        self._guarded(super().run_with_iobinding, iobinding, run_options)

    def run_with_ortvaluevector(
        self,
        run_options: Any,
        feed_names: Any,
        feeds: Any,
        fetch_names: Any,
        fetches: Any,
        fetch_devices: Any,
    ) -> None:
        """As in onnxruntime."""
        args = (run_options, feed_names, feeds, fetch_names, fetches, fetch_devices)
        self._guarded(super().run_with_ortvaluevector, *args)

    def run_async(
        self,
        output_names: Any,
        input_feed: Any,
        callback: Callable[..., Any],
        user_data: Any,
        run_options: Any = None,
    ) -> None:
        """As in onnxruntime; an operator's error comes as the text of the callback's error."""

        def checked(results: Any, data: Any, error: str) -> None:
            # Operators run in the thread that calls back, or in any of the pool when in parallel.
            parked = python_ops.POST.take(self._number, any_thread=self._lock is not None)
            if parked:
                results, error = [], str(_named(*parked[0]))
            elif own := native_error(error):
                error = str(own)
            callback(results, data, error)

        super().run_async(output_names, input_feed, checked, user_data, run_options)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "moe_onnx.InferenceSession cannot be pickled or copied. "
            "Send the model to the other process and build a session there."
        )

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run, and raise what the Python ops could not raise themselves."""
        # In parallel execution ops run in threads of the pool; one run at a time keeps it clear whose
        # errors are whose.
        with self._lock or nullcontext(), interrupts_deferred():
            return self._run_and_raise(call, args, any_thread=self._lock is not None)

    def _run_and_raise(self, call: Callable[..., Any], args: Sequence[Any], *, any_thread: bool) -> Any:
        failure: Exception | None = None
        result = None
        try:
            result = call(*args)
        except Exception as error:
            failure = error
        parked = python_ops.POST.take(self._number, any_thread=any_thread)
        if parked:
            raise _named(*parked[0]) from failure
        if failure is not None:
            if own := native_error(str(failure)):
                raise own from failure
            rule = _RULE.search(str(failure))
            if rule is None:
                raise failure
            raise BodyCheckError(
                f"{rule[1]}: {rule[2]}. The function body cannot say where; "
                'kernels="native" or kernels="python" can.',
                op=rule[1],
            ) from failure
        return result


def _named(node: str, error: BaseException) -> BaseException:
    """The error an op raised, with its node's name."""
    if isinstance(error, MoeOnnxError):
        error.node = node
        error.args = (f"{error} (node '{node}')",)
    else:
        error.add_note(f"raised in node '{node}'")
    return error


def _check_feed(name: str, value: Any, inputs: Mapping[str, str]) -> None:
    dtype = getattr(value, "dtype", None)
    kind = inputs.get(name, "")
    legal = NUMPY_DTYPES.get(kind)
    # onnxruntime's own message names no numpy dtype, and lists, OrtValues and the like are its affair.
    if isinstance(value, np.ndarray) and legal is not None and dtype not in legal:
        raise DtypeError(
            f"input '{name}' takes {kind}, numpy dtype {' or '.join(d.name for d in legal)}, got {dtype}. "
            "Convert it with .astype, or export the model for that dtype."
        )


def _legalize(model: onnx.ModelProto, kernels: str, number: int) -> Legalized:
    if kernels == "body":
        return legalize(model, route="body", body_domain=BODY_DOMAIN)
    return legalize(model, route=kernels, session=number)


def _load(source: Any) -> tuple[onnx.ModelProto | None, str | None]:
    """The model without its external data, and the folder that data is in."""
    if isinstance(source, onnx.ModelProto):
        return source, None
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        try:
            return onnx.load(path, load_external_data=False), os.path.dirname(os.path.abspath(path))
        except (DecodeError, OSError):
            return None, None  # not ONNX, or not there: onnxruntime says what it thinks of it
    try:
        return onnx.load_model_from_string(bytes(source)), None
    except (DecodeError, TypeError):
        return None, None


def _encode(model: onnx.ModelProto) -> bytes:
    try:
        data: bytes = model.SerializeToString()
        return data
    except (EncodeError, ValueError) as error:
        raise ModelError(
            "The model is larger than 2 GB, more than protobuf can hold. Save it with external data "
            "(onnx.save_model(..., save_as_external_data=True)) and pass its path."
        ) from error


def _is_parallel(options: onnxruntime.SessionOptions) -> bool:
    return bool(options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL)


def _has_external_data(model: onnx.ModelProto) -> bool:
    return any(t.data_location == onnx.TensorProto.EXTERNAL for t in model.graph.initializer)
