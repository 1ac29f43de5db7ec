"""Fast forms of operators: the same signature and the same meaning as their reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_onnx.kernels import moe_init_routing_v2_grad, moe_token_unpermute_with_routing_map_grad
from moe_onnx.operators._arrays import Array


@dataclass(frozen=True)
class PythonKernel:
    """What the Python custom op of an operator runs, and the output shapes it falls back on."""

    name: str
    run: Callable[..., Any]
    rough_shapes: Callable[[Sequence[Array], Mapping[str, Any]], list[tuple[int, ...]]]


PYTHON_KERNELS: tuple[PythonKernel, ...] = (
    PythonKernel(
        "MoeInitRoutingV2Grad",
        moe_init_routing_v2_grad.moe_init_routing_v2_grad,
        moe_init_routing_v2_grad.rough_shapes,
    ),
    PythonKernel(
        "MoeTokenUnpermuteWithRoutingMapGrad",
        moe_token_unpermute_with_routing_map_grad.moe_token_unpermute_with_routing_map_grad,
        moe_token_unpermute_with_routing_map_grad.rough_shapes,
    ),
)
