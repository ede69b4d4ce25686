"""The transpose of a CSR with many columns and not few items in them, without a sort.  Kernels: csr_transpose_tiles.cu.

A bit for each element, in the order of columns, says where an item goes: behind those of its column with a bit before.
So the items move once, where a radix sort moves them with their columns once for every eight bits of those. Two
alternatives were not taken: counters instead of bits, whose order of increments would have to be that of the rows; and
stores straight to where an item goes, 32 bytes of traffic for each row index and each value.

Work area: M K / 8 bytes of bits, M K / 16 of starts and M K / 64 to M K / 8 of bounds: about 10 bytes an item at most.
"""

from __future__ import annotations

from ....arrays.library import Array, ceil_div, index_dtype
from ..runtime.c_types import INDEX, WORDS
from ..runtime.offsets import tile_sums
from ..runtime.queue import Kernels
from ..runtime.scratch import Workspace

SOURCE = "csr/csr_transpose_tiles.cu"
THREADS, ROWS = 512, 128
"""The same as in the source."""
KERNELS = Kernels(SOURCE, THREADS)
LEAST_SHARE, LEAST_COLUMNS = 32, 257
"""One element in so many is stored, at least; fewer columns are sorted in one pass."""
LEAST_WIDTH, LEAST_TILES = 64, 1024
"""Columns of a tile, at least; tiles that fill a device."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    pairs = [(4, 4), (4, 8), (8, 4), (8, 8)]
    place = [_place(size, *pair) for size, pair in zip(WORDS, pairs, strict=True)]
    return (*place, _place(2, 4, 4), *(_mark(*pair) for pair in pairs), *(_add(width) for width in INDEX))


def fits(shape: tuple[int, int], items: int) -> bool:
    """Whether a matrix [M, K] is transposed here."""
    M, K = shape
    return ROWS <= M <= 2**31 and K >= LEAST_COLUMNS and items * LEAST_SHARE >= M * K


def transposed(shape: tuple[int, int], indptr: Array, indices: Array, data: Array) -> tuple[Array, Array, Array]:
    """(indptr [K+1], indices, data) of the transpose of a valid CSR that ``fits``, CuPy.

    Does not wait for the device.
    """
    import cupy

    (M, K), n, size = shape, data.size, data.itemsize
    tiles, width = ceil_div(M, ROWS), _width(shape, n, size)
    chunks = ceil_div(K, width)
    work = Workspace(ROWS // 8 * tiles * K, 8 * chunks * M, 8 * tiles * K)
    bits, bounds, starts = work.places
    KERNELS.queue(
        _mark(indices.itemsize, indptr.itemsize), "PPqqiiPP", tiles * chunks,
        indptr, indices, M, K, width, chunks, bits, bounds,
    )  # fmt: skip
    pointer = cupy.empty(K + 1, index_dtype(n))
    columns = ceil_div(K, 32)
    KERNELS.queue(_add(pointer.itemsize), "PqqPPP", columns, bits, tiles, K, pointer, starts, tile_sums(columns))
    rows, values = cupy.empty(n, index_dtype(M - 1)), cupy.empty(n, data.dtype)
    KERNELS.queue(
        _place(size, indices.itemsize, indptr.itemsize), "PPPqqiiPPPPP", tiles * chunks,
        indptr, indices, data, M, K, width, chunks, bits, bounds, starts, rows, values,
        smem=_capacity(size) * (size + 1) + width * (ROWS // 4 + 8),
    )  # fmt: skip
    return pointer, rows, values


def _width(shape: tuple[int, int], items: int, size: int) -> int:
    """Columns of a tile, a multiple of 32: the stage holds three quarters of its items, if they are spread evenly."""
    M, K = shape
    widest = _capacity(size) * 3 // 4 * M * K // (ROWS * items)
    filling = K * ceil_div(M, ROWS) // LEAST_TILES
    return max(LEAST_WIDTH, min(THREADS, widest, filling) // 32 * 32)


def _capacity(size: int) -> int:
    """CAPACITY of the source."""
    return 32768 // max(2, size)


def _mark(column: int, ptr: int) -> str:
    return f"mark_items<{INDEX[column]}, {INDEX[ptr]}>"


def _add(pointer: int) -> str:
    return f"add_columns<{INDEX[pointer]}>"


def _place(size: int, column: int, ptr: int) -> str:
    return f"place_items<{WORDS[size]}, {INDEX[column]}, {INDEX[ptr]}>"
