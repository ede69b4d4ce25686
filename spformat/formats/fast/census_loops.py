"""The loops behind ``compiled.census``: which structure the nonzeros of a matrix have, in one pass over its rows.

A row becomes one bit an element, 64 columns a word; everything else is shifts and masks on words, several at a time.
Sums of neighbouring bits grow in place: fields of 4, 8, 16 and 32 bits hold the nonzeros of windows that wide.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .numba_cache import compiled

Array = Any

STRIP = 256
"""Rows that are counted together: a multiple of the height of all tiles, blocks and vectors."""
BAD, NEGATIVE, VECTORS, GROUPS, BLOCKS, BLOCK_ROWS, TILES, WINDOWS = 0, 1, 2, 4, 6, 11, 16, 18
"""Positions in ``counts`` int64[30]: groups of four with more than two nonzeros; -0.0; nonempty vectors of 8 and 16
rows; groups of 16 of them, per tile of 8 and 16 rows; nonempty blocks of 8, 16, 32, 64, 128, and block rows of them;
nonempty columns per tile of 128 and 256 rows; most nonempty vectors of 1, 8 and 32 rows in a window of 4, 8, 16, 32
columns (vector by vector)."""

_MAGNITUDE, _SIGN = np.uint64(0x7FFF7FFF7FFF7FFF), np.uint64(0x8000800080008000)
_1, _2, _3, _4, _7, _8, _15, _16, _30, _31, _32, _45 = (
    np.uint64(n) for n in (1, 2, 3, 4, 7, 8, 15, 16, 30, 31, 32, 45)
)
_0, _ODD, _PAIRS, _NIBBLES = (np.uint64(n) for n in (0, 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F))
_BYTES, _HALVES, _WORDS = (np.uint64(n) for n in (0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0x00000000FFFFFFFF))
_EACH4, _TOP8, _TOP16, _TOP32 = (
    np.uint64(n) for n in (0x1111111111111111, 0x8080808080808080, 0x8000800080008000, 0x8000000080000000)
)
_FLAGS_TO_BITS, _56 = np.uint64(0x0102040810204080), np.uint64(56)


@compiled
def pack_fours(lo: int, hi: int, x: Array, words: Array) -> Any:
    """words uint64[rows, ceil(K/64)] of rows lo .. hi-1 of 16-bit values x uint64[M, K/4]; how many are -0.0."""
    groups, negative = x.shape[1], np.int64(0)
    nibbles = np.zeros(16 * words.shape[1], np.uint8)
    eights = nibbles.view(np.uint64)
    for i in range(lo, hi):
        row, out, bare = x[i], words[i - lo], _0
        for g in range(groups):
            some = (row[g] & _MAGNITUDE) + _MAGNITUDE
            nonzero = (some & _SIGN) >> _15
            nibbles[g] = (nonzero | nonzero >> _15 | nonzero >> _30 | nonzero >> _45) & _15
            lone = (row[g] & _SIGN & ~some) >> _15
            bare += (lone + (lone >> _16) + (lone >> _32) + (lone >> np.uint64(48))) & _7
        negative += np.int64(bare)
        for w in range(out.size):
            low, high = eights[2 * w], eights[2 * w + 1]
            low, high = (low | low >> _4) & _BYTES, (high | high >> _4) & _BYTES
            low, high = (low | low >> _8) & _HALVES, (high | high >> _8) & _HALVES
            low, high = (low | low >> _16) & _WORDS, (high | high >> _16) & _WORDS
            out[w] = low | high << _32
    return negative


@compiled
def pack_any(lo: int, hi: int, x: Array, zero: Any, words: Array) -> Any:
    """As ``pack_fours`` for values of any width, x [M, K]."""
    K, negative = x.shape[1], np.int64(0)
    nonzero = np.zeros(64 * words.shape[1], np.uint8)
    eights = nonzero.view(np.uint64)
    for i in range(lo, hi):
        row, out, bare = x[i], words[i - lo].view(np.uint8), 0
        for j in range(K):
            nonzero[j] = (row[j] & zero) != 0
            bare += (row[j] != 0) & ((row[j] & zero) == 0)
        negative += bare
        for y in range(out.size):
            out[y] = (eights[y] * _FLAGS_TO_BITS) >> _56
    return negative


@compiled
def merge(row: Array, into: Array) -> None:
    """into |= row."""
    for w in range(row.size):
        into[w] |= row[w]


@compiled
def ones(row: Array) -> Any:
    """Bits set."""
    total = _0
    for w in range(row.size):
        c = row[w] - (row[w] >> _1 & _ODD)
        c = (c & _PAIRS) + (c >> _2 & _PAIRS)
        c = (c + (c >> _4)) & _NIBBLES
        total += (c * np.uint64(0x0101010101010101)) >> _56
    return np.int64(total)


@compiled
def windows(row: Array, most: Array) -> Any:
    """(bits set, groups of four with more than two), and the fullest windows so far in ``most`` uint64[7, W]."""
    total, bad = _0, _0
    for w in range(row.size):
        two = row[w] - (row[w] >> _1 & _ODD)
        four = (two & _PAIRS) + (two >> _2 & _PAIRS)
        eight = (four + (four >> _4)) & _NIBBLES
        half = (eight + (eight >> _8)) & _BYTES
        word = (half + (half >> _16)) & _HALVES
        total += (word + (word >> _32)) & _WORDS
        all4, three = four >> _2 & _EACH4, four & (four >> _1) & _EACH4
        most[0, w] |= four & _EACH4
        most[1, w] |= four >> _1 & _EACH4
        most[2, w] |= three
        most[3, w] |= all4
        over = all4 | three
        over = (over + (over >> _4)) & _NIBBLES
        bad += (over * np.uint64(0x0101010101010101)) >> _56
        # Per field the larger of two: the top bit stays where nothing is borrowed from it.
        larger = ((most[4, w] | _TOP8) - eight) & _TOP8
        larger |= larger - (larger >> _7)
        most[4, w] = (most[4, w] & larger) | (eight & ~larger)
        larger = ((most[5, w] | _TOP16) - half) & _TOP16
        larger |= larger - (larger >> _15)
        most[5, w] = (most[5, w] & larger) | (half & ~larger)
        larger = ((most[6, w] | _TOP32) - word) & _TOP32
        larger |= larger - (larger >> _31)
        most[6, w] = (most[6, w] & larger) | (word & ~larger)
    return np.int64(total), np.int64(bad)


@compiled
def blocks(row: Array, kind: int, counts: Array) -> None:
    """Count the nonempty fields of 8 (kind 0), 16, 32, 64 or 128 (4) bits as blocks, and the row if there is one."""
    total: Any = 0
    for w in range(0, row.size, 2 if kind == 4 else 1):
        if kind == 0:
            some = ((((row[w] & ~_TOP8) + ~_TOP8) | row[w]) & _TOP8) >> _7
            total += np.int64((some * np.uint64(0x0101010101010101)) >> _56)
        elif kind == 1:
            some = ((((row[w] & _MAGNITUDE) + _MAGNITUDE) | row[w]) & _SIGN) >> _15
            total += np.int64((some + (some >> _16) + (some >> _32) + (some >> np.uint64(48))) & _7)
        elif kind == 2:
            total += np.int64((row[w] & _WORDS) != 0) + np.int64((row[w] >> _32) != 0)
        elif kind == 3:
            total += np.int64(row[w] != 0)
        else:
            total += np.int64(row[w] != 0 or (w + 1 < row.size and row[w + 1] != 0))
    counts[BLOCKS + kind] += total
    counts[BLOCK_ROWS + kind] += total > 0


@compiled
def census(words: Array, lengths: Array, counts: Array) -> None:
    """Count a strip uint64[rows <= 256, W]: fill lengths[rows], and add to ``counts``, which must be zeros before."""
    rows, W = words.shape
    # [of 1, 8, 32 rows]: flags that a nibble held 1, 2, 3, 4; most in fields of 8, 16, 32 bits
    most = np.zeros((3, 7, W), np.uint64)
    either = np.zeros((6, W), np.uint64)  # words of 8, 16, 32, 64, 128, 256 rows together
    for i in range(rows):
        last = i + 1 == rows
        lengths[i], bad = windows(words[i], most[0])
        counts[BAD] += bad
        merge(words[i], either[0])
        if not last and i % 8 != 7:
            continue
        vectors, _ = windows(either[0], most[1])
        counts[VECTORS] += vectors
        counts[GROUPS] += (vectors + 15) // 16
        blocks(either[0], 0, counts)
        merge(either[0], either[1])
        either[0] = 0
        if not last and i % 16 != 15:
            continue
        vectors = ones(either[1])
        counts[VECTORS + 1] += vectors
        counts[GROUPS + 1] += (vectors + 15) // 16
        blocks(either[1], 1, counts)
        merge(either[1], either[2])
        either[1] = 0
        if not last and i % 32 != 31:
            continue
        windows(either[2], most[2])
        blocks(either[2], 2, counts)
        merge(either[2], either[3])
        either[2] = 0
        if not last and i % 64 != 63:
            continue
        blocks(either[3], 3, counts)
        merge(either[3], either[4])
        either[3] = 0
        if not last and i % 128 != 127:
            continue
        blocks(either[4], 4, counts)
        counts[TILES] += ones(either[4])
        merge(either[4], either[5])
        either[4] = 0
    counts[TILES + 1] += ones(either[5])
    for v in range(3):
        for w in range(W):
            at = WINDOWS + 4 * v
            for n in range(4):
                if most[v, n, w] != 0:
                    counts[at] = max(counts[at], n + 1)
            for s in range(8):
                counts[at + 1] = max(counts[at + 1], np.int64((most[v, 4, w] >> np.uint64(8 * s)) & np.uint64(0xFF)))
            for s in range(4):
                counts[at + 2] = max(counts[at + 2], np.int64((most[v, 5, w] >> np.uint64(16 * s)) & np.uint64(0xFF)))
            for s in range(2):
                counts[at + 3] = max(counts[at + 3], np.int64((most[v, 6, w] >> np.uint64(32 * s)) & np.uint64(0xFF)))
