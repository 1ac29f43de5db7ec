"""Checkpoints that transformers writes, trained here and there: how far the two are apart.

    python benchmarks/huggingface_parity.py            # the table of the README

Tiny models with random weights, in float32, one thread. Each figure is the largest difference of a tensor,
relative to the largest value of transformers' tensor, and of those the worst of all batches: other sizes and
lengths, padding at the ends and at the beginnings, fewer tokens than experts. A gradient that transformers
has at 0 but for rounding is compared absolutely. "PyTorch's own" is what float32 does to PyTorch itself: its
parameters after the same steps against those of a model in float64.

AdamW makes steps of full length of gradients that are nothing but rounding, unless its eps is above them: so
parameters are compared with an eps of 1e-5, and with the usual 1e-8 but for elements whose gradient in some
step is not 0 and at most 1e-5 of the largest of its tensor, which is as far as gradients may be apart.
"beyond" says how many of all are further apart than 1e-5, all of them such elements, and how far the worst.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import moe_onnx

Arrays = dict[str, np.ndarray[Any, Any]]
ZERO = 1e-6  # the largest gradient that is 0 but for rounding, of models whose others are around 1
OPTIMIZER = moe_onnx.AdamW(weight_decay=0.1, eps=1e-5, max_grad_norm=1.0)
USUAL = replace(OPTIMIZER, eps=1e-8)
LR, STEPS = 1e-3, 3
FIGURES = ("logits", "loss", "aux_loss", "gradients", "parameters", "usual_eps")
LIMIT = 1e-5  # of every figure

_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.1,
}
_MIXTRAL = {**_SMALL, "intermediate_size": 24, "num_local_experts": 6}
_QWEN = {**_SMALL, "intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 6}
_QWEN2 = {**_QWEN, "shared_expert_intermediate_size": 28}
_QWEN3 = {**_QWEN, "head_dim": 10, "norm_topk_prob": True, "num_experts_per_tok": 3}
_OLMOE = {**_SMALL, "intermediate_size": 24, "num_experts": 6, "pad_token_id": None, "eos_token_id": 1}

# Name: class of transformers, options of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", _MIXTRAL),
    "mixtral-window-tied": ("Mixtral", {**_MIXTRAL, "sliding_window": 4, "tie_word_embeddings": True}),
    "mixtral-top1-head_dim": ("Mixtral", {**_MIXTRAL, "num_experts_per_tok": 1, "head_dim": 12}),
    "qwen2_moe": ("Qwen2Moe", _QWEN2),
    "qwen2_moe-dense-norm": ("Qwen2Moe", {**_QWEN2, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen2_moe-no-bias": ("Qwen2Moe", {**_QWEN2, "qkv_bias": False, "num_key_value_heads": 4}),
    "qwen3_moe": ("Qwen3Moe", _QWEN3),
    "qwen3_moe-20-experts": ("Qwen3Moe", {**_QWEN3, "num_experts": 20, "num_experts_per_tok": 4}),
    "qwen3_moe-sparse-bias": ("Qwen3Moe", {**_QWEN3, "decoder_sparse_step": 2, "attention_bias": True}),
    "olmoe": ("Olmoe", _OLMOE),
    "olmoe-clip-norm": ("Olmoe", {**_OLMOE, "clip_qkv": 0.8, "norm_topk_prob": True}),
}
# Batch size, length, padding.
BATCHES = [(2, 8, ""), (1, 2, ""), (5, 3, ""), (3, 17, "right"), (4, 9, "left"), (1, 40, "")]


def model_of(name: str, seed: int = 0, **more: Any) -> Any:
    """A model of transformers with random weights in which every part matters."""
    kind, options = MODELS[name]
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    config = getattr(transformers, f"{kind}Config")(
        **{**options, **theta, **more}, attn_implementation="eager", experts_implementation="eager"
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            value = torch.randn(parameter.shape, generator=generator)
            if key.endswith("norm.weight"):
                value = 1 + 0.2 * value
            elif key.endswith("bias"):
                value = 0.3 * value
            elif not key.endswith("embed_tokens.weight"):
                value = value / parameter.shape[-1] ** 0.5
            parameter.copy_(value)
    return model.train()


def load(folder: Path, **options: Any) -> Any:
    """A checkpoint as transformers loads it, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        **options,
    )
    return model.train()


def batch_of(config: moe_onnx.MoeLMConfig, size: int, length: int, padding: str, seed: int = 0) -> Arrays:
    """Token ids, labels and mask. Labels at padding are -100, as transformers looks at no mask for them."""
    rng = np.random.default_rng([seed, size, length])
    ids = rng.integers(0, config.vocab_size, (size, length))
    mask = np.ones_like(ids)
    if padding:
        lengths = rng.integers(2, length, size)
        lengths[0] = length
        mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
        if padding == "left":
            mask = mask[:, ::-1].copy()
    # Transformers predicts the first token after padding from the padding; here it is predicted from nothing.
    predicted = mask * np.pad(mask[:, :-1], ((0, 0), (1, 0)))
    labels = np.where((predicted == 1) & (rng.random(ids.shape) > 0.1), ids, -100)
    labels[0, length - 1] = ids[0, length - 1]  # one at least
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def theirs(model: Any, batch: Arrays) -> tuple[Any, Arrays]:
    """What transformers gives for a batch, and the gradients of its loss with aux loss."""
    model.zero_grad()
    out = model(**{name: torch.from_numpy(v) for name, v in batch.items()}, output_router_logits=True)
    out.loss.backward()
    return out, {
        name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy().copy()
        for name, p in model.named_parameters()
    }


def apart(got: Any, want: Any, zero: float = 0.0) -> float:
    """The largest difference, relative to the largest value wanted; absolutely where that is <= ``zero``."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    largest = np.abs(want).max(initial=0.0)
    gap = float(np.abs(got - want).max(initial=0.0))
    return gap if largest <= zero else gap / largest


def parameters_of(model: Any) -> Arrays:
    """Copies of the parameters of a model of transformers."""
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def train_theirs(model: Any, batches: list[Arrays], optimizer: moe_onnx.AdamW = OPTIMIZER) -> Arrays:
    """Steps of AdamW as PyTorch has it; where a gradient was within rounding of 0, but not 0."""
    groups = []
    for decays in (True, False):
        chosen = [p for name, p in model.named_parameters() if optimizer.decays(name) == decays]
        groups.append({"params": chosen, "weight_decay": optimizer.weight_decay if decays else 0.0})
    betas = (optimizer.beta1, optimizer.beta2)
    stepper = torch.optim.AdamW(groups, lr=LR, betas=betas, eps=optimizer.eps)
    rounding: Arrays = {name: np.zeros(p.shape, bool) for name, p in model.named_parameters()}
    for batch in batches:
        for name, gradient in theirs(model, batch)[1].items():
            size = np.abs(gradient)
            rounding[name] |= (size > 0) & (size <= LIMIT * size.max())
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
        stepper.step()
    return rounding


def measure(folder: Path, batches: list[tuple[int, int, str]] | None = None) -> dict[str, float]:
    """How far a checkpoint's graphs are from transformers, worst of all batches and tensors.

    Args:
        folder: A checkpoint that transformers wrote.
        batches: Size, length and padding of each.

    Returns:
        ``logits``, ``loss``, ``aux_loss``, ``gradients``, ``parameters`` (after three steps), ``usual_eps``
        (those with an eps of 1e-8, but for elements whose gradient is within rounding of 0), ``beyond``: how
        many of all their ``elements`` are further apart than 1e-5, and the ``farthest``; ``idle``: how many
        experts had no token, over all layers and batches.
    """
    pretrained = moe_onnx.from_pretrained(folder)
    graph = pretrained.training_graph(assembly="grad+forward", optimizer=OPTIMIZER)
    model = load(folder)
    first = moe_onnx.TrainingSession(graph, lr=LR, kernels="body")
    values = first.parameters()
    gradient = moe_onnx.InferenceSession(graph.models["grad"], kernels="body")
    worst = dict.fromkeys(FIGURES, 0.0)
    idle = beyond = elements = 0
    farthest = 0.0

    def seen(name: str, value: float) -> None:
        worst[name] = max(worst[name], value)

    for size, length, padding in BATCHES if batches is None else batches:
        batch = batch_of(pretrained.config, size, length, padding)
        out, wanted = theirs(model, batch)
        real = batch["attention_mask"] == 1
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = first.forward(inputs)["logits"]
        seen("logits", apart(logits[real], out.logits.detach().numpy()[real]))
        names = [output.name for output in gradient.get_outputs()]
        ours = dict(zip(names, gradient.run(names, {**batch, **values}), strict=True))
        seen("loss", apart(ours["loss"], out.loss.item()))
        seen("aux_loss", apart(ours["aux_loss"], out.aux_loss.item()))
        idle += int((ours["expert_load"] == 0).sum())
        assert {f"{name}.grad" for name in wanted} == {name for name in names if name.endswith(".grad")}
        for name, want in wanted.items():
            seen("gradients", apart(ours[f"{name}.grad"], want, ZERO))
    runs = [batch_of(pretrained.config, *shape, seed=1 + i) for i, shape in enumerate(BATCHES[:STEPS])]
    for column, optimizer in (("parameters", OPTIMIZER), ("usual_eps", USUAL)):
        graph = pretrained.training_graph(assembly="grad+apply", optimizer=optimizer)
        session, model = moe_onnx.TrainingSession(graph, lr=LR, kernels="body"), load(folder)
        for batch in runs:
            session.step(batch)
        rounding = train_theirs(model, runs, optimizer)
        trained: Mapping[str, Any] = parameters_of(model)
        for name, value in session.parameters().items():
            if column == "usual_eps":
                gap = np.abs(np.asarray(value, np.float64) - trained[name])
                beyond += int((gap > LIMIT * np.abs(trained[name]).max()).sum())
                farthest = max(farthest, apart(value, trained[name]))
                elements += value.size
                value = np.where(rounding[name], trained[name], value)
            seen(column, apart(value, trained[name]))
    return {**worst, "idle": idle, "beyond": beyond, "elements": elements, "farthest": farthest}


def own_rounding(model: Any) -> float:
    """How far a model in float32 is from the same one in float64 after the steps of :func:`measure`."""
    config, double = moe_onnx.MoeLMConfig(vocab_size=model.config.vocab_size), copy.deepcopy(model).double()
    runs = [batch_of(config, *shape, seed=1 + i) for i, shape in enumerate(BATCHES[:STEPS])]
    for one in (model, double):
        train_theirs(one, runs)
    exact = parameters_of(double)
    return max(apart(value, exact[name]) for name, value in parameters_of(model).items())


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    heads = (
        "logits",
        "loss",
        "aux loss",
        "gradients",
        "parameters, 3 steps",
        "PyTorch's own",
        "with eps 1e-8",
    )
    print(f"| checkpoint | {' | '.join(heads)} | beyond |")
    print("|---" * (len(heads) + 2) + "|")
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            model_of(name).save_pretrained(folder, max_shard_size="40KB")
            found = measure(Path(folder))
        figures = [
            *(found[column] for column in FIGURES[:-1]),
            own_rounding(model_of(name)),
            found["usual_eps"],
        ]
        beyond = f"{found['beyond']} of {found['elements']:,}, {found['farthest']:.1e}"
        print(f"| `{name}` | " + " | ".join(f"{figure:.1e}" for figure in figures) + f" | {beyond} |")


if __name__ == "__main__":
    main()
