"""``build_training_graph``: from a config to the models that train it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.autodiff.graphs import infer, to_model
from moe_onnx.autodiff.reverse import add_gradients
from moe_onnx.build import manifest as manifests
from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.forward import Forward, batch_inputs, forward, moe_layers
from moe_onnx.build.imported import ImportedModel
from moe_onnx.build.manifest import GraphInfo, Manifest, ParameterInfo, StateInfo
from moe_onnx.build.moe_options import FORMS
from moe_onnx.build.optimizers import AdamW, Optimizer, state_names
from moe_onnx.build.parameters import Parameter, parameters_of
from moe_onnx.build.update import Scalars, balance, clip_factor, global_norm, load_excess, update
from moe_onnx.build.weights import ORIGIN, WEIGHTS, StoredWeights, Weights
from moe_onnx.errors import ConfigError, ModelError
from moe_onnx.spec import DOMAIN, PACKAGE_VERSION, VERSION

ASSEMBLIES = ("step", "grad", "apply", "eval", "forward")
# What the oldest supported onnxruntime loads, whatever the installed onnx would write.
OPSET, IR_VERSION = 21, 10
LOSS_SCALE = "loss_scale"  # a hyperparameter of graphs that differentiate in float16

_DOC = (
    "Routers: equal scores go to the lower expert. A router logit that is NaN ranks first and makes the loss "
    "NaN; where the dispatch may drop its token, the metric nan_router_logits counts it. Whoever trains has "
    "to look at both before an update, as moe_onnx.TrainingSession does."
)

Config = MoeLayerConfig | MoeLMConfig


@dataclass(frozen=True)
class TrainingGraph:
    """The models that train a config, and the manifest that says what their tensors are for.

    Args:
        models: By assembly: ``"step"``, ``"grad"``, ``"apply"``, ``"eval"``, ``"forward"``.
        manifest: Config, optimizer, parameters, inputs and outputs.
        weights: Where training starts from, such as a checkpoint; None: from :meth:`init_parameters`.
    """

    models: Mapping[str, onnx.ModelProto]
    manifest: Manifest
    weights: Weights | None = field(default=None, compare=False)

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

        Files are written beside their places and moved there when they are whole.

        Raises:
            ModelError: If the folder has a ``model.safetensors`` of others, which would be overwritten.
        """
        target = Path(folder)
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
            for path in sorted(beside.iterdir(), key=lambda path: path.name == "manifest.json"):
                if path.name != f"old-{ORIGIN}":
                    os.replace(path, target / path.name)
        finally:
            shutil.rmtree(beside)
        return target

    def _check_weights(self, target: Path) -> None:
        """See that no checkpoint of others is overwritten, such as the one the weights are read from."""
        if self.weights is None or not os.path.lexists(target / WEIGHTS):
            return
        try:
            ours = Manifest.from_json((target / "manifest.json").read_bytes()).weights == WEIGHTS
        except (OSError, ModelError):
            ours = False
        if not ours:
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
              of their own, AdamW is made of standard operators.
            - ``"native"``: what is fastest by native kernels: one MoeGroupedMatmul a product, one MoeAdamW
              a parameter. Updates have the same bits; sums over the experts' products another order.

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
    manifest = _manifest(drafts, dispatch, optimize_for)
    models = {}
    for name, draft in drafts.items():
        model = draft.model()
        onnx.helper.set_model_props(model, {manifests.METADATA_KEY: manifest.to_json()})
        models[name] = model
    return TrainingGraph(models, manifest, weights)


class Draft:
    """One graph in the making; every input and output with its role."""

    def __init__(
        self,
        name: str,
        config: Config | ImportedModel,
        optimizer: Optimizer,
        params: list[Parameter],
        optimize_for: str,
    ) -> None:
        self.ir_model = self._start(name)
        self.e = Emitter(self.ir_model.graph)
        self.given = config
        if not isinstance(config, ImportedModel) and not config.unrolls(optimize_for):
            config = replace(config, unroll_experts=0)
        self.config, self.optimizer, self.params = config, optimizer, params
        self.fused = optimize_for == "native"
        self.inputs: list[manifests.TensorInfo] = []
        self.outputs: list[manifests.TensorInfo] = []
        self.values: dict[str, ir.Value] = {}
        getattr(self, f"_{name}")()

    def _start(self, name: str) -> ir.Model:
        """The model that everything is added to."""
        imports = {"": OPSET, DOMAIN: VERSION}
        graph = ir.Graph([], [], nodes=[], opset_imports=imports, name=name, doc_string=_DOC)
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="moe_onnx")

    def info(self) -> GraphInfo:
        """Its inputs and outputs, for the manifest."""
        return GraphInfo(tuple(self.inputs), tuple(self.outputs))

    def model(self) -> onnx.ModelProto:
        """The graph as a model, without a manifest."""
        return to_model(self.ir_model)

    def _grad(self) -> None:
        changes, _ = self._backward()
        for param, change in zip(self.params, changes, strict=True):
            self._output(change, _gradient(param), "float32", param.shape, "gradient")

    def _apply(self) -> None:
        for param in self.params:
            self._input(param.name, "float32", param.shape, "parameter")
        for param in self.params:
            self._input(_gradient(param), "float32", param.shape, "gradient")
        self._state_inputs()
        norm = self._input("grad_norm", "float32", (), "hyperparameter")
        self._updates([self.values[_gradient(param)] for param in self.params], norm)

    def _step(self) -> None:
        changes, norm = self._backward()
        self._state_inputs()
        self._updates(changes, norm)

    def _eval(self) -> None:
        self._metrics(self._model_part(losses=True))

    def _forward(self) -> None:
        done = self._model_part(losses=False)
        role = "logits" if done.output_name == "logits" else "output"
        self._output(done.output, done.output_name, "float32", done.output_shape, role)

    def _backward(self) -> tuple[list[ir.Value], ir.Value]:
        """Give the metrics; return what changes each parameter, and the norm of the gradients among it."""
        done = self._model_part(losses=True, training=True)
        trained = [param for param in self.params if param.trained]
        gradients = self._gradients(done, trained)
        with self.e.scope("grad_norm"):
            norm = global_norm(self.e, gradients, [param.shape for param in trained])
        changes = {param.name: gradient for param, gradient in zip(trained, gradients, strict=True)}
        biases = [param.name for param in self.params if not param.trained]
        if biases:  # one for each layer with experts
            with self.e.scope("load_excess"):
                excesses = [load_excess(self.e, load) for load in done.loads]
            changes |= dict(zip(biases, excesses, strict=True))
        self._metrics(done)
        self._output(norm, "grad_norm", "float32", (), "metric")
        return [changes[param.name] for param in self.params], norm

    def _model_part(self, *, losses: bool, training: bool = False) -> Forward:
        assert not isinstance(self.config, ImportedModel)
        inputs = batch_inputs(self.config, losses=losses, training=training)
        batch = {name: self._input(name, *kind, "batch") for name, kind in inputs.items()}
        params = {p.name: self._input(p.name, "float32", p.shape, "parameter") for p in self.params}
        done = forward(self.e, self.config, batch, params, losses=losses)
        infer(self.ir_model)
        return done

    def _gradients(self, done: Forward, trained: list[Parameter]) -> list[ir.Value]:
        """Gradients of the parameters; a layer also gives that of its input, for the layer before it."""
        assert done.loss is not None
        wanted = [param.name for param in trained]
        is_layer = isinstance(self.config, MoeLayerConfig)
        names = [*wanted, *(["hidden_states"] if is_layer else [])]
        loss, scale = done.loss, None
        if self.config.dtype == "float16":
            scale = self._input(LOSS_SCALE, "float32", (), "hyperparameter")
            loss = shaped(self.e.op("Mul", loss, scale, name="scaled_loss"))
        gradients = add_gradients(self.e, loss, [self.values[name] for name in names])
        if scale is not None:
            with self.e.scope("unscaled"):
                inverse = self.e.op("Reciprocal", scale)
                for name, gradient in zip(names, gradients, strict=True):
                    self.e.rename(gradient, f"{name}.grad.scaled")
                gradients = [self.e.op("Mul", gradient, inverse) for gradient in gradients]
        if isinstance(self.config, MoeLayerConfig):
            dims = ("tokens", self.config.hidden_size)
            self._output(gradients.pop(), "hidden_states.grad", "float32", dims, "output")
        return gradients

    def _state_inputs(self) -> None:
        for param in self.params:
            for state in _states(param, self.optimizer):
                self._input(f"{param.name}.{state}", "float32", param.shape, "state")
        self._input("lr", "float32", (), "hyperparameter")
        self._input("step", "int64", (), "hyperparameter")

    def _updates(self, changes: list[ir.Value], norm: ir.Value) -> None:
        with self.e.scope("update"):
            clip = clip_factor(self.e, norm, self.optimizer)
            scalars = Scalars(self.values["lr"], clip, self.values["step"])
        updated: list[tuple[ir.Value, str, tuple[int, ...], str]] = []
        for param, change in zip(self.params, changes, strict=True):
            names, old = _states(param, self.optimizer), self.values[param.name]
            states = {name: self.values[f"{param.name}.{name}"] for name in names}
            decays = self.optimizer.decays(param.name)
            with self.e.scope("update"), self.e.scope(param.name):
                if param.trained:
                    value, states = update(
                        self.e, self.optimizer, scalars, old, change, states, decays, param.shape, self.fused
                    )
                else:
                    assert not isinstance(self.config, ImportedModel)
                    value = balance(self.e, old, change, self.config.router_bias_update_rate)
            updated.append((value, _updated(param), param.shape, "parameter"))
            updated += [(states[n], f"{param.name}.{n}.updated", param.shape, "state") for n in names]
        for value, name, shape, role in updated:
            self._output(value, name, "float32", shape, role)

    def _metrics(self, done: Forward) -> None:
        for name, (value, dtype, shape) in done.metrics.items():
            self._output(value, name, dtype, shape, "metric")

    def _input(self, name: str, dtype: str, shape: tuple[int | str, ...], role: str) -> ir.Value:
        value = self.e.input(name, ir.DataType.from_numpy(np.dtype(dtype)), shape)
        self._note_input(value, dtype, shape, role)
        return value

    def _note_input(self, value: ir.Value, dtype: str, shape: tuple[int | str, ...], role: str) -> None:
        self.inputs.append(manifests.TensorInfo(str(value.name), dtype, shape, role))
        self.values[str(value.name)] = value

    def _output(
        self, value: ir.Value, name: str, dtype: str, shape: tuple[int | str, ...], role: str
    ) -> None:
        self.e.output(value, name, ir.DataType.from_numpy(np.dtype(dtype)), ir.Shape(list(shape)))
        self._note_output(name, dtype, shape, role)

    def _note_output(self, name: str, dtype: str, shape: tuple[int | str, ...], role: str) -> None:
        self.outputs.append(manifests.TensorInfo(name, dtype, shape, role))


def _manifest(drafts: Mapping[str, Draft], dispatch: Mapping[str, Any], optimize_for: str) -> Manifest:
    first = next(iter(drafts.values()))
    config, optimizer, params = first.given, first.optimizer, first.params
    imports = first.ir_model.graph.opset_imports
    return Manifest(
        config=config.to_dict(),
        optimizer=optimizer.to_dict(),
        parameters=tuple(
            ParameterInfo(
                name=param.name,
                dtype="float32",
                shape=param.shape,
                init={"kind": param.init, "std": param.std},
                weight_decay=param.trained and optimizer.decays(param.name),
                trained=param.trained,
                gradient=_gradient(param),
                updated=_updated(param),
                state={
                    name: StateInfo(f"{param.name}.{name}", f"{param.name}.{name}.updated")
                    for name in _states(param, optimizer)
                },
            )
            for param in params
        ),
        graphs={name: draft.info() for name, draft in drafts.items()},
        dispatch=dict(dispatch),
        versions={"moe_onnx": PACKAGE_VERSION},
        opset={**imports, DOMAIN: VERSION},
        ir_version=first.ir_model.ir_version,
        optimize_for=optimize_for,
    )


def _states(param: Parameter, optimizer: Optimizer) -> tuple[str, ...]:
    return tuple(state_names(optimizer)) if param.trained else ()


def _gradient(param: Parameter) -> str:
    return f"{param.name}.{'grad' if param.trained else 'load_excess'}"


def _updated(param: Parameter) -> str:
    return f"{param.name}.updated"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror}). Is this a saved training graph?"
        ) from error
