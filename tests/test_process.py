"""Nothing that a user feeds ends the process; processes start, share, fork and end as they should.

A scenario is a function of this module that a child process runs, so that an abort is a failed test
and not the end of the tests. Children report in JSON lines. Nothing here imports moe_onnx at the
top: some scenarios are about what comes before that import.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from onnx import TensorProto, helper

TESTS = Path(__file__).parent
INIT, UNPERMUTE = "MoeInitRoutingV2Grad", "MoeTokenUnpermuteWithRoutingMapGrad"
OPS, KINDS = (INIT, UNPERMUTE), ("plain", "moe")
ELEMS = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "bool": TensorProto.BOOL}
I32, HUGE = np.int32, 2**62

rows = np.arange(24, dtype=np.float32).reshape(6, 4)
index = np.array([5, 0, 1, 2, 4, 3], I32)
_, chosen, slots = oracles.random_routing(np.random.default_rng(0), 4, 5, 2)
tokens = np.arange(12, dtype=np.float32).reshape(4, 3)
permuted = np.arange(24, dtype=np.float32).reshape(8, 3)
probs = np.arange(20, dtype=np.float32).reshape(4, 5)
INPUTS: dict[str, dict[str, Any]] = {
    INIT: {"grad_expanded_x": rows, "expanded_row_idx": index},
    UNPERMUTE: {
        "unpermuted_tokens_grad": tokens,
        "out_index": slots,
        "permute_token_id": slots,
        "routing_map": chosen,
        "permuted_tokens": permuted,
        "probs": probs,
    },
}
ATTRIBUTES = {INIT: {"top_k": 2, "drop_pad_mode": 0, "active_num": 0}, UNPERMUTE: {"drop_and_pad": 0}}
SHAPES = {INIT: [[3, 4]], UNPERMUTE: [[8, 3], [4, 5]]}
WANT = {
    INIT: [oracles.init_routing_v2_grad(rows, index, top_k=2)],
    UNPERMUTE: [*oracles.unpermute_grad(*INPUTS[UNPERMUTE].values())],
}


def put(array: Any, at: int, value: float) -> Any:
    changed = array.copy()
    changed.reshape(-1)[at] = value
    return changed


# name: what differs from the right call, and the error; "" if it is right all the same
VARIANTS: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    INIT: {
        "index_large": ({"expanded_row_idx": put(index, 5, 99)}, "IndexValueError"),
        "index_minus_one": ({"expanded_row_idx": put(index, 0, -1)}, "IndexValueError"),
        "index_int32_min": ({"expanded_row_idx": put(index, 2, -(2**31))}, "IndexValueError"),
        "index_twice": ({"expanded_row_idx": put(index, 1, 5)}, "IndexValueError"),
        "index_2d": ({"expanded_row_idx": index.reshape(2, 3)}, "RankError"),
        "index_scalar": ({"expanded_row_idx": np.array(3, I32)}, "RankError"),
        "index_empty": ({"expanded_row_idx": index[:0]}, "ShapeError"),
        "rows_scalar": ({"grad_expanded_x": np.array(3, np.float32)}, "RankError"),
        "rows_3d": ({"grad_expanded_x": rows.reshape(3, 2, 4)}, "RankError"),
        "rows_missing": ({"grad_expanded_x": rows[:5]}, "ShapeError"),
        "top_k_0": ({"top_k": 0}, "AttributeValueError"),
        "top_k_int64_min": ({"top_k": -(2**63)}, "AttributeValueError"),
        "top_k_huge": ({"top_k": HUGE}, "ShapeError"),
        "mode_7": ({"drop_pad_mode": 7}, "AttributeValueError"),
        "active_num_huge": ({"active_num": HUGE}, "ShapeError"),
        "nan": ({"grad_expanded_x": put(rows, 7, np.nan)}, ""),
        "no_tokens": ({"grad_expanded_x": rows[:0], "expanded_row_idx": index[:0]}, ""),
        "no_hidden": ({"grad_expanded_x": rows[:, :0]}, ""),
    },
    UNPERMUTE: {
        "row_large": ({"out_index": put(slots, 3, 99)}, "IndexValueError"),
        "row_twice": ({"out_index": put(slots, 3, slots[0])}, "IndexValueError"),
        "row_int32_min": ({"out_index": put(slots, 0, -(2**31))}, "IndexValueError"),
        "token_large": ({"permute_token_id": np.full(8, 4, I32)}, "IndexValueError"),
        "lengths_differ": ({"permute_token_id": slots[:7]}, "ShapeError"),
        "row_2d": ({"out_index": slots.reshape(2, 4)}, "RankError"),
        "tokens_scalar": ({"unpermuted_tokens_grad": np.array(1, np.float32)}, "RankError"),
        "probs_short": ({"probs": probs[:3]}, "ShapeError"),
        "map_missing": ({"routing_map": np.zeros((0, 0), bool)}, "MissingInputError"),
        "map_full": ({"routing_map": np.ones((4, 5), bool)}, "RoutingMapError"),
        "one_expert": ({"probs": probs[:, :1], "routing_map": chosen[:, :1]}, "LimitError"),
        "pad_7": ({"drop_and_pad": 7}, "AttributeValueError"),
        "pad_huge": ({"drop_and_pad": HUGE}, "AttributeValueError"),
        "nan": ({"unpermuted_tokens_grad": put(tokens, 4, np.nan)}, ""),
        "no_slots": ({name: value[:0] for name, value in INPUTS[UNPERMUTE].items()}, ""),
    },
}


def variant(op: str, name: str) -> tuple[dict[str, Any], dict[str, int], str]:
    changes, error = VARIANTS[op][name]
    inputs = {key: changes.get(key, value) for key, value in INPUTS[op].items()}
    return inputs, {k: changes.get(k, v) for k, v in ATTRIBUTES[op].items()}, error


def node(op: str, mark: str = "", source: str = "", **changes: int) -> Any:
    """A node in the six-input form, every attribute written out, its outputs and name ``mark``ed."""
    inputs = [source or next(iter(INPUTS[op])), *list(INPUTS[op])[1:]]
    outputs = [f"{mark}out{i}" for i in range(len(SHAPES[op]))]
    attributes = {**ATTRIBUTES[op], **changes}
    return helper.make_node(op, inputs, outputs, f"{mark}node", domain="ascend.moe", **attributes)


def model_of(op: str, *nodes: Any, outputs: tuple[str, ...] = ()) -> bytes:
    """Inputs have no static shape, so that whatever is fed gets as far as the operator."""
    graph = helper.make_graph(
        nodes or [node(op)],
        "graph",
        [
            helper.make_tensor_value_info(name, ELEMS[value.dtype.name], None)
            for name, value in INPUTS[op].items()
        ],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
            for name in outputs or (nodes or [node(op)])[-1].output
        ],
    )
    imports = [helper.make_opsetid(d, v) for d, v in (("", 21), ("ascend.moe", 1), ("user", 1))]
    data: bytes = helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()
    return data


def plain_options() -> Any:
    import onnxruntime
    import onnxruntime_extensions

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
    return options


def session_of(kind: str, model: Any, options: Any = None) -> Any:
    import onnxruntime

    import moe_onnx

    if kind == "plain":
        return onnxruntime.InferenceSession(model, options or plain_options())
    return moe_onnx.InferenceSession(model, options, kernels="python")


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def child(scenario: Callable[..., None], *args: Any) -> list[Any]:
    """What the scenario said in a process of its own, which must end by itself, soon and well."""
    code = f"import test_process as t; t.{scenario.__name__}(*{args!r}); t.say(end=t.time.time())"
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=50,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"exit {done.returncode} after {said[-1:]}: {done.stderr[-1500:]}"
    assert time.time() - said[-1]["end"] < 10, "the exit takes too long"
    return [*said[:-1], done.stderr]


class Log(logging.Handler):
    """What the package logs, in ``text``."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        logging.getLogger("moe_onnx").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """What a run did: its outputs or its error."""
    try:
        outputs = call()
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return {"error": type(error).__name__, "text": f"{error} {notes}".strip()}
    return {
        "error": "",
        "shapes": [list(out.shape) for out in outputs or []],
        "nan": all(bool(np.isnan(out).all()) for out in outputs or []),
        "values": [out.tolist() if out.size < 100 else [] for out in outputs or []],
    }


def is_right(facts: dict[str, Any], op: str = INIT) -> bool:
    return facts["error"] == "" and facts["values"] == [out.tolist() for out in WANT[op]]


def feed_all(op: str, kind: str) -> None:
    log = Log()
    for name in VARIANTS[op]:
        say(starts=name)  # so that an abort is known to be this one's
        inputs, attributes, _ = variant(op, name)
        log.text, model = "", model_of(op, node(op, **attributes))
        facts = attempt(functools.partial(lambda m, f: session_of(kind, m).run(None, f), model, inputs))
        say(name=name, log=log.text, **facts)


@functools.cache
def fed(op: str, kind: str) -> dict[str, Any]:
    return {said["name"]: said for said in child(feed_all, op, kind)[:-1] if "name" in said}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in VARIANTS[op]])
def test_whatever_is_fed(op: str, name: str, kind: str) -> None:
    """A wrong call is an error naming its node, or NaN and a log entry; a right one is right."""
    inputs, attributes, error = variant(op, name)
    got = fed(op, kind)[name]
    if not error and op == INIT:
        want = [oracles.init_routing_v2_grad(*inputs.values(), **attributes)]
    elif not error:
        want = [*oracles.unpermute_grad(*inputs.values())]
    if not error:
        assert got["error"] == got["log"] == ""
        assert got["shapes"] == [list(out.shape) for out in want]
        for values, out in zip(got["values"], want, strict=True):
            np.testing.assert_array_equal(np.reshape(values, out.shape), out)
    elif kind == "moe":
        assert (got["error"], got["text"][: len(op)]) == (error, op)
        assert got["text"].endswith("(node 'node')")
    else:
        assert got["error"] == ""
        assert got["nan"]
        if error == "IndexValueError":  # otherwise no shape is the right one
            assert got["shapes"] == SHAPES[op]
        assert f"{op} failed, its outputs are NaN: {error}" in got["log"]


def raise_inside(op: str, kind: str) -> None:
    from moe_onnx.kernels import PYTHON_KERNELS

    log, session = Log(), session_of(kind, model_of(op))
    kernel = next(kernel for kernel in PYTHON_KERNELS if kernel.name == op)
    places: list[tuple[Any, str, Any]] = [(kernel, "run", INPUTS[op]), (np, "take", INPUTS[op])]
    if op == INIT:  # so many rows that the kernel uses its second thread
        many = {"grad_expanded_x": np.ones((4096, 1024), np.float32)}
        places.append((np, "take", {**many, "expanded_row_idx": np.arange(4096, dtype=I32)}))
    for place, name, feed in places:
        for error in (KeyboardInterrupt, SystemExit, MemoryError):

            def fail(*_: Any, _error: type[BaseException] = error, **__: Any) -> None:
                raise _error("thrown in")

            before, log.text = getattr(place, name), ""
            object.__setattr__(place, name, fail)
            facts = attempt(functools.partial(session.run, None, feed))
            object.__setattr__(place, name, before)
            # The plain session delivers an interrupt when it is out of the operator.
            later = attempt(lambda: time.sleep(1) if kind == "plain" else None)["error"]
            again = is_right(attempt(lambda: session.run(None, INPUTS[op])), op)
            say(raised=error.__name__, log=log.text, later=later, again=again, **facts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_whatever_is_raised_inside(op: str, kind: str) -> None:
    """What is no Exception stays inside an operator, too; an interrupt is delivered afterwards."""
    said = child(raise_inside, op, kind)[:-1]
    assert len(said) == (9 if op == INIT else 6)
    for facts in said:
        assert facts["again"]
        if kind == "moe":
            assert (facts["error"], facts["later"]) == (facts["raised"], "")
            assert facts["text"] == "thrown in raised in node 'node'"
        else:
            assert facts["nan"]
            assert f"{op} failed, its outputs are NaN: {facts['raised']}: thrown in" in facts["log"]
            interrupt = "KeyboardInterrupt"
            assert facts["later"] == (interrupt if facts["raised"] == interrupt else "")
