"""What backends for host arrays share: the check of one call's operands."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import VALUE_TYPES
from ..limits import check_bytes, product
from ..problem import COL, Problem


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy dtype of a value type's name, or of any other numpy name (int32)."""
    return VALUE_TYPES[name].numpy if name in VALUE_TYPES else np.dtype(name)


def check_operands(p: Problem, B: Any, out: Any) -> np.ndarray[Any, Any]:
    """The array to write: ``out`` checked, or a fresh one in the layout of ``p``.

    ValueError for a wrong shape or an ``out`` that overlaps B, TypeError for a wrong dtype or array type.
    """
    if not isinstance(B, np.ndarray):
        raise TypeError(f"B: expected a numpy array, got {type(B).__name__}")
    if B.ndim != 2 or B.shape[0] != p.K:
        raise ValueError(f"B: expected shape ({p.K}, N), got {B.shape}")
    if B.dtype != numpy_dtype(p.b_dtype):
        raise TypeError(f"B: this plan takes {p.b_dtype}, got {B.dtype}")
    shape, dtype = (p.M, B.shape[1]), numpy_dtype(p.out_dtype)
    if out is None:
        given = B.nbytes + p.nnz * numpy_dtype(p.a_dtype).itemsize
        check_bytes(product(*shape, dtype.itemsize), f"spmm: product of shape {shape}", given)
        return np.empty(shape, dtype, order="F" if p.out_layout == COL else "C")
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out: expected a numpy array, got {type(out).__name__}")
    if out.shape != shape:
        raise ValueError(f"out: expected shape {shape}, got {out.shape}")
    if out.dtype != dtype:
        raise TypeError(f"out: this plan writes {p.out_dtype}, got {out.dtype}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if np.may_share_memory(B, out) and np.shares_memory(B, out):
        raise ValueError("out overlaps B; the product would read what it writes")
    return out
