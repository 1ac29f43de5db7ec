"""Passes: what they did is told, what they made does the same, and a wrong one changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, helper
from test_expand import FEED, INIT, WANT, branch, init, model_of, plain_run

import moe_onnx
from moe_onnx.cli import main
from moe_onnx.rewrite.by_ir import by_ir
from moe_onnx.rewrite.notes import MARK, ROUNDING, Notes, Pass, mark, scopes
from moe_onnx.rewrite.passes import PASSES, apply_passes
from moe_onnx.validation.rewriting.rewrite import Rewritten

FLOAT = TensorProto.FLOAT


def simple(*nodes: onnx.NodeProto, out: int = FLOAT, shape: Any = (None, 4), **how: Any) -> ModelProto:
    """A graph from ``x [N, 4]`` to ``y``."""
    inputs = [helper.make_tensor_value_info("x", FLOAT, ["N", 4])]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", out, shape)], **how)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def replacing(op: str, *nodes: onnx.NodeProto, name: str = "wrong", tolerance: Any = ROUNDING) -> Pass:
    """A pass that puts these nodes in the place of an operator."""

    def apply(model: ModelProto, notes: Notes) -> ModelProto:
        old = [node for node in model.graph.node if node.op_type == op]
        if old:
            kept = [node for node in model.graph.node if node.op_type != op]
            del model.graph.node[:]
            model.graph.node.extend([*nodes, *kept])
            notes.applied(old[0], "replaced")
        return model

    return Pass(name, "", "", "", apply, tolerance)


RELU = simple(helper.make_node("Relu", ["x"], ["y"], "the_relu"))
# What a rewrite may get wrong: a model, what is put in the place of its operator, inputs that show it.
WRONG = {
    "random": (RELU, "Relu", [helper.make_node("Abs", ["x"], ["y"])], "random inputs, seed 0"),
    "ties": (
        simple(helper.make_node("ArgMax", ["x"], ["y"], axis=1), out=TensorProto.INT64, shape=(None, 1)),
        "ArgMax",
        [helper.make_node("ArgMax", ["x"], ["y"], axis=1, select_last_index=1)],
        "zeros",
    ),
    "overflow": (
        simple(helper.make_node("Softmax", ["x"], ["y"])),
        "Softmax",
        [
            helper.make_node("Exp", ["x"], ["e"]),
            helper.make_node("Constant", [], ["axes"], value_ints=[1]),
            helper.make_node("ReduceSum", ["e", "axes"], ["s"]),
            helper.make_node("Div", ["e", "s"], ["y"]),
        ],
        "large values",
    ),
    "empty": (
        simple(helper.make_node("Identity", ["x"], ["y"])),
        "Identity",
        [
            helper.make_node("Constant", [], ["shape"], value_ints=[-1, 4]),
            helper.make_node("Constant", [], ["two"], value_ints=[4, 4]),
            helper.make_node("Size", ["x"], ["size"]),
            helper.make_node("Cast", ["size"], ["some"], to=TensorProto.BOOL),
            helper.make_node("Where", ["some", "shape", "two"], ["to"]),
            helper.make_node("Reshape", ["x", "to"], ["y"]),
        ],
        "none of each: empty",
    ),
    "another number of tokens": (
        simple(helper.make_node("Identity", ["x"], ["y"])),
        "Identity",
        [
            helper.make_node("Constant", [], ["shape"], value_ints=[4, 4]),
            helper.make_node("Reshape", ["x", "shape"], ["y"]),
        ],
        "one of each",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rewrite_is_refused(what: str) -> None:
    """The error says which output differs, by how much and where, and with which inputs."""
    model, op, nodes, shown_by = WRONG[what]
    before = model.SerializeToString(deterministic=True)
    with pytest.raises(moe_onnx.VerificationError) as caught:
        moe_onnx.rewrite_model(model, [replacing(op, *nodes)])
    error = caught.value
    assert f"with {shown_by} (x float32[" in str(error)
    assert isinstance(error, moe_onnx.ModelError)
    assert model.SerializeToString(deterministic=True) == before
    if what in ("random", "ties", "overflow"):
        assert error.output == "y"
        assert "'y'[0, " in str(error)
    if what == "random":
        x: Any = error.inputs["x"]
        gap = np.max(np.where(x < 0, -x, 0)) / np.max(x)
        assert error.difference == pytest.approx(gap, rel=1e-6)
        assert f"differs by {gap:.1e} of its largest value" in str(error)
        assert "at most 1e-05 is allowed" in str(error)


def test_a_right_rewrite_is_accepted() -> None:
    zero = helper.make_node("Constant", [], ["zero"], value_float=0.0)
    right = replacing("Relu", zero, helper.make_node("Max", ["x", "zero"], ["y"]), tolerance={})
    done = moe_onnx.rewrite_model(RELU, [right])
    assert [node.op_type for node in done.model.graph.node] == ["Constant", "Max"]
    (note,) = done.report.applied
    assert (note.by, note.node, note.operator, note.place) == ("wrong", "the_relu", "Relu", "graph")
    assert done.report.verified[0] == "random inputs, seed 0: 1 output the same to the bit"
    assert len(done.report.verified) >= 8


def test_a_tolerance_is_a_tolerance() -> None:
    """Of what a pass states and no more; sums of passes may sum."""
    more = helper.make_node("Constant", [], ["more"], value_float=1.0 + 3e-6)
    nodes = [helper.make_node("Relu", ["x"], ["r"]), more, helper.make_node("Mul", ["r", "more"], ["y"])]
    assert moe_onnx.rewrite_model(RELU, [replacing("Relu", *nodes)]).changed
    with pytest.raises(moe_onnx.VerificationError, match="no bit may"):
        moe_onnx.rewrite_model(RELU, [replacing("Relu", *nodes, tolerance={})])
    with pytest.raises(moe_onnx.VerificationError, match="at most 1e-06 is allowed"):
        moe_onnx.rewrite_model(RELU, [replacing("Relu", *nodes, tolerance={"float32": 1e-6})])


def test_what_was_0_everywhere_has_no_share() -> None:
    """Outputs of which nothing is a largest value are held to the tolerance itself."""
    model = simple(helper.make_node("Sub", ["x", "x"], ["y"], "none"))
    none = helper.make_node("Sub", ["x", "x"], ["none"])
    for more in (1e-7, 2.0):
        nodes = [helper.make_node("Constant", [], ["more"], value_float=more), none]
        wrong = replacing("Sub", *nodes, helper.make_node("Add", ["none", "more"], ["y"]))
        if more < 1:
            assert (
                "of 0, which it was everywhere" in moe_onnx.rewrite_model(model, [wrong]).report.verified[0]
            )
            continue
        with pytest.raises(moe_onnx.VerificationError, match=r"differs by 2.0e\+00, and was 0 everywhere"):
            moe_onnx.rewrite_model(model, [wrong])


def test_what_cannot_be_verified_is_not_said_to_be() -> None:
    size = helper.make_tensor_value_info("size", TensorProto.INT64, [2])
    model = simple(helper.make_node("Reshape", ["x", "size"], ["y"]), helper.make_node("Relu", ["x"], ["z"]))
    model.graph.input.append(size)
    wrong = replacing("Relu", helper.make_node("Abs", ["x"], ["z"]))
    with pytest.raises(moe_onnx.VerificationError, match="could not be verified.*'size' says sizes.*inputs="):
        moe_onnx.rewrite_model(model, [wrong])
    assert moe_onnx.rewrite_model(model, [wrong], verify=False).report.verified == []
    given = {"x": np.ones((2, 4), np.float32), "size": np.array([1, 8])}
    done = moe_onnx.rewrite_model(model, [wrong], inputs=given)  # nothing reads what is wrong
    assert done.report.verified[0].startswith("the inputs given: 1 output the same")


def test_random_operators_are_left_out() -> None:
    noise = helper.make_node("RandomNormalLike", ["x"], ["y"])
    model = simple(noise, helper.make_node("Relu", ["x"], ["z"]))
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, [None, 4]))
    zero = helper.make_node("Constant", [], ["zero"], value_float=0.0)
    right = replacing("Relu", zero, helper.make_node("Max", ["x", "zero"], ["z"]))
    done = moe_onnx.rewrite_model(model, [right])
    assert done.report.verified[0].startswith("random inputs, seed 0: 1 output")


def test_passes_must_leave_a_valid_model() -> None:
    broken = replacing("Relu", helper.make_node("Abs", ["nothing"], ["y"]))
    with pytest.raises(moe_onnx.ModelError, match=r"Pass 'wrong' made a model that is not valid ONNX"):
        moe_onnx.rewrite_model(RELU, [broken], verify=False)
    invalid = simple(helper.make_node("Relu", ["nothing"], ["y"]))
    with pytest.raises(moe_onnx.ModelError, match="The model is not valid ONNX, and is not rewritten"):
        moe_onnx.rewrite_model(invalid, ["strip"])


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        (["expnad"], "no pass 'expnad'; there are expand, legalize"),
        ([], "must be a list of some of expand"),
        ("expand", "must be a list"),
        (["strip:all"], "no option 'all'; there are functions"),
        (["expand:fast"], "no option 'fast'; there are none"),
    ],
)
def test_passes_that_are_not_there(passes: Any, said: str) -> None:
    with pytest.raises(moe_onnx.OptionError, match=said):
        moe_onnx.rewrite_model(RELU, passes)


def whole() -> ModelProto:
    """A model that every pass has something to do with."""
    gelu = helper.make_node("Gelu", ["rows"], ["z"], "gelu", doc_string="by erf")
    model = model_of(init(y="rows"), gelu, helper.make_node("Identity", ["z"], ["y"], "last"))
    neg = helper.make_function(
        "user", "Unused", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], [helper.make_opsetid("", 21)]
    )
    model.functions.append(neg)
    model.metadata_props.add(key="mine", value="kept")
    return model


# fuse has nothing to do here: test_fuse.py.
@pytest.mark.parametrize("name", [name for name in PASSES if name not in ("fold", "fuse", "contrib-moe")])
def test_every_pass_is_told_verified_and_idempotent(name: str) -> None:
    model = whole()
    before = model.SerializeToString(deterministic=True)
    done = moe_onnx.rewrite_model(model, [name])
    assert done.changed
    assert done.report.verified[0].startswith("random inputs")
    assert all(note.by == name and note.text for note in done.report.applied)
    again = moe_onnx.rewrite_model(done.model, [name])
    assert again.report.applied == []
    assert again.model is done.model
    assert again.report.verified == ["nothing was rewritten, so nothing was run"]
    assert model.SerializeToString(deterministic=True) == before
    assert [i.name for i in done.model.graph.input] == ["g", "i"]
    assert {e.key: e.value for e in done.model.metadata_props} == {"mine": "kept"}
    one = PASSES[name]
    assert one.summary
    assert one.needs
    assert one.leaves


def test_passes_follow_each_other() -> None:
    done = moe_onnx.rewrite_model(whole(), ["expand", "to_float64", "strip"])
    assert done.report.passes == ("expand", "to_float64", "strip")
    assert {note.by for note in done.report.applied} == {"expand", "to_float64", "strip"}
    assert [f.name for f in done.model.functions] == ["Erf", "Gelu"]  # Softplus is called by nothing
    assert not any(node.metadata_props for scope in scopes(done.model) for node in scope.owner.node)


def test_legalized_nodes_run_in_a_plain_session() -> None:
    import onnxruntime as ort

    done = moe_onnx.rewrite_model(model_of(init()), ["legalize"])
    (node,) = done.model.graph.node
    assert node.domain == "moe_onnx.session"
    assert [entry.value for entry in node.metadata_props] == ["legalize"]
    options = moe_onnx.register(ort.SessionOptions(), "python")
    (got,) = ort.InferenceSession(done.model.SerializeToString(), options).run(None, FEED)
    np.testing.assert_array_equal(got, WANT)


FORMS = {
    "body": ({}, "body"),
    "native": ({}, "native"),
    "float16": ({"dtype": "float16"}, "body"),
    "bfloat16": ({"dtype": "bfloat16"}, "body"),
    "drop_pad": ({"dispatch_mode": "drop_pad", "expert_capacity": 4}, "body"),
    "routing_map": ({"dispatch": "routing_map"}, "body"),
    "many experts": ({"num_experts": 24}, "body"),
}


@pytest.mark.parity
@pytest.mark.parametrize("form", FORMS)
def test_training_steps_expand_to_the_bit(form: str) -> None:
    """Whole steps with their updates, in plain standard operators: losses, gradients and parameters."""
    fields, optimize_for = FORMS[form]
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    config = moe_onnx.MoeLMConfig(**{**sizes, **fields})  # type: ignore[arg-type]
    model = moe_onnx.build_training_graph(config, assembly="step", optimize_for=optimize_for).models["step"]
    done = moe_onnx.rewrite_model(model, ["expand"])
    assert not done.model.functions
    ran = [line for line in done.report.verified if "left out" not in line]
    assert len(ran) >= 4
    assert all("the same to the bit" in line for line in ran)
    assert not apply_passes(done.model, ["expand"]).report.applied
    assert moe_onnx.rewrite_model(model, ["legalize"]).report.verified


def test_strip_takes_what_is_asked_for() -> None:
    """Functions that only functions call which nothing calls go too; the others stay."""

    def calls(name: str, callee: str) -> onnx.FunctionProto:
        node = helper.make_node(callee, ["a"], ["b"], domain="user" if callee != "Neg" else "")
        imports = [
            helper.make_opsetid("", 21),
            helper.make_opsetid("user", 1),
            helper.make_opsetid("none", 1),
        ]
        return helper.make_function("user", name, ["a"], ["b"], [node], imports)

    model = simple(helper.make_node("Used", ["x"], ["y"], "call", domain="user"), doc_string="of the graph")
    model.functions.extend(
        [calls("Used", "Inner"), calls("Inner", "Neg"), calls("A", "B"), calls("B", "Inner")]
    )
    model.opset_import.extend([helper.make_opsetid("user", 1), helper.make_opsetid("other", 3)])
    model.metadata_props.add(key="manifest", value="{}")
    mark(model.graph.node[0], "expand")
    done = apply_passes(model, ["strip:functions"]).model
    assert [f.name for f in done.functions] == ["Used", "Inner"]
    assert len(done.opset_import) == 3
    assert done.graph.doc_string
    done = apply_passes(model, ["strip"]).model
    assert [e.domain for e in done.opset_import] == ["", "user"]
    assert [[e.domain for e in f.opset_import] for f in done.functions] == [["", "user"], [""]]
    assert not done.graph.doc_string
    assert not done.graph.node[0].metadata_props
    assert [e.key for e in done.metadata_props] == ["manifest"]
    assert not apply_passes(model, ["strip:manifest"]).model.metadata_props
    np.testing.assert_array_equal(plain_run(done, {"x": np.ones((1, 4), np.float32)})[0], -np.ones((1, 4)))


def test_passes_over_onnx_ir() -> None:
    """They know their nodes' places; external tensors and training_info are as they were."""

    def apply(model: ir.Model, notes: Notes) -> None:
        for node in list(model.graph.all_nodes()):
            if node.op_type == "Neg":
                notes.applied(node, "is Abs now") if node.name != "keep" else notes.skipped(node, "kept")
                if node.name != "keep":
                    node.op_type = "Abs"
                    mark(node, "test")

    neg = helper.make_node("Neg", ["x"], ["t"], "inner")
    then = helper.make_graph([neg], "then", [], [helper.make_tensor_value_info("t", FLOAT, [None, 4])])
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    model = simple(
        helper.make_node("If", ["yes"], ["a"], "if", then_branch=then, else_branch=then),
        helper.make_node("Neg", ["a"], ["b"], "keep"),
        helper.make_node("Add", ["b", "w"], ["y"]),
        initializer=[yes, external("w", [4], checksum="abc")],
    )
    model.training_info.add().algorithm.name = "kept"
    done = apply_passes(model, [Pass("test", "", "", "", by_ir(apply))])
    assert {(n.node, n.place) for n in done.report.applied} == {
        ("inner", "then_branch of node 'if' (If)"),
        ("inner", "else_branch of node 'if' (If)"),
    }
    assert [(n.node, n.place, n.text) for n in done.report.skipped] == [("keep", "graph", "kept")]
    assert done.model.training_info == model.training_info
    assert {t.name: t for t in done.model.graph.initializer}["w"] == model.graph.initializer[1]
    inner = done.model.graph.node[0].attribute[0].g.node[0]
    assert (inner.op_type, inner.metadata_props[0].key, inner.metadata_props[0].value) == (
        "Abs",
        MARK,
        "test",
    )


def external(name: str, shape: list[int], at: int = 0, file: str = "data/w.bin", **more: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    length = 4 * int(np.prod(shape))
    for key, value in {"location": file, "offset": at, "length": length, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def with_data(folder: Path, **how: Any) -> Path:
    """A model with a node of ours and weights in ``data/w.bin``."""
    add = helper.make_node("Add", ["rows", "w"], ["y"])
    model = model_of(init(y="rows"), add, initializer=[external("w", [4], 64, **how)])
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "w.bin").write_bytes(bytes(64) + np.array([1, 2, 3, 4], np.float32).tobytes())
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_external_data_stays_beside_the_model(tmp_path: Path) -> None:
    path = with_data(tmp_path / "a")
    done = moe_onnx.rewrite_model(path, ["expand"])
    assert done.report.verified
    assert done.model.graph.initializer[0] == external("w", [4], 64)
    done.save(tmp_path / "a" / "plain.onnx")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["data", "model.onnx", "plain.onnx"]
    (tmp_path / "b").mkdir()
    for _ in range(2):  # the second time the data is there
        done.save(tmp_path / "b" / "plain.onnx")
    for place in ("a", "b"):
        session = moe_onnx.InferenceSession(tmp_path / place / "plain.onnx")
        np.testing.assert_array_equal(
            session.run(None, FEED)[0], WANT + np.arange(1.0, 5.0, dtype=np.float32)
        )
    assert moe_onnx.validate(tmp_path / "b" / "plain.onnx").ok


def test_external_data_is_lifted_by_casts(tmp_path: Path) -> None:
    """The weights stay float32 on disk, also for branches that read them; one has a ``w`` of its own."""
    other = helper.make_tensor("w", FLOAT, [4], [1.0] * 4)
    branches = []
    for name, own in (("t", []), ("e", [other])):
        value = helper.make_tensor_value_info(name, FLOAT, [None, 4])
        add = helper.make_node("Add", ["x", "w"], [name])
        branches.append(helper.make_graph([add], name, [], [value], initializer=own))
    size = helper.make_node("Size", ["x"], ["size"])
    yes = helper.make_node("Cast", ["size"], ["yes"], to=TensorProto.BOOL)
    node = helper.make_node("If", ["yes"], ["z"], "if", then_branch=branches[0], else_branch=branches[1])
    taken = helper.make_node("Mul", ["z", "w"], ["w/float64"])
    last = helper.make_node("Identity", ["w/float64"], ["y"])
    onnx.save(simple(size, yes, node, taken, last, initializer=[external("w", [4])]), tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(np.array([1, 2, 3, 4], np.float32).tobytes())
    done = moe_onnx.rewrite_model(tmp_path / "m.onnx", ["to_float64"])
    assert done.model.graph.initializer[0] == external("w", [4])
    session = moe_onnx.InferenceSession(done.save(tmp_path / "d.onnx"))
    (got,) = session.run(None, {"x": np.ones((1, 4))})
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [[2, 6, 12, 20]])
    assert not apply_passes(done.model, ["to_float64"]).report.applied


def test_external_data_that_cannot_be_brought(tmp_path: Path) -> None:
    done = moe_onnx.rewrite_model(with_data(tmp_path / "a"), ["expand"])
    (tmp_path / "b" / "data").mkdir(parents=True)
    (tmp_path / "b" / "data" / "w.bin").write_bytes(b"another")
    with pytest.raises(moe_onnx.ModelFileError, match="is another file than the model's external data"):
        done.save(tmp_path / "b" / "plain.onnx")
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["data"]
    outside = with_data(tmp_path / "c" / "in", file="../w.bin")
    far = moe_onnx.rewrite_model(outside, ["expand"], verify=False)
    with pytest.raises(moe_onnx.ModelFileError, match="outside the model's folder"):
        far.save(tmp_path / "plain.onnx")
    gone = moe_onnx.rewrite_model(with_data(tmp_path / "d", file="none.bin"), ["expand"], verify=False)
    with pytest.raises(moe_onnx.ModelFileError, match="is not there"):
        gone.save(tmp_path / "plain.onnx")
    loose = Rewritten(done.model, done.report)
    with pytest.raises(moe_onnx.ModelFileError, match="Give the model's path"):
        loose.save(tmp_path / "plain.onnx")
    assert not (tmp_path / "plain.onnx").exists()


MEMORY = """
import sys, moe_onnx
import moe_onnx.validation.rewriting.rewrite

def peak():  # kilobytes, of this process alone: ru_maxrss starts with its parent's
    lines = open("/proc/self/status").read().split("\\n")
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

before = peak()
moe_onnx.rewrite_model(sys.argv[1], ["expand", "strip"], verify=False).save(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="files with holes, and /proc")
def test_a_gigabyte_stays_on_disk(tmp_path: Path) -> None:
    path = with_data(tmp_path / "a")
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer.append(external("large", [2**28], 128))
    onnx.save(model, path)
    os.truncate(tmp_path / "a" / "data" / "w.bin", 128 + 2**30)
    run = [sys.executable, "-c", MEMORY, str(path), str(tmp_path / "a" / "plain.onnx")]
    out = subprocess.run(run, check=True, timeout=100, capture_output=True, text=True)
    assert int(out.stdout) < 20_000  # KB: the graph's, not the weights'


def command(*words: Any) -> Any:
    return CliRunner().invoke(main, ["rewrite", *map(str, words)], env={"COLUMNS": "200"})


def test_command(tmp_path: Path) -> None:
    path = with_data(tmp_path / "a")
    report = tmp_path / "report.json"
    done = command(path, "--passes", "expand,strip:docs", "-o", path.with_name("o.onnx"), "--report", report)
    assert done.exit_code == 0, done.output
    for word in ("Applied", f"ascend.moe.{INIT}", "the_node", "nodes of opset 21", "the same to the bit"):
        assert word in done.output
    said = json.loads(report.read_text())
    assert said["passes"] == ["expand", "strip:docs"]
    assert said["applied"][0]["node"] == "the_node"
    assert said["skipped"] == []
    assert said["verified"]
    assert not onnx.load(path.with_name("o.onnx")).functions


def test_command_writes_nothing_in_a_dry_run(tmp_path: Path) -> None:
    path = with_data(tmp_path / "a")
    done = command(path, "--passes", "expand", "--dry-run", "-o", tmp_path / "o.onnx", "--report", "-")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["dry_run"] is True
    assert not (tmp_path / "o.onnx").exists()
    assert command(path, "--passes", "strip", "--no-verify", "--dry-run").output.count("not verified") == 1


def test_command_leaves_the_original_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(RELU, path := tmp_path / "model.onnx")
    before = path.read_bytes()
    wrong = replacing("Relu", helper.make_node("Abs", ["x"], ["y"]))
    monkeypatch.setitem(PASSES, "wrong", wrong)
    done = command(path, "--passes", "wrong", "-o", path)
    assert done.exit_code == 1
    assert "output 'y' differs by" in done.output
    assert "the original is as it was" in done.output
    assert path.read_bytes() == before
    assert command(path, "--passes", "wrong", "-o", path, "--no-verify").exit_code == 0
    assert path.read_bytes() != before
    assert list(tmp_path.iterdir()) == [path]


def test_command_takes_inputs(tmp_path: Path) -> None:
    onnx.save(whole(), path := tmp_path / "model.onnx")
    np.savez(tmp_path / "in.npz", **FEED)
    done = command(path, "--passes", "expand", "--dry-run", "--inputs", tmp_path / "in.npz")
    assert done.exit_code == 0, done.output
    assert "the inputs given" in done.output
    done = command(path, "--passes", "expand", "--dry-run", "--inputs", path)
    assert done.exit_code == 2
    assert "is no .npz file" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--passes", "expand"], "Give -o OUT"),
        (["--passes", "expnad", "--dry-run"], "no pass 'expnad'"),
        (["--passes", ",", "--dry-run"], "must be a list"),
        (["--passes", "strip", "-o", "nowhere/o.onnx"], "no folder 'nowhere'"),
        ([], "Missing option '--passes'"),
    ],
)
def test_command_used_wrongly(words: list[str], said: str, tmp_path: Path) -> None:
    onnx.save(RELU, path := tmp_path / "model.onnx")
    done = command(path, *words)
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert command(tmp_path / "none.onnx", "--passes", "strip", "--dry-run").exit_code == 2


def test_help_has_every_pass() -> None:
    told = command("--help").output
    for one in PASSES.values():
        assert one.name in told
        assert all(f":{option} " in told for option in one.options)
    assert "Examples:" in told
    assert "Exit codes:" in told


def test_a_branch_in_a_branch_of_a_constant_does_not_end_the_process() -> None:
    """As onnxruntime 1.32 does that folds it, and would here."""
    z = helper.make_tensor_value_info("z", FLOAT, [None, None])
    branches = {"then_branch": branch("g", "t", "a"), "else_branch": branch("g", "t", "b")}
    inner = helper.make_node("If", ["yes"], ["z"], "inner", **branches)
    yes = helper.make_node("Constant", [], ["yes"], value=onnx.numpy_helper.from_array(np.array(True)))
    outer = helper.make_node(
        "If",
        ["yes"],
        ["y"],
        "outer",
        then_branch=helper.make_graph([inner], "then", [], [z]),
        else_branch=branch("g", "t", "c"),
    )
    done = moe_onnx.rewrite_model(model_of(yes, outer), ["expand"])
    assert len(done.report.applied) == 3 and done.report.verified
    assert moe_onnx.validate(done.model, level="run").ok
