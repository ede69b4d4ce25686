"""A Bitmask as a dense matrix, and its columns as CSR has them, on the device.  Kernels: bitmask_unpack.cu."""

from __future__ import annotations

from ....arrays.library import Array, ceil_div, index_dtype
from ..runtime import offsets
from ..runtime.expansion import INDEX
from ..runtime.scan_launch import WORDS
from .bitmask_pack import ANY_SUM, THREADS, current_stream, launch_on, tiles

SOURCE = "bitmask/bitmask_unpack.cu"
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
    launch = launch_on(bitmask, SOURCE, "bitmask_chunks", "PqPq")
    grid = (ceil_div(32 * counts.size, THREADS), 1, 1)
    launch(grid, current_stream(), bitmask.data.ptr, bitmask.size, counts.data.ptr, counts.size)
    return offsets.starts_of(counts, ANY_SUM)


def address(starts: Array | None) -> int:
    """The address of an array, 0 for None."""
    return 0 if starts is None else int(starts.data.ptr)


def bitmask_to_dense(indptr: Array, bitmask: Array, data: Array, out: Array) -> None:
    """Write out [M, K], on 16 bytes and not empty, from the arrays of a valid Bitmask, all CuPy. Does not wait."""
    starts = starts_of(bitmask)
    launch = launch_on(data, SOURCE, _dense(data.itemsize, indptr.itemsize), "PPPPqPqq")
    arrays = indptr.data.ptr, bitmask.data.ptr, address(starts), data.data.ptr, data.size, out.data.ptr
    launch((tiles(out), 1, 1), current_stream(), *arrays, *out.shape)


def bitmask_columns(indptr: Array, bitmask: Array, K: int, nnz: int) -> Array:
    """int[nnz]: the column of each set bit of a bitmap [M, wide], CuPy, in the index type of K columns. Does not
    wait."""
    import cupy

    (M, wide), starts = bitmask.shape, starts_of(bitmask)
    indices = cupy.empty(nnz, index_dtype(K - 1))
    if nnz:
        launch = launch_on(bitmask, SOURCE, _columns(indptr.itemsize, indices.itemsize), "PPPPqq")
        grid = (ceil_div(M * ceil_div(wide, 4), THREADS), 1, 1)
        arrays = indptr.data.ptr, bitmask.data.ptr, address(starts), indices.data.ptr
        launch(grid, current_stream(), *arrays, M, wide)
    return indices


def _dense(size: int, index: int) -> str:
    return f"bitmask_to_dense<{WORDS[size]}, {INDEX[index]}>"


def _columns(pointer: int, index: int) -> str:
    return f"bitmask_columns<{INDEX[pointer]}, {INDEX[index]}>"
