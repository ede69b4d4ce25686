"""Coordinates (COO), as scipy.sparse and torch have them.  Spec: docs/formats/coo.md.

A (3x4)      row  [0 0 2 2]
1 . . 2      col  [0 3 0 2]
. . . .      data [1 2 3 4]
3 . 4 .

``col`` and ``data`` are the ``indices`` and ``data`` of the CSR; each item also says its row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import bits, nonzero_mask
from ..arrays.library import Array, index_dtype, on_own_device
from ..arrays.segments import counts_of, pointer
from ..errors import OrderError
from .base import INDEX, VALUE, Format, array
from .csr import CSR, order_of_items
from .hooks import Counts
from .items import Items


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class COO(Items, Format):
    """Items of (row, column, value), row-major. Stored zeros are allowed and kept; ``canonical()`` drops them."""

    name, version = "coo", 1

    row: Array = array(INDEX, "nnz", bound="M-1", doc="row, never falling")
    col: Array = array(INDEX, "nnz", bound="K-1", doc="column, strictly increasing inside a row")
    data: Array = array(VALUE, "nnz", doc="value")

    def dims(self) -> dict[str, int]:
        return {"M-1": self.shape[0] - 1, "K-1": self.shape[1] - 1}

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        row, col = (index_dtype(n - 1) for n in shape)
        return {"row": (row, (nnz,)), "col": (col, (nnz,)), "data": (dtype, (nnz,))}

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        """None: it holds what CSR holds, and kernels of the GPU take CSR. It is chosen by name."""
        return ()

    def check_memory(self) -> None:
        scans.within(self, "row", self.shape[0])
        scans.within(self, "col", self.shape[1])

    def check_canonical(self) -> None:
        for s in scans.chunks(max(0, self.nnz - 1), self.data):
            rows, cols = self.row[s.start : s.stop + 1], self.col[s.start : s.stop + 1]
            expected = "at least the row before it; in_order() (for a file, spformat convert --sort) sorts the items"
            scans.require_none(self, rows[1:] < rows[:-1], "row", expected, OrderError, s.start + 1)
            falls = (rows[1:] == rows[:-1]) & (cols[1:] <= cols[:-1])
            expected = "more than the column before it in its row (in_order() and --sort repair the order, not repeats)"
            scans.require_none(self, falls, "col", expected, OrderError, s.start + 1)

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        return cls.trusted(shape=a.shape, row=a.rows().astype(index_dtype(a.shape[0] - 1)), col=a.indices, data=a.data)

    def _to_csr(self) -> CSR:
        indptr = pointer(counts_of(self.row, self.shape[0]), self.nnz)
        return CSR.trusted(shape=self.shape, indptr=indptr, indices=self.col, data=self.data)

    def _to_dense(self) -> Array:
        """Array [M, K]; stored zeros are written with their bits."""
        out = self.empty_dense()
        if self.nnz:
            bits(out).reshape(-1)[self.row.astype(np.int64) * self.shape[1] + self.col] = bits(self.data)
        return out

    @on_own_device
    def without_zeros(self) -> COO:
        """The same matrix without its stored zeros; itself when there are none. Validates it first."""
        self.ensure_valid()  # the result is marked
        keep = nonzero_mask(self.data)
        if bool(keep.all()):  # synchronize!
            return self
        return COO.trusted(
            shape=self.shape, row=self.row[keep], col=self.col[keep], data=bits(self.data)[keep].view(self.dtype)
        )

    def canonical(self) -> COO:
        """Items sorted and stored zeros dropped. OrderError for an element that is stored twice."""
        return self.in_order().without_zeros()

    @on_own_device
    def in_order(self) -> COO:
        """Items sorted by row and then column, stored zeros kept. OrderError for an element that is stored twice."""
        self.check_memory()
        order = order_of_items(self.name, self.shape, self.row, self.col)
        data = bits(self.data)[order].view(self.dtype)
        return COO.trusted(shape=self.shape, row=self.row[order], col=self.col[order], data=data)
