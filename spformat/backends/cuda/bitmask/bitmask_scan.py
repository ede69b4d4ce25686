"""Whether a bitmask matrix on the device is valid, in one launch: ``scan_launch``.  Kernel: bitmask_scan.cu."""

from __future__ import annotations

from ....arrays.dtypes import value_type
from ....arrays.library import Array
from ..runtime.c_types import INDEX, WORDS, index_type, word_type
from ..runtime.scan_launch import WIDE, Pass, finds_nothing, span

SOURCE = "bitmask/bitmask_scan.cu"


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(value, pointer) for value in WORDS.values() for pointer in INDEX.values())


def bitmask_sound(shape: tuple[int, int], indptr: Array, bitmask: Array, data: Array) -> bool:
    """Whether indptr [M+1], bitmask uint8[M, ceil(K/8)] and data [nnz], CuPy, are valid; waits for the device."""
    lanes = span(bitmask.shape[1])
    threads = max(indptr.size, shape[0] * lanes, data.nbytes // WIDE)
    args = (indptr, bitmask, data, *shape, data.size, value_type(data.dtype).zero_mask, lanes)
    return finds_nothing(SOURCE, Pass(_instance(word_type(data), index_type(indptr)), "PPPqqqqi", args, threads))


def _instance(value: str, pointer: str) -> str:
    return f"spformat::bitmask_scan<{value}, {pointer}>"
