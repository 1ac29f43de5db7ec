"""The native kernels against the numpy reference, on random calls.

    python tests/native_fuzz.py --driver DRIVER --seconds 60      in the made-up runtime, see native/driver.cpp
    python tests/native_fuzz.py --library libascend_moe.so        in sessions of onnxruntime

Equal bits where the contract promises them, dot products within its bound; errors in the same words; inferred
shapes as the Python spec infers them; with a driver also the same at 1, 2 and 3 threads and by every vector table.
``--seed S --first N --count 1`` makes case N of seed S again.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from native_cases import MAKERS, make_case
from native_driver import Case, Result, Stopped, run

from moe_onnx.adapters.reference_evaluator import absent_output
from moe_onnx.errors import MoeOnnxError
from moe_onnx.operators import BY_NAME
from moe_onnx.spec import TensorInfo

# Outputs that are sums without a promised order, and the axis letter that is summed over.
DOTS = {
    ("MoeTokenUnpermuteWithRoutingMapGrad", 1): lambda inputs: inputs[0].shape[1],
    ("MoeFinalizeRoutingV2Grad", 1): lambda inputs: inputs[0].shape[1],
    ("MoeGroupedMatmul", 0): lambda inputs: inputs[0].shape[1],
    ("MoeGroupedMatmulWeightGrad", 0): lambda inputs: len(inputs[0]),
}
LARGE = 2_000_000  # elements or rows: nothing that is larger is run


def text_of(error: MoeOnnxError) -> str:
    """What the native status says of an error."""
    return f"{type(error).__name__} (aclnn {error.aclnn_status}): {error}"


def expected(case: Case) -> tuple[str, list[Any]] | None:
    """The error's text or the outputs; None for a call that is too large to be made."""
    spec = BY_NAME[case.op]
    try:
        # A session reads attributes when it is made, before there is any input.
        spec.check_attributes(case.attributes)
        infos = [None if a is None else TensorInfo(a.dtype.name, a.shape) for a in case.inputs]
        _, shapes = spec.check(infos, case.attributes)
        sizes = [size for info in shapes if info is not None for size in info.shape or () if isinstance(size, int)]
        if any(size > LARGE for size in [*sizes, *map(_elements, shapes)]):
            return None
        made = spec.reference(*case.inputs, **case.attributes)
    except MoeOnnxError as error:
        return text_of(error), []
    outputs = made if isinstance(made, tuple) else (made,)
    inputs = tuple(case.inputs)
    return "", [absent_output(spec, i, inputs) if value is None else value for i, value in enumerate(outputs)]


def _elements(info: TensorInfo | None) -> int:
    shape = () if info is None or info.shape is None else info.shape
    return int(np.prod([size for size in shape if isinstance(size, int)], dtype=object))


def inferred(case: Case) -> tuple[str, list[TensorInfo | None]]:
    """What the Python spec infers from what is known; a scalar looks to a runtime like an unknown shape."""
    spec = BY_NAME[case.op]
    infos: list[TensorInfo | None] = []
    for value, known in zip(case.inputs, case.known, strict=True):
        infos.append(TensorInfo("", None) if value is None else TensorInfo(value.dtype.name, known or None))
    while infos and case.inputs[len(infos) - 1] is None:
        infos.pop()
    try:
        spec.check_attributes(case.attributes)
        return "", spec.check(infos, case.attributes)[1]
    except MoeOnnxError as error:
        return text_of(error), []


def difference(case: Case, index: int, want: Any, got: Any) -> str:
    """What is wrong with an output, empty if it is right."""
    name = BY_NAME[case.op].outputs[index].name
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{name}: {got.dtype}{list(got.shape)} for {want.dtype}{list(want.shape)}"
    if got.tobytes() == want.tobytes():
        return ""
    wrong = _wrong(got, want)
    a, b = got.reshape(-1).astype(np.float64), want.reshape(-1).astype(np.float64)
    if (case.op, index) in DOTS:
        wrong &= ~_within_bound(case, index, want, a, b)
    if not wrong.any():
        return ""
    at = int(wrong.argmax())
    where = [int(i) for i in np.unravel_index(at, want.shape)]
    return f"{name}{where}: {a[at]!r} for {b[at]!r}, {int(wrong.sum())} of {wrong.size} wrong"


def _wrong(got: Any, want: Any) -> Any:
    """Where bits differ; which NaN it is does not matter."""
    differ = got.reshape(-1).view(f"u{got.itemsize}") != want.reshape(-1).view(f"u{want.itemsize}")
    with np.errstate(all="ignore"):
        return differ & ~(np.isnan(got.reshape(-1)) & np.isnan(want.reshape(-1)))


def _within_bound(case: Case, index: int, want: Any, a: Any, b: Any) -> Any:
    # The sum of the products' magnitudes is what the reference makes of magnitudes.
    spec = BY_NAME[case.op]
    is_float = [x is not None and "float" in x.dtype.name for x in case.inputs]
    inputs = [np.abs(x.astype(np.float64)) if f else x for x, f in zip(case.inputs, is_float, strict=True)]
    magnitudes = spec.reference(*inputs, **case.attributes)
    magnitudes = (magnitudes if isinstance(magnitudes, tuple) else (magnitudes,))[index].reshape(-1)
    wide = 2.0**-52 if case.inputs[0].dtype == np.float64 else 2.0**-23
    info = ml_dtypes.finfo(want.dtype)
    most = min(float(info.max), float(np.finfo(np.float32 if wide > 1e-10 else np.float64).max))
    with np.errstate(all="ignore"):
        # Both have the bound's error, and each rounds once more; a product may be lost below the smallest number.
        terms = DOTS[case.op, index](case.inputs)
        bound = 2 * terms * (wide * magnitudes + 1e-44) + float(info.eps) * np.abs(b) + 2 * float(info.tiny)
        # Where a partial sum may overflow, the order decides between infinity, NaN and a number.
        return (np.abs(a - b) <= bound) | ~(magnitudes < 0.4 * most)


def problem(case: Case, want: tuple[str, list[Any]], result: Result) -> str:
    """What is wrong with a result, empty if nothing is."""
    error, infos = inferred(case)
    if error != result.inferred_error:
        return f"inferred: {result.inferred_error!r}\n      for: {error!r}"
    for at, (info, found) in enumerate(zip(infos, result.inferred, strict=False)):
        if info is None:
            continue
        shape = tuple(size if isinstance(size, int) else -1 for size in info.shape or ())
        if (info.dtype, shape) != found and not error:
            return f"inferred output {at}: {found} for {(info.dtype, shape)}"
    if want[0] != result.error:
        return f"says {result.error!r}\n for {want[0]!r}"
    for at, (wanted, value) in enumerate(zip(case.wanted, want[1], strict=False)):
        found = result.outputs[at] if at < len(result.outputs) else None
        if wanted != (found is not None):
            return f"output {at} {'is missing' if wanted else 'was not asked for'}"
        if wanted and (text := difference(case, at, value, found)):
            return text
    return ""


def session_result(library: str, case: Case, threads: int = 1) -> str | list[Any] | None:
    """The outputs in a session of onnxruntime, or what it says; None where it refuses before the library can."""
    import onnxruntime as ort
    from routes import make_model

    from moe_onnx.runtime.ort_values import to_numpy, to_ort_value

    spec = BY_NAME[case.op]
    missing = any(v is None and not a.optional for a, v in zip(spec.inputs, case.inputs, strict=True))
    indices = [(a.dtypes, v) for a, v in zip(spec.inputs, case.inputs, strict=True) if v is not None]
    if missing or any(dtypes == ("int32",) and value.dtype != np.int32 for dtypes, value in indices):
        return None
    try:
        session = _session(library, make_model(case.op, case.inputs, case.attributes).SerializeToString(), threads)
        feeds = {a.name: to_ort_value(v) for a, v in zip(spec.inputs, case.inputs, strict=True) if v is not None}
        return [to_numpy(value) for value in session.run_with_ort_values(None, feeds)]
    except (ort.capi.onnxruntime_pybind11_state.Fail, ValueError, RuntimeError) as error:
        return str(error)
    except Exception as error:
        if type(error).__module__.startswith("onnxruntime"):
            return str(error)
        raise


@functools.lru_cache(maxsize=64)
def _session(library: str, model: bytes, threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(library)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def session_problem(library: str, case: Case, want: tuple[str, list[Any]], threads: int = 1) -> str:
    """What is wrong with a call in a session of onnxruntime, empty if nothing is."""
    found = session_result(library, case, threads)
    if found is None:
        return ""
    if isinstance(found, str) or want[0]:
        agree = isinstance(found, str) and want[0] and want[0] in found
        return "" if agree else f"says {found!r}\n for {want[0]!r}"
    texts = [difference(case, at, value, got) for at, (value, got) in enumerate(zip(want[1], found, strict=True))]
    return "; ".join(filter(None, texts))


def made_cases(seed: int, first: int, count: int, ops: list[str]) -> list[tuple[Case, tuple[str, list[Any]]]]:
    """Cases with what is expected of them, those that are too large left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        cases = [make_case(seed, number, ops) for number in range(first, first + count)]
        return [(case, want) for case in cases if (want := expected(case)) is not None]


def driver_problems(
    driver: Path, made: list[Any], tables: tuple[str, ...], threads: tuple[int, ...]
) -> list[tuple[Case, str]]:
    """What the driver gets wrong, by every vector table."""
    cases, found = [case for case, _ in made], []
    before: dict[int, Result] = {}
    for table in tables:
        results = _results(driver, cases, threads, table, found)
        for case, want in made:
            if (result := results.get(case.number)) and (text := problem(case, want, result)):
                found.append((case, f"{text} ({table or 'best vectors'})"))
            elif result and (other := before.get(case.number)) and not _same(result, other):
                found.append((case, f"other bits by the vectors {table or 'best'} than by {tables[0]}"))
        before = before or results
    return found


def _results(
    driver: Path, cases: list[Case], threads: tuple[int, ...], table: str, found: list[tuple[Case, str]]
) -> dict[int, Result]:
    """Results by the cases' numbers. A call that ends the driver is one of the problems ``found``."""
    results: dict[int, Result] = {}
    while cases:
        try:
            made, stop = run(driver, cases, threads, table), ""
        except Stopped as stopped:
            made, stop = stopped.args
        results |= {case.number: result for case, result in zip(cases, made, strict=False)}
        if stop:
            lines = stop.splitlines()
            text = "\n".join([*lines[:30], *lines[30:][-1:]])
            found.append((cases[min(len(made), len(cases) - 1)], f"the driver stopped ({table or 'best'}): {text}"))
        cases = cases[len(made) + 1 :]
    return results


def _same(one: Result, other: Result) -> bool:
    pairs = zip(one.outputs, other.outputs, strict=False)
    return not any(_wrong(a, b).any() for a, b in pairs if a is not None and b is not None)


def fuzz(find: Callable[[list[Any]], list[tuple[Case, str]]], options: argparse.Namespace) -> int:
    """Run until the time is up; print what is wrong, and how much was run."""
    begin, number, counts = time.monotonic(), options.first, Counter[str]()
    wrong: list[tuple[Case, str]] = []
    while time.monotonic() - begin < options.seconds and len(wrong) < 10:
        count = min(options.count or options.batch, options.batch)
        made = made_cases(options.seed, number, count, options.operators)
        number += count
        counts.update(f"{case.op} {'refused' if want[0] else 'made'}" for case, want in made)
        wrong += find(made)
        if options.count and number >= options.first + options.count:
            break
    for case, text in wrong[:10]:
        print(f"{case}\n  seed {options.seed} operators {','.join(options.operators)}\n  {text}\n")
    for name, value in sorted(counts.items()):
        print(f"{value:8d} {name}")
    print(f"{sum(counts.values())} calls in {time.monotonic() - begin:.0f} s, {len(wrong)} wrong")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--driver", type=Path, help="a built native/driver.cpp")
    parser.add_argument("--library", help="a built library, for sessions of onnxruntime")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=0, help="so many cases, all until the time is up")
    parser.add_argument("--batch", type=int, default=200, help="cases in one process of the driver")
    parser.add_argument("--operators", type=lambda text: text.split(","), default=list(MAKERS))
    parser.add_argument("--vectors", type=lambda text: tuple(text.split(",")), default=("baseline", "avx2", ""))
    parser.add_argument("--threads", type=lambda text: tuple(map(int, text.split(","))), default=(1, 2, 3))
    options = parser.parse_args()
    if options.driver:
        return fuzz(lambda made: driver_problems(options.driver, made, options.vectors, options.threads), options)

    def by_session(made: list[Any]) -> list[tuple[Case, str]]:
        texts = [(case, session_problem(options.library, case, want)) for case, want in made]
        return [(case, text) for case, text in texts if text]

    return fuzz(by_session, options)


if __name__ == "__main__":
    sys.exit(main())
