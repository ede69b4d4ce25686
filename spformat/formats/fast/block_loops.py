"""The loops behind ``compiled`` for blocks and vectors: bsr and sr-bcrs, on value bits as in two_four_loops.

Ranges ``lo .. hi-1`` are block rows or row tiles; a first loop says what each of them holds, a second one, once the
offsets are known, writes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .numba_cache import compiled

Array = Any


@compiled
def rows_together(x: Array, zero: Any, first: int, height: int, some: Array) -> None:
    """some[j] = the OR of the magnitudes of column j in rows first .. first+height-1 of x."""
    some[:] = 0
    for i in range(first, min(x.shape[0], first + height)):
        row = x[i]
        for j in range(row.size):
            some[j] |= row[j] & zero


@compiled
def block_flags(lo: int, hi: int, x: Array, zero: Any, R: int, C: int, nonempty: Array) -> None:
    """nonempty uint8[Mb, Kb] = whether a block R x C of x [M, K] has a nonzero."""
    some = np.zeros(nonempty.shape[1] * C, x.dtype)
    for b in range(lo, hi):
        rows_together(x, zero, b * R, R, some[: x.shape[1]])
        for k in range(nonempty.shape[1]):
            any_of = some[k * C]
            for j in range(k * C + 1, (k + 1) * C):
                any_of |= some[j]
            nonempty[b, k] = any_of != 0


@compiled
def block_items(
    lo: int, hi: int, x: Array, zero: Any, R: int, C: int, nonempty: Array, indptr: Array, indices: Array, data: Array
) -> None:
    """indices and data [nnzb, R, C] of the blocks of each block row, from indptr[b]; +0 outside x and for -0.0."""
    M, K = x.shape
    for b in range(lo, hi):
        n, height = indptr[b], min(R, M - b * R)
        for k in range(nonempty.shape[1]):
            if nonempty[b, k] == 0:
                continue
            indices[n] = k
            j0, width = k * C, min(C, K - k * C)
            if width < C or height < R:
                data[n] = 0
            for r in range(height):
                row, out = x[b * R + r], data[n, r]
                for j in range(width):
                    value = row[j0 + j]
                    out[j] = value * ((value & zero) != 0)
            n += 1


@compiled
def vector_counts(lo: int, hi: int, x: Array, zero: Any, t: int, counts: Array) -> None:
    """counts[q] = columns with a nonzero in tile q of t rows of x [M, K]."""
    some = np.zeros(x.shape[1], x.dtype)
    for q in range(lo, hi):
        rows_together(x, zero, q * t, t, some)
        n = 0
        for j in range(some.size):
            n += some[j] != 0
        counts[q] = n


@compiled
def vector_items(
    lo: int, hi: int, x: Array, zero: Any, t: int, g: int, pad: int, indptr: Array, indices: Array, data: Array
) -> None:
    """indices [G, g] and data [G, t, g] of the nonempty columns of each tile, in groups from indptr[q]."""
    M, K = x.shape
    some, columns = np.zeros(K, x.dtype), np.empty(K + 1, np.int64)
    for q in range(lo, hi):
        rows_together(x, zero, q * t, t, some)
        n, height = 0, min(t, M - q * t)
        for j in range(K):
            columns[n] = j  # kept if there is a nonzero: a branch costs more
            n += some[j] != 0
        for group in range(indptr[q], indptr[q + 1]):
            first = (group - indptr[q]) * g
            live = min(g, n - first)
            for s in range(g):
                indices[group, s] = columns[first + s] if s < live else pad
            if live < g or height < t:
                data[group] = 0
            for r in range(height):
                row, out = x[q * t + r], data[group, r]
                for s in range(live):
                    value = row[columns[first + s]]
                    out[s] = value * ((value & zero) != 0)


@compiled
def vector_scatter(lo: int, hi: int, indptr: Array, indices: Array, data: Array, t: int, out: Array) -> None:
    """Write the vectors of tiles into zeroed rows. ``data`` is +0 at padding, so whole vectors can be written."""
    M = out.shape[0]
    for q in range(lo, hi):
        for r in range(min(t, M - q * t)):
            row = out[q * t + r]
            for group in range(indptr[q], indptr[q + 1]):
                columns, values = indices[group], data[group, r]
                for s in range(columns.size):
                    if columns[s] >= 0:
                        row[columns[s]] = values[s]
