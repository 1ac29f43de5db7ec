"""``fuse`` on models that differ from a known form in one thing: the same values, or left as they are.

No rewrite is verified here: what is accepted must be right by itself.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from mutant_forms import Feeds, forms
from mutants import mutants, rewritten
from test_fuse import runner

LONG = pytest.mark.parity
FORMS = forms()
# The default lane has no time for all of them.
QUICK = [form for form in FORMS if form.startswith(("batched", "sum", "microsoft", "dense, batched e"))]
# Each was rewritten to something else, or ended in no error of ours.
ONCE_WRONG = [
    ("batched", "Unsqueeze column: column is an output"),
    pytest.param("unrolled, arange, add_behind", "MatMul raised0: input 0 behind Cast of 16 bit", marks=LONG),
    pytest.param(
        "unrolled, arange, add_behind", "ScatterElements part3: input 2 behind Cast of 16 bit", marks=LONG
    ),
    pytest.param("loop, turns", "Mul weighted: input 1 behind Cast of 16 bit", marks=LONG),
    ("dense, softmax, matmul", "Unsqueeze dense_row: input 1 = [1, 1]"),
    pytest.param("dense, where, einsum", "TopK top: input 1 = [0]", marks=LONG),
    pytest.param("loop, turns", "GatherND w: input 0 behind Abs", marks=LONG),
    pytest.param("loop, turns", "Gather rows: input 0 behind Neg", marks=LONG),
    pytest.param("loop, turns", "ReduceSum sum: input 0 behind swapped axes", marks=LONG),
    ("sum, added", "Div token: input 0 behind Cast of bool"),
    ("microsoft, relu", "MoE y: normalize_routing_weights = 2"),
    pytest.param("dense, scatter, add", "Shape shape: input 0 behind swapped axes", marks=LONG),
    ("permuted", "Unsqueeze column: input 0 is x"),
    pytest.param("permuted", "Mul weighted: input 0 is y_0", marks=LONG),
    pytest.param("permuted", "Expand zeros: input 1 is ids_shape", marks=LONG),
    pytest.param("permuted", "Split left: input 0 is probs", marks=LONG),
]


def judged(form: str, make: Callable[[], onnx.ModelProto], feeds: Feeds) -> str:
    """What became of a mutant: left, invalid or same; anything else fails."""
    model = make()
    done = rewritten(model, "fuse")
    if isinstance(done, str):
        return done
    try:
        old = runner(model, by_name=True)
    except Exception:  # of onnxruntime, for what is no model
        return "invalid"
    new = runner(done, by_name=True)
    names = {value.name for value in model.graph.input}
    ran = False
    for number, feed in enumerate(feeds):
        given = {name: value for name, value in feed.items() if name in names}
        try:
            want = old(**given)
        except Exception:  # of onnxruntime, for sizes that do not fit
            continue
        ran = True
        for a, b in zip(want, new(**given), strict=True):
            if "dense" in form:  # 0 times what is not finite is left out
                a, b = (np.where(np.isfinite(a), one, 0) for one in (a, b))
            assert_alike(a, b, f"feed {number}")
    return "same" if ran else "invalid"


def assert_alike(want: Any, got: Any, message: str) -> None:
    assert (want.shape, want.dtype) == (got.shape, got.dtype), message
    finite = want[np.isfinite(want)]
    scale = float(np.abs(finite.astype(np.float64)).max(initial=0))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * scale, equal_nan=True, err_msg=message)


def sample(form: str, many: int) -> list[tuple[str, Any]]:
    """Some mutants of a form, the same ones whatever others there are: of experts, the first and the last."""
    model, feeds = FORMS[form]()
    found = [one for one in mutants(model) if not one[0].split(":")[0].endswith(("1", "2", "3", "4"))]
    found.sort(key=lambda one: zlib.crc32(one[0].encode()))
    return [(label, (make, feeds)) for label, make in found[:many]]


def check(form: str, many: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for label, (make, feeds) in sample(form, many):
        try:
            counts[judged(form, make, feeds)] += 1
        except (Exception, AssertionError) as error:
            raise AssertionError(f"{form}, {label}") from error
    return counts


@pytest.mark.parametrize("form", QUICK)
def test_a_few_mutants(form: str) -> None:
    check(form, 3)


@LONG
@pytest.mark.parametrize("form", FORMS)
def test_mutants(form: str) -> None:
    counts = check(form, 18)
    assert counts["left"] and counts["left"] + counts["same"] > 9, counts


@pytest.mark.parametrize(("form", "label"), ONCE_WRONG)
def test_what_was_once_wrong(form: str, label: str) -> None:
    model, feeds = FORMS[form]()
    make = next(make for name, make in mutants(model) if name == label)
    assert judged(form, make, feeds) in ("left", "invalid", "same")
