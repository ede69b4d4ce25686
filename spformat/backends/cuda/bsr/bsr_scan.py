"""Whether a BSR or DBSR on the device is valid, in one launch: ``scan_launch``.  Kernel: bsr_scan.cu."""

from __future__ import annotations

from ....arrays.dtypes import value_type
from ....arrays.library import Array
from ..runtime.c_types import INDEX, WORDS, index_type, word_type
from ..runtime.scan_launch import Pass, finds_nothing, span

SOURCE = "bsr/bsr_scan.cu"


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    few = [_instance(value, "int", "int", "int") for value in WORDS.values()]
    return (*few, _instance(WORDS[2], "long long", "int", "long long"))


def bsr_sound(
    shape: tuple[int, int],
    blocksize: tuple[int, int],
    row_ids: Array | None,
    indptr: Array,
    indices: Array,
    data: Array,
) -> bool:
    """Whether indptr, indices [blocks] and data [blocks, R, C], CuPy, are a valid matrix; waits for the device.

    row_ids: the block rows that are listed, of a DBSR; None of a BSR, where all are.
    """
    lanes = span(blocksize[0] * blocksize[1] * data.dtype.itemsize)
    listed = INDEX[4] if row_ids is None else index_type(row_ids)
    instance = _instance(word_type(data), index_type(indices), index_type(indptr), listed)
    arrays = (0 if row_ids is None else row_ids, indptr, indices, data)
    args = (*arrays, *shape, indptr.size - 1, data.shape[0], *blocksize, value_type(data.dtype).zero_mask, lanes)
    return finds_nothing(SOURCE, Pass(instance, "PPPPqqqqiiqi", args, max(indptr.size, data.shape[0] * lanes)))


def _instance(value: str, column: str, pointer: str, row: str) -> str:
    return f"spformat::bsr_scan<{value}, {column}, {pointer}, {row}>"
