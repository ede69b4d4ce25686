"""The loops behind ``compiled`` for rows of items: csr, bitmask and ELL buckets, on value bits as in two_four_loops.

Nonzeros are moved 64 bytes at a time if the machine can (``simd.WIDE``). Otherwise every value is written, and the next
one overwrites it if it was zero, because a branch for each element costs more. This is decided when a loop is compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from .numba_cache import compiled
from .simd import VECTOR, WIDE, ones, pack, pack_columns, unpack

Array = Any


# ------------------------------------------------------------------ one row


def _columns_and_values(row: Array, zero: Any, columns: Array, values: Array) -> int:
    """Columns and bits of the nonzeros of ``row``; how many. Compiled only; room for 64 bytes more in both."""
    raise NotImplementedError


@overload(_columns_and_values)
def _columns_and_values_by_machine(row: Any, zero: Any, columns: Any, values: Any) -> Any:
    lanes = VECTOR // (row.dtype.bitwidth // 8)

    def wide(row: Any, zero: Any, columns: Any, values: Any) -> Any:
        n, whole = 0, row.size // lanes * lanes
        for j in range(0, whole, lanes):
            bits = pack(row, j, zero, values, n)
            pack_columns(bits, lanes, j, columns, n)
            n += ones(bits)
        for j in range(whole, row.size):
            columns[n], values[n] = j, row[j]
            n += (row[j] & zero) != 0
        return n

    def narrow(row: Any, zero: Any, columns: Any, values: Any) -> Any:
        n = 0
        for j in range(row.size):
            columns[n], values[n] = j, row[j]
            n += (row[j] & zero) != 0
        return n

    return wide if row.dtype.bitwidth // 8 in WIDE else narrow


_FLAGS_TO_BITS, _56 = np.uint64(0x0102040810204080), np.uint64(56)
"""Eight bytes of 0 or 1, the first lowest, times this: their bits side by side in the highest byte."""
_BITS_TO_FLAGS = np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little").view(np.uint64)
"""Eight bytes of 0 or 1 for each byte of bits."""


def _bits_and_values(row: Array, zero: Any, words: Array, flags: Array, values: Array) -> int:
    """Bits and values of the nonzeros of ``row``; how many. Compiled only.

    words: uint64 that cover the row; flags: 64 bytes for each of them; values: room for 64 bytes more.
    """
    raise NotImplementedError


@overload(_bits_and_values)
def _bits_and_values_by_machine(row: Any, zero: Any, words: Any, flags: Any, values: Any) -> Any:
    lanes = VECTOR // (row.dtype.bitwidth // 8)

    def wide(row: Any, zero: Any, words: Any, flags: Any, values: Any) -> Any:
        n: Any = 0
        for y in range(row.size // 64):
            word = np.uint64(0)
            for at in range(0, 64, lanes):
                bits = pack(row, 64 * y + at, zero, values, n)
                n += ones(bits)
                word |= bits << np.uint64(at)
            words[y] = word
        whole = row.size // 64 * 64
        if whole < row.size:
            word = np.uint64(0)
            for j in range(whole, row.size):
                nonzero = np.uint64((row[j] & zero) != 0)
                values[n] = row[j]
                n += np.int64(nonzero)
                word |= nonzero << np.uint64(j - whole)
            words[row.size // 64] = word
        return n

    def narrow(row: Any, zero: Any, words: Any, flags: Any, values: Any) -> Any:
        n, eights, packed = 0, flags.view(np.uint64), words.view(np.uint8)
        for j in range(row.size):
            flags[j] = (row[j] & zero) != 0
        for y in range(packed.size):
            packed[y] = (eights[y] * _FLAGS_TO_BITS) >> _56
        for j in range(row.size):
            values[n] = row[j]
            n += flags[j]
        return n

    return wide if row.dtype.bitwidth // 8 in WIDE else narrow


def _row_of_bits(words: Array, flags: Array, values: Array, row: Array) -> None:
    """``row`` from its bits and values, the reverse of ``_bits_and_values``. Compiled only."""
    raise NotImplementedError


@overload(_row_of_bits)
def _row_of_bits_by_machine(words: Any, flags: Any, values: Any, row: Any) -> Any:
    lanes = VECTOR // (row.dtype.bitwidth // 8)
    lowest = np.uint64((1 << lanes) - 1)

    def wide(words: Any, flags: Any, values: Any, row: Any) -> Any:
        n: Any = 0
        whole = row.size // 64 * 64
        for y in range(row.size // 64):
            word = words[y]
            for at in range(0, 64, lanes):
                unpack(values, n, word >> np.uint64(at), row, 64 * y + at)
                n += ones(word >> np.uint64(at) & lowest)
        for j in range(whole, row.size):
            nonzero = words[row.size // 64] >> np.uint64(j - whole) & np.uint64(1)
            row[j] = values[n] * nonzero
            n += np.int64(nonzero)

    def narrow(words: Any, flags: Any, values: Any, row: Any) -> Any:
        n, eights, packed = 0, flags.view(np.uint64), words.view(np.uint8)
        for y in range(packed.size):
            eights[y] = _BITS_TO_FLAGS[packed[y]]
        for j in range(row.size):
            row[j] = values[n] * np.uint64(flags[j])  # no branch
            n += flags[j]

    return wide if row.dtype.bitwidth // 8 in WIDE else narrow


# ------------------------------------------------------------------ csr and bitmask


@compiled
def count(lo: int, hi: int, x: Array, zero: Any, counts: Array) -> None:
    """counts[i] = nonzeros of row i."""
    for i in range(lo, hi):
        row, count = x[i], 0
        for j in range(row.size):
            count += (row[j] & zero) != 0
        counts[i] = count


# Four 16-bit values are one uint64, lowest column in the lowest bits.
_MAGNITUDE = np.uint64(0x7FFF7FFF7FFF7FFF)
_SIGN = np.uint64(0x8000800080008000)
_15, _16, _32, _48 = (np.uint64(n) for n in (15, 16, 32, 48))
_ONES = np.uint64(0xFFFF)


@compiled
def count_fours(lo: int, hi: int, x: Array, counts: Array, negative: Array) -> None:
    """As ``count`` for 16-bit values x uint64[M, K/4]; negative[i] = elements of row i that are -0.0."""
    for i in range(lo, hi):
        row = x[i]
        for first in range(0, row.size, 1 << 15):  # each lane of the sums has 16 bits
            nonzero, bare = np.uint64(0), np.uint64(0)
            for j in range(first, min(row.size, first + (1 << 15))):
                # Bit 15 of a lane, and no carry into the next, exactly where its magnitude is not zero.
                some = (row[j] & _MAGNITUDE) + _MAGNITUDE
                nonzero += (some & _SIGN) >> _15
                bare += (row[j] & _SIGN & ~some) >> _15
            counts[i] += np.int64(
                (nonzero & _ONES) + (nonzero >> _16 & _ONES) + (nonzero >> _32 & _ONES) + (nonzero >> _48)
            )
            negative[i] += np.int64((bare & _ONES) + (bare >> _16 & _ONES) + (bare >> _32 & _ONES) + (bare >> _48))


@compiled
def csr_items(lo: int, hi: int, x: Array, zero: Any, indptr: Array, indices: Array, data: Array) -> None:
    """Columns and values of the nonzeros, at indptr[i] of each row."""
    room = x.shape[1] + VECTOR
    columns, values = np.empty(room, indices.dtype), np.empty(room, x.dtype)
    for i in range(lo, hi):
        n = _columns_and_values(x[i], zero, columns, values)
        indices[indptr[i] : indptr[i] + n] = columns[:n]
        data[indptr[i] : indptr[i] + n] = values[:n]


@compiled
def csr_scatter(lo: int, hi: int, indptr: Array, indices: Array, data: Array, out: Array) -> None:
    """Write the items into zeroed rows."""
    for i in range(lo, hi):
        row, columns, values = out[i], indices[indptr[i] : indptr[i + 1]], data[indptr[i] : indptr[i + 1]]
        for x in range(columns.size):
            row[columns[x]] = values[x]


@compiled
def bitmask_items(lo: int, hi: int, x: Array, zero: Any, indptr: Array, bitmask: Array, data: Array) -> None:
    """Set bits and values of the nonzeros."""
    K, wide = x.shape[1], bitmask.shape[1]
    words, values = np.zeros((K + 63) // 64, np.uint64), np.empty(K + VECTOR, x.dtype)
    flags, packed = np.zeros(64 * words.size, np.uint8), words.view(np.uint8)
    for i in range(lo, hi):
        n = _bits_and_values(x[i], zero, words, flags, values)
        bitmask[i] = packed[:wide]
        data[indptr[i] : indptr[i] + n] = values[:n]


@compiled
def bitmask_scatter(lo: int, hi: int, indptr: Array, bitmask: Array, data: Array, out: Array) -> None:
    """Rows from their set bits and values."""
    K, wide = out.shape[1], bitmask.shape[1]
    words, values = np.zeros((K + 63) // 64, np.uint64), np.zeros(K + VECTOR, data.dtype)
    flags, packed = np.zeros(64 * words.size, np.uint8), words.view(np.uint8)
    for i in range(lo, hi):
        length = indptr[i + 1] - indptr[i]
        packed[:wide] = bitmask[i]
        values[:length] = data[indptr[i] : indptr[i + 1]]  # more may be read than a row holds
        _row_of_bits(words, flags, values, out[i])


# ------------------------------------------------------------------ ELL buckets


@compiled
def part_counts_of_dense(lo: int, hi: int, x: Array, zero: Any, part: int, counts: Array) -> None:
    """counts int64[M, parts] = nonzeros of each row in each part of ``part`` columns."""
    K = x.shape[1]
    for i in range(lo, hi):
        row = x[i]
        for p in range(counts.shape[1]):
            count = 0
            for j in range(p * part, min(K, (p + 1) * part)):
                count += (row[j] & zero) != 0
            counts[i, p] = count


@compiled
def part_counts_of_csr(lo: int, hi: int, indptr: Array, indices: Array, part: int, counts: Array) -> None:
    """As ``part_counts_of_dense`` for the items of a CSR in order."""
    for i in range(lo, hi):
        p, end = 0, np.int64(part)
        for s in range(indptr[i], indptr[i + 1]):
            while indices[s] >= end:
                p, end = p + 1, end + part
            counts[i, p] += 1


@compiled
def ell_row(
    columns: Array, values: Array, item: int, ell: range, starts: Array, live: Array, pad: int, indices: Array,
    data: Array, source: Array,
) -> None:  # fmt: skip
    """Write the items of one row to its ELL rows ``ell``, in order. item: number of its first item in the CSR."""
    n = 0
    for e in ell:
        s, width, items = starts[e, 0], starts[e, 1], live[e]
        for r in range(items):
            indices[s + r], data[s + r], source[s + r] = columns[n + r], values[n + r], item + n + r
        for r in range(items, width):
            indices[s + r], data[s + r], source[s + r] = pad, 0, pad
        n += items


@compiled
def ell_items_of_dense(
    lo: int, hi: int, x: Array, zero: Any, indptr: Array, ell_ptr: Array, starts: Array, live: Array, pad: int,
    indices: Array, data: Array, source: Array,
) -> None:  # fmt: skip
    """Slots of every ELL row of rows lo .. hi-1 of x.

    Row i has the ELL rows ell_ptr[i] .. ell_ptr[i+1]-1, by part and chunk; starts int64[R, 2] = first slot and width of
    each, live its items.
    """
    room = x.shape[1] + VECTOR
    columns, values = np.empty(room, indices.dtype), np.empty(room, x.dtype)
    for i in range(lo, hi):
        _columns_and_values(x[i], zero, columns, values)
        ell = range(ell_ptr[i], ell_ptr[i + 1])
        ell_row(columns, values, indptr[i], ell, starts, live, pad, indices, data, source)


@compiled
def ell_items_of_csr(
    lo: int, hi: int, csr_indices: Array, csr_data: Array, indptr: Array, ell_ptr: Array, starts: Array, live: Array,
    pad: int, indices: Array, data: Array, source: Array,
) -> None:  # fmt: skip
    """As ``ell_items_of_dense`` for the items of a CSR in order."""
    for i in range(lo, hi):
        mine = slice(indptr[i], indptr[i + 1])
        ell = range(ell_ptr[i], ell_ptr[i + 1])
        ell_row(csr_indices[mine], csr_data[mine], indptr[i], ell, starts, live, pad, indices, data, source)


@compiled
def ell_live(lo: int, hi: int, starts: Array, source: Array, pad: int, live: Array) -> None:
    """live[e] = number of items in the slots of ELL row e, starts[e] .. starts[e+1]-1."""
    for e in range(lo, hi):
        count = 0
        for s in range(starts[e], starts[e + 1]):
            count += source[s] != pad
        live[e] = count


@compiled
def ell_to_csr(
    lo: int, hi: int, starts: Array, indices: Array, data: Array, source: Array, pad: int, csr_indices: Array,
    csr_data: Array,
) -> None:  # fmt: skip
    """Write the items of ELL rows lo .. hi-1 to their positions in the CSR."""
    for s in range(starts[lo], starts[hi]):
        if source[s] != pad:
            csr_indices[source[s]], csr_data[source[s]] = indices[s], data[s]


@compiled
def ell_scatter(lo: int, hi: int, starts: Array, row_ids: Array, indices: Array, data: Array, out: Array) -> None:
    """Write the items of ELL rows lo .. hi-1 into zeroed rows."""
    for e in range(lo, hi):
        row = out[row_ids[e]]
        for s in range(starts[e], starts[e + 1]):
            if indices[s] >= 0:
                row[indices[s]] = data[s]
