"""Sizes of real checkpoints are theirs, and graphs grow with layers and with nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import moe_onnx
from moe_onnx.build.full_size import FULL_SIZE
from moe_onnx.build.parameters import parameters_of
from moe_onnx.build.presets import PRESETS
from moe_onnx.build.recipe import recipe_from_dict
from moe_onnx.cli import main

# As the checkpoints' own indexes and cards say it.
PARAMETERS = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "olmoe-1b-7b": 6_919_161_856,
}
# What transformers calls it where it has another name, and what it has beside.
CLASSES = {
    "mixtral-8x7b": ("Mixtral", {"intermediate_size": 14336, "num_local_experts": 8}),
    "qwen3-30b-a3b": ("Qwen3Moe", {}),
    "qwen1.5-moe-a2.7b": ("Qwen2Moe", {}),
    "olmoe-1b-7b": ("Olmoe", {"intermediate_size": 1024}),
}


def config_of(name: str, **others: Any) -> moe_onnx.MoeLMConfig:
    tables = FULL_SIZE[name]
    config = recipe_from_dict({**tables, "model": {**tables["model"], **others}}, name).config
    assert isinstance(config, moe_onnx.MoeLMConfig)
    return config


@pytest.mark.parametrize("name", FULL_SIZE)
def test_as_many_parameters_as_the_checkpoint(name: str) -> None:
    assert sum(math.prod(p.shape) for p in parameters_of(config_of(name))) == PARAMETERS[name]


@pytest.mark.parametrize(("experts", "unrolled"), [(4, True), (20, False)])
def test_nodes_grow_by_as_many_with_each_layer(experts: int, unrolled: bool) -> None:
    def nodes(layers: int, experts: int) -> int:
        config = moe_onnx.MoeLMConfig(
            hidden_size=16,
            num_hidden_layers=layers,
            num_experts=experts,
            moe_intermediate_size=8,
            qk_norm="head",
            num_key_value_heads=2,
        )
        return len(moe_onnx.build_training_graph(config, assembly="grad").model.graph.node)

    few, more, many = (nodes(layers, experts) for layers in (2, 3, 4))
    assert many - more == more - few > 0
    assert unrolled or nodes(2, experts + 3) == few


def test_preset_and_config_are_two_names_of_one_thing(tmp_path: Path) -> None:
    def export(*words: object, code: int = 0) -> str:
        call = ["export", "--assembly", "forward", "--layers", 1, "-o", tmp_path / "model", *words]
        result = CliRunner().invoke(main, [str(word) for word in call])
        assert result.exit_code == code, result.output
        return result.output

    export("--preset", "olmoe-1b-7b")
    config = moe_onnx.TrainingGraph.load(tmp_path / "model").manifest.config
    assert (config["num_experts"], config["qk_norm"], config["num_hidden_layers"]) == (64, "full", 1)
    assert not list((tmp_path / "model").glob("*.safetensors"))  # no weights
    export("--config", "olmoe-1b-7b")
    assert moe_onnx.TrainingGraph.load(tmp_path / "model").manifest.config == config
    assert "not both" in export("--preset", "olmoe-1b-7b", "--config", "tiny_moe_lm", code=2)
    assert all(name in export("--preset", "mixtral", code=2).replace("\n", "") for name in PRESETS)


@pytest.mark.parity
@pytest.mark.parametrize("name", FULL_SIZE)
def test_parameters_are_those_of_transformers(name: str) -> None:
    """Names and shapes, of the model that transformers makes of the same sizes."""
    import torch
    import transformers

    kind, others = CLASSES[name]
    model = {key: value for key, value in FULL_SIZE[name]["model"].items() if key not in ("kind", "qk_norm")}
    config = getattr(transformers, f"{kind}Config")(**{**model, "num_hidden_layers": 2, **others})
    with torch.device("meta"):
        theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    ours = {p.name: p.shape for p in parameters_of(config_of(name, num_hidden_layers=2))}
    assert {key: tuple(value.shape) for key, value in theirs.named_parameters()} == ours


@pytest.mark.parity
def test_the_defaults_of_transformers_are_the_checkpoint_where_we_say_so() -> None:
    """transformers' configs have Mixtral's and OLMoE's sizes as defaults."""
    import transformers

    mixtral = transformers.MixtralConfig()
    ours = config_of("mixtral-8x7b")
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps"):
        assert getattr(mixtral, name) == getattr(ours, name)
    assert (mixtral.intermediate_size, mixtral.num_key_value_heads) == (14336, ours.num_key_value_heads)
    olmoe = transformers.OlmoeConfig()
    ours = config_of("olmoe-1b-7b")
    for name in ("vocab_size", "num_hidden_layers", "num_experts", "norm_topk_prob", "rms_norm_eps"):
        assert getattr(olmoe, name) == getattr(ours, name)
    qwen = transformers.Qwen3MoeConfig()
    ours = config_of("qwen3-30b-a3b")
    for name in ("vocab_size", "hidden_size", "num_experts", "num_key_value_heads", "moe_intermediate_size"):
        assert getattr(qwen, name) == getattr(ours, name)
