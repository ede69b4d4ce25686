"""Which blocks a matrix stores, a bit each, and the index arrays of BSR and DBSR that follow.  Kernels: block_map.cu.

A word of a map is 4 bytes for 32 blocks, stored or not; 4 more and 8 more are needed to number them. In a map of a map
there are only words that are not 0, and then 8 more say which they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.library import Array, ceil_div, index_dtype
from ..runtime.offsets import Offsets
from ..runtime.queue import Kernels

SOURCE = "bsr/block_map.cu"
THREADS = 256
"""Threads of a block, as in the kernels."""
KERNELS = Kernels(SOURCE, THREADS)
BLOCKS = 4096
"""Most blocks of threads of the kernels here; each takes its share."""
WORD = 32
"""Blocks that a word of a map stands for."""
LARGE = 2**62
"""A bound on any sum of sizes, for which starts are int64."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return "blocks_in_words", "rows_with_blocks", "block_indices"


@dataclass(frozen=True)
class BlockMap:
    """Bits of the blocks of a grid of (Mb, Kb) blocks, block row by block row."""

    grid: tuple[int, int]
    bits: Array
    """uint32: ceil(Kb / 32) for each block row; if there is a map of the words, only those that it names."""
    words: NumberedBlocks | None = None
    """The map of the words that are not 0, on a grid of (Mb, ceil(Kb / 32))."""
    rows: Array | None = None
    """int64[Mb + 1]: the first word of each block row, where there is such a map."""
    columns: Array | None = None
    """int64: the place of each word in its block row, where there is such a map."""

    @classmethod
    def empty(cls, grid: tuple[int, int]) -> BlockMap:
        """A map without blocks on the current device, with all words."""
        import cupy

        return cls(grid, cupy.zeros(grid[0] * ceil_div(grid[1], WORD), np.uint32))

    @classmethod
    def of_words(cls, grid: tuple[int, int], words: NumberedBlocks, most: int) -> BlockMap:
        """A map without blocks that has only some words, ``most`` or fewer. Does not wait to know how many."""
        import cupy

        rows, columns = cupy.empty(grid[0] + 1, np.int64), cupy.empty(most, np.int64)
        words.write(rows, columns)
        return cls(grid, cupy.zeros(most, np.uint32), words, rows, columns)

    @property
    def across(self) -> int:
        """Words of a block row; of the map of words, if there is one."""
        return ceil_div(self.grid[1], WORD) if self.words is None else self.words.map.across

    def where(self) -> tuple[Any, ...]:
        """The arguments of a kernel that builds ``Words``."""
        if self.words is None:
            return 0, 0, self.across
        return self.words.map.bits, self.words.blocks.starts, self.across

    def numbered(self, listed: bool = False) -> NumberedBlocks:
        """The map with the numbers of its blocks, and for a DBSR (``listed``) of its block rows, too."""
        import cupy

        counts = cupy.empty(self.bits.size, np.uint32)
        KERNELS.queue("blocks_in_words", "PqP", _blocks(counts.size), self.bits, counts.size, counts)
        blocks, rows = Offsets(counts, LARGE), None
        if listed:
            counts = cupy.empty(self.grid[0], np.uint32)
            first = 0 if self.rows is None else self.rows
            args = blocks.starts, self.grid[0], first, self.across, counts
            KERNELS.queue("rows_with_blocks", "PqPqP", _blocks(counts.size), *args)
            rows = Offsets(counts, LARGE)
        return NumberedBlocks(self, blocks, rows)


@dataclass(frozen=True)
class NumberedBlocks:
    """A map whose blocks are numbered in the order of a BSR."""

    map: BlockMap
    blocks: Offsets
    """int64: stored blocks before each word."""
    rows: Offsets | None
    """int64[Mb + 1]: block rows with blocks before each, of a DBSR; None for a BSR."""

    def sizes(self) -> tuple[int, int]:
        """(stored blocks, block rows that a BSR or DBSR lists). Waits for the device, once."""
        nnzb = self.blocks.total()  # synchronize!
        return nnzb, self.map.grid[0] if self.rows is None else self.rows.total()

    def index_arrays(self, nnzb: int, rows: int) -> dict[str, Array]:
        """indptr, indices, and row_ids of a DBSR, as the formats want them, for the numbers that ``sizes`` returns."""
        import cupy

        Mb, Kb = self.map.grid
        indptr, indices = cupy.empty(rows + 1, index_dtype(nnzb)), cupy.empty(nnzb, index_dtype(Kb - 1))
        if self.rows is None:
            self.write(indptr, indices)
            return {"indptr": indptr, "indices": indices}
        row_ids = cupy.empty(rows, index_dtype(Mb - 1))
        self.write(indptr, indices, self.rows.starts, *_wide(row_ids))
        return {"row_ids": row_ids, "indptr": indptr, "indices": indices}

    def write(self, indptr: Array, indices: Array, places: Any = 0, row_ids: Any = 0, wide: int = 0) -> None:
        """Fill index arrays of int32 or int64; the last three are those of a DBSR, as block_map.cu says."""
        m, Mb = self.map, self.map.grid[0]
        known = (0, 0) if m.rows is None else (m.rows, m.columns)
        KERNELS.queue(
            "block_indices", "PPqqPPqPiPiPPi", _blocks(max(m.bits.size, Mb + 1)),
            m.bits, self.blocks.starts, m.bits.size, Mb, *known, m.across, *_wide(indices), *_wide(indptr),
            places, row_ids, wide,
        )  # fmt: skip


def _blocks(items: int) -> int:
    return min(BLOCKS, ceil_div(items, THREADS))


def _wide(x: Array) -> tuple[Array, int]:
    """An index array, and whether it is int64."""
    return x, int(x.dtype.itemsize == 8)
