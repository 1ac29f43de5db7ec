"""A checkpoint is whole or not there, and training goes on from it to the same bits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_graph import MOMENTUM, SHAPES, TinyGraph, V

import moe_onnx
from moe_onnx.errors import CheckpointError
from moe_onnx.runtime import checkpoint

TOKENS = np.random.default_rng(0).integers(0, V, 500).astype(np.uint16)
BOTH = pytest.mark.parametrize("assembly", ["grad+apply", "step"])


def session(assembly: str = "grad+apply", seed: int = 0) -> moe_onnx.TrainingSession:
    return moe_onnx.TrainingSession(TinyGraph(*assembly.split("+"), "eval"), lr=0.2, seed=seed)


def dataset(seed: int = 0) -> moe_onnx.TokenDataset:
    return moe_onnx.TokenDataset(TOKENS, batch_size=2, sequence_length=6, vocab_size=V, seed=seed)


def bits(state: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in state.items()}


@BOTH
def test_resumed_training_is_bit_equal(assembly: str, tmp_path: Path) -> None:
    """Parameters, optimizer state, step and the order of the data, in a session started otherwise."""
    whole, data = session(assembly), dataset()
    history = moe_onnx.train(whole, data, 9)
    first, data = session(assembly), dataset()
    start = moe_onnx.train(first, data, 4, checkpoint=tmp_path)
    second, data = session(assembly, seed=77), dataset(seed=88)
    about = moe_onnx.load_checkpoint(second, tmp_path)
    data.load_state_dict(about["data"])
    assert about["global_step"] == second.global_step == 4
    rest = moe_onnx.train(second, data, 9)
    assert [m["loss"] for m in start + rest] == [m["loss"] for m in history]
    assert bits(second.state_dict()) == bits(whole.state_dict())


def test_files_and_names(tmp_path: Path) -> None:
    train = session()
    train.step({"input_ids": [[1, 2, 3]]})
    folder = train.save_checkpoint(tmp_path / "a" / "b")
    assert folder == tmp_path / "a" / "b" / "step-00000001"
    assert sorted(os.listdir(folder)) == ["model.safetensors", "optimizer.safetensors", "trainer.json"]
    assert (folder.parent / "latest").read_text() == folder.name
    model = load_file(folder / "model.safetensors")
    assert model.keys() == SHAPES.keys()
    assert all(np.array_equal(model[k], v) for k, v in train.parameters().items())
    about = json.loads((folder / "trainer.json").read_text())
    assert about["config"] == train.manifest.config and about["optimizer"]["momentum"] == MOMENTUM
    assert about["moe_onnx"] == moe_onnx.__version__ and about["data"] is None


def test_the_last_two_are_kept_and_each_loads_by_itself(tmp_path: Path) -> None:
    train, data = session(), dataset()
    moe_onnx.train(train, data, 6, checkpoint=tmp_path, save_every=2)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000004", "step-00000006"]
    other = session()
    other.load_checkpoint(tmp_path / "step-00000004")
    assert other.global_step == 4
    other.load_checkpoint(tmp_path)
    assert other.global_step == 6
    other.load_checkpoint(tmp_path / "step-00000004")
    moe_onnx.save_checkpoint(other, tmp_path)  # the last saved counts, not the one furthest on
    train.load_checkpoint(tmp_path)
    assert train.global_step == 4
    moe_onnx.save_checkpoint(train, tmp_path)
    train.load_checkpoint(tmp_path)
    assert len(list(tmp_path.glob("step-*"))) == 2


class Killed(BaseException):
    """A process that ends here."""


def kill_points() -> list[str]:
    return ["os.replace", "os.fsync", "save_file", "shutil.rmtree", "Path.mkdir"]


@pytest.mark.parametrize("call", kill_points())
def test_a_kill_at_any_point_leaves_the_old_or_the_new(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends at the n-th call of each function that touches the disk, before or after it, for all n."""
    owner, name = {
        "os.replace": (os, "replace"),
        "os.fsync": (os, "fsync"),
        "save_file": (checkpoint, "save_file"),
        "shutil.rmtree": (shutil, "rmtree"),
        "Path.mkdir": (Path, "mkdir"),
    }[call]
    real: Callable[..., object] = getattr(owner, name)
    train, data = session(), dataset()
    for number in range(1, 4):  # so that there is an old one to remove
        moe_onnx.train(train, data, number, checkpoint=tmp_path / "start")
    old = bits(train.state_dict())
    train.step(data.next_batch())
    new = bits(train.state_dict())
    outcomes = set()
    for when in ("before", "after"):
        for at in range(1, 20):
            root = tmp_path / f"{when}-{at}"
            shutil.copytree(tmp_path / "start", root)
            calls = 0

            def killed(*args: object, at: int = at, when: str = when, **kwargs: object) -> object:
                nonlocal calls
                calls += 1
                if calls == at and when == "before":
                    raise Killed
                result = real(*args, **kwargs)
                if calls == at:
                    raise Killed
                return result

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, killed)
                try:
                    train.save_checkpoint(root)
                    finished = True
                except Killed:
                    finished = False
            loaded = session(seed=3)
            loaded.load_checkpoint(root)
            found = bits(loaded.state_dict())
            assert found in (old, new) and (found == new or not finished)
            outcomes.add(found == new)
            train.save_checkpoint(root)  # and what is left over is in nobody's way
            loaded.load_checkpoint(root)
            assert bits(loaded.state_dict()) == new and not list(root.glob(".new-*"))
            if finished:
                break
        else:
            pytest.fail("the save never finished")
    assert True in outcomes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a process")
def test_a_process_that_is_killed_while_saving(tmp_path: Path) -> None:
    """SIGKILL at random moments of saves without end: there is always a checkpoint that loads."""
    code = (
        "import sys, tiny_graph, moe_onnx\n"
        "s = moe_onnx.TrainingSession(tiny_graph.TinyGraph('grad', 'apply', 'eval'))\n"
        "s.save_checkpoint(sys.argv[1]); print('ready', flush=True)\n"
        "while True:\n"
        "    s.step({'input_ids': [[1, 2, 3]]}); s.save_checkpoint(sys.argv[1])\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    env = {**os.environ, "PYTHONPATH": paths}
    for delay in (0.011, 0.037):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        with process.stdout as out:
            assert out.readline() == b"ready\n"
        try:
            process.wait(delay)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        session().load_checkpoint(tmp_path)


def saved(folder: Path) -> tuple[moe_onnx.TrainingSession, Path]:
    train = session()
    train.step({"input_ids": [[1, 2, 3]]})
    return train, train.save_checkpoint(folder)


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x41
    path.write_bytes(data)


HARM: list[tuple[str, Callable[[Path], object], str]] = [
    ("truncated", lambda f: os.truncate(f / "model.safetensors", 90), "model.safetensors: cannot be read"),
    (
        "emptied",
        lambda f: os.truncate(f / "optimizer.safetensors", 0),
        "optimizer.safetensors: cannot be read",
    ),
    ("flipped header", lambda f: flip(f / "model.safetensors", 3), "model.safetensors: cannot be read"),
    (
        "flipped data",
        lambda f: flip(f / "model.safetensors", -2),
        "model.safetensors: is not the file.*sha256",
    ),
    ("gone", lambda f: (f / "optimizer.safetensors").unlink(), "optimizer.safetensors: cannot be read"),
    ("no trainer.json", lambda f: (f / "trainer.json").unlink(), "latest: names 'step-00000001'"),
    ("half a trainer.json", lambda f: os.truncate(f / "trainer.json", 50), "trainer.json: cannot be read"),
    (
        "another JSON",
        lambda f: (f / "trainer.json").write_text("[]"),
        "'format' must be 'moe_onnx.checkpoint'",
    ),
    (
        "another version",
        lambda f: edit(f / "trainer.json", format_version=2),
        "'format_version' must be 1, found 2",
    ),
    (
        "a step that is none",
        lambda f: edit(f / "trainer.json", global_step="3"),
        "'global_step' .* found '3'",
    ),
    ("no files", lambda f: edit(f / "trainer.json", files=None), "'files' must be an object"),
    (
        "another config",
        lambda f: edit(f / "trainer.json", config={"kind": "MoeLMConfig", "vocab_size": 9}),
        "another config: 'vocab_size' expected 7, found 9",
    ),
    (
        "another optimizer",
        lambda f: edit(f / "trainer.json", optimizer={"kind": "AdamW"}),
        "another optimizer: 'kind' expected 'SGD', found 'AdamW'",
    ),
    (
        "another shape",
        lambda f: rewrite(
            f / "model.safetensors", lambda t: t.update({"bigram.bias": np.zeros(9, np.float32)})
        ),
        r"model.safetensors: tensor 'bigram.bias' expected float32 \[7\], found float32 \[9\]",
    ),
    (
        "another dtype",
        lambda f: rewrite(
            f / "model.safetensors", lambda t: t.update({"bigram.bias": np.zeros(V, np.float16)})
        ),
        r"'bigram.bias' expected float32 \[7\], found float16",
    ),
    (
        "a tensor missing",
        lambda f: rewrite(f / "optimizer.safetensors", lambda t: t.pop("bigram.bias.momentum_buffer")),
        "optimizer.safetensors: expected 2 tensors, found 1: 'bigram.bias.momentum_buffer' missing",
    ),
    (
        "a tensor too many",
        lambda f: rewrite(f / "model.safetensors", lambda t: t.update(more=np.zeros(1, np.float32))),
        "expected 2 tensors, found 3: 'more' unknown",
    ),
    (
        "files of another save",
        lambda f: rewrite(f / "model.safetensors", lambda t: t["bigram.bias"].__iadd__(1)),
        "is not the file that was saved",
    ),
]


@pytest.mark.parametrize(("harm", "message"), [h[1:] for h in HARM], ids=[h[0] for h in HARM])
def test_what_is_corrupt_or_foreign_is_refused_as_a_whole(
    harm: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    _, folder = saved(tmp_path)
    harm(folder)
    train = session(seed=4)
    train.step({"input_ids": [[3, 3]]})
    before = bits(train.state_dict())
    with pytest.raises(CheckpointError, match=message):
        train.load_checkpoint(tmp_path)
    assert bits(train.state_dict()) == before and train.global_step == 1


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no checkpoint in"):
        session().load_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be saved"):
        session().save_checkpoint(tmp_path / "file")


def test_a_bfloat16_file_is_foreign(tmp_path: Path) -> None:
    import ml_dtypes

    _, folder = saved(tmp_path)
    header = {n: {"dtype": "BF16", "shape": list(s), "data_offsets": [0, 0]} for n, s in SHAPES.items()}
    at = 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape)) * ml_dtypes.bfloat16(0).itemsize
        header[name]["data_offsets"] = [at, at + size]
        at += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    with pytest.raises(CheckpointError, match="model.safetensors"):
        session().load_checkpoint(tmp_path)


def test_data_order_of_other_tokens_is_refused() -> None:
    data = dataset()
    state = data.state_dict()
    other = moe_onnx.TokenDataset(TOKENS[::-1].copy(), batch_size=2, sequence_length=6, vocab_size=V)
    with pytest.raises(CheckpointError, match="another 'sha256_of_ends'"):
        other.load_state_dict(state)
    longer = moe_onnx.TokenDataset(TOKENS, batch_size=2, sequence_length=7, vocab_size=V)
    with pytest.raises(CheckpointError, match="'sequence_length': here it is 7, there it was 6"):
        longer.load_state_dict(state)
    with pytest.raises(CheckpointError, match="generator state is broken"):
        data.load_state_dict({**state, "generator": {"bit_generator": "PCG64"}})
    assert data.state_dict() == state
