"""Dense arrays to SR-BCRS on the device: two passes over the array.  Kernels: sr_bcrs_from_dense.cu."""

from __future__ import annotations

import functools
from sys import modules
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Array, ceil_div
from ..runtime.c_types import INDEX, WORDS
from ..runtime.expansion import UNIT
from ..runtime.offsets import tile_sums
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters, Workspace
from .sr_bcrs_pieces import FEW

SOURCE = "sr_bcrs/sr_bcrs_from_dense.cu"
THREADS, PIECE, IN_FLIGHT, IMAGE = 256, 1024, 8, 16 * 1024
"""The same as in the kernels: threads of a block, columns that a warp takes, rows that a thread reads at a time, bytes
of the values that a block of the last kernel puts together."""
FEW_TILES = 2048
"""Row tiles whose groups the last marking block counts; the same in tile_pieces.cuh."""
MOST_OWNERS = 1 << 20
"""Groups that a matrix may have at most for which memory is taken before they are counted."""
WARPS = THREADS // 32
INT32 = np.dtype(np.int32)
KERNELS = Kernels(SOURCE, THREADS)
ENOUGH = 1024
"""Blocks that fill any device several times over; to have more of them, a block takes fewer groups."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    values = ("unsigned char, false", "unsigned short, true", "unsigned int, true", "unsigned long long, true")
    marks = [f"mark_vectors<{v}, {wide}>" for v in values for wide in ("true", "false")]
    lists = [f"list_vectors<{p}, {i}>" for p in INDEX.values() for i in INDEX.values()]
    return (*marks, *lists, *(f"gather_vectors<{v}, {i}>" for v in values for i in INDEX.values()))


@functools.cache
def _mark(itemsize: int, signed: bool, wide: bool) -> str:
    return f"mark_vectors<{WORDS[itemsize]}, {str(signed).lower()}, {str(wide).lower()}>"


@functools.cache
def _list(ptr: int, idx: int) -> str:
    return f"list_vectors<{INDEX[ptr]}, {INDEX[idx]}>"


@functools.cache
def _gather(itemsize: int, signed: bool, idx: int) -> str:
    return f"gather_vectors<{WORDS[itemsize]}, {str(signed).lower()}, {INDEX[idx]}>"


@functools.cache
def value_words(dtype: Any) -> str:
    """C++ template arguments for values of a dtype: the unsigned word of their width, whether they have a sign bit."""
    return f"{WORDS[dtype.itemsize]}, {str(dtype.kind != 'i').lower()}"


class Marked(NamedTuple):
    """Which columns of each row tile have a nonzero, and how many of every ``PIECE`` columns; addresses in ``work``."""

    tiles: int
    pieces: int
    work: Workspace
    bitmap: int
    """uint32[tiles, 32*pieces]"""
    counts: int
    """uint32[tiles, pieces]"""
    owners: int
    """uint32: room for the row tile of each group; 0 if there might be too many for a bound"""
    starts: Array | None
    """int32[tiles+1]: the first group of each tile, if it was computed at once."""
    total: Counters | None
    """How many groups there are; to be asked for if ``starts`` are there."""


def mark(x: Array, t: int, g: int) -> Marked:
    """Launches the first pass over x [M, K], not empty; for few tiles it also computes where their groups start."""
    name, blocks, tiles, pieces, few, room = _marking(x.shape, x.dtype, t, g, x.data.ptr % UNIT)
    work = Workspace(*room)
    bitmap, counts, owners = work.places
    first: Array | None = None
    total: Counters | None = None
    starts: tuple[Any, ...] = 0, 0, 0, 0
    if few:
        first, total = modules["cupy"].empty(tiles + 1, INT32), Counters(stored=1)
        starts = tile_sums(0), g, first, total.address
    KERNELS.queue(name, "PqqiqqPPPiPP", blocks, x, *x.shape, t, tiles, pieces, bitmap, counts, *starts)
    return Marked(tiles, pieces, work, bitmap, counts, owners if room[2] else 0, first, total)


@functools.lru_cache(maxsize=256)
def _marking(
    shape: tuple[int, int], dtype: Any, t: int, g: int, start: int
) -> tuple[str, int, int, int, bool, tuple[int, int, int]]:
    """(kernel, blocks, row tiles, pieces of each, whether the kernel computes where groups start, bytes of bitmap,
    counts and owners) of the first pass. start: the first byte of x after a boundary."""
    (M, K), itemsize = shape, dtype.itemsize
    tiles, pieces = ceil_div(M, t), ceil_div(K, PIECE)
    most = tiles * ceil_div(K, g)  # groups
    wide = start == 0 and K * itemsize % UNIT == 0
    return (
        _mark(itemsize, dtype.kind != "i", wide), ceil_div(tiles * pieces, WARPS), tiles, pieces,
        tiles <= FEW_TILES and pieces <= FEW,
        (4 * tiles * pieces * (PIECE // 32), 4 * tiles * pieces, 4 * most if most <= MOST_OWNERS else 0),
    )  # fmt: skip


def fill(x: Array, marked: Marked, first: Array, indices: Array, data: Array) -> None:
    """Launches the second pass over x [M, K]: writes indices [G, g] and data [G, t, g], which are not empty.

    marked: whose counts have become the columns that earlier pieces of a tile have. first: int[Mv+1], first group of
    each tile.
    """
    (M, K), (G, t, g), tiles, pieces = x.shape, data.shape, marked.tiles, marked.pieces
    itemsize, index = x.dtype.itemsize, indices.dtype.itemsize
    tile_of_group = marked.owners
    if not tile_of_group:
        work = Workspace(4 * G)
        (tile_of_group,) = work.places
    KERNELS.queue(
        _list(first.dtype.itemsize, index), "PPPqiqqPP", ceil_div(tiles * pieces, WARPS),
        marked.bitmap, marked.counts, first, K, g, tiles, pieces, indices, tile_of_group,
    )  # fmt: skip
    groups, rows, row_parts = cut(G, t, g, itemsize)
    KERNELS.queue(
        _gather(itemsize, x.dtype.kind != "i", index), "PqqPPqiiiiiP",
        ceil_div(G, groups) * row_parts,
        x, M, K, indices, tile_of_group, G, t, g, groups, rows, row_parts, data,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def cut(G: int, t: int, g: int, itemsize: int) -> tuple[int, int, int]:
    """(groups of a block, rows of a group that it takes, blocks that share a group): what fits in a block's memory.

    Several groups only if a block takes all of their rows, so that its part of the data is one run.
    """
    row = g * itemsize
    if t * row > IMAGE:
        rows = IMAGE // row // IN_FLIGHT * IN_FLIGHT
        return 1, rows, ceil_div(t, rows)
    return max(1, min(IMAGE // (t * row), G // ENOUGH)), t, 1
