"""A training graph in the making: forward, losses, backward and updates, by assembly; and its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.autodiff.graphs import infer, to_model
from moe_onnx.autodiff.reverse import add_gradients
from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.forward import Forward, batch_inputs, forward
from moe_onnx.build.imported import ImportedModel
from moe_onnx.build.manifest import GraphInfo, Manifest, ParameterInfo, StateInfo, TensorInfo
from moe_onnx.build.optimizers import Optimizer, state_names
from moe_onnx.build.parameters import Parameter
from moe_onnx.build.update import Scalars, balance, clip_factor, global_norm, load_excess, update
from moe_onnx.spec import DOMAIN, PACKAGE_VERSION, VERSION

# What the oldest supported onnxruntime loads, whatever the installed onnx would write.
OPSET, IR_VERSION = 21, 10
LOSS_SCALE = "loss_scale"  # a hyperparameter of graphs that differentiate in float16

_DOC = (
    "Routers: equal scores go to the lower expert. A router logit that is NaN ranks first and makes the loss "
    "NaN; where the dispatch may drop its token, the metric nan_router_logits counts it. Whoever trains has "
    "to look at both before an update, as moe_onnx.TrainingSession does."
)

Config = MoeLayerConfig | MoeLMConfig


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
        self.inputs: list[TensorInfo] = []
        self.outputs: list[TensorInfo] = []
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
            norm = global_norm(self.e, gradients, [param.shape for param in trained], self.fused)
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
        done = forward(self.e, self.config, batch, params, losses=losses, fused=self.fused)
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
        self.inputs.append(TensorInfo(str(value.name), dtype, shape, role))
        self.values[str(value.name)] = value

    def _output(
        self, value: ir.Value, name: str, dtype: str, shape: tuple[int | str, ...], role: str
    ) -> None:
        self.e.output(value, name, ir.DataType.from_numpy(np.dtype(dtype)), ir.Shape(list(shape)))
        self._note_output(name, dtype, shape, role)

    def _note_output(self, name: str, dtype: str, shape: tuple[int | str, ...], role: str) -> None:
        self.outputs.append(TensorInfo(name, dtype, shape, role))


def manifest_of(drafts: Mapping[str, Draft], dispatch: Mapping[str, Any], optimize_for: str) -> Manifest:
    """What the tensors of all drafts of a model are for."""
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
