"""``build_training_graph``: from a config to the models that train it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.draft import Config, Draft, manifest_of
from moe_onnx.build.forward import moe_layers
from moe_onnx.build.manifest import METADATA_KEY, Manifest
from moe_onnx.build.moe_options import FORMS
from moe_onnx.build.optimizers import AdamW, Optimizer
from moe_onnx.build.parameters import Parameter, parameters_of
from moe_onnx.build.weights import ORIGIN, WEIGHTS, StoredWeights, Weights
from moe_onnx.errors import ConfigError, ModelError

ASSEMBLIES = ("step", "grad", "apply", "eval", "forward")


@dataclass(frozen=True)
class TrainingGraph:
    """The models that train a config, and the manifest that says what their tensors are for.

    Args:
        models: By assembly: ``"step"``, ``"grad"``, ``"apply"``, ``"eval"``, ``"forward"``.
        manifest: Config, optimizer, parameters, inputs and outputs.
        weights: Where training starts from, such as a checkpoint; None: from :meth:`init_parameters`.
        sources: Files that model and weights are read from, which :meth:`save` leaves as they are.
    """

    models: Mapping[str, onnx.ModelProto]
    manifest: Manifest
    weights: Weights | None = field(default=None, compare=False)
    sources: tuple[Path, ...] = field(default=(), compare=False)

    @property
    def model(self) -> onnx.ModelProto:
        """The first model that was asked for."""
        return next(iter(self.models.values()))

    def init_parameters(self, seed: int = 0) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        """First values of all parameters, float32, by name.

        Weights are normal with the config's ``initializer_range``, norms 1, biases 0. Each parameter
        draws from a stream of its own, made from the seed and its name.
        """
        return {
            info.name: Parameter(
                info.name, info.shape, str(info.init.get("kind")), float(info.init.get("std", 0.0))
            ).first_value(seed)
            for info in self.manifest.parameters
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``<assembly>.onnx`` for each model, the weights if there are any, and ``manifest.json``.

        Files are written beside their places and moved there when they are whole. Graphs of a training
        graph that was in the folder before are removed, so that all are of one model.

        Raises:
            ModelError: If the folder has a ``model.safetensors`` of others, or a file that the graph is made
                from would be overwritten.
        """
        target = Path(folder)
        self._check_sources(target)
        target.mkdir(parents=True, exist_ok=True)
        self._check_weights(target)
        beside = Path(tempfile.mkdtemp(prefix=".saving-", dir=target))
        try:
            for name, model in self.models.items():
                (beside / f"{name}.onnx").write_bytes(model.SerializeToString())
            if self.weights is not None:
                self.weights.write_weights(beside)
            manifest = replace(self.manifest, weights=None if self.weights is None else WEIGHTS)
            (beside / "manifest.json").write_text(manifest.to_json(), "utf-8")
            if (target / ORIGIN).is_dir() and (beside / ORIGIN).is_dir():
                os.replace(target / ORIGIN, beside / f"old-{ORIGIN}")  # goes with the folder it is in
            stale = self._stale(target)
            for path in sorted(beside.iterdir(), key=lambda path: path.name == "manifest.json"):
                if path.name != f"old-{ORIGIN}":
                    os.replace(path, target / path.name)
            for path in stale:
                with suppress(OSError):  # the new graph is whole already
                    path.unlink()
        finally:
            shutil.rmtree(beside)
        return target

    def _check_sources(self, target: Path) -> None:
        """See that nothing is overwritten that the weights are still to be read from, or the model is in."""
        sources = {os.path.realpath(path) for path in self.sources}
        for name in (*(f"{name}.onnx" for name in self.models), WEIGHTS, "manifest.json"):
            if os.path.realpath(target / name) in sources:
                raise ModelError(
                    f"{target / name}: is a file that this graph is made from, and would be overwritten. "
                    "Give another folder."
                )

    def _stale(self, target: Path) -> list[Path]:
        """The graphs of the training graph that is in the folder now, but for those of this one's names."""
        before = _manifest_in(target)
        if before is None:
            return []
        sources = {os.path.realpath(path) for path in self.sources}
        names = [name for name in before.graphs if name in ASSEMBLIES and name not in self.models]
        paths = [target / f"{name}.onnx" for name in names]
        return [path for path in paths if path.is_file() and os.path.realpath(path) not in sources]

    def _check_weights(self, target: Path) -> None:
        """See that no checkpoint of others is overwritten, such as the one the weights are read from."""
        if self.weights is None or not os.path.lexists(target / WEIGHTS):
            return
        before = _manifest_in(target)
        if before is None or before.weights != WEIGHTS:
            raise ModelError(
                f"{target / WEIGHTS}: is of no training graph, and would be overwritten. Give another folder."
            )

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> TrainingGraph:
        """Read what :meth:`save` wrote.

        Raises:
            ModelError: If a file is missing or no model, or the manifest is not this package's.
            CheckpointError: If the manifest names weights that are missing or damaged.
        """
        source = Path(folder)
        models = {}
        manifest = Manifest.from_json(_read(source / "manifest.json"))
        for name in manifest.graphs:
            if not name or Path(name).name != name:
                raise ModelError(f"{source / 'manifest.json'}: {name!r} cannot be the name of a graph.")
            path = source / f"{name}.onnx"
            try:
                models[name] = onnx.load_model_from_string(_read(path))
            except ModelError:
                raise
            except Exception as error:
                raise ModelError(f"{path}: this is no ONNX model ({error}).") from error
        return cls(models, manifest, None if manifest.weights is None else StoredWeights(source))


def build_training_graph(
    config: Config,
    *,
    assembly: str = "step",
    optimizer: Optimizer | None = None,
    optimize_for: str = "body",
) -> TrainingGraph:
    """Build the graphs that train a model, with their manifest.

    Parameters and optimizer state are graph inputs and outputs, never initializers, so a graph is
    small however large its model. Batch and sequence sizes are free. All graphs are opset 21, carry
    the function bodies of the ``ascend.moe`` operators they use, and run in plain onnxruntime.

    Args:
        config: A :class:`MoeLMConfig` or :class:`MoeLayerConfig`.
        assembly: Which graphs, joined by ``+``:

            - ``step``: batch, parameters, state, lr, step -> metrics, updated parameters and state.
            - ``grad``: batch, parameters -> metrics, gradients and their global norm.
            - ``apply``: parameters, gradients, state, lr, step, grad_norm -> updated parameters and
              state; elementwise, so that outputs may be bound to the memory of their inputs.
            - ``eval``: batch, parameters -> metrics.
            - ``forward``: batch without labels, parameters -> logits, or a layer's output.
            With ``dtype="float16"`` ``step`` and ``grad`` also take ``loss_scale``, which the loss is
            multiplied by before it is differentiated; the gradients that they give are divided by it.
            A router's selection bias is a parameter without a gradient: ``grad`` gives and ``apply`` takes
            its ``load_excess`` instead, which like gradients adds up over the parts of a batch.
        optimizer: :class:`AdamW` (the default) or :class:`SGD`.
        optimize_for: The form of the graphs, which all routes run, with the same parameters and checkpoints:

            - ``"body"``: what is fastest in runtimes without this package's kernels: few experts get nodes
              of their own, SwiGLU and AdamW are made of standard operators.
            - ``"native"``: what is fastest by native kernels: one MoeGroupedMatmul a product, one MoeSwiGlu
              (with a SwiGLU of experts), one MoeAdamW and one MoeSquareSum a parameter. Updates have the
              same bits; sums of the experts' products and of squares another order, and exponentials other
              last bits.

    Returns:
        A :class:`TrainingGraph`.

    Raises:
        ConfigError: If an assembly is unknown or named twice, or an argument of another type or value.
    """
    if not isinstance(config, (MoeLayerConfig, MoeLMConfig)):
        raise ConfigError(
            "build_training_graph: config must be a MoeLMConfig or MoeLayerConfig, "
            f"got {type(config).__name__}."
        )
    names, optimizer = checked_choices("build_training_graph", assembly, optimizer, optimize_for)
    params = parameters_of(config)
    drafts = {name: Draft(name, config, optimizer, params, optimize_for) for name in names}
    dispatch = {
        "kind": config.dispatch,
        "mode": config.dispatch_mode,
        # Without experts a batch may be of any size.
        "expert_capacity": config.capacity if moe_layers(config) else 0,
        "active_num": config.active_num if moe_layers(config) else 0,
    }
    return finished(drafts, dispatch, optimize_for)


def checked_choices(
    caller: str, assembly: str, optimizer: Optimizer | None, optimize_for: str
) -> tuple[list[str], Optimizer]:
    """The assemblies by name, and the optimizer.

    Raises:
        ConfigError: If one of the arguments is none of the legal ones.
    """
    optimizer = AdamW() if optimizer is None else optimizer
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{caller}: optimizer must be an AdamW or SGD, got {type(optimizer).__name__}.")
    names = assembly.split("+") if isinstance(assembly, str) else [repr(assembly)]
    for name in names:
        if name not in ASSEMBLIES or names.count(name) > 1:
            raise ConfigError(
                f"{caller}: assembly must be some of {', '.join(ASSEMBLIES)}, joined by '+', "
                f"each once, got {assembly!r}."
            )
    if not isinstance(optimize_for, str) or optimize_for not in FORMS:
        raise ConfigError(f"{caller}: optimize_for must be one of {', '.join(FORMS)}, got {optimize_for!r}.")
    return names, optimizer


def finished(
    drafts: Mapping[str, Draft],
    dispatch: Mapping[str, Any],
    optimize_for: str,
    weights: Weights | None = None,
) -> TrainingGraph:
    """The training graph of some drafts of one model, each with the manifest of all."""
    manifest = manifest_of(drafts, dispatch, optimize_for)
    models = {}
    for name, draft in drafts.items():
        model = draft.model()
        onnx.helper.set_model_props(model, {METADATA_KEY: manifest.to_json()})
        models[name] = model
    return TrainingGraph(models, manifest, weights)


def _manifest_in(folder: Path) -> Manifest | None:
    """The manifest of the training graph that is in a folder; None where there is none."""
    try:
        return Manifest.from_json((folder / "manifest.json").read_bytes())
    except (OSError, ModelError):
        return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}). Is this a saved training graph?"
        ) from error
