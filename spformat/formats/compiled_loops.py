"""The loops behind ``compiled``: dense rows to and from each layout, on value bits. Imports numba; imported late.

Values are unsigned codes; ``zero`` masks the bits that decide whether a value is zero. Every loop works on rows
(or row groups) ``lo .. hi-1`` and writes nothing that belongs to others, so ranges may run side by side. Everything
is in this one file, because numba's cache on disk notices a change of the function's own file only. Codes must not
meet signed numbers: numba turns uint64 with int64 into float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .numba_cache import compiled

Array = Any


# ------------------------------------------------------------------ rows of items: csr and bitmask


@compiled
def count(lo: int, hi: int, x: Array, zero: Any, counts: Array) -> None:
    """counts[i] = nonzeros of row i."""
    for i in range(lo, hi):
        row, found = x[i], 0
        for j in range(row.size):
            found += (row[j] & zero) != 0
        counts[i] = found


# Four 16-bit values are one uint64, lowest column in the lowest bits.
_MAGNITUDE = np.uint64(0x7FFF7FFF7FFF7FFF)
_SIGN = np.uint64(0x8000800080008000)
_1, _2, _3, _4, _15, _16, _32, _48, _63 = (np.uint64(n) for n in (1, 2, 3, 4, 15, 16, 32, 48, 63))
_ONES = np.uint64(0xFFFF)


@compiled
def count_fours(lo: int, hi: int, x: Array, counts: Array, negative: Array) -> None:
    """As ``count`` for 16-bit values x uint64[M, K/4]; negative[i] = elements of row i that are -0.0."""
    for i in range(lo, hi):
        row = x[i]
        for first in range(0, row.size, 1 << 15):  # each lane of the sums has 16 bits
            held, bare = np.uint64(0), np.uint64(0)
            for j in range(first, min(row.size, first + (1 << 15))):
                # Bit 15 of a lane, and no carry into the next, exactly where its magnitude is not zero.
                some = (row[j] & _MAGNITUDE) + _MAGNITUDE
                held += (some & _SIGN) >> _15
                bare += (row[j] & _SIGN & ~some) >> _15
            counts[i] += np.int64((held & _ONES) + (held >> _16 & _ONES) + (held >> _32 & _ONES) + (held >> _48))
            negative[i] += np.int64((bare & _ONES) + (bare >> _16 & _ONES) + (bare >> _32 & _ONES) + (bare >> _48))


@compiled
def csr_items(lo: int, hi: int, x: Array, zero: Any, indptr: Array, indices: Array, data: Array) -> None:
    """Columns and values of the nonzeros, at indptr[i] of each row."""
    K = x.shape[1]
    columns, values = np.empty(K + 1, indices.dtype), np.empty(K + 1, x.dtype)
    for i in range(lo, hi):
        row, n = x[i], 0
        for j in range(K):
            # Written always and kept if nonzero: a branch per element costs more.
            columns[n], values[n] = j, row[j]
            n += (row[j] & zero) != 0
        indices[indptr[i] : indptr[i] + n] = columns[:n]
        data[indptr[i] : indptr[i] + n] = values[:n]


@compiled
def csr_scatter(lo: int, hi: int, indptr: Array, indices: Array, data: Array, out: Array) -> None:
    """Items into zeroed rows."""
    for i in range(lo, hi):
        row, columns, values = out[i], indices[indptr[i] : indptr[i + 1]], data[indptr[i] : indptr[i + 1]]
        for x in range(columns.size):
            row[columns[x]] = values[x]


_FLAGS_TO_BITS, _56 = np.uint64(0x0102040810204080), np.uint64(56)
"""Eight bytes of 0 or 1, the first lowest, times this: their bits side by side in the highest byte."""


@compiled
def bitmask_items(lo: int, hi: int, x: Array, zero: Any, indptr: Array, bitmask: Array, data: Array) -> None:
    """Set bits and values of the nonzeros."""
    K, wide = x.shape[1], bitmask.shape[1]
    values, held = np.empty(K + 1, x.dtype), np.zeros(8 * wide, np.uint8)
    eights = held.view(np.uint64)
    for i in range(lo, hi):
        row, n = x[i], 0
        for j in range(K):
            held[j] = (row[j] & zero) != 0
        for y in range(wide):
            bitmask[i, y] = (eights[y] * _FLAGS_TO_BITS) >> _56
        for j in range(K):
            values[n] = row[j]
            n += held[j]
        data[indptr[i] : indptr[i] + n] = values[:n]


_BITS_TO_FLAGS = np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little").view(np.uint64)
"""Eight bytes of 0 or 1 for each byte of bits."""


@compiled
def bitmask_scatter(lo: int, hi: int, indptr: Array, bitmask: Array, data: Array, out: Array) -> None:
    """Rows from their set bits and values."""
    K, wide = out.shape[1], bitmask.shape[1]
    values, held = np.zeros(K + 1, data.dtype), np.zeros(8 * wide, np.uint8)
    eights = held.view(np.uint64)
    for i in range(lo, hi):
        row, length, n = out[i], indptr[i + 1] - indptr[i], 0
        values[:length] = data[indptr[i] : indptr[i + 1]]  # one more may be read than a row holds
        for y in range(wide):
            eights[y] = _BITS_TO_FLAGS[bitmask[i, y]]
        for j in range(K):
            row[j] = values[n] * np.uint64(held[j])  # no branch
            n += held[j]


# ------------------------------------------------------------------ 2:4

# The work is done on whole groups, in plain shifts and masks without a table or a branch, so that the compiler does
# several groups at a time.
_30, _45 = np.uint64(30), np.uint64(45)


@compiled
def two_four_refusals(i: int, row: Array, groups: int, refused: Array) -> None:
    """Count the groups of row i with more than two nonzeros into ``refused``."""
    for g in range(row.size):
        held = (((row[g] & _MAGNITUDE) + _MAGNITUDE) & _SIGN) >> _15
        found = (held + (held >> _16) + (held >> _32) + (held >> _48)) & _ONES
        if found > _2:
            if refused[0] == 0:
                refused[1], refused[2] = i * groups + g, found
            refused[0] += 1


@compiled
def two_four_encode(
    lo: int, hi: int, x: Array, nibbles: Any, row_offset: Array, shift: int, outer: int, inner: int, data: Array,
    meta: Array, refused: Array,
) -> None:  # fmt: skip
    """Value pairs uint32[Mp, Kp/4] and words of rows lo .. hi-1 of x, uint64[M, K/4] of whole groups.

    nibbles: bits 4i .. 4i+3 are the nibble of the nonzero mask i, 0 = refused. refused int64[3]: how many groups,
    the first of them (row * Kp/4 + group), its nonzeros.
    """
    held_groups, groups = x.shape[1], data.shape[1]
    kept = np.full(groups, 4, np.uint8)  # groups past the last column hold nothing
    fours = kept.view(np.uint32)
    for i in range(lo, hi):
        row, out, base, low = x[i], data[i], row_offset[i], np.uint64(0)
        for g in range(held_groups):
            held = (((row[g] & _MAGNITUDE) + _MAGNITUDE) & _SIGN) >> _15
            group = row[g] & ((held << _16) - held)  # -0.0 becomes +0
            nibble = (nibbles >> (((held | held >> _15 | held >> _30 | held >> _45) & _15) << _2)) & _15
            first = (group >> ((nibble & _3) << _4)) & _ONES
            second = (group >> ((nibble >> _2) << _4)) & _ONES
            out[g] = first | second << _16
            kept[g] = nibble
            low |= nibble - _1  # the highest bit is set by a nibble of 0 only
        if low >> _63:
            two_four_refusals(i, row, groups, refused)
        for q in range(groups >> (2 + shift)):
            for r in range(1 << shift):
                w = fours[(q << shift) + r]
                word = w & 0xF | (w >> 4) & 0xF0 | (w >> 8) & 0xF00 | (w >> 12) & 0xF000
                meta[base + q * outer + r * inner] = word


@compiled
def two_four_prune(
    lo: int, hi: int, x: Array, infinite: int, row_offset: Array, shift: int, outer: int, inner: int, data: Array,
    meta: Array, refused: Array,
) -> None:  # fmt: skip
    """As ``two_four_encode``, but the two largest magnitudes of every group stay, the lower column of equals.

    infinite: the bits of infinity; NaN ranks above it, all alike. refused[0]: how many values are not finite.
    """
    K, groups, low = x.shape[1], data.shape[1], (1 << shift) - 1
    padded = np.zeros(4 * groups, np.uint16)
    row = padded.view(np.uint64)
    for i in range(lo, hi):
        padded[:K] = x[i]
        for q in range(groups // 4):
            word = 0
            for s in range(4):
                group = row[4 * q + s]
                held = (((group & _MAGNITUDE) + _MAGNITUDE) & _SIGN) >> np.uint64(15)
                codes: Any = np.int64(group & _MAGNITUDE)
                v0, v1, v2, v3 = codes & 0x7FFF, codes >> 16 & 0x7FFF, codes >> 32 & 0x7FFF, codes >> 48
                refused[0] += (v0 >= infinite) + (v1 >= infinite) + (v2 >= infinite) + (v3 >= infinite)
                a, b = min(v0, infinite + 1) * 4 + 3, min(v1, infinite + 1) * 4 + 2
                c, d = min(v2, infinite + 1) * 4 + 1, min(v3, infinite + 1) * 4
                above, beside = max(a, b), max(c, d)
                top = 3 - (max(above, beside) & 3)
                next_one = 3 - (max(min(above, beside), max(min(a, b), min(c, d))) & 3)
                left, right = min(top, next_one), max(top, next_one)
                group &= held * _ONES  # -0.0 becomes +0
                first = (group >> np.uint64(left << 4)) & _ONES
                data[i, 4 * q + s] = first | ((group >> np.uint64(right << 4)) & _ONES) << _16
                word |= (left + 4 * right) << (4 * s)
            meta[row_offset[i] + (q >> shift) * outer + (q & low) * inner] = word


@compiled
def two_four_decode(
    lo: int, hi: int, data: Array, meta: Array, row_offset: Array, shift: int, outer: int, inner: int, out: Array
) -> None:
    """Rows lo .. hi-1 of out, uint64[M, K/4] of whole groups, from value pairs uint32[Mp, Kp/4] without a -0.0."""
    groups = data.shape[1]
    kept = np.empty(groups, np.uint8)
    fours = kept.view(np.uint32)
    for i in range(lo, hi):
        row, pairs, base = out[i], data[i], row_offset[i]
        for q in range(groups >> (2 + shift)):
            for r in range(1 << shift):
                w = np.uint32(meta[base + q * outer + r * inner])
                fours[(q << shift) + r] = w & 0xF | (w & 0xF0) << 4 | (w & 0xF00) << 8 | (w & 0xF000) << 12
        for g in range(row.size):
            pair, nibble = np.uint64(pairs[g]), np.uint64(kept[g])
            first = (pair & _ONES) << ((nibble & _3) << _4)
            row[g] = first | (pair >> _16) << ((nibble >> _2) << _4)


# ------------------------------------------------------------------ vector n:m

STRIP = 128
"""Columns of a row group copied together, because rows of x that lie a power of two apart share sets of the cache."""


@compiled
def vector_nm_positions(
    lo: int, hi: int, x: Array, zero: Any, n: int, m: int, length: int, indices: Array, refused: Array
) -> None:
    """indices[u, q] of row groups lo .. hi-1.

    refused int64[3]: how many windows, the first of them (q * windows + w), the vectors in it.
    """
    (M, K), windows = x.shape, indices.shape[0] // n
    seen = np.zeros(windows * m, x.dtype)
    for q in range(lo, hi):
        seen[:] = 0
        for i in range(q * length, min(M, (q + 1) * length)):
            row = x[i]
            for j in range(K):
                seen[j] |= row[j] & zero
        for w in range(windows):
            held = 0
            for j in range(m):
                held += seen[w * m + j] != 0
            if held > n:
                if refused[0] == 0:
                    refused[1], refused[2] = q * windows + w, held
                refused[0] += 1
                continue
            free, u = n - held, w * n
            for j in range(m):
                used = seen[w * m + j] != 0
                if used or free > 0:
                    free -= not used
                    indices[u, q] = j
                    u += 1


@compiled
def vector_nm_gather(
    lo: int, hi: int, x: Array, zero: Any, n: int, m: int, length: int, indices: Array, data: Array
) -> None:
    """data[u, i] of row groups lo .. hi-1, which start out as zeros."""
    (M, K), windows = x.shape, indices.shape[0] // n
    step = max(1, STRIP // m)
    strip = np.zeros((length, step * m), x.dtype)
    for q in range(lo, hi):
        i0, h = q * length, min(length, M - q * length)
        for w0 in range(0, windows, step):
            w1, first = min(windows, w0 + step), w0 * m
            held = min(K, w1 * m) - first
            for r in range(h):
                strip[r, :held] = x[i0 + r, first : first + held]
            for u in range(w0 * n, w1 * n):
                j = (u // n - w0) * m + indices[u, q]
                if j >= held:
                    continue
                target = data[u, i0 : i0 + h]
                for r in range(h):
                    value = strip[r, j]
                    target[r] = value * np.uint64((value & zero) != 0)


@compiled
def vector_nm_scatter(
    lo: int, hi: int, indices: Array, data: Array, zero: Any, n: int, m: int, length: int, out: Array
) -> None:
    """Nonzeros of row groups lo .. hi-1 into zeroed rows."""
    (M, K), windows = out.shape, indices.shape[0] // n
    step = max(1, STRIP // m)
    strip = np.zeros((length, step * m), out.dtype)
    for q in range(lo, hi):
        i0, h = q * length, min(length, M - q * length)
        for w0 in range(0, windows, step):
            w1, first = min(windows, w0 + step), w0 * m
            strip[:] = 0
            for u in range(w0 * n, w1 * n):
                j, values = (u // n - w0) * m + indices[u, q], data[u, i0 : i0 + h]
                for r in range(h):
                    if (values[r] & zero) != 0:
                        strip[r, j] = values[r]
            held = min(K, w1 * m) - first
            for r in range(h):
                out[i0 + r, first : first + held] = strip[r, :held]
