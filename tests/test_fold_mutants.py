"""``fold`` on a graph of computed sizes that is changed in one thing: the same bits, or left as it is."""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np
import onnx
import pytest
from gradient_tools import runner as plain_runner
from mutant_forms import Feeds
from mutants import mutants, rewritten
from test_fuse import runner

TEXT = """
<ir_version: 10, opset_import: ["": 21]>
sizes (float[2, 6] x, float[T, 6] z, int64[T] n)
    => (float[A, B, C] y, float[D, E] v, float[F, G] w, float[I, J] u, int64[N] s, int64[M] r, int64[O, P] q)
<int64[1] two = {2}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] minus = {-1},
 int64[2] lengths = {2, 4},
 int64 first = {0}, int64 second = {1}, int64[4] c = {4, -7, 9, 2}, int64[2] turn = {1, 0}>
{
    z_shape = Shape (z)
    head = Slice (z_shape, zero, one, zero)
    tail = Constant <value_ints = [2, 3]> ()
    shape = Concat <axis = 0> (head, tail)
    y = Reshape (z, shape)
    parts = SplitToSequence <axis = 1> (z, lengths)
    v = SequenceAt (parts, second)
    same = Transpose <perm = [0, 1]> (z)
    wide = Unsqueeze (same, one)
    back = Squeeze (wide, one)
    back_shape = Shape (back)
    spread = Expand (back, back_shape)
    w = Max (spread)
    x_shape = Shape (x)
    last = Gather <axis = 0> (x_shape, second)
    half = Div (last, two)
    both = Concat <axis = 0> (minus, half)
    u = Reshape (z, both)
    some = Greater (c, zero)
    less = Sub (c, two)
    either = Where (some, less, c)
    one_n = Gather (n, zero)
    s = Mul (either, one_n)
    pair = Slice (c, zero, two)
    put = ScatterElements <axis = 0> (c, turn, pair)
    sums = CumSum (put, first)
    r = Add (sums, one_n)
    places = NonZero (some)
    q = Add (places, one_n)
}
"""


def feeds() -> Feeds:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 6)).astype(np.float32)
    return [
        {"x": x, "z": rng.standard_normal((many, 6)).astype(np.float32), "n": rng.integers(0, 5, many)}
        for many in (4, 2, 1)
    ]


def judged(model: onnx.ModelProto) -> str:
    done = rewritten(model, "fold")
    if isinstance(done, str):
        return done
    try:
        # As it stands: where a Reshape's sizes are all constants but one, which is of its input's shape,
        # onnxruntime 1.32 optimizes that one to -1, and takes what does not fit.
        old = plain_runner(model, plain=True)
    except Exception:  # of onnxruntime, for what is no model
        return "invalid"
    refused, new, ran = None, None, False
    try:
        new = runner(done, by_name=True)
    except Exception as error:  # of onnxruntime, which now sees what only a run would have seen
        refused = error
    for feed in feeds():
        try:
            want = old(feed)
        except Exception:  # of onnxruntime, for sizes that do not fit
            continue
        ran = True
        assert new is not None, refused
        for a, b in zip(want, new(**feed), strict=True):
            assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
    return "same" if ran else "invalid"


def check(part: int) -> Counter[str]:
    """One of so many mutants, the same ones whatever others there are."""
    counts: Counter[str] = Counter()
    for label, make in mutants(onnx.parser.parse_model(TEXT)):
        if zlib.crc32(label.encode()) % part:
            continue
        try:
            counts[judged(make())] += 1
        except (Exception, AssertionError) as error:
            raise AssertionError(label) from error
    return counts


def test_a_few_mutants() -> None:
    assert check(50)["same"] > 10


@pytest.mark.parity
def test_mutants() -> None:
    assert check(5)["same"] > 100


def test_what_a_node_that_is_no_constant_gives_is_not_known() -> None:
    make = dict(mutants(onnx.parser.parse_model(TEXT)))["Constant tail: value_ints = None"]
    assert judged(make()) == "invalid"


def test_the_places_of_a_number_are_left_to_the_runtime() -> None:
    text = TEXT.replace("Greater (c, zero)", "Greater (second, first)")
    assert text != TEXT
    assert judged(onnx.parser.parse_model(text)) == "same"
