"""The commands ``train`` and ``demo``: progress, files of a run, and the sample at the end."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moe_onnx.build.recipe import recipe_from_dict, recipe_tables
from moe_onnx.cli.curve import write_curve
from moe_onnx.cli.graphs import print_operators
from moe_onnx.cli.heatmap import write_heatmap
from moe_onnx.cli.options import CONSOLE, INTERRUPTED, WORK_FAILED, build
from moe_onnx.errors import DataError, MoeOnnxError, OptionError
from moe_onnx.inspection.inspection import operators
from moe_onnx.runtime.checkpoint import has_checkpoint
from moe_onnx.runtime.data import TokenDataset
from moe_onnx.runtime.generate import generate
from moe_onnx.runtime.interrupts import interrupts_deferred
from moe_onnx.runtime.routes import form_for
from moe_onnx.runtime.train import train
from moe_onnx.runtime.training_session import TrainingSession, default_options
from moe_onnx.spec import DOMAIN
from moe_onnx.validation.saying import counted
from moe_onnx.validation.validate import validate

GRADIENT_OPS = ("MoeInitRoutingV2Grad", "MoeTokenUnpermuteWithRoutingMapGrad")
LEVEL = "static"  # of validating the demo's graphs; "run" takes ten seconds more


class Run:
    """The folder of a run: ``metrics.jsonl``, pictures and ``checkpoint/``, and its progress bar."""

    def __init__(self, folder: Path, session: TrainingSession, data: TokenDataset) -> None:
        self.folder, self.session, self.data = folder, session, data
        self.checkpoint = folder / "checkpoint"
        self.rows: list[dict[str, Any]] = []

    def resume(self) -> None:
        """Go on from the folder's checkpoint; rows of steps after it are dropped."""
        if not has_checkpoint(self.checkpoint):
            raise DataError(
                f"There is nothing to resume in '{self.checkpoint}'. Leave out --resume to start."
            )
        about = self.session.load_checkpoint(self.checkpoint)
        if about["data"] is not None:
            self.data.load_state_dict(about["data"])
        metrics = self.folder / "metrics.jsonl"
        lines = metrics.read_text("utf-8").splitlines() if metrics.exists() else []
        rows = [_row(line) for line in lines]
        self.rows = [row for row in rows if row is not None and row["step"] <= self.session.global_step]
        CONSOLE.print(f"resumed at step {self.session.global_step}")

    def train(self, steps: int, eval_every: int, save_every: int, accumulate: int = 1) -> int:
        """Train and write the run's files; the exit code."""
        self.folder.mkdir(parents=True, exist_ok=True)
        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=CONSOLE,
            disable=not CONSOLE.is_terminal,
        )
        code = 0
        # What is resumed is saved already: another copy of it would push the older checkpoint out.
        is_done = self.session.global_step >= steps and has_checkpoint(self.checkpoint)
        path = self.folder / "metrics.jsonl"
        with path.open("w", encoding="utf-8") as file, bar:
            file.writelines(json.dumps(row) + "\n" for row in self.rows)
            task = bar.add_task("", total=steps, completed=self.session.global_step, note="")
            start, tokens, before, held_out = time.perf_counter(), 0, len(self.rows), ""

            def on_step(metrics: dict[str, Any]) -> None:
                nonlocal tokens, held_out
                row = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in metrics.items()}
                self.rows.append(row)
                file.write(json.dumps(row) + "\n")
                tokens += accumulate * self.data.batch_size * self.data.sequence_length
                now = time.perf_counter()
                rate = f"{tokens / (now - start):,.0f} tokens/s"
                if "eval_loss" in row:
                    held_out = f"  held-out {row['eval_loss']:.4f}"
                note = f"loss {row['loss']:.4f}{held_out}  {rate}"
                bar.update(task, completed=row["step"], note=note)
                every = max(1, steps // 10)
                told = row["step"] % every == 0 or row["step"] == 1 or "eval_loss" in row
                if not CONSOLE.is_terminal and told:
                    left = (now - start) / (len(self.rows) - before) * (steps - row["step"])
                    CONSOLE.print(f"step {row['step']}/{steps}  {note}  {left:.0f} s left")

            try:
                train(
                    self.session,
                    self.data,
                    steps,
                    on_step=on_step,
                    eval_every=eval_every,
                    checkpoint=None if is_done else self.checkpoint,
                    save_every=0 if is_done else save_every,
                    gradient_accumulation_steps=accumulate,
                )
            except (KeyboardInterrupt, MoeOnnxError) as error:
                code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else WORK_FAILED
                if len(self.rows) > before or not has_checkpoint(self.checkpoint):
                    with interrupts_deferred():
                        self.session.save_checkpoint(self.checkpoint, data=self.data.state_dict())
                message = "interrupted" if code == INTERRUPTED else f"error: {error}"
                CONSOLE.print(
                    f"{message}\nstep {self.session.global_step} is saved in {self.checkpoint}", markup=False
                )
        self.write_pictures()
        return code

    def write_pictures(self) -> None:
        """Write ``loss.svg`` and ``expert_load.svg``."""
        series = [(row["step"], row["loss"]) for row in self.rows if not row.get("skipped")]
        held_out = [(row["step"], row["eval_loss"]) for row in self.rows if "eval_loss" in row]
        write_curve(self.folder / "loss.svg", series, held_out, "Training loss (nats per token)")
        loads = [(row["step"], row["expert_load"]) for row in self.rows if row.get("expert_load")]
        if loads:
            write_heatmap(self.folder / "expert_load.svg", loads)


def demo(text: Path | None, steps: int | None, folder: Path) -> int:
    """Build, check, train and sample the preset ``tiny_moe_lm``; the exit code."""
    if overwrites(folder):
        raise OptionError(f"There is a run in '{folder}' already. Give another folder with -o, or remove it.")
    recipe = recipe_from_dict(recipe_tables("tiny_moe_lm"))
    how = recipe.schedule
    steps = how.steps if steps is None else steps
    graph = build(recipe, optimize_for=form_for("auto"))
    graph.save(folder / "model")
    for model in graph.models.values():
        onnx.checker.check_model(model, full_check=True)
    print_operators(graph.models, short=True)
    found = operators(graph.models["grad"])
    for name in GRADIENT_OPS:
        CONSOLE.print(f"{name}: {found[DOMAIN, name]} in the gradient graph")
    if not all(found[DOMAIN, name] for name in GRADIENT_OPS):
        CONSOLE.print("error: a gradient operator is missing from the graph")
        return WORK_FAILED
    CONSOLE.print("onnx.checker accepts all graphs (full_check)")
    if not _is_valid(folder / "model", list(graph.models)):
        return WORK_FAILED
    data = TokenDataset(
        _help_topics() if text is None else text,
        batch_size=how.batch_size,
        sequence_length=how.sequence_length,
        seed=how.seed,
    )
    CONSOLE.print(
        f"{graph.manifest.num_parameters:,} parameters, {len(data):,} bytes of "
        f"{'Python help topics' if text is None else text}, {steps} steps of "
        f"{how.batch_size} x {how.sequence_length}"
    )
    # Small matrices: more threads wait for each other; and the same numbers anywhere.
    options = default_options(1)
    session = TrainingSession(graph, seed=how.seed, lr=how.learning_rate, sess_options=options)
    run = Run(folder, session, data)
    code = run.train(steps, eval_every=max(1, steps // 6), save_every=0)
    if code:
        return code
    first, last = run.rows[0]["lm_loss"], run.rows[-1]["eval_loss"]
    CONSOLE.print(
        f"\nloss {first:.3f} -> {last:.3f} on held-out text, in nats per byte "
        f"(all bytes alike: {math.log(256):.3f})"
    )
    prompt = bytes(data.tokens[:32].astype(np.uint8))
    sample = bytes(generate(session, list(prompt), 240, temperature=0.7, seed=0, context=how.sequence_length))
    CONSOLE.print(f"\nsample (temperature 0.7, prompt {prompt.decode('utf-8', 'replace')!r}):", markup=False)
    readable = (
        c if c.isprintable() or c == "\n" else "\N{MIDDLE DOT}" for c in sample.decode("utf-8", "replace")
    )
    CONSOLE.print("".join(readable), style="italic", markup=False)
    CONSOLE.print(
        f"\nwritten to {folder}: model/, checkpoint/, metrics.jsonl, loss.svg, expert_load.svg", markup=False
    )
    if not last < first:
        CONSOLE.print("error: the loss did not fall")
        return WORK_FAILED
    return 0


def _is_valid(folder: Path, names: list[str]) -> bool:
    """Validate the graphs of a folder and say how it went: one line, and the errors."""
    with CONSOLE.status("validating the graphs ..."):
        reports = {name: validate(folder / f"{name}.onnx", level=LEVEL) for name in names}
    checks = sum(len(report.checks) for report in reports.values())
    said = f"{counted(*reports.values())}; {checks} checks of level {LEVEL} of {', '.join(names)}"
    CONSOLE.print(f"moe-onnx validate: {said}\n", soft_wrap=True)
    for name, report in reports.items():
        for finding in report.of_severity("error"):
            CONSOLE.print(f"error: {name}.onnx: {finding}", markup=False, soft_wrap=True)
    return all(report.ok for report in reports.values())


def resume_command(words: list[str]) -> str:
    """The command line that goes on with a run."""
    import shlex

    return shlex.join(["moe-onnx", *words, *([] if "--resume" in words else ["--resume"])])


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None  # the last line of a process that was killed
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _help_topics() -> np.ndarray[Any, Any]:
    """Real English that every Python brings along: the text of its help topics."""
    from pydoc_data import topics

    return np.frombuffer("\n\n".join(topics.topics.values()).encode(), np.uint8)


def overwrites(folder: Path) -> bool:
    """Whether a run is in a folder already."""
    return has_checkpoint(folder / "checkpoint") or os.path.exists(folder / "metrics.jsonl")
