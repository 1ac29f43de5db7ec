"""What can be built: ``MoeLayerConfig`` (one layer) and ``MoeLMConfig`` (a decoder language model).

What both share, the MoE layer itself, is said in ``moe_options``. Fields have the names of Hugging Face
configs where those have the thing; every other name is the field's standard term. Values are checked
when a config is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_onnx.build.moe_options import MoeOptions

QK_NORMS = ("none", "head", "full")


@dataclass(frozen=True)
class MoeLayerConfig(MoeOptions):
    """One MoE layer, trained on the mean squared error of its output.

    Graph inputs ``hidden_states`` and ``target``, float ``[tokens, hidden_size]``; graphs with gradients
    also give ``hidden_states.grad``. Parameters have the names of :class:`MoeOptions`.

    Args: those of :class:`MoeOptions`.

    Raises:
        ConfigError: If a value is illegal, naming field, value and rule.
    """

    def __post_init__(self) -> None:
        """Check what a layer alone cannot have, too."""
        super().__post_init__()
        if self.router_aux_loss == "sequence" and self.router_aux_loss_coef:
            raise self.refuse("router_aux_loss", "another than 'sequence', as tokens of a layer have none")


@dataclass(frozen=True)
class MoeLMConfig(MoeOptions):
    """A decoder-only MoE language model; its fields can say Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

    Graph inputs ``input_ids``, ``labels`` and ``attention_mask``, int64 ``[batch, sequence]``.
    Parameters carry the names they have in transformers (5.x).

    Args: those of :class:`MoeOptions`, and

        vocab_size: V; token ids are in ``[0, V)``.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads, a divisor of the query heads; None: as many.
        head_dim: Size of a head, even; None: ``hidden_size / num_attention_heads``.
        intermediate_size: Hidden size of the dense layers' MLP (SwiGLU).
        decoder_sparse_step: Layer i has experts iff ``(i + 1) % decoder_sparse_step == 0``.
        mlp_only_layers: Layers that have a dense MLP in any case.
        rms_norm_eps: Added to the mean square in RMSNorm.
        rope_theta: Base of the rotary embedding.
        attention_bias: Whether the attention projections have biases (o_proj too, as in transformers).
        qkv_bias: Whether those of queries, keys and values have biases, and o_proj has none (Qwen2-MoE).
        qk_norm: ``"none"``, ``"head"`` (RMSNorm of each head, Qwen3) or ``"full"`` (of the whole
            projection, OLMoE).
        clip_qkv: Queries, keys and values are clipped to ``[-clip_qkv, clip_qkv]``, after the norm and
            before the rotation; None: not.
        sliding_window: A query sees the last so many positions, itself among them; None: all.
        tie_word_embeddings: Whether the output projection is the embedding.
        ignore_index: Labels of this value are left out of the loss.

    Raises:
        ConfigError: If a value is illegal, naming field, value and rule.
    """

    vocab_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 128
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    attention_bias: bool = False
    qkv_bias: bool = False
    qk_norm: str = "none"
    clip_qkv: float | None = None
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    ignore_index: int = -100

    def __post_init__(self) -> None:
        """Check every field on its own, then what goes together."""
        super().__post_init__()
        self.check_int("vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        self.check_int("decoder_sparse_step")
        for name in ("num_key_value_heads", "head_dim", "sliding_window"):
            if getattr(self, name) is not None:
                self.check_int(name)
        if self.num_attention_heads % self.kv_heads:
            raise self.refuse(
                "num_key_value_heads", f"a divisor of num_attention_heads ({self.num_attention_heads})"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise self.refuse(
                "num_attention_heads", f"a divisor of hidden_size ({self.hidden_size})", "Or give head_dim."
            )
        if self.head_size % 2:
            raise self.refuse("head_dim", f"even (rotary embedding turns pairs); a head has {self.head_size}")
        self.check_float("rms_norm_eps", "rope_theta", above=True)
        if self.clip_qkv is not None:
            self.check_float("clip_qkv", above=True)
        self.check_bool("attention_bias", "qkv_bias", "tie_word_embeddings")
        if self.attention_bias and self.qkv_bias:
            raise self.refuse("qkv_bias", "False with attention_bias, which o_proj has a bias by, too")
        self.check_choice("qk_norm", QK_NORMS)
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise self.refuse("ignore_index", "an integer")
        if 0 <= self.ignore_index < self.vocab_size:
            raise self.refuse("ignore_index", f"no token id, outside [0, {self.vocab_size})")
        object.__setattr__(self, "mlp_only_layers", tuple(self.mlp_only_layers))
        for layer in self.mlp_only_layers:
            if (
                isinstance(layer, bool)
                or not isinstance(layer, int)
                or not 0 <= layer < self.num_hidden_layers
            ):
                raise self.refuse("mlp_only_layers", f"layer numbers in [0, {self.num_hidden_layers})")

    @property
    def kv_heads(self) -> int:
        """Key and value heads, also where the config leaves them out."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Size of a head, also where the config leaves it out."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by, ``1 / sqrt(head_size)``."""
        return 1 / math.sqrt(self.head_size)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has experts (True) or one dense MLP (False)."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
