"""Nothing that a user feeds ends the process; processes start, share, fork and end as they should.

A scenario is a function of this module that a child process runs, so that an abort is a failed test
and not the end of the tests. Children report in JSON lines. Nothing here imports moe_onnx at the
top: some scenarios are about what comes before that import.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import logging
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
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
ATTRIBUTES = {
    INIT: {"top_k": 2, "drop_pad_mode": 0, "active_num": 0},
    UNPERMUTE: {"drop_and_pad": 0},
}
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
    """A node in the six-input form, its attributes written out, its name and outputs ``mark``ed."""
    inputs = [source or next(iter(INPUTS[op])), *list(INPUTS[op])[1:]]
    outputs = [f"{mark}out{i}" for i in range(len(SHAPES[op]))]
    attributes = {**ATTRIBUTES[op], **changes}
    return helper.make_node(op, inputs, outputs, f"{mark}node", domain="ascend.moe", **attributes)


def model_of(op: str, *nodes: Any, outputs: tuple[str, ...] = (), static: tuple[str, ...] = ()) -> bytes:
    """Inputs have no ``static`` shape, so that whatever is fed gets as far as the operator."""
    graph = helper.make_graph(
        nodes or [node(op)],
        "graph",
        [
            helper.make_tensor_value_info(
                name, ELEMS[value.dtype.name], value.shape if name in static else None
            )
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

    import moe_onnx  # noqa: F401  options see only the operators that were there before them

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


def python(code: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of an interpreter that finds this module."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    return [sys.executable, "-X", "faulthandler", "-c", code], {**os.environ, "PYTHONPATH": path}


def fresh_child(scenario: Callable[..., None], *args: Any) -> list[Any]:
    """What the scenario said in a fresh interpreter, which must end by itself, soon and well."""
    command, env = python(
        f"import test_process as t; t.{scenario.__name__}(*{args!r}); t.say(end=t.time.time())"
    )
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)
    return heard(done.returncode, done.stdout, done.stderr)


def child(scenario: Callable[..., None], *args: Any) -> list[Any]:
    """As ``fresh_child``, in a fork of a process that has imported this module, which takes long."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        status = nursery().bear(scenario.__name__, args, str(out), str(err), timeout=50)
        return heard(status, out.read_text("utf-8"), err.read_text("utf-8"))


def heard(status: int, stdout: str, stderr: str) -> list[Any]:
    said = [json.loads(line) for line in stdout.splitlines()]
    assert status == 0, f"exit {status} after {said[-1:]}: {stderr[-1500:]}"
    assert time.time() - said[-1]["end"] < 10, "the exit takes too long"
    return [*said[:-1], stderr]


def raise_children() -> None:
    """Fork for each line of standard input; say how the child ended. The child returns, to end as usual."""
    assert not {"onnxruntime", "moe_onnx"} & set(sys.modules)  # its threads would not be in the fork
    for line in sys.stdin:
        scenario, args, out, err = json.loads(line)
        pid = os.fork()
        if not pid:
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            globals()[scenario](*args)
            say(end=time.time())
            return
        say(status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


class Nursery:
    """A process that has imported what scenarios need, but neither onnxruntime nor the package."""

    def __init__(self) -> None:
        command, env = python("import test_process as t; t.raise_children()")
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        atexit.register(self.close)

    def bear(self, *order: Any, timeout: float) -> int:
        to, back = self.process.stdin, self.process.stdout
        assert to and back
        print(json.dumps(order), file=to, flush=True)
        if not select.select([back], [], [], timeout)[0]:
            os.killpg(self.process.pid, signal.SIGKILL)  # the nursery and the child
            self.close()
            nursery.cache_clear()
            raise AssertionError(f"{order[0]} does not end")
        status: int = json.loads(back.readline())["status"]
        return status

    def close(self) -> None:
        atexit.unregister(self.close)
        self.process.communicate()


@functools.cache
def nursery() -> Nursery:
    return Nursery()


class Log(logging.Handler):
    """What the package logs, in ``text``."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        logging.getLogger("moe_onnx").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def attempt(call: Callable[..., Any], *args: Any, wait: float = 0) -> dict[str, Any]:
    """What a call did, its outputs or error, and whether an interrupt came in ``wait`` seconds."""
    outputs: list[Any] = []
    error, later = None, ""
    try:
        try:
            outputs = call(*args) or []
        except BaseException as caught:
            error = caught
            wait = min(wait, 0.2) if isinstance(error, KeyboardInterrupt) else wait
        for _ in range(int(wait * 20)):
            time.sleep(0.05)
    except KeyboardInterrupt:
        later = "KeyboardInterrupt"
    return {
        "error": type(error).__name__ if error else "",
        "text": " ".join([str(error), *getattr(error, "__notes__", [])]),
        "later": later,
        "shapes": [list(out.shape) for out in outputs],
        "nan": all(bool(np.isnan(out).all()) for out in outputs),
        "values": [out.tolist() if out.size < 100 else [] for out in outputs],
    }


def is_right(facts: dict[str, Any], op: str = INIT) -> bool:
    return facts["error"] == "" and facts["values"] == [out.tolist() for out in WANT[op]]


def run(op: str, session: Any, inputs: Any = None, wait: float = 0) -> dict[str, Any]:
    return attempt(session.run, None, INPUTS[op] if inputs is None else inputs, wait=wait)


def feed_all(op: str, kind: str) -> None:
    log = Log()
    for name in VARIANTS[op]:
        say(starts=name)  # so that an abort is known to be this one's
        inputs, attributes, _ = variant(op, name)
        log.text, model = "", model_of(op, node(op, **attributes))
        facts = attempt(lambda m, f: session_of(kind, m).run(None, f), model, inputs)
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
    if not error:
        if op == INIT:
            want = [oracles.init_routing_v2_grad(*inputs.values(), **attributes)]
        else:
            want = [*oracles.unpermute_grad(*inputs.values())]
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


def thrower(error: type[BaseException]) -> Callable[..., Any]:
    def throw(*_: Any, **__: Any) -> None:
        raise error("thrown in")

    return throw


def kernel_of(op: str) -> Any:
    from moe_onnx.kernels import PYTHON_KERNELS

    return next(kernel for kernel in PYTHON_KERNELS if kernel.name == op)


def raise_inside(op: str, kind: str) -> None:
    log, session = Log(), session_of(kind, model_of(op))
    places = [(kernel_of(op), "run", INPUTS[op]), (np, "take", INPUTS[op])]
    if op == INIT:  # so many rows that the kernel uses its second thread
        many = {"grad_expanded_x": np.ones((4096, 1024), np.float32)}
        places.append((np, "take", {**many, "expanded_row_idx": np.arange(4096, dtype=I32)}))
    for place, name, feed in places:
        for error in (KeyboardInterrupt, SystemExit, MemoryError):
            before, log.text = getattr(place, name), ""
            object.__setattr__(place, name, thrower(error))
            # The plain session delivers an interrupt when it is out of the operator.
            interrupt = error is KeyboardInterrupt and kind == "plain"
            facts = run(op, session, feed, wait=5 if interrupt else 0.2)
            object.__setattr__(place, name, before)
            say(raised=error.__name__, log=log.text, again=is_right(run(op, session), op), **facts)


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
            caught = {facts["error"], facts["later"]} - {""}  # as the run returns, or soon after
            assert caught == {"KeyboardInterrupt"} & {facts["raised"]}


def sleep_after_an_interrupt() -> None:
    session = session_of("plain", model_of(INIT))
    object.__setattr__(kernel_of(INIT), "run", thrower(KeyboardInterrupt))
    session.run(None, INPUTS[INIT])
    start = time.monotonic()
    facts = attempt(time.sleep, 5)
    say(slept=time.monotonic() - start, **facts)


class Angry(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("no log today")


def log_angrily() -> None:
    sessions = {op: session_of("plain", model_of(op)) for op in OPS}
    logging.getLogger("moe_onnx").addHandler(Angry())
    for op, session in sessions.items():
        say(**run(op, session, variant(op, next(iter(VARIANTS[op])))[0]))
    for op, session in sessions.items():
        object.__setattr__(kernel_of(op), "run", thrower(KeyboardInterrupt))
        say(**run(op, session, wait=2))


def test_a_log_handler_that_raises_loses_nothing() -> None:
    """Neither the process nor an interrupt."""
    said = child(log_angrily)[:-1]
    assert all(run["nan"] for run in said)
    assert [run["error"] + run["later"] for run in said] == ["", "", *["KeyboardInterrupt"] * 2]


def slow_before(op: str) -> list[Any]:
    """Nodes that need long to add nothing to the first input."""
    size = helper.make_tensor("size", TensorProto.INT64, [2], [1000] * 2)
    first = next(iter(INPUTS[op]))
    return [
        helper.make_node("Constant", [], ["size"], value=size),
        helper.make_node("ReduceSum", [first], ["total"], keepdims=1),
        helper.make_node("Sub", ["total", "total"], ["nothing"]),
        helper.make_node("Expand", ["nothing", "size"], ["m0"]),
        *[helper.make_node("MatMul", [f"m{i}", "m0"], [f"m{i + 1}"]) for i in range(6)],
        helper.make_node("ReduceMax", ["m6"], ["still_nothing"], keepdims=1),
        helper.make_node("Add", [first, "still_nothing"], ["first"]),
    ]


def interrupt_a_run(kind: str, place: str) -> None:
    def slow_take(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2)
        return take(*args, **kwargs)

    take = np.take
    for op in OPS:
        before = slow_before(op) if place == "before" else []
        session = session_of(kind, model_of(op, *before, node(op, source="first" if before else "")))
        np.take = take if before else slow_take
        ours = signal.getsignal(signal.SIGINT)
        say(starts=op, again=is_right(run(op, session), op))
        start = time.monotonic()
        run(
            op, session
        )  # the first one may take more than three times as long, which is to be within the next
        third = (time.monotonic() - start) / 3
        threading.Timer(third, os.kill, (os.getpid(), signal.SIGINT)).start()
        facts = run(op, session, wait=5 if kind == "plain" else 0.2)
        np.take = take
        handler = signal.getsignal(signal.SIGINT) is ours
        say(handler=handler, again=is_right(run(op, session), op), **facts)


@pytest.mark.parametrize("place", ["inside", "before"])
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_during_a_run(kind: str, place: str) -> None:
    """Our session raises it after the run, a plain one delivers it soon; both live on."""
    said = child(interrupt_a_run, kind, place)[:-1]
    assert [facts["again"] for facts in said] == [True] * 2 * len(OPS)
    for op, facts in zip(OPS, said[1::2], strict=True):
        assert facts["handler"]
        caught = (facts["error"], facts["later"])
        if kind == "moe":
            assert caught == ("KeyboardInterrupt", "")
        else:
            assert "KeyboardInterrupt" in caught
            assert facts["error"] or is_right(facts, op)


def interrupt_often(kind: str) -> None:
    logging.getLogger("moe_onnx").addHandler(logging.NullHandler())
    session, go, caught = session_of(kind, model_of(INIT)), threading.Event(), 0
    many = {"grad_expanded_x": np.ones((2000, 256), np.float32)}
    feed = {**many, "expanded_row_idx": np.arange(2000, dtype=I32)}

    def shoot() -> None:
        dice = random.Random(0)
        while go.wait():
            go.clear()
            time.sleep(dice.random() * 0.01)
            os.kill(os.getpid(), signal.SIGINT)  # the next one only when this one was caught

    threading.Thread(target=shoot, daemon=True).start()
    for _ in range(15):
        try:
            deadline = time.monotonic() + 20
            go.set()
            while time.monotonic() < deadline:
                session.run(None, feed)
        except KeyboardInterrupt:
            caught += 1
    say(caught=caught, again=is_right(run(INIT, session)))


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_at_any_moment(kind: str) -> None:
    """Between, before and after the instructions of the operator, too."""
    assert child(interrupt_often, kind)[0] == {"caught": 15, "again": True}


def interrupt_the_caller() -> None:
    """Interrupts in the code of onnxruntime-extensions itself, in its first instruction too."""
    from onnxruntime_extensions import _ocos

    code = _ocos._on_pyop_invocation.__code__
    session, lines = session_of("plain", model_of(INIT)), code.co_lines()
    for line in sorted({line for _, _, line in lines if line}):
        seen = []

        def trace(frame: Any, event: str, arg: Any, line: int = line, seen: Any = seen) -> Any:
            if frame.f_code is code and frame.f_lineno == line and not seen:
                seen.append(event)
                os.kill(os.getpid(), signal.SIGINT)
            return trace if frame.f_code is code else None

        sys.settrace(trace)
        try:
            facts = run(INIT, session)
        finally:
            sys.settrace(None)
        caught = facts["error"]  # as the run returns, or after: a sleeping main thread is woken
        if not caught:
            assert is_right(facts)
            caught = attempt(time.sleep, 5 if seen else 0)["error"]
        say(seen=seen, caught=caught)


def test_ctrl_c_inside_onnxruntime_extensions() -> None:
    """Wherever in its code it comes, the run ends well and the interrupt follows at once."""
    said = [facts for facts in child(interrupt_the_caller)[:-1] if facts["seen"]]
    assert len(said) >= 4
    assert said[0]["seen"] == ["call"]
    assert {facts["caught"] for facts in said} == {"KeyboardInterrupt"}


def import_with_a_handler() -> None:
    caught: list[int] = []

    def own(number: int, frame: Any) -> None:
        caught.append(number)

    signal.signal(signal.SIGINT, own)
    importlib.import_module("moe_onnx")
    os.kill(os.getpid(), signal.SIGINT)
    say(kept=signal.getsignal(signal.SIGINT) is own, caught=len(caught))


def import_in_a_thread() -> None:
    thread = threading.Thread(target=importlib.import_module, args=("moe_onnx",))
    thread.start()
    thread.join()
    say(kept=signal.getsignal(signal.SIGINT) is signal.default_int_handler, caught=1)


def import_ignoring() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module("moe_onnx")
    os.kill(os.getpid(), signal.SIGINT)
    say(kept=signal.getsignal(signal.SIGINT) == signal.SIG_IGN, caught=1)


@pytest.mark.parametrize("scenario", [import_with_a_handler, import_in_a_thread, import_ignoring])
def test_the_import_leaves_handlers_alone(scenario: Callable[..., None]) -> None:
    assert fresh_child(scenario)[0] == {"kept": True, "caught": 1}


def interrupt_other_programs() -> None:
    import asyncio

    import click

    import moe_onnx  # noqa: F401

    def shoot() -> None:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    def sleep() -> None:
        shoot()
        time.sleep(5)

    ends: list[str] = []

    async def wait() -> None:
        shoot()
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    command = click.command()(sleep)
    say(**attempt(sleep))
    say(**attempt(lambda: asyncio.run(wait())), ends=ends)
    say(**attempt(command.main, [], "command", "", False))
    say(**attempt(command.main, []))
    signal.signal(signal.SIGINT, lambda number, frame: ends.append("own"))
    say(**attempt(sleep), ends=ends)


def test_ctrl_c_is_for_others_what_it_was() -> None:
    """A sleep, asyncio, a command and a handler that is set later."""
    sleep, loop, command, alone, own, _ = fresh_child(interrupt_other_programs)
    assert sleep["error"] == "KeyboardInterrupt"
    assert (loop["error"], loop["ends"]) == ("KeyboardInterrupt", ["cancelled"])
    assert (command["error"], alone["error"]) == ("Abort", "SystemExit")
    assert (own["error"], own["ends"]) == ("", ["cancelled", "own"])


def run_bodies(op: str, *static: str) -> None:
    import onnx
    import onnxruntime

    import moe_onnx

    model = model_of(op, static=static)
    say(**run(op, moe_onnx.InferenceSession(model, kernels="body")))
    anywhere = moe_onnx.add_function_bodies(onnx.load_model_from_string(model))
    say(**run(op, onnxruntime.InferenceSession(anywhere.SerializeToString())))


STATIC = [
    (INIT, *INPUTS[INIT]),
    (UNPERMUTE, "probs"),
    (UNPERMUTE, "unpermuted_tokens_grad", "routing_map", "permuted_tokens", "probs"),
    (UNPERMUTE, *INPUTS[UNPERMUTE]),
]


@pytest.mark.parametrize("static", STATIC, ids=lambda static: f"{static[0]}-{len(static) - 1}")
def test_bodies_with_known_sizes(static: tuple[str, ...]) -> None:
    """What the runtime can fold when it loads a body must not bring it down."""
    said = child(run_bodies, *static)[:-1]
    assert [is_right(facts, static[0]) for facts in said] == [True, True]


KEPT: list[Any] = []


def fresh(kind: str) -> None:
    KEPT.append(session_of(kind, model_of(INIT)))  # it lives when the process ends
    say(**run(INIT, KEPT[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_process(kind: str) -> None:
    """The first session works, nothing is printed, and the exit is clean and fast."""
    facts, stderr = fresh_child(fresh, kind)
    assert is_right(facts)
    assert stderr == ""


def load_anew() -> None:
    import moe_onnx as first

    model, (wrong, _, _) = model_of(INIT), variant(INIT, "index_large")
    loads, sessions = [first] * 4, [session_of(kind, model) for kind in KINDS]
    importlib.reload(first)
    sessions += [session_of(kind, model) for kind in KINDS]
    for _ in range(2):
        for name in [name for name in sys.modules if name.split(".")[0] == "moe_onnx"]:
            del sys.modules[name]
        loads += [importlib.import_module("moe_onnx")] * 2
        sessions += [session_of(kind, model) for kind in KINDS]
    for session, package in zip(sessions, loads, strict=True):
        facts, error = run(INIT, session), None
        try:
            session.run(None, wrong)
        except Exception as caught:
            error = caught
        number, node_name = getattr(session, "_number", None), getattr(error, "node", None)
        ours: Any = package
        say(ours=type(error) is ours.IndexValueError, node=node_name, number=number, **facts)


@functools.cache
def loaded_anew() -> list[Any]:
    return fresh_child(load_anew)[:-1]


def test_sessions_of_all_loads_run_side_by_side() -> None:
    """Before and after a reload and after two imports anew, plain and ours."""
    assert [is_right(facts) for facts in loaded_anew()] == [True] * 8


@pytest.mark.parametrize("load", [0, 1, 2, 3])
def test_errors_after_loading_anew(load: int) -> None:
    """``except moe_onnx.IndexValueError`` catches what a session of the same load raises."""
    facts = loaded_anew()[2 * load + 1]
    assert (facts["ours"], facts["node"]) == (True, "node")


def test_sessions_of_all_loads_have_numbers_of_their_own() -> None:
    """What an op could not raise waits under the number of its session."""
    numbers = [facts["number"] for facts in loaded_anew()[1::2]]
    assert len(set(numbers)) == 4


def define_user_ops() -> None:
    from onnxruntime_extensions import PyCustomOpDef, onnx_op

    def define(name: str) -> None:
        types = [PyCustomOpDef.dt_float]
        onnx_op(op_type=f"user::{name}", inputs=types, outputs=types)(lambda x: x * 2)

    define("Before")
    importlib.import_module("moe_onnx")
    define("After")
    nodes = [
        helper.make_node("After", ["grad_expanded_x"], ["doubled"], domain="user"),
        node(INIT, source="doubled"),
        helper.make_node("Before", ["out0"], ["y"], domain="user"),
    ]
    for kind in KINDS:
        for part in (nodes, [node(INIT), nodes[2]]):
            say(**run(INIT, session_of(kind, model_of(INIT, *part), plain_options())))


def test_user_ops_of_another_domain() -> None:
    """Defined before or after the import, beside ours in one model."""
    said = fresh_child(define_user_ops)[:-1]
    for facts, factor in zip(said, (4, 2, 4, 2), strict=True):
        assert facts["values"] == [(factor * WANT[INIT][0]).tolist()]


def many_sessions() -> None:
    options, ops = plain_options(), [op for _ in range(13) for op in OPS for _ in KINDS]
    sessions = [session_of(KINDS[i % 2], model_of(op), options) for i, op in enumerate(ops)]
    for op, session in zip(ops, sessions, strict=True):
        say(right=is_right(run(op, session), op))


def test_fifty_sessions_of_one_options_object() -> None:
    assert child(many_sessions)[:-1] == [{"right": True}] * 52


def run_in_threads() -> None:
    session, wrong = session_of("moe", model_of(INIT)), []

    def work(number: int) -> None:
        count = 2 * number + 2
        grad = np.arange(count * 3, dtype=np.float32).reshape(count, 3) + number
        order = np.random.default_rng(number).permutation(count).astype(I32)
        want = oracles.init_routing_v2_grad(grad, order, top_k=2)
        for turn in range(200):
            fails, at, value = (turn + number) % 3 == 0, turn % count, 1000 * (number + 1) + turn
            slots_now = put(order, at, value) if fails else order
            try:
                feed = {"grad_expanded_x": grad, "expanded_row_idx": slots_now}
                (out,) = session.run(None, feed)
                good = not fails and np.array_equal(out, want)
            except IndexError as error:
                found: Any = error
                good = fails and (found.position, found.value) == ((at,), value)
            if not good:
                wrong.append([number, turn])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(wrong=wrong)


def test_threads_share_a_session() -> None:
    """8 threads, 200 runs each: everyone gets its own numbers or its own error."""
    assert child(run_in_threads)[0] == {"wrong": []}


def run_in_parallel(kind: str) -> None:
    import onnxruntime

    options = plain_options()
    options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.inter_op_num_threads = 4
    # Six slots go by two and by three; of four slots, the node with top_k 3 fails alone.
    nodes = [node(INIT, f"n{i}_", top_k=3 if i == 4 else 2) for i in range(6)]
    outputs = tuple(name for each in nodes for name in each.output)
    session = session_of(kind, model_of(INIT, *nodes, outputs=outputs), options)
    for turn in range(40):
        slots_now = index if turn % 2 else np.arange(4, dtype=I32)
        feed = {"grad_expanded_x": rows[: len(slots_now)], "expanded_row_idx": slots_now}
        say(**run(INIT, session, feed))


@pytest.mark.parametrize("kind", KINDS)
def test_parallel_execution(kind: str) -> None:
    """Six of our nodes at a time, one of which fails in every other run."""
    thirds = oracles.init_routing_v2_grad(rows, index, top_k=3)
    halves = oracles.init_routing_v2_grad(rows[:4], np.arange(4, dtype=I32), top_k=2)
    for turn, facts in enumerate(child(run_in_parallel, kind)[:-1]):
        if turn % 2:
            want = [thirds if i == 4 else WANT[INIT][0] for i in range(6)]
            assert facts["values"] == [out.tolist() for out in want]
        elif kind == "moe":
            assert facts["error"] == "ShapeError"
            assert facts["text"].endswith("(node 'n4_node')")
        else:
            assert facts["error"] == ""
            assert np.isnan(facts["values"].pop(4)).all()
            assert facts["values"] == [halves.tolist()] * 5


def run_path(path: str) -> bool:
    return is_right(run(INIT, session_of("moe", path)))


def spawn(path: str) -> None:
    Path(path).write_bytes(model_of(INIT))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        say(right=pool.map(run_path, [path] * 4))


def test_spawned_processes(tmp_path: Path) -> None:
    assert fresh_child(spawn, str(tmp_path / "model.onnx"))[0] == {"right": [True] * 4}


def fork() -> None:
    import moe_onnx

    session = session_of("moe", model_of(INIT))
    session.run(None, INPUTS[INIT])
    process = os.fork()
    if not process:
        out = moe_onnx.moe_init_routing_v2_grad(rows, index, top_k=2)
        os._exit(0 if np.array_equal(out, WANT[INIT][0]) else 3)  # as multiprocessing does
    for _ in range(200):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(process, signal.SIGKILL)
        status = -1
    say(status=status, again=is_right(run(INIT, session)))


def test_a_fork_after_a_run() -> None:
    """The child runs the numpy functions and ends; the parent's session runs on."""
    assert child(fork)[0] == {"status": 0, "again": True}


class Blocked:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "onnxruntime_extensions":
            raise ImportError("blocked for this test")


def go_without_extensions() -> None:
    sys.meta_path.insert(0, Blocked())
    import onnxruntime

    import moe_onnx

    unpermute_grad = moe_onnx.moe_token_unpermute_with_routing_map_grad
    say(**attempt(lambda: [moe_onnx.moe_init_routing_v2_grad(rows, index, top_k=2)]))
    say(**attempt(unpermute_grad, *INPUTS[UNPERMUTE].values()))
    say(**attempt(session_of, "moe", model_of(INIT)))
    say(**attempt(moe_onnx.register, onnxruntime.SessionOptions(), "python"))
    for op in OPS:
        session = moe_onnx.InferenceSession(model_of(op))
        say(kernels=session.moe_kernels, **run(op, session))


def test_without_onnxruntime_extensions() -> None:
    """Everything but the Python kernels works, and they say what to install."""
    init, unpermute, session, register, *auto, _ = fresh_child(go_without_extensions)
    assert is_right(init)
    assert is_right(unpermute, UNPERMUTE)
    for refused in (session, register):
        assert refused["error"] == "ModelError"
        assert "pip install onnxruntime-extensions" in refused["text"]
    for op, facts in zip(OPS, auto, strict=True):
        assert facts["kernels"] in (
            {"native": 1, "python": 0, "body": 0},
            {"native": 0, "python": 0, "body": 1},
        )
        assert is_right(facts, op)
