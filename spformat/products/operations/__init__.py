"""The operations, one file each, and what each of them is in float64."""

from __future__ import annotations

from collections.abc import Callable

from ...arrays.library import Array
from . import spmm, spmm_transposed

REFERENCES: dict[str, Callable[[tuple[int, int], Array, Array, Array, Array], Array]] = {
    "spmm": spmm.reference,
    "spmm_transposed": spmm_transposed.reference,
}
"""Operation -> its sums, from (shape of A, row, column and value of each item of A, B)."""
