"""The operators, in the order of the docs. Adding one is one file here and one line in ``ALL``."""

from moe_onnx.operators import (
    moe_adam_w,
    moe_finalize_routing_v2,
    moe_finalize_routing_v2_grad,
    moe_grouped_matmul,
    moe_grouped_matmul_weight_grad,
    moe_init_routing_v2,
    moe_init_routing_v2_grad,
    moe_square_sum,
    moe_swi_glu,
    moe_swi_glu_grad,
    moe_token_permute_with_routing_map,
    moe_token_permute_with_routing_map_grad,
    moe_token_unpermute_with_routing_map,
    moe_token_unpermute_with_routing_map_grad,
)
from moe_onnx.spec import OpSpec

ALL: tuple[OpSpec, ...] = (
    moe_init_routing_v2.SPEC,
    moe_init_routing_v2_grad.SPEC,
    moe_token_permute_with_routing_map.SPEC,
    moe_token_permute_with_routing_map_grad.SPEC,
    moe_token_unpermute_with_routing_map.SPEC,
    moe_token_unpermute_with_routing_map_grad.SPEC,
    moe_finalize_routing_v2.SPEC,
    moe_finalize_routing_v2_grad.SPEC,
    moe_grouped_matmul.SPEC,
    moe_grouped_matmul_weight_grad.SPEC,
    moe_swi_glu.SPEC,
    moe_swi_glu_grad.SPEC,
    moe_square_sum.SPEC,
    moe_adam_w.SPEC,
)
BY_NAME: dict[str, OpSpec] = {spec.name: spec for spec in ALL}
