"""What an architecture is: how its ``config.json`` reads, and what its tensors are called on disk.

A parameter of a graph is a row of tensors of the checkpoint, one after the other in memory: most are one
tensor of the same name, the stacked matrices of a layer's experts are one tensor for each of them. So a
parameter is read and written range by range, whatever its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_onnx.build.config import MoeLMConfig
from moe_onnx.build.parameters import Parameter
from moe_onnx.huggingface.fields import Fields

_EXPERTS = re.compile(r"(.*\.)experts\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint: its name and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Args:
        model_type: Its name in ``config.json``.
        class_name: Of transformers' language model of it.
        defaults: Fields that a ``config.json`` may leave out, as transformers takes them then.
        read: Takes the fields that are its own; those of all decoders are taken already.
        module: What a layer's experts and router belong to on disk.
        experts: Names of an expert's matrices on disk: gate, up, down.
        adds: What it has that others have not, for people.
    """

    model_type: str
    class_name: str
    defaults: Mapping[str, Any]
    read: Callable[[Fields], None]
    module: str = "mlp"
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    adds: str = ""

    def config(self, fields: Fields, changes: Mapping[str, Any]) -> MoeLMConfig:
        """The config of a graph.

        Raises:
            ConfigError: If a field cannot be built, or is not known.
        """
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            fields.take(name)
        fields.take("num_experts_per_tok")
        fields.take("num_key_value_heads")
        for name in ("head_dim", "rms_norm_eps", "initializer_range", "tie_word_embeddings"):
            fields.take(name)
        fields.take("router_aux_loss_coef")
        fields.must("hidden_act", "silu", "swish")
        fields.must("attention_dropout", 0.0)
        fields.rope()
        self.read(fields)
        return fields.config(changes)

    def forms(self, parameter: Parameter, config: MoeLMConfig) -> list[list[Source]]:
        """The forms that a parameter may have on disk, the usual one first.

        Experts are there one by one, or, as transformers has them in memory, stacked.
        """
        name, shape = parameter.name, parameter.shape
        on_disk = name
        layer = re.match(r"model\.layers\.(\d+)\.mlp\.", name)
        if layer and config.is_moe_layer(int(layer[1])):
            on_disk = name.replace(".mlp.", f".{self.module}.", 1)
        names = dict.fromkeys((on_disk, name))
        forms = [[Source(one, shape)] for one in names]
        if found := _EXPERTS.fullmatch(on_disk):
            forms.insert(0, self._one_by_one(found[1], found[2], shape))
        return forms

    def _one_by_one(self, prefix: str, name: str, shape: tuple[int, ...]) -> list[Source]:
        gate, up, down = self.experts
        count, rows, columns = shape
        kinds, size = ((gate, up), rows // 2) if name == "gate_up_proj" else ((down,), rows)
        return [
            Source(f"{prefix}experts.{expert}.{kind}.weight", (size, columns))
            for expert in range(count)
            for kind in kinds
        ]


# What transformers takes for fields of any decoder that a file leaves out.
DECODER: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
