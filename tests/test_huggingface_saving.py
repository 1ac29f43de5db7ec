"""From a checkpoint to a trained one and back: files, dtypes and names as they were, never half of them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_files as files
import numpy as np
import pytest
from huggingface_files import FIRST, INDEX, SECOND, checkpoint
from test_huggingface import contents, run

import moe_onnx
from moe_onnx import storage
from moe_onnx.huggingface import saving

KINDS = sorted(files.CONFIGS)
TRAINED = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and its export, to be copied: building takes most of a test's time."""
    folder = tmp_path_factory.mktemp("made")
    checkpoint(folder / "source", "mixtral", "bfloat16")
    moe_onnx.from_pretrained(folder / "source").save(folder / "model", assembly="grad+apply+forward")
    return folder


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "source", tmp_path / "source"))


@pytest.fixture
def model(made: Path, source: Path) -> Path:
    return Path(shutil.copytree(made / "model", source.parent / "model"))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    np.save(tmp_path / "ids.npy", np.tile(np.arange(16, dtype=np.uint16), 40))
    return tmp_path / "ids.npy"


def train(model: Path, tokens: Path, out: Path, *more: object, code: int = 0) -> Any:
    how = ["--tokens", tokens, "--batch-size", 2, "--sequence-length", 6, "--steps", 2, "--lr", 0.01]
    return run("train", model, *how, "-o", out, *more, code=code)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "bfloat16") for kind in KINDS), *(("qwen2_moe", d) for d in ("float32", "float16", "float64"))],
)
def test_untrained_it_comes_back_bit_by_bit(kind: str, dtype: str, tmp_path: Path) -> None:
    """All of its files, whether by way of the exported folder or of the float32 of a session."""
    checkpoint(tmp_path / "source", kind, dtype)
    pretrained = moe_onnx.from_pretrained(tmp_path / "source")
    pretrained.save(tmp_path / "model", assembly="forward")
    moe_onnx.save_pretrained(tmp_path / "model", tmp_path / "back")
    wanted = contents(tmp_path / "source")
    assert contents(tmp_path / "back") == wanted
    assert set(wanted) == {"config.json", "tokenizer_config.json", FIRST, SECOND, INDEX}
    if kind == "qwen2_moe" and dtype != "float64":  # one is enough, and float64 does not fit into float32
        session = moe_onnx.TrainingSession(tmp_path / "model")
        moe_onnx.save_pretrained(session, tmp_path / "again")
        assert contents(tmp_path / "again") == wanted


def test_a_session_starts_from_the_weights(source: Path, model: Path) -> None:
    wanted = files.stacked("mixtral", files.values("mixtral", "bfloat16"))
    graph = moe_onnx.from_pretrained(source).training_graph(assembly="forward")
    loaded = moe_onnx.TrainingGraph.load(model)
    again = moe_onnx.TrainingGraph.load(loaded.save(model.parent / "copy"))
    for one in (model, graph, loaded, again):
        found = moe_onnx.TrainingSession(one, seed=1).parameters()
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == np.float32
            assert np.array_equal(found[name], value.astype(np.float32)), name
    drawn = moe_onnx.TrainingSession(model, parameters=loaded.init_parameters(1)).parameters()
    assert not np.array_equal(drawn["lm_head.weight"], wanted["lm_head.weight"].astype(np.float32))
    assert contents(model.parent / "copy" / "huggingface") == contents(model / "huggingface")


def test_values_one_by_one_are_checked(model: Path) -> None:
    graph = moe_onnx.TrainingGraph.load(model)
    values = graph.init_parameters()
    name = "model.norm.weight"
    for pairs, said in (
        ([p for p in values.items() if p[0] != name], rf"expected \d+ tensors; '{name}' missing"),
        ([*values.items(), ("other", values[name])], "tensor 'other' is unknown"),
        ([*values.items(), (name, values[name])], f"tensor '{name}' is given twice"),
        ([(name, values[name][:3])], rf"'{name}' expected floats \[8\], found float32 \[3\]"),
        ([(name, np.ones(8, np.int32))], r"expected floats \[8\], found int32 \[8\]"),
    ):
        with pytest.raises(moe_onnx.CheckpointError, match=said):
            moe_onnx.TrainingSession(graph, parameters=iter(pairs))


def test_the_whole_way_on_the_command_line(source: Path, tokens: Path, tmp_path: Path) -> None:
    model, out, back = tmp_path / "model", tmp_path / "run", tmp_path / "back"
    words = ["--set", "router_aux_loss_coef=0.5", "--assembly", "grad+apply", "-o", model]
    said = run("export", "--from-hf", source, *words).output
    assert "MixtralForCausalLM of" in said and "written to" in said
    assert json.loads((model / "manifest.json").read_text())["config"]["router_aux_loss_coef"] == 0.5
    train(model, tokens, out)
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["lm_loss"] > 0
    shutil.rmtree(model)
    run("to-hf", out, back)
    session = contents(back)
    assert sorted(session) == sorted(contents(source))
    assert session["config.json"] == (source / "config.json").read_bytes()
    assert session[INDEX] == (source / INDEX).read_bytes()
    masters = files.read(next(out.glob("checkpoint/step-*")) / "model.safetensors")
    stacked = masters["model.layers.0.mlp.experts.gate_up_proj"]
    found = files.read(back / FIRST) | files.read(back / SECOND)
    assert found[TRAINED].tobytes() == stacked[1, : files.INNER].astype(found[TRAINED].dtype).tobytes()
    before = files.values("mixtral", "bfloat16")
    assert {n: (v.dtype, v.shape) for n, v in found.items()} == {
        n: (v.dtype, v.shape) for n, v in before.items()
    }
    assert not np.array_equal(found[TRAINED], before[TRAINED])  # it was trained
    for folder in (out / "checkpoint", next(out.glob("checkpoint/step-*"))):
        run("to-hf", folder, back, "--overwrite")
        assert contents(back) == session


def test_another_dtype_and_values_too_large_for_it(model: Path, tmp_path: Path) -> None:
    run("to-hf", model, tmp_path / "back", "--dtype", "float32")
    found = files.read(tmp_path / "back" / FIRST) | files.read(tmp_path / "back" / SECOND)
    for name, value in files.values("mixtral", "bfloat16").items():
        assert found[name].dtype == np.float32 and np.array_equal(found[name], value.astype(np.float32))
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "float32"
    total = sum(value.nbytes for value in found.values())
    assert json.loads((tmp_path / "back" / INDEX).read_text())["metadata"]["total_size"] == total
    session = moe_onnx.TrainingSession(model)
    values = session.state_dict()
    values["model.norm.weight"][3] = 1e5
    session.load_state_dict(values)
    said = "tensor 'model.norm.weight' expected values that float16 can hold, found 100000.0"
    with pytest.raises(moe_onnx.CheckpointError, match=said):
        moe_onnx.save_pretrained(session, tmp_path / "half", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "model", "source"]
    with pytest.raises(moe_onnx.OptionError, match="dtype must be one of float64, .*, got 'int8'"):
        moe_onnx.save_pretrained(session, tmp_path / "half", dtype="int8")


def test_nothing_foreign_is_overwritten(source: Path, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    moe_onnx.save_pretrained(model, target)  # an empty one is as good as none
    (target / "notes.txt").write_text("mine")
    (target / "old-00001.safetensors").write_bytes(b"1")
    with pytest.raises(moe_onnx.OptionError, match="'.*target' is not empty. Give another"):
        moe_onnx.save_pretrained(model, target)
    moe_onnx.save_pretrained(model, target, overwrite=True)
    assert contents(target) == contents(source) | {"notes.txt": b"mine"}
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(moe_onnx.OptionError, match="holds no 'config.json', so it is no checkpoint"):
        moe_onnx.save_pretrained(model, foreign, overwrite=True)
    assert contents(foreign) == {"thesis.txt": b"mine"}
    with pytest.raises(moe_onnx.OptionError, match=r"thesis.txt' is no folder"):
        moe_onnx.save_pretrained(model, foreign / "thesis.txt")


def test_an_export_does_not_overwrite_the_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path, "olmoe")
    tensors = files.as_bytes(files.values("olmoe"))
    (tmp_path / "model.safetensors").write_bytes(tensors)
    said = run("export", "--from-hf", tmp_path, "-o", tmp_path, code=2).output
    assert "is a file that this graph is made from, and would be overwritten" in said
    manifest = moe_onnx.from_pretrained(tmp_path).training_graph(assembly="grad").manifest
    # Also where a manifest beside it says that it is a training graph's.
    (tmp_path / "manifest.json").write_text(replace(manifest, weights="model.safetensors").to_json())
    run("export", "--from-hf", tmp_path, "-o", tmp_path, code=2)
    assert (tmp_path / "model.safetensors").read_bytes() == tensors
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"mine")
    said = run("export", "--from-hf", tmp_path, "-o", tmp_path / "other", code=2).output
    assert "is of no training graph, and would be overwritten. Give another folder" in said


@pytest.mark.parametrize("function", ["_put", "write_tensors"])
def test_a_write_that_fails_leaves_the_old_one(
    function: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe_onnx.save_pretrained(model, tmp_path / "back")
    before = contents(tmp_path / "back")
    calls = []

    def full(*args: Any) -> None:
        calls.append(args)
        raise OSError("no space left")

    monkeypatch.setattr(saving, function, full)
    with pytest.raises(OSError, match="no space left"):
        moe_onnx.save_pretrained(model, tmp_path / "back", overwrite=True)
    assert calls and contents(tmp_path / "back") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "model", "source"]


def test_what_is_no_checkpoint_or_of_another_model(
    source: Path, model: Path, tokens: Path, tmp_path: Path
) -> None:
    with pytest.raises(moe_onnx.CheckpointError, match="There is no checkpoint in '.*source'"):
        moe_onnx.save_pretrained(source, tmp_path / "back")
    train(model, tokens, tmp_path / "run")
    shutil.move(tmp_path / "run/checkpoint", tmp_path / "alone")
    with pytest.raises(moe_onnx.CheckpointError, match="There is no 'huggingface/tensors.json' beside"):
        moe_onnx.save_pretrained(tmp_path / "alone", tmp_path / "back")
    moe_onnx.save_pretrained(tmp_path / "alone", tmp_path / "back", origin=model)
    checkpoint(tmp_path / "other", "qwen2_moe")
    other = moe_onnx.from_pretrained(tmp_path / "other").save(tmp_path / "other-model", assembly="forward")
    said = "'.*shared_expert.gate_proj.weight' expected 40 elements, as .*, found none. They are of different"
    with pytest.raises(moe_onnx.CheckpointError, match=said):
        moe_onnx.save_pretrained(tmp_path / "alone", tmp_path / "more", origin=other)
    assert not (tmp_path / "more").exists()
    file = next((tmp_path / "alone").glob("step-*/model.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(moe_onnx.CheckpointError, match="is not the file that was saved"):
        moe_onnx.save_pretrained(tmp_path / "alone", tmp_path / "more", origin=model)


def test_weights_of_a_folder_that_are_gone_or_of_another_model(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(tmp_path / "kept")
    with pytest.raises(moe_onnx.CheckpointError, match=r"model.safetensors: cannot be read: No such file"):
        moe_onnx.TrainingSession(model)
    (model / "model.safetensors").write_bytes(files.as_bytes(files.values("mixtral")))
    with pytest.raises(moe_onnx.CheckpointError, match="'model.layers.0.block_sparse_moe.* is unknown"):
        moe_onnx.TrainingSession(model)


def test_a_new_graph_in_the_folder_forgets_the_weights(model: Path) -> None:
    """A file that no manifest names is no start of anything."""
    config = moe_onnx.from_pretrained(model.parent / "source").config
    graph = moe_onnx.build_training_graph(config, assembly="forward")
    graph.save(model)
    assert (model / "model.safetensors").exists()
    assert moe_onnx.TrainingGraph.load(model).weights is None


def test_one_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither way holds a tensor in memory; ``benchmarks/huggingface_memory.py`` measures whole processes."""
    monkeypatch.setattr(storage, "PIECE", 1 << 16)
    checkpoint(tmp_path / "source", "olmoe")
    tensors = files.values("olmoe")
    config = {**files.CONFIGS["olmoe"], "vocab_size": 40000}  # two tensors of 1.3 MB
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = np.random.default_rng(1).standard_normal((40000, 8), np.float32)
    files.write_two(tmp_path / "source", tensors)
    pretrained = moe_onnx.from_pretrained(tmp_path / "source")
    graph = pretrained.training_graph(assembly="forward")
    tracemalloc.start()
    graph.save(tmp_path / "model")
    moe_onnx.save_pretrained(tmp_path / "model", tmp_path / "back")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    assert contents(tmp_path / "back") == contents(tmp_path / "source")


# --- Tokenizers -----------------------------------------------------------------------------------


def test_text_of_a_model_whose_tokens_are_no_bytes(model: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a b c")
    words = ["train", model, "--text", tmp_path / "book.txt", "-o", tmp_path / "run"]
    said = run(*words, code=2).output
    assert "comes from a checkpoint without 'tokenizer.json', and its tokens are no bytes" in said
    (tmp_path / "sp").mkdir()
    (tmp_path / "sp/tokenizer.model").write_bytes(b"1")
    assert "'tokenizer.model'; load it in" in run(*words, "--tokenizer", tmp_path / "sp", code=2).output
    words[2:4] = ["--tokens", tmp_path / "book.txt"]
    assert "--tokenizer is for --text" in run(*words, "--tokenizer", tmp_path / "sp", code=2).output


def test_without_the_library_the_error_says_how_to_get_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "huggingface/tokenizer.json").write_text("{}")
    (tmp_path / "book.txt").write_text("a b c")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    said = run("train", model, "--text", tmp_path / "book.txt", "-o", tmp_path / "run", code=2).output
    assert "pip install 'moe-onnx[tokenizers]'" in said
    assert not os.path.exists(tmp_path / "run")


WORDS = ["a", "b", "c", "d", "[UNK]"]


def write_tokenizer(folder: Path, words: list[str]) -> None:
    """One token for each word, as the library's own format has it."""
    vocabulary = {word: number for number, word in enumerate(words)}
    folder.mkdir(exist_ok=True)
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    about = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps({**nothing, **about}))


@pytest.mark.parity
def test_text_by_a_tokenizer(model: Path, tmp_path: Path) -> None:
    from moe_onnx.huggingface.tokenizer import Tokenizer

    write_tokenizer(tmp_path / "words", WORDS)
    tokenizer = Tokenizer(tmp_path / "words")
    assert tokenizer.encode("a c d x") == [0, 2, 3, 4] and tokenizer.decode([0, 2]) == "a c"
    (tmp_path / "book.txt").write_text("a b c d " * 50)
    assert tokenizer.encode_file(tmp_path / "book.txt", 5).tolist() == [0, 1, 2, 3] * 50
    words = ["train", model, "--text", tmp_path / "book.txt", "--tokenizer", tmp_path / "words"]
    words += ["--batch-size", 2, "--sequence-length", 6, "--steps", 1]
    assert "200 tokens by" in run(*words, "-o", tmp_path / "run").output
    run(*words, "--steps", 2, "-o", tmp_path / "run", "--resume")
    run("to-hf", tmp_path / "run", tmp_path / "back")
    carried = (tmp_path / "back/tokenizer.json").read_bytes()
    assert carried == (tmp_path / "words/tokenizer.json").read_bytes()
    assert not (tmp_path / "back/tokenizer_config.json").exists()  # that of another tokenizer
    write_tokenizer(tmp_path / "words", [*WORDS, *map(str, range(20))])
    said = run(*words, "-o", tmp_path / "more", code=2).output
    assert "its ids go up to 24, and the model's vocab_size is 16" in said
    (tmp_path / "book.txt").write_bytes(b"a b \xff")
    with pytest.raises(moe_onnx.DataError, match="must be text in UTF-8, found byte 0xff at 4"):
        tokenizer.encode_file(tmp_path / "book.txt", 16)
    (tmp_path / "words/tokenizer.json").write_text("{}")
    assert "is no tokenizer" in run(*words, "-o", tmp_path / "more", code=2).output


@pytest.mark.parity
def test_eval_and_generate_take_the_tokenizer_of_the_run(source: Path, tmp_path: Path) -> None:
    """``--tokenizer`` comes first, then the run's own, then the model's; never bytes for such a model."""
    model = moe_onnx.from_pretrained(source).save(tmp_path / "all")
    write_tokenizer(model / "huggingface", WORDS)
    (tmp_path / "book.txt").write_text("a b c d " * 40)
    how = ["--text", tmp_path / "book.txt", "--batch-size", 2, "--sequence-length", 8]
    run("train", model, *how, "--steps", 2, "-o", tmp_path / "run")
    said = run("eval", model, "--checkpoint", tmp_path / "run", *how).output
    assert "160 tokens" in said
    assert "bits per byte" not in said
    words = ["generate", model, "--checkpoint", tmp_path / "run", "--prompt", "a b", "--max-new-tokens", 3]
    text = run(*words, "--temperature", 0).stdout
    ids = run(*words[:4], "--prompt-ids", "0,1", *words[6:], "--temperature", 0).stdout
    vocabulary = dict(enumerate(WORDS))
    assert text.split() == [vocabulary.get(int(one), "") for one in ids.strip().split(",") if int(one) < 5]
    write_tokenizer(tmp_path / "large", [*WORDS, *(f"w{i}" for i in range(1000))])
    assert "its ids go up to" in run(*words, "--tokenizer", tmp_path / "large", code=2).output
    said = run(*words[:4], "--prompt-ids", "0", "--tokenizer", model / "huggingface", code=2).output
    assert "--tokenizer is for --prompt" in said
