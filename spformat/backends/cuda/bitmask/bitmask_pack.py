"""A dense matrix as a Bitmask on the device: counted and packed in one launch, copied in another.  Kernels:
bitmask_pack.cu."""

from __future__ import annotations

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div, index_dtype
from ..runtime.c_types import INDEX, WORDS
from ..runtime.offsets import Offsets
from ..runtime.queue import Kernels

SOURCE = "bitmask/bitmask_pack.cu"
THREADS, TILE = 256, 16384
"""Threads of a block and bytes that it takes; the same in flat_tiles.cuh."""
UNIT = 16
KERNELS = Kernels(SOURCE, THREADS)
ANY_SUM = 2**62
"""The bound of sums whose offsets are int64 whatever they are: fewer kernels to compile."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    values = [_values(size, ptr) for size, ptr in ((1, 4), (2, 4), (2, 8), (4, 4), (8, 8))]
    return (*(_bits(size) for size in WORDS), *values)


def bitmask_from_dense(x: Array) -> tuple[Array, Array, Array]:
    """(indptr [M+1], bitmask uint8[M, ceil(K/8)], data [nnz]) of x [M, K], CuPy, not empty. Waits for their number."""
    import cupy

    M, K = x.shape
    bitmask = cupy.empty((M, ceil_div(K, 8)), "u1")
    counts = cupy.empty(tiles(x), "u4")
    mask = value_type(x.dtype).zero_mask
    KERNELS.queue(_bits(x.itemsize), "PqqqPP", counts.size, x, M, K, mask, bitmask, counts)
    indptr, data = nonzeros(x, M, K, counts)
    return indptr, bitmask, data


def nonzeros(x: Array, rows: int, length: int, counts: Array) -> tuple[Array, Array]:
    """(indptr [rows+1], data [nnz]): the nonzeros of the first ``rows`` rows of x, CuPy, whose rows have ``length``
    elements. counts: uint32[tiles], those of each tile. Waits for the device once."""
    import cupy

    indptr = cupy.empty(rows + 1, index_dtype(rows * length))
    offsets = Offsets(counts, ANY_SUM)
    nnz = offsets.total()  # synchronize!
    if indptr.dtype != index_dtype(nnz):
        indptr = cupy.empty(rows + 1, index_dtype(nnz))
    data = cupy.empty(nnz, x.dtype)
    KERNELS.queue(
        _values(x.itemsize, indptr.itemsize), "PqqqPPP", counts.size,
        x, rows, length, value_type(x.dtype).zero_mask, offsets.starts, data, indptr,
    )  # fmt: skip
    return indptr, data


def tiles(x: Array, elements: int | None = None) -> int:
    """Tiles of the elements of x, or of the first ``elements``; the first tile starts at the boundary before x."""
    size = x.size if elements is None else elements
    return ceil_div(int(x.data.ptr) % UNIT + size * x.itemsize, TILE)


def _bits(size: int) -> str:
    return f"bitmask_bits<{WORDS[size]}>"


def _values(size: int, index: int) -> str:
    return f"bitmask_values<{WORDS[size]}, {INDEX[index]}>"
