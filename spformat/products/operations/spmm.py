"""``spmm``: C[M,N] = A[M,K] @ B[K,N]."""

from __future__ import annotations

import numpy as np

from ...arrays.library import Array

PANEL = 1 << 22
"""Products held at once: bounds the memory of a wide B."""


def reference(shape: tuple[int, int], rows: Array, cols: Array, values: Array, B: Array) -> Array:
    """A @ B item by item: sums [M, N] in the dtype of ``values``, the terms of each in the order of the items.

    shape: (M, K); rows, cols int[nnz]: the place of each item, rows ascending; values [nnz]: float64, or int64 for
    sums that wrap at 64 bits; B [K, N] of any value type. A row of B that no item names is not read.
    """
    sums = np.zeros((shape[0], B.shape[1]), values.dtype)
    if not values.size:
        return sums
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
    step = max(1, PANEL // values.size)
    for j in range(0, B.shape[1], step):
        products = values[:, None] * B[:, j : j + step].astype(values.dtype)[cols]
        sums[rows[starts], j : j + step] = np.add.reduceat(products, starts, axis=0)
    return sums
