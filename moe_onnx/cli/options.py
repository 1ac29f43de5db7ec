"""What the commands share: how a model is named on the command line, and how errors leave."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import click
from rich.console import Console

from moe_onnx.build.moe_options import (
    AUX_LOSSES,
    DISPATCH_MODES,
    DISPATCHES,
    DROP_POLICIES,
    ROUTER_SCORES,
)
from moe_onnx.build.optimizers import SGD, AdamW, Optimizer
from moe_onnx.build.presets import PRESETS
from moe_onnx.build.recipe import Recipe, Schedule, recipe_from_dict, recipe_tables
from moe_onnx.build.training_graph import TrainingGraph, build_training_graph
from moe_onnx.errors import MoeOnnxError, NonFiniteError

CONSOLE = Console(highlight=False)
ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)
WORK_FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130
ASSEMBLY = "grad+apply+eval+forward"

F = TypeVar("F", bound=Callable[..., Any])
# Options of the command line, and the config fields they set.
_FIELDS = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "vocab_size": "vocab_size",
    "expert_capacity": "expert_capacity",
    "active_num": "active_num",
}
_LIMITS = ("capacity_factor", "expert_capacity", "active_num", "tokens_per_batch")
_WORDS = {
    "router": ("router_scores", ROUTER_SCORES),
    "aux_loss": ("router_aux_loss", AUX_LOSSES),
    "dispatch": ("dispatch", DISPATCHES),
    "dispatch_mode": ("dispatch_mode", DISPATCH_MODES),
    "drop_policy": ("token_drop_policy", DROP_POLICIES),
}
# By the words of the command line.
OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "sgd": SGD}


class Commands(click.Group):
    """A group whose commands print errors in one line and exit with 1 (the work), 2 (the input) or 130."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words as typed, so that a command can say how to go on."""
        ctx.obj = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except NonFiniteError as error:
            fail(str(error), WORK_FAILED)
        except (MoeOnnxError, OSError) as error:
            fail(str(error), WRONG_INPUT)
        except KeyboardInterrupt:
            fail("interrupted.", INTERRUPTED)


def fail(message: str, code: int) -> None:
    """Print an error and leave."""
    ERRORS.print("[bold red]error:[/] ", end="")
    ERRORS.print(message, markup=False)
    sys.exit(code)


def model_options(command: F) -> F:
    """The options that say which model and optimizer to build."""
    options = [
        click.option("--config", help="A .toml or .json recipe, or the name of a preset."),
        click.option("--preset", type=click.Choice(list(PRESETS)), help="The recipe of this name."),
        *(
            click.option(f"--{name.replace('_', '-')}", name, type=int, help=f"{field}.")
            for name, field in _FIELDS.items()
        ),
        click.option(
            "--capacity-factor",
            type=float,
            help="Rows of each expert, relative to a balanced load; implies --dispatch-mode drop_pad.",
        ),
        *(
            click.option(
                f"--{name.replace('_', '-')}",
                name,
                type=click.Choice(words),
                help=f"{field}.",
                show_choices=True,
            )
            for name, (field, words) in _WORDS.items()
        ),
        click.option(
            "--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Any other field of the config."
        ),
        click.option(
            "--optimizer", type=click.Choice(list(OPTIMIZERS)), help="Default: the recipe's, or adamw."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def recipe_of(
    config: str | None,
    settings: tuple[str, ...],
    optimizer: str | None,
    *,
    preset: str | None = None,
    schedule: Mapping[str, Any] | None = None,
    **given: int | float | str | None,
) -> Recipe:
    """The recipe of :func:`model_options`; ``schedule``: values for the table ``training``.

    A capacity is one of ``drop_pad``, and a number of active rows one of ``active``: that need not be said.
    """
    if config is not None and preset is not None:
        raise click.UsageError("Give either --config or --preset, not both.")
    config = config or preset
    tables = {} if config is None else recipe_tables(config)
    if not {"model", "optimizer", "training"} & set(tables):
        tables = {"model": tables}
    model = {**tables.get("model", {})}
    said = said_of(given)
    if said.keys() & {*_LIMITS, "dispatch_mode"}:  # the recipe's own would contradict it
        model = {name: value for name, value in model.items() if name not in {*_LIMITS, "dispatch_mode"}}
    model |= said
    model |= set_of(settings)
    imply_mode(model)
    tables = {**tables, "model": model}
    how: dict[str, Any] = {}
    if schedule is not None:
        how = {name: value for name, value in schedule.items() if value is not None}
        tables["training"] = {**asdict(Schedule()), **tables.get("training", {}), **how}
    kind = None if optimizer is None else OPTIMIZERS[optimizer].__name__
    if kind is not None and kind != tables.get("optimizer", {}).get("kind", "AdamW"):
        tables["optimizer"] = {"kind": kind}
    # Of what is wrong with both together, neither is said to be the place.
    is_alone = config is not None and not (said or settings or how or optimizer)
    return recipe_from_dict(tables, str(config) if is_alone else "options")


def said_of(given: Mapping[str, int | float | str | None]) -> dict[str, Any]:
    """Config fields by name, of the options of :func:`model_options` that were given."""
    fields = {**_FIELDS, **{name: field for name, (field, _) in _WORDS.items()}}
    return {fields.get(name, name): value for name, value in given.items() if value is not None}


def set_of(settings: Sequence[str]) -> dict[str, Any]:
    """Config fields by name, of the options ``--set FIELD=VALUE``."""
    done = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise click.UsageError(f"--set takes FIELD=VALUE, got {setting!r}.")
        done[name.strip()] = _value(text.strip())
    return done


def imply_mode(model: dict[str, Any]) -> None:
    """A capacity is one of ``drop_pad``, and a number of active rows one of ``active``."""
    if model.get("capacity_factor") is not None or model.get("expert_capacity") is not None:
        model.setdefault("dispatch_mode", "drop_pad")
    if model.get("active_num"):
        model.setdefault("dispatch_mode", "active")


def build(recipe: Recipe, assembly: str = ASSEMBLY, *, optimize_for: str = "body") -> TrainingGraph:
    """Build the graphs of a recipe, saying so: large models take their time."""
    with CONSOLE.status(f"building {assembly} ..."):
        return build_training_graph(
            recipe.config, assembly=assembly, optimizer=recipe.optimizer, optimize_for=optimize_for
        )


def _value(text: str) -> Any:
    if text.lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)  # a word without its quotes
