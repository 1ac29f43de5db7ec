"""The native kernels against the numpy reference, on random calls.

    python tests/native_fuzz.py --driver DRIVER --seconds 60      in a made-up runtime, see native/driver.cpp
    python tests/native_fuzz.py --library libascend_moe.so        in sessions of onnxruntime

Equal bits where the contract promises them, dot products within its bound; errors in the same words. With a
driver also inferred shapes as the Python spec has them, and the same at any number of threads and, but for
products, by every table of vectors.
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

import numpy as np
from native_cases import MAKERS
from native_compare import difference, expected, problem, wrong_bits
from native_damage import make_case
from native_driver import Case, Result, Stopped, run

from moe_onnx.operators import BY_NAME

# Products of few rows are rounded once an addition where the processor can.
BY_TABLE = {"MoeGroupedMatmul"}


def session_result(library: str, case: Case, threads: int = 1) -> str | list[Any] | None:
    """The outputs in a session of onnxruntime, or what it says; None where it refuses before the library."""
    from routes import make_model

    from moe_onnx.runtime.ort_values import to_numpy, to_ort_value

    given = []
    for arg, value in zip(BY_NAME[case.op].inputs, case.inputs, strict=True):
        if value is None and not arg.optional:
            return None
        if value is not None:
            given.append((arg.name, value))
            if arg.dtypes == ("int32",) and value.dtype != np.int32:
                return None
    attributes = {name: value for name, value in case.attributes.items() if value != []}  # as ONNX has it
    model = make_model(case.op, case.inputs, attributes).SerializeToString()
    try:
        feeds = {name: to_ort_value(value) for name, value in given}
        return [to_numpy(v) for v in _session(library, model, threads).run_with_ort_values(None, feeds)]
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        return str(error)


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
    pairs = enumerate(zip(want[1], found, strict=True))
    return "; ".join(filter(None, (difference(case, at, value, got) for at, (value, got) in pairs)))


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
            elif result and (other := before.get(case.number)) and not _same(case, result, other):
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
            last = cases[min(len(made), len(cases) - 1)]
            found.append((last, f"the driver stopped ({table or 'best vectors'}): {text}"))
        cases = cases[len(made) + 1 :]
    return results


def _same(case: Case, one: Result, other: Result) -> bool:
    if case.op in BY_TABLE:
        return True
    pairs = zip(one.outputs, other.outputs, strict=False)
    return not any(wrong_bits(a, b).any() for a, b in pairs if a is not None and b is not None)


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
    parser.add_argument("--vectors", default="baseline,avx2,", help="tables; an empty name is the best one")
    parser.add_argument("--threads", default="1,2,3")
    options = parser.parse_args()
    if options.driver:
        tables, threads = tuple(options.vectors.split(",")), tuple(map(int, options.threads.split(",")))
        return fuzz(lambda made: driver_problems(options.driver, made, tables, threads), options)

    import onnxruntime

    print(f"onnxruntime {onnxruntime.__version__} in {Path(onnxruntime.__file__).parent}")

    def by_session(made: list[Any]) -> list[tuple[Case, str]]:
        texts = [(case, session_problem(options.library, case, want)) for case, want in made]
        return [(case, text) for case, text in texts if text]

    return fuzz(by_session, options)


if __name__ == "__main__":
    sys.exit(main())
