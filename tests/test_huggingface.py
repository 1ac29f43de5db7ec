"""Checkpoints of Hugging Face, written by hand: what becomes of every tensor and field, and the way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_files as files
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result
from huggingface_files import CONFIGS, FIRST, INDEX, SECOND, checkpoint

import moe_onnx
from moe_onnx.cli import main
from moe_onnx.huggingface.architectures import ARCHITECTURES

KINDS = sorted(CONFIGS)


def by_hand(kind: str, tensors: files.Arrays) -> files.Arrays:
    """The graph's parameters, from the definitions: experts stacked, gate rows before up rows."""
    found = files.stacked(kind, tensors)
    return {name: found[name] for name in sorted(found)}


def run(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_goes_to_its_place(kind: str, dtype: str, tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path, kind, dtype)
    pretrained = moe_onnx.from_pretrained(tmp_path)
    assert pretrained.architecture is ARCHITECTURES[kind]
    found = dict(pretrained.parameters())
    wanted = by_hand(kind, tensors)
    assert sorted(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        assert found[name].tobytes() == value.tobytes(), name


def test_configs_say_the_same_model() -> None:
    """Field by field; what a file leaves out is as transformers has it."""
    path = Path("config.json")
    from moe_onnx.huggingface.fields import Fields

    def config(kind: str, **more: Any) -> moe_onnx.MoeLMConfig:
        data = {**CONFIGS[kind], **more}
        return ARCHITECTURES[kind].config(Fields(path, data, ARCHITECTURES[kind].defaults), {})

    common = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    common |= {"num_key_value_heads": 1, "num_experts": 3, "moe_intermediate_size": 6, "rms_norm_eps": 1e-5}
    assert config("mixtral") == moe_onnx.MoeLMConfig(**common, rope_theta=500.0, router_aux_loss_coef=0.02)
    assert config("qwen2_moe") == moe_onnx.MoeLMConfig(
        **common,
        rope_theta=500.0,
        router_aux_loss_coef=0.001,
        intermediate_size=10,
        qkv_bias=True,
        norm_topk_prob=False,
        shared_expert_intermediate_size=5,
        shared_expert_gate=True,
    )
    assert config("qwen3_moe") == moe_onnx.MoeLMConfig(
        **common,
        router_aux_loss_coef=0.001,
        intermediate_size=10,
        head_dim=6,
        qk_norm="head",
        norm_topk_prob=False,
    )
    assert config("olmoe") == moe_onnx.MoeLMConfig(
        **common, qk_norm="full", clip_qkv=2.0, norm_topk_prob=False, router_aux_loss_coef=0.01
    )
    assert config("mixtral", rope_theta=None).rope_theta == 1e6  # transformers' default for Mixtral
    assert config("mixtral", num_key_value_heads=None).kv_heads == 2  # null is not the default of 8
    assert config("mixtral", sliding_window=3).sliding_window == 3
    assert config("qwen3_moe", use_sliding_window=True, sliding_window=5).sliding_window == 5
    assert config("qwen3_moe", sliding_window=5).sliding_window is None
    every = {"use_sliding_window": True, "layer_types": ["sliding_attention"]}
    assert config("qwen2_moe", **every).sliding_window == 4
    assert config("qwen2_moe", rope_parameters=None, rope_theta=7.0).rope_theta == 7.0
    assert config("qwen2_moe", mlp_only_layers=[0]).mlp_only_layers == (0,)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"hidden_act": "gelu"}, r"'hidden_act' must be \"silu\" or \"swish\", got \"gelu\""),
    ("mixtral", {"attention_dropout": 0.1}, r"'attention_dropout' must be 0\.0, got 0\.1"),
    ("mixtral", {"router_jitter_noise": 0.01}, r"'router_jitter_noise' must be 0\.0, got 0\.01"),
    (
        "mixtral",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        r"'rope_scaling\.rope_type' must be \"default\", got \"linear\"",
    ),
    ("mixtral", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0}}, r"got \"yarn\""),
    ("mixtral", {"rope_parameters": {"rope_theta": 9.0}}, r"'rope_theta' is 500\.0 and .* is 9\.0"),
    ("olmoe", {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, "one object for all layers"),
    ("olmoe", {"partial_rotary_factor": 0.5}, r"'partial_rotary_factor' must be 1\.0, got 0\.5"),
    ("olmoe", {"head_dim": 3}, r"'head_dim' must be hidden_size / num_attention_heads \(8 / 2\), got 3"),
    ("qwen2_moe", {"use_sliding_window": True}, r"'layer_types' must be given with use_sliding_window"),
    ("qwen2_moe", {"layer_types": ["sliding_attention"]}, r"'layer_types' must be \"full_attention\""),
    ("mixtral", {"num_local_experts": "8"}, r"'num_local_experts' must be an integer >= 1, got '8'"),
    ("mixtral", {"intermediate_size": 0}, r"'intermediate_size' must be an integer >= 1, got 0"),
    ("mixtral", {"num_experts": 4}, r"'num_local_experts' is 3 and 'num_experts' is 4"),
    ("mixtral", {"logits_scaling": 2.0}, r"'logits_scaling' is not known, got 2\.0"),
    ("qwen2_moe", {"layer_types": 3}, "'layer_types' must be a list of words, got 3"),
    (
        "qwen2_moe",
        {"use_sliding_window": True, "layer_types": ["sliding_attention"], "sliding_window": None},
        "'layer_types' must be given with use_sliding_window, and the same for all layers",
    ),
    ("qwen3_moe", {"use_sliding_window": "yes"}, "'use_sliding_window' must be true or false, got"),
    ("olmoe", {"head_dim": {}}, "'head_dim' must be an integer"),
    ("qwen3_moe", {"mlp_only_layers": "0"}, r"'mlp_only_layers' must be a list of integers, got \"0\""),
    ("mixtral", {"architectures": ["MixtralForSequenceClassification"]}, "a language model, got"),
    ("mixtral", {"quantization_config": {"quant_method": "awq"}}, "got quant_method 'awq'. Quantised"),
    ("mixtral", {"model_type": "gpt_oss"}, "Known: mixtral, qwen2_moe, .* missing for it: attention sinks"),
    ("mixtral", {"model_type": "bert"}, "'bert' is not known. Known: mixtral.* a description of it"),
    ("mixtral", {"model_type": None}, "'model_type' must be one of mixtral, .*, got None"),
]


@pytest.mark.parametrize(("kind", "change", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_fields_that_cannot_be_built_are_refused(
    kind: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, kind, **change)
    with pytest.raises(moe_onnx.ConfigError, match=said) as caught:
        moe_onnx.from_pretrained(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_config_that_is_none(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    for text, said in (("{", "cannot be read"), ("[1]", "must hold an object, got list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(moe_onnx.ConfigError, match=said):
            moe_onnx.from_pretrained(tmp_path)
    data = {name: value for name, value in CONFIGS["mixtral"].items() if name != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(moe_onnx.ConfigError, match="'hidden_size' is missing"):
        moe_onnx.from_pretrained(tmp_path)
    with pytest.raises(moe_onnx.ConfigError, match="Is '.*nowhere' a checkpoint's folder"):
        moe_onnx.from_pretrained(tmp_path / "nowhere")


def test_only_what_a_checkpoint_leaves_open_can_be_changed(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    config = moe_onnx.from_pretrained(tmp_path, dispatch="routing_map", router_aux_loss_coef=0.0).config
    assert (config.dispatch, config.router_aux_loss_coef) == ("routing_map", 0.0)
    with pytest.raises(moe_onnx.ConfigError, match=r"decides 'hidden_size'.* Can be: active_num, "):
        moe_onnx.from_pretrained(tmp_path, hidden_size=16)


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_experts_and_a_single_file(kind: str, tmp_path: Path) -> None:
    """As transformers has them in memory; and what was stacked comes back stacked."""
    checkpoint(tmp_path / "one", kind)
    separate = dict(moe_onnx.from_pretrained(tmp_path / "one").parameters())
    (tmp_path / "two").mkdir()
    tensors = files.stacked(kind, files.values(kind))
    (tmp_path / "two/config.json").write_text((tmp_path / "one/config.json").read_text())
    (tmp_path / "two/model.safetensors").write_bytes(files.as_bytes(tensors))
    pretrained = moe_onnx.from_pretrained(tmp_path / "two")
    for name, value in pretrained.parameters():
        assert np.array_equal(value, separate.pop(name))
    assert not separate
    pretrained.save(tmp_path / "model", assembly="forward")
    moe_onnx.save_pretrained(tmp_path / "model", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "two")


def test_mixed_dtypes_tied_heads_and_old_buffers(tmp_path: Path) -> None:
    tensors = files.values("mixtral", "bfloat16")
    one = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    tensors[one] = tensors[one].astype(np.float16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    checkpoint(tmp_path, "mixtral", tie_word_embeddings=True)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    files.write_two(tmp_path, {**tensors, **buffer})
    pretrained = moe_onnx.from_pretrained(tmp_path)
    found = dict(pretrained.parameters())
    assert "lm_head.weight" not in found
    assert found["model.layers.0.mlp.experts.down_proj"].dtype == np.float32  # holds both
    pretrained.save(tmp_path / "model", assembly="forward")
    moe_onnx.save_pretrained(tmp_path / "model", tmp_path / "back")
    back = files.read(tmp_path / "back" / FIRST) | files.read(tmp_path / "back" / SECOND)
    assert {name: value.tobytes() for name, value in back.items()} == {
        name: value.tobytes() for name, value in tensors.items()
    }
    assert back[one].dtype == np.float16
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * ml_dtypes.bfloat16(2)
    files.write_two(tmp_path, tensors)
    with pytest.raises(
        moe_onnx.CheckpointError, match=r"'lm_head.weight' expected equal to 'model.embed_tok"
    ):
        moe_onnx.from_pretrained(tmp_path)


# --- Bad files ------------------------------------------------------------------------------------


def edit_index(folder: Path, **places: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    for name, place in places.items():
        index["weight_map"][name.replace("__", ".")] = place
        if place is None:
            del index["weight_map"][name.replace("__", ".")]
    (folder / INDEX).write_text(json.dumps(index))


def put(folder: Path, change: dict[str, Any]) -> None:
    """Tensors of another value; None: none."""
    tensors = {**files.values("mixtral"), **change}
    files.write_two(folder, {name: value for name, value in tensors.items() if value is not None})


NORM = "model.norm.weight"
W1 = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


def damaged_header(folder: Path, old: str, new: str) -> None:
    raw = (folder / FIRST).read_bytes()
    assert old.encode() in raw
    (folder / FIRST).write_bytes(raw.replace(old.encode(), new.encode(), 1))


BAD: dict[str, tuple[Any, str]] = {
    "missing shard": (
        lambda f: (f / SECOND).unlink(),
        rf"{SECOND}: is missing; .* expects tensor '.*' in it. Found are 1 of 2",
    ),
    "cut off": (
        lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-5]),
        rf"{FIRST}: tensor '.*' F32 .* expected to end at byte \d+, found only \d+",
    ),
    "too long": (
        lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes() + b"1234"),
        rf"{FIRST}: expected \d+ bytes by the header, found \d+",
    ),
    "cut in header": (
        lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:40]),
        rf"{FIRST}: expected 8 bytes and a header of \d+ .*, found 40 bytes",
    ),
    "empty": (lambda f: (f / FIRST).write_bytes(b""), rf"{FIRST}: .* found 0 bytes in all"),
    "no JSON": (lambda f: damaged_header(f, '{"__', '("__'), rf"{FIRST}: expected a header in JSON"),
    "unknown dtype": (
        lambda f: damaged_header(f, '"F32"', '"F99"'),
        rf"{FIRST}: tensor '.*' has the unknown dtype 'F99'. Known: F64",
    ),
    "another dtype": (
        lambda f: damaged_header(f, '"F32"', '"F16"'),
        r"tensor '.*' expected 256 bytes, as it is F16 \[16, 8\], found the offsets \[0, 512\]",
    ),
    "overlap": (
        lambda f: damaged_header(f, '"data_offsets":[512,', '"data_offsets":[508,'),
        r"tensor '.*' expected \d+ bytes, as it is F32",
    ),
    "quantised": (
        lambda f: put(f, {W1: np.ones((6, 8), np.int8)}),
        rf"tensor '{W1}' expected one of F64, F32, F16, BF16, found I8. Quantised",
    ),
    "wrong shape": (
        lambda f: put(f, {W1: np.ones((8, 6), np.float32)}),
        rf"tensor '{W1}' expected \[6, 8\], as config.json says, found \[8, 6\]",
    ),
    "missing tensor": (lambda f: put(f, {W1: None}), rf"tensor '{W1}' expected \[6, 8\], found none\.$"),
    "renamed tensor": (
        lambda f: put(f, {NORM: None, "model.norms.weight": np.ones(8, np.float32)}),
        rf"tensor '{NORM}' expected \[8\], found none. Did you mean 'model.norms.weight'",
    ),
    "unexpected tensor": (
        lambda f: put(f, {"model.bias": np.ones(3, np.float32)}),
        "tensor 'model.bias' was not expected of MixtralForCausalLM",
    ),
    "twice": (
        lambda f: (f / SECOND).write_bytes(
            files.as_bytes(files.read(f / SECOND) | {"lm_head.weight": np.ones((16, 8), np.float32)})
        ),
        rf"{SECOND}: tensor 'lm_head.weight' is in '{FIRST}' too, expected it once",
    ),
    "not in the index": (
        lambda f: edit_index(f, model__norm__weight=None),
        rf"tensor '{NORM}' was not expected, as {INDEX} does not name it",
    ),
    "in the index only": (
        lambda f: edit_index(f, **{"extra": FIRST}),
        rf"{FIRST}: expected tensor 'extra', as {INDEX} says; found none",
    ),
    "elsewhere": (
        lambda f: edit_index(f, lm_head__weight=SECOND),
        rf"expects tensor 'lm_head.weight' in '{SECOND}', found it in '{FIRST}'",
    ),
    "outside": (
        lambda f: edit_index(f, lm_head__weight="../model.safetensors"),
        r"tensor 'lm_head.weight' expected in a .safetensors file of this folder, found '\.\./model",
    ),
    "absolute": (lambda f: edit_index(f, lm_head__weight="/etc/passwd"), "found '/etc/passwd'"),
    "index no JSON": (lambda f: (f / INDEX).write_text("{"), rf"{INDEX}: cannot be read"),
    "index empty": (lambda f: (f / INDEX).write_text("{}"), "expected an object 'weight_map'.* found None"),
    "no index": (lambda f: (f / INDEX).unlink(), f"expected 'model.safetensors' or '{INDEX}', found only"),
    "pickles": (
        lambda f: (
            [(f / n).unlink() for n in (INDEX, FIRST, SECOND)] and (f / "pytorch_model.bin").write_bytes(b"1")
        ),
        r"found pickles \('pytorch_model.bin'\), which can run code and are not read. Convert them",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_error(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    checkpoint(source)
    damage, said = BAD[name]
    damage(source)
    with pytest.raises(moe_onnx.CheckpointError, match=said):
        moe_onnx.from_pretrained(source)
    result = run("export", "--from-hf", source, "-o", tmp_path / "model", code=2)
    assert result.output.startswith("error: ") and result.output.count("\n") == 1
    assert not (tmp_path / "model").exists()


def test_endless_numbers(tmp_path: Path) -> None:
    for name in ("num_hidden_layers", "num_local_experts"):
        checkpoint(tmp_path, **{name: 2**60})
        with pytest.raises(moe_onnx.CheckpointError, match=rf"expected num_\w+ {2**60}, .* found 19 tensors"):
            moe_onnx.from_pretrained(tmp_path)


def test_a_name_twice_in_one_header(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    raw = (tmp_path / FIRST).read_bytes()
    names = [f'"{name}"' for name in files.read(tmp_path / FIRST)]
    same = next((a, b) for a in names for b in names if a != b and len(a) == len(b))
    (tmp_path / FIRST).write_bytes(raw.replace(same[0].encode(), same[1].encode()))
    with pytest.raises(moe_onnx.CheckpointError, match=f"{same[1][1:-1]}' stands twice in the header"):
        moe_onnx.from_pretrained(tmp_path)


def test_a_file_that_is_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    """Half of the folder is not written: it is not there at all."""
    checkpoint(tmp_path / "source")
    pretrained = moe_onnx.from_pretrained(tmp_path / "source")
    raw = (tmp_path / "source" / SECOND).read_bytes()
    (tmp_path / "source" / SECOND).write_bytes(raw[:-100])
    with pytest.raises(moe_onnx.CheckpointError, match=rf"{SECOND}: tensor '.*' cannot be read"):
        pretrained.save(tmp_path / "model", assembly="forward")
    assert contents(tmp_path / "model") == {}
