"""``moe_onnx.TrainingSession``: trains a training graph with stock onnxruntime."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnxruntime

from moe_onnx.build.draft import LOSS_SCALE
from moe_onnx.build.forward import LOAD_BEFORE
from moe_onnx.build.manifest import Manifest
from moe_onnx.build.training_graph import TrainingGraph
from moe_onnx.errors import BatchError, CheckpointError, ModelError, NonFiniteError, OptionError
from moe_onnx.runtime.accumulate import Accumulator
from moe_onnx.runtime.batch import checked_batch
from moe_onnx.runtime.checkpoint import load_checkpoint, save_checkpoint
from moe_onnx.runtime.interrupts import interrupts_deferred
from moe_onnx.runtime.loss_scale import LossScale, Scaler
from moe_onnx.runtime.memory import check_memory
from moe_onnx.runtime.register import choose
from moe_onnx.runtime.session import InferenceSession
from moe_onnx.runtime.training_state import (
    STEP,
    Array,
    BoundGraph,
    TrainingState,
    checked_tensors,
    fill_one_by_one,
)

ASSEMBLIES = ("grad+apply", "step")


def default_options(threads: int | None = None) -> onnxruntime.SessionOptions:
    """Options for several graphs that take turns.

    The threads of one would otherwise go on spinning while the next one runs (steps of a small model
    took twice as long), and a plan of all its memory would be kept for every shape of batch (a third
    more at the peak, and no faster).

    Args:
        threads: Of every graph; None: onnxruntime's choice.
    """
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.enable_mem_pattern = False
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


class TrainingSession:
    """Parameters and optimizer state, and the graphs that train them.

    A step runs the graphs ``"grad"`` and ``"apply"`` if there are both (updates are written in place),
    else the graph ``"step"`` (updates are written to a second set of tensors, which becomes the
    current one). The loss and the gradient norm are looked at in between: whatever goes wrong, and
    whenever Ctrl-C is pressed, the state is that of a whole number of steps.

    Args:
        graph: A :class:`TrainingGraph`, or the folder it was saved to.
        parameters: Initial values by name, float32, or pairs of name and value in any float type, which
            are taken over one at a time; None: the weights that came with the graph, where there are any
            (``graph.weights``), else drawn by ``graph.init_parameters(seed)``.
        seed: Of the initial values.
        lr: Learning rate, or a function of the number of the update (1 for the first), such as a
            :class:`LearningRate`.
        kernels: As in :class:`InferenceSession`, but ``"auto"`` never is ``"python"``: bodies are faster,
            and the indices that the Python ops would check are made by the graph itself.
        sess_options: onnxruntime's options, for all graphs; None: :func:`default_options`.
        assembly: ``"grad+apply"`` or ``"step"``; None: the first that the graph has; ``""``: none, for a
            session that only evaluates.
        non_finite: What a NaN or infinite loss or gradient norm leads to: ``"raise"`` an error, or
            ``"skip"`` the update, with ``metrics["skipped"]`` True. The state stays as it was.
        loss_scale: Options of the loss scale of a float16 graph; None: the default ones. There a
            gradient norm that is not finite beside a loss that is skips the update in any case, with
            ``metrics["overflow"]`` True too, and lowers the scale.

    Raises:
        OptionError: If an option is none of these.
        ModelError: If the graph lacks an assembly, or its state is more than the machine's memory.
        CheckpointError: If ``parameters`` do not fit; names tensor, expected and found.
    """

    def __init__(
        self,
        graph: TrainingGraph | str | os.PathLike[str],
        *,
        parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        seed: int = 0,
        lr: float | Callable[[int], float] = 1e-3,
        kernels: str = "auto",
        sess_options: onnxruntime.SessionOptions | None = None,
        assembly: str | None = None,
        non_finite: str = "raise",
        loss_scale: LossScale | None = None,
    ) -> None:
        if isinstance(graph, (str, os.PathLike)):
            graph = TrainingGraph.load(graph)
        if non_finite not in ("raise", "skip"):
            raise OptionError(f"non_finite must be 'raise' or 'skip', got {non_finite!r}.")
        self.lr = lr
        self.non_finite = non_finite
        self._graph = graph
        self._manifest: Manifest = graph.manifest
        self._kernels = choose(kernels, sess_options, "native", "body")
        self._options = default_options() if sess_options is None else sess_options
        self._assembly = _chosen(assembly, self._manifest)
        self._sessions: dict[str, InferenceSession] = {}
        self._bound: dict[tuple[str, int], BoundGraph] = {}
        check_memory(self._manifest, self._assembly)
        self._state = TrainingState(self._manifest, sides=2 if self._assembly == "step" else 1)
        self._accumulator: Accumulator | None = None
        self._scaler = _scaler(loss_scale, self._manifest)
        self._global_step = 0
        self._broken = False
        if parameters is None:
            parameters = graph.init_parameters(seed) if graph.weights is None else graph.weights.parameters()
        layout = {name: self._state.layout[name] for name in self._manifest.parameter_names}
        if isinstance(parameters, Mapping):
            self._state.fill(checked_tensors(parameters, layout, "parameters"))
        else:
            fill_one_by_one(self._state, parameters, layout)
        for part in self._assembly.split("+") if self._assembly else ():
            self._bind(part)  # a graph that does not load is better known now

    @property
    def manifest(self) -> Manifest:
        """What the graphs' tensors are for."""
        return self._manifest

    @property
    def graph(self) -> TrainingGraph:
        """The graphs it runs, and where their first values are."""
        return self._graph

    @property
    def global_step(self) -> int:
        """Number of updates so far."""
        return self._global_step

    @property
    def assembly(self) -> str:
        """The graphs a step runs; empty where the graph can only evaluate."""
        return self._assembly

    def step(self, batch: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One update.

        Args:
            batch: Arrays by name; ``labels`` (the ids themselves) and ``attention_mask`` (all ones)
                may be left out. Several of them: the micro-batches of one batch, run one after the
                other, whose gradients are put together as :class:`Accumulator` says, each token weighing
                the same (``grad`` and ``apply`` only; costs the memory of the gradients once more).

        Returns:
            The graph's metrics (``loss``, ``grad_norm``, ... as numbers, ``expert_load`` as array),
            ``step`` (the updates so far, this one included), ``lr`` and ``skipped``; in float16 also
            ``loss_scale`` (of this update), ``overflow`` and ``overflows`` (how many there were so far).

        Raises:
            BatchError: If the batch does not fit the graph; nothing was updated.
            NonFiniteError: If loss or gradient norm are not finite, of any micro-batch; the state is as
                before. Where such updates are skipped, the metrics are of the micro-batches so far.
            ModelError: If the graph has no assembly that updates, or by parts of a batch.
        """
        if not self._assembly:
            raise ModelError(
                f"The training graph cannot step: it has {', '.join(self._manifest.graphs)}, and a step "
                "needs 'grad' and 'apply', or 'step'."
            )
        several = isinstance(batch, Sequence) and all(isinstance(part, Mapping) for part in batch)
        parts: list[Any] = list(batch) if several else [batch]
        if not parts:
            raise BatchError("A step needs at least one micro-batch, got an empty sequence.")
        if len(parts) > 1 and self._assembly == "step":
            raise ModelError(
                f"A step of {len(parts)} micro-batches needs the graphs 'grad' and 'apply': the graph 'step' "
                "makes an update of each. Build the training graph with 'grad+apply'."
            )
        with interrupts_deferred():
            return self._step(parts, self._global_step + 1)

    def _step(self, parts: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
        more = {"lr": self._set_hyperparameters(number), "step": number, "skipped": False}
        scaler = self._scaler
        before = (0.0, 0) if scaler is None else (scaler.scale, scaler.overflows)
        metrics, finite = self._gradients(parts, number)
        metrics |= more
        if scaler is not None:
            overflow = scaler.overflows > before[1]
            metrics |= {LOSS_SCALE: before[0], "overflow": overflow, "overflows": scaler.overflows}
        if not finite:
            return metrics | {"step": self._global_step, "skipped": True}
        if self._assembly == "step":
            self._state.side = 1 - self._state.side
        else:
            self._broken = True  # should the run fail half way
            self._bind("apply").run({})
            self._broken = False
        if scaler is not None:
            scaler.grow()
        self._global_step = number
        return metrics

    def _gradients(self, parts: Sequence[Mapping[str, Any]], number: int) -> tuple[dict[str, Any], bool]:
        """Run all but the update; the metrics, and whether they are finite."""
        if len(parts) == 1:
            metrics = self._run("step" if self._assembly == "step" else "grad", parts[0]).read_metrics()
            return metrics, self._is_finite(metrics, number)
        if self._accumulator is None:
            self._accumulator = Accumulator(self._manifest, self._state)
        total = self._accumulator
        total.start()
        names = {info.name for info in self._bind("grad").batch_inputs}
        for i, part in enumerate(parts):
            where = f"micro-batch {i + 1} of {len(parts)}: "
            if LOAD_BEFORE in names and total.load is not None:
                part = {LOAD_BEFORE: total.load, **part}
            try:
                bound = self._run("grad", part, part=i)
            except BatchError as error:
                raise BatchError(f"{where}{error}") from error
            metrics = bound.read_metrics()
            total.add(metrics, metrics.get("num_tokens", bound.tokens))
            if not self._is_finite(metrics, number, where):
                return total.finish() | {"grad_norm": metrics["grad_norm"]}, False
        metrics = total.finish()
        return metrics, self._is_finite(metrics, number)

    def eval(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics of a batch, without an update; the batch as in :meth:`step`."""
        return self._run("eval", batch).read_metrics()

    def forward(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """The outputs of the graph ``"forward"``, such as ``logits`` ``[batch, sequence, vocab]``."""
        return self._run("forward", inputs).free_outputs()

    def parameters(self) -> dict[str, Array]:
        """Copies of the parameters by name."""
        current = self._usable().current
        return {name: current[name].array.copy() for name in self._manifest.parameter_names}

    def state_dict(self) -> dict[str, Array]:
        """Copies of parameters, optimizer state and the step counter (``"step"``), by name.

        In float16 also ``"loss_scale"``, float64 ``[3]``; a state without it leaves the scale as it is.
        """
        tensors = {name: cell.array.copy() for name, cell in self._usable().current.items()}
        if self._scaler is not None:
            tensors[LOSS_SCALE] = self._scaler.state()
        return tensors | {STEP: np.array(self._global_step, np.int64)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, all of it or nothing.

        Raises:
            CheckpointError: If a tensor is missing, unknown, or of another shape or dtype.
        """
        tensors = dict(state)
        step = np.asarray(tensors.pop(STEP, None))
        if step.shape or step.dtype.kind != "i" or step < 0:
            raise CheckpointError(
                f"state dict: '{STEP}' must be an integer >= 0, found {state.get(STEP)!r:.60}."
            )
        scale = tensors.pop(LOSS_SCALE, None)
        tensors = checked_tensors(tensors, self._state.layout, "state dict")
        with interrupts_deferred():
            if scale is not None and self._scaler is not None:
                self._scaler.load(scale)
            self._state.fill(tensors)
            self._global_step = int(step)
            self._broken = False

    def state_layout(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of all tensors of the state dict but the step, by name."""
        return dict(self._state.layout)

    def save_checkpoint(
        self, folder: str | os.PathLike[str], *, data: Mapping[str, Any] | None = None
    ) -> Path:
        """See :func:`moe_onnx.save_checkpoint`."""
        return save_checkpoint(self, folder, data=data)

    def load_checkpoint(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """See :func:`moe_onnx.load_checkpoint`."""
        return load_checkpoint(self, folder)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "moe_onnx.TrainingSession cannot be pickled or copied. Build another session of the same graph, "
            "and give it state_dict() or a checkpoint."
        )

    def _usable(self) -> TrainingState:
        if self._broken:
            raise ModelError("An update failed half way; the state is undefined. Load a checkpoint to go on.")
        return self._state

    def _run(self, assembly: str, batch: Mapping[str, Any], part: int = 0) -> BoundGraph:
        self._usable()
        bound = self._bind(assembly)
        capacity = self._manifest.dispatch.get("expert_capacity", 0)
        config, draw = self._manifest.config, (self._global_step + 1, *([part] if part else []))
        bound.run(checked_batch(batch, bound.batch_inputs, config, capacity=capacity, draw=draw))
        return bound

    def _bind(self, assembly: str) -> BoundGraph:
        side = self._state.side
        if (assembly, side) not in self._bound:
            graph = self._manifest.graph(assembly)
            if assembly not in self._sessions:
                self._sessions[assembly] = InferenceSession(
                    self._graph.models[assembly], self._options, kernels=self._kernels
                )
            writes = 1 - side if assembly == "step" else side
            session = self._sessions[assembly]
            self._bound[assembly, side] = BoundGraph(session, graph, self._state, side, writes)
        return self._bound[assembly, side]

    def _set_hyperparameters(self, number: int) -> float:
        lr = float(self.lr(number) if callable(self.lr) else self.lr)
        if not math.isfinite(lr) or lr < 0:
            raise OptionError(f"lr must be a finite number >= 0, got {lr} for update {number}.")
        scale = 0.0 if self._scaler is None else self._scaler.scale
        for name, value in (("lr", lr), ("step", number), (LOSS_SCALE, scale)):
            if name in self._state.shared:
                self._state.shared[name].array[...] = value
        return lr

    def _is_finite(self, metrics: dict[str, Any], number: int, where: str = "") -> bool:
        faults = []
        if count := metrics.get("nan_router_logits", 0):
            faults.append(f"{count} router logits are NaN")
        for name, said in (("loss", "loss"), ("grad_norm", "gradient norm")):
            if name in metrics and not math.isfinite(metrics[name]):
                faults.append(f"the {said} is {metrics[name]}")
        is_overflow = len(faults) == 1 and not math.isfinite(metrics.get("grad_norm", 0.0))
        if self._scaler is not None and is_overflow:
            self._scaler.back_off(number, metrics)
        elif faults and self.non_finite == "raise":
            raise NonFiniteError(
                f"Update {number}: {where}{faults[0]}. Nothing was updated. Lower the learning rate, or "
                "leave such batches out: non_finite='skip', --skip-non-finite of moe-onnx train.",
                metrics=metrics,
            )
        return not faults


def _scaler(options: LossScale | None, manifest: Manifest) -> Scaler | None:
    wanted = any(info.name == LOSS_SCALE for graph in manifest.graphs.values() for info in graph.inputs)
    if options is not None and not wanted:
        raise OptionError(
            "loss_scale is for graphs that compute in float16; this one computes in "
            f"{manifest.config.get('dtype', 'float32')}. Leave it out."
        )
    return Scaler(options or LossScale()) if wanted else None


def _chosen(assembly: str | None, manifest: Manifest) -> str:
    if assembly is None:
        return next((a for a in ASSEMBLIES if all(part in manifest.graphs for part in a.split("+"))), "")
    if not assembly:
        return ""
    if assembly not in ASSEMBLIES:
        raise OptionError(f"assembly must be one of {', '.join(map(repr, ASSEMBLIES))}, got {assembly!r}.")
    for part in assembly.split("+"):
        manifest.graph(part)
    return assembly
