"""Compiled loops of products with few columns of B: the arrays of a format are read once, as they are stored.

Every loop computes units ``lo .. hi-1`` of a format (see ``operands.Work``) into C[i*N + n], from X[n*ldx + k] =
B[k, n], which is zero from K on. ``lanes`` is the number of values multiplied at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...formats.fast.numba_cache import compiled_for
from . import few_tiles

Array = Any
Loop = Callable[..., None]

WINDOW = 16
"""Rows of the values of a vector n:m matrix that are read side by side, and added while their sums are in registers."""


@functools.cache
def csr(lanes: int) -> Loop:
    """Rows of a matrix with int32 indices, and a single column of B in float32. Needs AVX-512."""
    gathered = few_tiles.gathered(lanes)

    @compiled_for(lanes)
    def loop(
        lo: int, hi: int, thread: int, X: Array, ldx: int, N: int, C: Array, integers: Array, numbers: Array,
        indptr: Array, indices: Array, data: Array,
    ) -> None:  # fmt: skip
        for i in range(lo, hi):
            j = int(indptr[i])
            gathered(C, i, data, j, indices, j, int(indptr[i + 1]) - j, X)

    return loop


@functools.cache
def _block_row(lanes: int) -> Any:
    """The product of rows of blocks that lie side by side: ``h`` rows, ``segments`` blocks ``width`` columns wide."""
    d44, d42, d81, d11 = (few_tiles.dots(r, c, lanes) for r, c in ((4, 4), (4, 2), (8, 1), (1, 1)))

    @compiled_for(lanes)
    def multiply(
        C: Array, o: int, N: int, data: Array, v: int, R: int, width: int, starts: Array, segments: int, X: Array,
        ldx: int, h: int,
    ) -> None:  # fmt: skip
        n, block = 0, R * width
        while n < N:
            r, c, x = 0, 1, n * ldx
            if n + 4 <= N:
                c = 4
                while r + 4 <= h:
                    d44(C, o + r * N + n, N, data, v + r * width, width, block, starts, 0, segments, width, X, x, ldx)
                    r += 4
            elif n + 2 <= N:
                c = 2
                while r + 4 <= h:
                    d42(C, o + r * N + n, N, data, v + r * width, width, block, starts, 0, segments, width, X, x, ldx)
                    r += 4
            else:
                while r + 8 <= h:
                    d81(C, o + r * N + n, N, data, v + r * width, width, block, starts, 0, segments, width, X, x, ldx)
                    r += 8
            while r < h:
                for k in range(c):
                    d11(C, o + r * N + n + k, N, data, v + r * width, width, block, starts, 0, segments, width,
                        X, x + k * ldx, ldx)  # fmt: skip
                r += 1
            n += c

    return multiply


@functools.cache
def bsr(lanes: int) -> Loop:
    """Block rows; data flat [nnzb, R, width]; integers: as many as a block row has blocks."""
    multiply = _block_row(lanes)

    @compiled_for(lanes)
    def loop(
        lo: int, hi: int, thread: int, X: Array, ldx: int, N: int, C: Array, integers: Array, numbers: Array, M: int,
        R: int, width: int, indptr: Array, indices: Array, data: Array,
    ) -> None:  # fmt: skip
        starts = integers[thread]
        for b in range(lo, hi):
            first, count = int(indptr[b]), int(indptr[b + 1] - indptr[b])
            for s in range(count):
                starts[s] = indices[first + s] * width
            h = min(R, M - b * R)
            multiply(C, b * R * N, N, data, first * R * width, R, width, starts, count, X, ldx, h)

    return loop


@functools.cache
def sr_bcrs(lanes: int) -> Loop:
    """Row tiles; indices [G, g], data flat [G, t, g]. Rows of B are gathered once a tile.

    starts: 0, g, 2g, .. for as many groups as a tile has; integers: as many as a tile has columns; numbers: N times
    that.
    """
    multiply = _block_row(lanes)

    @compiled_for(lanes)
    def loop(
        lo: int, hi: int, thread: int, X: Array, ldx: int, N: int, C: Array, integers: Array, numbers: Array,
        starts: Array, M: int, K: int, t: int, g: int, indptr: Array, indices: Array, data: Array,
    ) -> None:  # fmt: skip
        columns, gathered = integers[thread], numbers[thread]
        ldg = columns.size
        for tile in range(lo, hi):
            first, count = int(indptr[tile]), int(indptr[tile + 1] - indptr[tile])
            for s in range(count):
                for x in range(g):
                    column = indices[first + s, x]
                    columns[s * g + x] = column if column >= 0 else K
            for n in range(N):
                row_of_x, row = X[n * ldx : (n + 1) * ldx], gathered[n * ldg : (n + 1) * ldg]
                for x in range(count * g):
                    row[x] = row_of_x[columns[x]]
            h = min(t, M - tile * t)
            multiply(C, tile * t * N, N, data, first * t * g, t, g, starts, count, gathered, ldg, h)

    return loop


@functools.cache
def vector_nm(lanes: int) -> Loop:
    """Row groups of ``length`` rows, a multiple of ``lanes``; indices [W, Q], data flat [W, Mp].

    The sums lie as the values do, so that rows of values are read from one end to the other: lines for the
    columns of B. integers: 2 * WINDOW; numbers: N * (length * (hi - lo) + lanes), so that columns of sums do not share
    sets of the cache.
    """
    tiles = [few_tiles.columns_of_vectors(v, c, lanes) for v, c in ((2, 8), (2, 4), (2, 1), (1, 1))]
    v28, v24, v21, v11 = tiles

    @compiled_for(lanes)
    def loop(
        lo: int, hi: int, thread: int, X: Array, ldx: int, N: int, C: Array, integers: Array, numbers: Array, M: int,
        n_kept: int, m: int, length: int, indices: Array, data: Array, Mp: int,
    ) -> None:  # fmt: skip
        lds, pair = (hi - lo) * length + lanes, 2 * lanes
        sums, base, cols = numbers[thread, : N * lds], integers[thread, :WINDOW], integers[thread, WINDOW:]
        sums[:] = 0
        window = WINDOW if N >= 4 else WINDOW // 2  # their lines share a set of the cache, and fewer columns use fewer
        for u0 in range(0, indices.shape[0], window):
            count = min(window, indices.shape[0] - u0)
            for u in range(count):
                base[u] = (u0 + u) // n_kept * m
            for q in range(lo, hi):
                for u in range(count):
                    cols[u] = base[u] + indices[u0 + u, q]
                at, v, r = (q - lo) * length, u0 * Mp + q * length, 0
                while r < length:
                    n, o = 0, at + r
                    if r + pair <= length:
                        while n + 8 <= N:
                            v28(sums, o + n * lds, lds, data, v + r, Mp, cols, 0, count, X, n * ldx, ldx)
                            n += 8
                        while n + 4 <= N:
                            v24(sums, o + n * lds, lds, data, v + r, Mp, cols, 0, count, X, n * ldx, ldx)
                            n += 4
                        while n < N:
                            v21(sums, o + n * lds, lds, data, v + r, Mp, cols, 0, count, X, n * ldx, ldx)
                            n += 1
                        r += pair
                    else:
                        for n in range(N):
                            v11(sums, o + n * lds, lds, data, v + r, Mp, cols, 0, count, X, n * ldx, ldx)
                        r += lanes
        for r in range(min(M, hi * length) - lo * length):
            for n in range(N):
                C[(lo * length + r) * N + n] = sums[n * lds + r]

    return loop


@functools.cache
def two_four(lanes: int) -> Loop:
    """Rows; data flat [Mp, Kp/2], the words of a step as ``few_tiles.two_four`` takes them. Needs AVX-512."""
    t44, t42, t81, t11 = (few_tiles.two_four(r, c, lanes) for r, c in ((4, 4), (4, 2), (8, 1), (1, 1)))

    @compiled_for(lanes)
    def loop(
        lo: int, hi: int, thread: int, X: Array, ldx: int, N: int, C: Array, integers: Array, numbers: Array,
        data: Array, row: int, meta: Array, row_offset: Array,
        steps: int, shift: int, outer: int, low: int, inner: int, pair: int,
    ) -> None:  # fmt: skip
        i = lo
        while i < hi:
            h, n, o, v = min(8, hi - i), 0, i * N, i * row
            while n < N:
                r, c, x = 0, 1, n * ldx
                if n + 4 <= N:
                    c = 4
                    while r + 4 <= h:
                        t44(C, o + r * N + n, N, data, v + r * row, row, meta, row_offset, i + r, steps, shift, outer,
                            low, inner, pair, X, x, ldx)  # fmt: skip
                        r += 4
                elif n + 2 <= N:
                    c = 2
                    while r + 4 <= h:
                        t42(C, o + r * N + n, N, data, v + r * row, row, meta, row_offset, i + r, steps, shift, outer,
                            low, inner, pair, X, x, ldx)  # fmt: skip
                        r += 4
                elif h == 8:
                    t81(C, o + n, N, data, v, row, meta, row_offset, i, steps, shift, outer, low, inner, pair,
                        X, x, ldx)  # fmt: skip
                    r = 8
                while r < h:
                    for k in range(c):
                        t11(C, o + r * N + n + k, N, data, v + r * row, row, meta, row_offset, i + r, steps, shift,
                            outer, low, inner, pair, X, x + k * ldx, ldx)  # fmt: skip
                    r += 1
                n += c
            i += h

    return loop


@functools.cache
def bitmask(lanes: int) -> Loop:
    """Rows; mask flat with ``row`` bytes a row, data and tail as ``few_tiles.bitmask`` takes them. Needs AVX-512.

    Vectors are read past the values of a row, but in rows before ``safe`` not past those of all rows.
    """
    b28, b44, b42, b41 = (
        few_tiles.bitmask(r, c, lanes, at_the_end=False) for r, c in ((2, 8), (4, 4), (4, 2), (4, 1))
    )  # fmt: skip
    b11 = few_tiles.bitmask(1, 1, lanes, at_the_end=True)

    @compiled_for(lanes)
    def loop(
        lo: int, hi: int, thread: int, X: Array, ldx: int, N: int, C: Array, integers: Array, numbers: Array,
        data: Array, tail: Array, base: int, safe: int,
        indptr: Array, mask: Array, row: int, steps: int,
    ) -> None:  # fmt: skip
        i = lo
        while i + 4 <= min(hi, safe):
            n = 0
            while n < N:
                o, x = i * N + n, n * ldx
                if n + 8 <= N:
                    b28(C, o, N, data, tail, base, indptr, mask, row, i, steps, X, x, ldx)
                    b28(C, o + 2 * N, N, data, tail, base, indptr, mask, row, i + 2, steps, X, x, ldx)
                    n += 8
                elif n + 4 <= N:
                    b44(C, o, N, data, tail, base, indptr, mask, row, i, steps, X, x, ldx)
                    n += 4
                elif n + 2 <= N:
                    b42(C, o, N, data, tail, base, indptr, mask, row, i, steps, X, x, ldx)
                    n += 2
                else:
                    b41(C, o, N, data, tail, base, indptr, mask, row, i, steps, X, x, ldx)
                    n += 1
            i += 4
        for r in range(i, hi):
            for n in range(N):
                b11(C, r * N + n, N, data, tail, base, indptr, mask, row, r, steps, X, n * ldx, ldx)

    return loop
