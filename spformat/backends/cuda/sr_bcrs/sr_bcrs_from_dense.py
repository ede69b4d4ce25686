"""Dense arrays to SR-BCRS on the device: two passes over the array.  Kernels: sr_bcrs_from_dense.cu."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ....arrays.library import Array, ceil_div
from ..runtime.c_types import INDEX, WORDS
from ..runtime.expansion import UNIT
from ..runtime.queue import Kernels
from ..runtime.scratch import Workspace

SOURCE = "sr_bcrs/sr_bcrs_from_dense.cu"
THREADS, PIECE, IN_FLIGHT, IMAGE = 256, 1024, 8, 16 * 1024
"""The same as in the kernels: threads of a block, columns that a warp takes, rows that a thread reads at a time, bytes
of the values that a block of the last kernel puts together."""
WARPS = THREADS // 32
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


def mark(x: Array, t: int) -> Marked:
    """Launches the first pass over x [M, K], not empty."""
    (M, K), itemsize = x.shape, x.dtype.itemsize
    tiles, pieces = ceil_div(M, t), ceil_div(K, PIECE)
    work = Workspace(4 * tiles * pieces * (PIECE // 32), 4 * tiles * pieces)
    marked = Marked(tiles, pieces, work, *work.places)
    wide = x.data.ptr % UNIT == 0 and K * itemsize % UNIT == 0
    instance = f"mark_vectors<{value_words(x.dtype)}, {str(wide).lower()}>"
    blocks = ceil_div(tiles * pieces, WARPS)
    KERNELS.queue(instance, "PqqiqqPP", blocks, x, M, K, t, tiles, pieces, *work.places)
    return marked


def fill(x: Array, marked: Marked, first: Array, indices: Array, data: Array) -> None:
    """Launches the second pass over x [M, K]: writes indices [G, g] and data [G, t, g], which are not empty.

    marked: whose counts have become the columns that earlier pieces of a tile have. first: int[Mv+1], first group of
    each tile.
    """
    (M, K), (G, t, g), tiles, pieces = x.shape, data.shape, marked.tiles, marked.pieces
    index, work = INDEX[indices.itemsize], Workspace(4 * G)
    (tile_of_group,) = work.places
    KERNELS.queue(
        f"list_vectors<{INDEX[first.itemsize]}, {index}>", "PPPqiqqPP", ceil_div(tiles * pieces, WARPS),
        marked.bitmap, marked.counts, first, K, g, tiles, pieces, indices, tile_of_group,
    )  # fmt: skip
    groups, rows, row_parts = cut(G, t, g, x.dtype.itemsize)
    KERNELS.queue(
        f"gather_vectors<{value_words(x.dtype)}, {index}>", "PqqPPqiiiiiP", ceil_div(G, groups) * row_parts,
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
