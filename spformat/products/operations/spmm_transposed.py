"""C[K, N] = A[M, K]^T @ B[M, N] with A stored as it is: the product behind the gradient of a dense operand."""

from __future__ import annotations

import numpy as np

from ...arrays.library import Array
from ...formats.base import Format
from ..operation import Items, Operation
from ..problem import WORKSPACE, Problem
from .spmm import SPMM, product_problem


def _problem(
    A: Format, B: Array, out: Array | None = None, epilogue: bool = False, workspace: int = WORKSPACE
) -> Problem:
    return product_problem("spmm_transposed", A, B, out, epilogue, workspace)


def _reference(a: Items, B: Array) -> Array:
    """``spmm`` of the same items with rows and columns exchanged, ordered by their new row."""
    order = np.argsort(a.cols, kind="stable")
    turned = Items(a.shape[::-1], a.cols[order], a.rows[order], a.values[order])
    return SPMM.reference(turned, B)


SPMM_TRANSPOSED = Operation("spmm_transposed", _problem, _reference, {"B": "spmm", "A": "sddmm"})
