"""``ImportedModel``: the config of a training graph that was made from an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from moe_onnx.build.options import Options
from moe_onnx.errors import ConfigError

CROSS_ENTROPY, SQUARED_ERROR = "cross-entropy", "mean-squared-error"
LABELS, TARGET = "labels", "target"
Shape = tuple[int | str, ...]
_FED = ("input_ids", "attention_mask", LABELS)  # what is made of a text


@dataclass(frozen=True)
class ImportedModel(Options):
    """What is known of a model that was imported, and what was done to it.

    Args:
        loss: ``"cross-entropy"``, ``"mean-squared-error"``, or the name of the model's own scalar.
        output: The output that the loss is made from; empty for a loss of the model's own.
        target: The batch input that it is held against; empty for a loss of the model's own.
        ignore_index: Label that is left out of the cross-entropy.
        shift: Whether position t predicts label t + 1, as the builder's language models do.
        inputs: The model's own batch inputs: dtype and shape by name.
        limits: Batch inputs of integers that are all below a number: ids that look up a table, labels.
        vocab_size: Of a language model that takes ``input_ids``; 0 for any other model.
        dtype: What the model's weights are stored in; float16 has a loss scale.
        tied: Parameters that the model reads in several places.
        split: Parameters that shared an initializer, by name; the values are what it was called.
        renamed: Parameters whose initializer had a made-up name, likewise.
        fused: MoE layers that are ``ascend.moe`` nodes now: by the node that was their end, what was done.
        not_fused: What looked like one and stayed as it was: the first condition that did not hold.
        verified: How the fused model was compared with the one before: a line for each set of inputs.
        producer: Who wrote the model.

    Raises:
        ConfigError: If a value is illegal.
    """

    loss: str
    output: str = ""
    target: str = ""
    ignore_index: int = -100
    shift: bool = False
    inputs: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    vocab_size: int = 0
    dtype: str = "float32"
    tied: tuple[str, ...] = ()
    split: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)
    not_fused: dict[str, str] = field(default_factory=dict)
    verified: tuple[str, ...] = ()
    producer: str = ""

    def __post_init__(self) -> None:
        """Check what a manifest may have got wrong."""
        for name in ("loss", "output", "target", "dtype", "producer"):
            if not isinstance(getattr(self, name), str):
                raise self.refuse(name, "a text")
        if not self.loss:
            raise self.refuse("loss", "a name")
        self.check_int("ignore_index", low=-(2**63))
        if self.ignore_index >= 2**63:
            raise self.refuse("ignore_index", "an integer < 2^63")
        self.check_int("vocab_size", low=0)
        self.check_bool("shift")
        for name in ("inputs", "limits", "split", "renamed", "fused", "not_fused"):
            if not isinstance(getattr(self, name), Mapping):
                raise self.refuse(name, "a table")
        for limit in self.limits.values():
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise self.refuse("limits", "integers >= 1 by name")
        try:
            inputs = {name: (str(dtype), tuple(shape)) for name, (dtype, shape) in self.inputs.items()}
        except (TypeError, ValueError):
            raise self.refuse("inputs", "dtype and shape by name") from None
        object.__setattr__(self, "inputs", inputs)
        for name, what in (("tied", "names of parameters"), ("verified", "lines of text")):
            lines = getattr(self, name)
            if not isinstance(lines, (list, tuple)) or not all(isinstance(one, str) for one in lines):
                raise self.refuse(name, what)
            object.__setattr__(self, name, tuple(lines))

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data, its kind under ``"kind"``."""
        data = {"kind": type(self).__name__, **asdict(self)}
        if not self.vocab_size:  # whoever trains on tokens asks for it
            del data["vocab_size"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` gave.

        Raises:
            ConfigError: If a field is unknown, missing or of an illegal value.
        """
        if "loss" not in data:
            raise ConfigError(f"{cls.__name__}: 'loss' is missing.")
        known = {one.name for one in fields(cls)}
        for name in data:
            if name != "kind" and name not in known:
                raise ConfigError(f"{cls.__name__}: there is no option {name!r}.")
        return cls(**{name: value for name, value in data.items() if name != "kind"})


def missing_of_a_text(config: Mapping[str, Any]) -> str:
    """Why a model cannot be trained on a text alone, by the config of a manifest; empty if it can."""
    if "vocab_size" in config:
        return ""
    if config.get("kind") != ImportedModel.__name__:
        return "it is a layer"
    own = ImportedModel.from_dict(config)
    others = [f"'{name}'" for name in own.inputs if name not in _FED]
    if own.loss != CROSS_ENTROPY or not own.shift:
        kind = f"{own.loss}{', not of the next token' if own.loss == CROSS_ENTROPY else ''}"
        return f"its loss is {kind}, and must be --loss cross-entropy of logits [batch, sequence, classes]"
    if others:
        return f"of a text come 'input_ids', 'attention_mask' and 'labels', and it takes {', '.join(others)}"
    return "its 'input_ids' look up no table, so that the number of tokens it knows is not known"
