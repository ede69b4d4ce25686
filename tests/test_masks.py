"""Masks against plain Python: sort by (magnitude descending, index ascending), keep the first ones."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, bits
from spformat.arrays.magnitudes import magnitude_keys, magnitudes
from spformat.errors import ArrayError, StructureError, UsageError
from spformat.formats import Dense
from spformat.preprocess import masks, ranking
from spformat.preprocess.structure import analyse

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
DTYPES = sorted(VALUE_TYPES)


def matrix(dtype: str, shape: tuple[int, int], seed: int, *, few_values: bool = False) -> np.ndarray:
    """Seeded values with negatives, zeros of both signs and, when few_values, many ties."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-3, 4, shape) if few_values else rng.integers(-120, 121, shape)
    x = numbers.astype(np.float32).astype(VALUE_TYPES[dtype].numpy)
    if dtype != "int8":
        x[(numbers == 0) & (rng.random(shape) < 0.5)] = -0.0
    return x


def best(sizes: list[float], count: int) -> set[int]:
    """Places of the ``count`` largest, the lower place first among equals."""
    return set(sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))[:count])


def slow_units(x: np.ndarray, R: int, C: int, power: int) -> list[list[float]]:
    """Sum of |x|**power over each R x C block, exactly rounded."""
    M, K = x.shape
    size = [[abs(float(v)) ** power for v in row] for row in x]
    return [
        [
            math.fsum(size[i][j] for i in range(r, min(r + R, M)) for j in range(c, min(c + C, K)))
            for c in range(0, K, C)
        ]
        for r in range(0, M, R)
    ]


def slow_nm(x: np.ndarray, n: int, m: int, L: int = 1, power: int = 1) -> np.ndarray:
    mask = np.zeros(x.shape, bool)
    for q, sizes in enumerate(slow_units(x, L, 1, power)):
        for c in range(0, x.shape[1], m):
            for j in best(sizes[c : c + m], n):
                mask[q * L : (q + 1) * L, c + j] = True
    return mask


def slow_blocks(x: np.ndarray, R: int, C: int, kept: int, power: int) -> np.ndarray:
    mask = np.zeros(x.shape, bool)
    sizes = slow_units(x, R, C, power)
    wide = len(sizes[0]) if sizes else 0
    for flat in best([s for row in sizes for s in row], kept):
        r, c = divmod(flat, wide)
        mask[r * R : (r + 1) * R, c * C : (c + 1) * C] = True
    return mask


# ------------------------------------------------------------------------------------------------ written by hand


def test_two_four_by_hand() -> None:
    w = np.array([[1, -3, 2, 0, 0, 0, 5, 0], [4, 4, 4, 4, 0, 0, 0, 0]], np.float32)
    expected = [[0, 1, 1, 0, 1, 0, 1, 0], [1, 1, 0, 0, 1, 1, 0, 0]]
    np.testing.assert_array_equal(masks.magnitude_nm(w, 2, 4), np.array(expected, bool))


def test_last_window_is_narrower_and_keeps_what_it_can() -> None:
    w = np.array([[1, 2, 3, 4, 5, 6, 7]], np.float32)
    np.testing.assert_array_equal(masks.magnitude_nm(w, 2, 4), [[False, False, True, True, False, True, True]])
    np.testing.assert_array_equal(masks.magnitude_nm(w, 2, 6), [[False, False, False, False, True, True, True]])
    np.testing.assert_array_equal(masks.magnitude_nm(w, 3, 16), [[False] * 4 + [True] * 3])


def test_vectors_by_hand() -> None:
    # Group 0 (rows 0, 1): l2 of the columns 3, sqrt(8), 2, 0; l1: 3, 4, 2, 0. Group 1 (row 2 alone): 1, 0, 0, 2.
    w = np.array([[3, 2, 2, 0], [0, -2, 0, 0], [1, 0, 0, -2]], np.float32)
    l2 = masks.magnitude_vector_nm(w, 1, 4, 2)
    np.testing.assert_array_equal(l2, np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]], bool))
    l1 = masks.magnitude_vector_nm(w, 1, 4, 2, norm="l1")
    np.testing.assert_array_equal(l1, np.array([[0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]], bool))


def test_blocks_by_hand() -> None:
    w = np.array([[1, 1, 0, 0, 9], [1, 1, 0, 3, 0], [0, 0, 2, 0, 0]], np.float32)
    # 2 x 2 blocks, squares: [4, 9, 81] and [0, 4, 0]; 50 % of six: three stay; of the two 4s the first.
    expected = [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(masks.magnitude_blocks(w, (2, 2), 0.5), np.array(expected, bool))


def test_unstructured_ties_stay_in_row_major_order() -> None:
    w = np.array([[1, 2, 1], [-1, 0, 1]], np.float32)
    np.testing.assert_array_equal(masks.magnitude(w, 0.5), np.array([[1, 1, 1], [0, 0, 0]], bool))
    np.testing.assert_array_equal(masks.magnitude(w, 2 / 6), np.array([[1, 1, 1], [1, 0, 0]], bool))


def test_sparsity_counts_are_rounded() -> None:
    w = np.arange(1, 101, dtype=np.float64).reshape(10, 10)
    # 0.29 * 100 is 28.999999999999996 in binary floating point: 29 values go.
    assert [int(masks.magnitude(w, s).sum()) for s in (0, 0.29, 0.5, 1)] == [100, 71, 50, 0]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_a_sparsity_of_few_bits_counts_as_the_number_that_it_is(kind: Any) -> None:
    """round(float16(0.7) * 3600) was 2520 in float16 instead of 2521, and of a large matrix infinity."""
    w = np.arange(3600, dtype=np.float32).reshape(60, 60)
    share = kind(0.7)
    assert masks.magnitude(w, share).sum() == 3600 - round(float(share) * 3600)
    assert (masks.magnitude_blocks(w, (1, 1), share) == masks.magnitude(w, float(share))).all()
    assert masks.prune(np.ones((300, 300), np.float32), "csr", sparsity=kind(0.5)).nnz == 45000


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64])
def test_parameters_may_be_integers_of_numpy(kind: Any) -> None:
    w = np.random.default_rng(0).normal(size=(130, 300)).astype(np.float32)
    n, m, length = kind(2), kind(4), kind(100)
    assert (masks.magnitude_nm(w, n, m) == masks.magnitude_nm(w, 2, 4)).all()
    assert (masks.magnitude_vector_nm(w, n, m, length) == masks.magnitude_vector_nm(w, 2, 4, 100)).all()
    assert (masks.magnitude_blocks(w, (length, m), 0.5) == masks.magnitude_blocks(w, (100, 4), 0.5)).all()
    assert masks.prune_vector_nm(w, n, m, length) == masks.prune_vector_nm(w, 2, 4, 100)


def test_int8_ranks_by_absolute_value() -> None:
    w = np.array([[-128, 127, -2, 1]], np.int8)
    np.testing.assert_array_equal(masks.magnitude_nm(w, 1, 4), [[True, False, False, False]])
    np.testing.assert_array_equal(masks.magnitude_nm(w, 3, 4), [[True, True, True, False]])


def test_subnormals_beat_zeros_of_both_signs() -> None:
    w = np.array([[-0.0, 0.0, -5e-324, 0.0]])
    np.testing.assert_array_equal(masks.magnitude_nm(w, 1, 4), [[False, False, True, False]])


def test_norms_of_huge_float64_do_not_overflow() -> None:
    w = np.array([[1e200, 3e200, 2e200, -1.7e308]])
    np.testing.assert_array_equal(masks.magnitude_vector_nm(w, 1, 2, 1), [[False, True, False, True]])
    np.testing.assert_array_equal(masks.magnitude_blocks(w, (1, 1), 0.5), [[False, True, False, True]])
    tiny = np.array([[1e-200, 3e-200, 2e-200, 1e-200]])
    np.testing.assert_array_equal(masks.magnitude_vector_nm(tiny, 1, 2, 1), [[False, True, True, False]])


def test_how_far_below_the_largest_float64_is_ranked() -> None:
    """The limits that the docstring of ``masks`` states: one scale for the matrix, whose largest value is in row 1."""
    for largest in (1.0, 1.99, 1e100):
        for norm, share in (("l2", 1e-153), ("l1", 1e-200), ("l1", 1e-306)):
            w = np.array([[0.0, 0.0, 0.9 * share, share], [1.0, 0.0, 0.0, 0.0]]) * largest
            wanted = [[False, False, False, True], [True, False, False, False]]
            np.testing.assert_array_equal(masks.magnitude_vector_nm(w, 1, 4, 1, norm=norm), wanted)
            np.testing.assert_array_equal(masks.magnitude_blocks(w, (1, 1), 0.75, norm=norm), wanted)


def test_apply_keeps_bits_and_writes_plus_zero() -> None:
    w = np.array([[-0.0, -1.0, np.nan, -2.0]], np.float32)
    w.view(np.uint32)[0, 2] = 0x7FC00123  # a NaN with a payload
    out = masks.apply(w, np.array([[True, False, True, True]]))
    assert out.view(np.uint32).tolist() == [[0x80000000, 0, 0x7FC00123, 0xC0000000]]
    assert w[0, 1] == -1.0  # a copy


def test_dense_goes_in_and_comes_out() -> None:
    w = Dense.from_dense(np.array([[1, 2, 3, 4]], np.float16))
    out = masks.apply(w, masks.magnitude_nm(w, 2, 4))
    assert isinstance(out, Dense)
    assert out.data.tolist() == [[0, 0, 3, 4]]


# ------------------------------------------------------------------------------------------------- against slow truth


@given(
    dtype=st.sampled_from(DTYPES), M=st.integers(0, 9), K=st.integers(0, 40), m=st.integers(1, 20),
    seed=st.integers(0, 99), few=st.booleans(), data=st.data(),
)  # fmt: skip
def test_nm_and_vectors(dtype: str, M: int, K: int, m: int, seed: int, few: bool, data: st.DataObject) -> None:
    n, L = data.draw(st.integers(1, m)), data.draw(st.integers(1, 5))
    x = matrix(dtype, (M, K), seed, few_values=few)
    np.testing.assert_array_equal(masks.magnitude_nm(x, n, m), slow_nm(x, n, m))
    np.testing.assert_array_equal(masks.magnitude_vector_nm(x, n, m, L), slow_nm(x, n, m, L, power=2))
    np.testing.assert_array_equal(masks.magnitude_vector_nm(x, n, m, L, norm="l1"), slow_nm(x, n, m, L))


@given(
    dtype=st.sampled_from(DTYPES), M=st.integers(0, 12), K=st.integers(0, 20), R=st.integers(1, 5), C=st.integers(1, 7),
    sparsity=st.sampled_from([0, 0.1, 0.25, 0.5, 0.9, 1]), seed=st.integers(0, 99), few=st.booleans(),
)  # fmt: skip
def test_blocks_and_unstructured(
    dtype: str, M: int, K: int, R: int, C: int, sparsity: float, seed: int, few: bool
) -> None:
    x = matrix(dtype, (M, K), seed, few_values=few)
    total = -(-M // R) * -(-K // C)
    kept = total - round(sparsity * total)
    np.testing.assert_array_equal(masks.magnitude_blocks(x, (R, C), sparsity), slow_blocks(x, R, C, kept, 2))
    kept = x.size - round(sparsity * x.size)
    np.testing.assert_array_equal(masks.magnitude(x, sparsity), slow_blocks(x, 1, 1, kept, 1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_panels_do_not_show(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix(dtype, (37, 53), 3, few_values=True)

    def all_masks() -> list[np.ndarray]:
        return [
            masks.magnitude(x, 0.6),
            masks.magnitude_nm(x, 3, 8),
            masks.magnitude_vector_nm(x, 2, 8, 4),
            masks.magnitude_blocks(x, (5, 3), 0.6),
        ]

    whole = all_masks()
    monkeypatch.setattr(ranking, "HOST_CHUNK", 100)  # one or two rows at a time
    for a, b in zip(whole, all_masks(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [BF16, np.float16, E4M3, E5M2])
def test_bits_are_monotone_in_the_magnitude(dtype: type) -> None:
    """All finite values of a small type: the order of the keys is the order of the numbers."""
    every = np.arange(1 << (8 * np.dtype(dtype).itemsize), dtype=f"u{np.dtype(dtype).itemsize}").view(dtype)
    finite = every[np.isfinite(every.astype(np.float32))]
    sizes = np.abs(finite.astype(np.float64))
    keys = magnitude_keys(finite.reshape(1, -1))[0]
    order = np.argsort(keys, kind="stable")
    assert (np.diff(sizes[order]) >= 0).all()
    assert len(np.unique(keys)) == len(np.unique(sizes))
    np.testing.assert_array_equal(magnitudes(finite.reshape(1, -1))[0], sizes)


# --------------------------------------------------------------------------------------------------------- refusals


def every_mask(w: np.ndarray, **kw: str) -> list[np.ndarray]:
    return [
        masks.magnitude(w, 0.75, **kw),
        masks.magnitude_nm(w, 1, 4, **kw),
        masks.magnitude_vector_nm(w, 1, 4, 1, **kw),
        masks.magnitude_blocks(w, (1, 1), 0.75, **kw),
    ]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16, E5M2])
def test_nonfinite_values_are_refused_or_kept_first(dtype: type) -> None:
    w = np.array([[4, -np.inf, 3, 2], [1, 2, np.inf, np.nan]]).astype(dtype)
    with pytest.raises(StructureError, match="row 0, column 1") as e:
        masks.magnitude_nm(w, 1, 4)
    assert (e.value.unit, e.value.count, e.value.first) == ("value", 3, (0, 1))
    for mask in every_mask(w, nonfinite="keep")[1:3]:
        np.testing.assert_array_equal(mask, np.array([[0, 1, 0, 0], [0, 0, 0, 1]], bool))
    for mask in every_mask(w, nonfinite="keep")[0::3]:
        np.testing.assert_array_equal(mask, np.array([[0, 1, 0, 0], [0, 0, 0, 1]], bool))


def test_nan_payloads_and_signs_do_not_rank() -> None:
    w = np.array([[0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0x7F800000]], np.uint32).view(np.float32)
    for mask in every_mask(w, nonfinite="keep"):
        np.testing.assert_array_equal(mask, [[True, False, False, False]])


def test_e4m3_has_nan_but_no_infinity() -> None:
    w = np.array([[0x7E, 0xFF, 0x7F, 0x00]], np.uint8).view(E4M3)
    with pytest.raises(StructureError) as e:
        masks.magnitude(w, 0.5)
    assert (e.value.count, e.value.first) == (2, (0, 1))
    np.testing.assert_array_equal(masks.magnitude_nm(w, 3, 4, nonfinite="keep"), [[True, True, True, False]])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda w: masks.magnitude_nm(w, 0, 4), r"n: expected an int in 1 \.\. 4, got 0"),
        (lambda w: masks.magnitude_nm(w, 5, 4), r"n: expected an int in 1 \.\. 4, got 5"),
        (lambda w: masks.magnitude_nm(w, 2, 257), r"m: expected an int in 1 \.\. 256, got 257"),
        (lambda w: masks.magnitude_nm(w, 2.0, 4), "n: expected an int"),
        (lambda w: masks.magnitude_vector_nm(w, 2, 4, 513), "vector_length: expected an int"),
        (lambda w: masks.magnitude_vector_nm(w, 2, 4, 2, norm="max"), "norm: expected 'l1' or 'l2'"),
        (lambda w: masks.magnitude_blocks(w, (0, 2), 0.5), r"blocksize\[0\]"),
        (lambda w: masks.magnitude_blocks(w, (2, 2), 1.5), "sparsity: expected a number"),
        (lambda w: masks.magnitude(w, float("nan")), "sparsity: expected a number"),
        (lambda w: masks.magnitude(w, 0.5, nonfinite="drop"), "nonfinite: expected"),
        (lambda w: masks.apply(w, np.ones((2, 3), bool)), r"mask: expected bool of shape \(4, 4\)"),
        (lambda w: masks.apply(w, np.ones((4, 4), np.uint8)), "got uint8 of shape"),
    ],
)
def test_illegal_parameters_are_named(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=words):
        call(np.ones((4, 4), np.float32))


def test_other_dtypes_and_ranks_are_refused() -> None:
    with pytest.raises(StructureError, match="complex64"):
        masks.magnitude(np.ones((2, 2), np.complex64), 0.5)
    with pytest.raises(UsageError, match="matrix"):
        masks.magnitude(np.ones(4, np.float32), 0.5)


@pytest.mark.parametrize("x", [sf.convert(np.eye(4, dtype=np.float32), "csr"), sp.csr_array(np.eye(4)), [[1.0]]])
def test_what_is_no_array_is_named_with_what_to_do(x: Any) -> None:
    calls = {
        "mask": lambda: masks.magnitude(x, 0.5), "prune": lambda: masks.prune(x, "two-four"),
        "inspect": lambda: analyse(x), "csr": lambda: sf.CSR.from_dense(x),
    }  # fmt: skip
    for where, call in calls.items():
        text = rf"^{where}: expected a numpy or CuPy array \[M, K\], got {type(x).__name__}; use x\.to_dense\(\), x\.to"
        with pytest.raises(ArrayError, match=text):
            call()


def test_byte_order_and_strides_do_not_matter() -> None:
    x = matrix("float32", (6, 16), 5)
    expected = masks.magnitude_nm(x, 2, 4)
    np.testing.assert_array_equal(masks.magnitude_nm(x.astype(">f4"), 2, 4), expected)
    np.testing.assert_array_equal(masks.magnitude_nm(np.asfortranarray(x), 2, 4), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pruning_error_is_the_difference_of_the_products(dtype: str) -> None:
    """NM-SpMM's, with the weight on the left: of the values themselves, and of products with inputs."""
    w = matrix(dtype, (37, 50), 3)
    kept = masks.apply(w, masks.magnitude_nm(w, 2, 4))
    x = matrix(dtype, (50, 6), 4)
    exact, pruned, inputs = (a.astype(np.float64) for a in (w, kept, x))
    alone, with_inputs = masks.error(w, kept), masks.error(Dense.from_dense(w), Dense.from_dense(kept), x)
    for e, C, D in ((alone, exact, pruned), (with_inputs, exact @ inputs, pruned @ inputs)):
        assert (e.zeroed, e.elements) == (int(((exact != 0) & (pruned == 0)).sum()), C.size)
        assert e.mean == pytest.approx(np.abs(C - D).mean(), rel=1e-12)
        assert e.norm_share == pytest.approx(np.linalg.norm(C - D) / np.linalg.norm(C), rel=1e-12)
    assert alone.mean > 0
    nothing = masks.error(w, w)
    assert (nothing.zeroed, nothing.mean, nothing.norm_share) == (0, 0, 0)
    assert masks.error(w[:0], w[:0]).mean == 0


def test_the_pruning_error_of_what_does_not_belong_together() -> None:
    w = np.ones((4, 6), np.float32)
    with pytest.raises(UsageError, match=r"two forms of one matrix, got shapes \(4, 6\) and \(4, 5\)"):
        masks.error(w, w[:, :5])
    with pytest.raises(UsageError, match=r"x: expected an array of inputs of shape \(6, N\), got \(4, 6\)"):
        masks.error(w, w, w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_mask_on_the_device(dtype: str) -> None:
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((130, 333)) * 20).astype(VALUE_TYPES[dtype].numpy)
    y = cupy.asarray(bits(x)).view(x.dtype)
    for f in (
        lambda w: masks.magnitude(w, 0.7),
        lambda w: masks.magnitude_nm(w, 2, 4),
        lambda w: masks.magnitude_vector_nm(w, 4, 16, 8),
        lambda w: masks.magnitude_blocks(w, (16, 8), 0.5),
    ):
        np.testing.assert_array_equal(f(x), f(y).get())
    mask = masks.magnitude_nm(x, 2, 4)
    np.testing.assert_array_equal(bits(masks.apply(x, mask)), bits(masks.apply(y, cupy.asarray(mask))).get())
    here, there = masks.error(x, masks.apply(x, mask)), masks.error(y, masks.apply(y, cupy.asarray(mask)))
    assert (there.zeroed, there.mean) == (here.zeroed, pytest.approx(here.mean))


def test_parameters_of_another_type() -> None:
    x = np.eye(4, dtype=np.float32)
    for blocksize in (3, (2,), "2x2", None):
        with pytest.raises(UsageError, match="blocksize: expected two ints"):
            masks.magnitude_blocks(x, blocksize, 0.5)  # type: ignore[arg-type]
    for sparsity in ("0.5", None, float("nan"), True, np.True_):
        with pytest.raises(UsageError, match=r"sparsity: expected a number in 0 \.\. 1"):
            masks.magnitude(x, sparsity)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown format '3'"):
        masks.prune(x, 3, sparsity=0.5)  # type: ignore[arg-type]
    for inputs in (3, [1.0], "x"):
        with pytest.raises(UsageError, match=r"error: x: expected an array of inputs of shape \(4, N\)"):
            masks.error(x, x, inputs)  # type: ignore[arg-type]
