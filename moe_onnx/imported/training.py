"""``training_graph_from``: from any ONNX model to the graphs that train it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import onnx
import onnx_ir as ir

from moe_onnx.autodiff.gradients import sizes
from moe_onnx.autodiff.graphs import infer
from moe_onnx.autodiff.subgraphs import captured
from moe_onnx.build.draft import Draft
from moe_onnx.build.forward import Forward
from moe_onnx.build.imported import CROSS_ENTROPY
from moe_onnx.build.optimizers import Optimizer
from moe_onnx.build.training_graph import TrainingGraph, checked_choices, finished
from moe_onnx.errors import GradientError, ModelError, OptionError
from moe_onnx.imported.fusing import Fused, fused
from moe_onnx.imported.losses import add_loss
from moe_onnx.imported.reading import check_readable
from moe_onnx.imported.root import shape_of
from moe_onnx.imported.source import Source, prepare
from moe_onnx.spec import DOMAIN, VERSION
from moe_onnx.validation.rewriting.data import files_of
from moe_onnx.validation.subject import Options, Subject, open_subject

_DOC = "A training graph of an imported model. Whoever trains has to see that loss and grad_norm are finite."


def training_graph_from(
    model: onnx.ModelProto | str | os.PathLike[str],
    *,
    loss: str,
    params: str | Sequence[str] | None = None,
    assembly: str | None = "step",
    optimizer: Optimizer | None = None,
    output: str | None = None,
    ignore_index: int = -100,
    shift: bool | None = None,
    optimize_for: str = "body",
    fuse: bool = True,
) -> TrainingGraph:
    """Make the graphs that train an ONNX model, such as an export of PyTorch.

    The model's own inputs stay the batch, with their names and free sizes. Weights that are trained become
    inputs, float32 whatever the model stores (a Cast gives the model its own dtype); all else stays a
    constant of every graph, at most 1 GiB of it, copied from external files. Parameters' values are read
    from where they are, one at a time, by whoever trains or saves.

    What exporters do to weights is undone where the graph says how: one initializer that stands for
    parameters of several modules (torch.onnx.export merges equal vectors) is split; a matrix that constant
    folding transposed under a made-up name becomes ``<module>.weight`` again, in PyTorch's layout, or is tied
    to the parameter it is the transpose of. What is read in several places stays tied. The manifest's config
    lists all of it (``split``, ``renamed``, ``tied``).

    MoE layers of standard operators become ``ascend.moe`` nodes first, as by ``rewrite_model(model, ["fold",
    "fuse"])``, on the parameters that they had. Both models are run on the same inputs, and where an output
    differs, or that cannot be found out, the model goes on as it was, with a warning: right, but slow. The
    manifest's config says of each layer what was done (``fused``) or the first condition that did not hold
    (``not_fused``), and how that was ``verified``.

    Args:
        model: A ``ModelProto``, or a path. Opsets before 18 are converted by onnx's converter.
        loss: The name of a float scalar that the model computes, or a loss that is attached:
            ``"cross-entropy"`` (of logits, held against a further input ``labels``), or
            ``"mean-squared-error"`` (of an output, held against a further input ``target``).
        params: Names, or patterns (``fnmatch``), of what to train; with ``!`` in front, of what not to.
            None: all weights that the loss depends on. Weights are what the export calls parameters; where
            it does not say, float initializers that are no scalars, no buffers by their names (``inv_freq``,
            ``running_mean``, ...), and have names of their own or are a matrix of a product or lookup.
            Patterns choose among weights, full names any float initializer.
        assembly: As of :func:`moe_onnx.build_training_graph`; ``forward`` gives the model's own outputs but
            its loss. None: ``grad+apply+eval``, and ``forward`` where there are such outputs.
        optimizer: :class:`AdamW` (the default) or :class:`SGD`.
        output: The output that an attached loss is of; None: ``logits``, or the only output of floats.
        ignore_index: Label that is left out of the cross-entropy.
        shift: Whether position t is held against label t + 1 (logits ``[batch, sequence, classes]``; where
            the model has an ``attention_mask``, between real tokens only), as language models are trained;
            None: where logits have three axes.
        optimize_for: As of :func:`moe_onnx.build_training_graph`.
        fuse: Whether to look for MoE layers at all.

    Returns:
        A :class:`TrainingGraph` with the model's weights, for :class:`TrainingSession`.

    Raises:
        OptionError: If there is no such loss or output, or it is no float scalar, or a pattern matches none.
        GradientError: If the model cannot be differentiated: the first node that blocks, the path to it.
        ModelError: If the model is not valid ONNX, or cannot be brought to the form of a training graph.
        ModelFileError: If there is no such file, or it is no model.
        CheckpointError: If a weight in an external file cannot be read.
        ConfigError: If assembly, optimizer or optimize_for is none of the legal ones.

    Warns:
        UserWarning: If fused layers could not be verified, and stay as they were; if experts are missing, or
            a loop has as many turns as in a trace; if weights have lost their names for good, or several
            modules read a matrix that may be merged; if BatchNorms go by running statistics, or are folded
            into weights; if types in the model contradict each other.
    """
    names, optimizer = checked_choices(
        "training_graph_from", "grad+apply+eval" if assembly is None else assembly, optimizer, optimize_for
    )
    if not isinstance(fuse, bool):
        raise OptionError(f"fuse must be True or False, got {fuse!r}.")
    chosen = [params] if isinstance(params, str) else params
    subject = open_subject(model, Options())
    check_readable(subject.model)
    with _names_kept(model):
        given = fused(subject) if fuse else Fused(subject.model, subject.folder)
        source = prepare(
            given, loss=loss, params=chosen, output=output, ignore_index=ignore_index, shift=shift
        )
        if assembly is None and set(source.outputs) - {source.config.loss}:
            names.append("forward")
        with _told_why_not(given):
            drafts = {name: _ImportedDraft(name, source, optimizer, optimize_for) for name in names}
        dispatch = {"kind": "none", "mode": "dropless", "expert_capacity": 0, "active_num": 0}
        graph = finished(drafts, dispatch, optimize_for, source.weights)
    _warn_of_traces(subject)
    return replace(graph, sources=files_of(subject))


@contextmanager
def _told_why_not(given: Fused) -> Iterator[None]:
    """An error of gradients also says which MoE layers stayed what they were: they may be what has none."""
    try:
        yield
    except GradientError as error:
        why = "; ".join(f"'{node}': {text}" for node, text in given.not_fused.items())
        if not why:
            raise
        raise GradientError(f"{error} MoE layers that were not fused: {why}.") from error


@contextmanager
def _names_kept(model: onnx.ModelProto | str | os.PathLike[str]) -> Iterator[None]:
    """Tensors keep their names: onnx-ir writes those that their values get into the caller's model."""
    tensors = list(model.graph.initializer) if isinstance(model, onnx.ModelProto) else []
    names = [tensor.name for tensor in tensors]
    try:
        yield
    finally:
        for tensor, name in zip(tensors, names, strict=True):
            tensor.name = name


class _ImportedDraft(Draft):
    """A graph that starts as the model, in place of nothing."""

    def __init__(self, name: str, source: Source, optimizer: Optimizer, optimize_for: str) -> None:
        self.source = source
        super().__init__(name, source.config, optimizer, source.params, optimize_for)

    def _start(self, name: str) -> ir.Model:
        whole = ir.from_proto(self.source.model)
        if name == "apply":
            imports = {"": whole.graph.opset_imports[""]}
            graph = ir.Graph([], [], nodes=[], opset_imports=imports, name=name)
            model = ir.Model(graph, ir_version=whole.ir_version, producer_name="moe_onnx")
        else:
            model = whole
            model.producer_name = "moe_onnx"
        model.graph.name, model.graph.doc_string = name, _DOC
        model.graph.opset_imports.setdefault(DOMAIN, VERSION)
        return model

    def _model_part(self, *, losses: bool, training: bool = False) -> Forward:
        graph, config = self.ir_model.graph, self.source.config
        values = {str(value.name): value for value in graph.inputs}
        values |= {str(v.name): v for node in graph for v in node.outputs if v.name}
        outputs = [values[name] for name in self.source.outputs]
        if losses:
            roots = [values[config.output or config.loss]]
        else:
            roots = [value for value in outputs if value.name != config.loss]
        if not roots:
            raise ModelError(
                "assembly: 'forward' gives the model's outputs, but it has none beside its loss "
                f"'{config.loss}'. Leave 'forward' out."
            )
        given = list(graph.inputs)
        needed = _ancestors(roots)
        if losses and config.target in values:
            needed.add(values[config.target])
        mask = values.get("attention_mask")
        if losses and config.shift and mask is not None:
            needed.add(mask)
        graph.inputs.clear()
        graph.outputs.clear()
        own = {param.name for param in self.params}
        for value in given:
            if value.name not in own and value in needed:
                self._take(value, config.inputs[str(value.name)], "batch")
        target = self._target(roots[0], values) if losses and config.target else None
        for value in given:
            if value.name in own and value in needed:
                self._take(value, ("float32", shape_of(value)), "parameter")
        if losses:
            done = add_loss(self.e, config, values, target)
        else:
            done = Forward(roots[0], "", ())
            for value in roots:
                self._give(value)
        infer(self.ir_model)
        return done

    def _forward(self) -> None:
        self._model_part(losses=False)

    def _take(self, value: ir.Value, kind: tuple[str, tuple[int | str, ...]], role: str) -> None:
        """Make a value of the model an input."""
        dtype, shape = kind
        value.shape = ir.Shape(list(shape))
        self.ir_model.graph.inputs.append(value)
        self._note_input(value, dtype, shape, role)

    def _give(self, value: ir.Value) -> None:
        """Make a value of the model an output, under its own name."""
        if value.dtype is None or not isinstance(value.type, ir.TensorType) or sizes(value) is None:
            return  # nobody could take it: a sequence, or of unknown rank
        self.ir_model.graph.outputs.append(value)
        role = "logits" if value.name in ("logits", self.source.config.output) else "output"
        self._note_output(str(value.name), str(value.dtype.numpy().name), shape_of(value), role)

    def _target(self, output: ir.Value, values: dict[str, ir.Value]) -> ir.Value:
        """The input that an attached loss holds the output against."""
        config, shape = self.source.config, shape_of(output)
        dtype, shape = ("int64", shape[:-1]) if config.loss == CROSS_ENTROPY else ("float32", shape)
        if config.target not in values:
            return self._input(config.target, dtype, shape, "batch")
        found = values[config.target]
        if config.inputs[config.target][0] != dtype or len(shape_of(found)) != len(shape):
            raise ModelError(
                f"The model has an input '{config.target}' already, which must be {dtype} of rank "
                f"{len(shape)} for this loss, got {config.inputs[config.target][0]} "
                f"{list(shape_of(found))}. Rename it."
            )
        return found


def _ancestors(roots: Sequence[ir.Value]) -> set[ir.Value]:
    """All values that some values are made from."""
    found, left = set(roots), list(roots)
    while left:
        node = left.pop().producer()
        read = [] if node is None else [*node.inputs, *captured(node)]
        inner = [value for value in read if value is not None and value not in found]
        found.update(inner)
        left += inner
    return found


def _warn_of_traces(subject: Subject) -> None:
    """Say what a trace has lost: such a model trains, but it is not the one that was exported."""
    from moe_onnx.validation import families
    from moe_onnx.validation.findings import Finding
    from moe_onnx.validation.hazards.foreign import experts, fixed_loops

    families.load()
    for check in (experts, fixed_loops):
        for finding in check(subject):
            if isinstance(finding, Finding):
                warnings.warn(f"{finding.code}: {finding.where}: {finding.found}.", stacklevel=3)
