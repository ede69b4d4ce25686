"""The bits of a CSR on the device, in one launch.  Kernel: bitmask_from_csr.cu."""

from __future__ import annotations

import functools

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div
from ..runtime.c_types import INDEX, WORDS
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters

SOURCE = "bitmask/bitmask_from_csr.cu"
WARPS, IMAGE = 8, 4096
"""Must match the constants of the kernel: warps of a block, columns that a warp takes at a time."""
LANES = 32
KERNELS = Kernels(SOURCE, WARPS * LANES)


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(*sizes) for sizes in ((1, 4, 4), (2, 4, 4), (2, 8, 4), (4, 4, 8), (8, 8, 8)))


@functools.lru_cache(maxsize=256)
def cut(K: int) -> tuple[int, int, int]:
    """(segments of a row, columns of each, rows): what a warp takes, one segment or that many whole rows. K >= 1."""
    whole = 8 * ceil_div(K, 8)
    if whole > IMAGE:
        return ceil_div(whole, IMAGE), IMAGE, 1
    return 1, whole, min(LANES, 1 << (IMAGE // whole).bit_length() - 1)


def bitmask_from_csr(shape: tuple[int, int], indptr: Array, indices: Array, data: Array) -> tuple[Array, Counters]:
    """(bitmask uint8[M, ceil(K/8)], counters: the first is not 0 if a stored value is zero) from the arrays of a valid
    CSR with M and K at least 1, all CuPy. The bit of a stored zero is 0. Does not wait for the device."""
    import cupy

    M, K = shape
    segments, width, rows = cut(K)
    bitmask, zeros = cupy.empty((M, ceil_div(K, 8)), "u1"), Counters()
    name = _instance(data.itemsize, indptr.itemsize, indices.itemsize)
    KERNELS.queue(
        name, "PPPqqqPqiiP", ceil_div(ceil_div(M, rows) * segments, WARPS),
        indptr, indices, data, M, K, value_type(data.dtype).zero_mask, bitmask, segments, width, rows, zeros.address,
    )  # fmt: skip
    return bitmask, zeros


@functools.cache
def _instance(size: int, pointer: int, index: int) -> str:
    return f"bitmask_from_csr<{WORDS[size]}, {INDEX[pointer]}, {INDEX[index]}>"
