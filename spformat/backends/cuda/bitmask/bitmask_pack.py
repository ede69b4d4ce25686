"""A dense matrix as a Bitmask on the device: counted and packed in one launch, copied in another.  Kernels:
bitmask_pack.cu."""

from __future__ import annotations

import functools
from sys import modules

import numpy as np

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div, index_dtype
from ..runtime.c_types import INDEX, WORDS
from ..runtime.offsets import TileSums
from ..runtime.queue import Kernels
from ..runtime.scratch import Workspace

SOURCE = "bitmask/bitmask_pack.cu"
THREADS, TILE = 256, 16384
"""Threads of a block and bytes that it takes; the same in flat_tiles.cuh."""
UNIT = 16
BYTES = np.dtype(np.uint8)
KERNELS = Kernels(SOURCE, THREADS)
ANY_SUM = 2**62
"""The bound of sums whose offsets are int64 whatever they are: fewer kernels to compile."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    values = [_values(size, ptr) for size, ptr in ((1, 4), (2, 4), (2, 8), (4, 4), (8, 8))]
    return (*(_bits(size) for size in WORDS), *values)


def bitmask_from_dense(x: Array) -> tuple[Array, Array, Array]:
    """(indptr [M+1], bitmask uint8[M, ceil(K/8)], data [nnz]) of x [M, K], CuPy, not empty. Waits for their number."""
    M, K = x.shape
    bitmask, blocks = modules["cupy"].empty((M, ceil_div(K, 8)), BYTES), tiles(x)
    mask = value_type(x.dtype).zero_mask
    work, sums = Workspace(8 * blocks), TileSums(blocks)
    KERNELS.queue(_bits(x.itemsize), "PqqqPPPP", blocks, x, M, K, mask, bitmask, *work.places, *sums.arguments)
    indptr, data = nonzeros(x, M, K, blocks, work.places[0], sums)
    return indptr, bitmask, data


def nonzeros(
    x: Array, rows: int, length: int, blocks: int, starts: int, sums: TileSums
) -> tuple[Array, Array]:  # fmt: skip
    """(indptr [rows+1], data [nnz]): the nonzeros of the first ``rows`` rows of x, CuPy, whose rows have ``length``
    elements. starts: address of int64[blocks], those before each tile; sums: all. Waits for the device once."""
    empty, pointer, dtype = modules["cupy"].empty, index_dtype(rows * length), x.dtype
    indptr, mask = empty(rows + 1, pointer), value_type(dtype).zero_mask  # while the kernel runs
    nnz = sums.total()  # synchronize!
    if pointer is not index_dtype(nnz):
        pointer = index_dtype(nnz)
        indptr = empty(rows + 1, pointer)
    data = empty(nnz, dtype)
    KERNELS.queue(
        _values(dtype.itemsize, pointer.itemsize), "PqqqPPP", blocks, x, rows, length, mask, starts, data, indptr
    )
    return indptr, data


def tiles(x: Array, elements: int | None = None) -> int:
    """Tiles of the elements of x, or of the first ``elements``; the first tile starts at the boundary before x."""
    size = x.size if elements is None else elements
    return ceil_div(int(x.data.ptr) % UNIT + size * x.itemsize, TILE)


@functools.cache
def _bits(size: int) -> str:
    return f"bitmask_bits<{WORDS[size]}>"


@functools.cache
def _values(size: int, index: int) -> str:
    return f"bitmask_values<{WORDS[size]}, {INDEX[index]}>"
