"""A Bitmask as a dense matrix, and its columns as CSR has them, on the device.  Kernels: bitmask_unpack.cu."""

from __future__ import annotations

import functools

from ....arrays.library import Array, ceil_div, index_dtype
from ..runtime import offsets
from ..runtime.c_types import INDEX, WORDS
from ..runtime.queue import Kernels
from .bitmask_pack import ANY_SUM, THREADS, tiles

SOURCE = "bitmask/bitmask_unpack.cu"
KERNELS = Kernels(SOURCE, THREADS)
CHUNK = 4096
"""Bytes of the bitmap whose bits are counted together where rows are long; the same in bitmask_rank.cuh."""
LONG_ROW = 4 * CHUNK
"""Bytes of a row of bits from which on a block does not count the bits before its own from the start of the row."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    dense = [_dense(size, ptr) for size, ptr in ((1, 4), (2, 4), (2, 8), (4, 4), (8, 8))]
    return ("bitmask_chunks", *dense, *(_columns(ptr, idx) for ptr in INDEX for idx in INDEX))


def starts_of(bitmask: Array) -> Array | None:
    """int64: the set bits before each ``CHUNK`` bytes of a bitmap [M, wide], CuPy; None where rows are short enough for
    a block to count the bits of its row that lie before its own."""
    import cupy

    if bitmask.shape[1] <= LONG_ROW:
        return None
    counts = cupy.empty(ceil_div(bitmask.size, CHUNK), "u4")
    blocks = ceil_div(32 * counts.size, THREADS)
    KERNELS.queue("bitmask_chunks", "PqPq", blocks, bitmask, bitmask.size, counts, counts.size)
    return offsets.starts_of(counts, ANY_SUM)


def bitmask_to_dense(indptr: Array, bitmask: Array, data: Array, out: Array) -> None:
    """Write out [M, K], on 16 bytes and not empty, from the arrays of a valid Bitmask, all CuPy. Does not wait."""
    starts = starts_of(bitmask)
    KERNELS.queue(
        _dense(data.itemsize, indptr.itemsize), "PPPPqPqq", tiles(out),
        indptr, bitmask, starts, data, data.size, out, *out.shape,
    )  # fmt: skip


def bitmask_columns(indptr: Array, bitmask: Array, K: int, nnz: int) -> Array:
    """int[nnz]: the column of each set bit of a bitmap [M, wide], CuPy, in the index type of K columns. Does not
    wait."""
    import cupy

    (M, wide), starts = bitmask.shape, starts_of(bitmask)
    indices = cupy.empty(nnz, index_dtype(K - 1))
    if nnz:
        blocks = ceil_div(M * ceil_div(wide, 4), THREADS)
        name = _columns(indptr.itemsize, indices.itemsize)
        KERNELS.queue(name, "PPPPqq", blocks, indptr, bitmask, starts, indices, M, wide)
    return indices


@functools.cache
def _dense(size: int, index: int) -> str:
    return f"bitmask_to_dense<{WORDS[size]}, {INDEX[index]}>"


@functools.cache
def _columns(pointer: int, index: int) -> str:
    return f"bitmask_columns<{INDEX[pointer]}, {INDEX[index]}>"
