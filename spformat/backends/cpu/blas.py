"""Dense products through numpy's BLAS: operands widened to the sums' type, panel by panel."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.library import Array
from .operands import store, widened

ROWS, EXACT = 256, 1024
"""Rows of A widened together; int8 products that add up exactly in float32: 1024 * 2^14 = 2^24."""


def dense_product(A: Array, B: Array, out: Array, sums: np.dtype[Any]) -> None:
    """out[M, N] = A[M, K] @ B[K, N], dense arrays of any value types and strides; rounded once to the dtype of out."""
    _int8_product(A, B, out) if sums.kind == "i" else _float_product(A, B, out, sums)


def _float_product(A: Array, B: Array, out: Array, sums: np.dtype[Any]) -> None:
    wide_b = in_type(B, sums)
    for i in range(0, A.shape[0], ROWS if A.dtype != sums else A.shape[0]):
        rows = A[i : i + ROWS] if A.dtype != sums else A
        part = out[i : i + rows.shape[0]]
        if out.dtype == sums:
            np.matmul(in_type(rows, sums), wide_b, out=part)
        else:
            store(np.matmul(in_type(rows, sums), wide_b), part)


def _int8_product(A: Array, B: Array, out: Array) -> None:
    """int32 sums through float32 products of at most EXACT columns, each of them exact."""
    f32 = np.dtype(np.float32)
    for i in range(0, A.shape[0], ROWS):
        rows = A[i : i + ROWS]
        total = np.zeros((rows.shape[0], B.shape[1]), np.int32)
        for k in range(0, A.shape[1], EXACT):
            cut = slice(k, k + EXACT)
            total += np.matmul(in_type(rows[:, cut], f32), in_type(B[cut], f32)).astype(np.int32)
        store(total, out[i : i + rows.shape[0]])


def in_type(x: Array, dtype: np.dtype[Any]) -> Array:
    """x itself, or a copy in ``dtype``, float32 or float64 and at least as wide; the copy lies in memory as x does."""
    if x.dtype == dtype:
        return x
    wide = np.empty_like(x, dtype)
    widened(x, dtype, wide)
    return wide
