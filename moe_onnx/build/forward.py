"""Forward graphs of the models a config can say: logits or outputs, losses and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from moe_onnx.autodiff.emitter import Emitter, shaped
from moe_onnx.build.config import MoeLayerConfig, MoeLMConfig
from moe_onnx.build.layers import Parameters, attention, dense_mlp, linear, positions, rms_norm
from moe_onnx.build.losses import (
    cross_entropy,
    load_balancing_loss,
    mean_squared_error,
    nan_logits,
    router_z_loss,
    weighted_sum,
)
from moe_onnx.build.moe import moe_layer
from moe_onnx.build.precision import half_of, wide
from moe_onnx.build.router import Routing, real_choices, tokens_per_expert

Dims = tuple[int | str, ...]
# Batch inputs that a training session fills in where they are not given.
LOAD_BEFORE, ROUTER_NOISE = "expert_load_before", "router_noise"


@dataclass
class Forward:
    """A forward graph: ``output`` is the logits of a language model or the output of a layer."""

    output: ir.Value
    output_name: str
    output_shape: Dims
    loss: ir.Value | None = None
    metrics: dict[str, tuple[ir.Value, str, Dims]] = field(default_factory=dict)  # value, dtype, shape
    loads: list[ir.Value] = field(default_factory=list)  # of each layer with experts, int64 [E]


def batch_inputs(
    config: MoeLayerConfig | MoeLMConfig, *, losses: bool, training: bool
) -> dict[str, tuple[str, Dims]]:
    """Names, dtypes and shapes of a batch; without losses there are no labels or targets."""
    if isinstance(config, MoeLayerConfig):
        names = ["hidden_states", *(["target"] if losses else [])]
        inputs: dict[str, tuple[str, Dims]] = dict.fromkeys(
            names, ("float32", ("tokens", config.hidden_size))
        )
    else:
        names = ["input_ids", *(["labels"] if losses else []), "attention_mask"]
        inputs = dict.fromkeys(names, ("int64", ("batch", "sequence")))
    layers = moe_layers(config)
    if layers and losses and config.router_aux_loss == "global" and config.router_aux_loss_coef:
        inputs[LOAD_BEFORE] = ("int64", (layers, config.num_experts))
    if layers and training and config.noisy_top_k:
        inputs[ROUTER_NOISE] = ("float32", (layers, "tokens", config.num_experts))
    return inputs


def moe_layers(config: MoeLayerConfig | MoeLMConfig) -> int:
    """How many layers of a model have experts."""
    if isinstance(config, MoeLayerConfig):
        return 1
    return sum(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))


def forward(
    e: Emitter,
    config: MoeLayerConfig | MoeLMConfig,
    batch: dict[str, ir.Value],
    params: Parameters,
    *,
    losses: bool,
    fused: bool = False,
) -> Forward:
    """Emit the forward graph of a model; ``fused``: with the experts' activation as one operator."""
    if isinstance(config, MoeLayerConfig):
        return _layer(e, config, batch, params, losses, fused)
    return _language_model(e, config, batch, params, losses, fused)


def _layer(
    e: Emitter,
    config: MoeLayerConfig,
    batch: dict[str, ir.Value],
    params: Parameters,
    losses: bool,
    fused: bool,
) -> Forward:
    noise = _noise(e, batch, 0)
    output, routing = moe_layer(e, batch["hidden_states"], params, "", None, noise, config, fused)
    done = Forward(output, "output", ("tokens", config.hidden_size))
    if losses:
        with e.scope("loss"):
            error = mean_squared_error(e, output, batch["target"])
            count = e.op("Squeeze", e.op("Shape", batch["hidden_states"], end=1))
            _total(e, done, config, ("mse_loss", error), [routing], None, count, batch)
    return done


def _noise(e: Emitter, batch: dict[str, ir.Value], layer: int) -> ir.Value | None:
    """The noise of one MoE layer, where the graph has any."""
    if ROUTER_NOISE not in batch:
        return None
    return e.op("Gather", batch[ROUTER_NOISE], e.constant(layer), axis=0)


def _language_model(
    e: Emitter,
    config: MoeLMConfig,
    batch: dict[str, ir.Value],
    params: Parameters,
    losses: bool,
    fused: bool,
) -> Forward:
    ids, attention_mask, half = batch["input_ids"], batch["attention_mask"], half_of(config)
    where = positions(e, ids, attention_mask, config)
    flat_mask = e.op("Reshape", e.op("Cast", attention_mask, to=ir.DataType.BOOL), e.constant([-1, 1]))
    mask = shaped(flat_mask, "tokens", 1)
    flat_ids = shaped(e.op("Reshape", ids, e.constant([-1])), "tokens")
    embedding = params["model.embed_tokens.weight"]
    x = shaped(e.op("Gather", embedding, flat_ids, name="model.embed_tokens"), "tokens", config.hidden_size)
    routings: list[Routing] = []
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        with e.scope(prefix.rstrip(".")):
            with e.scope("self_attn"):
                normed = _norm(e, x, params, f"{prefix}input_layernorm", config)
                mixed = attention(e, normed, params, f"{prefix}self_attn.", config, where)
            x = e.op("Add", x, mixed)
            with e.scope("mlp"):
                normed = _norm(e, x, params, f"{prefix}post_attention_layernorm", config)
                if config.is_moe_layer(layer):
                    noise = _noise(e, batch, len(routings))
                    y, routing = moe_layer(e, normed, params, f"{prefix}mlp.", mask, noise, config, fused)
                    routings.append(routing)
                else:
                    y = dense_mlp(e, normed, params, f"{prefix}mlp.", half)
            x = e.op("Add", x, y)
    x = _norm(e, x, params, "model.norm", config)
    head = embedding if config.tie_word_embeddings else params["lm_head.weight"]
    logits = wide(e, linear(e, x, head, half=half))
    shape: Dims = ("batch", "sequence", config.vocab_size)
    if not losses:
        full = e.op("Concat", where.batch, where.sequence, e.constant([config.vocab_size]), axis=0)
        return Forward(e.op("Reshape", logits, full, allowzero=1), "logits", shape)
    done = Forward(logits, "logits", shape)
    with e.scope("loss"):
        loss, count = cross_entropy(e, logits, batch["labels"], attention_mask, config.ignore_index)
        real = e.op("ReduceSum", e.op("Cast", mask, to=ir.DataType.INT64), keepdims=0)
        shape_of_sequences = None
        if config.router_aux_loss == "sequence":
            sizes = (where.batch, where.sequence, e.constant([config.num_experts]))
            shape_of_sequences = e.op("Concat", *sizes, axis=0)
        _total(e, done, config, ("lm_loss", loss), routings, mask, real, batch, shape_of_sequences)
        done.metrics["num_tokens"] = (count, "int64", ())
    return done


def _norm(e: Emitter, x: ir.Value, params: Parameters, name: str, config: MoeLMConfig) -> ir.Value:
    with e.scope(name.rsplit(".", 1)[-1]):
        return rms_norm(e, x, params[f"{name}.weight"], config.hidden_size, config.rms_norm_eps)


def _total(
    e: Emitter,
    done: Forward,
    config: MoeLayerConfig | MoeLMConfig,
    main: tuple[str, ir.Value],
    routings: list[Routing],
    mask: ir.Value | None,
    num_tokens: ir.Value,
    batch: dict[str, ir.Value],
    sequences: ir.Value | None = None,
) -> None:
    """The weighted sum of all losses, and the metrics."""
    terms = [(1.0, main[1])]
    metrics = {main[0]: main[1]}
    loads = done.loads = [tokens_per_expert(e, real_choices(e, routing, mask)) for routing in routings]
    if routings and config.router_aux_loss_coef:
        aux = load_balancing_loss(
            e,
            routings,
            loads,
            mask,
            num_tokens,
            config,
            sequences=sequences,
            loads_before=batch.get(LOAD_BEFORE),
        )
        metrics["aux_loss"] = aux
        terms.append((config.router_aux_loss_coef, aux))
    if routings and config.router_z_loss_coef:
        metrics["z_loss"] = router_z_loss(e, routings, mask, num_tokens)
        terms.append((config.router_z_loss_coef, metrics["z_loss"]))
    done.loss = weighted_sum(e, terms)
    done.metrics = {"loss": (done.loss, "float32", ())}
    done.metrics.update((name, (value, "float32", ())) for name, value in metrics.items())
    if routings:
        rows = [e.op("Unsqueeze", load, e.constant([0])) for load in loads]
        load = rows[0] if len(rows) == 1 else e.op("Concat", *rows, axis=0)
        done.metrics["expert_load"] = (load, "int64", (len(rows), config.num_experts))
    dropped = [routing.dropped for routing in routings if routing.dropped is not None]
    if dropped:
        done.metrics["dropped"] = (e.op("Concat", *dropped, axis=0), "int64", (len(dropped),))
        done.metrics["nan_router_logits"] = (nan_logits(e, routings, mask), "int64", ())
