"""Batches without tokens, and batches of which a few experts take all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moe_onnx.build.imported import ImportedModel
from moe_onnx.build.manifest import Manifest
from moe_onnx.validation.findings import Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.run.agreement import is_float
from moe_onnx.validation.run.feeds import Feeds, fewest_tokens
from moe_onnx.validation.run.messages import said
from moe_onnx.validation.run.runs import draw, listed, outputs_of, runs_of
from moe_onnx.validation.run.sessions import ERRORS, Outputs
from moe_onnx.validation.subject import Subject

IMPORTED = ImportedModel.__name__
NO_TOKENS = code(
    "MO851",
    "error",
    "A batch without tokens has no defined result",
    why="The last batch of an epoch, a batch that is all padding, a device that got no tokens: the loss over "
    "nothing is 0 and so are all gradients. Means over nothing (0/0) make it NaN, which ruins all "
    "parameters, and reductions over empty axes are refused by some runtimes.",
    mend="Divide by at least 1, and take the maximum of a reduction over what may be empty with a bound.",
)
ALL_TO_A_FEW = code(
    "MO852",
    "error",
    "A batch of equal tokens, which go to the same experts, goes wrong",
    why="Tokens that are all alike choose the same experts, and all others get none. Capacity, padding and "
    "empty products go wrong then first: experts without tokens must get exactly 0 for a gradient, and "
    "nothing may become NaN.",
    mend="Look at what the layer does with experts that have no rows, and with more rows than it has room.",
)


@check("run", NO_TOKENS)
def no_tokens(subject: Subject) -> Iterator[Outcome]:
    """A batch without tokens, and one that is all padding: loss and gradients are 0."""
    runs = runs_of(subject)
    manifest = runs.manifest
    if runs.why_not or manifest is None:
        yield Skipped(runs.why_not or "what a batch without tokens means is not known of other models")
        return
    cases: dict[str, Feeds] = {}
    base = runs.feeds.sizes
    if runs.fixed:
        yield Skipped("a batch of 0 tokens, as the graph takes no other sizes")
    elif not fewest_tokens(manifest):
        for axis in ("batch", "sequence", "tokens"):
            if axis in base and not (axis == "tokens" and "batch" in base):
                empty = {n: 0 if n in (axis, "tokens") else size for n, size in base.items()}
                if not isinstance(feeds := draw(subject, empty), Skipped):
                    cases[f"a batch with {axis} 0"] = feeds
    else:
        yield Skipped(f"a batch of 0 tokens, as the graph wants at least {fewest_tokens(manifest)}")
    if "attention_mask" in runs.feeds.values:
        padding = np.zeros_like(runs.feeds.values["attention_mask"])
        cases["a batch that is all padding"] = _with(runs.feeds, attention_mask=padding)
    for where, feeds in cases.items():
        try:
            outputs = runs.first.run(feeds.values)
        except ERRORS as error:
            if manifest.config.get("kind") == IMPORTED:  # models from elsewhere may want tokens
                yield Skipped(f"{where}, which this imported model does not run with: {said(error)}")
            else:
                yield NO_TOKENS(where, found=said(error), expected="loss and gradients of 0")
            continue
        bad = _not_finite(outputs)
        zero = [p.gradient for p in manifest.parameters if p.trained] if "0" in where else []
        bad += [n for n in ("loss", *zero) if n in outputs and n not in bad and np.any(outputs[n])]
        if bad:
            value = outputs[bad[0]].reshape(-1)
            worst = value[np.argmax(np.abs(np.nan_to_num(value, nan=np.inf)))] if value.size else 0
            yield NO_TOKENS(where, found=f"{listed(bad)}: {worst}", expected="0", places=outputs_of(bad))


@check("run", ALL_TO_A_FEW)
def equal_tokens(subject: Subject) -> Iterator[Outcome]:
    """A batch of equal tokens, so that one set of experts takes all: others get gradients of 0."""
    runs = runs_of(subject)
    manifest = runs.manifest
    names = ("input_ids", "hidden_states")
    given = next((name for name in names if name in runs.feeds.values), "")
    if runs.why_not or manifest is None or not given:
        yield Skipped(
            runs.why_not or "only training graphs of this package with a batch are known well enough"
        )
        return
    value = runs.feeds.values[given]
    if value.ndim != 2 or not value.size:
        yield Skipped(f"input {given!r} is of another shape than a batch")
        return
    alike = {given: np.broadcast_to(value[:1, :1] if given == "input_ids" else value[:1], value.shape)}
    if "attention_mask" in runs.feeds.values:
        alike["attention_mask"] = np.ones_like(runs.feeds.values["attention_mask"])
    if "router_noise" in runs.feeds.values:
        alike["router_noise"] = np.zeros_like(runs.feeds.values["router_noise"])
    try:
        outputs = runs.first.run(_with(runs.feeds, **alike).values)
    except ERRORS as error:
        yield ALL_TO_A_FEW("a batch of equal tokens", found=said(error))
        return
    if bad := _not_finite(outputs):
        yield ALL_TO_A_FEW(
            "a batch of equal tokens",
            found=f"{listed(bad)} not finite",
            expected="finite values",
            places=outputs_of(bad),
        )
        return
    yield from _gradients_of_idle_experts(manifest, outputs)


def _gradients_of_idle_experts(manifest: Manifest, outputs: Outputs) -> Iterator[Outcome]:
    """Parameters ``[E, ...]`` of a layer: rows of experts that no token chose."""
    loads = outputs.get("expert_load")
    stacked: dict[str, list[str]] = {}  # by layer, in the layers' order
    for parameter in manifest.parameters:
        layer, found, _ = parameter.name.rpartition("experts.")
        if found and parameter.trained and not layer.endswith("shared_"):
            stacked.setdefault(layer, []).append(parameter.gradient)
    if loads is None or loads.ndim != 2 or len(loads) != len(stacked):
        return
    for load, (layer, gradients) in zip(loads, stacked.items(), strict=True):
        for name in gradients:
            gradient = outputs.get(name)
            if gradient is None or gradient.shape[:1] != load.shape:
                continue
            whose = layer.rstrip(".") or "the layer"
            idle = [e for e in range(len(load)) if not load[e] and np.any(gradient[e])]
            if idle:
                yield ALL_TO_A_FEW(
                    f"output {name!r}",
                    found=f"experts {idle[:5]} of {whose} have no tokens, but a gradient",
                    expected="exactly 0",
                )
                return


def _with(feeds: Feeds, **values: np.ndarray) -> Feeds:
    changed = {name: np.ascontiguousarray(value) for name, value in values.items()}
    return Feeds({**feeds.values, **changed}, feeds.how, feeds.sizes)


def _not_finite(outputs: Outputs) -> list[str]:
    return [n for n, v in outputs.items() if is_float(v) and not np.isfinite(v.astype(np.float64)).all()]
