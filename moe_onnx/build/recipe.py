"""Recipes: a config, an optimizer and how to train, as one TOML or JSON file."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.learning_rate import LearningRate
from moe_onnx.build.optimizers import Optimizer, optimizer_from_dict
from moe_onnx.build.options import Options
from moe_onnx.build.presets import PRESETS
from moe_onnx.errors import ConfigError

CONFIGS: dict[str, type[MoeLMConfig] | type[MoeLayerConfig]] = {
    "MoeLMConfig": MoeLMConfig,
    "MoeLayerConfig": MoeLayerConfig,
}


@dataclass(frozen=True)
class Schedule(Options):
    """How a model is trained: the table ``[training]`` of a recipe.

    Args:
        steps: Updates.
        batch_size: Sequences in a batch.
        sequence_length: Tokens of a sequence.
        lr: Learning rate.
        lr_scheduler_type, warmup_steps, min_lr: As in :class:`LearningRate`.
        gradient_accumulation_steps: Batches of an update, as in :func:`moe_onnx.train`.
        seed: Of the initial weights and the data order.

    Raises:
        ConfigError: If a value is illegal.
    """

    steps: int = 1000
    batch_size: int = 16
    sequence_length: int = 128
    lr: float = 1e-3
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    min_lr: float = 0.0
    gradient_accumulation_steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field."""
        self.check_int("steps", "batch_size", "gradient_accumulation_steps")
        self.check_int("sequence_length", low=2)
        self.check_int("seed", low=0)
        _ = self.learning_rate  # which checks its own

    @property
    def learning_rate(self) -> LearningRate:
        """The rate of each update."""
        return LearningRate(
            lr=self.lr,
            lr_scheduler_type=self.lr_scheduler_type,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            min_lr=self.min_lr,
        )


@dataclass(frozen=True)
class Recipe:
    """What is needed to build and train a model."""

    config: MoeLMConfig | MoeLayerConfig
    optimizer: Optimizer
    schedule: Schedule


def recipe_from_dict(data: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """The recipe of the tables ``model``, ``optimizer`` and ``training``; ``kind`` names the classes.

    A mapping without any of these tables is taken as the table ``model``. A ``capacity_factor`` without
    ``tokens_per_batch`` is one of the batches of the table ``training``, where there is one.

    Raises:
        ConfigError: If a table, kind or field is unknown, or a value illegal.
    """
    tables = ("model", "optimizer", "training")
    if not set(data) & set(tables):
        data = {"model": data}
    for name, value in data.items():
        if name not in tables or not isinstance(value, Mapping):
            raise ConfigError(f"{where}: there is no table '{name}'. Legal: {', '.join(tables)}.")
    model = dict(data.get("model", {}))
    kind = model.pop("kind", "MoeLMConfig")
    if kind not in CONFIGS:
        raise ConfigError(f"{where}: 'kind' of the model must be one of {', '.join(CONFIGS)}, got {kind!r}.")
    optimizer = {"kind": "AdamW", **data.get("optimizer", {})}
    with _named(where, "training"):
        schedule = Schedule(**data.get("training", {}))
    if data.get("training") and model.get("capacity_factor") and model.get("tokens_per_batch") is None:
        model["tokens_per_batch"] = schedule.batch_size * schedule.sequence_length
    with _named(where, "model"):
        config = CONFIGS[kind].from_dict(model)
    with _named(where, "optimizer"):
        return Recipe(config, optimizer_from_dict(optimizer), schedule)


@contextmanager
def _named(where: str, table: str) -> Iterator[None]:
    """Say in which table of which file it is what a class of options refuses."""
    try:
        yield
    except ConfigError as error:
        if not where.lower().endswith((".toml", ".json")):
            raise
        raise ConfigError(f"{where}, table [{table}]: {error}") from error


def recipe_tables(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a preset's name, or of a ``.toml`` or ``.json`` file.

    Raises:
        ConfigError: If it is neither, or cannot be read.
    """
    if str(source) in PRESETS:
        return dict(PRESETS[str(source)])
    path = Path(source)
    try:
        text = path.read_text("utf-8")
        data = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        names = ", ".join(PRESETS)
        raise ConfigError(
            f"'{path}' is no recipe: {error}. Give a .toml or .json file, or one of: {names}."
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(f"'{path}' is no recipe: it must hold tables, got {type(data).__name__}.")
    return data
