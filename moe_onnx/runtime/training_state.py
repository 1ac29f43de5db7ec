"""Where a training session's tensors live, and how graphs are bound to them once for all steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnxruntime

from moe_onnx.build.manifest import GraphInfo, Manifest, TensorInfo
from moe_onnx.errors import CheckpointError
from moe_onnx.runtime.session import InferenceSession

Array = np.ndarray[Any, Any]
STEP = "step"  # the step counter's name in a state dict


class Cell:
    """One tensor: a numpy array, and the OrtValue that looks at the same memory."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.array: Array = np.zeros(shape, dtype)
        # On the CPU onnxruntime takes over the array's memory, and OrtValue keeps the array alive.
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy(self.array)


class TrainingState:
    """Parameters, optimizer state, gradients, metrics and hyperparameters of a session.

    Args:
        manifest: Says which tensors there are.
        sides: 1, or 2 for a second set of parameters and state to write a step's results to.
    """

    def __init__(self, manifest: Manifest, sides: int) -> None:
        self.manifest = manifest
        self.side = 0
        self.layout = {p.name: (p.shape, p.dtype) for p in manifest.parameters}
        for parameter in manifest.parameters:
            self.layout |= {s.input: (parameter.shape, parameter.dtype) for s in parameter.state.values()}
        self.sets = [{name: Cell(*kind) for name, kind in self.layout.items()} for _ in range(sides)]
        self.shared: dict[str, Cell] = {}
        self._input_of = {p.updated: p.name for p in manifest.parameters}
        for parameter in manifest.parameters:
            self._input_of |= {s.output: s.input for s in parameter.state.values()}

    @property
    def current(self) -> dict[str, Cell]:
        """Parameters and optimizer state by name, as they are now."""
        return self.sets[self.side]

    def input_cell(self, info: TensorInfo, side: int) -> Cell:
        """What a graph reads for an input that is not of the batch."""
        return self.sets[side][info.name] if info.role in ("parameter", "state") else self.shared_cell(info)

    def output_cell(self, info: TensorInfo, side: int) -> Cell:
        """What a graph writes an output of fixed shape to; ``side`` for parameters and state."""
        if info.role in ("parameter", "state"):
            return self.sets[side][self._input_of[info.name]]
        return self.shared_cell(info)

    def shared_cell(self, info: TensorInfo) -> Cell:
        """A gradient, metric or hyperparameter; all graphs share it: one's output is the next's input."""
        if info.name not in self.shared:
            self.shared[info.name] = Cell(tuple(int(dim) for dim in info.shape), info.dtype)
        return self.shared[info.name]

    def fill(self, values: Mapping[str, Any]) -> None:
        """Overwrite tensors of the current set with arrays that :func:`checked_tensors` let pass."""
        for name, value in values.items():
            np.copyto(self.current[name].array, value)


class BoundGraph:
    """A session bound to the cells it reads and writes; a run only binds the batch.

    Args:
        session: The graph's session.
        graph: Its inputs and outputs.
        state: The cells.
        reads: The side that parameters and optimizer state are read from.
        writes: The side that updated ones are written to. The same side means in place: only legal
            for a graph that is elementwise in them.
    """

    def __init__(
        self, session: InferenceSession, graph: GraphInfo, state: TrainingState, reads: int, writes: int
    ) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._free: list[str] = []
        self._batch: list[Array] = []
        self.batch_inputs = graph.inputs_of("batch")
        self.metrics: dict[str, Cell] = {}
        # Bindings of older releases of onnxruntime do not keep their values alive.
        self._held = []
        for info in graph.inputs:
            if info.role != "batch":
                cell = state.input_cell(info, reads)
                self._held.append(cell)
                self._binding.bind_ortvalue_input(info.name, cell.value)
        for info in graph.outputs:
            if info.role in ("logits", "output") or any(isinstance(dim, str) for dim in info.shape):
                self._free.append(info.name)
                continue
            cell = state.output_cell(info, writes)
            self._held.append(cell)
            self._binding.bind_ortvalue_output(info.name, cell.value)
            if info.role == "metric":
                self.metrics[info.name] = cell

    @property
    def tokens(self) -> int:
        """Rows of the last batch's first input."""
        return len(self._batch[0])

    def run(self, batch: Mapping[str, Array]) -> None:
        """Run on a batch; results are in the cells."""
        for name, array in batch.items():
            self._binding.bind_cpu_input(name, array)  # looks at the array's memory
        before, self._batch = self._batch, list(batch.values())
        if self._free and [array.shape for array in before] != [array.shape for array in self._batch]:
            for name in self._free:  # a binding keeps the shape, and the memory, of the last run
                self._binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(self._binding)

    def read_metrics(self) -> dict[str, Any]:
        """The metrics of the last run: Python numbers, or copies of arrays."""
        return {n: c.array.item() if not c.array.ndim else c.array.copy() for n, c in self.metrics.items()}

    def free_outputs(self) -> dict[str, Array]:
        """The outputs of the last run whose shape depends on the batch."""
        # Bound last, so they are the last of the outputs, whatever their place in the graph.
        outputs = self._binding.get_outputs()[-len(self._free) :] if self._free else []
        return {name: value.numpy().copy() for name, value in zip(self._free, outputs, strict=True)}


def checked_tensors(
    found: Mapping[str, Any], expected: Mapping[str, tuple[tuple[int, ...], str]], where: str
) -> dict[str, Array]:
    """Arrays that are exactly what is expected (shape and dtype by name), or an error.

    Raises:
        CheckpointError: A tensor is missing, unknown, or of another shape or dtype; names it, and what
            was expected and found.
    """
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    if missing or unknown:
        parts = [
            f"{_some(missing)} missing" if missing else "",
            f"{_some(unknown)} unknown" if unknown else "",
        ]
        raise CheckpointError(
            f"{where}: expected {len(expected)} tensors, found {len(found)}: "
            f"{', '.join(filter(None, parts))}."
        )
    done = {}
    for name, (shape, dtype) in expected.items():
        array = np.asarray(found[name])
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            raise CheckpointError(
                f"{where}: tensor '{name}' expected {dtype} {list(shape)}, found {array.dtype} "
                f"{list(array.shape)}."
            )
        done[name] = array
    return done


def fill_one_by_one(
    state: TrainingState,
    pairs: Iterable[tuple[str, Any]],
    expected: Mapping[str, tuple[tuple[int, ...], str]],
) -> None:
    """Overwrite tensors of the current set by pairs of name and value, none of which is kept.

    Values may be of any float type; float16 and bfloat16 become float32 exactly.

    Raises:
        CheckpointError: A tensor is missing, unknown, given twice, of another shape or no floats.
    """
    left = dict(expected)
    for name, value in pairs:
        if name not in left:
            what = "given twice" if name in expected else "unknown"
            raise CheckpointError(
                f"parameters: tensor '{name}' is {what}. Expected: {_some(list(expected))}."
            )
        shape, _ = left.pop(name)
        array = np.asarray(value)
        if array.shape != shape or (array.dtype.kind != "f" and array.dtype.name != "bfloat16"):
            raise CheckpointError(
                f"parameters: tensor '{name}' expected floats {list(shape)}, found {array.dtype} "
                f"{list(array.shape)}."
            )
        with np.errstate(over="ignore"):  # a float64 beyond float32 shows as an infinite loss
            state.current[name].array[...] = array
    if left:
        raise CheckpointError(f"parameters: expected {len(expected)} tensors; {_some(list(left))} missing.")


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + rest
