"""Axes that a model calls free take any size, and outputs have the shapes that are declared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moe_onnx.validation.findings import Finding, Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.run.feeds import Feeds, fewest_tokens, free_sizes
from moe_onnx.validation.run.messages import said
from moe_onnx.validation.run.runs import Runs, draw, listed, runs_of
from moe_onnx.validation.run.sessions import ERRORS, Outputs
from moe_onnx.validation.subject import Subject

NOT_FREE = code(
    "MO831",
    "error",
    "A free axis of a training graph is not free",
    why="The model gives the axis a name, so any size should do, but a run with other sizes than the first "
    "one fails: somewhere a size was written down as a number.",
    mend="Build the graph again, or take the size from the input (Shape) where the node that fails uses it.",
)
MAY_NOT_BE_FREE = code(
    "MO832",
    "warning",
    "A free axis may not be free",
    why="The model names the axis, so any size should do, but it ran with one size only of the ones that "
    "were tried. Exports keep sizes of the example input where the traced program computed with them: "
    "such a model runs at one size and is taken for dynamic.",
    mend="Export with dynamic shapes and check at two sizes, or give the axis its fixed size in the model.",
)
OTHER_SHAPE = code(
    "MO833",
    "warning",
    "An output has another shape than the model declares",
    why="onnxruntime only logs a warning (VerifyOutputSizes). Programs that allocate by what is declared, "
    "I/O bindings among them, then read or write the wrong number of elements.",
    mend="Declare what the model gives, or free axes.",
)
_MORE = (1, 3, 2, 4)  # sizes to try besides the first: one more and three more, twice and thrice


@check("run", NOT_FREE, MAY_NOT_BE_FREE, OTHER_SHAPE)
def sizes(subject: Subject) -> Iterator[Outcome]:
    """Free axes take three sizes each, and outputs have the shapes that are declared."""
    runs = runs_of(subject)
    if runs.why_not or runs.outputs is None:
        yield Skipped(runs.why_not)
        return
    wrong = _wrong_shapes(runs, runs.outputs, runs.feeds)
    free = free_sizes(subject)
    if not free:
        yield Skipped("the model has no free axes")
        yield from wrong
        return
    failed: list[tuple[dict[str, int], Exception]] = []
    passed = 0
    for tried in _other_sizes(runs):
        feeds = draw(subject, tried)
        if isinstance(feeds, Skipped) or passed == 2:
            continue
        try:
            outputs = runs.first.run(feeds.values)
        except ERRORS as error:
            failed.append((tried, error))
            continue
        passed += 1
        wrong = wrong or _wrong_shapes(runs, outputs, feeds)
    if failed and (runs.manifest is not None or not passed):
        runs.fixed = True
        made = NOT_FREE if runs.manifest is not None else MAY_NOT_BE_FREE
        names = [name for name in free if _alone_fails(runs, name, failed[0][0][name])] or list(free)
        last, why = failed[0]
        yield made(
            f"{'axis' if len(names) == 1 else 'axes'} {listed(names)}",
            found=f"runs with {_said(runs.feeds.sizes)}, but with {_said(last)}: {said(why)}",
            expected="any size",
            places=[f"axis {name!r}" for name in names],
        )
    yield from wrong


def _other_sizes(runs: Runs) -> Iterator[dict[str, int]]:
    base, manifest = runs.feeds.sizes, runs.manifest
    if manifest is None:
        for number in _MORE:
            yield {n: size * number if number in (2, 4) else size + number for n, size in base.items()}
        return
    fewest = fewest_tokens(manifest)
    if "batch" in base and "sequence" in base:
        for batch, sequence in ((1, 7), (3, 4)):
            length = max(sequence, -(-fewest // batch))
            yield {n: {"batch": batch, "sequence": length}.get(n, batch * length) for n in base}
    else:
        for more in (0, 4):
            yield {n: max(3, fewest) + more * 2 for n in base}


def _alone_fails(runs: Runs, name: str, size: int) -> bool:
    feeds = draw(runs.subject, {**runs.feeds.sizes, name: size})
    if isinstance(feeds, Skipped):
        return False
    try:
        runs.first.run(feeds.values)
    except ERRORS:
        return True
    return False


def _wrong_shapes(runs: Runs, outputs: Outputs, feeds: Feeds) -> list[Finding]:
    if runs.manifest is None and (feeds.guessed or _depends_on_values(runs)):
        return []
    known = free_sizes(runs.subject)
    found: list[Finding] = []
    for info in runs.subject.model.graph.output:
        if info.name not in outputs or not info.type.tensor_type.HasField("shape"):
            continue
        dims = info.type.tensor_type.shape.dim
        fixed = [d.HasField("dim_value") and d.dim_value >= 0 for d in dims]
        declared: list[int | str] = [
            d.dim_value if is_fixed else d.dim_param for d, is_fixed in zip(dims, fixed, strict=True)
        ]
        sizes = [feeds.sizes.get(d, -1) if isinstance(d, str) and d in known else d for d in declared]
        actual = outputs[info.name].shape
        fits = len(sizes) == len(actual) and all(
            not isinstance(size, int) or size == real for size, real in zip(sizes, actual, strict=True)
        )
        if not fits:
            found.append(
                OTHER_SHAPE(
                    f"output {info.name!r}",
                    found=f"shape {list(actual)} with {_said(feeds.sizes) or 'its fixed sizes'}",
                    expected=f"[{', '.join(str(d or '?') for d in declared)}]",
                )
            )
    return found[:1]


def _depends_on_values(runs: Runs) -> bool:
    return any(node.op_type in ("NonZero", "Unique", "Compress", "Loop") for _, node in runs.subject.nodes())


def _said(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
