"""Which blocks a matrix stores, a bit each, and the index arrays of BSR and DBSR that follow.  Kernels: block_map.cu.

A word of a map is 4 bytes for 32 blocks, stored or not; 8 more are needed to number them. In a map of a map there are
only words that are not 0, and then 8 more say which they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Array, ceil_div, index_dtype
from ..runtime import offsets
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters, Workspace

SOURCE = "bsr/block_map.cu"
THREADS = 256
"""Threads of a block, as in the kernels."""
KERNELS, NUMBERS = Kernels(SOURCE, THREADS), Kernels(SOURCE, offsets.THREADS)
"""The kernels of the file by the threads of their blocks."""
BLOCKS = 4096
"""Most blocks of threads of the kernels here; each takes its share."""
WORD = 32
"""Blocks that a word of a map stands for."""
FEW_WORDS = 8192
"""Words of a map that the last block of a kernel numbers; the same in block_map.cuh."""
INDICES = "qPiPiPPi"
"""The parameters of a kernel for ``BlockMap.arguments``."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return "number_blocks", "number_rows", "block_indices", "bits_of_kept"


class BlockMap(NamedTuple):
    """Bits of the blocks of a grid of (Mb, Kb) blocks, block row by block row, and their numbers in the order of a BSR.

    bits, starts and places are addresses in ``work``; the last two are filled by ``number``.
    """

    grid: tuple[int, int]
    size: int
    """Words: ceil(Kb / 32) for each block row; if there is a map of the words, only those that it names."""
    across: int
    """Words of a block row; of the map of words, if there is one."""
    work: Workspace
    bits: int
    """uint32[size]"""
    starts: int
    """int64[size + 1]: stored blocks before each word."""
    places: int
    """int64[Mb + 1]: block rows with blocks before each, of a DBSR; 0 for a BSR."""
    words: BlockMap | None = None
    """The map of the words that are not 0, on a grid of (Mb, ceil(Kb / 32))."""
    rows: Array | None = None
    """int64[Mb + 1]: the first word of each block row, where there is such a map."""
    columns: Array | None = None
    """int64: the place of each word in its block row, where there is such a map."""

    @classmethod
    def empty(cls, grid: tuple[int, int], listed: bool = False, zeros: bool = True) -> BlockMap:
        """A map without blocks on the current device, with all words. listed: for a DBSR. zeros: False if a kernel
        writes all its bits, which are any before."""
        across = ceil_div(grid[1], WORD)
        return cls(grid, grid[0] * across, across, *_memory(grid[0], grid[0] * across, listed, zeros))

    @classmethod
    def of_words(cls, grid: tuple[int, int], words: BlockMap, most: int, listed: bool) -> BlockMap:
        """A map without blocks that has only some words, ``most`` or fewer. Does not wait to know how many."""
        import cupy

        rows, columns = cupy.empty(grid[0] + 1, np.int64), cupy.empty(most, np.int64)
        words.write(rows, columns)
        return cls(grid, most, words.across, *_memory(grid[0], most, listed, True), words, rows, columns)

    def where(self) -> tuple[int, int, int]:
        """The arguments of a kernel that builds ``Words``."""
        return (0, 0, self.across) if self.words is None else (self.words.bits, self.words.starts, self.across)

    def number(self, sizes: int = 0) -> None:
        """Number the blocks, and for a DBSR the block rows that have some. sizes: address for the numbers of both."""
        tiles = offsets.tiles_of(self.size)
        NUMBERS.queue(
            "number_blocks", "PqPPP", tiles, self.bits, self.size, self.starts, offsets.tile_sums(tiles), sizes
        )
        if self.places:
            tiles = offsets.tiles_of(self.grid[0])
            NUMBERS.queue(
                "number_rows", "PqPqPPP", tiles,
                self.starts, self.grid[0], self.rows, self.across, self.places, offsets.tile_sums(tiles),
                sizes and sizes + 8,
            )  # fmt: skip

    def set_kept(self, keep: Array, norms: Array) -> None:
        """Set the bits of the blocks for which ``keep`` bool[Mb, Kb] is True and ``norms`` float64[Mb, Kb] not 0, of a
        map with all words."""
        KERNELS.queue(
            "bits_of_kept", "PPqqqP", min(BLOCKS, ceil_div(self.size, THREADS // WORD)),
            keep, norms, *self.grid, self.across, self.bits,
        )  # fmt: skip

    def sizes(self) -> tuple[int, int]:
        """``number``, and (stored blocks, block rows that a BSR or DBSR lists). Waits for the device, once."""
        sizes = Counters(2 if self.places else 1)
        self.number(sizes.address)
        nnzb, rows = sizes.get()  # synchronize!
        return nnzb, rows if self.places else self.grid[0]

    def index_arrays(self, nnzb: int, rows: int) -> dict[str, Array]:
        """indptr, indices, and row_ids of a DBSR, as the formats want them, for the numbers that ``sizes`` returns."""
        arrays = self.empty_arrays(nnzb, rows)
        self.write(arrays["indptr"], arrays["indices"], self.places, *_ids(arrays))
        return arrays

    def empty_arrays(self, nnzb: int, rows: int) -> dict[str, Array]:
        """``index_arrays``, uninitialised."""
        import cupy

        Mb, Kb = self.grid
        indptr, indices = cupy.empty(rows + 1, index_dtype(nnzb)), cupy.empty(nnzb, index_dtype(Kb - 1))
        if not self.places:
            return {"indptr": indptr, "indices": indices}
        return {"row_ids": cupy.empty(rows, index_dtype(Mb - 1)), "indptr": indptr, "indices": indices}

    def arguments(self, arrays: dict[str, Array]) -> tuple[Any, ...]:
        """The last arguments of a kernel that calls ``write_block_indices`` for these arrays: ``INDICES``."""
        return (
            self.grid[0], *_wide(arrays["indices"]), *_wide(arrays["indptr"]), self.places, *_ids(arrays),
        )  # fmt: skip

    def blocks_of_indices(self) -> int:
        """Blocks of threads that write the index arrays."""
        return min(BLOCKS, ceil_div(max(self.size, self.grid[0] + 1), THREADS))

    def write(self, indptr: Array, indices: Array, places: int = 0, row_ids: Any = 0, wide: int = 0) -> None:
        """Fill index arrays of int32 or int64; the last three are those of a DBSR, as block_map.cu says."""
        Mb = self.grid[0]
        KERNELS.queue(
            "block_indices", "PPqqPPqPiPiPPi", self.blocks_of_indices(),
            self.bits, self.starts, self.size, Mb, self.rows, self.columns, self.across,
            *_wide(indices), *_wide(indptr), places, row_ids, wide,
        )  # fmt: skip


def _memory(Mb: int, words: int, listed: bool, zeros: bool) -> tuple[Workspace, int, int, int]:
    """(memory, bits, starts, places) of a map of so many words; the bits zero if ``zeros``."""
    work = Workspace(4 * words, 8 * (words + 1), 8 * (Mb + 1) * listed)
    bits, starts, places = work.places
    if zeros:
        from cupy.cuda import get_current_stream, runtime

        runtime.memsetAsync(bits, 0, 4 * words, get_current_stream().ptr)
    return work, bits, starts, places * listed


def _wide(x: Array) -> tuple[Array, int]:
    """An index array, and whether it is int64."""
    return x, int(x.dtype.itemsize == 8)


def _ids(arrays: dict[str, Array]) -> tuple[Any, int]:
    """``row_ids`` of a DBSR and whether they are int64, or null."""
    return _wide(arrays["row_ids"]) if "row_ids" in arrays else (0, 0)
