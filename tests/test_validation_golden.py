"""Golden cases for devices: every operator and mode against the per-token oracles, the same by a seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import oracles
import pytest
from routes import all_of, make_model
from test_operators import assert_same

import moe_onnx
from moe_onnx.errors import ModelFileError, OptionError
from moe_onnx.operators import ALL, BY_NAME
from moe_onnx.validation.device.golden import golden_case, golden_modes, load_golden, save_golden
from moe_onnx.validation.validate import validate

ORACLES: dict[str, Callable[..., Any]] = {
    "MoeInitRoutingV2": oracles.init_routing_v2,
    "MoeInitRoutingV2Grad": oracles.init_routing_v2_grad,
    "MoeTokenPermuteWithRoutingMap": oracles.permute,
    "MoeTokenPermuteWithRoutingMapGrad": oracles.permute_grad,
    "MoeTokenUnpermuteWithRoutingMap": oracles.unpermute,
    "MoeTokenUnpermuteWithRoutingMapGrad": oracles.unpermute_grad,
    "MoeFinalizeRoutingV2": oracles.finalize,
    "MoeFinalizeRoutingV2Grad": oracles.finalize_grad,
    "MoeGroupedMatmul": oracles.grouped_matmul,
    "MoeGroupedMatmulWeightGrad": oracles.grouped_matmul_weight_grad,
    "MoeSwiGlu": oracles.swi_glu,
    "MoeSwiGluGrad": oracles.swi_glu_grad,
    "MoeSquareSum": oracles.square_sum,
    "MoeAdamW": oracles.adam_w,
}
CASES = [(spec.name, mode) for spec in ALL for mode in golden_modes(spec.name)]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SMALL = {"tokens": 9, "experts": 5, "top_k": 2, "hidden": 3, "capacity": 3, "active": 11, "width": 4}


def split(op: str, entries: dict[str, Any]) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Inputs, attributes, outputs, None where absent."""
    spec = BY_NAME[op]
    attributes = {a.name: entries.get(f"attribute.{a.name}") for a in spec.attributes}
    attributes = {name: value.tolist() for name, value in attributes.items() if value is not None}
    inputs = [entries.get(f"input.{arg.name}") for arg in spec.inputs]
    return inputs, attributes, [entries.get(f"output.{arg.name}") for arg in spec.outputs]


def takes(op: str, dtype: str) -> bool:
    """Updates and norms are made in float32 alone."""
    return op not in ("MoeAdamW", "MoeSquareSum") or dtype == "float32"


def test_every_operator_has_cases() -> None:
    assert {op for op, _ in CASES} == set(BY_NAME)
    assert len(CASES) == 56


@all_of("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_those_of_the_oracles(dtype: str, case: tuple[str, str]) -> None:
    """With exact data to the bit, whatever the order of sums."""
    op, mode = case
    if not takes(op, dtype):
        with pytest.raises(moe_onnx.OptionError, match=f"dtype of {op} must be float32, got '{dtype}'"):
            golden_case(op, mode=mode, dtype=dtype)
        return
    entries = golden_case(op, mode=mode, dtype=dtype, exact=True, seed=3, **SMALL)
    inputs, attributes, outputs = split(op, entries)
    # The oracle of this gradient has no use for it.
    if op == "MoeTokenUnpermuteWithRoutingMapGrad":
        attributes.pop("restore_shape")
    want = ORACLES[op](*inputs, **attributes)
    wanted = list(want) if isinstance(want, tuple) else [want]
    for got, expected in zip(outputs, wanted, strict=True):
        if got is None:
            assert expected is None
        else:
            assert_same(got, expected, mode)
    assert entries[f"input.{BY_NAME[op].inputs[0].name}"].dtype == DTYPES[dtype]


def test_the_oracle_would_see_a_wrong_number() -> None:
    entries = golden_case("MoeInitRoutingV2Grad", exact=True)
    inputs, attributes, (grad,) = split("MoeInitRoutingV2Grad", entries)
    grad[0, 0] += 1
    with pytest.raises(AssertionError):
        assert_same(grad, oracles.init_routing_v2_grad(*inputs, **attributes))


@all_of("case", CASES)
def test_inexact_data_is_within_the_tolerance(case: tuple[str, str]) -> None:
    op, mode = case
    inputs, attributes, outputs = split(op, golden_case(op, mode=mode, seed=5, **SMALL))
    attributes.pop("restore_shape", None) if op.endswith("MapGrad") else None
    want = ORACLES[op](*inputs, **attributes)
    for got, expected in zip(outputs, want if isinstance(want, tuple) else [want], strict=True):
        if got is not None:
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@all_of("case", CASES)
def test_cases_are_legal_calls(case: tuple[str, str]) -> None:
    """The validator finds nothing wrong in a model of one such node, with everything constant."""
    op, mode = case
    inputs, attributes, _ = split(op, golden_case(op, mode=mode, **SMALL))
    model = make_model(op, inputs, attributes)
    del model.graph.input[:]
    for arg, value in zip(BY_NAME[op].inputs, inputs, strict=True):
        if value is not None:
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, arg.name))
    assert validate(model, target="ascend910b").ok


def test_modes_are_what_they_are_called() -> None:
    """Slots are dropped where a mode drops, experts lack where they are fewer, K is 1 without scales."""
    for op, mode in CASES:
        entries = golden_case(op, mode=mode)
        inputs, attributes, _ = split(op, entries)
        name = next(
            (n for n in ("expanded_row_idx", "sorted_indices", "out_index") if f"input.{n}" in entries), ""
        )
        index = entries.get(f"input.{name}")
        if index is not None and mode.startswith("drop_pad") and "Map" not in op:
            assert (index == -1).any() and attributes["drop_pad_mode"] % 2 == 1, (op, mode)
        if mode == "active":
            active = 33
            assert attributes.get("active_num", active) == active, op
            if "Map" in op:
                assert index is not None and (index == -1).sum() == 48 - active, op
        if mode == "fewer_experts":
            chosen = entries["input.routing_map"].sum(axis=1)
            assert set(chosen.tolist()) == {0, 1, 2}, op
        if "row_form" in mode:
            assert entries["input.permute_token_id"].tolist() == np.repeat(np.arange(24), 2).tolist()
        if op.startswith("MoeGrouped"):
            assert entries["input.group_sizes"][1] == 0 and entries["input.group_sizes"].sum() == 48
        assert (entries.get("input.scales") is None) == mode.endswith("no_scales") or "Finalize" not in op
        if mode == "dropless_by_column":
            rows = golden_case(op, mode="dropless")["input.expanded_row_idx"]
            assert index is not None and index.tolist() == rows.reshape(24, 2).T.reshape(-1).tolist()


def test_a_seed_makes_the_same_file(tmp_path: Path) -> None:
    """Byte for byte, and the same data as when this test was written."""
    arguments: dict[str, Any] = {"mode": "drop_pad", "dtype": "bfloat16", "exact": True}
    first = save_golden(tmp_path / "a.npz", "MoeInitRoutingV2Grad", seed=7, **arguments).read_bytes()
    second = save_golden(tmp_path / "b.npz", "MoeInitRoutingV2Grad", seed=7, **arguments).read_bytes()
    other = save_golden(tmp_path / "c.npz", "MoeInitRoutingV2Grad", seed=8, **arguments).read_bytes()
    assert first == second != other
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz", "c.npz"]
    entries, _ = load_golden(tmp_path / "a.npz")
    # Of the data, by every version of numpy; recorded once.
    digest = hashlib.sha256(b"".join(entries[name].tobytes() for name in sorted(entries))).hexdigest()
    assert digest == "8d84097b67f4bd2faed3a1aa1e2a868153e96d4232d35bc66e7f2301364c9a2a"


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    op = "MoeTokenUnpermuteWithRoutingMapGrad"
    arguments: dict[str, Any] = {"dtype": "bfloat16", "probs_dtype": "float32", "seed": 2, **SMALL}
    path = save_golden(tmp_path / "case.npz", op, **arguments)
    want = golden_case(op, **arguments)
    entries, meta = load_golden(path)
    assert meta == json.loads(str(want.pop("meta")))
    assert list(entries) == list(want)
    for name, value in want.items():
        assert entries[name].dtype == value.dtype
        assert entries[name].tobytes() == value.tobytes()
    # Without this package: plain numpy, the bits of bfloat16, and what they are in the meta data.
    with np.load(path) as file:
        assert file["output.permuted_tokens_grad"].dtype == np.uint16
        assert file["output.probs_grad"].dtype == np.float32
        assert json.loads(str(file["meta"]))["dtypes"]["output.permuted_tokens_grad"] == "bfloat16"
    assert (meta["operator"], meta["mode"], meta["seed"]) == (op, "dropless", 2)
    assert meta["sizes"] == SMALL
    assert "does not write rows" in meta["notes"][0]


def test_options_that_are_none_are_refused() -> None:
    for message, arguments in (
        ("operator must be one of .*MoeInitRoutingV2Grad.*got 'Moe'", {"op": "Moe"}),
        ("mode of MoeGroupedMatmul must be one of plain, transposed, got 'dropless'", {"mode": "dropless"}),
        ("dtype must be one of float32, float16, bfloat16, got 'float64'", {"dtype": "float64"}),
        ("probs_dtype must be dtype, or float32 beside bfloat16", {"probs_dtype": "float16"}),
        ("seed must be >= 0, got -1", {"seed": -1}),
        ("sizes are tokens, .*got 'token'", {"token": 3}),
        ("tokens must be an integer > 0, got 0", {"tokens": 0}),
        ("hidden must be an integer > 0, got True", {"hidden": True}),
        ("top_k must be at most experts, got 9 and 8", {"top_k": 9}),
        ("capacity must be at most tokens, got 5 and 4", {"tokens": 4}),
    ):
        options: dict[str, Any] = {"op": "MoeGroupedMatmul", **arguments}
        with pytest.raises(OptionError, match=message):
            golden_case(options.pop("op"), **options)


def test_other_files_are_refused_with_a_sentence(tmp_path: Path) -> None:
    text, empty, foreign = tmp_path / "a.npz", tmp_path / "b.npz", tmp_path / "c.npz"
    text.write_text("no zip")
    empty.write_bytes(b"")
    np.savez(foreign, x=np.zeros(3))
    cut = save_golden(tmp_path / "d.npz", "MoeGroupedMatmul")
    cut.write_bytes(cut.read_bytes()[:500])
    for path in (text, empty, foreign, cut, tmp_path / "missing.npz", tmp_path):
        with pytest.raises(ModelFileError, match="is no case that save_golden wrote"):
            load_golden(path)


def test_a_case_of_another_version_is_refused_by_all_readers(tmp_path: Path) -> None:
    entries = golden_case("MoeGroupedMatmul")
    meta = json.loads(str(entries["meta"]))
    for change, message in (({"format_version": 2}, "moe_onnx.golden 2"), ({"dtypes": 3}, "names no dtypes")):
        path = tmp_path / "later.npz"
        np.savez(path, **{**entries, "meta": np.array(json.dumps({**meta, **change}))})
        with pytest.raises(ModelFileError, match=message):
            load_golden(path)
        with pytest.raises(moe_onnx.DataError, match=message):
            moe_onnx.compare(path, path)
