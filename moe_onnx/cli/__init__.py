"""The command line: ``moe-onnx``."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

import moe_onnx
from moe_onnx.build.imported import missing_of_a_text
from moe_onnx.build.moe_options import DTYPES, FORMS
from moe_onnx.build.recipe import Schedule
from moe_onnx.build.training_graph import TrainingGraph
from moe_onnx.cli import graphs, huggingface, imported, inspection, language, rewriting, training, validation
from moe_onnx.cli.commands import show_info, write_cards, write_pages, write_shelf
from moe_onnx.cli.options import ASSEMBLY, CONSOLE, INTERRUPTED, Commands, build, model_options, recipe_of
from moe_onnx.cli.schedule import SCALE, schedule_options
from moe_onnx.errors import OptionError
from moe_onnx.runtime.data import BIN_DTYPES, TokenDataset
from moe_onnx.runtime.loss_scale import LossScale
from moe_onnx.runtime.routes import KERNELS, form_for
from moe_onnx.runtime.training_session import TrainingSession, default_options

FILE = click.Path(path_type=Path, dir_okay=False, exists=True)
FOLDER = click.Path(path_type=Path, file_okay=False)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(moe_onnx.__version__, prog_name="moe-onnx")
def main() -> None:
    """Mixture-of-Experts training graphs in ONNX.

    \b
    Examples:
      moe-onnx demo                                  build, check, train and sample a small model
      moe-onnx export --experts 8 --top-k 2 -o model write training graphs
      moe-onnx train model --text book.txt -o run    train them
      moe-onnx export --from-hf mixtral -o model     those of a checkpoint of Hugging Face
      moe-onnx train-graph lm.onnx --loss cross-entropy -o model  those of any ONNX model
      moe-onnx to-hf run trained                     the trained checkpoint back
      moe-onnx eval model --checkpoint run --text book.txt      loss, perplexity, load of experts
      moe-onnx generate model --checkpoint run --prompt "The "  what it says
      moe-onnx inspect mixtral-8x7b                  what a model costs
      moe-onnx info model                            what is in them
      moe-onnx validate model/grad.onnx --level run  whether they are right
      moe-onnx rewrite model/grad.onnx --passes expand -o plain.onnx      in standard operators alone

    Exit codes: 0 done, 1 the work failed (a loss that is not finite, errors found), 2 wrong usage or input,
    130 interrupted.
    """  # noqa: D301 (click's mark for text that must not be wrapped)


@main.command()
@click.option("--text", type=FILE, help="Train on the bytes of this file. Default: Python's help topics.")
@click.option("--steps", type=click.IntRange(min=1), help="Default: 400.")
@click.option(
    "-o", "--output", type=FOLDER, default="moe-onnx-demo", show_default=True, help="Where to write to."
)
def demo(text: Path | None, steps: int | None, output: Path) -> None:
    """Build a small MoE language model, check its graphs, train it on English and print a sample.

    \b
    Examples:
      moe-onnx demo
      moe-onnx demo --text book.txt --steps 1000 -o my-demo

    Takes up to two minutes on two cores. Writes model/, checkpoint/, metrics.jsonl, loss.svg and
    expert_load.svg.
    """  # noqa: D301
    sys.exit(training.demo(text, steps, output))


@main.command()
@model_options
@click.option(
    "--from-hf",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of a checkpoint of Hugging Face, whose weights are written too.",
)
@click.option(
    "--assembly", default=ASSEMBLY, show_default=True, help="Some of step, grad, apply, eval, forward."
)
@click.option("--dtype", type=click.Choice(DTYPES), help="What to compute in; parameters are float32.")
@click.option(
    "--optimize-for",
    type=click.Choice(list(FORMS)),
    default="body",
    show_default=True,
    help="What the graphs are fast with: function bodies, in any runtime, or this package's native kernels.",
)
@click.option("-o", "--output", type=FOLDER, required=True, help="Folder for the graphs and manifest.json.")
def export(assembly: str, optimize_for: str, output: Path, from_hf: Path | None, **model: Any) -> None:
    """Write the training graphs of a model, and say what is in them.

    \b
    Examples:
      moe-onnx export --config recipe.toml -o model
      moe-onnx export --preset mixtral-8x7b -o model
      moe-onnx export --layers 4 --hidden-size 256 --experts 8 --top-k 2 -o model
      moe-onnx export --config recipe.toml --optimize-for native -o model
      moe-onnx export --assembly step --optimizer sgd --set qk_norm=head -o model
      moe-onnx export --dispatch routing_map --capacity-factor 1.25 --set tokens_per_batch=2048 -o model
      moe-onnx export --config tiny_moe_lm --dtype bfloat16 -o model
      moe-onnx export --router sigmoid --set router_selection_bias=true --aux-loss sequence -o model
      moe-onnx export --from-hf mixtral --set router_aux_loss_coef=0.02 -o model
    """  # noqa: D301
    if from_hf is None:
        graph = build(recipe_of(**model), assembly, optimize_for=optimize_for)
    else:
        graph = huggingface.graph_of(from_hf, assembly, optimize_for=optimize_for, **model)
    graph.save(output)
    graphs.print_graphs(graph)
    CONSOLE.print(f"written to {output}", markup=False)


@main.command()
@click.argument("graph", required=False, type=click.Path(path_type=Path, file_okay=False, exists=True))
@model_options
@click.option("--text", type=FILE, help="Train on this file: its bytes, or its tokens by a tokenizer.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True),
    help="Folder with tokenizer.json. Default: that of the run, or of the checkpoint the model comes from.",
)
@click.option("--tokens", type=FILE, help="Train on the token ids of a .npy or .bin file.")
@click.option("--dtype", type=click.Choice(BIN_DTYPES), help="Of a .bin file; default: uint16.")
@click.option("--steps", type=click.IntRange(min=1), help="Updates in all; default: the recipe's, or 1000.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Default: the recipe's, or 16.")
@click.option("--sequence-length", type=click.IntRange(min=2), help="Default: the recipe's, or 128.")
@click.option("--lr", type=float, help="Learning rate, after the warm-up; default: the recipe's, or 0.001.")
@schedule_options
@click.option("--seed", type=click.IntRange(min=0), help="Of the initial weights and data order; default: 0.")
@click.option("-o", "--output", type=FOLDER, required=True, help="Folder of the run.")
@click.option("--resume", is_flag=True, help="Go on from the run's checkpoint, to the same numbers.")
@click.option(
    "--eval-every", type=click.IntRange(min=0), default=0, help="Steps between evaluations; 0: none."
)
@click.option(
    "--save-every", type=click.IntRange(min=0), default=0, help="Steps between checkpoints; 0: at the end."
)
@click.option("--kernels", type=click.Choice(KERNELS), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Of onnxruntime; default: its own choice.")
@click.option("--skip-non-finite", is_flag=True, help="Leave out batches whose loss is not finite.")
@click.pass_context
def train(
    ctx: click.Context,
    /,
    graph: Path | None,
    text: Path | None,
    tokenizer: Path | None,
    tokens: Path | None,
    dtype: str | None,
    output: Path,
    resume: bool,
    eval_every: int,
    save_every: int,
    kernels: str,
    threads: int | None,
    skip_non_finite: bool,
    **rest: Any,
) -> None:
    """Train the graphs in the folder GRAPH, or those of --config and the model's options.

    The latter are built in the form that is fast with the kernels that run them.

    \b
    Examples:
      moe-onnx train model --text book.txt --steps 1000 --eval-every 100 -o run
      moe-onnx train --config tiny_moe_lm --text book.txt -o run
      moe-onnx train model --text book.txt --tokenizer mixtral -o run
      moe-onnx train model --tokens ids.bin --dtype uint16 --batch-size 4 -o run
      moe-onnx train model --text book.txt --lr-schedule cosine --warmup-steps 100 --min-lr 1e-5 -o run
      moe-onnx train model --text book.txt --batch-size 4 --gradient-accumulation-steps 8 -o run
      moe-onnx train model --text book.txt --steps 1000 -o run --resume

    Writes metrics.jsonl, loss.svg, expert_load.svg and checkpoint/ (model.safetensors has the names of
    transformers), of which the last two are kept. A twentieth of the text is held out for --eval-every.
    Ctrl-C saves a checkpoint first. A model to build computes in 16 bit by --set dtype=bfloat16 or float16.
    """  # noqa: D301
    given = {field.name: rest.pop(field.name) for field in fields(Schedule)}
    scale = {name: value for name in SCALE if (value := rest.pop(name)) is not None}
    if (text is None) == (tokens is None):
        raise click.UsageError("Give either --text or --tokens.")
    if tokenizer is not None and text is None:
        raise click.UsageError("--tokenizer is for --text.")
    if graph is not None and any(value not in (None, ()) for value in rest.values()):
        raise click.UsageError("Give either a folder GRAPH or options of a model to build, not both.")
    if not resume and training.overwrites(output):
        raise OptionError(
            f"There is a run in '{output}' already. Give --resume to go on with it, or another folder."
        )
    if graph is None:
        recipe = recipe_of(schedule=given, **rest)
        how = recipe.schedule
        built = build(recipe, optimize_for=form_for(kernels))
    else:
        how = Schedule(**{name: value for name, value in given.items() if value is not None})
        built = TrainingGraph.load(graph)
    if missing := missing_of_a_text(built.manifest.config):
        raise OptionError(
            f"moe-onnx train trains language models, and this is none: {missing}. Train it by "
            "moe_onnx.TrainingSession."
        )
    run_of = output if resume else None
    reader = None if text is None else huggingface.tokenizer_of(tokenizer, built, run_of)
    if text is not None and reader is None and (known := built.manifest.config["vocab_size"]) != 256:
        CONSOLE.print(
            f"{text}: its bytes are the tokens, and the model knows {known:,} (give its --tokenizer)",
            markup=False,
            soft_wrap=True,
        )
    source = (text or tokens) if reader is None else huggingface.tokens_of(reader, text, built)  # type: ignore[arg-type]
    data = TokenDataset(
        source,  # type: ignore[arg-type]  # one of them is given
        batch_size=how.batch_size,
        sequence_length=how.sequence_length,
        vocab_size=built.manifest.config["vocab_size"],
        dtype=dtype,
        seed=how.seed,
    )
    session = TrainingSession(
        built,
        seed=how.seed,
        lr=how.learning_rate,
        kernels=kernels,
        sess_options=default_options(threads),
        non_finite="skip" if skip_non_finite else "raise",
        loss_scale=LossScale(**scale) if scale else None,
    )
    run = training.Run(output, session, data)
    if resume:
        run.resume()
    if session.global_step > how.steps:
        raise OptionError(
            f"The run in '{output}' has made {session.global_step} updates, more than --steps {how.steps}, "
            "which counts those before as well. Give a larger one."
        )
    if graph is None:  # not before the checkpoint is known to be of this model
        built.save(output / "model")
    huggingface.carry_origin(built, reader, output, resume=resume)
    code = run.train(how.steps, eval_every, save_every, how.gradient_accumulation_steps)
    if code == INTERRUPTED:
        CONSOLE.print(
            f"to go on: {training.resume_command(ctx.find_root().obj)}", markup=False, soft_wrap=True
        )
    elif not code:
        CONSOLE.print(f"step {session.global_step}, written to {output}", markup=False)
    sys.exit(code)


@main.command()
@click.argument("path", required=False, type=click.Path(path_type=Path, exists=True))
def info(path: Path | None) -> None:
    """Show what PATH holds, a folder of graphs or a model; without it, versions and routes.

    \b
    Examples:
      moe-onnx info
      moe-onnx info model
      moe-onnx info model/grad.onnx
    """  # noqa: D301
    if path is None:
        show_info()
    else:
        graphs.print_path(path)


@main.command()
@click.argument("folder", default="ops", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is stale.")
def cards(folder: Path, check: bool) -> None:
    """Write the generated files of FOLDER (the project's ops/): card.md and function.txt.

    \b
    Examples:
      moe-onnx cards
      moe-onnx cards ops --check
    """  # noqa: D301
    stale = write_cards(folder, check=check)
    sys.exit(1 if check and stale else 0)


@main.command()
@click.argument("folder", default="models", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is stale.")
def shelf(folder: Path, check: bool) -> None:
    """Write the generated files of FOLDER (the project's models/): graph.txt and losses.json, or summary.txt.

    Takes minutes: graphs of real sizes are among them.

    \b
    Examples:
      moe-onnx shelf
      moe-onnx shelf models --check
    """  # noqa: D301
    stale = write_shelf(folder, check=check)
    sys.exit(1 if check and stale else 0)


@main.command()
@click.argument(
    "folder",
    default="moe_onnx/validation/pages",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is stale.")
def pages(folder: Path, check: bool) -> None:
    """Write the generated pages of the codes of moe-onnx validate to FOLDER.

    \b
    Examples:
      moe-onnx pages
      moe-onnx pages --check
    """  # noqa: D301
    stale = write_pages(folder, check=check)
    sys.exit(1 if check and stale else 0)


for command in (
    imported.train_graph,
    *huggingface.COMMANDS,
    *inspection.COMMANDS,
    *language.COMMANDS,
    *rewriting.COMMANDS,
    *validation.COMMANDS,
):
    main.add_command(command)
