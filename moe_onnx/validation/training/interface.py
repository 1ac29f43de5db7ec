"""The inputs and outputs of a training graph against its manifest: names, dtypes, shapes, the loss."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from onnx import TensorProto, ValueInfoProto

from moe_onnx.build.manifest import TensorInfo
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.prepared import Training, few, training_of

INTERFACE = code(
    "MO607",
    "error",
    "The graph lacks inputs or outputs of its manifest, or wants inputs that it does not name",
    why="A trainer feeds and fetches by the manifest. A parameter that has become an initializer is frozen: "
    "every update starts from its first value. An output that was cut off is a parameter, or a state, that "
    "is not trained. An input that the manifest does not name is never fed.",
    mend="Export the graph again; do not prune, rename or freeze inputs and outputs of a training graph.",
)
INTERFACE_TYPE = code(
    "MO608",
    "error",
    "An input or output has another dtype or shape than its manifest says",
    why="Parameters and states go out of one step and into the next: a dtype or shape that differs between "
    "the two fails at the second step, or is cast and loses digits at every one.",
    mend="Give the tensor the dtype and shape that the manifest says, or build the graph again.",
)
CHANGED = code(
    "MO609",
    "warning",
    "The graph's inputs and outputs differ from its manifest in a way that may be meant",
    why="Outputs that the manifest does not name, another order, or a free size that is now fixed. Trainers "
    "that go by name still work; those that go by position, or batches of another size, do not.",
    mend="Keep it if it is meant; otherwise export the graph again.",
)
LOSS = code(
    "MO610",
    "error",
    "There is no scalar loss",
    why="The gradients are those of a single number, float32 and without axes. A loss for each token, or one "
    "of shape [1], makes other gradients, and trainers compare and print it as a number.",
    mend="Reduce the loss to a scalar named `loss`, or build the graph again.",
)

_LOSS = "loss"
_DTYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "bool": TensorProto.BOOL,
}


@check("static", INTERFACE, INTERFACE_TYPE, CHANGED, LOSS)
def interface(subject: Subject) -> Iterator[Outcome]:
    """The graph's inputs and outputs are those of its manifest, in names, dtypes and shapes."""
    training = training_of(subject)
    if isinstance(training, str):
        yield Skipped(training)
        return
    if training.assembly is None:
        have = ", ".join(map(repr, training.manifest.graphs)) or "none"
        yield INTERFACE("the graph", found="it is none of the manifest's graphs", expected=f"one of {have}")
        return
    yield from interface_findings(subject, training)


def interface_findings(subject: Subject, training: Training) -> Iterator[Outcome]:
    """What differs between a graph and the manifest's entry of it."""
    graph, info = subject.model.graph, training.info
    frozen = {tensor.name for tensor in graph.initializer}
    unsound = list(_loss(training))
    yield from unsound
    for side, values, wanted in (
        ("input", graph.input, info.inputs),
        ("output", graph.output, info.outputs),
    ):
        given = [value.name for value in values]
        names = [one.name for one in wanted]
        where = f"{side}s of the graph {training.assembly!r}"
        missing = [one for one in wanted if one.name not in set(given)]
        extra = [name for name in dict.fromkeys(given) if name not in set(names)]
        unfed = [name for name in extra if side == "input" and name not in frozen]
        said = [_missing(missing, side, frozen)] if missing else []
        said += [f"the manifest does not name {few(unfed)}"] if unfed else []
        if said:
            wrong = [*(one.name for one in missing), *unfed]
            yield INTERFACE(
                where,
                found="; ".join(said),
                expected="those of the manifest",
                places=[f"{side} {name!r}" for name in wrong],
            )
        elif side == "output" and extra:
            yield CHANGED(
                where,
                found=f"the manifest does not name {few(extra)}",
                places=[f"{side} {name!r}" for name in extra],
            )
        elif not missing and not extra and given != names and len(given) == len(names):
            first = next(i for i, name in enumerate(names) if given[i] != name)
            yield CHANGED(where, found=f"{given[first]!r} is number {first}", expected=f"{names[first]!r}")
        yield from _types(side, values, wanted, bool(unsound))


def _missing(missing: Sequence[TensorInfo], side: str, frozen: Collection[str]) -> str:
    by_role: dict[str, list[str]] = {}
    for one in missing:
        by_role.setdefault(one.role, []).append(one.name)
    said = "; ".join(f"{role} {few(names)}" for role, names in by_role.items())
    constants = [one.name for one in missing if one.name in frozen]
    also = f"; {few(constants)} became an initializer, which is never trained" if constants else ""
    return f"missing {side}s: {said}{also if side == 'input' else ''}"


def _types(
    side: str, values: Iterable[ValueInfoProto], wanted: Sequence[TensorInfo], unsound: bool
) -> Iterator[Outcome]:
    by_name = {value.name: value.type.tensor_type for value in values}
    pairs = [(one, by_name[one.name]) for one in wanted if one.name in by_name]
    floats = [tensor.elem_type for one, tensor in pairs if one.dtype == "float32"]
    # A graph that was lifted to float64 as a whole is what finite differences are made with.
    lifted = bool(floats) and all(elem == TensorProto.DOUBLE for elem in floats)
    wrong, fixed = [], []
    for one, tensor in pairs:
        dtype = "float64" if lifted and one.dtype == "float32" else one.dtype
        if tensor.elem_type and tensor.elem_type != _DTYPES.get(dtype, tensor.elem_type):
            wrong.append((one, dtype_name(tensor.elem_type), dtype))
        if not tensor.HasField("shape"):
            continue
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in tensor.shape.dim]
        if _differ(dims, one.shape):
            wrong.append((one, _shape(dims), _shape(one.shape)))
        elif any(isinstance(h, int) and isinstance(w, str) for h, w in zip(dims, one.shape, strict=True)):
            fixed.append((one, _shape(dims), _shape(one.shape)))
    losses = [(have, want) for one, have, want in wrong if one.name == _LOSS]
    if losses and not unsound:
        yield LOSS(f"output {_LOSS!r}", found=losses[0][0], expected=losses[0][1])
    for found, kind in (([one for one in wrong if one[0].name != _LOSS], INTERFACE_TYPE), (fixed, CHANGED)):
        if found:
            one, have, want = found[0]
            more = f"; and {len(found) - 1} more {side}s differ" if len(found) > 1 else ""
            places = [f"{other.role} {side} {other.name!r}" for other, _, _ in found]
            yield kind(places[0], found=have + more, expected=want, places=places)


def _differ(have: Sequence[int | str], want: Sequence[int | str]) -> bool:
    """Whether two shapes cannot be the same, whatever their free sizes are."""
    pairs = zip(have, want, strict=False)
    known = ((a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int))
    return len(have) != len(want) or any(a != b for a, b in known)


def _loss(training: Training) -> Iterator[Outcome]:
    """What the manifest itself says of the loss."""
    if training.assembly not in ("step", "grad", "eval"):
        return
    named = [one for one in training.info.outputs if one.name == _LOSS and one.role == "metric"]
    if not named or named[0].shape or named[0].dtype != "float32":
        found = f"{named[0].dtype} {_shape(named[0].shape)}" if named else f"no metric {_LOSS!r}"
        yield LOSS(f"graph {training.assembly!r} of the manifest", found=found, expected="float32 []")


def dtype_name(elem_type: int) -> str:
    """The name that numpy has for an element type; its number where there is none."""
    for name, number in _DTYPES.items():
        if number == elem_type:
            return name
    return (
        TensorProto.DataType.Name(elem_type).lower()
        if elem_type in TensorProto.DataType.values()
        else (f"unknown dtype {elem_type}")
    )


def _shape(dims: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, dims))}]"
