"""``config.json`` as a :class:`MoeLMConfig`: every field is used, known not to matter, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_onnx.build.config import MoeLMConfig
from moe_onnx.errors import ConfigError

CONFIG = "config.json"
# What is about files, other tasks, generation or the form of outputs, and not about the numbers of a
# language model: of transformers' base class, and of the tools that write such files.
_IGNORED = """
    architectures attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size custom_pipelines decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    is_decoder is_encoder_decoder label2id length_penalty max_length max_position_embeddings min_length
    model_max_length model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores
    pad_token_id prefix pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """
IGNORED = frozenset(_IGNORED.split())
# What a checkpoint leaves open: how its tokens are dispatched and what is added to its loss.
_CHANGEABLE = (
    "active_num capacity_factor dispatch dispatch_mode dtype expert_capacity ignore_index router_aux_loss "
    "router_aux_loss_coef router_weights_on router_z_loss_coef token_drop_policy tokens_per_batch "
    "unroll_experts"
)
CHANGEABLE = tuple(_CHANGEABLE.split())


class Fields:
    """The fields of a ``config.json``, taken one by one.

    Args:
        path: The file, for errors.
        data: Its contents.
        defaults: What transformers takes where a field is left out.
    """

    def __init__(self, path: Path, data: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.path, self.data, self.defaults = path, data, defaults
        self.values: dict[str, Any] = {}
        self._theirs: dict[str, str] = {}
        self._used: set[str] = set()

    def get(self, *names: str) -> Any:
        """The value of a field that may have one of several names, or its default.

        Raises:
            ConfigError: If it is left out and has no default.
        """
        self._used.update(names)
        given = [name for name in names if name in self.data]
        said = [name for name in given if self.data[name] is not None]
        if len({repr(self.data[name]) for name in said}) > 1:
            both = " and ".join(f"'{name}' is {self.data[name]!r}" for name in said)
            raise ConfigError(f"{self.path}: {both}, which is said twice. Leave out one of them.")
        if given:  # null is a value, and not the same as a field that is left out
            return self.data[(said or given)[0]]
        for name in names:
            if name in self.defaults:
                return self.defaults[name]
        raise ConfigError(f"{self.path}: '{names[0]}' is missing. Is this the config of a whole model?")

    def flag(self, name: str) -> bool:
        """True or False."""
        if not isinstance(value := self.get(name), bool):
            raise self.refuse(name, value, "true or false")
        return value

    def layers(self, name: str) -> tuple[int, ...]:
        """A list of layer numbers; null is an empty one."""
        value = self.get(name) or ()
        if not isinstance(value, (list, tuple)) or not all(type(one) is int for one in value):
            raise self.refuse(name, value, "a list of integers")
        return tuple(value)

    def take(self, ours: str, *theirs: str) -> None:
        """Take over a field, called ``theirs`` (the same, if left out) in the file."""
        names = theirs or (ours,)
        self.values[ours] = self.get(*names)
        self._theirs[ours] = next((name for name in names if name in self.data), names[0])

    def set(self, ours: str, value: Any) -> None:
        """What the architecture is in any case, or what other fields say together."""
        self.values[ours] = value

    def must(self, name: str, *legal: Any) -> None:
        """Refuse a field whose value is none of the legal ones; null is as good as left out."""
        self._used.add(name)
        value = self.data.get(name)
        if value is not None and (
            value not in legal or isinstance(value, bool) != isinstance(legal[0], bool)
        ):
            raise self.refuse(name, value, " or ".join(json.dumps(one) for one in legal))

    def refuse(self, name: str, value: Any, legal: str) -> ConfigError:
        """The error for a value that cannot be built."""
        return ConfigError(
            f"{self.path}: '{name}' must be {legal}, got {json.dumps(value)}. Graphs of anything else are "
            "not built here."
        )

    def rope(self) -> None:
        """``rope_theta``, of the old form of the file or the new one; no scaling."""
        theta, parameters = self.data.get("rope_theta"), dict[str, Any]()
        for name in ("rope_parameters", "rope_scaling"):
            self._used.add(name)
            found = self.data.get(name)
            if found is None:
                continue
            if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
                raise self.refuse(name, found, "null or one object for all layers")
            kind = found.get("rope_type", found.get("type", "default"))
            if kind != "default":
                raise self.refuse(f"{name}.rope_type", kind, '"default"')
            parameters |= found
        for name, value in parameters.items():
            if name == "partial_rotary_factor" and value != 1:
                raise self.refuse(f"rope_parameters.{name}", value, "1.0")
            if name not in ("rope_type", "type", "rope_theta", "partial_rotary_factor"):
                raise self.refuse(f"rope_parameters.{name}", value, "left out")
        self._used.add("rope_theta")
        self.must("partial_rotary_factor", 1.0)
        inner = parameters.get("rope_theta")
        if theta is not None and inner is not None and theta != inner:
            raise ConfigError(
                f"{self.path}: 'rope_theta' is {theta} and 'rope_parameters.rope_theta' is {inner}. Leave "
                "out one."
            )
        self._theirs["rope_theta"] = "rope_theta"
        given = inner if inner is not None else theta
        self.values["rope_theta"] = self.defaults["rope_theta"] if given is None else given

    def config(self, changes: Mapping[str, Any]) -> MoeLMConfig:
        """The config, once nothing is left that was not looked at.

        Args:
            changes: Of :data:`CHANGEABLE`, by name.

        Raises:
            ConfigError: If a field is not known, or a value or change illegal.
        """
        for name, value in self.data.items():
            harmless = value is None or name.startswith("_") or name in IGNORED
            if name not in self._used and not harmless:
                raise ConfigError(
                    f"{self.path}: '{name}' is not known, got {json.dumps(value):.80}; it may change what "
                    "the model computes. Take it out of the file if it is without meaning for the numbers. "
                    f"Known: {', '.join(sorted(self._used))}."
                )
        legal = [name for name in CHANGEABLE if name in MoeLMConfig.__dataclass_fields__]
        for name in changes:
            if name not in legal:
                raise ConfigError(
                    f"{self.path}: the checkpoint decides '{name}', which cannot be changed. Can be: "
                    f"{', '.join(legal)}."
                )
        try:
            return MoeLMConfig(**{**self.values, **changes})
        except ConfigError as error:
            text = re.sub(r"'(\w+)' must", lambda m: f"'{self._theirs.get(m[1], m[1])}' must", str(error))
            raise ConfigError(f"{self.path}: {text.removeprefix('MoeLMConfig: ')}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's ``config.json``.

    Raises:
        ConfigError: If it is not there or no JSON object.
    """
    path = folder / CONFIG
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}. Is '{folder}' a checkpoint's folder?") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold an object, got {type(data).__name__}.")
    return data
