"""Whether an SR-BCRS on the device is valid, in one launch: ``scan_launch``.  Kernel: sr_bcrs_scan.cu."""

from __future__ import annotations

from ....arrays.dtypes import value_type
from ....arrays.library import Array
from ..runtime.c_types import INDEX, WORDS, index_type, word_type
from ..runtime.scan_launch import THREADS, Pass, finds_nothing

SOURCE = "sr_bcrs/sr_bcrs_scan.cu"


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    few = [_instance(value, *INDEX.values()) for value in WORDS.values()]
    return (*few, _instance(WORDS[2], "long long", "int"))


def sr_bcrs_sound(shape: tuple[int, int], indptr: Array, indices: Array, data: Array) -> bool:
    """Whether indptr [tiles+1], indices [G, g] and data [G, t, g], CuPy, hold a valid matrix; waits for the device."""
    (groups, t, g), tiles = data.shape, indptr.size - 1
    args = (indptr, indices, data, *shape, tiles, groups, t, g, value_type(data.dtype).zero_mask)
    instance = _instance(word_type(data), index_type(indices), index_type(indptr))
    return finds_nothing(SOURCE, Pass(instance, "PPPqqqqiiq", args, tiles * THREADS))


def _instance(value: str, column: str, pointer: str) -> str:
    return f"spformat::sr_bcrs_scan<{value}, {column}, {pointer}>"
