"""The loops behind ``compiled`` for 2:4: dense rows to and from it, on value bits. Imports numba; imported late.

Values are unsigned codes; ``zero`` masks the bits that decide whether a value is zero. Every loop works on rows
(or row groups) ``lo .. hi-1`` and writes nothing that belongs to others, so ranges may run side by side. Codes must not
meet signed numbers: numba turns uint64 with int64 into float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .numba_cache import compiled

Array = Any


# Four 16-bit values are one uint64, lowest column in the lowest bits.
_MAGNITUDE = np.uint64(0x7FFF7FFF7FFF7FFF)
_SIGN = np.uint64(0x8000800080008000)
_1, _2, _3, _4, _15, _16, _32, _48, _63 = (np.uint64(n) for n in (1, 2, 3, 4, 15, 16, 32, 48, 63))
_ONES = np.uint64(0xFFFF)
_PAIR = np.uint64(0x00010001)

# The work is done on whole groups, in plain shifts and masks without a table or a branch, so that the compiler does
# several groups at a time.
_30, _45 = np.uint64(30), np.uint64(45)


@compiled
def two_four_refusals(i: int, row: Array, groups: int, refused: Array) -> None:
    """Count the groups of row i with more than two nonzeros into ``refused``."""
    for g in range(row.size):
        nonzero = (((row[g] & _MAGNITUDE) + _MAGNITUDE) & _SIGN) >> _15
        count = (nonzero + (nonzero >> _16) + (nonzero >> _32) + (nonzero >> _48)) & _ONES
        if count > _2:
            if refused[0] == 0:
                refused[1], refused[2] = i * groups + g, count
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
    codes = np.full(groups, 4, np.uint8)  # groups past the last column hold nothing
    fours = codes.view(np.uint32)
    for i in range(lo, hi):
        row, out, base, low = x[i], data[i], row_offset[i], np.uint64(0)
        for g in range(held_groups):
            nonzero = (((row[g] & _MAGNITUDE) + _MAGNITUDE) & _SIGN) >> _15
            group = row[g] & ((nonzero << _16) - nonzero)  # -0.0 becomes +0
            nibble = (nibbles >> (((nonzero | nonzero >> _15 | nonzero >> _30 | nonzero >> _45) & _15) << _2)) & _15
            first = (group >> ((nibble & _3) << _4)) & _ONES
            second = (group >> ((nibble >> _2) << _4)) & _ONES
            out[g] = first | second << _16
            codes[g] = nibble
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
                nonzero = (((group & _MAGNITUDE) + _MAGNITUDE) & _SIGN) >> np.uint64(15)
                codes: Any = np.int64(group & _MAGNITUDE)
                v0, v1, v2, v3 = codes & 0x7FFF, codes >> 16 & 0x7FFF, codes >> 32 & 0x7FFF, codes >> 48
                refused[0] += (v0 >= infinite) + (v1 >= infinite) + (v2 >= infinite) + (v3 >= infinite)
                a, b = min(v0, infinite + 1) * 4 + 3, min(v1, infinite + 1) * 4 + 2
                c, d = min(v2, infinite + 1) * 4 + 1, min(v3, infinite + 1) * 4
                above, beside = max(a, b), max(c, d)
                top = 3 - (max(above, beside) & 3)
                next_one = 3 - (max(min(above, beside), max(min(a, b), min(c, d))) & 3)
                left, right = min(top, next_one), max(top, next_one)
                group &= nonzero * _ONES  # -0.0 becomes +0
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
    codes = np.empty(groups, np.uint8)
    fours = codes.view(np.uint32)
    for i in range(lo, hi):
        row, pairs, base = out[i], data[i], row_offset[i]
        for q in range(groups >> (2 + shift)):
            for r in range(1 << shift):
                w = np.uint32(meta[base + q * outer + r * inner])
                fours[(q << shift) + r] = w & 0xF | (w & 0xF0) << 4 | (w & 0xF00) << 8 | (w & 0xF000) << 12
        for g in range(row.size):
            pair, nibble = np.uint64(pairs[g]), np.uint64(codes[g])
            first = (pair & _ONES) << ((nibble & _3) << _4)
            row[g] = first | (pair >> _16) << ((nibble >> _2) << _4)


@compiled
def two_four_faults(
    lo: int, hi: int, data: Array, meta: Array, nibbles: Any, shape: Any, row_offset: Array, shift: int, outer: int,
    inner: int, faults: Array,
) -> None:  # fmt: skip
    """faults[0] becomes 1 if rows lo .. hi-1 of value pairs uint32[Mp, Kp/4] are not as the encoder leaves them.

    A nibble is right only if it is the one that the encoder writes for these columns. Besides, no value may
    be -0.0, and none may lie outside ``shape``.
    """
    M, K = shape
    groups = data.shape[1]
    codes = np.empty(groups, np.uint8)
    fours = codes.view(np.uint32)
    bad = np.uint64(0)
    for i in range(lo, hi):
        row, base = data[i], row_offset[i]
        for q in range(groups >> (2 + shift)):
            for r in range(1 << shift):
                w = np.uint32(meta[base + q * outer + r * inner])
                fours[(q << shift) + r] = w & 0xF | (w & 0xF0) << 4 | (w & 0xF00) << 8 | (w & 0xF000) << 12
        for g in range(groups):
            pair, nibble = np.uint64(row[g]), np.uint64(codes[g])
            nonzero = (
                ((pair & _MAGNITUDE) + _MAGNITUDE) & _SIGN
            ) >> _15  # of the first in bit 0, of the second in bit 16
            mask = (nonzero & _1) << (nibble & _3) | (nonzero >> _16 & _1) << (nibble >> _2)
            bad |= (nibbles >> (mask << _2) & _15) ^ nibble
            bad |= (pair & _SIGN) >> _15 & ~nonzero & _PAIR
        for g in range(K // 4 if i < M else 0, groups):
            pair, nibble = np.uint64(row[g]), np.uint64(codes[g])
            first, second = 4 * g + np.int64(nibble & _3), 4 * g + np.int64(nibble >> _2)
            if i >= M or first >= K:
                bad |= pair & _ONES
            if i >= M or second >= K:
                bad |= pair >> _16
    if bad != 0:
        faults[0] = 1
