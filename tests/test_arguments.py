"""Whatever is passed to the numpy functions: a result, or an error of ours that names the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from routes import NATIVE, run

import moe_onnx

GRAD = np.arange(12, dtype=np.float32).reshape(6, 2)
INDEX = np.array([4, 1, 5, 3, 0, 2], np.int32)
WANT = [[10, 12], [16, 18], [4, 6]]


def call(grad: Any = GRAD, index: Any = INDEX, top_k: Any = 2, **attributes: Any) -> Any:
    return moe_onnx.moe_init_routing_v2_grad(grad, index, top_k=top_k, **attributes)


@pytest.mark.parametrize(
    "grad",
    [GRAD.tolist(), GRAD.astype(">f4"), np.asfortranarray(GRAD), GRAD[::-1][::-1], memoryview(GRAD)],
    ids=["list", "other byte order", "fortran", "reversed twice", "memoryview"],
)
def test_what_reads_as_an_array_is_one(grad: Any) -> None:
    got = call(grad)
    assert got.tolist() == WANT
    assert got.dtype.isnative


def test_read_only_arrays_and_other_byte_orders_of_indices() -> None:
    index = INDEX.astype(">i4")
    index.flags.writeable = False
    assert call(index=index).tolist() == WANT


@pytest.mark.parametrize("top_k", [np.int64(2), np.uint8(2), np.array(2)])
def test_integers_of_numpy_are_integers(top_k: Any) -> None:
    assert call(top_k=top_k).tolist() == WANT


@pytest.mark.parametrize("top_k", [True, 2.0, "2", None, [2], 2**63, -(2**70), 0, -1])
def test_what_is_no_count_is_refused(top_k: Any) -> None:
    with pytest.raises(moe_onnx.AttributeValueError, match="top_k"):
        call(top_k=top_k)


@pytest.mark.parametrize(
    "grad",
    [[[1.0], [1.0, 2.0]], GRAD.astype(object), "text", GRAD.astype(complex), np.zeros(6, "f4,f4"), object()],
    ids=["ragged", "objects", "text", "complex", "structured", "no array"],
)
def test_what_is_no_tensor_is_refused(grad: Any) -> None:
    with pytest.raises(moe_onnx.DtypeError, match="grad_expanded_x"):
        call(grad)


def test_a_mask_is_not_dropped_silently() -> None:
    with pytest.raises(moe_onnx.DtypeError, match="masked"):
        call(np.ma.masked_array(GRAD, GRAD > 3))


@pytest.mark.parametrize("scalar", [np.float32(1), np.ones(6, np.float32), GRAD[None, None]])
def test_ranks(scalar: Any) -> None:
    with pytest.raises(moe_onnx.RankError, match="grad_expanded_x.*2-D"):
        call(scalar)


def test_top_k_is_free_where_there_are_no_tokens() -> None:
    assert call(GRAD[:0], INDEX[:0], 2**62).shape == (0, 2)


@pytest.mark.parametrize("flag", [True, np.True_, 1, np.int8(1)])
def test_booleans_may_be_zero_or_one(flag: Any) -> None:
    token = np.array([0, 1, 2, 0, 1, 2], np.int32)
    got, _ = moe_onnx.moe_token_unpermute_with_routing_map_grad(
        GRAD[:3], INDEX, token, drop_and_pad=flag, restore_shape=np.array([3, 2])
    )
    assert got[4].tolist() == GRAD[0].tolist()


@pytest.mark.parametrize("flag", ["yes", 2, 0.0, [True]])
def test_what_is_no_boolean_is_refused(flag: Any) -> None:
    with pytest.raises(moe_onnx.AttributeValueError, match="drop_and_pad"):
        moe_onnx.moe_token_unpermute_with_routing_map_grad(GRAD[:3], INDEX, INDEX, drop_and_pad=flag)


@pytest.mark.parametrize("restore", ["ab", 3, [1.5, 2], [3], [3, 3], [2**70, 2]])
def test_restore_shape_is_two_sizes(restore: Any) -> None:
    with pytest.raises((moe_onnx.AttributeValueError, moe_onnx.ShapeError), match="restore_shape"):
        moe_onnx.moe_token_unpermute_with_routing_map_grad(
            GRAD[:3], INDEX, INDEX, drop_and_pad=True, restore_shape=restore
        )


@pytest.mark.parametrize(("rows", "with_map"), [(7, False), (7, True), (3, False), (2, True)])
def test_companions_are_checked_without_probs_too(rows: int, with_map: bool) -> None:
    """Four slots; the map selects two pairs, but slots name rows 2 and 3."""
    index = np.array([0, 1, 2, 3], np.int32)
    routing_map = np.array([[True, False], [False, True]]) if with_map else None
    for name in ("reference", "kernel", "python", "body", *NATIVE):
        inputs = [GRAD[:2], index, index, routing_map, np.ones((rows, 2), np.float32)]
        with pytest.raises((moe_onnx.ShapeError, moe_onnx.BodyCheckError), match="permuted_tokens"):
            run("MoeTokenUnpermuteWithRoutingMapGrad", name, inputs, {"drop_and_pad": 0})


def test_missing_comes_before_what_is_wrong_with_the_rest() -> None:
    with pytest.raises(moe_onnx.MissingInputError, match="expanded_row_idx"):
        call(np.ma.masked_array(GRAD, GRAD > 3), None)


def test_an_array_that_cannot_be_read_is_named() -> None:
    class NeedsGrad:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise RuntimeError("call detach() first")

    with pytest.raises(moe_onnx.DtypeError, match=r"grad_expanded_x.*detach"):
        call(NeedsGrad())


def test_the_largest_expert_id() -> None:
    expert = np.array([[2**31 - 1]], np.int32)
    assert moe_onnx.moe_init_routing_v2(GRAD[:1], expert)[1].tolist() == [0]


def test_rows_are_named_by_int32() -> None:
    x, expert = GRAD[:3], np.zeros((3, 1), np.int32)
    with pytest.raises(moe_onnx.AttributeValueError, match="expert_num"):
        moe_onnx.moe_init_routing_v2(x, expert, expert_num=2**31)
    with pytest.raises(moe_onnx.LimitError, match=r"expert_num \* expert_capacity"):
        moe_onnx.moe_init_routing_v2(x, expert, expert_num=2**31 - 1, expert_capacity=2, drop_pad_mode=1)


def test_a_misspelt_option_lists_the_legal_ones() -> None:
    with pytest.raises(moe_onnx.OptionError, match="'auto', 'native', 'python', 'body', got 'pyhton'"):
        moe_onnx.InferenceSession(b"", kernels="pyhton")
