"""Token files become batches; what cannot be one is refused with file, position and value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moe_onnx
from moe_onnx.errors import DataError, OptionError

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 1000, 400)


def dataset(source: object, **options: object) -> moe_onnx.TokenDataset:
    options = {"batch_size": 3, "sequence_length": 8, "vocab_size": 1000, **options}
    return moe_onnx.TokenDataset(source, **options)  # type: ignore[arg-type]


def test_kinds_of_files(tmp_path: Path) -> None:
    text = "Größe, and 日本語\n" * 20
    (tmp_path / "a.txt").write_text(text, "utf-8")
    assert bytes(dataset(tmp_path / "a.txt", vocab_size=256).tokens) == text.encode()
    np.save(tmp_path / "a.npy", IDS.astype(np.int32))
    assert dataset(tmp_path / "a.npy").tokens.tolist() == IDS.tolist()
    for dtype in ("uint16", "uint32", "int32"):
        IDS.astype(np.dtype(dtype).newbyteorder("<")).tofile(tmp_path / "a.bin")
        found = dataset(str(tmp_path / "a.bin"), dtype=dtype)
        assert found.tokens.tolist() == IDS.tolist() and len(found) == 400
        assert isinstance(found.tokens, np.memmap)
    IDS.astype("<u2").tofile(tmp_path / "b.bin")
    assert dataset(tmp_path / "b.bin").tokens.tolist() == IDS.tolist()


def test_batches_are_crops_of_the_first_part() -> None:
    data = dataset(np.arange(400), eval_fraction=0.1)
    starts = set()
    for _ in range(200):
        ids = data.next_batch()["input_ids"]
        assert ids.shape == (3, 8) and ids.dtype == np.int64 and ids.flags.c_contiguous
        assert (np.diff(ids, axis=1) == 1).all()
        starts.update(ids[:, 0].tolist())
    assert min(starts) == 0 and max(starts) == 360 - 8


def test_evaluation_never_meets_training() -> None:
    data = dataset(np.arange(400), eval_fraction=0.1)
    first, again = (list(data.eval_batches(4)) for _ in range(2))
    assert all(np.array_equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))
    ids = np.concatenate([b["input_ids"] for b in first])
    assert len(first) == 4 and ids.min() == 360 and ids.max() == 399
    assert sum(len(b["input_ids"]) for b in data.eval_batches(1000)) == 33  # no crop twice
    with pytest.raises(DataError, match="nothing is held out"):
        list(dataset(np.arange(400), eval_fraction=0.0).eval_batches(1))
    assert dataset(np.arange(400), eval_fraction=0.001).num_train == 392  # a whole sequence at least


def test_the_order_is_the_seeds_and_can_be_gone_on_from() -> None:
    def take(data: moe_onnx.TokenDataset, count: int) -> list[list[list[int]]]:
        return [data.next_batch()["input_ids"].tolist() for _ in range(count)]

    data = dataset(IDS, seed=3)
    take(data, 5)
    state = data.state_dict()
    rest = take(data, 5)
    other = dataset(IDS, seed=9)
    assert take(other, 1) != rest[:1]
    other.load_state_dict(state)
    assert take(other, 5) == rest
    assert take(dataset(IDS, seed=3), 10)[5:] == rest


def test_a_sequence_as_long_as_the_text() -> None:
    data = dataset(np.arange(8), eval_fraction=0)
    assert data.next_batch()["input_ids"].tolist() == [list(range(8))] * 3


BAD: list[tuple[str, bytes, dict[str, object], str]] = [
    ("a.txt", b"", {}, "a.txt: is empty"),
    (
        "a.txt",
        b"abc",
        {},
        "a.txt: its 3 tokens are too few for a sequence of 8 beside 8 held out for evaluation",
    ),
    ("a.txt", b"abc", {"eval_fraction": 0}, "a.txt: its 3 tokens are too few"),
    ("a.txt", b"a" * 50 + b"\xff", {"vocab_size": 128}, r"in \[0, 128\), got 255 at position 50"),
    ("a.bin", b"abc", {}, "its 3 bytes are no whole number of uint16 tokens"),
    ("a.bin", b"\xff\xff\xff\xff" * 30, {"dtype": "int32"}, r"in \[0, 1000\), got -1 at position 0"),
    ("a.npy", b"nothing of the kind", {}, "a.npy: cannot be read"),
]


@pytest.mark.parametrize(("name", "content", "options", "message"), BAD)
def test_bad_files(
    name: str, content: bytes, options: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        dataset(tmp_path / name, **options)


def test_bad_arrays_and_paths(tmp_path: Path) -> None:
    np.save(tmp_path / "two.npy", np.zeros((4, 50), np.int64))
    with pytest.raises(DataError, match=r"integers in one dimension, found int64 \[4, 50\]"):
        dataset(tmp_path / "two.npy")
    np.save(tmp_path / "float.npy", np.zeros(50))
    with pytest.raises(DataError, match="found float64"):
        dataset(tmp_path / "float.npy")
    with pytest.raises(DataError, match="tokens: is empty"):
        dataset(np.zeros(0, np.int64))
    with pytest.raises(DataError, match="nowhere.txt: cannot be read"):
        dataset(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="cannot be read"):
        dataset(tmp_path)


def test_a_bad_token_far_into_a_file() -> None:
    ids = np.zeros((1 << 22) + 100, np.uint16)
    ids[(1 << 22) + 7] = 1000
    with pytest.raises(DataError, match="got 1000 at position 4194311"):
        dataset(ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"sequence_length": 1}, "sequence_length must be an integer >= 2, got 1"),
        ({"batch_size": True}, "got True"),
        ({"eval_fraction": 1.0}, r"eval_fraction must be in \[0, 1\)"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dataset(IDS, **options)


def test_dtype_is_for_bin_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    with pytest.raises(OptionError, match="dtype is for .bin files only"):
        dataset(tmp_path / "a.txt", dtype="uint16")
    with pytest.raises(OptionError, match="one of uint16, uint32, int32, got 'float32'"):
        dataset(tmp_path / "a.bin", dtype="float32")
