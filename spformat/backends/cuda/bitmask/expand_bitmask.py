"""Bitmask as a dense matrix on the device, in one pass.  Kernel: expand_bitmask.cu."""

from __future__ import annotations

import functools
from typing import Any

from ....arrays.library import Array, ceil_div, round_up
from ....products.problem import Problem
from ..runtime import jit
from ..runtime.c_types import WORDS, index_type
from ..runtime.expansion import ENOUGH, UNIT, Target, Writer
from ..runtime.launch import Bound, Launch
from . import expand_bitmask_records
from .bitmask_records import have_records, records

SOURCE = "bitmask/expand_bitmask.cu"
WARPS, STEP = 8, 1024
"""Must match the constants of the kernel: warps of a block, columns that a warp takes at a time."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(size, ptr, aligned) for size, ptr, aligned in (
        (1, "int", True), (2, "int", True), (2, "int", False), (4, "long long", True), (8, "long long", False),
    ))  # fmt: skip


def expander(a: Any, p: Problem) -> Writer:
    """The launches that write the Bitmask ``a`` [M, K] as a dense matrix.

    From the records that the other kernels read, where it has them, so that a matrix is on the device once.
    """
    target = Target.of(p)
    if have_records(p):
        return expand_bitmask_records.writer(records(a, p), target)
    return _writer(a.indptr, a.bitmask, a.data, target)


def cut(M: int, ld: int) -> tuple[int, int]:
    """(segments of a row, columns of each): a warp each. M and ld at least 1.

    A segment counts the bits that lie before it, so that rows are cut only as far as it takes to occupy the device.
    """
    steps = ceil_div(ld, STEP)
    segments = min(steps, ceil_div(ENOUGH, M))
    width = round_up(ceil_div(ld, segments), STEP)
    return ceil_div(ld, width), width


def _writer(indptr: Array, bitmask: Array, data: Array, target: Target) -> Writer:
    (M, wide), itemsize, index = bitmask.shape, data.dtype.itemsize, index_type(indptr)

    @functools.cache
    def launch(aligned: bool) -> Launch:
        function = jit.load(SOURCE, _instance(itemsize, index, aligned), *target)
        return Launch(function, "PPPqqPqqq", (indptr, bitmask, data, M, wide), WARPS * 32)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        if not M:
            return []
        aligned = x % UNIT == 0 and ld * itemsize % UNIT == 0
        segments, width = cut(M, ld)
        return [launch(aligned).bind((ceil_div(M * segments, WARPS), 1, 1), stream, x, ld, segments, width)]

    return launches


def _instance(itemsize: int, ptr: str, aligned: bool) -> str:
    return f"expand_bitmask<{WORDS[itemsize]}, {ptr}, {str(aligned).lower()}>"
