"""Compiled loops of products with few columns of B in which a lane is a column of B, as in the loops for any number.

Every loop computes units ``lo .. hi-1`` of a format (see ``operands.Work``) into C[i*width + n], from P[k*width + n] =
B[k, n], which is zero from the columns of B on; width: 1, 2, 4, 8 or 16. integers, numbers: room of each thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba.extending import overload

from ...formats.fast.numba_cache import compiled_for
from . import few_tiles

Array = Any


@functools.cache
def csr(width: int) -> Callable[..., None]:
    """Rows of a CSR matrix. Arrays are given to tiles alone: two threads that count references to one wait for each
    other in every row."""
    items = few_tiles.items(width)

    @compiled_for(width)
    def loop(
        lo: int, hi: int, thread: int, P: Array, width: int, C: Array, integers: Array, numbers: Array, indptr: Array,
        indices: Array, data: Array,
    ) -> None:  # fmt: skip
        for i in range(lo, hi):
            j = int(indptr[i])
            items(C, i * width, 1, data, j, indices, int(indptr[i + 1]) - j, P)

    return loop


@functools.cache
def ell_buckets(width: int) -> Callable[..., None]:
    """Rows of an ELL matrix; arrays as for ``loops.ell_buckets``."""
    items = few_tiles.items(width)

    @compiled_for(width)
    def loop(
        lo: int, hi: int, thread: int, P: Array, width: int, C: Array, integers: Array, numbers: Array, ell_ptr: Array,
        ell_rows: Array, starts: Array, live: Array, indices: Array, data: Array,
    ) -> None:  # fmt: skip
        for i in range(lo, hi):
            first, end = int(ell_ptr[i]), int(ell_ptr[i + 1])
            if first == end:
                items(C, i * width, 1, data, 0, indices, 0, P)
            for x in range(first, end):
                row = ell_rows[x]
                items(C, i * width, int(x == first), data, int(starts[row]), indices, int(live[row]), P)

    return loop


CHUNK = 4096
"""Values of A that are converted together: 16 KB of float32, a part of the first cache."""


@functools.cache
def _stripe(width: int) -> Any:
    """C[o ..] (+)= the product of ``h`` rows with the rows of P that ``cols`` names, see ``few_tiles``."""
    t8, t4, t1 = (few_tiles.rows_of_columns(r, width) for r in (8, 4, 1))

    @compiled_for(width)
    def multiply(
        C: Array, o: int, first: int, data: Array, v: int, row: int, segment: int, segments: int, cols: Array, j: int,
        count: int, P: Array, h: int,
    ) -> None:  # fmt: skip
        r = 0
        while r + 8 <= h:
            t8(C, o + r * width, first, data, v + r * row, row, segment, segments, cols, j, count, P)
            r += 8
        while r + 4 <= h:
            t4(C, o + r * width, first, data, v + r * row, row, segment, segments, cols, j, count, P)
            r += 4
        while r < h:
            t1(C, o + r * width, first, data, v + r * row, row, segment, segments, cols, j, count, P)
            r += 1

    return multiply


def _as_sums(numbers: Any, data: Any, v: Any, count: Any, convert: Any) -> Any:
    """(array, position in it) of ``count`` values as the type of the sums, in ``data`` itself or in ``numbers``."""
    raise NotImplementedError


@overload(_as_sums)
def _as_sums_by_type(numbers: Any, data: Any, v: Any, count: Any, convert: Any) -> Any:
    def converted(numbers: Any, data: Any, v: Any, count: Any, convert: Any) -> Any:
        convert(numbers, 0, data, v, count)
        return numbers, 0

    def in_place(numbers: Any, data: Any, v: Any, count: Any, convert: Any) -> Any:
        return data, v

    return in_place if numbers.dtype == data.dtype else converted


@functools.cache
def _group(lanes: int) -> Any:
    """The product of ``h`` rows of ``segments`` blocks R x g, one after another from data[v] on; width 8 or 16.

    Their columns are cols[.. segments*g]; values narrower than the sums are converted into ``numbers`` first.
    """
    convert = few_tiles.widened(lanes)
    s8, s16 = (_stripe(width) for width in (8, 16))

    @compiled_for(lanes)
    def multiply(
        C: Array, o: int, width: int, data: Array, v: int, R: int, g: int, segments: int, cols: Array, P: Array, h: int,
        numbers: Array,
    ) -> None:  # fmt: skip
        block = R * g
        step = max(1, CHUNK // block)
        s = 0
        while s == 0 or s < segments:
            count = min(step, segments - s)
            values, at = _as_sums(numbers, data, v + s * block, count * block, convert)
            first, j = int(s == 0), s * g
            if width == 8:
                s8(C, o, first, values, at, g, block, count, cols, j, g, P, h)
            else:
                s16(C, o, first, values, at, g, block, count, cols, j, g, P, h)
            s += step

    return multiply


@functools.cache
def bsr(lanes: int) -> Callable[..., None]:
    """Block rows; data flat [nnzb, R, C]; integers: columns of a block row; numbers: max(CHUNK, R*C)."""
    multiply = _group(lanes)

    @compiled_for(lanes)
    def loop(
        lo: int, hi: int, thread: int, P: Array, width: int, C: Array, integers: Array, numbers: Array, M: int,
        R: int, g: int, indptr: Array, indices: Array, data: Array,
    ) -> None:  # fmt: skip
        cols, room = integers[thread], numbers[thread]
        for b in range(lo, hi):
            first, count = int(indptr[b]), int(indptr[b + 1] - indptr[b])
            for s in range(count):
                column = int(indices[first + s]) * g
                for x in range(g):
                    cols[s * g + x] = column + x
            h = min(R, M - b * R)
            multiply(C, b * R * width, width, data, first * R * g, R, g, count, cols, P, h, room)

    return loop


@functools.cache
def sr_bcrs(lanes: int) -> Callable[..., None]:
    """Row tiles; indices [G, g], data flat [G, t, g]; integers: columns of a tile; numbers: max(CHUNK, t*g)."""
    multiply = _group(lanes)

    @compiled_for(lanes)
    def loop(
        lo: int, hi: int, thread: int, P: Array, width: int, C: Array, integers: Array, numbers: Array, M: int,
        K: int, t: int, g: int, indptr: Array, indices: Array, data: Array,
    ) -> None:  # fmt: skip
        cols, room = integers[thread], numbers[thread]
        for tile in range(lo, hi):
            first, count = int(indptr[tile]), int(indptr[tile + 1] - indptr[tile])
            for s in range(count):
                for x in range(g):
                    column = indices[first + s, x]
                    cols[s * g + x] = column if column >= 0 else K
            h = min(t, M - tile * t)
            multiply(C, tile * t * width, width, data, first * t * g, t, g, count, cols, P, h, room)

    return loop
