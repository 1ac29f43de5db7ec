"""IR version and opset imports: that runtimes take them, and that every domain in use has one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import onnx
import onnx.defs
from onnx import FunctionProto, OperatorSetIdProto

from moe_onnx.spec import DOMAIN, VERSION
from moe_onnx.validation.file.runtime_limits import OLDEST, Limits, installed_limits
from moe_onnx.validation.findings import Code, Outcome
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject, normal_domain

NEW_IR = code(
    "MO121",
    "error",
    "The IR version is newer than onnxruntime reads",
    why="`onnx.helper.make_model` stamps a model with the newest IR version that the installed `onnx` knows. "
    "`onnxruntime` refuses one it does not know, whatever is in the model.",
    mend="Set model.ir_version to one that both know, or install a newer onnxruntime.",
)
NEW_OPSET = code(
    "MO122",
    "error",
    "An opset is newer than onnxruntime has",
    why="`onnxruntime` refuses a model that imports a version of its own domains (`ai.onnx`, `ai.onnx.ml`, "
    "`com.microsoft`, ...) that it does not have, also where no node needs it. Functions' imports count too.",
    mend="Convert the model with onnx.version_converter, or install a newer onnxruntime.",
)
NEWER_THAN_OLDEST = code(
    "MO123",
    "warning",
    "The model does not load in the oldest supported onnxruntime",
    why="The installed `onnxruntime` takes the model's IR version and opsets; the oldest one that `moe_onnx` "
    "supports does not. Whoever receives the model may have that one.",
    mend="Lower the IR version or opset, or ask for a newer onnxruntime where the model goes.",
)
NOT_IMPORTED = code(
    "MO124",
    "error",
    "The model does not import a domain that its nodes are of",
    why="`onnx.checker` and every tool that infers shapes refuse it, or know nothing of the nodes. "
    "`onnxruntime` loads such a model without a word as long as a kernel or an own schema fits, and refuses "
    "it where the domain is that of a local function.",
    mend="Add the domain to model.opset_import: onnx.helper.make_opsetid(domain, version).",
)
NOT_IMPORTED_BY_FUNCTION = code(
    "MO125",
    "error",
    "A function does not import a domain that its nodes are of",
    why="A function has opset imports of its own; those of the model do not count in its body. `onnxruntime` "
    "and `onnx.checker` refuse the model.",
    mend="Add the domain to the function's opset_import, in the version that the model imports.",
)
TWO_VERSIONS = code(
    "MO126",
    "error",
    "A domain is imported in two versions",
    why="Which one holds depends on the reader: `onnxruntime` takes the last (measured: `Softmax` of opset "
    "11 and of opset 21 differ), `onnx.checker` says nothing. `ai.onnx` and the empty domain are the same "
    "one.",
    mend="Keep the version that the nodes were written for.",
)
NO_VERSION = code(
    "MO127",
    "error",
    "The model does not say its IR version or an opset",
    why="Without an IR version, without any opset import, or with a version below 1 of a domain in use, no "
    "reader knows what the nodes mean.",
    mend="Set model.ir_version and the opset that the nodes were written for.",
)
OTHER_IN_FUNCTION = code(
    "MO128",
    "error",
    "A function means another version of an operator than the model",
    why="`onnx.checker` refuses it. `onnxruntime` loads it and runs the body by the version that the *model* "
    "imports (measured: a `Softmax` of opset 11 over [2, 3, 2] ran as that of opset 21, with other values).",
    mend="Write the function for the opset that the model imports.",
)
ONNX_IS_OLDER = code(
    "MO129",
    "note",
    "The installed onnx is older than the model",
    why="`onnx` has no schemas for this opset or IR version. Shape inference and the checks that need it "
    "tell less than they could; `onnxruntime` has its own.",
    mend="Install a newer onnx to have all of the model checked.",
)
OLD_OPSET = code(
    "MO130",
    "note",
    "The opset is older than onnxruntime promises to run",
    why="`onnxruntime` has kernels from opset 7 on; older operators run only where they did not change "
    "(measured: `Relu` of opset 5 has none).",
    mend="Convert the model with onnx.version_converter to opset 13 or later.",
)
OTHER_VERSION_OF_OURS = code(
    "MO131",
    "error",
    f"The model imports another version of {DOMAIN}",
    why=f"This release of `moe_onnx` has version {VERSION} of the domain. No operator of another version is "
    "known, and `moe_onnx.InferenceSession` refuses the model.",
    mend="Export the model again, or install the release of moe_onnx that has this version.",
)
NOT_AN_INPUT = code(
    "MO132",
    "warning",
    "An initializer is no graph input, which IR versions before 4 ask for",
    why="`onnx.checker` refuses such a model, and so do tools that follow the standard to the letter; "
    "`onnxruntime` does not mind.",
    mend="Set model.ir_version to 4 or later (10 where there is no reason for another).",
)

FIRST_WITH_IMPORTS = 3  # the IR version
OLDEST_OPSET_WITH_KERNELS = 7


@check("static", NEW_IR, NEW_OPSET, NEWER_THAN_OLDEST, ONNX_IS_OLDER, OLD_OPSET, OTHER_VERSION_OF_OURS)
def known(subject: Subject) -> Iterator[Outcome]:
    """The installed and the oldest supported onnxruntime, and onnx, know the IR version and opsets."""
    model = subject.model
    installed = installed_limits(model.ir_version, [e for _, e in _imports(subject)])
    if model.ir_version > installed.ir_version:
        yield NEW_IR("model", found=f"IR version {model.ir_version}", expected=_at_most(installed, None))
    elif model.ir_version > OLDEST.ir_version:
        yield NEWER_THAN_OLDEST(
            "model", found=f"IR version {model.ir_version}", expected=_at_most(OLDEST, None)
        )
    told = set()
    for where, entry in _imports(subject):
        domain, version = normal_domain(entry.domain), entry.version
        if (domain, version) in told:
            continue
        told.add((domain, version))
        found = f"version {version} of {_said(domain)}"
        if version > installed.opset(domain, version):
            yield NEW_OPSET(where, found=found, expected=_at_most(installed, domain))
        elif version > OLDEST.opset(domain, version):
            yield NEWER_THAN_OLDEST(where, found=found, expected=_at_most(OLDEST, domain))
        if domain == DOMAIN and version != VERSION and version > 0:
            yield OTHER_VERSION_OF_OURS(where, found=found, expected=f"version {VERSION}")
        if not domain and 0 < version < OLDEST_OPSET_WITH_KERNELS:
            yield OLD_OPSET(where, found=found, expected=f"{OLDEST_OPSET_WITH_KERNELS} or later")
    newest = onnx.defs.onnx_opset_version()
    opset = max((e.version for _, e in _imports(subject) if not normal_domain(e.domain)), default=0)
    if model.ir_version > onnx.IR_VERSION or opset > newest:
        yield ONNX_IS_OLDER(
            "model",
            found=f"IR version {model.ir_version} and opset {opset}",
            expected=f"at most {onnx.IR_VERSION} and {newest}, which onnx {onnx.__version__} knows",
        )


@check("static", NOT_IMPORTED, NOT_IMPORTED_BY_FUNCTION, TWO_VERSIONS, NO_VERSION)
def imports(subject: Subject) -> Iterator[Outcome]:
    """Every domain in use is imported once, by the model and by each function."""
    model = subject.model
    if model.ir_version < 1:
        yield NO_VERSION("model", found=f"IR version {model.ir_version}", expected="1 or later")
    elif model.ir_version >= FIRST_WITH_IMPORTS and not model.opset_import:
        yield NO_VERSION("model", found="no opset imports", expected="one for each domain in use")
    used = _domains(subject)
    for where, entries in [
        ("model", model.opset_import),
        *((_place(f), f.opset_import) for f in model.functions),
    ]:
        versions: dict[str, list[int]] = {}
        for entry in entries:
            versions.setdefault(normal_domain(entry.domain), []).append(entry.version)
        users = used.get(where, {})
        for domain, given in versions.items():
            if len(set(given)) > 1:
                yield TWO_VERSIONS(where, found=f"{_said(domain)} in versions {', '.join(map(str, given))}")
            elif given[0] < 1 and domain in users:
                yield NO_VERSION(where, found=f"version {given[0]} of {_said(domain)}", expected="1 or later")
        if where == "model" and not entries:
            continue  # said above, or IR version 1 or 2
        missing: Code = NOT_IMPORTED if where == "model" else NOT_IMPORTED_BY_FUNCTION
        for domain, nodes in users.items():
            if domain not in versions:
                more = f" and of {len(nodes) - 1} more nodes" if len(nodes) > 1 else ""
                said = f"no import of {_said(domain)}, the domain of {nodes[0]}{more}"
                yield missing(where, found=said, places=nodes)


@check("static", OTHER_IN_FUNCTION)
def functions(subject: Subject) -> Iterator[Outcome]:
    """Functions mean the versions of operators that the model imports."""
    outer = subject.main.opsets
    different: dict[str, dict[str, tuple[str, str]]] = {}
    for scope, node in subject.nodes():
        domain = normal_domain(node.domain)
        if scope.function is None or domain not in scope.opsets or domain not in outer:
            continue
        own = scope.opsets[domain]
        if own != outer[domain] and _since(node.op_type, own, domain) != _since(
            node.op_type, outer[domain], domain
        ):
            place = scope.place(node)
            found = f"{place} by version {own} of {_said(domain)}"
            different.setdefault(_place(scope.function), {}).setdefault(node.op_type, (place, found))
    for where, operators in different.items():
        more = f", and {len(operators) - 1} more operators" if len(operators) > 1 else ""
        yield OTHER_IN_FUNCTION(
            where,
            found=f"{next(iter(operators.values()))[1]}, in which the operator is another{more}",
            places=[place for place, _ in operators.values()],
            expected=f"the model's versions: {', '.join(f'{_said(d)} {v}' for d, v in outer.items())}",
        )


@check("static", NOT_AN_INPUT)
def old_initializers(subject: Subject) -> Iterable[Outcome]:
    """Initializers are graph inputs in models of IR versions before 4."""
    if not 0 < subject.model.ir_version < 4:
        return
    inputs = set(subject.main.inputs)
    missing = [tensor.name for tensor in subject.model.graph.initializer if tensor.name not in inputs]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield NOT_AN_INPUT(
            subject.main.tensor(missing[0]),
            found=f"no graph input{more}, in IR version {subject.model.ir_version}",
            places=map(subject.main.tensor, missing),
        )


def _imports(subject: Subject) -> Iterator[tuple[str, OperatorSetIdProto]]:
    for entry in subject.model.opset_import:
        yield "model", entry
    for function in subject.model.functions:
        for entry in function.opset_import:
            yield _place(function), entry


def _domains(subject: Subject) -> dict[str, dict[str, list[str]]]:
    """By ``"model"`` or function the domains of its nodes, with the places of these."""
    found: dict[str, dict[str, list[str]]] = {}
    for scope, node in subject.nodes():
        users = found.setdefault("model" if scope.function is None else _place(scope.function), {})
        users.setdefault(normal_domain(node.domain), []).append(scope.place(node))
    return found


@cache
def _since(op_type: str, version: int, domain: str) -> int | None:
    """The version of its domain that an operator was last changed in, None where onnx does not know it."""
    try:
        return int(onnx.defs.get_schema(op_type, max_inclusive_version=version, domain=domain).since_version)
    except (onnx.defs.SchemaError, TypeError):  # TypeError: a number that is no C int
        return None


def _place(function: FunctionProto) -> str:
    return f"function '{function.domain}.{function.name}'"


def _said(domain: str) -> str:
    return f"'{domain or 'ai.onnx'}'"


def _at_most(limits: Limits, domain: str | None) -> str:
    most = limits.ir_version if domain is None else limits.opsets.get(domain)
    return f"at most {most}, which onnxruntime {limits.version} reads"
