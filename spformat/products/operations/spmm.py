"""C[M, N] = A[M, K] @ B[K, N] with sparse A and dense B."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.dtypes import value_type
from ...arrays.library import Array, is_cupy, unmasked
from ...errors import ArrayError, UsageError
from ...formats.base import Format
from ..operation import Items, Operation
from ..problem import DENSE, WORKSPACE, Operand, Problem, alignment_of, cuda_device_of, layout_of, result_dtype


def product_problem(
    operation: str, A: Format, B: Array, out: Array | None = None, epilogue: bool = False, workspace: int = WORKSPACE
) -> Problem:
    """The problem of a product with A (``spmm``) or its transpose (``spmm_transposed``).

    B: [K, N] (transposed: [M, N]), on A's device. out: [M, N] (transposed: [K, N]), in B's library.
    """
    rows, inner = A.matrix_shape[::-1] if operation == "spmm_transposed" else A.matrix_shape
    name = "A.T" if operation == "spmm_transposed" else "A"
    if B.ndim != 2:
        raise ValueError(f"B: expected a matrix [K, N], got shape {B.shape}")
    if B.shape[0] != inner:
        raise ValueError(f"B: expected {inner} rows, the columns of {name} {(rows, inner)}, got shape {B.shape}")
    on_device = A.device != "cpu"
    if on_device != is_cupy(B):
        where = f"A is on {A.device}, B on {'cuda:' + str(B.device.id) if is_cupy(B) else 'cpu'}"
        fix = "A.to('cuda')" if not on_device else "A.to('cpu'), or cupy.asarray(B)"
        raise UsageError(f"spmm: {where}; nothing is copied between them unasked: use {fix}")
    a, b_dtype = Operand.of(A), operand_type("B", B)
    shape, result, layout, lines = (rows, B.shape[1]), result_dtype(a.dtype, b_dtype), "row", 0
    if out is not None:
        require_like("out", out, "B", B)
        if out.shape != shape:
            raise ValueError(f"out: expected shape {shape}, got {out.shape}")
        result, layout, lines = np.dtype(out.dtype).name, layout_of(out), alignment_of(out)
    if epilogue and result in ("int32", "int64"):
        raise TypeError(f"alpha, beta and bias need a C of floating-point values, got {result}; give out in float32")
    b = Operand(DENSE, B.shape, b_dtype, (), int(B.size), layout_of(B), alignment_of(B), a.device)
    c = Operand(DENSE, shape, result, (), shape[0] * shape[1], layout, lines, a.device)
    sm, device_id, board = cuda_device_of(A) if on_device else (None, 0, "")
    return Problem(operation, (a, b), c, sm, device_id, epilogue, workspace, A.row_length(), board)


def operand_type(name: str, x: Any) -> str:
    """The value type of an operand; ArrayError names it and the cast."""
    try:
        return value_type(unmasked(x).dtype).name
    except ArrayError as e:
        raise ArrayError(f"{name}: {e.message}, as by {name}.astype('float32')", array=name) from None


def require_like(name: str, x: Any, other_name: str, other: Any) -> None:
    """TypeError for an array of another library, UsageError for a masked one. Subclasses of numpy's arrays (memmap) are
    like any other."""
    kind = type(other)
    if type(x) is not kind and not (isinstance(unmasked(x), np.ndarray) and isinstance(other, np.ndarray)):
        raise TypeError(f"{name}: expected {kind.__module__}.{kind.__name__} like {other_name}, got {type(x).__name__}")


def _problem(
    A: Format, B: Array, out: Array | None = None, epilogue: bool = False, workspace: int = WORKSPACE
) -> Problem:
    return product_problem("spmm", A, B, out, epilogue, workspace)


def _reference(a: Items, B: Array) -> Array:
    """C[rows[i]] += values[i] * B[cols[i]]: the items of a row are neighbours, and added in their order."""
    C = np.zeros((a.shape[0], B.shape[1]), a.values.dtype)
    if a.values.size:
        starts = np.flatnonzero(np.r_[True, a.rows[1:] != a.rows[:-1]])
        C[a.rows[starts]] = np.add.reduceat(a.values[:, None] * B[a.cols], starts, axis=0)
    return C


SPMM = Operation("spmm", _problem, _reference, {"B": "spmm_transposed", "A": "sddmm"})
