"""Dense matrices to BSR and DBSR on the device.  Kernels: bsr_from_dense.cu, block_map.cu."""

from __future__ import annotations

import functools
import math
from sys import modules
from typing import Any, NamedTuple

import numpy as np

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div, power_of_two
from ....formats.blocks import block_grid
from ..masks.block_norms import block_norms
from ..masks.magnitude_mask import mask_of_largest
from ..runtime.c_types import WORDS
from ..runtime.offsets import tile_sums
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters, Workspace, new_arrays
from .block_map import BLOCKS, FEW_WORDS, INDICES, THREADS, WORD, BlockMap

SOURCE = "bsr/bsr_from_dense.cu"
KERNELS = Kernels(SOURCE, THREADS)
MARK, COPY = "PqqiiqPqiiiqqqPqPPPP", "PqqiiqPPqqiiiPi" + INDICES
"""The parameters of the kernels."""
UNIT, MOST, WARP = 16, 64, 32
"""Bytes of a row that a lane marks, and words of the map that a block of threads copies: as in the kernels."""
STRIP = 32
"""Rows that a warp marks."""
INT32 = np.dtype(np.int32)
BYTES = 64 * 1024
"""Bytes of x that a block of threads looks after when it copies blocks."""


class Marking(NamedTuple):
    """How warps share x: the last parameters of ``mark_blocks``."""

    across: int
    together: int
    height: int
    strips: int
    segments: int
    tasks: int


class Copying(NamedTuple):
    """How blocks of threads share the stored blocks: ``span`` words of the map, strips of ``height`` rows."""

    span: int
    height: int
    strips: int


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    pairs = ((1, 1), (1, 16), (2, 2), (2, 8), (2, 16), (4, 4), (4, 16), (8, 8), (8, 16))
    return tuple(_instance(kernel, *pair) for kernel in ("mark_blocks", "copy_blocks") for pair in pairs)


def blocks_of_dense(x: Array, blocksize: tuple[int, int], listed: bool) -> tuple[dict[str, Array], Array]:
    """(index arrays, data) of the BSR, or if ``listed`` the DBSR, of a CuPy array [M, K] in C order.

    Waits for the device once. x must have elements, and start on one of them.
    """
    few = _few(x.shape, x.dtype, blocksize, listed, x.data.ptr % UNIT)
    if few is not None:
        return _blocks_of_few(x, blocksize, few)
    grid, sizes = block_grid(x.shape, blocksize), Counters(1 + listed)
    blocks = BlockMap.empty(grid, listed)
    mark(x, blocksize, blocks)
    blocks.number(sizes.address)
    nnzb, rows = sizes.get()  # synchronize!
    return arrays_of(x, blocksize, blocks, nnzb, rows if listed else grid[0])


class _Few(NamedTuple):
    """The two launches for a matrix whose map has at most ``FEW_WORDS`` words, as far as its shape, its type and its
    first address decide them. To collect that anew takes the host longer than a small matrix takes the device."""

    grid: tuple[int, int]
    words: int
    across: int
    listed: bool
    room: tuple[int, int, int]
    """Bytes of bits, starts and places."""
    tiles: int
    mark: tuple[str, int, tuple[int, ...], tuple[int, ...]]
    """Name and blocks of the kernel, its arguments after x, and those after the bits."""
    copy: tuple[str, int, tuple[int, ...], tuple[int, ...]]
    """The same, and ``Copying``."""


@functools.lru_cache(maxsize=256)
def _few(
    shape: tuple[int, int], dtype: Any, blocksize: tuple[int, int], listed: bool, start: int
) -> _Few | None:  # fmt: skip
    """start: the first byte of x after a boundary of 16. None for a map of many words."""
    grid, size = block_grid(shape, blocksize), dtype.itemsize
    across = ceil_div(grid[1], WORD)
    words = grid[0] * across
    if words > FEW_WORDS:
        return None
    how, cut = marking(shape, size, blocksize[0]), copying(grid, blocksize, size)
    head = *shape, *blocksize, value_type(dtype).zero_mask
    line = math.gcd(UNIT, start, shape[1] * size)
    copies = ceil_div(words, cut.span) * cut.strips
    writers = min(BLOCKS, ceil_div(max(words, grid[0] + 1), THREADS))
    return _Few(
        grid, words, across, listed, (4 * words, 8 * (words + 1), 8 * (grid[0] + 1) * listed), ceil_div(words, 2),
        (_instance("mark_blocks", size, line), ceil_div(how.tasks * WARP, THREADS), head, (across, *how)),
        (_instance("copy_blocks", size, math.gcd(line, blocksize[1] * size)), copies + writers, head, (*cut, copies)),
    )  # fmt: skip


def _blocks_of_few(x: Array, blocksize: tuple[int, int], few: _Few) -> tuple[dict[str, Array], Array]:
    """``blocks_of_dense`` for a map of few words, which the marking kernel numbers itself."""
    empty, Mb, across, listed = modules["cupy"].empty, few.grid[0], few.across, few.listed
    work, sizes, finished = Workspace(*few.room), Counters(1 + listed), tile_sums(few.tiles)
    bits, starts, places = work.places
    places *= listed
    name, count, head, tail = few.mark
    KERNELS.queue(name, MARK, count, x, *head, finished + 16, *tail, finished, Mb, bits, starts, places, sizes.address)
    # While the kernel runs. Blocks, block rows and block columns are few enough for int32.
    indptr = None if listed else empty(Mb + 1, INT32)
    name, count, head, (span, height, strips, copies) = few.copy
    nnzb, rows = sizes.get()  # synchronize!
    if not nnzb:
        blocks = BlockMap(few.grid, few.words, across, work, bits, starts, places)
        return blocks.index_arrays(nnzb, rows if listed else Mb), empty((0, *blocksize), x.dtype)
    wanted, row_ids = (((nnzb, *blocksize), x.dtype), ((nnzb,), INT32)), None
    if indptr is None:
        data, indices, row_ids, indptr = new_arrays(*wanted, ((rows,), INT32), ((rows + 1,), INT32))
    else:
        data, indices = new_arrays(*wanted)
    KERNELS.queue(
        name, COPY, count, x, *head, bits, starts, across, few.words, span, height, strips, data, copies,
        Mb, indices, 0, indptr, 0, places, row_ids, 0,
    )  # fmt: skip
    if row_ids is None:
        return {"indptr": indptr, "indices": indices}, data
    return {"row_ids": row_ids, "indptr": indptr, "indices": indices}, data


def blocks_of_largest(
    x: Array, blocksize: tuple[int, int], count: int, norm: str, listed: bool
) -> tuple[dict[str, Array], Array, int]:
    """(index arrays, data, values of x that are not finite) of the ``count`` blocks of x of largest ``norm``, "l1" or
    "l2". Of equal norms the first blocks stay. Other arguments as for ``blocks_of_dense``; count: 1 or more.

    x is read once for the norms, and what stays of it once more. Blocks whose norm is 0 must be zeros: not so the "l2"
    norms of float64, whose squares may be too small. Waits for the device once.
    """
    import cupy

    blocks, odd = BlockMap.empty(block_grid(x.shape, blocksize), listed, zeros=False), Counters()
    norms, keep = cupy.empty(blocks.grid, "float64"), cupy.empty(blocks.grid, "bool")
    block_norms(x, blocksize, norm, norms, odd.address)
    mask_of_largest(norms, count, keep, odd.address + 8)  # the second word: norms that are not finite, counted before
    blocks.set_kept(keep, norms)
    sizes = blocks.sizes()  # synchronize!
    counted = odd.get()[0]  # before the next launch, so that nothing is waited for
    return *arrays_of(x, blocksize, blocks, *sizes), counted


def arrays_of(
    x: Array, blocksize: tuple[int, int], blocks: BlockMap, nnzb: int, rows: int
) -> tuple[dict[str, Array], Array]:
    """(index arrays, data) of the ``nnzb`` blocks of x whose bits are set, of a map that is numbered; rows: as
    ``BlockMap.sizes`` returns them. Does not wait."""
    import cupy

    data = cupy.empty((nnzb, *blocksize), x.dtype)
    if not nnzb:
        return blocks.index_arrays(nnzb, rows), data
    arrays = blocks.empty_arrays(nnzb, rows)
    copy(x, blocksize, blocks, data, arrays)
    return arrays, data


def mark(x: Array, blocksize: tuple[int, int], blocks: BlockMap) -> None:
    """Set the bits of the blocks of x [M, K] that have a nonzero."""
    width = math.gcd(UNIT, x.data.ptr, x.shape[1] * x.dtype.itemsize)
    how = marking(x.shape, x.dtype.itemsize, blocksize[0])
    KERNELS.queue(
        _instance("mark_blocks", x.dtype.itemsize, width), MARK,
        ceil_div(how.tasks * WARP, THREADS), x, *x.shape, *blocksize, value_type(x.dtype).zero_mask,
        blocks.bits, blocks.across, *how, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip


def copy(x: Array, blocksize: tuple[int, int], blocks: BlockMap, data: Array, arrays: dict[str, Array]) -> None:
    """Fill data [nnzb, R, C] with the blocks of x [M, K] whose bits are set, of which there are some, and their index
    arrays."""
    itemsize, words = x.dtype.itemsize, blocks.size
    width = math.gcd(UNIT, x.data.ptr, x.shape[1] * itemsize, blocksize[1] * itemsize)
    how = copying(blocks.grid, blocksize, itemsize)
    copies = ceil_div(words, how.span) * how.strips
    KERNELS.queue(
        _instance("copy_blocks", itemsize, width), COPY, copies + blocks.blocks_of_indices(),
        x, *x.shape, *blocksize, value_type(x.dtype).zero_mask, blocks.bits, blocks.starts, blocks.across,
        words, *how, data, copies, *blocks.arguments(arrays),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def marking(shape: tuple[int, int], itemsize: int, R: int) -> Marking:
    """The shares of warps for a matrix with elements in blocks of R rows."""
    M, K = shape
    across = min(WARP, power_of_two(ceil_div(K * itemsize, UNIT)))
    down = WARP // across
    together = down if down > R else 1
    height = min(R, max(STRIP, down))
    strips, segments = ceil_div(R, height), ceil_div(K * itemsize, UNIT * across)
    return Marking(across, together, height, strips, segments, ceil_div(ceil_div(M, R), together) * strips * segments)


@functools.lru_cache(maxsize=256)
def copying(grid: tuple[int, int], blocksize: tuple[int, int], itemsize: int) -> Copying:
    """The shares of blocks of threads: about ``BYTES`` of x each."""
    R, C = blocksize
    line = min(WORD, grid[1]) * C * itemsize
    height = min(R, max(1, BYTES // line))
    span = max(1, min(MOST, BYTES // (line * height)))
    return Copying(span, height, ceil_div(R, height))


@functools.cache
def _instance(kernel: str, itemsize: int, width: int) -> str:
    return f"{kernel}<{WORDS[itemsize]}, {width}>"
