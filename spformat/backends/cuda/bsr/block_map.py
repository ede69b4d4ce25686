"""Which blocks a matrix stores, a bit each, and the index arrays of BSR and DBSR that follow.  Kernels: block_map.cu.

A map has 4 bytes for the bits of 32 blocks, stored or not, and 8 for the number of blocks before them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.library import Array, ceil_div, index_dtype, is_cupy
from ..runtime import jit
from ..runtime.launch import Launch
from ..runtime.offsets import Offsets

SOURCE = "bsr/block_map.cu"
THREADS = 256
"""Threads of a block, as in the kernels."""
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
    """Bits of the blocks of a grid of (Mb, Kb) blocks, block row by block row; ``words`` uint32 for a block row."""

    grid: tuple[int, int]
    words: int
    bits: Array
    """uint32[Mb * words]"""

    @classmethod
    def empty(cls, grid: tuple[int, int]) -> BlockMap:
        """A map without blocks on the current device."""
        import cupy

        words = ceil_div(grid[1], WORD)
        return cls(grid, words, cupy.zeros(grid[0] * words, np.uint32))

    def numbered(self, listed: bool = False) -> NumberedBlocks:
        """The map with the numbers of its blocks, and for a DBSR (``listed``) of its block rows, too."""
        import cupy

        counts = cupy.empty(self.bits.size, np.uint32)
        queue(SOURCE, "blocks_in_words", "PqP", _blocks(counts.size), self.bits, counts.size, counts)
        blocks, rows = Offsets(counts, LARGE), None
        if listed:
            counts = cupy.empty(self.grid[0], np.uint32)
            args = blocks.starts, self.grid[0], self.words, counts
            queue(SOURCE, "rows_with_blocks", "PqqP", _blocks(counts.size), *args)
            rows = Offsets(counts, LARGE)
        return NumberedBlocks(self, blocks, rows)


@dataclass(frozen=True)
class NumberedBlocks:
    """A map whose blocks are numbered in the order of a BSR."""

    map: BlockMap
    blocks: Offsets
    """int64[Mb * words + 1]: stored blocks before each word."""
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
        arrays = {"indptr": indptr, "indices": indices}
        listed: tuple[Any, ...] = (0, 0, 0)
        if self.rows is not None:
            arrays["row_ids"] = cupy.empty(rows, index_dtype(Mb - 1))
            listed = self.rows.starts, *_wide(arrays["row_ids"])
        queue(
            SOURCE, "block_indices", "PPqqPiPiPPi", _blocks(max(self.map.bits.size, Mb + 1)),
            self.map.bits, self.blocks.starts, Mb, self.map.words, *_wide(indices), *_wide(indptr), *listed,
        )  # fmt: skip
        return arrays


def queue(source: str, instance: str, signature: str, blocks: int, *args: Any) -> None:
    """Launch a kernel of THREADS threads a block on the current stream. CuPy arrays stand for their addresses."""
    import cupy

    device = cupy.cuda.runtime.getDevice()
    launch = _launch(source, instance, signature, _arch(device), device)
    stream = int(cupy.cuda.get_current_stream().ptr)
    launch((blocks, 1, 1), stream, *(a.data.ptr if is_cupy(a) else a for a in args))


@functools.cache
def _launch(source: str, instance: str, signature: str, arch: str, device_id: int) -> Launch:
    return Launch(jit.load(source, instance, arch, device_id), signature, (), THREADS)


@functools.cache
def _arch(device_id: int) -> str:
    import cupy

    return jit.architecture(int(cupy.cuda.Device(device_id).compute_capability), ())


def _blocks(items: int) -> int:
    return min(BLOCKS, ceil_div(items, THREADS))


def _wide(x: Array) -> tuple[Array, int]:
    """An index array, and whether it is int64."""
    return x, int(x.dtype.itemsize == 8)
