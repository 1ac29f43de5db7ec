"""``moe-onnx validate``, ``explain``, ``compare`` and ``golden``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.markdown import Markdown

from moe_onnx.cli.options import CONSOLE, WORK_FAILED
from moe_onnx.cli.places import STDOUT, file_of, known_place, spare_sources
from moe_onnx.errors import OptionError
from moe_onnx.validation import families
from moe_onnx.validation.device.compare import Comparison
from moe_onnx.validation.device.compare import compare as compare_tensors
from moe_onnx.validation.device.golden import golden_modes, save_golden
from moe_onnx.validation.device.golden_calls import MAKERS
from moe_onnx.validation.device.golden_data import DTYPES, Sizes
from moe_onnx.validation.device.standards import LEVELS as STANDARD_LEVELS
from moe_onnx.validation.documents.targets import TARGETS
from moe_onnx.validation.findings import LEVELS, Report, json_text, write_beside
from moe_onnx.validation.html import report_page
from moe_onnx.validation.pages import code_page
from moe_onnx.validation.printing import print_comparison, print_report
from moe_onnx.validation.registry import CODES
from moe_onnx.validation.validate import validate as validate_model

F = TypeVar("F", bound=Callable[..., Any])
OUTPUT = click.Path(path_type=Path, dir_okay=False, writable=True, allow_dash=True)
ANY = click.Path(path_type=Path)


def _is_shown(done: Report | Comparison, json_file: Path | None) -> bool:
    """Write the JSON where it is wanted; whether people get to see it too: stdout has the JSON alone."""
    if json_file == STDOUT:
        click.echo(json_text(done.to_dict()), nl=False)
    elif json_file is not None:
        done.save_json(json_file)
    return json_file != STDOUT


@click.command()
@click.argument("model", type=ANY)
@click.option("--level", type=click.Choice(LEVELS), default="static", show_default=True)
@click.option("--target", type=click.Choice(TARGETS), help="Hold it to the limits of this device as well.")
@click.option("--ub-size", type=click.IntRange(min=1), help="Bytes of the device's unified buffer.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of inputs drawn for runs.")
@click.option(
    "--json", "json_file", type=OUTPUT, callback=known_place, help="Write the report as JSON; - to stdout."
)
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    callback=known_place,
    help="Write the report as one HTML page.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show every check, and why one did not apply.")
def validate(
    model: Path,
    level: str,
    target: str | None,
    ub_size: int | None,
    seed: int,
    json_file: Path | None,
    html_file: Path | None,
    verbose: bool,
) -> None:
    """Check MODEL, any ONNX file: before it costs a training run.

    \b
    static  file, external data, versions, structure, operators, shapes, hazards, the rules of the source
            documents, the manifest of a training graph against its nodes
    run     also sessions by every route, equal outputs, repeats, threads, other sizes, empty batches
    full    also every gradient against finite differences in float64

    Models with more than 2 GiB of weights are not loaded for run and full, and a run that takes longer
    than 60 s is ended: -v shows what was left out.

    \b
    Examples:
      moe-onnx validate model/grad.onnx
      moe-onnx validate model/step.onnx --level full --html report.html
      moe-onnx validate export.onnx --target ascend910b --json report.json
      moe-onnx explain MO203

    Exit codes: 0 no errors (warnings and notes may be there), 1 errors were found, 2 MODEL could not be
    read, or wrong usage.
    """  # noqa: D301
    spare_sources((file_of(json_file), html_file), [model])
    with CONSOLE.status(f"validating {model} ..."):
        report = validate_model(model, level=level, target=target, ub_size=ub_size, seed=seed)
    if html_file is not None:
        write_beside(html_file, report_page(report))
    if _is_shown(report, json_file):
        print_report(report, CONSOLE, verbose=verbose)
    sys.exit(0 if report.ok else WORK_FAILED)


@click.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Print the page of a CODE of moe-onnx validate, or the list of all.

    \b
    Examples:
      moe-onnx explain
      moe-onnx explain MO203
    """  # noqa: D301
    families.load()
    if code is None:
        for name in sorted(CODES):
            CONSOLE.print(
                f"{name}  {CODES[name].severity:8} {CODES[name].title}", markup=False, soft_wrap=True
            )
        return
    if code.upper() not in CODES:
        raise OptionError(f"There is no code {code!r}; moe-onnx explain lists all.")
    CONSOLE.print(Markdown(code_page(code.upper()).partition("\n")[2]))


@click.command()
@click.argument("expected", type=ANY)
@click.argument("actual", type=ANY)
@click.option("--benchmark", type=ANY, help="What a second implementation of the same dtype gave.")
@click.option(
    "--standard",
    type=click.Choice(list(STANDARD_LEVELS)),
    default="L1",
    show_default=True,
    help="Level of the double benchmark.",
)
@click.option("--threshold", type=click.FloatRange(min=0), help="Of MERE, instead of the dtype's own.")
@click.option("--max-exceeding", type=click.FloatRange(0, 1), help="Share of elements above the threshold.")
@click.option(
    "--rename", multiple=True, metavar="EXPECTED=ACTUAL", help="A tensor that has another name; repeatable."
)
@click.option(
    "--json", "json_file", type=OUTPUT, callback=known_place, help="Write it as JSON; - to stdout, alone."
)
@click.option("--histogram/--no-histogram", default=True, show_default=True)
@click.pass_context
def compare(
    ctx: click.Context,
    expected: Path,
    actual: Path,
    benchmark: Path | None,
    standard: str,
    threshold: float | None,
    max_exceeding: float | None,
    rename: tuple[str, ...],
    json_file: Path | None,
    histogram: bool,
) -> None:
    """Hold ACTUAL tensors, as of a device, to EXPECTED ones: which operator is wrong?

    EXPECTED and ACTUAL are .npy, .npz, .safetensors or .pt files (the last where torch is installed), or
    folders of them. Tensors go together by name.

    Without --benchmark the mean relative error (MERE) must be below a threshold of the dtype, the maximum
    (MARE) below ten times that: float16 2^-10, bfloat16 2^-7, float32 2^-13. With it, the errors may be so
    many times the benchmark's: L0 10 / 2 / 2, L1 5 / 1.5 / 1.5, L2 2 / 1.2 / 1.2 (MARE / MERE / RMSE).

    \b
    Examples:
      moe-onnx compare golden.npz npu.npz
      moe-onnx compare expected_dumps npu_dumps --benchmark gpu_dumps --standard L2
      moe-onnx compare golden.npz npu.npz --threshold 0.001 --max-exceeding 0.001 --json result.json
      moe-onnx compare golden.npz npu.npz --rename grad_x=output.0

    Exit codes: 0 all within, 1 some are not, or are missing, 2 a file could not be read, or wrong usage.
    """  # noqa: D301
    if benchmark is None and ctx.get_parameter_source("standard") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--standard is the level of the double benchmark: give --benchmark as well.")
    names = {}
    for one in rename:
        ours, equals, theirs = one.partition("=")
        if not equals:
            raise click.UsageError(f"--rename takes EXPECTED=ACTUAL, got {one!r}.")
        names[ours] = theirs
    spare_sources([file_of(json_file)], (expected, actual, benchmark))
    done = compare_tensors(
        expected,
        actual,
        benchmark=benchmark,
        level=standard,
        threshold=threshold,
        max_exceeding=max_exceeding,
        names=names,
    )
    if _is_shown(done, json_file):
        print_comparison(done, CONSOLE, histogram=histogram)
    sys.exit(0 if done.ok else WORK_FAILED)


def _size_options(command: F) -> F:
    for field in reversed(fields(Sizes)):
        command = click.option(
            f"--{field.name.replace('_', '-')}",
            type=click.IntRange(min=1),
            default=field.default,
            show_default=True,
        )(command)
    return command


@click.command()
@click.argument("op", required=False)
@click.option("--case", help="The operator's mode, or 'all'; default: its first.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@click.option("--probs-dtype", type=click.Choice(list(DTYPES)), help="Default: dtype.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--exact", is_flag=True, help="Data whose results are equal to the bit in any order of sums.")
@_size_options
@click.option("-o", "--output", type=ANY, help="A file.npz; with --case all a folder.")
def golden(
    op: str | None,
    case: str | None,
    dtype: str,
    probs_dtype: str | None,
    seed: int,
    exact: bool,
    output: Path | None,
    **sizes: int,
) -> None:
    """Write inputs and expected outputs of the operator OP as .npz, to feed a test of a device.

    Without OP: the operators and their cases. The same arguments give the same file, byte for byte.

    \b
    Examples:
      moe-onnx golden
      moe-onnx golden MoeInitRoutingV2Grad --case drop_pad --dtype bfloat16 --seed 7 -o case.npz
      moe-onnx golden MoeTokenUnpermuteWithRoutingMapGrad --case all --tokens 4096 --hidden 7168 -o cases
      moe-onnx compare case.npz what_the_device_gave.npz
    """  # noqa: D301
    if op is None:
        for name in MAKERS:
            CONSOLE.print(f"{name}: {', '.join(golden_modes(name))}", markup=False, soft_wrap=True)
        return
    modes = golden_modes(op)
    if output is None:
        raise click.UsageError("-o is missing: where to write to.")
    files = {output: case}
    if case == "all":
        output.mkdir(parents=True, exist_ok=True)
        files = {output / f"{op}.{mode}.npz": mode for mode in modes}
    elif output.suffix != ".npz":
        raise click.UsageError(f"-o must name a file that ends in .npz, got '{output}'.")
    for path, mode in files.items():
        save_golden(
            path, op, mode=mode, dtype=dtype, probs_dtype=probs_dtype, seed=seed, exact=exact, **sizes
        )
        CONSOLE.print(f"written: {path}", markup=False, soft_wrap=True)


COMMANDS = (validate, explain, compare, golden)
