"""``MoeOptions``: what an MoE layer is, its router, its dispatch and its experts, checked as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Self

from moe_onnx.build.options import Options
from moe_onnx.spec import MAX_ROWS, MAX_TOP_K

ROUTER_SCORES = ("softmax_then_top_k", "top_k_then_softmax", "sigmoid")
GROUP_SCORES = ("top2_sum", "max")
DISPATCHES = ("init_routing", "routing_map")
DISPATCH_MODES = ("dropless", "active", "drop_pad")
DROP_POLICIES = ("probs", "position")
WEIGHT_PLACES = ("combine", "experts")
AUX_LOSSES = ("pooled", "per_layer", "sequence", "global")
DTYPES = ("float32", "bfloat16", "float16")
EXPERT_ACTIVATIONS = ("swiglu", "geglu", "clamped_swiglu", "gelu", "relu")
# What the graphs of a config are made for: function bodies, in any runtime, or this package's native kernels;
# and up to how many experts get nodes of their own, unless the config says.
FORMS = {"body": 16, "native": 0}
GATED = ("swiglu", "geglu", "clamped_swiglu")


@dataclass(frozen=True)
class MoeOptions(Options):
    """The fields that a layer and a language model share.

    Parameters of a layer, T tokens, E experts, K experts per token, H and F hidden sizes:
    ``gate.weight`` ``[E, H]``; ``experts.gate_up_proj`` ``[E, 2F, H]``, gate rows first
    (``experts.up_proj`` ``[E, F, H]`` for gelu and relu), and ``experts.down_proj`` ``[E, H, F]``.

    Args:
        hidden_size: H.
        num_experts: E.
        num_experts_per_tok: K, experts per token (top_k); at most E.
        moe_intermediate_size: F, hidden size of an expert.
        expert_activation: With a gate: ``"swiglu"`` (``silu(g) u``), ``"geglu"`` (``gelu(g) u``),
            ``"clamped_swiglu"`` (``(u + 1) g sigmoid(swiglu_alpha g)`` of g clamped from above and u
            from both sides to ``swiglu_limit``, as in GPT-OSS); without: ``"gelu"``, ``"relu"``. Gelu is
            the exact one, by erf.
        expert_bias: Whether both products of the experts add biases, ``experts.gate_up_proj_bias``
            ``[E, 2F]`` (``experts.up_proj_bias`` ``[E, F]``) and ``experts.down_proj_bias`` ``[E, H]``.
        swiglu_limit, swiglu_alpha: Of ``"clamped_swiglu"``.
        shared_expert_intermediate_size: Hidden size of a SwiGLU expert that takes every token, added to
            the output; None: there is none. Its parameters are ``shared_experts.*`` (DeepSeek's name).
        shared_expert_gate: Whether the shared expert's output is multiplied by
            ``sigmoid(x shared_expert_gate.weight^T)``; its parameters are then ``shared_expert.*``
            (Qwen2-MoE's name).
        router_scores: ``"softmax_then_top_k"``: a softmax over all experts, then the K largest;
            ``"top_k_then_softmax"``: a softmax over the K chosen ones; ``"sigmoid"``: of each logit,
            then the K largest. Always in float32. Of equal scores the lower expert is chosen.
        norm_topk_prob: Whether the K weights are divided by their sum (sigmoid: plus 1e-20; without
            effect on ``"top_k_then_softmax"``, whose weights sum to 1).
        routed_scaling_factor: What the weights are multiplied by at last.
        router_selection_bias: Whether ``gate.e_score_correction_bias`` ``[E]`` is added to the scores to
            choose experts by. It never weighs, and has no gradient.
        router_bias_update_rate: What an update adds to that bias where an expert has fewer tokens than
            the mean of its layer, and takes where it has more (the aux-loss-free balancing of
            DeepSeek-V3): ``b -= rate sign(load - mean load)``; neither learning rate nor clipping matter.
        n_group, topk_group: Experts stand in ``n_group`` groups of neighbours, of which a token may use
            the ``topk_group`` with the largest group score; 1 and 1: no groups.
        group_score: ``"top2_sum"``: the sum of a group's two largest scores, the bias included
            (DeepSeek-V3); ``"max"``: the largest (DeepSeek-V2).
        noisy_top_k: Whether training adds ``noise softplus(x gate.noise.weight^T)`` to the logits
            (Shazeer et al. 2017), noise being the graph input ``router_noise`` ``[layers, T, E]``, which
            ``TrainingSession`` draws anew for each update. All losses see the noisy logits; the graphs
            ``eval`` and ``forward`` have no noise. With it, padding changes what is drawn for whom.
        router_noise_seed: Of that noise, with the number of the update; other seeds do not change it.
        router_weights_on: ``"combine"``: the combine weighs what experts give; ``"experts"``: experts
            weigh their hidden activations, and their last bias, and the combine only adds.
        dispatch: ``"init_routing"`` (MoeInitRoutingV2) or ``"routing_map"``
            (MoeTokenPermuteWithRoutingMap). In the mode ``"drop_pad"`` the latter fills free rows with
            other tokens at weight 0, as the operator defines it: if an expert makes infinity of one, the
            product with 0 is NaN. The former leaves free rows out.
        dispatch_mode: ``"dropless"``; ``"active"`` (init_routing only): of all rows, ordered by expert,
            the first ``active_num`` are kept; ``"drop_pad"``: every expert has exactly C rows. A token
            without a row at an expert gets nothing from it: 0, no renormalisation.
        active_num: Rows that are kept in the mode ``"active"``.
        expert_capacity: C of the mode ``"drop_pad"``; None: by ``capacity_factor``.
        capacity_factor, tokens_per_batch: ``C = ceil(capacity_factor tokens_per_batch K / E)``, at most
            ``tokens_per_batch``. A batch must have at least C tokens, padding included.
        token_drop_policy: Which tokens an expert keeps if more than C chose it: ``"probs"``, those of
            the largest weights (of equal ones the first), or ``"position"``, the first in the batch.
            Padding tokens take no capacity.
        router_aux_loss_coef: Weight of the load-balancing loss; 0 leaves it out.
        router_aux_loss: ``"pooled"``, over the tokens of all layers together, as transformers has
            it, ``"per_layer"``, the mean of each layer's own loss (for one layer they are equal),
            ``"sequence"``, of each sequence (DeepSeek-V3), or ``"global"``, whose counts include those
            of a batch's earlier parts (Megatron). Tokens count for the experts they chose, also where
            they are dropped. Formulas stand in ``losses.py``.
        router_z_loss_coef: Weight of the router z-loss; 0 leaves it out.
        unroll_experts: Up to how many experts get nodes of their own; above, one MoeGroupedMatmul
            per product, so that the number of nodes does not grow with the experts. None: 16 in a graph for
            function bodies, 0 in one for native kernels. Parameters and numbers do not depend on it.
        initializer_range: Standard deviation of the initial weights.
        dtype: What matrix products, dispatch and combine compute in: ``"float32"``, ``"bfloat16"`` or
            ``"float16"``, as ``precision.py`` says. Parameters, and all that graphs take and give, are
            float32 in any case. ``"float16"`` trains with a loss scale.

    Raises:
        ConfigError: If a value is illegal, naming field, value and rule.
    """

    hidden_size: int = 64
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    expert_activation: str = "swiglu"
    expert_bias: bool = False
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    router_scores: str = "softmax_then_top_k"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    router_selection_bias: bool = False
    router_bias_update_rate: float = 0.0
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "top2_sum"
    noisy_top_k: bool = False
    router_noise_seed: int = 0
    router_weights_on: str = "combine"
    dispatch: str = "init_routing"
    dispatch_mode: str = "dropless"
    active_num: int = 0
    expert_capacity: int | None = None
    capacity_factor: float | None = None
    tokens_per_batch: int | None = None
    token_drop_policy: str = "probs"
    router_aux_loss_coef: float = 0.01
    router_aux_loss: str = "pooled"
    router_z_loss_coef: float = 0.0
    unroll_experts: int | None = None
    initializer_range: float = 0.02
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Check every field on its own, then what goes together."""
        self.check_int("hidden_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
        self.check_int("n_group", "topk_group")
        self.check_int("active_num", "router_noise_seed", low=0)
        if self.unroll_experts is not None:
            self.check_int("unroll_experts", low=0)
        for name in ("shared_expert_intermediate_size", "expert_capacity", "tokens_per_batch"):
            if getattr(self, name) is not None:
                self.check_int(name)
        self.check_choice("expert_activation", EXPERT_ACTIVATIONS)
        self.check_choice("dtype", DTYPES)
        self.check_choice("router_scores", ROUTER_SCORES)
        self.check_choice("group_score", GROUP_SCORES)
        self.check_choice("router_weights_on", WEIGHT_PLACES)
        self.check_choice("dispatch", DISPATCHES)
        self.check_choice("dispatch_mode", DISPATCH_MODES)
        self.check_choice("token_drop_policy", DROP_POLICIES)
        self.check_choice("router_aux_loss", AUX_LOSSES)
        self.check_bool("norm_topk_prob", "router_selection_bias", "noisy_top_k")
        self.check_bool("expert_bias", "shared_expert_gate")
        self.check_float("router_aux_loss_coef", "router_z_loss_coef", "initializer_range")
        self.check_float("router_bias_update_rate")
        self.check_float("routed_scaling_factor", "swiglu_limit", "swiglu_alpha", above=True)
        if self.capacity_factor is not None:
            self.check_float("capacity_factor", above=True)
        self._check_router()
        self._check_dispatch()

    def _check_router(self) -> None:
        experts, top_k = self.num_experts, self.num_experts_per_tok
        if top_k > experts:
            raise self.refuse("num_experts_per_tok", f"at most num_experts ({experts})")
        if top_k > MAX_TOP_K:
            raise self.refuse(
                "num_experts_per_tok", f"at most {MAX_TOP_K} (MoeTokenUnpermuteWithRoutingMapGrad)"
            )
        if experts % self.n_group:
            raise self.refuse("n_group", f"a divisor of num_experts ({experts})")
        if self.topk_group > self.n_group:
            raise self.refuse("topk_group", f"at most n_group ({self.n_group})")
        if (reach := self.topk_group * experts // self.n_group) < top_k:
            raise self.refuse(
                "topk_group",
                f"so large that its groups hold num_experts_per_tok ({top_k}) experts, not {reach}",
            )
        if self.router_bias_update_rate and not self.router_selection_bias:
            raise self.refuse("router_bias_update_rate", "0 without router_selection_bias")
        if self.shared_expert_gate and self.shared_expert_intermediate_size is None:
            raise self.refuse("shared_expert_gate", "False without shared_expert_intermediate_size")

    def _check_dispatch(self) -> None:
        mode = self.dispatch_mode
        if mode == "active" and self.dispatch != "init_routing":
            raise self.refuse("dispatch", "'init_routing' with dispatch_mode 'active'")
        if (mode == "active") != (self.active_num > 0):
            raise self.refuse(
                "active_num", f"{'> 0' if mode == 'active' else '0'} with dispatch_mode '{mode}'"
            )
        if self.active_num > MAX_ROWS:
            raise self.refuse("active_num", "below 2^31, as int32 names rows")
        if mode != "drop_pad":
            for name in ("expert_capacity", "capacity_factor", "tokens_per_batch"):
                if getattr(self, name) is not None:
                    raise self.refuse(name, f"None with dispatch_mode '{mode}'", "Or take 'drop_pad'.")
            return
        if self.expert_capacity is None and self.capacity_factor is None:
            raise self.refuse("expert_capacity", "given with dispatch_mode 'drop_pad'", "Or capacity_factor.")
        if self.expert_capacity is not None and self.capacity_factor is not None:
            raise self.refuse("expert_capacity", "None beside capacity_factor")
        if self.capacity_factor is not None and self.tokens_per_batch is None:
            raise self.refuse("tokens_per_batch", "given with capacity_factor, which is a share of it")
        if self.tokens_per_batch is not None and self.capacity > self.tokens_per_batch:
            raise self.refuse("expert_capacity", f"at most tokens_per_batch ({self.tokens_per_batch})")
        if self.num_experts * self.capacity > MAX_ROWS:
            name = "expert_capacity" if self.expert_capacity is not None else "capacity_factor"
            raise self.refuse(name, "so small that num_experts * C is below 2^31, as int32 names rows")

    @property
    def capacity(self) -> int:
        """Rows of each expert, C; 0 where the dispatch is not ``"drop_pad"``."""
        if self.dispatch_mode != "drop_pad":
            return 0
        if self.expert_capacity is not None:
            return self.expert_capacity
        assert self.capacity_factor is not None and self.tokens_per_batch is not None
        # As written: 1.1 of 10 rows are 11, and the next float above 1.1 would make 12 of them.
        factor = Fraction(str(self.capacity_factor))
        share = factor * self.tokens_per_batch * self.num_experts_per_tok / self.num_experts
        return min(math.ceil(share), self.tokens_per_batch)

    def unrolls(self, optimize_for: str = "body") -> bool:
        """Whether each expert gets nodes of its own in a graph of this form."""
        limit = FORMS[optimize_for] if self.unroll_experts is None else self.unroll_experts
        return self.num_experts <= limit

    @property
    def is_gated(self) -> bool:
        """Whether an expert's first product gives a gate beside what it gates."""
        return self.expert_activation in GATED

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data, with its kind under ``"kind"``; what the manifest holds."""
        return {"kind": type(self).__name__, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The config that ``to_dict`` gave.

        Raises:
            ConfigError: If a field is unknown or its value illegal.
        """
        values: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in data.items() if n != "kind"
        }
        return cls(**values)
