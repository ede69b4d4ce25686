"""C = A^T @ B by the compiled loops: each piece of work has its own tiles of C, which are added in a fixed order.

A piece of work is a few tiles of columns of C and a range of units of A. For every item of its units it multiplies a
row of B and adds it to the row of C given by the column of the item, in tiles [K, width] that no other piece writes.
If C has too few tiles for all cores, the units are divided into several ranges, whose tiles are added in the order of
the ranges. The number of ranges depends only on the matrix and on N, so the result does not depend on the number of
threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays import threads
from ...arrays.library import Array, ceil_div
from . import operands
from .operands import VECTOR, Work, fill, fixed, room, store

PIECES = 16
"""Pieces of work wanted; C of fewer tiles is summed over ranges of rows of A."""
RANGE_ITEMS = 64
"""Items that a range has for each column of A, at least: clearing and adding its sums costs as much as 10 to 40."""
SUMS = 32 << 20
"""Bytes of the sums of all ranges of one tile, at most."""
BAND = 1 << 17
"""Bytes of B that a piece copies into tiles at a time: a part of an L2 cache."""


def _cut(items: int, K: int, N: int, sums: np.dtype[Any]) -> tuple[int, int, int, int]:
    """(vectors of a tile, its columns, tiles of C, ranges of units of A)."""
    lanes = VECTOR // sums.itemsize
    vectors = min(2, ceil_div(N, lanes))
    width = vectors * lanes
    tiles = ceil_div(N, width)
    ranges = min(
        ceil_div(PIECES, tiles), items // (RANGE_ITEMS * max(1, K)), SUMS // (max(1, K) * width * sums.itemsize)
    )
    return vectors, width, tiles, max(1, ranges if items * tiles * width > operands.SMALL else 1)


def scratch_bytes(work: Work, K: int, N: int, sums: np.dtype[Any]) -> int:
    """Upper bound of the bytes of tiles of B and C in a product with N columns, with one thread for each core."""
    if not N or not K:
        return 0
    _, width, tiles, ranges = _cut(work.items, K, N, sums)
    tile_bytes, cores = K * width * sums.itemsize, threads.cores()
    together = min(max(1, operands.cache_bytes() // tile_bytes), tiles)
    unfinished = min(cores, ceil_div(tiles, together))  # pieces are begun in order: one group of tiles a core
    band = max(BAND, work.rows * together * width * sums.itemsize)
    return band * min(cores, tiles * ranges) + unfinished * ranges * together * tile_bytes


def multiply_transposed(work: Work, scatter: Callable[..., Any], B: Array, out: Array, sums: np.dtype[Any]) -> None:
    """out[K, N] = A^T @ B[M, N] by ``work``; ``scatter``: the class of the loops' target."""
    (K, N), M = out.shape, B.shape[0]
    vectors, width, tiles, ranges = _cut(work.items, K, N, sums)
    threads_used = threads.cores() if work.items * tiles * width + work.decoding > operands.SMALL else 1
    span = K * width
    together = max(1, operands.cache_bytes() // (span * sums.itemsize))
    together = min(together, tiles, ceil_div(tiles * ranges, threads_used))
    if work.with_columns is not None and tiles > together:
        work = work.with_columns()
    bounds = work.pieces(ranges)
    ranges = len(bounds) - 1
    plain = B.dtype == sums and B.flags.c_contiguous and N % width == 0
    flat = fixed(B.reshape(-1))[0] if plain else None

    def walk(lo: int, hi: int, first: int, count: int, C: Array) -> None:
        """Add the terms of units lo .. hi-1 to ``count`` cleared tiles of C from number ``first`` on."""
        C[: count * span] = 0
        if flat is not None:
            work.loop(lo, hi, scatter(flat, first * width, width, N, count, count, vectors, C, span))
            return
        columns = B[:, first * width : (first + count) * width]
        step = max(1, BAND // (count * width * sums.itemsize * work.rows))
        buffer = np.empty(min(M, step * work.rows) * count * width, sums)
        for at in range(lo, hi, step):
            end = min(hi, at + step)
            band = columns[at * work.rows : min(M, end * work.rows)]
            stride = band.shape[0] * width
            P = buffer[: count * stride]
            fill(P, band, width, 1)
            work.loop(at, end, scatter(P, -at * work.rows * width, stride, width, count, count, vectors, C, span))

    def store_tiles(C: Array, first: int, count: int) -> None:
        for t in range(count):
            columns = out[:, (first + t) * width : (first + t + 1) * width]
            store(C[t * span : (t + 1) * span].reshape(K, width)[:, : columns.shape[1]], columns)

    def alone(group: int) -> None:
        """All units with a few tiles, which are then stored."""
        first = group * together
        count = min(together, tiles - first)
        with room(count * span, sums) as C:
            walk(0, work.units, first, count, C)
            store_tiles(C, first, count)

    def in_ranges() -> None:
        """Every pair of a group of tiles and a range of units. The thread that finishes a group's last range adds."""
        groups = ceil_div(tiles, together)
        parts: list[dict[int, Array]] = [{} for _ in range(groups)]
        finished = [itertools.count(1) for _ in range(groups)]  # next() is atomic
        free: list[Array] = []  # fresh memory costs a page fault every 4 KB

        def piece(i: int) -> None:
            group, r = divmod(i, ranges)
            first = group * together
            count = min(together, tiles - first)
            try:
                C = free.pop()
            except IndexError:
                C = np.empty(together * span, sums)
            walk(bounds[r], bounds[r + 1], first, count, C)
            parts[group][r] = C
            if next(finished[group]) == ranges:
                every = [parts[group].pop(k) for k in range(ranges)]  # in this order, whichever thread finishes last
                total = every[0][: count * span]
                with np.errstate(all="ignore"):  # inf - inf and overflow are results, not events; a thread has its own
                    for other in every[1:]:
                        total += other[: count * span]
                store_tiles(total, first, count)
                free.extend(every)

        threads.run(piece, groups * ranges, threads_used)

    if ranges == 1:
        threads.run(alone, ceil_div(tiles, together), threads_used)
    else:
        in_ranges()
