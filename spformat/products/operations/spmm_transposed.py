"""``spmm_transposed``: C[K,N] = A^T @ B[M,N], where A is stored as [M,K]."""

from __future__ import annotations

import numpy as np

from ...arrays.library import Array
from . import spmm


def reference(shape: tuple[int, int], rows: Array, cols: Array, values: Array, B: Array) -> Array:
    """A^T @ B item by item: sums [K, N] in the dtype of ``values``, the terms of each in ascending order of rows.

    shape: (M, K) of A as it is stored; rows, cols int[nnz]: the place of each item in A, rows ascending; values [nnz]:
    float64 or int64; B [M, N] of any value type. A row of B that no item names is not read.
    """
    order = np.argsort(cols, kind="stable")
    return spmm.reference((shape[1], shape[0]), cols[order], rows[order], values[order], B)
