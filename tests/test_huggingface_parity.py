"""Checkpoints that transformers writes: the same logits, losses, gradients and steps, and the way back.

Where the two do not mean the same, and batches here avoid it:

- transformers' loss counts every label that is not -100; here a label at padding, or behind it, is left out.
- Logits at padding mean nothing here.
- Of a token that a config calls ``pad_token_id`` transformers' embedding has no gradient, even where it is a
  real token; here that token is like any other.
- The loss of transformers has an aux loss only with ``output_router_logits``; here always, unless
  ``router_aux_loss_coef`` is 0. Both leave padding out of it.

Position ids are 0, 1, ... from the first column in both, also where that is padding.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_files as files
import numpy as np
import pytest
from test_huggingface import contents, run

import moe_onnx

pytestmark = pytest.mark.parity

LIMIT = 1e-5
NAMES = [
    "mixtral",
    "mixtral-window-tied",
    "mixtral-top1-head_dim",
    "qwen2_moe",
    "qwen2_moe-dense-norm",
    "qwen2_moe-no-bias",
    "qwen3_moe",
    "qwen3_moe-20-experts",
    "qwen3_moe-sparse-bias",
    "olmoe",
    "olmoe-clip-norm",
]


def parity() -> Any:
    pytest.importorskip("transformers", minversion="5.0")
    import torch

    from benchmarks import huggingface_parity

    torch.set_num_threads(1)
    return huggingface_parity


def test_the_names_are_those_of_the_benchmark() -> None:
    assert list(parity().MODELS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_is_within_the_limit(name: str, tmp_path: Path) -> None:
    """All of the README's table: several batch sizes and lengths, padding, experts without tokens."""
    p = parity()
    p.model_of(name).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = p.measure(tmp_path)
    assert found["idle"] > 0
    assert {key: found[key] for key in p.FIGURES if found[key] > LIMIT} == {}
    assert found["beyond"] <= found["elements"] / 10_000


def test_the_measure_sees_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up rows of experts exchanged, and rows of experts in another order."""
    p = parity()
    p.model_of("qwen3_moe").save_pretrained(tmp_path)
    from moe_onnx.huggingface.architectures.description import Architecture

    right = Architecture._one_by_one

    def wrong(self: Any, *args: Any) -> Any:
        return right(self, *args)[::-1]

    monkeypatch.setattr(Architecture, "_one_by_one", wrong)
    found = p.measure(tmp_path, [(2, 8, "")])
    assert found["logits"] > 1e-2 and found["gradients"] > 1e-2 and found["parameters"] > 1e-4


@pytest.mark.parametrize(("name", "dtype"), [("qwen2_moe", "bfloat16"), ("mixtral", "float16")])
def test_16_bit_checkpoints_mean_the_same_numbers(name: str, dtype: str, tmp_path: Path) -> None:
    import torch

    p = parity()
    p.model_of(name).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    found = p.measure(tmp_path, [(3, 9, "right")])
    assert max(found[key] for key in ("logits", "loss", "gradients")) <= LIMIT


BACK = [
    "mixtral",
    "mixtral-window-tied",
    "qwen2_moe",
    "qwen2_moe-dense-norm",
    "qwen3_moe-20-experts",
    "olmoe",
]


@pytest.mark.parametrize("name", BACK)
def test_a_trained_checkpoint_back_in_transformers(name: str, tmp_path: Path) -> None:
    """The same logits; and untrained, the files that transformers wrote, byte by byte."""
    import torch

    p = parity()
    source = tmp_path / "source"
    p.model_of(name).save_pretrained(source, max_shard_size="40KB")
    pretrained = moe_onnx.from_pretrained(source)
    pretrained.save(tmp_path / "model", assembly="grad+apply+forward")
    moe_onnx.save_pretrained(tmp_path / "model", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)

    session = moe_onnx.TrainingSession(tmp_path / "model", lr=1e-2)
    for seed in range(2):
        session.step(p.batch_of(pretrained.config, 4, 11, "right", seed=seed))
    moe_onnx.save_pretrained(session, tmp_path / "trained")
    batch = p.batch_of(pretrained.config, 3, 13, "left", seed=7)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        given = {key: torch.from_numpy(value) for key, value in inputs.items()}
        wanted = p.load(tmp_path / "trained").eval()(**given).logits.numpy()
        before = p.load(source).eval()(**given).logits.numpy()
    real = inputs["attention_mask"] == 1
    assert p.apart(session.forward(inputs)["logits"][real], wanted[real]) <= LIMIT
    assert p.apart(before[real], wanted[real]) > 1e-3  # it was trained


def test_bf16_comes_back_in_bf16(tmp_path: Path) -> None:
    import torch

    p = parity()
    p.model_of("olmoe").to(torch.bfloat16).save_pretrained(tmp_path / "source")
    moe_onnx.from_pretrained(tmp_path / "source").save(tmp_path / "model", assembly="forward")
    session = moe_onnx.TrainingSession(tmp_path / "model")
    moe_onnx.save_pretrained(session, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "source")
    assert next(p.load(tmp_path / "back").parameters()).dtype == torch.float32
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert next(model.parameters()).dtype == torch.bfloat16


def test_what_transformers_has_in_memory_can_be_on_the_disk(tmp_path: Path) -> None:
    """Stacked experts under the names of a state dict, in one file."""
    p = parity()
    for name in ("mixtral", "qwen2_moe"):
        model = p.model_of(name)
        model.save_pretrained(tmp_path / name)
        separate = dict(moe_onnx.from_pretrained(tmp_path / name).parameters())
        state = {key: value.numpy() for key, value in model.state_dict().items()}
        (tmp_path / name / "model.safetensors").write_bytes(files.as_bytes(state))
        for key, value in moe_onnx.from_pretrained(tmp_path / name).parameters():
            assert np.array_equal(value, separate[key])


@pytest.mark.parametrize("kind", sorted(files.CONFIGS))
def test_checkpoints_by_hand_are_checkpoints(kind: str, tmp_path: Path) -> None:
    """What the tests of the default lane write by hand is what transformers reads: every tensor is used."""
    import torch
    import transformers

    p = parity()
    tensors = files.checkpoint(tmp_path, kind)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, experts_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for name, value in files.stacked(kind, tensors).items():
        assert np.array_equal(model.state_dict()[name].numpy(), value), name
    session = moe_onnx.TrainingSession(
        moe_onnx.from_pretrained(tmp_path).training_graph(assembly="forward"), kernels="body"
    )
    ids = np.arange(14).reshape(2, 7)
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids)).logits.numpy()
    assert p.apart(session.forward({"input_ids": ids})["logits"], wanted) <= LIMIT


def test_padding_token_that_is_a_real_token(tmp_path: Path) -> None:
    """The one difference in gradients, as said above: only its row of the embedding."""
    p = parity()
    p.model_of("olmoe", pad_token_id=3).save_pretrained(tmp_path)
    pretrained = moe_onnx.from_pretrained(tmp_path)
    batch = p.batch_of(pretrained.config, 3, 9, "")
    batch["input_ids"][0, 2] = 3
    out, wanted = p.theirs(p.load(tmp_path), batch)
    session = moe_onnx.InferenceSession(pretrained.training_graph(assembly="grad").model, kernels="body")
    values = {name: value.astype(np.float32) for name, value in pretrained.parameters()}
    (ours,) = session.run(["model.embed_tokens.weight.grad"], {**batch, **values})
    theirs = wanted["model.embed_tokens.weight"]
    other = np.arange(61) != 3
    assert p.apart(ours[other], theirs[other]) <= LIMIT
    assert not theirs[3].any() and ours[3].any()


def shell_of_readme() -> list[str]:
    text = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    section = text.partition("## Checkpoints of Hugging Face")[2].partition("\n## ")[0]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    lines = (line.partition("#")[0].strip() for line in block[1].splitlines())
    return [line for line in lines if line]


def test_the_path_that_the_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint's folder to a trained checkpoint in transformers, with its tokenizer."""
    import torch
    import transformers

    p = parity()
    monkeypatch.chdir(tmp_path)
    p.model_of("mixtral").save_pretrained("mixtral")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_words())
    tokenizer.save_pretrained("mixtral")
    text = "a b c d e f g h " * 200
    Path("book.txt").write_text(text)
    commands = shell_of_readme()
    assert [command.split()[1] for command in commands] == ["export", "train", "to-hf"]
    for command in commands:
        words = re.sub(r"--steps \d+", "--steps 3", command).split()[1:]
        run(*words)
    (graphs, trained), target = (command.split()[-1] for command in commands[:2]), commands[-1].split()[-1]
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    again = transformers.AutoTokenizer.from_pretrained(target)
    ids = again("a b c d", return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        wanted = model(ids).logits.numpy()
    session = moe_onnx.TrainingSession(graphs)
    session.load_checkpoint(Path(trained, "checkpoint"))
    assert session.global_step == 3
    assert p.apart(session.forward({"input_ids": ids.numpy()})["logits"], wanted) <= LIMIT
    tokenizers = (
        Path(folder, "tokenizer.json").read_text() for folder in (f"{trained}/huggingface", "mixtral")
    )
    assert len(set(tokenizers)) == 1


def _words() -> Any:
    import tokenizers

    words = {word: number for number, word in enumerate([*"abcdefgh", "[UNK]"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    files.checkpoint(tmp_path / "source")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import moe_onnx; "
        "p = moe_onnx.from_pretrained('source'); p.save('model', assembly='forward'); "
        "moe_onnx.save_pretrained('model', 'back')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, cwd=tmp_path)
