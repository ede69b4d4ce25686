"""CSR to BSR and DBSR on the device, without a sort.  Kernels: bsr_from_csr.cu, block_map.cu."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div
from ..runtime.c_types import WORDS, index_type
from ..runtime.queue import Kernels
from .block_map import THREADS, WORD, BlockMap

SOURCE = "bsr/bsr_from_csr.cu"
KERNELS = Kernels(SOURCE, THREADS)
CHUNK = 1024
"""Items of a warp, as in the kernel."""
WARP = 32


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    few = ((1, "int", "int"), (2, "int", "int"), (4, "long long", "int"), (8, "int", "long long"))
    return tuple(_instance(*types, scatter) for types in few for scatter in (False, True))


SMALL, FACTOR = 1 << 20, 4
"""Words of a map that need no justification (12 MB with what is computed from them); most words for an item."""


def fits(grid: tuple[int, int], items: int) -> bool:
    """Whether a map of the grid is small, or has so few words for each item that its memory is O(items)."""
    return grid[0] * ceil_div(grid[1], WORD) <= max(SMALL, FACTOR * items)


def worth(grid: tuple[int, int], items: int) -> bool:
    """Whether a map of the grid fits, or a map of its words. The latter takes 68 bytes for an item at most: 48 for the
    map of words, 20 for the words that items can name."""
    return fits((grid[0], ceil_div(grid[1], WORD)), items)


def blocks_of_csr(
    shape: tuple[int, int],
    csr: tuple[Array, Array, Array],
    blocksize: tuple[int, int],
    listed: bool,
    accept: Callable[[int], None],
) -> tuple[dict[str, Array], Array]:
    """(index arrays, data) of the BSR, or if ``listed`` the DBSR, of a valid CSR's (indptr, indices, data), all CuPy.

    ``accept`` is called with the number of blocks before their memory is allocated. The CSR must have items, stored
    zeros allowed, which are dropped, and be ``worth`` it. Waits for the device once.
    """
    import cupy

    (R, C), dtype, items = blocksize, csr[2].dtype, csr[2].size
    grid = ceil_div(shape[0], R), ceil_div(shape[1], C)
    if fits(grid, items):
        blocks = BlockMap.empty(grid, listed)
    else:
        words = BlockMap.empty((grid[0], ceil_div(grid[1], WORD)))
        _pass(shape[0], csr, words, (R, WORD * C))
        words.number()
        blocks = BlockMap.of_words(grid, words, items, listed)
    _pass(shape[0], csr, blocks, blocksize)
    nnzb, rows = blocks.sizes()  # synchronize!
    accept(nnzb)
    out = cupy.zeros((nnzb, R, C), dtype)
    if nnzb:
        _pass(shape[0], csr, blocks, blocksize, blocks.starts, out)
    return blocks.index_arrays(nnzb, rows), out


def _pass(M: int, csr: tuple[Array, Array, Array], blocks: BlockMap, blocksize: tuple[int, int], *scatter: Any) -> None:
    """Mark the blocks of all items; or, with ``starts`` of the map and ``out``, write the values."""
    indptr, indices, data = csr
    instance = _instance(data.dtype.itemsize, index_type(indices), index_type(indptr), bool(scatter))
    KERNELS.queue(
        instance, "PqPPqqiiPPPqPP", ceil_div(ceil_div(data.size, CHUNK) * WARP, THREADS),
        indptr, M, indices, data, data.size, value_type(data.dtype).zero_mask, *blocksize, blocks.bits,
        *blocks.where(), *(scatter or (0, 0)),
    )  # fmt: skip


@functools.cache
def _instance(itemsize: int, index: str, pointer: str, scatter: bool) -> str:
    return f"items_to_blocks<{WORDS[itemsize]}, {index}, {pointer}, {str(scatter).lower()}>"
