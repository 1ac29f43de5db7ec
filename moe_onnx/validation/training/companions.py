"""The manifest of a training graph: each parameter has one gradient, one update and its states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from moe_onnx.build.manifest import Manifest, ParameterInfo
from moe_onnx.validation.findings import Finding, Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.prepared import Training, as_one, few, tensor_text, training_of

COMPANIONS = code(
    "MO605",
    "error",
    "A parameter has not exactly one gradient, one update and its states",
    why="Each parameter goes into a step with its states and comes out as one updated tensor of the same "
    "dtype and shape. Two parameters that share a gradient or a state train as one; one without an update "
    "keeps its first value for ever, and nothing else tells.",
    mend="Build the graph again; names of gradients, updates and states are used once each.",
)


@check("static", COMPANIONS)
def companions(subject: Subject) -> Iterator[Outcome]:
    """Each parameter has exactly one gradient, one update and its states, of its own dtype and shape."""
    training = training_of(subject)
    if isinstance(training, str):
        yield Skipped(training)
        return
    manifest, shared = training.manifest, False
    for what, names in (
        ("parameters", [p.name for p in manifest.parameters]),
        ("gradients", [p.gradient for p in manifest.parameters]),
        ("updates", [p.updated for p in manifest.parameters]),
        ("state inputs", [s.input for p in manifest.parameters for s in p.state.values()]),
        ("state outputs", [s.output for p in manifest.parameters for s in p.state.values()]),
    ):
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            shared = True
            yield COMPANIONS(
                f"{what} of the manifest",
                found=f"{few(twice)} named by {_owners(manifest, twice[0])}",
                expected="each named once",
                places=map(repr, twice),
            )
    if shared:
        return  # what the graphs have besides follows from it
    wrong: dict[str, list[Finding]] = {}
    for name, finding in _roles(training):
        wrong.setdefault(name, []).append(finding)
    for findings in wrong.values():
        yield as_one(findings, "inputs and outputs")


def _owners(manifest: Manifest, name: str) -> str:
    owners = [
        p.name
        for p in manifest.parameters
        if name
        in (p.name, p.gradient, p.updated, *(n for s in p.state.values() for n in (s.input, s.output)))
    ]
    return few(owners)


def _roles(training: Training) -> Iterator[tuple[str, Finding]]:
    """Whether the manifest's graphs have what their parameters need; findings by parameter."""
    every = training.manifest.parameters
    by_role = {
        "parameter": [(p.name, p) for p in every],
        "gradient": [(p.gradient, p) for p in every],
        "updated": [(p.updated, p) for p in every],
        "state in": [(s.input, p) for p in every for s in p.state.values()],
        "state out": [(s.output, p) for p in every for s in p.state.values()],
    }
    inputs = {
        "step": ("parameter", "state in"),
        "grad": ("parameter",),
        "apply": ("parameter", "gradient", "state in"),
        "eval": ("parameter",),
        "forward": ("parameter",),
    }
    outputs = {"step": ("updated", "state out"), "grad": ("gradient",), "apply": ("updated", "state out")}
    for assembly, info in training.manifest.graphs.items():
        for wanted, side, tensors in (
            (inputs.get(assembly, ()), "inputs", info.inputs),
            (outputs.get(assembly, ()), "outputs", info.outputs),
        ):
            for kind in wanted:
                role = {"updated": "parameter"}.get(kind, kind.split()[0])
                have = [(one.name, one.dtype, one.shape) for one in tensors if one.role == role]
                where = f"{role} {side} of the graph {assembly!r} in the manifest"
                yield from _match(where, have, by_role[kind])


def _match(
    where: str,
    have: Sequence[tuple[str, str, tuple[int | str, ...]]],
    wanted: Sequence[tuple[str, ParameterInfo]],
) -> Iterator[tuple[str, Finding]]:
    names = Counter(name for name, _, _ in have)
    missing = [name for name, _ in wanted if name not in names]
    known = dict(wanted)
    extra = [name for name in names if name not in known]
    twice = [name for name, count in names.items() if count > 1]
    for found, said in ((missing, "is missing"), (extra, "belongs to no parameter"), (twice, "stands twice")):
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            expected = "one for each parameter"
            yield (
                f"{where} {said}",
                COMPANIONS(
                    where, found=f"{found[0]!r}{more} {said}", expected=expected, places=map(repr, found)
                ),
            )
    for name, dtype, shape in have:
        if name in known and (dtype, shape) != (known[name].dtype, known[name].shape):
            parameter = known[name]
            finding = COMPANIONS(
                f"{where}: {name!r}",
                found=tensor_text((dtype, shape)),
                expected=f"{tensor_text((parameter.dtype, parameter.shape))}, as {parameter.name!r}",
            )
            yield parameter.name, finding
