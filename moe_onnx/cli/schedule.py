"""Options of ``moe-onnx train`` on how updates are made: rates, micro-batches, the loss scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from moe_onnx.build.learning_rate import LR_SCHEDULES

F = TypeVar("F", bound=Callable[..., Any])
SCALE = ("init_scale", "growth_interval")  # fields of LossScale


def schedule_options(command: F) -> F:
    """Options for fields of a ``Schedule``, and of the loss scale of float16."""
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
        click.option("--init-scale", type=float, help="First loss scale of float16; default: 65536."),
        click.option(
            "--growth-interval", type=click.IntRange(min=1), help="Updates until it doubles; default: 2000."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command
