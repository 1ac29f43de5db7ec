"""Tensors of a device against ours: metrics by hand, limits as published, nothing missed, nothing misread."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import moe_onnx
import moe_onnx.validation.device.golden
from moe_onnx.cli import main
from moe_onnx.validation.device.measure import histogram_labels, measure
from moe_onnx.validation.device.standards import LEVELS, STANDARDS

X = np.array([[1.0, -2.0, 4.0], [0.5, 0.0, 8.0]], np.float32)


def compared(expected: Any, actual: Any, **options: Any) -> Any:
    done = moe_onnx.compare({"x": expected}, {"x": actual}, **options)
    assert len(done.rows) == 1
    return done.rows[0]


def test_metrics_by_hand() -> None:
    actual = np.array([[1.0, -2.5, 4.0], [0.5, 0.0, 8.0]], np.float32)
    e = compared(X, actual).errors
    assert e.mare == 0.5 / (2 + 1e-7)
    assert e.mere == pytest.approx(e.mare / 6, rel=1e-12)
    assert e.rmse == pytest.approx(math.sqrt(0.25 / 6), rel=1e-12)
    assert e.max_abs == 0.5
    assert e.exceeding == 1 / 6
    assert e.worst == (((0, 1), -2.0, -2.5),)
    assert e.cosine == pytest.approx((1 + 5 + 16 + 0.25 + 64) / math.sqrt(85.25 * 87.5), rel=1e-12)
    assert sum(e.histogram) == 6 and e.histogram[0] == 5
    assert histogram_labels()[e.histogram.index(1)] == "1e-1 to 1e0"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_metrics_equal_a_loop_over_elements(dtype: str) -> None:
    """Also over several pieces, with NaN, infinities, small elements."""
    rng = np.random.default_rng(3)
    expected = rng.standard_normal(500) * 10.0 ** rng.integers(-8, 3, 500)
    actual = (expected * (1 + rng.standard_normal(500) * 1e-3)).astype(dtype)
    expected[7], actual[7] = np.nan, np.nan
    expected[8], actual[8] = np.inf, np.inf
    expected[9], actual[10], actual[11] = np.nan, np.inf, np.nan
    standard = STANDARDS[dtype]
    e = measure(expected, actual, standard)
    relative, absolute, small, odd = [], [], 0, 0
    for a, b in zip(expected.tolist(), actual.astype(np.float64).tolist(), strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            odd += not (a == b or (math.isnan(a) and math.isnan(b)))
            continue
        relative.append(abs(b - a) / (abs(a) + 1e-7))
        absolute.append(abs(b - a))
        small += abs(a) < standard.small and abs(b - a) > standard.small_error
    assert (e.non_finite, e.small_wrong) == (odd, small) == (3, small)
    assert e.mare == max(relative) and e.max_abs == max(absolute)
    assert e.mere == pytest.approx(sum(relative) / len(relative), rel=1e-12)
    assert e.rmse == pytest.approx(math.sqrt(sum(a * a for a in absolute) / len(absolute)), rel=1e-12)
    assert e.exceeding == pytest.approx(sum(r >= standard.threshold for r in relative) / len(relative))


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((40, 50)).astype(np.float32)
    actual = expected + rng.standard_normal((40, 50)).astype(np.float32) * np.float32(1e-4)
    actual[39, 49] = np.nan
    whole = measure(expected, actual, STANDARDS["float32"])
    monkeypatch.setattr("moe_onnx.validation.device.measure._PIECE", 77)
    parts = measure(expected, actual, STANDARDS["float32"])
    assert repr(parts.worst) == repr(whole.worst) and parts.worst[0][0] == (39, 49)
    assert (parts.histogram, parts.mare, parts.non_finite) == (whole.histogram, whole.mare, 1)
    assert parts.mere == pytest.approx(whole.mere, rel=1e-12)


FLOAT8 = [("float8_e4m3fn", 3), ("float8_e5m2", 2)]


@pytest.mark.parametrize(("dtype", "k"), [("float16", 10), ("bfloat16", 7), ("float32", 13), *FLOAT8])
def test_the_single_benchmark_is_the_published_one(dtype: str, k: int) -> None:
    """MERE below 2^-k, MARE below ten times that; the dtype is the device's."""
    one = np.ones(1000, np.float64)
    scale = np.dtype(dtype).type
    for error, ok in ((0.9 * 2.0**-k, True), (1.1 * 2.0**-k, False)):  # all elements: MERE
        actual = (one * (1 + error)).astype(np.float64)
        with np.errstate(all="ignore"):
            row = moe_onnx.compare({"x": one}, {"x": actual}, threshold=2.0**-k).rows[0]
        assert row.ok is ok and (ok or "MERE" in row.failures[0])
    for times, ok in ((8, True), (12, False)):  # one element: MARE
        actual = one.astype(dtype)
        actual[17] = scale(1 + times * 2.0**-k)
        row = compared(one, actual)
        assert row.ok is ok and (ok or ["MARE" in f for f in row.failures] == [True])


def test_the_double_benchmark_is_the_published_one() -> None:
    assert {k: (v.mare, v.mere, v.rmse, v.small) for k, v in LEVELS.items()} == {
        "L0": (10, 2, 2, 2),
        "L1": (5, 1.5, 1.5, 2),
        "L2": (2, 1.2, 1.2, 2),
    }
    one = np.ones(100)
    second = one.astype(np.float32)
    second[::2] += np.float32(2**-10)

    def ratio_of(error: float, level: str) -> Any:
        actual = one.astype(np.float32)
        actual[::2] += np.float32(error)
        return compared(one, actual, benchmark={"x": second}, level=level)

    assert ratio_of(1.4 * 2**-10, "L1").ok and not ratio_of(1.4 * 2**-10, "L2").ok
    assert not ratio_of(1.6 * 2**-10, "L1").ok and ratio_of(1.6 * 2**-10, "L0").ok
    row = ratio_of(1.6 * 2**-10, "L1")
    assert row.ratios == pytest.approx((1.6, 1.6, 1.6), rel=1e-3)
    assert [failure.split()[0] for failure in row.failures] == ["MERE", "RMSE"]
    assert ratio_of(2**-10, "L2").ok  # as good as the benchmark, far above the single limits
    assert not compared(one, second).ok


def test_small_elements_are_counted_apart() -> None:
    """A tiny expected value makes any error a huge relative one: the double benchmark counts it instead."""
    expected = np.concatenate([np.ones(50), np.full(10, 1e-6)])
    second, actual = expected.astype(np.float32), expected.astype(np.float32)
    second[50:52] += np.float32(1e-7)
    actual[50:54] += np.float32(1e-7)
    assert compared(expected, actual, benchmark={"x": second}).ok  # 4 <= 2 x 2
    actual[54] += np.float32(1e-7)
    row = compared(expected, actual, benchmark={"x": second})
    assert row.failures == ("5 small elements wrong, the benchmark has 2",)


def test_what_cannot_be_compared_fails() -> None:
    """Nothing is dropped, cast or broadcast in silence."""
    assert "shape [3], expected [2, 3]" in compared(X, X[0]).failures[0]
    assert "dtype float32, expected int32" in compared(X.astype(np.int32), X).failures[0]
    assert "dtype int32, expected float32" in compared(X, X.astype(np.int32)).failures[0]
    integers = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert compared(integers, integers.astype(np.int64)).ok
    wrong = integers.copy()
    wrong[1, 2] = -1
    assert compared(integers, wrong).failures == ("1 of 6 differ, the first at [1, 2]: -1, expected 5",)
    assert not compared(np.array([True]), np.array([False])).ok
    done = moe_onnx.compare({"a": X, "b": X}, {"a": X, "c": X})
    assert [(row.name, row.ok) for row in done.rows] == [("a", True), ("b", False), ("c", False)]
    assert not moe_onnx.compare({"a": X, "b": X}, {"a": X, "b": X}, benchmark={"a": X}).ok
    assert moe_onnx.compare({"a": X, "b": X}, {"a": X, "c": X}, names={"b": "c"}).ok
    assert compared(X, X.T.copy().T).ok and compared(X[:, ::-1], X[:, ::-1]).ok
    assert compared(np.zeros((0, 3)), np.zeros((0, 3), np.float32)).ok
    assert not compared(X, np.zeros_like(X)).ok
    nan = X.copy()
    nan[0, 0] = np.nan
    assert compared(X, nan).failures == ("1 elements NaN or infinite on one side",)
    assert compared(nan, nan).ok


def test_options_are_refused() -> None:
    with pytest.raises(moe_onnx.OptionError, match="L0, L1, L2, got 'L3'"):
        moe_onnx.compare({"x": X}, {"x": X}, level="L3")
    with pytest.raises(moe_onnx.OptionError, match="threshold must be >= 0, got -1"):
        moe_onnx.compare({"x": X}, {"x": X}, threshold=-1)
    with pytest.raises(moe_onnx.OptionError, match="y are not among the expected"):
        moe_onnx.compare({"x": X}, {"x": X}, names={"y": "x"})


def test_the_older_double_thousandth() -> None:
    actual = np.ones(1000, np.float16)
    actual[:2] = np.float16(1.002)
    options = {"threshold": 1e-3, "max_exceeding": 1e-3}
    assert "0.20% exceed 0.001" in compared(np.ones(1000), actual, **options).failures[0]
    actual[1] = 1
    assert compared(np.ones(1000), actual, **options).ok


def test_every_kind_of_file(tmp_path: Path) -> None:
    bf16 = X.astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "a.npz", x=X)
    save_file({"x": X, "half": bf16}, tmp_path / "b.safetensors")
    np.save(tmp_path / "x.npy", X)
    assert moe_onnx.compare(tmp_path / "a.npz", tmp_path / "x.npy").ok  # one tensor each
    np.save(tmp_path / "none.npy", X[:0])
    assert moe_onnx.compare({"x": X[:0]}, tmp_path / "none.npy").ok
    done = moe_onnx.compare({"x": X, "half": X}, tmp_path / "b.safetensors")
    assert done.ok and {row.dtype for row in done.rows} == {"float32", "bfloat16"}
    for side in ("e", "d"):
        (tmp_path / side / "step0").mkdir(parents=True)
        np.save(tmp_path / side / "step0" / "grad.npy", X)
        np.savez(tmp_path / side / "more.npz", y=X, z=X)
    done = moe_onnx.compare(tmp_path / "e", tmp_path / "d")
    assert done.ok and [row.name for row in done.rows] == ["more/y", "more/z", "step0/grad"]


def test_a_golden_case_is_held_against_what_a_device_gave(tmp_path: Path) -> None:
    """Its inputs and attributes are not asked of the device; bfloat16 is not read as integers."""
    case = tmp_path / "case.npz"
    arguments = ["golden", "MoeInitRoutingV2Grad", "--dtype", "bfloat16", "-o", str(case)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    expected = moe_onnx.validation.device.golden.load_golden(case)[0]["output.grad_x"]
    row = moe_onnx.compare(case, {"grad_x": expected}).rows
    assert [(r.name, r.dtype, r.ok) for r in row] == [("grad_x", "bfloat16", True)]
    assert not moe_onnx.compare(case, {"grad_x": expected * 2}).ok
    np.savez(tmp_path / "mine.npz", meta=X)  # a tensor of that name is a tensor
    assert moe_onnx.compare({"meta": X}, tmp_path / "mine.npz").ok


def test_bfloat16_as_numpy_saves_it(tmp_path: Path) -> None:
    """Its own files have no name for the dtype: bytes of two, which are read as what they are."""
    np.savez(tmp_path / "npu.npz", x=X.astype(ml_dtypes.bfloat16))
    np.save(tmp_path / "npu.npy", X.astype(ml_dtypes.bfloat16))
    for name in ("npu.npz", "npu.npy"):
        rows = moe_onnx.compare({"x": X}, tmp_path / name).rows
        assert [(row.dtype, row.ok) for row in rows] == [("bfloat16", True)], rows


def write_safetensors(path: Path, **tensors: tuple[str, np.ndarray]) -> Path:
    """By the format's description: the libraries of numpy write no float8 in every version."""
    header, data = {}, b""
    for name, (dtype, value) in tensors.items():
        span = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": span}
        data += value.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(("name", "dtype"), [("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")])
def test_float8_out_of_safetensors(tmp_path: Path, name: str, dtype: str) -> None:
    """The bytes as they are, by their name in the file; the limits are of the dtype."""
    every = np.arange(256, dtype=np.uint8).view(dtype).reshape(16, 16)  # NaN and infinities too
    path = write_safetensors(
        tmp_path / "npu.safetensors", first=("F32", X), x=(name, every), z=(name, every[:0])
    )
    wide = every.astype(np.float32)
    done = moe_onnx.compare({"first": X, "x": wide, "z": wide[:0]}, path)
    assert done.ok and [row.dtype for row in done.rows] == ["float32", dtype, dtype]
    assert done.rows[1].errors is not None and done.rows[1].errors.max_abs == 0
    for steps, ok in ((1, True), (2, False)):  # all elements off by that many of the dtype's
        off = np.full(64, 1 + steps * float(ml_dtypes.finfo(dtype).eps)).astype(dtype)
        assert compared(np.ones(64), off).ok is ok


def test_a_dtype_that_numpy_has_not_is_named(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "npu.safetensors", scale=("F8_E8M0", np.ones(4, np.uint8)))
    # The oldest safetensors does not know this dtype itself, and reads nothing of such a file.
    named, unread = (
        "', tensor 'scale', is of dtype F8_E8M0",
        "' cannot be read as .safetensors: .*InvalidHeader",
    )
    with pytest.raises(moe_onnx.DataError, match=rf"npu\.safetensors({named}|{unread})"):
        moe_onnx.compare({"scale": np.ones(4)}, path)


def test_nothing_to_compare_is_no_pass(tmp_path: Path) -> None:
    np.savez(tmp_path / "empty.npz")
    with pytest.raises(moe_onnx.DataError, match="holds no tensors"):
        moe_onnx.compare(tmp_path / "empty.npz", tmp_path / "empty.npz")


def test_what_cannot_be_read_only_later_is_a_sentence_too(tmp_path: Path) -> None:
    """Tensors are read one at a time: a damaged one is found in the middle of the work."""
    np.savez(tmp_path / "objects.npz", x=np.array([{"a": 1}], object), allow_pickle=True)
    np.savez(tmp_path / "crc.npz", x=np.arange(1000))
    data = bytearray((tmp_path / "crc.npz").read_bytes())
    data[600] ^= 1
    (tmp_path / "crc.npz").write_bytes(data)
    for name in ("objects.npz", "crc.npz"):
        with pytest.raises(moe_onnx.DataError, match=f"{name}', tensor 'x', cannot be read"):
            moe_onnx.compare(tmp_path / name, tmp_path / name)
        result = CliRunner().invoke(main, ["compare", *[str(tmp_path / name)] * 2])
        assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_benchmark_must_be_sound_itself() -> None:
    nan = X.copy()
    nan[0, 0] = np.nan
    assert "the benchmark has 1 elements NaN" in compared(X, X, benchmark={"x": nan}).failures[0]
    assert "the benchmark is int32" in compared(X, X, benchmark={"x": X.astype(np.int32)}).failures[0]
    halves = X.astype(ml_dtypes.float8_e4m3fnuz)
    assert "there are no limits for float8_e4m3fnuz" in compared(halves, halves).failures[0]
    with pytest.raises(moe_onnx.OptionError, match="one of the single benchmark"):
        moe_onnx.compare({"x": X}, {"x": X}, benchmark={"x": X}, threshold=1e-3)
    assert compared(X, X, threshold=0).errors.exceeding == 0


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors"])
@pytest.mark.parametrize("data", [b"", b"garbage", b"PK\x03\x04 cut"])
def test_files_that_are_not_what_they_say(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(moe_onnx.DataError, match=name):
        moe_onnx.compare(tmp_path / name, {"x": X})


def test_pickled_objects_are_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(moe_onnx.DataError, match="x.npy"):
        moe_onnx.compare(tmp_path / "x.npy", {"x": X})


def test_the_command(tmp_path: Path) -> None:
    np.savez(tmp_path / "e.npz", grad=X, ids=np.arange(3))
    wrong = X.copy()
    wrong[1, 2] = 9
    np.savez(tmp_path / "a.npz", grad=wrong, ids=np.arange(3))

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(
            main, ["compare", *(str(tmp_path / a) if "." in a else a for a in arguments)]
        )

    result = run("e.npz", "e.npz")
    assert result.exit_code == 0 and "all within of 2 tensors" in result.output
    result = run("e.npz", "a.npz", "--json", "out.json")
    assert (
        result.exit_code == 1 and "[1, 2]: 9, expected 8" in result.output and "1e-1 to 1e0" in result.output
    )
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["ok"] is False and [row["ok"] for row in data["rows"]] == [False, True]
    assert data["rows"][0]["errors"]["worst"][0] == [[1, 2], 8.0, 9.0]
    np.savez(tmp_path / "nan.npz", grad=X * np.nan, ids=np.arange(3))
    result = run("e.npz", "nan.npz", "--json", "-")
    strict = json.loads(result.output, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert result.exit_code == 1 and strict["rows"][0]["ok"] is False
    assert run("e.npz", "a.npz", "--standard", "L2").exit_code == 2
    assert run("e.npz", "a.npz", "--json", "none/out.json").exit_code == 2
    assert run("e.npz", "missing.npz").exit_code == 2
    assert run("e.npz", "a.npz", "--rename", "nonsense").exit_code == 2
