"""Row orders and bucket widths: by hand, against numpy, and against the ELLBuckets that the report predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spformat as sf
from spformat.errors import UsageError
from spformat.formats import CSR, ELLBuckets
from spformat.interop.matrices import read_matrix
from spformat.preprocess import order

MATRICES = Path(__file__).parent.parent / "fixtures" / "matrices"


def random_csr(M: int, K: int, density: float, seed: int, dtype: type = np.float32) -> CSR:
    rng = np.random.default_rng(seed)
    return CSR.from_dense((rng.integers(1, 9, (M, K)) * (rng.random((M, K)) < density)).astype(dtype))


def test_by_length_by_hand() -> None:
    a = CSR.from_dense(np.array([[0, 1, 0], [1, 2, 3], [0, 0, 0], [4, 0, 0], [5, 6, 7]], np.float32))
    assert order.row_lengths(a).tolist() == [1, 3, 0, 1, 3]
    longest_first = order.by_length(a)
    assert (longest_first.tolist(), longest_first.dtype) == ([1, 4, 0, 3, 2], np.int32)
    assert order.inverse(longest_first).tolist() == [2, 0, 4, 3, 1]
    assert order.permute_rows(a, longest_first).to_dense().tolist() == [
        [1, 2, 3], [5, 6, 7], [0, 1, 0], [4, 0, 0], [0, 0, 0]
    ]  # fmt: skip


@given(M=st.integers(0, 12), K=st.integers(0, 12), density=st.floats(0, 1), seed=st.integers(0, 99), data=st.data())
def test_permuted_rows_are_numpys_and_go_back(M: int, K: int, density: float, seed: int, data: st.DataObject) -> None:
    a = random_csr(M, K, density, seed)
    p = np.array(data.draw(st.permutations(range(M))), np.int64)
    b = order.permute_rows(a, p).validate()
    np.testing.assert_array_equal(b.to_dense(), a.to_dense()[p])
    assert order.permute_rows(b, order.inverse(p)) == a


def test_stored_zeros_and_value_bits_move_along() -> None:
    bits = np.array([0x8000, 0x7FC1, 0x0000, 0x3F80], np.uint16)  # -0.0, a NaN with a payload, a stored zero, 1
    a = CSR(
        shape=(2, 4), indptr=np.array([0, 1, 4], np.int32), indices=np.array([2, 0, 1, 3], np.int32),
        data=bits.view(ml_dtypes.bfloat16),
    )  # fmt: skip
    b = order.permute_rows(a, order.by_length(a))
    assert b.indptr.tolist() == [0, 3, 4]
    assert b.data.view(np.uint16).tolist() == [0x7FC1, 0x0000, 0x3F80, 0x8000]


@pytest.mark.parametrize(
    ("row_order", "words"),
    [
        (np.array([0, 1]), "expected 3 integers, got int64 of shape"),
        (np.array([0.0, 1.0, 2.0]), "expected 3 integers, got float64"),
        (np.array([0, 1, 3]), r"expected rows in 0 \.\. 2, got 0 \.\. 3"),
        (np.array([0, -1, 2]), r"expected rows in 0 \.\. 2, got -1 \.\. 2"),
        (np.array([0, 1, 1]), "every row once, got 1 rows not at all"),
    ],
)
def test_what_is_no_permutation_is_refused(row_order: np.ndarray, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        order.permute_rows(random_csr(3, 3, 0.5, 1), row_order)


# ---------------------------------------------------------------------------------------------------- bucket widths


def check_against_built(a: CSR, parts: int) -> None:
    report = order.bucket_widths(a, parts)
    assert [w.max_width for w in report] == [1 << i for i in range(len(report))]
    for w in report:
        built = ELLBuckets.from_csr(a, column_parts=parts, max_width=w.max_width)
        assert w.ell_rows == sum(built.rows_per_bucket)
        assert w.split_rows == sum(built.split_per_bucket)
        assert w.slots == built.stored
        assert w.padding == pytest.approx((built.stored - a.nnz) / max(1, built.stored))
    # Wider buckets than the widest of the report would change nothing.
    assert sum(ELLBuckets.from_csr(a, column_parts=parts, max_width=2 * report[-1].max_width).rows_per_bucket) == (
        report[-1].ell_rows
    )


@given(
    M=st.integers(0, 9), K=st.integers(0, 40), density=st.floats(0, 1), parts=st.integers(1, 5), seed=st.integers(0, 99)
)
def test_report_predicts_what_is_built(M: int, K: int, density: float, parts: int, seed: int) -> None:
    check_against_built(random_csr(M, K, density, seed), parts)


@pytest.mark.parametrize("name", ["cora.npz", "zenios.mtx", "radixnet_n1024-l5.mtx"])
@pytest.mark.parametrize("parts", [1, 4])
def test_report_predicts_what_is_built_of_real_matrices(name: str, parts: int) -> None:
    check_against_built(read_matrix(MATRICES / name), parts)


def test_recommended_width() -> None:
    # 32 items in every row: one ELL row of 32 slots each, no padding, nothing split.
    assert order.recommended_width(read_matrix(MATRICES / "radixnet_n1024-l5.mtx")) == 32
    a = read_matrix(MATRICES / "cora.npz")
    report = order.bucket_widths(a)
    best = next(w for w in report if w.max_width == order.recommended_width(a))
    assert best.traffic == min(w.slots + w.ell_rows + w.split_rows for w in report)
    assert report[0].padding == 0
    assert order.recommended_width(CSR.from_dense(np.zeros((0, 5), np.float32))) == 1
    for parts in (0, 1025, True, 2.0, None):
        with pytest.raises(UsageError, match=r"column_parts: expected an int in 1 \.\. 1024"):
            order.bucket_widths(a, parts)  # type: ignore[arg-type]


def test_rows_of_blocks_are_no_rows() -> None:
    """A BSR has an ``indptr``, too: its block rows were put in order without an error."""
    blocks: Any = sf.convert(np.ones((4, 4), np.float32), "bsr", blocksize=(2, 2))
    calls = order.row_lengths, order.by_length, order.bucket_widths, order.recommended_width
    for call in (*calls, lambda a: order.permute_rows(a, np.arange(4))):
        with pytest.raises(UsageError, match=r"expected a CSR, got ndarray; use convert\(x, 'csr'\)"):
            call(np.eye(8))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"expected a CSR, got BSR; use convert\(x, 'csr'\)"):
            call(blocks)
    for other in (sf.convert(np.eye(4), "coo"), np.eye(4)):
        with pytest.raises(UsageError, match=f"expected a CSR, got {type(other).__name__}; use convert"):
            order.by_length(other)


@pytest.mark.gpu
def test_same_orders_on_the_device() -> None:
    a = read_matrix(MATRICES / "zenios.mtx")
    b = a.to("cuda")
    p = order.by_length(a)
    np.testing.assert_array_equal(order.by_length(b).get(), p)
    np.testing.assert_array_equal(order.inverse(order.by_length(b)).get(), order.inverse(p))
    assert order.permute_rows(b, order.by_length(b)).to("cpu") == order.permute_rows(a, p)
    for parts in (1, 4):
        assert order.bucket_widths(b, parts) == order.bucket_widths(a, parts)
