"""Compressed sparse column (CSC), as scipy.sparse and torch have it.  Spec: docs/formats/csc.md.

A (3x4)      indptr  [0 2 2 3 4]
1 . . 2      indices [0 2 2 0]       (rows)
. . . .      data    [1 3 4 2]
3 . 4 .

The arrays are those of the CSR of the transpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import bits
from ..arrays.library import Array, index_dtype, on_own_device
from ..arrays.segments import rows_of
from .base import INDEX, VALUE, Format, array
from .csr import CSR, order_of_items
from .hooks import Counts
from .items import Items


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class CSC(Items, Format):
    """Columns of (row, value) items. Stored zeros are allowed and kept; ``canonical()`` drops them."""

    name, version = "csc", 1

    indptr: Array = array(INDEX, "K+1", bound="nnz", doc="items indptr[j] .. indptr[j+1]-1 belong to column j")
    indices: Array = array(INDEX, "nnz", bound="M-1", doc="row, strictly increasing inside a column")
    data: Array = array(VALUE, "nnz", doc="value")

    def dims(self) -> dict[str, int]:
        return {"K+1": self.shape[1] + 1, "M-1": self.shape[0] - 1}

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        index = index_dtype(shape[0] - 1)
        return {"indptr": (index_dtype(nnz), (shape[1] + 1,)), "indices": (index, (nnz,)), "data": (dtype, (nnz,))}

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        """None: it holds what CSR holds, and kernels of the GPU take CSR. It is chosen by name."""
        return ()

    def sum(self, axis: int | None = None) -> Any:
        """The sum of all values, or with ``axis`` 0 or 1 that of each column or row; in float64, or int64 of int8."""
        self.ensure_valid()
        return self.transposed_csr().sum(1 - axis % 2 if axis in (0, 1, -1, -2) else axis)

    @on_own_device
    def columns(self) -> Array:
        """int64[nnz]: the column of each item."""
        return rows_of(self.indptr, self.nnz)

    def check_memory(self) -> None:
        scans.pointer(self, "indptr", self.nnz)
        scans.within(self, "indices", self.shape[0])

    def check_canonical(self) -> None:
        hint = "in_order() sorts the rows; for a file, spformat convert --sort"
        scans.increasing_in_segments(self, "indptr", "indices", hint, segments="column")

    def transposed_csr(self) -> CSR:
        """The transpose [K, M] as a CSR that shares the arrays of this matrix, which is validated first."""
        self.ensure_valid()  # the result is marked
        M, K = self.shape
        return CSR.trusted(shape=(K, M), indptr=self.indptr, indices=self.indices, data=self.data)

    @classmethod
    def of_transposed(cls, t: CSR) -> Self:
        """The matrix whose transpose is the CSR ``t``, which is validated first; the arrays are shared."""
        t.ensure_valid()  # the result is marked
        return cls.trusted(shape=t.shape[::-1], indptr=t.indptr, indices=t.indices, data=t.data)

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        return cls.of_transposed(a.transposed())

    def _to_csr(self) -> CSR:
        return self.transposed_csr().transposed()

    def _to_dense(self) -> Array:
        """Array [M, K]; stored zeros are written with their bits."""
        out = self.empty_dense()
        if self.nnz:
            bits(out).reshape(-1)[self.indices.astype(np.int64) * self.shape[1] + self.columns()] = bits(self.data)
        return out

    def canonical(self) -> CSC:
        """Rows sorted in every column and stored zeros dropped. OrderError for a row stored twice in a column."""
        return CSC.of_transposed(self.in_order().transposed_csr().without_zeros())

    @on_own_device
    def in_order(self) -> CSC:
        """Rows sorted in every column, stored zeros kept. OrderError for a row stored twice in a column."""
        self.check_memory()
        order = order_of_items(self.name, self.shape, self.indices, self.columns(), by_column=True)
        data = bits(self.data)[order].view(self.dtype)
        return CSC.trusted(shape=self.shape, indptr=self.indptr, indices=self.indices[order], data=data)
