"""The transpose of a BSR or DBSR on the device, without a sort.  Kernels: bsr_transpose.cu, block_map.cu."""

from __future__ import annotations

import numpy as np

from ....arrays.library import Array, ceil_div
from ..runtime.c_types import INDEX, WORDS, index_type
from ..runtime.queue import Kernels
from .block_map import THREADS, WORD, BlockMap

SOURCE = "bsr/bsr_transpose.cu"
KERNELS = Kernels(SOURCE, THREADS)
SIDE, MOST = 32, 1024
ROOM = 4 * SIDE * (SIDE + 1)
"""Rows and columns of a tile, most blocks that are moved together, values in shared memory: as in the kernel."""
SMALL = 1 << 20
"""Words of a map that need no justification: 12 MB with what is computed from them."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    marks = (("int", "int", "int"), ("long long", "int", "int"), ("int", "long long", "long long"))
    moves = (f"move_blocks<{word}, {index}>" for word in WORDS.values() for index in INDEX.values())
    return (*(f"mark_transposed<{', '.join(types)}>" for types in marks), *moves)


def worth(grid: tuple[int, int], nbytes: int) -> bool:
    """Whether a map of the transposed grid of (Mb, Kb) blocks is small, or with what is computed from it takes no more
    memory than ``nbytes``, those of the blocks."""
    words = grid[1] * ceil_div(grid[0], WORD)
    return words <= SMALL or 12 * words <= nbytes


def transposed_blocks(
    grid: tuple[int, int], row_ids: Array | None, indptr: Array, indices: Array, data: Array
) -> tuple[dict[str, Array], Array]:
    """(index arrays, data) of the BSR that is the transpose of a valid BSR or, with row_ids, DBSR of (Mb, Kb) blocks.

    There must be blocks. Does not wait for the device.
    """
    import cupy

    (nnzb, R, C), listed = data.shape, indptr.size - 1
    blocks, rows = BlockMap.empty((grid[1], grid[0])), cupy.empty(nnzb, np.int64)
    column, pointer = index_type(indices), index_type(indptr)
    row = INDEX[4] if row_ids is None else index_type(row_ids)
    KERNELS.queue(
        f"mark_transposed<{row}, {pointer}, {column}>", "PqPPqPPq", ceil_div(nnzb, THREADS),
        0 if row_ids is None else row_ids, listed, indptr, indices, nnzb, rows, blocks.bits, blocks.across,
    )  # fmt: skip
    blocks.number()
    out = cupy.empty((nnzb, C, R), data.dtype)
    together, down, across = tiles(R, C)
    KERNELS.queue(
        f"move_blocks<{WORDS[data.dtype.itemsize]}, {column}>", "PPPqiiPqPiiiP",
        ceil_div(nnzb, together) * down * across, rows, indices, data, nnzb, R, C, blocks.bits, blocks.across,
        blocks.starts, together, down, across, out,
    )  # fmt: skip
    return blocks.index_arrays(nnzb, grid[1]), out


def tiles(R: int, C: int) -> tuple[int, int, int]:
    """(blocks that a block of threads moves together, tiles of a block down and across)"""
    if R > SIDE or C > SIDE:
        return 1, ceil_div(R, SIDE), ceil_div(C, SIDE)
    return max(1, min(MOST, ROOM // (R * (C + 1)))), 1, 1
