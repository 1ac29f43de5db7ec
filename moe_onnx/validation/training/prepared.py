"""Training graphs: the manifest that a graph carries, read once for all checks of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.imported import ImportedModel
from moe_onnx.build.manifest import METADATA_KEY, GraphInfo, Manifest
from moe_onnx.build.optimizers import Optimizer, optimizer_from_dict
from moe_onnx.build.recipe import CONFIGS
from moe_onnx.errors import ConfigError, ModelError
from moe_onnx.validation import collapse
from moe_onnx.validation.findings import Finding, Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject

UNREADABLE = code(
    "MO601",
    "error",
    "The manifest cannot be read",
    why="A training graph carries a manifest that says which inputs are parameters, gradients and optimizer "
    "state, and what they become. Without it a trainer can only guess by names. Here it is no JSON, of "
    "another format version, or lacks something.",
    mend="Build the graph again with this release, or train with the release that made it.",
)
UNKNOWN_CONFIG = code(
    "MO602",
    "warning",
    "The manifest's config or optimizer is none that this release knows",
    why="The config says how many layers, experts and states there must be. One with unknown fields or "
    "illegal values leaves nothing to hold the graph against, and another release may have meant "
    "something else by it.",
    mend="Validate with the release that made the graph (`versions` in the manifest), or build it again.",
)
Config = MoeLayerConfig | MoeLMConfig
NO_MANIFEST = f"the model carries no {METADATA_KEY}, so it is no training graph of this package"


@dataclass
class Training:
    """What a training graph's manifest says; ``config`` and ``optimizer`` are None where unknown.

    A model that was imported has an ``imported`` in place of a config, which does not say what is in it.
    """

    manifest: Manifest
    assembly: str | None  # which of the manifest's graphs this is
    info: GraphInfo
    config: Config | None
    optimizer: Optimizer | None
    notes: tuple[str, ...] = ()  # why config or optimizer is None
    imported: ImportedModel | None = None

    @property
    def no_config(self) -> str:
        """Why there is no config."""
        if self.imported is not None:
            return "the model was imported: its config does not say what has to be in it"
        return "the manifest's config is not known (MO602)"


def training_of(subject: Subject) -> Training | str:
    """The training graph's manifest, or why there is none; read once."""
    return subject.once(_read)


def manifest_texts(subject: Subject) -> list[str]:
    """The manifests in the model's metadata."""
    return [entry.value for entry in subject.model.metadata_props if entry.key == METADATA_KEY]


def carried_manifest(subject: Subject) -> Manifest | str | None:
    """The manifest in the model's metadata, or what is wrong with it; None where there is none."""
    return subject.once(_first_manifest)


def _first_manifest(subject: Subject) -> Manifest | str | None:
    texts = manifest_texts(subject)
    return parse(texts[0]) if texts else None


def parse(text: str | bytes) -> Manifest | str:
    """A manifest, or what is wrong with it."""
    try:
        if _has_half_characters(text):
            return "The manifest holds halves of characters, which no file and no console can show."
        return Manifest.from_json(text)
    except (ModelError, UnicodeDecodeError) as error:
        return str(error)
    except RecursionError:
        return "The manifest is nested too deeply."


def _has_half_characters(text: str | bytes) -> bool:
    """Whether JSON spells lone surrogates, which fail much later, when a report is written."""
    spelled = text if isinstance(text, str) else text.decode("utf-8")
    if "\\ud" not in spelled.lower():
        return False
    try:
        json.dumps(json.loads(spelled), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    except ValueError:
        pass  # no JSON at all
    return False


def few(names: Iterable[str], limit: int = 3) -> str:
    """``'a', 'b', 'c' and 37 more``."""
    return collapse.few(map(repr, names), limit)


def tensor_text(kind: tuple[str, tuple[int | str, ...]] | None) -> str:
    """Dtype and shape, for findings."""
    return "absent" if kind is None else f"{kind[0]} [{', '.join(map(str, kind[1]))}]"


def as_one(findings: Sequence[Finding], what: str) -> Finding:
    """One finding for all of one cause: the first, and how many more there are."""
    first, more = findings[0], len(findings) - 1
    said = f"{first.found}; and {more} more {what} alike"
    return replace(first, found=said, places=collapse.places_of(findings)) if more else first


def _read(subject: Subject) -> Training | str:
    manifest = carried_manifest(subject)
    if manifest is None:
        return NO_MANIFEST
    if isinstance(manifest, str):
        return f"the manifest cannot be read ({UNREADABLE.name})"
    imported, config, notes = None, None, []
    if manifest.config.get("kind") == ImportedModel.__name__:
        try:
            imported = ImportedModel.from_dict(manifest.config)
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            notes = [f"the config: {error}"]
    else:
        config, notes = _config(manifest)
    optimizer: Optimizer | None = None
    if manifest.optimizer is not None:
        try:
            optimizer = optimizer_from_dict(manifest.optimizer)
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            notes.append(f"the optimizer: {error}")
    assembly = _assembly(manifest, subject)
    info = manifest.graphs[assembly] if assembly is not None else GraphInfo((), ())
    return Training(manifest, assembly, info, config, optimizer, tuple(notes), imported)


def _config(manifest: Manifest) -> tuple[Config | None, list[str]]:
    kind = manifest.config.get("kind")
    if not isinstance(kind, str) or kind not in CONFIGS:
        known = ", ".join([*CONFIGS, ImportedModel.__name__])
        return None, [f"the config: 'kind' must be one of {known}, got {kind!r:.60}"]
    try:
        config = CONFIGS[kind].from_dict(manifest.config)
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        return None, [f"the config: {error}"]
    if isinstance(config, MoeLMConfig) and config.num_hidden_layers > len(manifest.parameters):
        # Every layer has parameters of its own; nothing is to be counted up to an absurd number.
        return None, [
            f"the config: it has {config.num_hidden_layers} layers, but there are only "
            f"{len(manifest.parameters)} parameters"
        ]
    return config, []


def _assembly(manifest: Manifest, subject: Subject) -> str | None:
    """The graph of the manifest that the model is: by its name, otherwise by its inputs and outputs."""
    graph = subject.model.graph
    if graph.name in manifest.graphs:
        return graph.name
    names = {(0, value.name) for value in graph.input} | {(1, value.name) for value in graph.output}
    best, most = None, 0.0
    for assembly, info in manifest.graphs.items():
        known = {(0, one.name) for one in info.inputs} | {(1, one.name) for one in info.outputs}
        alike = len(names & known) / max(1, len(names | known))
        if alike > most:
            best, most = assembly, alike
    return best


@check("static", UNREADABLE, UNKNOWN_CONFIG)
def manifest(subject: Subject) -> Iterator[Outcome]:
    """The manifest can be read, and its config and optimizer are known."""
    texts = manifest_texts(subject)
    if not texts:
        yield Skipped(NO_MANIFEST)
        return
    if len(set(texts)) > 1:
        yield UNREADABLE("the model's metadata", found=f"{len(texts)} different manifests", expected="one")
    found = carried_manifest(subject)
    if isinstance(found, str):
        yield UNREADABLE("the manifest in the model's metadata", found=found.rstrip("."))
        return
    training = training_of(subject)
    for note in training.notes if isinstance(training, Training) else ():
        yield UNKNOWN_CONFIG("the manifest", found=note.rstrip("."))
