"""What the vector n:m kernels read beside ``data``: one record of slots per (row tile, k tile).  Device: vector_nm.cuh.

A kernel stages the rows of B that a tile of A needs in shared memory, once for all row groups of the tile, and every
kept vector names its staged row. The paper packs for one tile; the tile that suits depends on the kernel, the value
type and the size of the problem, so a plan derives the records for its own tile from ``indices`` (numpy or CuPy, same
result).
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.library import PAD, Array, ceil_div, namespace, round_up

NO_ROW = 0xFFFFFFFF
MAX_PACKED_SHARE = 0.8
"""Packing is chosen below this share of a tile's columns: the last fifth of the loads is not worth the indirection."""


class Shape(ctypes.Structure):
    """The kernels' first parameter; counterpart of ``vector_nm::Shape``."""

    _fields_ = [("data_pitch", ctypes.c_uint32)] + [
        (name, ctypes.c_int32)
        for name in (
            "M", "K", "W", "tile_cols", "tile_kept", "slots", "staged", "record", "k_tiles", "k_per_split",
            "row_tiles", "group_rows",
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Pattern:
    """The params of a VectorNM that matter here, and the shape."""

    M: int
    K: int
    n: int
    m: int
    vector_length: int

    def group_rows(self, limit: int) -> int:
        """Rows that share columns, cut so that groups tile ``limit`` rows (a power of two)."""
        return math.gcd(self.vector_length, limit)

    def windows_per_tile(self, step: int, columns: int) -> int:
        """Windows in a k tile of about ``columns`` columns: as few wasted slots (padding to ``step``) as possible."""
        return _windows_per_tile(self.n, self.m, step, columns)


@functools.lru_cache(maxsize=1024)
def _windows_per_tile(n: int, m: int, step: int, columns: int) -> int:
    waste = {w: round_up(w * n, step) / (w * n) for w in range(1, max(1, columns // m) + 1)}
    return max(waste, key=lambda w: (-round(waste[w], 2), w))


@dataclass(frozen=True)
class Records:
    """The records of a matrix for one tile, and their extents."""

    words: Array
    """uint32[row tiles, k tiles, record]"""
    tile_cols: int
    tile_kept: int
    slots: int
    staged: int
    packed: bool
    group_rows: int
    share: float
    """Share of a tile's columns that it needs."""

    def shape(self, pattern: Pattern, data_pitch: int, W: int, per_split: int) -> Shape:
        """The kernel's first parameter when a block covers ``per_split`` k tiles."""
        row_tiles, k_tiles, record = self.words.shape
        return Shape(
            data_pitch, pattern.M, pattern.K, W, self.tile_cols, self.tile_kept, self.slots, self.staged, record,
            k_tiles, per_split, row_tiles, self.group_rows,
        )  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """The packing that is stored with a matrix: its ``col_info`` and ``ranks``, checked when it was loaded."""

    col_info: Array
    """int16[row tiles, k tiles, tile_cols]"""
    ranks: Array
    """uint8[row tiles, W, groups of vector_length rows in a tile]"""

    @classmethod
    def of(cls, a: Any, tile_rows: int, kept: int) -> Packing | None:
        """That of a VectorNM if it was packed for tiles of ``tile_rows`` rows and ``kept`` kept vectors, else None."""
        suits = a.packed and a.tile_rows == tile_rows and a.tile_cols * a.n == kept * a.m
        return cls(a.col_info, a.ranks) if suits else None


class _Stored:
    """The rows of B that every tile needs, read from a packing. Rows past K, the last of a tile, are left out."""

    def __init__(self, packing: Packing, offset: Array, first: Array, K: int) -> None:
        xp = namespace(offset)
        row = first[:, None] + packing.col_info
        needed = (packing.col_info != PAD) & (row < K)
        self._rows = xp.where(needed, row, NO_ROW).astype(np.uint32)
        self._ranks, self._offset = packing.ranks, offset
        self.live = needed.sum(axis=2, dtype=np.int32)
        """int32[row tiles, k tiles]: how many rows a tile needs"""

    def ranks(self) -> Array:
        """int32, as ``offset``: which of the rows of its tile each vector multiplies."""
        row_tiles, groups, k_tiles, kept = self._offset.shape
        of_vectors = self._ranks.transpose(0, 2, 1).reshape(row_tiles, -1, k_tiles, kept)
        ranks: Array = of_vectors.repeat(groups // of_vectors.shape[1], axis=1).astype(np.int32)
        return ranks

    def rows(self, staged: int) -> Array:
        """uint32[row tiles, k tiles, staged]: the rows, ascending, then NO_ROW."""
        return self._rows[:, :, :staged]


class _Derived:
    """The same, from the positions of the vectors: for any tile."""

    def __init__(self, offset: Array, first: Array, width: int) -> None:
        xp, (row_tiles, _, k_tiles, _) = namespace(offset), offset.shape
        needed = xp.zeros((row_tiles, k_tiles, width + 1), bool)  # the last place takes the -1
        self._tile = xp.arange(row_tiles)[:, None, None, None], xp.arange(k_tiles)[None, None, :, None]
        needed[(*self._tile, offset)] = True
        self._needed, self._offset, self._first = needed[:, :, :width], offset, first
        self.live = self._needed.sum(axis=2, dtype=np.int32)

    def _places(self) -> Array:
        return namespace(self._needed).cumsum(self._needed, axis=2, dtype=np.int32) - np.int32(1)

    def ranks(self) -> Array:
        xp = namespace(self._offset)
        ranks: Array = self._places()[(*self._tile, xp.maximum(self._offset, 0))]
        return ranks

    def rows(self, staged: int) -> Array:
        xp = namespace(self._needed)
        rows = xp.full((*self.live.shape, staged), NO_ROW, np.uint32)
        r, t, c = xp.nonzero(self._needed)  # synchronize!
        rows[r, t, self._places()[r, t, c]] = self._first[t] + c
        return rows


def records(
    indices: Array, pattern: Pattern, *, tile_rows: int, group_rows: int, kept: int, step: int, banks: int,
    bank_rows: int = 1, packed: bool | None = None, line_bytes: int = 0, stored: Packing | None = None,
) -> Records:  # fmt: skip
    """Records for tiles of ``tile_rows`` rows and ``kept`` kept vectors of each row group.

    indices     uint8[W, Q], as in the format
    group_rows  rows per group of slots: divides both the vector length and tile_rows
    kept        whole windows (a multiple of n), or any number: then the tile is packed
    step        slots are padded to a multiple of it
    banks       slots of a group are put in an order in which as many neighbours as possible name staged rows of
                different classes (rank // bank_rows) % banks, and with bank_rows = 1 lines of A likewise: one load
                then meets no bank twice. 1 keeps the order of ``data``
    packed      None: by the measured share
    line_bytes  not 0: a slot holds only its staged row, times this; ``banks`` is 1 then. Rows are copied by
                fours: those that are staged, and the list of a tile, are filled up to a multiple of 4
    stored      the packing of the file for these tiles: the rows that a tile needs are read, not derived
    """
    xp, (W, Q), p = namespace(indices), indices.shape, pattern
    slots, k_tiles = round_up(kept, step), ceil_div(W, kept)
    repeat, groups = p.vector_length // group_rows, tile_rows // group_rows
    row_tiles = ceil_div(p.M, tile_rows)
    if kept % p.n:
        packed = True
    width = (kept // p.n if kept % p.n == 0 else kept // p.n + 2) * p.m  # columns from the tile's first window on
    first = xp.arange(k_tiles, dtype=np.int64) * kept // p.n * p.m  # column where that window starts

    u = xp.arange(k_tiles * kept, dtype=np.int64)
    offset = xp.full((k_tiles * kept, Q), -1, np.int32)  # column - first; -1: no vector, or past K
    offset[:W] = (u[:W] // p.n * p.m - xp.repeat(first, kept)[:W])[:, None].astype(np.int32) + indices
    offset[xp.repeat(first, kept)[:, None] + offset >= p.K] = -1
    offset = xp.repeat(offset.T.reshape(Q, k_tiles, kept), repeat, axis=0)[: row_tiles * groups]
    if offset.shape[0] < row_tiles * groups:
        missing = row_tiles * groups - offset.shape[0]
        offset = xp.concatenate([offset, xp.full((missing, k_tiles, kept), -1, np.int32)], axis=0)
    offset = offset.reshape(row_tiles, groups, k_tiles, kept)

    tile = _Derived(offset, first, width) if stored is None else _Stored(stored, offset, first, p.K)
    live = tile.live
    most, mean = (int(live.max()), float(live.mean())) if live.size else (0, 0.0)  # synchronize!
    share = mean / width
    if packed is None:
        packed = share < MAX_PACKED_SHARE
    staged = max(most, 1) if packed else width
    staged = round_up(staged, 4) if line_bytes else staged

    rank = tile.ranks() if packed else offset
    rank = xp.where(offset < 0, staged, rank)
    order = xp.broadcast_to(xp.arange(kept, dtype=np.int32), rank.shape)
    if banks > 1:
        bank = xp.where(rank == staged, banks, rank // bank_rows % banks).astype(np.int32)
        order = _spread(xp, bank, banks)
        if bank_rows == 1:  # saves 3 % for 16-bit values, only 0.1 % for float32: not worth longer planning
            order = _different_lines(xp, bank, order, banks)
        rank = xp.take_along_axis(rank, order, axis=3)
    empty = xp.arange(kept, slots, dtype=np.uint32) << np.uint32(16) | np.uint32(staged)
    words = xp.full((row_tiles, k_tiles, round_up(groups * slots + (staged if packed else 0), 4)), NO_ROW, np.uint32)
    table = xp.empty((row_tiles, k_tiles, groups, slots), np.uint32)
    table[:, :, :, :kept] = (rank.astype(np.uint32) | order.astype(np.uint32) << np.uint32(16)).transpose(0, 2, 1, 3)
    table[:, :, :, kept:] = empty
    if line_bytes:
        table = (table & np.uint32(0xFFFF)) * np.uint32(line_bytes)
    words[:, :, : groups * slots] = table.reshape(row_tiles, k_tiles, groups * slots)
    if packed:
        rows = words[:, :, groups * slots : groups * slots + staged]
        listed = tile.rows(staged)
        rows[:, :, : listed.shape[2]] = listed
        if line_bytes:
            fill = (rows == NO_ROW) & (xp.arange(staged) < (-(-live // 4) * 4)[:, :, None])
            rows[...] = xp.where(fill, rows[:, :, :1], rows)
    return Records(words, kept // p.n * p.m, kept, slots, staged, packed, group_rows, share)


def _spread(xp: Any, bank: Array, banks: int) -> Array:
    """int32 order of the last axis: runs of ``banks`` neighbours of as many different classes ``bank`` as possible.

    As many runs as there are full sets of classes get one slot of each; the rest is dealt out, class after class, over
    the remaining runs, so that each meets a crowded class about equally often. Empty slots come last.
    """
    kept = bank.shape[3]
    empty = bank == banks
    turn = xp.zeros(bank.shape, np.int32)  # how many of its class come before it
    full = xp.full(bank.shape[:3], kept, np.int32)
    for b in range(banks):
        mine = bank == b
        turn += xp.where(mine, xp.cumsum(mine, axis=3, dtype=np.int32) - 1, 0).astype(np.int32)
        full = xp.minimum(full, mine.sum(axis=3, dtype=np.int32))
    rest = empty | (turn >= full[..., None])
    runs = xp.maximum(ceil_div(kept, banks) - full, 1)[..., None]
    at = xp.arange(kept, dtype=np.int64)
    key = xp.where(rest, bank.astype(np.int64) * kept + at, -1)
    place = xp.argsort(xp.argsort(key, axis=3), axis=3) - (kept - rest.sum(axis=3, dtype=np.int64))[..., None]
    run = xp.where(rest, full[..., None] + place % runs, turn)
    inside = xp.where(rest, place // runs, bank)
    key = ((empty * (kept + 1) + run) * (kept + 1) + inside) * kept + at
    return xp.argsort(key, axis=3).astype(np.int32)


def _different_lines(xp: Any, bank: Array, order: Array, banks: int) -> Array:
    """int32 order in which slots of the same bank class may have exchanged places compared with ``order``.

    After that the lines of A that a run of ``banks`` slots names are in different classes too, as far as a greedy
    choice achieves it.
    """
    kept = bank.shape[3]
    at = xp.arange(kept, dtype=np.int32)
    line, classes = at % banks, xp.arange(banks, dtype=np.int32)
    wanted = xp.take_along_axis(bank, order, axis=3)
    free, used = xp.ones(bank.shape, bool), xp.zeros((*bank.shape[:3], banks), np.int32)
    exchanged = xp.empty(bank.shape, np.int32)
    for place in range(kept):
        if place % banks == 0:
            used[...] = 0
        fits = free & (bank == wanted[..., place, None])
        pick = xp.where(fits, used[..., line] * kept + at, 2 * kept * kept).argmin(axis=3)[..., None]
        exchanged[..., place] = pick[..., 0]
        free &= at != pick
        used += line[pick] == classes
    return exchanged
