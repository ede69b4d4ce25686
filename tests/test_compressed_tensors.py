"""The legacy layouts of compressed-tensors: by hand, against a plain writer of their specification, and damaged."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spformat.arrays.dtypes import nonzero_mask
from spformat.errors import ArrayError, FormatError, LimitError, PatternError, PointerError, StructureError, UsageError
from spformat.formats import CSR, Bitmask, TwoFour
from spformat.interop import compressed_tensors as ct
from spformat.preprocess import masks

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def i64(*x: int) -> np.ndarray:
    return np.array(x, np.int64)


def bitmask_group(w: np.ndarray) -> dict[str, np.ndarray]:
    """sparse-bitmask as its specification words it."""
    mask = nonzero_mask(w)
    counts = mask.sum(-1)
    return {
        "compressed": w[mask],
        "bitmask": np.packbits(mask, axis=-1, bitorder="little"),
        "row_offsets": np.cumsum(counts) - counts,
        "shape": i64(*w.shape),
    }


def two_four_group(w: np.ndarray) -> dict[str, np.ndarray]:
    """sparse-24-bitmask as its producer writes it: the two largest of every four, zeros included."""
    mask = masks.magnitude_nm(w, 2, 4)
    return {
        "compressed": w[mask].reshape(w.shape[0], w.shape[1] // 2),
        "bitmask": np.packbits(mask, axis=-1, bitorder="little"),
        "shape": i64(*w.shape).reshape(-1, 1),
    }


def sparse(shape: tuple[int, int], dtype: type, seed: int, density: float = 0.4) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.integers(-9, 10, shape) * (rng.random(shape) < density)).astype(dtype)


# -------------------------------------------------------------------------------------------------------- by hand


def test_sparse_bitmask_by_hand() -> None:
    a = ct.decode(
        ct.BITMASK,
        {
            "compressed": np.array([1, 2, 3, 4], np.float16),
            "bitmask": np.array([[0b10000001, 0b001], [0, 0], [0b00000010, 0]], np.uint8),
            "row_offsets": i64(0, 3, 3),
            "shape": i64(3, 11),
        },
    )
    assert isinstance(a, Bitmask)
    expected = np.zeros((3, 11))
    expected[0, [0, 7, 8]], expected[2, 1] = [1, 2, 3], 4
    np.testing.assert_array_equal(a.to_dense(), expected)


def test_sparse_24_by_hand() -> None:
    # Row 0: columns 1, 3 | 0, 1 (an explicit zero, and a -0.0).   Row 1: 0, 2 | 2, 3.
    values = np.array([[5, 6, 0, -0.0], [1, 2, 3, 4]]).astype(BF16)
    a = ct.decode(
        ct.TWO_FOUR,
        {
            "compressed": values,
            "bitmask": np.array([[0b0011_1010], [0b1100_0101]], np.uint8),
            "shape": np.array([[2], [8]]),
        },
    )
    assert isinstance(a, TwoFour)
    expected = np.array([[0, 5, 0, 6, 0, 0, 0, 0], [1, 0, 2, 0, 0, 0, 3, 4]])
    np.testing.assert_array_equal(a.to_dense().astype(np.float32), expected)
    assert not np.signbit(a.to_dense().astype(np.float32)).any()
    a.validate()


def test_fp8_bytes_stored_as_int8() -> None:
    w = sparse((4, 12), E4M3, 3)
    group = bitmask_group(w)
    plain = ct.decode(ct.BITMASK, group)
    group["compressed"] = group["compressed"].view(np.int8)
    assert ct.decode(ct.BITMASK, group, value_dtype="float8_e4m3fn") == plain
    assert ct.decode(ct.BITMASK, group).dtype == np.int8
    with pytest.raises(ArrayError, match="as wide as bfloat16"):
        ct.decode(ct.BITMASK, group, value_dtype="bfloat16")


def test_fp8_in_int8_reads_the_config() -> None:
    def config(**weights: object) -> dict[str, object]:
        return {"quantization_config": {"config_groups": {"group_0": {"weights": weights}}}}

    assert ct.fp8_in_int8(config(num_bits=8, type="float"))
    assert not ct.fp8_in_int8(config(num_bits=8, type="int"))
    assert not ct.fp8_in_int8({"quantization_config": {"sparsity_config": {}}})
    assert not ct.fp8_in_int8({})


def test_one_dimension_is_one_row() -> None:
    group = {
        "compressed": np.array([7, 8], np.float32), "bitmask": np.array([0b1001], np.uint8),
        "row_offsets": np.array(0), "shape": i64(5),
    }  # fmt: skip
    assert ct.decode(ct.BITMASK, group).to_dense().tolist() == [[7, 0, 0, 8, 0]]
    assert ct.dense_shape(group["shape"]) == (5,)


# ---------------------------------------------------------------------------------------------------- round trips


@given(M=st.integers(0, 9), K=st.integers(0, 40), seed=st.integers(0, 99), density=st.floats(0, 1))
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, E4M3, np.int8])
def test_sparse_bitmask(dtype: type, M: int, K: int, seed: int, density: float) -> None:
    w = sparse((M, K), dtype, seed, density)
    a = ct.decode(ct.BITMASK, bitmask_group(w))
    assert a == Bitmask.from_dense(w)
    written = ct.encode(a)
    assert list(written) == ["compressed", "bitmask", "row_offsets", "shape"]
    for name, array in bitmask_group(w).items():
        assert written[name].dtype == array.dtype
        np.testing.assert_array_equal(written[name], array)


@given(M=st.integers(0, 40), groups=st.integers(0, 20), seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", [np.float16, BF16, E4M3, np.float32, np.float64])
def test_sparse_24(dtype: type, M: int, groups: int, seed: int) -> None:
    w = sparse((M, 4 * groups), dtype, seed)
    w = masks.apply(w, masks.magnitude_nm(w, 2, 4))
    group = two_four_group(w)
    a = ct.decode(ct.TWO_FOUR, group)
    np.testing.assert_array_equal(a.to_dense().view(f"u{w.itemsize}"), w.view(f"u{w.itemsize}"))
    if dtype is np.float64:
        assert isinstance(a, Bitmask)
        return
    assert a == TwoFour.from_dense(w)
    written = ct.encode(a)
    for name, array in group.items():
        assert (written[name].dtype, written[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(written[name], array)


@pytest.mark.parametrize("order", ["logical", "ldmatrix", "fragment", "cutlass-sm80"])
def test_every_meta_order_is_written_alike(order: str) -> None:
    w = sparse((40, 36), np.float16, 4)
    w = masks.apply(w, masks.magnitude_nm(w, 2, 4))
    written = ct.encode(TwoFour.from_dense(w, meta_order=order))
    for name, array in two_four_group(w).items():
        np.testing.assert_array_equal(written[name], array)


def test_zeros_stored_in_a_bitmask_are_dropped() -> None:
    """With sparsity_structure 2:4 their producer marked two of every four, zero or not."""
    group = bitmask_group(np.array([[1, 2, 3, 4]], np.float32))
    group["compressed"] = np.array([1, 0, -0.0, 4], np.float32)
    assert ct.decode(ct.BITMASK, group) == Bitmask.from_dense(np.array([[1, 0, 0, 4]], np.float32))


def test_nan_payloads_survive() -> None:
    w = np.array([[0x7FC1, 0, 0xFF81, 0]], np.uint16).view(BF16)
    assert ct.decode(ct.BITMASK, bitmask_group(w)).to_dense().view(np.uint16).tolist() == [[0x7FC1, 0, 0xFF81, 0]]
    group = {"compressed": w[:, [0, 2]], "bitmask": np.array([[0b0101]], np.uint8), "shape": i64(1, 4)}
    assert ct.decode(ct.TWO_FOUR, group).to_dense().view(np.uint16).tolist() == [[0x7FC1, 0, 0xFF81, 0]]


# ---------------------------------------------------------------------------------------------------------- groups


def test_groups_in_both_spellings() -> None:
    old = [f"model.norm.weight.{a}" for a in ("bitmask", "compressed", "row_offsets", "shape")]
    bias = [f"model.q_proj.bias.{a}" for a in ("bitmask", "compressed", "row_offsets", "shape")]
    new = [f"model.layers.0.up_proj.{a}" for a in ("shape", "compressed", "bitmask")]
    dense = ["lm_head.weight", "model.layers.0.up_proj.weight_scale", "model.bitmask", "model.shape"]
    groups = ct.find_groups(dense + new + old + bias)
    assert [(g.name, g.layout) for g in groups] == [
        ("model.layers.0.up_proj.weight", ct.TWO_FOUR),
        ("model.norm.weight", ct.BITMASK),
        ("model.q_proj.bias", ct.BITMASK),
    ]
    assert set(groups[0].entries.values()) == set(new)
    assert set(groups[1].entries.values()) == set(old)


def test_names_are_written_in_the_later_spelling() -> None:
    group = bitmask_group(np.eye(3, dtype=np.float32))
    names = ct.entry_names("model.q_proj.weight", group)
    assert names["row_offsets"] == "model.q_proj.row_offsets"
    (found,) = ct.find_groups(names.values())
    assert (found.name, found.layout, dict(found.entries)) == ("model.q_proj.weight", ct.BITMASK, names)


def test_incomplete_groups_and_marlin_are_refused() -> None:
    with pytest.raises(FormatError, match=r"a\.b\.shape"):
        ct.find_groups(["a.b.compressed", "a.b.bitmask"])
    with pytest.raises(FormatError, match="marlin-24"):
        ct.find_groups(["a.b.weight_packed", "a.b.scale_packed", "a.b.meta"])
    # pack-quantized has a weight_packed of its own, which is left alone.
    assert ct.find_groups(["a.b.weight_packed", "a.b.weight_scale", "a.b.weight_shape"]) == ()


# ---------------------------------------------------------------------------------------------------------- damage

W = np.array([[1, 0, 2, 0, 0, 3], [0, 0, 4, 5, 0, 0]], np.float32)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"compressed": np.ones(4, np.float32)}, ArrayError, "expected 5 values"),
        ({"compressed": np.ones((5, 1), np.float32)}, ArrayError, "expected 5 values"),
        ({"compressed": np.ones(5, np.int32)}, ArrayError, "got int32"),
        ({"bitmask": np.array([[0b1100101], [0b1100]], np.uint8)}, PatternError, "beyond column 5, got one in row 0"),
        ({"bitmask": np.array([[0b100101, 0], [0b1100, 0]], np.uint8)}, ArrayError, r"shape \(2, 1\)"),
        ({"bitmask": np.array([[0b100101], [0b1100]], np.int8)}, ArrayError, "got int8"),
        ({"bitmask": np.array([[0b100101], [0b11100]], np.uint8)}, ArrayError, "expected 6 values"),
        ({"bitmask": np.array([[0b100111], [0b1000]], np.uint8)}, PointerError, r"row_offsets\[1\]: expected 4"),
        ({"row_offsets": i64(1, 3)}, PointerError, r"row_offsets\[0\]: expected 0"),
        ({"row_offsets": i64(0, 3, 5)}, ArrayError, "expected 2 integers"),
        ({"row_offsets": np.array([0.0, 3.0])}, ArrayError, "expected 2 integers"),
        ({"shape": i64(2, 14)}, ArrayError, r"bitmask: expected uint8 of shape \(2, 2\)"),
        ({"shape": i64(2, 3, 1)}, FormatError, "one or two ints"),
        ({"shape": i64(-2, 6)}, FormatError, "one or two ints"),
        ({"shape": np.array([2.0, 6.0])}, FormatError, "one or two ints"),
        ({"shape": i64(2**40, 2**40)}, LimitError, "budget"),
        (
            {"shape": i64(2**40, 0), "bitmask": np.zeros(0, np.uint8), "compressed": np.zeros(0, np.float16)},
            ArrayError,
            "expected 1099511627776 integers",
        ),
    ],
)
def test_sparse_bitmask_lies_are_named(change: dict[str, np.ndarray], error: type[Exception], words: str) -> None:
    good = bitmask_group(W)
    ct.decode(ct.BITMASK, good)
    with pytest.raises(error, match=words):
        ct.decode(ct.BITMASK, good | change)


W24 = np.array([[1, 0, 2, 0, 0, 3, 0, 0, 0, 0, 0, 9]], np.float16)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"bitmask": np.array([[0b0010_0101, 0b1001]], np.uint8)}, PatternError, "row 0, group 1: .* got 1"),
        ({"bitmask": np.array([[0b0011_1101, 0b1001]], np.uint8)}, PatternError, "row 0, group 0: .* got 3"),
        ({"bitmask": np.array([[0b0011_0101, 0b11001]], np.uint8)}, PatternError, "beyond column 11"),
        ({"compressed": np.ones((1, 5), np.float16)}, ArrayError, "expected 6 values"),
        ({"shape": i64(1, 10)}, FormatError, "columns in fours"),
        ({"shape": i64(2, 4)}, ArrayError, "bitmask"),
    ],
)  # fmt: skip
def test_sparse_24_lies_are_named(change: dict[str, np.ndarray], error: type[Exception], words: str) -> None:
    good = two_four_group(W24)
    ct.decode(ct.TWO_FOUR, good)
    with pytest.raises(error, match=words):
        ct.decode(ct.TWO_FOUR, good | change)


def test_two_four_that_straddles_rows_is_not_written() -> None:
    a = TwoFour.from_dense(np.ones((2, 2), np.float16))
    with pytest.raises(StructureError, match="multiple of 4, got 2"):
        ct.encode(a)


def test_only_the_two_formats_are_encoded() -> None:
    x = np.eye(8, dtype=np.float32)
    for a in (x, CSR.from_dense(x)):
        with pytest.raises(UsageError, match=rf"expected a Bitmask or TwoFour, got {type(a).__name__}; use convert"):
            ct.encode(a)
