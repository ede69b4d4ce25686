"""Checks of device operands: on which device they are, their leading dimension, whether they share memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....products.problem import Problem
from ...host import check_bias

REMEDY = "move it with cupy.asarray (a torch tensor on the device: give it to spmm)"


def bias_pointer(p: Problem, bias: Any, beta: float, out: Any) -> int:
    """Address of a bias, checked for ``p``; 0 for None. A beta other than 0 without ``out`` is refused too."""
    if bias is not None and not hasattr(getattr(bias, "data", None), "device_id"):
        raise TypeError(f"bias: expected a CuPy array on cuda:{p.device_id}, got {type(bias).__name__}; {REMEDY}")
    check_bias(p, bias, beta, out)
    if bias is None:
        return 0
    if bias.data.device_id != p.device_id:
        raise ValueError(f"bias is on cuda:{bias.data.device_id}, the matrix on cuda:{p.device_id}")
    if not bias.flags.c_contiguous:
        raise ValueError(f"bias: expected consecutive values, got strides {bias.strides}")
    return int(bias.data.ptr)


class _Place:
    """Address, shape and strides of a device array, for numpy to compare; numpy does not read the memory."""

    def __init__(self, x: Any) -> None:
        self.__array_interface__ = {
            "data": (x.data.ptr, True), "shape": x.shape, "strides": x.strides, "typestr": f"|V{x.itemsize}",
            "version": 3,
        }  # fmt: skip


def share_memory(a: Any, b: Any) -> bool:
    """Whether two device arrays have a byte in common. Interleaved columns of one buffer have none."""
    return bool(np.shares_memory(np.asarray(_Place(a)), np.asarray(_Place(b))))


def leading(
    name: str, shape: tuple[int, int], strides: tuple[int, int], memory: Any, size: int, col: bool, device_id: int
) -> int:
    """Leading dimension in elements of a matrix that must have unit stride along the other axis."""
    if memory.device_id != device_id:
        raise ValueError(f"{name} is on cuda:{memory.device_id}, the matrix on cuda:{device_id}")
    if memory.ptr % size:
        raise ValueError(f"{name}: pointer is not aligned to its {size}-byte elements")
    lines, line = shape
    across, along = strides
    if col:
        lines, line, across, along = line, lines, along, across
    if along == size and across == line * size:
        return line or 1
    if not (lines and line):  # strides of an empty array mean nothing
        return line or 1
    if line > 1 and along != size:
        kind = "column-major" if col else "row-major"
        raise ValueError(f"{name}: expected {kind} with unit stride, got strides {strides} for shape {shape}")
    if lines == 1:
        return line
    if across < line * size or across % size:
        raise ValueError(f"{name}: leading dimension {across} bytes is shorter than a line of {line} elements")
    return across // size
