"""One compiled loop per format: decode the items of a few rows, then pass them to a target.

Every loop goes through units ``lo .. hi-1`` (rows, block rows, row tiles or row groups), decodes values and columns
into small lists, and passes full lists to ``targets.stripe``. Depending on the target ``to``, this multiplies them with
rows of B, scatters them into the transposed product or writes them into a dense panel. Padding, indices past the last
column and, where one row is decoded at a time, stored zeros are not put into a list, so their rows of B are never read.

``data`` is a view of the values: float32 and float64 as they are, bfloat16 as int16 (a shift makes it float32), the
other narrow types as unsigned codes that ``table`` (256 or 65536 entries of the accumulator type) turns into numbers.
numba has no 16- or 8-bit floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload

from ...formats.fast.numba_cache import compiled
from ...formats.fast.simd import WIDE, ones, pack_columns
from .targets import stripe
from .tiles import bfloat16, lowest_bit, word_columns

ITEMS = 512
"""Items of one row decoded together."""
STRIPE, STRIPE_ITEMS = 32, 128
"""Rows that share their columns, and items of each, decoded together: 16 KB of float32, half of L1."""

Array = Any


def _value(code: Any, table: Any) -> Any:
    """The number behind a stored value. Compiled code only: numba takes one of the bodies below."""
    raise NotImplementedError


@overload(_value)
def _value_by_type(code: Any, table: Any) -> Any:
    def shifted(code: Any, table: Any) -> Any:
        return bfloat16(code)

    def look_up(code: Any, table: Any) -> Any:
        return table[code]

    def as_it_is(code: Any, table: Any) -> Any:
        return code

    if code == types.int16:
        return shifted
    return look_up if isinstance(code, types.Integer) else as_it_is


@compiled
def _decoded(vals: Array, part: Array, table: Array) -> None:
    for x in range(part.size):
        vals[x] = _value(part[x], table)


def _values(vals: Array, data: Array, j: int, count: int, table: Array) -> Any:
    """(array, position in it) of ``count`` numbers: ``data`` itself, or ``vals`` with them decoded. Compiled only."""
    raise NotImplementedError


@overload(_values)
def _values_by_type(vals: Any, data: Any, j: Any, count: Any, table: Any) -> Any:
    def decoded(vals: Any, data: Any, j: Any, count: Any, table: Any) -> Any:
        _decoded(vals, data[j : j + count], table)
        return vals, 0

    def in_place(vals: Any, data: Any, j: Any, count: Any, table: Any) -> Any:
        return data, j

    return in_place if vals.dtype == data.dtype else decoded


def items(to: Any) -> Array:
    """Room for the decoded items of a row. Loops whose lists have a fixed length get them from outside: code that
    allocates arrays refers to a module of numba that takes 20 ms to import, which the first product would wait for."""
    return np.empty(ITEMS, to.P.dtype)


@compiled
def csr(lo: int, hi: int, to: Any, vals: Array, indptr: Array, indices: Array, data: Array, table: Array) -> None:
    """Rows lo .. hi-1 of a CSR matrix. vals: room for ITEMS numbers, as ``items`` makes it."""
    for t0 in range(0, to.tiles, to.group):
        t1 = min(to.tiles, t0 + to.group)
        for i in range(lo, hi):
            j, end, first = int(indptr[i]), int(indptr[i + 1]), True
            while first or j < end:
                count = min(ITEMS, end - j)
                values, v = _values(vals, data, j, count, table)
                stripe(to, t0, t1, i, 1, first, values, v, indices, j, count)
                j, first = j + count, False


@compiled
def ell_buckets(
    lo: int, hi: int, to: Any, vals: Array, ell_ptr: Array, ell_rows: Array, starts: Array, live: Array,
    indices: Array, data: Array, table: Array,
) -> None:  # fmt: skip
    """Rows lo .. hi-1; row i owns the ELL rows e = ell_rows[ell_ptr[i] .. ell_ptr[i+1]-1], whose items are the first

    live[e] slots from starts[e] on. vals: room for ITEMS numbers, as ``items`` makes it.
    """
    for t0 in range(0, to.tiles, to.group):
        t1 = min(to.tiles, t0 + to.group)
        for i in range(lo, hi):
            first = True
            for x in range(ell_ptr[i], ell_ptr[i + 1]):
                s = starts[ell_rows[x]]
                end = s + live[ell_rows[x]]
                while s < end:
                    count = min(ITEMS, end - s)
                    values, v = _values(vals, data, s, count, table)
                    stripe(to, t0, t1, i, 1, first, values, v, indices, s, count)
                    s, first = s + count, False
            if first:
                stripe(to, t0, t1, i, 1, True, vals, 0, indices, 0, 0)


def _columns(word: Any, column: int, cols: Array, at: int) -> int:
    """cols[at ..] = ``column`` + the place of each set bit of ``word``; how many. Compiled only, with room for 64."""
    raise NotImplementedError


@overload(_columns)
def _columns_by_machine(word: Any, column: Any, cols: Any, at: Any) -> Any:
    def wide(word: Any, column: Any, cols: Any, at: Any) -> Any:
        pack_columns(word, 64, column, cols, at)
        return ones(word)

    def narrow(word: Any, column: Any, cols: Any, at: Any) -> Any:
        n, end = 0, at
        while word:
            # Eight at a time, bits or not, and n counts the true ones: a branch per bit costs more.
            for _ in range(8):
                cols[end] = column + lowest_bit(word)
                end += 1
                n += word != 0
                word &= word - np.uint64(1)
        return n

    return wide if cols.dtype.bitwidth // 8 in WIDE else narrow


@compiled
def bitmask(lo: int, hi: int, to: Any, indptr: Array, mask: Array, data: Array, table: Array) -> None:
    """Rows lo .. hi-1; mask uint8[M, bytes of a row]."""
    vals, cols = np.empty(ITEMS, to.P.dtype), np.empty(ITEMS + 64, np.int32)
    row = np.zeros((mask.shape[1] + 7) // 8 * 8, np.uint8)  # whole, aligned words
    words = row.view(np.uint64)
    for t0 in range(0, to.tiles, to.group):
        t1 = min(to.tiles, t0 + to.group)
        for i in range(lo, hi):
            row[: mask.shape[1]] = mask[i]
            j, n, first = int(indptr[i]), 0, True
            for y in range(words.size):
                n += _columns(words[y], 64 * y, cols, n)
                if n > ITEMS - 64:
                    values, v = _values(vals, data, j, n, table)
                    stripe(to, t0, t1, i, 1, first, values, v, cols, 0, n)
                    j, n, first = j + n, 0, False
            if n or first:
                values, v = _values(vals, data, j, n, table)
                stripe(to, t0, t1, i, 1, first, values, v, cols, 0, n)


@compiled
def bitmask_columns(lo: int, hi: int, indptr: Array, mask: Array, columns: Array) -> None:
    """columns[indptr[i] .. indptr[i+1]-1] of rows lo .. hi-1, ascending."""
    cols = np.empty(8 * mask.shape[1] + 64, np.int32)
    row = np.zeros((mask.shape[1] + 7) // 8 * 8, np.uint8)  # whole, aligned words
    words = row.view(np.uint64)
    for i in range(lo, hi):
        row[: mask.shape[1]] = mask[i]
        n = 0
        for y in range(words.size):
            n += _columns(words[y], 64 * y, cols, n)
        columns[indptr[i] : indptr[i] + n] = cols[:n]


@compiled
def two_four(
    lo: int, hi: int, to: Any, words: int, data: Array, meta: Array, row_offset: Array, shift: int, outer: int,
    inner: int, table: Array,
) -> None:  # fmt: skip
    """Rows lo .. hi-1; word q of row i is meta[row_offset[i] + (q >> shift)*outer + (q % (1 << shift))*inner].

    A block of columns of a few rows is decoded and multiplied with every tile: what is read of a tile stays in L1.
    """
    vals, cols = np.empty(STRIPE * STRIPE_ITEMS, to.P.dtype), np.empty(STRIPE * STRIPE_ITEMS, np.int32)
    counts, low = np.empty(STRIPE, np.int64), (1 << shift) - 1
    for i in range(lo, hi, STRIPE):
        h, start = min(STRIPE, hi - i), 0
        while start == 0 or start < words:
            end = min(words, start + STRIPE_ITEMS // 8)
            for r in range(h):
                base = r * STRIPE_ITEMS
                for w in range(start, end):
                    word = np.int64(meta[row_offset[i + r] + (w >> shift) * outer + (w & low) * inner])
                    word_columns(cols, base + 8 * (w - start), word, 16 * w)
                n = 8 * (end - start)
                _decoded(vals[base : base + n], data[i + r, 8 * start : 8 * end], table)
                live = 0
                for x in range(n):
                    live += vals[base + x] != 0
                if live < n:  # the fillers of a group, and padding, are not multiplied
                    live = 0
                    for x in range(n):
                        vals[base + live], cols[base + live] = vals[base + x], cols[base + x]
                        live += vals[base + x] != 0
                counts[r] = live
            for t in range(to.tiles):
                for r in range(h):
                    at = r * STRIPE_ITEMS
                    stripe(to, t, t + 1, i + r, 1, start == 0, vals, at, cols, at, counts[r])
            start += STRIPE_ITEMS // 8


@compiled
def bsr(lo: int, hi: int, to: Any, M: int, K: int, indptr: Array, indices: Array, data: Array, table: Array) -> None:
    """Block rows lo .. hi-1; data [nnzb, R, C]."""
    R, width = data.shape[1], data.shape[2]
    vals, cols = np.empty(STRIPE_ITEMS * min(R, STRIPE), to.P.dtype), np.empty(STRIPE_ITEMS, np.int64)
    for t0 in range(0, to.tiles, to.group):
        t1 = min(to.tiles, t0 + to.group)
        for b in range(lo, hi):
            for r0 in range(0, min(R, M - b * R), STRIPE):
                i, h = b * R + r0, min(STRIPE, R - r0, M - b * R - r0)
                n, first = 0, True
                for s in range(indptr[b], indptr[b + 1]):
                    column = indices[s] * width
                    for x in range(min(width, K - column)):
                        cols[n] = column + x
                        for r in range(h):
                            vals[n * h + r] = _value(data[s, r0 + r, x], table)
                        n += 1
                        if n == STRIPE_ITEMS:
                            stripe(to, t0, t1, i, h, first, vals, 0, cols, 0, n)
                            n, first = 0, False
                if n or first:
                    stripe(to, t0, t1, i, h, first, vals, 0, cols, 0, n)


@compiled
def sr_bcrs(lo: int, hi: int, to: Any, M: int, indptr: Array, indices: Array, data: Array, table: Array) -> None:
    """Row tiles lo .. hi-1; indices [G, g], data [G, t, g]."""
    t_rows, stride = data.shape[1], data.shape[2]
    vals, cols = np.empty(STRIPE_ITEMS * min(t_rows, STRIPE), to.P.dtype), np.empty(STRIPE_ITEMS, np.int64)
    for t0 in range(0, to.tiles, to.group):
        t1 = min(to.tiles, t0 + to.group)
        for tile in range(lo, hi):
            for r0 in range(0, min(t_rows, M - tile * t_rows), STRIPE):
                i, h = tile * t_rows + r0, min(STRIPE, t_rows - r0, M - tile * t_rows - r0)
                n, first = 0, True
                for g in range(indptr[tile], indptr[tile + 1]):
                    for s in range(stride):
                        if indices[g, s] < 0:
                            continue
                        cols[n] = indices[g, s]
                        for r in range(h):
                            vals[n * h + r] = _value(data[g, r0 + r, s], table)
                        n += 1
                        if n == STRIPE_ITEMS:
                            stripe(to, t0, t1, i, h, first, vals, 0, cols, 0, n)
                            n, first = 0, False
                if n or first:
                    stripe(to, t0, t1, i, h, first, vals, 0, cols, 0, n)


@compiled
def vector_nm(
    lo: int, hi: int, to: Any, M: int, K: int, n_kept: int, m: int, length: int, indices: Array, data: Array,
    table: Array,
) -> None:  # fmt: skip
    """Row groups lo .. hi-1 of ``length`` rows; indices [W, Q], data [W, Mp]."""
    vals, cols = np.empty(STRIPE_ITEMS * min(length, STRIPE), to.P.dtype), np.empty(STRIPE_ITEMS, np.int64)
    for t0 in range(0, to.tiles, to.group):
        t1 = min(to.tiles, t0 + to.group)
        for q in range(lo, hi):
            for r0 in range(0, min(length, M - q * length), STRIPE):
                i, h = q * length + r0, min(STRIPE, length - r0, M - q * length - r0)
                n, first = 0, True
                for u in range(indices.shape[0]):
                    column = u // n_kept * m + indices[u, q]
                    if column >= K:
                        continue
                    cols[n], values = column, data[u, i : i + h]
                    for r in range(h):
                        vals[n * h + r] = _value(values[r], table)
                    n += 1
                    if n == STRIPE_ITEMS:
                        stripe(to, t0, t1, i, h, first, vals, 0, cols, 0, n)
                        n, first = 0, False
                if n or first:
                    stripe(to, t0, t1, i, h, first, vals, 0, cols, 0, n)
