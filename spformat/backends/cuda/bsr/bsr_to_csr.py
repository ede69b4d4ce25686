"""BSR and DBSR to CSR on the device.  Kernels: bsr_to_csr.cu."""

from __future__ import annotations

import functools

import numpy as np

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div, index_dtype, power_of_two
from ..runtime.c_types import INDEX, WORDS, index_type
from ..runtime.offsets import Offsets
from ..runtime.queue import Kernels
from .block_map import BLOCKS, THREADS

SOURCE = "bsr/bsr_to_csr.cu"
KERNELS = Kernels(SOURCE, THREADS)
LARGE = 2**62
"""A bound on any number of items, for which starts are int64."""
WARP, STEPS = 32, 32
"""Lanes of a warp, and how many times as many lines it takes as it reads side by side: as in the kernel."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    few = ((1, "int", "int"), (2, "int", "int"), (4, "long long", "int"), (8, "int", "long long"))
    lines = tuple(_instance(*types, fill) for types in few for fill in (False, True))
    return (*lines, "row_starts<int, int>", "row_starts<int, long long>", "row_starts<long long, int>")


def csr_of_blocks(
    shape: tuple[int, int], row_ids: Array | None, indptr: Array, indices: Array, data: Array
) -> dict[str, Array]:
    """indptr, indices and data of the CSR of a valid BSR or, with row_ids, DBSR that has blocks; all CuPy.

    Beside the result it takes 12 bytes for each row of a stored block. Waits for the device once.
    """
    import cupy

    (nnzb, R, C), (M, K) = data.shape, shape
    lanes = min(WARP, power_of_two(C))
    types = data.dtype.itemsize, index_type(indices), index_type(indptr)
    warps = ceil_div(nnzb * R, STEPS * (WARP // lanes))
    signature, grid = "qPPPqqiiiPPPiP", ceil_div(warps * WARP, THREADS)
    blocks = indptr.size - 1, indptr, indices, data, nnzb, value_type(data.dtype).zero_mask, R, C, lanes
    counts = cupy.empty(nnzb * R, np.uint32)
    KERNELS.queue(_instance(*types, False), signature, grid, *blocks, counts, 0, 0, 0, 0)
    offsets = Offsets(counts, LARGE)
    nnz = offsets.total()  # synchronize!
    columns, values = cupy.empty(nnz, index_dtype(K - 1)), cupy.empty(nnz, data.dtype)
    wide = int(columns.dtype.itemsize == 8)
    KERNELS.queue(_instance(*types, True), signature, grid, *blocks, 0, offsets.starts, columns, wide, values)
    pointer = cupy.empty(M + 1, index_dtype(nnz))
    listed = INDEX[4] if row_ids is None else index_type(row_ids)
    KERNELS.queue(
        f"row_starts<{listed}, {types[2]}>", "PqPqiPPi", min(BLOCKS, ceil_div(M + 1, THREADS)),
        0 if row_ids is None else row_ids, indptr.size - 1, indptr, M, R, offsets.starts, pointer,
        int(pointer.dtype.itemsize == 8),
    )  # fmt: skip
    return {"indptr": pointer, "indices": columns, "data": values}


@functools.cache
def _instance(itemsize: int, index: str, pointer: str, fill: bool) -> str:
    return f"lines_of_blocks<{WORDS[itemsize]}, {index}, {pointer}, {str(fill).lower()}>"
