"""The structure of a matrix from the places of its nonzeros, or from its strips of rows: neither needs it dense.

``of_csr`` takes time in proportion to the nonzeros, however many rows and columns there are. ``joined`` joins the
structures of strips of rows, so that a matrix that is larger than memory is counted strip by strip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ..arrays.dtypes import nonzero_mask, value_type
from ..arrays.library import Array, ceil_div
from ..arrays.segments import counts_of, distinct
from ..errors import UsageError
from ..formats.base import Format
from ..formats.csr import CSR
from ..formats.dense import Dense
from ..formats.foreign import as_format
from ..formats.hooks import VECTOR_HEIGHTS, VECTOR_STRIDE
from .structure import BLOCKS, NM_WINDOWS, TILE_ROWS, VECTOR_LENGTHS, Structure, analyse

STRIP = 256
"""Every strip but the last has a multiple of so many rows: no tile, block or vector reaches over its end."""
_ITEMS = 1 << 22
"""Nonzeros that are counted together, unless 256 rows have more."""


def structure_of(x: object) -> Structure:
    """The structure of any matrix: a Structure itself, an array, a spformat or scipy matrix, a torch tensor.

    On the host only a dense one is read as a dense matrix. On a device all are, and are counted there; LimitError for a
    sparse one whose dense array would be too large.
    """
    if isinstance(x, Structure):
        return x
    a = as_format(x)
    if isinstance(a, Dense):
        return analyse(a.data)
    return of_csr(a.to_csr()) if a.device == "cpu" else analyse(a.to_dense())


SPARSE = 8
"""Times the bytes of a matrix that its dense array takes, from which on it is counted by its coordinates."""


def _smallest(f: Format) -> str:
    """The exact format with the fewest bytes for this matrix, as text. It is counted where the matrix is."""
    (M, K), on_host = f.shape, f.device == "cpu"
    sparse = on_host and M * K * f.dtype.itemsize > SPARSE * f.nbytes
    return (structure_of(f) if sparse else analyse(f.to_dense())).smallest()


Format.smallest = _smallest


class DenseBlocks(NamedTuple):
    """The blocks of one size of which at least half of the stored places are nonzero."""

    size: int
    """Rows and columns of a block."""
    blocks: int
    nonzeros: int
    """In those blocks."""


SUM_BLOCKS = (32, 64)
"""Sizes of blocks that are considered for a sum of blocks and the rest, each twice the one before."""


def dense_blocks_of(x: object) -> list[DenseBlocks]:
    """The blocks of 32 and of 64 that are at least half full, where a matrix has nonzeros elsewhere, too, and at most a
    tenth of the places there are nonzero.

    Nothing for a ``Structure`` and for a matrix on a device. Of a dense one all elements are read, else O(nnz).
    """
    if isinstance(x, Structure):
        return []
    m = as_format(x)
    if m.device != "cpu":
        return []
    (M, K), found, counted = m.shape, [], _counts_in_blocks(m)
    for b, (keys, counts) in counted.items():
        full = 2 * counts >= b * b
        blocks, nonzeros, nnz = int(full.sum()), int(counts[full].sum()), int(counts.sum())
        if 0 < nonzeros < nnz and 10 * (nnz - nonzeros) <= M * K - _places(keys[full], b, m.shape):
            found.append(DenseBlocks(b, blocks, nonzeros))
    return found


def _places(keys: Array, b: int, shape: tuple[int, ...]) -> int:
    """How many elements of the matrix lie in these blocks; those at its edges have fewer than b * b."""
    row, col = np.divmod(keys, ceil_div(shape[1], b))
    return int((np.minimum(b, shape[0] - b * row) * np.minimum(b, shape[1] - b * col)).sum())


def _counts_in_blocks(m: Format) -> dict[int, tuple[Array, Array]]:
    """Size of a block -> int64: (numbers of blocks, row by row; their nonzeros), of all blocks or of all that have
    some."""
    (M, K), smallest = m.shape, SUM_BLOCKS[0]
    if isinstance(m, Dense):
        counts = np.zeros((ceil_div(M, smallest), ceil_div(K, smallest)), np.int64)
        for i in range(0, M if K else 0, STRIP):
            columns = np.add.reduceat(
                nonzero_mask(m.data[i : i + STRIP]), np.arange(0, K, smallest), axis=1, dtype=np.int64
            )
            lines = np.add.reduceat(columns, np.arange(0, len(columns), smallest), axis=0)
            counts[i // smallest : i // smallest + len(lines)] = lines
        out = {smallest: counts}
        for b in SUM_BLOCKS[1:]:
            for axis, extent in enumerate(counts.shape):
                counts = np.add.reduceat(counts, np.arange(0, extent, b // smallest), axis=axis) if extent else counts
            out[b] = counts
        return {b: (np.arange(c.size), c.reshape(-1)) for b, c in out.items()}
    a = m.to_csr().without_zeros()
    rows, cols, sparse = a.rows(), a.indices.astype(np.int64), {}
    for b in SUM_BLOCKS:
        across = ceil_div(K, b)
        keys, bound = rows // b * across + cols // b, ceil_div(M, b) * across
        few = bound > 4 * keys.size + (1 << 20)
        sparse[b] = np.unique(keys, return_counts=True) if few else (np.arange(bound), counts_of(keys, bound))
    return sparse


def of_csr(a: CSR) -> Structure:
    """The structure of an ordered host CSR; what ``analyse`` returns for the dense matrix. Memory: a few strips."""
    a = a.ensure_valid().without_zeros()
    M, K = a.shape
    lengths = np.diff(a.indptr).astype(np.int64)
    parts = [
        _of_strip((last - first, K), a.dtype.name, lengths[first:last], a.indices[a.indptr[first] : a.indptr[last]])
        for first, last in _strips(a.indptr, M)
    ]
    return joined(parts) if parts else analyse(np.zeros(a.shape, a.dtype))


def joined(parts: Iterable[Structure]) -> Structure:
    """The structure of a matrix from those of its strips of rows, in order.

    Every strip but the last must have a multiple of 256 rows; UsageError otherwise, and without strips.
    """
    strips = list(parts)
    if not strips:
        raise UsageError("joined: expected the structure of at least one strip of rows, got none")
    first = strips[0]
    for s in strips:
        if (s.shape[1], s.dtype) != (first.shape[1], first.dtype):
            got = f"{first.shape[1]} of {first.dtype} and {s.shape[1]} of {s.dtype}"
            raise UsageError(f"joined: expected strips with the same columns and dtype, got {got}")
    for s in strips[:-1]:
        if s.shape[0] % STRIP:
            raise UsageError(f"joined: expected strips of a multiple of {STRIP} rows, got one of {s.shape[0]}")

    def pairs(name: str) -> dict[int, tuple[int, int]]:
        columns = {k: [getattr(s, name)[k] for s in strips] for k in getattr(first, name)}
        return {k: (sum(n for n, _ in of), sum(m for _, m in of)) for k, of in columns.items()}

    return Structure(
        shape=(sum(s.shape[0] for s in strips), first.shape[1]), dtype=first.dtype, nnz=sum(s.nnz for s in strips),
        negative_zeros=sum(s.negative_zeros for s in strips),
        row_lengths=np.concatenate([s.row_lengths for s in strips]), bad_groups=sum(s.bad_groups for s in strips),
        groups=sum(s.groups for s in strips),
        window_max={k: max(s.window_max[k] for s in strips) for k in first.window_max},
        blocks=pairs("blocks"), vector_counts=pairs("vector_counts"),
        tile_columns={k: sum(s.tile_columns[k] for s in strips) for k in first.tile_columns},
    )  # fmt: skip


def of_row_chunks(chunks: Iterable[Array]) -> Structure:
    """The structure of a dense host matrix from chunks of its rows [rows, K], in order; one is in memory at a time.

    Every chunk but the last must have a multiple of 256 rows; UsageError otherwise.
    """
    return joined(map(analyse, chunks))


def _strips(indptr: Array, rows: int) -> Iterator[tuple[int, int]]:
    """(first row, row after the last) of strips with about ``_ITEMS`` items each, or 256 rows."""
    first = 0
    while first < rows:
        fits = int(np.searchsorted(indptr, int(indptr[first]) + _ITEMS, side="right")) - 1
        last = min(rows, max(first + STRIP, fits // STRIP * STRIP))
        yield first, last
        first = last


def _of_strip(shape: tuple[int, int], dtype: str, lengths: Array, columns: Array) -> Structure:
    (M, K), nnz = shape, int(columns.size)
    tile, col = np.repeat(np.arange(M, dtype=np.int64), lengths), columns.astype(np.int64)
    window_max: dict[tuple[int, int], int] = {}
    blocks, vectors, tile_columns, bad, height = {}, {}, {}, 0, 1
    # One height after the other: the nonempty vectors of 16 rows are found among those of 8, and so on.
    for rows in sorted({1, *VECTOR_LENGTHS, *VECTOR_HEIGHTS, *BLOCKS, *TILE_ROWS}):
        if rows > 1:
            keys = _distinct(tile // (rows // height) * K + col, ceil_div(M, rows) * K)
            (tile, col), height = np.divmod(keys, max(1, K)), rows
        if rows in VECTOR_LENGTHS:
            for m in NM_WINDOWS:
                full = _runs(tile * ceil_div(K, m) + col // m)
                window_max[m, rows] = int(full.max(initial=0))
                bad += int((full > 2).sum()) if (m, rows) == (4, 1) else 0
        if rows in VECTOR_HEIGHTS:
            groups = -(-np.bincount(tile) // VECTOR_STRIDE)
            vectors[rows] = int(col.size), int(groups.sum())
        if rows in BLOCKS:
            blocks[rows] = int(_runs(tile * ceil_div(K, rows) + col // rows).size), int(_runs(tile).size)
        if rows in TILE_ROWS:
            tile_columns[rows] = int(col.size)
    return Structure(
        shape=shape, dtype=value_type(dtype).name, nnz=nnz, negative_zeros=0, row_lengths=lengths, bad_groups=bad,
        groups=M * ceil_div(K, 4), window_max={(m, v): window_max[m, v] for m in NM_WINDOWS for v in VECTOR_LENGTHS},
        blocks=blocks, vector_counts=vectors, tile_columns=tile_columns,
    )  # fmt: skip


def _distinct(keys: Array, bound: int) -> Array:
    """The distinct keys, ascending. Requires 0 <= key < bound."""
    if bound <= 8 * keys.size + (1 << 20):  # one flag for each possible key is cheaper than sorting
        seen = np.zeros(bound, bool)
        seen[keys] = True
        return np.flatnonzero(seen)
    return distinct(keys)


def _runs(keys: Array) -> Array:
    """int64: how often each key occurs, for sorted keys."""
    if not keys.size:
        return np.zeros(0, np.int64)
    starts = np.flatnonzero(np.concatenate((np.ones(1, bool), keys[1:] != keys[:-1])))
    return np.diff(starts, append=keys.size)
