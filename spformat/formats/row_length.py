"""How long the rows of a matrix on a device are: kernels whose time depends on it ask when a product is planned."""

from __future__ import annotations

from typing import Any

from ..arrays.library import Array, current_device, is_recorded

KEY = "row length"


def row_length(matrix: Any, most: int) -> float:
    """Items, or blocks, of the row in which an average one lies, at most ``most``; 0: not known, or there are none.

    Read from the device once for a matrix with ``indptr``. Not known on the host, while a CUDA graph is recorded, and
    where the first question comes when the matrix is kept in the order of a kernel.
    """
    if KEY not in matrix._kernel_arrays and (
        matrix.device == "cpu" or matrix.in_kernel_order or is_recorded(matrix.indptr)
    ):
        return 0.0
    length: float = matrix.kernel_arrays(KEY, lambda: _computed(matrix.indptr))
    return min(length, float(most))


def _computed(indptr: Array) -> float:
    with current_device(indptr):
        lengths = (indptr[1:] - indptr[:-1]).astype("float64")  # contents may not have been checked: nothing overflows
        total = float(lengths.sum())  # synchronize!
        length = float((lengths * lengths).sum()) / total if total > 0 else 0.0  # synchronize!
    return length if length == length else 0.0
