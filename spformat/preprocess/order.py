"""Row orders for load balance, and the width of ELL buckets. No function here changes or loses a value.

A row order is an index array [M]: row i in the new order is row ``row_order[i]`` of the matrix. It is never part of a
format. A caller that permutes the rows of A permutes C back with ``inverse``, or gives the order to a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays.dtypes import bits
from ..arrays.library import Array, ceil_div, index_dtype, namespace, on_own_device
from ..arrays.segments import counts_of, pointer, rank_in_row, rows_of
from ..errors import UsageError
from ..formats.csr import CSR
from ..formats.ell_buckets import MAX_WIDTH, ELLBuckets
from ..limits import check_bytes


@on_own_device
def row_lengths(a: CSR) -> Array:
    """int64[M]: stored items of each row, stored zeros included."""
    p = _csr(a).ensure_valid().indptr.astype(np.int64)
    return p[1:] - p[:-1]


def _csr(a: CSR) -> CSR:
    """``a``; UsageError for any other format: a BSR has an ``indptr``, too, of its rows of blocks."""
    if not isinstance(a, CSR):
        raise UsageError(f"expected a CSR, got {type(a).__name__}; use convert(x, 'csr')")
    return a


@on_own_device
def by_length(a: CSR) -> Array:
    """INDEX[M]: the row order with the longest rows first; rows of equal length keep their order.

    Then neighbouring warps have equal work, and the longest rows start first (Sputnik's row swizzle, SC 2020).
    """
    lengths = row_lengths(a)
    order = namespace(lengths).argsort(-lengths, kind="stable")
    return order.astype(index_dtype(a.shape[0] - 1))


@on_own_device
def inverse(row_order: Array) -> Array:
    """The order that reverses ``row_order``. UsageError unless it has each of 0 .. M-1 once."""
    xp = namespace(row_order)
    _check_permutation(row_order, row_order.size)
    out = xp.empty_like(row_order)
    out[row_order] = xp.arange(row_order.size, dtype=row_order.dtype)
    return out


@on_own_device
def permute_rows(a: CSR, row_order: Array) -> CSR:
    """The matrix whose row i is row ``row_order[i]`` of ``a``, every item with its bits; O(M + nnz). Validates ``a``.

    UsageError unless ``row_order`` is on the device of ``a`` and holds each of 0 .. M-1 once.
    """
    if namespace(row_order) is not namespace(_csr(a).indptr):
        raise UsageError(f"row_order: expected an array on {a.device}, as the matrix")
    _check_permutation(row_order, a.shape[0])
    a.ensure_valid()  # the result is marked
    indptr = pointer(row_lengths(a)[row_order], a.nnz)
    rows = rows_of(indptr, a.nnz)
    item = a.indptr[row_order[rows]] + rank_in_row(indptr, rows)
    data = bits(a.data)[item].view(a.dtype)
    return CSR.trusted(shape=a.shape, indptr=indptr, indices=a.indices[item], data=data)


def _check_permutation(row_order: Array, M: int) -> None:
    if row_order.shape != (M,) or row_order.dtype.kind not in "iu":
        raise UsageError(f"row_order: expected {M} integers, got {row_order.dtype} of shape {row_order.shape}")
    if M == 0:
        return
    low, high = int(row_order.min()), int(row_order.max())  # synchronize!
    if low < 0 or high >= M:
        raise UsageError(f"row_order: expected rows in 0 .. {M - 1}, got {low} .. {high}")
    missing = int((counts_of(row_order, M) == 0).sum())  # synchronize!
    if missing:
        raise UsageError(f"row_order: expected every row once, got {missing} rows not at all")


@dataclass(frozen=True)
class BucketWidth:
    """The size of ELLBuckets with this ``max_width``, computed without building it."""

    max_width: int
    ell_rows: int
    """R: each writes one row of C."""
    split_rows: int
    """How many of the ELL rows belong to split rows, which add to C instead of storing."""
    slots: int
    """S: each slot reads one row of B, or is padding."""
    padding: float
    """(S - nnz) / S, 0 for an empty matrix."""

    @property
    def traffic(self) -> int:
        """Rows of B and C that are read or written: S + R, plus the ELL rows of split rows, which also read C."""
        return self.slots + self.ell_rows + self.split_rows


@on_own_device
def bucket_widths(a: CSR, column_parts: int = 1) -> tuple[BucketWidth, ...]:
    """One entry for every useful max_width: 1, 2, 4, .. up to the first that holds the longest row of a part.

    column_parts: 1 .. 1024, as in ELLBuckets; UsageError outside. O(nnz + widths * nonempty (row, part) pairs).
    """
    column_parts = ELLBuckets.resolve_params({"column_parts": column_parts})["column_parts"]
    xp, (M, K) = namespace(_csr(a).indptr), a.ensure_valid().shape
    check_bytes(8 * M * column_parts, "row lengths of all column parts")
    part_size = max(1, ceil_div(K, column_parts))
    counts = counts_of(a.rows() * column_parts + a.indices // part_size, M * column_parts)
    nonempty = xp.flatnonzero(counts)  # synchronize!
    row, length = nonempty // column_parts, counts[nonempty]
    longest = int(length.max()) if length.size else 1  # synchronize!
    powers = [1 << i for i in range((min(longest, MAX_WIDTH) - 1).bit_length() + 1)]
    fitting = xp.searchsorted(xp.asarray(powers), length)  # log2 of the narrowest bucket that is wide enough

    out = []
    for width in powers:
        chunks = -(-length // width)
        slots = int(xp.where(length > width, chunks * width, xp.asarray(1) << fitting).sum())  # synchronize!
        ell_rows_of = xp.bincount(row, weights=chunks, minlength=M) if row.size else xp.zeros(M)
        split = int(ell_rows_of[ell_rows_of > 1].sum())
        padding = (slots - a.nnz) / slots if slots else 0.0
        out.append(BucketWidth(width, int(chunks.sum()), split, slots, padding))
    return tuple(out)


def recommended_width(a: CSR, column_parts: int = 1) -> int:
    """The max_width of least ``traffic``, the narrower one among equals.

    It models the memory traffic for many columns of B, where the indices hardly matter. Measure if it is important.
    """
    return min(bucket_widths(a, column_parts), key=lambda w: (w.traffic, w.max_width)).max_width
