"""The loops behind ``compiled`` for vector n:m, on value bits as in two_four_loops.

All rows of a group store the same columns, so each of its rows is packed with one mask. The packed rows are transposed
in blocks of 64 bytes, because the values of a stored column lie side by side. Both happen in strips that fit into L1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from .numba_cache import compiled
from .simd import VECTOR, WIDE, ones, pack_chosen, transpose, unpack

Array = Any
STRIP = 512
"""Columns of a row group that are worked on together."""
_1 = np.uint64(1)


def _chosen(row: Array, zero: Any, columns: Array, words: Array, packed: Array) -> None:
    """packed[u] = row[columns[u]], -0.0 as +0. Compiled only; ``words``: the columns as bits, ``packed``: with room."""
    raise NotImplementedError


@overload(_chosen)
def _chosen_by_machine(row: Any, zero: Any, columns: Any, words: Any, packed: Any) -> Any:
    lanes = VECTOR // (row.dtype.bitwidth // 8)
    lowest = np.uint64((1 << lanes) - 1)

    def wide(row: Any, zero: Any, columns: Any, words: Any, packed: Any) -> Any:
        n = 0
        for at in range(0, row.size // lanes * lanes, lanes):
            bits = words[at // 64] >> np.uint64(at % 64) & lowest
            pack_chosen(row, at, zero, bits, packed, n)
            n += ones(bits)
        for u in range(n, columns.size):
            packed[u] = row[columns[u]] * ((row[columns[u]] & zero) != 0)

    def narrow(row: Any, zero: Any, columns: Any, words: Any, packed: Any) -> Any:
        for u in range(columns.size):
            packed[u] = row[columns[u]] * ((row[columns[u]] & zero) != 0)

    return wide if row.dtype.bitwidth // 8 in WIDE else narrow


def _spread(packed: Array, columns: Array, words: Array, row: Array) -> None:
    """row[columns[u]] = packed[u], all else zero. Compiled only."""
    raise NotImplementedError


@overload(_spread)
def _spread_by_machine(packed: Any, columns: Any, words: Any, row: Any) -> Any:
    lanes = VECTOR // (row.dtype.bitwidth // 8)
    lowest = np.uint64((1 << lanes) - 1)

    def wide(packed: Any, columns: Any, words: Any, row: Any) -> Any:
        n, whole = 0, row.size // lanes * lanes
        for at in range(0, whole, lanes):
            bits = words[at // 64] >> np.uint64(at % 64) & lowest
            unpack(packed, n, bits, row, at)
            n += ones(bits)
        row[whole:] = 0
        for u in range(n, columns.size):
            row[columns[u]] = packed[u]

    def narrow(packed: Any, columns: Any, words: Any, row: Any) -> Any:
        row[:] = 0
        for u in range(columns.size):
            row[columns[u]] = packed[u]

    return wide if row.dtype.bitwidth // 8 in WIDE else narrow


@compiled
def _strip(
    indices: Array, q: int, w0: int, step: int, n: int, m: int, K: int, columns: Array, words: Array
) -> tuple[int, int, int]:
    """A strip of row group q: ``step`` windows from window w0 on, or fewer at the end.

    Returns (its first column, the column after its last within K, the number of stored columns in it). The stored
    columns are written to ``columns``, relative to the first, and to ``words`` as bits. Fillers, which point past the
    last column, come last.
    """
    w1, first = min(indices.shape[0] // n, w0 + step), w0 * m
    end = max(first, min(K, w1 * m))
    words[:] = 0
    count = 0
    for u in range(w0 * n, w1 * n):
        j = (u // n - w0) * m + np.int64(indices[u, q])
        if j < end - first:
            columns[count] = j
            count += 1
            words[j >> 6] |= _1 << np.uint64(j & 63)
    return first, end, count


@compiled
def _blocks(x: Array, at: int, step: int, rows: int, cols: int, out: Array, to: int, stride: int) -> None:
    """out[to + c*stride + r] = x[at + r*step + c] for r < rows, c < cols."""
    lanes = VECTOR // x.itemsize
    whole_rows, whole_cols = rows // lanes * lanes, cols // lanes * lanes
    for c in range(0, whole_cols, lanes):
        for r in range(0, whole_rows, lanes):
            transpose(x, at + r * step + c, step, out, to + c * stride + r, stride)
    for c in range(cols):
        for r in range(whole_rows if c < whole_cols else 0, rows):
            out[to + c * stride + r] = x[at + r * step + c]


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
            nonempty = 0
            for j in range(m):
                nonempty += seen[w * m + j] != 0
            if nonempty > n:
                if refused[0] == 0:
                    refused[1], refused[2] = q * windows + w, nonempty
                refused[0] += 1
                continue
            free, u = n - nonempty, w * n
            for j in range(m):
                used = seen[w * m + j] != 0
                if used or free > 0:
                    free -= not used
                    indices[u, q] = j
                    u += 1


@compiled
def vector_nm_encode(
    lo: int, hi: int, x: Array, zero: Any, n: int, m: int, length: int, indices: Array, data: Array, refused: Array
) -> None:
    """indices[u, q] and data[u, i], both zeros before, of row groups lo .. hi-1; ``refused`` as above."""
    (M, K), windows = x.shape, indices.shape[0] // n
    step = max(1, STRIP // m)
    flat, Mp, wide = data.reshape(-1), data.shape[1], step * n + VECTOR
    columns, words = np.empty(step * n, np.int64), np.empty((step * m + 63) // 64, np.uint64)
    packed = np.zeros(length * wide, x.dtype)
    for q in range(lo, hi):
        vector_nm_positions(q, q + 1, x, zero, n, m, length, indices, refused)
        if refused[0]:
            continue
        i0, h = q * length, max(0, min(length, M - q * length))
        for w0 in range(0, windows, step):
            first, end, chosen = _strip(indices, q, w0, step, n, m, K, columns, words)
            for r in range(h):
                row = x[i0 + r, first:end]
                _chosen(row, zero, columns[:chosen], words, packed[r * wide : (r + 1) * wide])
            _blocks(packed, 0, wide, h, chosen, flat, w0 * n * Mp + i0, Mp)


@compiled
def vector_nm_scatter(lo: int, hi: int, indices: Array, data: Array, n: int, m: int, length: int, out: Array) -> None:
    """Row groups lo .. hi-1 of ``out``, all of them."""
    (M, K), windows = out.shape, indices.shape[0] // n
    step = max(1, STRIP // m)
    flat, Mp, wide = data.reshape(-1), data.shape[1], step * n + VECTOR
    columns, words = np.empty(step * n, np.int64), np.empty((step * m + 63) // 64, np.uint64)
    packed = np.zeros(length * wide, out.dtype)
    for q in range(lo, hi):
        i0, h = q * length, max(0, min(length, M - q * length))
        for w0 in range(0, windows, step):
            first, end, chosen = _strip(indices, q, w0, step, n, m, K, columns, words)
            _blocks(flat, w0 * n * Mp + i0, Mp, chosen, h, packed, 0, wide)
            for r in range(h):
                row = out[i0 + r, first:end]
                _spread(packed[r * wide : (r + 1) * wide], columns[:chosen], words, row)
