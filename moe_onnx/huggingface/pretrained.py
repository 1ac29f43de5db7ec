"""``moe_onnx.from_pretrained``: a checkpoint's folder as a training graph that starts from its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_onnx.build.optimizers import Optimizer
from moe_onnx.build.training_graph import TrainingGraph, build_training_graph
from moe_onnx.build.weights import ORIGIN, WEIGHTS
from moe_onnx.huggingface.architectures import architecture_of
from moe_onnx.huggingface.architectures.description import Architecture
from moe_onnx.huggingface.fields import CONFIG, Fields, read_config
from moe_onnx.huggingface.layout import layout_of, pieces
from moe_onnx.huggingface.origin import Origin, origin_of, write_origin
from moe_onnx.huggingface.shards import Shards
from moe_onnx.storage import FLOATS, fill, write_tensors

ASSEMBLY = "grad+apply+eval+forward"


class Pretrained:
    """A checkpoint of which all is known but the values, which stay on the disk.

    Attributes:
        folder: Where it is.
        architecture: What it is one of.
        config: Of the graphs that train it.
    """

    def __init__(
        self, folder: Path, architecture: Architecture, fields: Fields, changes: dict[str, Any]
    ) -> None:
        self.folder, self.architecture = folder, architecture
        self.config = architecture.config(fields, changes)
        self.shards = Shards(folder)
        self.layout = layout_of(architecture, self.config, self.shards)

    def parameters(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Name and value of each parameter of the graphs, one at a time, in the dtype of the checkpoint."""
        for laid in self.layout.parameters:
            whole = np.empty(int(np.prod(laid.shape, dtype=np.int64)), FLOATS[laid.dtype])
            fill(whole, pieces(self.shards, laid))
            yield laid.name, whole.reshape(laid.shape)

    def training_graph(
        self, *, assembly: str = ASSEMBLY, optimizer: Optimizer | None = None, optimize_for: str = "body"
    ) -> TrainingGraph:
        """The graphs that train it, see :func:`moe_onnx.build_training_graph`.

        A :class:`moe_onnx.TrainingSession` of them starts from the checkpoint's weights, in float32.
        """
        graph = build_training_graph(
            self.config, assembly=assembly, optimizer=optimizer, optimize_for=optimize_for
        )
        sources = (self.folder / CONFIG, *(file.path for file in self.shards.files))
        return replace(graph, weights=self, sources=sources)

    def save(
        self, folder: str | os.PathLike[str], *, assembly: str = ASSEMBLY, optimizer: Optimizer | None = None
    ) -> Path:
        """Write graphs, ``manifest.json``, ``model.safetensors`` and ``huggingface/``; give the folder.

        ``model.safetensors`` has the graph's own parameters, experts stacked, in the checkpoint's dtypes;
        ``huggingface/`` what :func:`moe_onnx.save_pretrained` needs to write the checkpoint's form again.

        Raises:
            ModelError: If the folder has a ``model.safetensors`` that is not of a training graph.
        """
        return self.training_graph(assembly=assembly, optimizer=optimizer).save(folder)

    def write_weights(self, folder: Path) -> None:
        """See :class:`moe_onnx.build.weights.Weights`."""
        by_name = {laid.name: laid for laid in self.layout.parameters}
        write_tensors(
            folder / WEIGHTS,
            [(laid.name, laid.dtype, laid.shape) for laid in self.layout.parameters],
            lambda name: pieces(self.shards, by_name[name]),
            {"format": "pt"},
        )
        write_origin(folder / ORIGIN, self.origin, self.architecture)

    @property
    def origin(self) -> Origin:
        """What :func:`moe_onnx.save_pretrained` has to know to write it again."""
        return origin_of(self.folder, self.shards, self.layout)

    def __repr__(self) -> str:
        count = sum(int(np.prod(laid.shape, dtype=np.int64)) for laid in self.layout.parameters)
        return f"<{self.architecture.class_name} of {count:,} parameters in '{self.folder}'>"


def from_pretrained(folder: str | os.PathLike[str], **changes: Any) -> Pretrained:
    """Read a checkpoint of Hugging Face: Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE.

    ``config.json`` and the headers of the safetensors files are read and checked now, the values when they
    are needed, one tensor at a time. Neither torch nor transformers is used.

    Args:
        folder: With ``config.json`` and ``model.safetensors``, or ``model.safetensors.index.json`` and the
            files it names; float32, float16, bfloat16 or float64.
        changes: Fields of :class:`moe_onnx.MoeLMConfig` that a checkpoint leaves open, such as ``dispatch``,
            ``router_aux_loss_coef`` or ``unroll_experts``.

    Raises:
        ConfigError: If ``config.json`` is of an architecture, or has a value, that cannot be built here;
            names file, field, value and the legal ones.
        CheckpointError: If a file or tensor is missing, damaged, unexpected, quantised or of another shape;
            names file, tensor, expected and found.
    """
    source = Path(folder)
    data = read_config(source)
    architecture = architecture_of(source / CONFIG, data)
    return Pretrained(source, architecture, Fields(source / CONFIG, data, architecture.defaults), changes)
