"""onnx's own backend test models, each differentiated or refused; finite differences decide who is right.

``python tests/backend_models.py`` prints the table that the README quotes.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime as ort
from gradient_tools import STEP, Array, Erf, Gelu, Pad
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import moe_onnx
from moe_onnx.rewrite.to_float64 import to_float64

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
STASHING = ("GroupNormalization",)
SINGLE = ("Shrink",)  # computed in float32 by onnxruntime, whatever goes in
LOSS = "the.loss"
TOLERANCE = 2e-6  # of the sum of |gradient x direction|: many models were made for float32

# What becomes of a model.
DIFFERENTIATED = "gradients equal finite differences"
KINK = "at a kink or an end of the domain: one-sided differences disagree, nothing to compare"
REFUSED = "refused, by name"
NO_FLOATS = "no float32 or float64 goes in and comes out"
NOT_RUN = "does not run in float64 (onnxruntime, reference evaluator)"
WRONG = "WRONG"


def cases() -> Iterator[tuple[str, onnx.ModelProto, list[Array]]]:
    """Name, model and inputs of every node test model of the installed onnx."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case import node

        found = node.collect_testcases(None)
    for case in found:
        # Expanded models are the function bodies of the others.
        if "_expanded" in case.name:
            continue
        if case.model is not None and case.data_sets:
            yield case.name, case.model, list(case.data_sets[0][0])


def weighed(model: onnx.ModelProto, inputs: list[Any]) -> tuple[onnx.ModelProto, list[str]] | None:
    """The model in double precision, its weighed float outputs summed to a loss; its float inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    scans = any(node.op_type == "Scan" for node in copy.graph.node)  # means another thing in opset 8
    if all(not entry.domain and 8 * scans < entry.version < 18 for entry in copy.opset_import):
        with contextlib.suppress(Exception):  # some models of old opsets cannot be converted
            copy = onnx.version_converter.convert_version(copy, 18)
    graph = copy.graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    # Optional and sequence inputs have no tensor type: such a model is left to its refusal, or has no floats.
    varied = [
        value.name
        for value, array in zip(graph.input, inputs, strict=False)
        if types[value.name] in FLOATS and isinstance(array, np.ndarray)
    ]
    outputs = [value.name for value in graph.output if types[value.name] in FLOATS]
    if not varied or not outputs:
        return None
    if all(entry.domain for entry in copy.opset_import):
        copy.opset_import.append(helper.make_opsetid("", 21))
    terms = []
    for name in outputs:
        graph.node.append(helper.make_node("Mul", [name, f"{name}.weight"], [f"{name}.term"]))
        weight = graph.input.add(name=f"{name}.weight")
        weight.type.CopyFrom(next(value.type for value in graph.output if value.name == name))
        terms.append(f"{name}.term")
    elem = types[outputs[0]]
    zero = numpy_helper.from_array(np.zeros((), helper.tensor_dtype_to_np_dtype(elem)), "the.zero")
    graph.initializer.append(zero)
    sums = []
    for term in terms:
        graph.node.append(helper.make_node("ReduceSum", [term], [f"{term}.sum"], keepdims=0))
        sums.append(f"{term}.sum")
    graph.node.append(helper.make_node("Sum", [*sums, "the.zero"], [LOSS]))
    graph.output.append(helper.make_tensor_value_info(LOSS, elem, []))
    lifted = to_float64(copy)
    for node in lifted.graph.node:
        if node.op_type in STASHING and not any(attr.name == "stash_type" for attr in node.attribute):
            node.attribute.append(helper.make_attribute("stash_type", TensorProto.FLOAT))
        for attr in node.attribute:
            if node.op_type in STASHING and attr.name == "stash_type" and attr.i == TensorProto.FLOAT:
                attr.i = TensorProto.DOUBLE  # statistics too
    return lifted, varied


def verdict(name: str, model: onnx.ModelProto, inputs: list[Any]) -> tuple[str, str]:
    """What becomes of a model, and why."""
    try:
        made = weighed(model, inputs)
    except moe_onnx.MoeOnnxError as error:
        return NOT_RUN, str(error)
    if made is None:
        return NO_FLOATS, ""
    lifted, varied = made
    feed = {
        value.name: array.astype(np.float64) if getattr(array, "dtype", None) == np.float32 else array
        for value, array in zip(lifted.graph.input, inputs, strict=False)
    }
    try:
        plain = runner(lifted, without=LOSS)
        rng = np.random.default_rng(3)
        floats = [
            value.name for value in lifted.graph.output[:-1] if value.type.tensor_type.elem_type in FLOATS
        ]
        for out, array in plain(feed).items():
            if out in floats:
                feed[f"{out}.weight"] = np.asarray(rng.standard_normal(np.shape(array)))
        forward = runner(lifted)
        forward(feed)
    except Exception as error:  # whatever the runtimes say of what they cannot run
        return NOT_RUN, f"{type(error).__name__}: {error}"
    outcomes = [differentiated(lifted, feed, varied, forward)]
    if outcomes[0][0] == REFUSED and len(varied) > 1:  # some inputs have gradients and some do not
        outcomes = [differentiated(lifted, feed, [one], forward) for one in varied]
    for kind in (WRONG, DIFFERENTIATED, KINK, NOT_RUN, REFUSED):
        for outcome in outcomes:
            if outcome[0] == kind:
                return outcome
    raise AssertionError(name)


def differentiated(
    model: onnx.ModelProto, feed: dict[str, Array], wrt: list[str], forward: Callable[..., dict[str, Array]]
) -> tuple[str, str]:
    broken = "the package's own failure"
    try:
        done = moe_onnx.differentiate(model, loss=LOSS, wrt=wrt)
    except moe_onnx.MoeOnnxError as error:
        return REFUSED, str(error)
    except Exception as error:
        return WRONG, f"{broken}: {type(error).__name__}: {error}"
    try:
        got = runner(done)(feed)
    except Exception as error:
        return NOT_RUN, f"differentiated: {type(error).__name__}: {error}"
    kinks, rng = False, np.random.default_rng(5)
    for name in wrt:
        gradient = got[f"{name}.grad"]
        if gradient.shape != feed[name].shape:
            return WRONG, f"{name}: shape {gradient.shape}"
        u = np.asarray(rng.standard_normal(feed[name].shape))

        def moved(h: float, name: str = name, u: Array = u) -> float:
            return float(forward({**feed, name: np.asarray(feed[name] + h * u)})[LOSS])

        mine, scale = float((gradient * u).sum()), float(np.abs(gradient * u).sum())
        if verdict_of(moved, mine, max(scale, 1.0)) is None:
            kinks = True
        elif not verdict_of(moved, mine, max(scale, 1.0)):
            slopes = [(moved(h) - moved(-h)) / (2 * h) for h in (STEP, STEP / 4)]
            return WRONG, f"{name}: {mine}, finite differences {slopes}, scale {scale}"
    return (KINK, "") if kinks else (DIFFERENTIATED, "")


def verdict_of(moved: Callable[[float], float], mine: float, scale: float) -> bool | None:
    """Whether a slope is right, or None at a kink."""
    here = moved(0.0)
    for step in (STEP, STEP / 16, STEP / 1024):  # the last where only the slope is continuous
        near, far = (moved(h) - moved(-h) for h in (step, 2 * step))
        if abs((8 * near - far) / (12 * step) - mine) <= TOLERANCE * scale:
            return True
    # One-sided slopes of second order agree where the function is smooth.
    step = STEP / 16
    right = (4 * moved(step) - moved(2 * step) - 3 * here) / (2 * step)
    left = -(4 * moved(-step) - moved(-2 * step) - 3 * here) / (2 * step)
    if not np.isfinite([right, left, mine]).all() or abs(right - left) > 1e-3 * max(
        scale, abs(right), abs(left)
    ):
        return None
    return False


def runner(model: onnx.ModelProto, without: str = "") -> Callable[[dict[str, Array]], dict[str, Array]]:
    """onnxruntime where it can, else the reference evaluator; outputs by name."""
    if without:
        copy, model = model, onnx.ModelProto()
        model.CopyFrom(copy)
        kept = [v for v in copy.graph.output if v.name != without]
        del model.graph.output[:]
        model.graph.output.extend(kept)
        first = next(i for i, n in enumerate(copy.graph.node) if any(x.endswith(".weight") for x in n.input))
        del model.graph.node[first:]
        weights = [v for v in copy.graph.input if not v.name.endswith(".weight")]
        del model.graph.input[:]
        model.graph.input.extend(weights)
    names = [value.name for value in model.graph.output]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    inputs = {value.name for value in model.graph.input}
    sessions: list[Any] = []

    def call(feed: dict[str, Array]) -> dict[str, Array]:
        given = {name: plain(value) for name, value in feed.items() if name in inputs}
        if not sessions and any(node.op_type in SINGLE for node in model.graph.node):
            sessions[:] = [ReferenceEvaluator(model, new_ops=[Erf, Gelu, Pad])]
        if not sessions:
            try:
                session: Any = ort.InferenceSession(
                    model.SerializeToString(), options, providers=["CPUExecutionProvider"]
                )
                sessions.append(session)
                return dict(zip(names, session.run(None, given), strict=True))
            except Exception:  # no kernel
                sessions[:] = [ReferenceEvaluator(model, new_ops=[Erf, Gelu, Pad])]
        return dict(zip(names, sessions[0].run(None, given), strict=True))

    return call


def plain(value: Any) -> Any:
    """onnxruntime takes no numpy scalars."""
    return np.asarray(value) if isinstance(value, np.generic) else value


def reason(message: str) -> str:
    """What a refusal is about, without names."""
    found = re.match(r"\S+::(\w+) \(node", message)
    if found and "has no gradient rule for opset" in message:
        return f"{found[1]} has no rule"
    if "no differentiable path" in message:
        return "no differentiable path"
    return f"{found[1]}: a form without a rule" if found else message[:60]


def main() -> None:
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for name, model, inputs in cases():
        if len(sys.argv) > 1 and not re.search(sys.argv[1], name):
            continue
        kind, why = verdict(name, model, inputs)
        kinds[kind] += 1
        if kind == REFUSED:
            reasons[reason(why)] += 1
        if kind in (WRONG, NOT_RUN) or len(sys.argv) > 1:
            print(f"  {kind}: {name}: {why[:300]}", flush=True)
    for kind, count in kinds.most_common():
        print(f"{count:5} {kind}")
    for why, count in reasons.most_common():
        print(f"{count:9} {why}")


if __name__ == "__main__":
    main()
