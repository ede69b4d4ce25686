"""The part of a sum that is stored in blocks or as 2:4, as spmm_sum.cu takes it, and the tiles of the product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Array, ceil_div, namespace
from ....formats.base import Format
from ....products.problem import Operand, Problem
from ..runtime.launch import finish_arrays
from ..two_four.two_four_records import TwoFourRecords
from .sum_work import CHUNK, RowTiles

BLOCKS, TWO_FOUR = ("bsr", "dbsr"), "two-four"
KERNEL_ORDERS = ("ldmatrix", "fragment")
"""Orders of the metadata of 2:4 in 32 bits whose tiles of 16 rows and 64 columns the kernel reads."""
STAGES = 3
"""Buffers of the ring of shared memory; the same in the kernel."""
STATIC = 64
"""Bytes of shared memory beside it."""


@dataclass(frozen=True)
class Tile:
    """A block of threads computes ``rows`` x ``cols`` of C, by 4 warps across times ``warps`` down."""

    rows: int
    cols: int
    warps: int = 1

    @property
    def threads(self) -> int:
        return 128 * self.warps

    def smem(self, size: int, depth: int) -> int:
        """Bytes of dynamic shared memory: the ring, then the sums and those that warps carry over. depth: columns of A
        in a buffer of the ring; 0 without one."""
        pad = 16 // size if depth else 0
        ring = STAGES * size * (self.rows * (depth + pad) + depth * (self.cols + pad))
        return max(ring, 4 * (self.rows * (self.cols + 4) + 4 * self.warps * self.cols))

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"


class Structured(NamedTuple):
    """The structured part, or none."""

    part: Any
    template: str
    """The kernel's name for it."""
    arguments: tuple[Any, ...]
    """Of the kernel: values, block columns, metadata, and its words from row to row and from chunk to chunk."""
    height: int
    """Rows of a block; of a tile where there are no blocks."""
    width: int
    """Columns of a block, or of a chunk of 2:4."""
    depth: int = 0
    """Columns of A in a buffer of the ring; 0 without a ring."""
    merges: bool = False
    """Whether scattered items are put into the chunks of this part, as in a 2:4 one."""

    @property
    def chunks(self) -> int:
        """Chunks of a row where items are merged into them, else 0."""
        return ceil_div(self.part.shape[1], CHUNK) if self.merges else 0

    def rows_of_b(self, tiles: RowTiles) -> int:
        """Rows of B that all tiles together load for this part."""
        if self.part is None:
            return 0
        return tiles.number * self.chunks * CHUNK if self.merges else tiles.in_block * self.part.stored // self.height

    def blocks_of(self, tiles: RowTiles, xp: Any) -> tuple[Array, Array]:
        """(first block, number of blocks) of each tile, in arrays of the library ``xp``."""
        if self.part is not None and not self.merges:
            return blocks_of_tiles(self.part, tiles)
        none = xp.zeros(tiles.number, np.int64)
        return none, none + self.chunks


def structured_of(parts: Sequence[Format], tile: Tile, p: Problem) -> Structured:
    """The part in bsr, dbsr or two-four among ``parts`` of ``p``, of which there is at most one."""
    part: Any = next((x for x in parts if x.name in (*BLOCKS, TWO_FOUR)), None)
    if part is None:
        return Structured(None, "Nothing", (0, 0, 0, 0, 0), tile.rows, 1)
    if part.name in BLOCKS:
        index, (height, width) = "long long" if part.indices.dtype.itemsize == 8 else "int", part.blocksize
        arguments = (part.data, part.indices, 0, 0, 0)
        return Structured(part, f"Blocks<{index}, {height}, {width}>", arguments, height, width, 32)

    if part.dtype.itemsize == 2:
        return Structured(part, "TwoFour", (TwoFourRecords().of(part, p), 0, 0, 0, 0), tile.rows, CHUNK, CHUNK, True)

    def build() -> Any:
        ordered = part.with_meta_order(KERNEL_ORDERS[0])
        finish_arrays()  # synchronize!
        return ordered

    if part.meta_order not in KERNEL_ORDERS:
        part = part.kernel_arrays("ldmatrix order", build)
    padded = ceil_div(part.shape[1], CHUNK) * CHUNK
    steps = (padded // 8, 8) if part.meta_order == "ldmatrix" else (8, CHUNK)
    return Structured(part, "TwoFour", (part.data, 0, part.meta, *steps), tile.rows, CHUNK, CHUNK, True)


def blocks_of_tiles(part: Any, tiles: RowTiles) -> tuple[Array, Array]:
    """(first block, number of blocks) of each tile for a part in BSR or DBSR."""
    pointer = part.indptr.astype(np.int64)
    first, counts = pointer[:-1], pointer[1:] - pointer[:-1]
    xp = namespace(pointer)
    if part.name == "dbsr":
        listed = part.row_ids
        every = xp.zeros((2, ceil_div(tiles.M, tiles.height)), np.int64)
        every[0, listed], every[1, listed] = first, counts
        first, counts = every[0], every[1]
    of_tile = xp.arange(tiles.number, dtype=np.int64) // tiles.in_block
    return first[of_tile], counts[of_tile]


def part_problem(p: Problem, part: Operand) -> Problem:
    """The product with one of the parts alone."""
    return replace(p, operands=(part, *p.operands[1:]), epilogue=False)
