"""Compressed sparse row (CSR), the hub every conversion may pass through.  Spec: docs/formats/csr.md.

A (3x4)      indptr  [0 2 2 4]
1 . . 2      indices [0 3 0 2]
. . . .      data    [1 2 3 4]
3 . 4 .
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import bits, nonzero_mask
from ..arrays.library import Array, current_device, device_of, index_dtype, is_cupy, namespace, on_own_device
from ..arrays.segments import counts_of, offsets_from_counts, pointer, rows_of, stable_order
from ..errors import ArrayError, OrderError, UsageError
from . import edges
from .base import INDEX, VALUE, Format, RowChunks, array
from .declare import parse_rows
from .hooks import Counts
from .items import Items
from .row_length import row_length

ROW_CHUNK = 1 << 20
"""Dense elements that the host converts at a time, so that masks and positions stay in cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class CSR(Items, Format):
    """Rows of (column, value) items. Stored zeros are allowed and kept; ``canonical()`` drops them."""

    name, version, tie_rank = "csr", 1, 2

    indptr: Array = array(INDEX, "M+1", bound="nnz", doc="items indptr[i] .. indptr[i+1]-1 belong to row i")
    indices: Array = array(INDEX, "nnz", bound="K-1", doc="column, strictly increasing inside a row")
    data: Array = array(VALUE, "nnz", doc="value")

    def dims(self) -> dict[str, int]:
        return {"M+1": self.shape[0] + 1, "K-1": self.shape[1] - 1}

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        index = index_dtype(shape[1] - 1)
        return {"indptr": (index_dtype(nnz), (shape[0] + 1,)), "indices": (index, (nnz,)), "data": (dtype, (nnz,))}

    @classmethod
    def row_chunks(cls, params: dict[str, Any]) -> RowChunks:
        return RowChunks(1, pointers=("indptr",))

    @classmethod
    def remark(cls, counts: Counts, params: dict[str, Any]) -> str:
        if not counts.nnz:
            return ""
        return f"rows have {counts.mean_row:.1f} nonzeros on average, the longest {counts.longest_row}"

    def row_length(self) -> int:
        return round(row_length(self, self.shape[1]))

    @on_own_device
    def rows(self) -> Array:
        """int64[nnz]: the row of each item."""
        return rows_of(self.indptr, self.nnz)

    def row_range(self, first: int, last: int) -> CSR:
        """Rows first .. last-1; UsageError unless 0 <= first <= last <= M. Validates a matrix that is not marked as
        validated."""
        self.ensure_valid()  # the result is marked
        first, last = parse_rows(self.name, first, last)
        if not 0 <= first <= last <= self.shape[0]:
            message = f"csr: rows: expected 0 <= first <= last <= {self.shape[0]}, got {first} .. {last}"
            raise UsageError(f"{message}; a[{first}:{last}] counts as slices do")
        lo, hi = int(self.indptr[first]), int(self.indptr[last])  # synchronize!
        return CSR.trusted(
            shape=(last - first, self.shape[1]),
            indptr=(self.indptr[first : last + 1] - self.indptr[first]).astype(index_dtype(hi - lo)),
            indices=self.indices[lo:hi],
            data=self.data[lo:hi],
        )

    def check_memory(self) -> None:
        scans.pointer(self, "indptr", self.nnz)
        scans.within(self, "indices", self.shape[1])

    def check_canonical(self) -> None:
        hint = "in_order() sorts the columns; for a file, spformat convert --sort"
        scans.increasing_in_segments(self, "indptr", "indices", hint)

    @classmethod
    def from_coordinates(cls, shape: tuple[int, int], rows: Array, cols: Array, data: Array) -> CSR:
        """CSR of items in any order: row and column integers [nnz], data VALUE[nnz].

        The caller must ensure 0 <= row < M, 0 <= column < K, and that no (row, column) occurs twice.
        """
        _require_on(device_of(data), "data", data=data, rows=rows, cols=cols)
        if rows.dtype.kind not in "iu" or cols.dtype.kind not in "iu":
            got = f"{rows.dtype} and {cols.dtype}"
            raise ArrayError(f"csr: from_coordinates: expected integers for rows and columns, got {got}")
        if not rows.shape == cols.shape == data.shape == (data.size,):
            got = f"{rows.shape}, {cols.shape} and {data.shape}"
            raise ArrayError(f"csr: from_coordinates: expected rows, columns and values [nnz], got shapes {got}")
        with current_device(data):
            return cls._of_coordinates(shape, rows, cols, data)

    @classmethod
    def _of_coordinates(cls, shape: tuple[int, int], rows: Array, cols: Array, data: Array) -> CSR:
        xp, (M, K) = namespace(data), shape
        rows, cols = (x.astype(np.int64, copy=False) for x in (rows, cols))  # int64: M*K overflows int32
        if M * K < 2**63:
            key = rows * K + cols
            ordered = not bool((key[1:] < key[:-1]).any())  # synchronize!
            order = None if ordered else xp.argsort(key, kind="stable")
        else:
            order = xp.lexsort(xp.stack((cols, rows)))
        if order is not None:
            cols, data = cols[order], bits(data)[order].view(data.dtype)
        indptr = pointer(counts_of(rows, M), rows.size)
        return cls.trusted(shape=shape, indptr=indptr, indices=cols.astype(index_dtype(K - 1)), data=data)

    @classmethod
    def _from_dense(cls, x: Array, **params: Any) -> Self:
        """Row-major scan of value != 0 over an array [M, K]."""
        xp, (M, K) = namespace(x), x.shape
        # Host arrays are converted in row chunks, because masks and positions of a whole matrix need much more memory.
        step = max(1, M if is_cupy(x) else ROW_CHUNK // max(1, K))
        counts, cols, parts = [], [], []
        for i in range(0, M, step):
            chunk = x[i : i + step]
            mask = nonzero_mask(chunk)
            if xp is np:
                at = np.flatnonzero(mask)
                cols.append((at % max(1, K)).astype(index_dtype(K - 1)))
            else:
                cols.append(xp.nonzero(mask)[1].astype(index_dtype(K - 1)))  # synchronize!
            parts.append(bits(chunk)[mask])
            counts.append(mask.sum(axis=1, dtype=np.int64))
        nnz = sum(c.size for c in cols)
        indptr = xp.zeros(M + 1, index_dtype(nnz))
        if M:
            indptr[1:] = xp.cumsum(_join(xp, counts), dtype=np.int64)
        indices = _join(xp, cols) if M else xp.zeros(0, index_dtype(K - 1))
        values = _join(xp, parts).view(x.dtype) if M else xp.zeros(0, x.dtype)
        return cls.trusted(shape=(M, K), indptr=indptr, indices=indices, data=values)

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        assert isinstance(a, cls)
        return a

    def to_csr(self) -> CSR:
        return self.ensure_valid()

    def _to_csr(self) -> CSR:
        return self

    def _to_dense(self) -> Array:
        """Array [M, K]; stored zeros are written with their bits."""
        out = self.empty_dense()
        flat, K = bits(out).reshape(-1), self.shape[1]
        if self.nnz:
            flat[self.rows() * K + self.indices] = bits(self.data)
        return out

    @on_own_device
    def without_zeros(self) -> CSR:
        """The same matrix without its stored zeros; itself when there are none. Validates it first."""
        self.ensure_valid()  # the result is marked
        keep = nonzero_mask(self.data)
        return self if bool(keep.all()) else self.only(keep)  # synchronize!

    @on_own_device
    def only(self, keep: Array) -> CSR:
        """The items for which ``keep`` bool[nnz] is True, each with its bits. It validates first; UsageError for
        another ``keep``."""
        self.ensure_valid()  # the result is marked
        _require_on(self.device, "the matrix", keep=keep)
        if keep.dtype != np.bool_ or keep.shape != self.data.shape:  # numpy would take integers for places
            expected = f"bool of shape {self.data.shape}, one for each stored item"
            raise UsageError(f"csr: keep: expected {expected}, got {keep.dtype} of shape {keep.shape}")
        kept_before = offsets_from_counts(keep.astype(np.int64))  # int64[nnz+1]: kept items before each
        indptr = kept_before[self.indptr]
        nnz = int(indptr[-1])  # synchronize!
        return CSR.trusted(
            shape=self.shape,
            indptr=indptr.astype(index_dtype(nnz)),
            indices=self.indices[keep],
            data=bits(self.data)[keep].view(self.dtype),
        )

    def canonical(self) -> CSR:
        """Columns sorted in every row and stored zeros dropped. OrderError for a column stored twice in a row."""
        return self.in_order().without_zeros()

    @on_own_device
    def in_order(self) -> CSR:
        """Columns sorted in every row, stored zeros kept. OrderError for a column stored twice in a row."""
        self.check_memory()
        rows, cols = self.rows(), self.indices
        order = order_of_items(self.name, self.shape, rows, cols)
        return CSR.trusted(
            shape=self.shape,
            indptr=self.indptr,
            indices=cols[order],
            data=bits(self.data)[order].view(self.dtype),
        )

    @on_own_device
    def transposed(self) -> CSR:
        """The transpose [K, M] as an ordered CSR, every stored item with its bits; O(nnz). Validates the matrix first.

        A stable sort by column does it: rows ascend inside a column, because they do here.
        """
        self.ensure_valid()  # the result is marked
        M, K = self.shape
        direct: CSR | None = edges.take(self.name, edges.TRANSPOSED, self, {}, self.data)
        if direct is not None:
            return direct
        order = stable_order(self.indices, K)
        return CSR.trusted(
            shape=(K, M),
            indptr=pointer(counts_of(self.indices, K), self.nnz),
            indices=self.rows()[order].astype(index_dtype(M - 1)),
            data=bits(self.data)[order].view(self.dtype),
        )


Format.hub = CSR


def order_of_items(name: str, shape: tuple[int, int], rows: Array, cols: Array, *, by_column: bool = False) -> Array:
    """int64[nnz]: the permutation that sorts items by row and then column, or by column and then row.

    Raises OrderError for an element that is stored twice, which no order repairs.
    """
    xp, (M, K) = namespace(cols), shape
    rows, cols = rows.astype(np.int64), cols.astype(np.int64)
    if M * K < 2**63:
        order = xp.argsort(cols * M + rows if by_column else rows * K + cols)  # six times as fast as lexsort
    else:
        order = xp.lexsort(xp.stack((rows, cols) if by_column else (cols, rows)))
    rows, cols = rows[order], cols[order]
    twice = (rows[1:] == rows[:-1]) & (cols[1:] == cols[:-1])
    repeats = scans.first_true(twice)
    if repeats:
        row, col = int(rows[repeats[0]]), int(cols[repeats[0]])
        raise OrderError(
            f"{name}: row {row} stores column {col} more than once ({repeats[1]} repeats in all); values are never "
            "summed silently: sum them where the matrix is made (scipy: a.sum_duplicates())",
            array="indices", index=(row, col), value=col, count=repeats[1],
        )  # fmt: skip
    return order


def _require_on(device: str, owner: str, **arrays: Any) -> None:
    """UsageError for an array on another device than that of ``owner``, and for anything but arrays."""
    for name, x in arrays.items():
        known = isinstance(x, np.ndarray) or is_cupy(x)
        if not known or device_of(x) != device:
            got = f"one on {device_of(x)}" if known else type(x).__name__
            raise UsageError(f"csr: {name}: expected an array on {device}, where {owner} is, got {got}")


def _join(xp: Any, parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else xp.concatenate(parts)
