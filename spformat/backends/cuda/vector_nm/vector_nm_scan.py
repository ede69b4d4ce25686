"""Whether a vector n:m matrix on the device is valid, in one launch: ``scan_launch``.  Kernel: vector_nm_scan.cu."""

from __future__ import annotations

from ....arrays.dtypes import value_type
from ....arrays.library import Array
from ..runtime.c_types import WORDS, word_type
from ..runtime.scan_launch import Pass, finds_nothing, span

SOURCE = "vector_nm/vector_nm_scan.cu"


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(value) for value in WORDS.values())


def vector_nm_sound(shape: tuple[int, int], n: int, m: int, length: int, indices: Array, data: Array) -> bool:
    """Whether indices uint8[W, Q] and data [W, Q*length], CuPy, are those of a valid matrix; waits for the device."""
    lanes = span(length * data.dtype.itemsize)
    args = (data, indices, *shape, *indices.shape, n, m, length, value_type(data.dtype).zero_mask, lanes)
    return finds_nothing(SOURCE, Pass(_instance(word_type(data)), "PPqqqqiiiqi", args, indices.size * lanes))


def _instance(value: str) -> str:
    return f"spformat::vector_nm_scan<{value}>"
