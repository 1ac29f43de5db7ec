"""Options of the command line that say how the learning rate goes, and of how many batches an update is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from moe_onnx.build.learning_rate import LR_SCHEDULES

F = TypeVar("F", bound=Callable[..., Any])


def schedule_options(command: F) -> F:
    """The options that fill the fields of a ``Schedule`` beside steps, sizes, rate and seed."""
    options = [
        click.option(
            "--lr-schedule",
            "lr_scheduler_type",
            type=click.Choice(LR_SCHEDULES),
            help="How the learning rate goes down to --min-lr over --steps; default: constant.",
        ),
        click.option(
            "--warmup-steps", type=click.IntRange(min=0), help="Updates over which it rises from 0."
        ),
        click.option("--min-lr", type=float, help="Where linear and cosine end; default: 0."),
        click.option(
            "--gradient-accumulation-steps",
            "--accumulate",
            "gradient_accumulation_steps",
            type=click.IntRange(min=1),
            help="Batches of an update: the result of one that is so many times as large.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command
