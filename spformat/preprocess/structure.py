"""The structure of a matrix: how sparse it is, in which pattern, and how many bytes each format would need.

One pass over row chunks counts exactly, without sampling. ``inspect`` and ``plan`` print the counts, and ``--to auto``
chooses the format by them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..arrays import threads
from ..arrays.dtypes import bits, nonzero_mask, value_type
from ..arrays.library import Array, ceil_div, is_cupy, round_up
from ..formats import edges, parse_spec, registered, spec_text
from ..formats.base import checked_values
from ..formats.hooks import VECTOR_HEIGHTS, VECTOR_ROWS, VECTOR_STRIDE

CHUNK = 1 << 22
"""Dense elements that are counted together."""

NM_WINDOWS = (4, 8, 16, 32)
VECTOR_LENGTHS = (1, 8, 32)
BLOCKS = (8, 16, 32, 64, 128)
_TINY = 256
"""Bytes up to which the structures of matrices with the same pattern are computed once."""
_ROWS = 128
"""A row chunk is padded to a multiple of this, so that it has whole vectors and blocks of all sizes above."""
TILE_ROWS = (128, 256)
"""Heights of the tiles of the vector n:m kernels. A tile must load one row of B for each of its nonempty columns."""


@dataclass(frozen=True, eq=False)
class Structure:
    """Counts of one matrix; every number is exact."""

    shape: tuple[int, int]
    dtype: str
    nnz: int
    negative_zeros: int
    """Elements that are -0.0. Every sparse format returns them as +0.0."""
    row_lengths: np.ndarray[Any, Any]
    """int64[M]: nonzeros in each row."""
    bad_groups: int
    """Groups of four columns with more than two nonzeros. The matrix is 2:4 if there are none."""
    groups: int
    window_max: dict[tuple[int, int], int]
    """(m, vector length) -> most nonempty vectors in a window of m columns: the n of the tightest n:m."""
    blocks: dict[int, tuple[int, int]]
    """b -> (nonempty b x b blocks, nonempty block rows)."""
    vector_counts: dict[int, tuple[int, int]]
    """h -> (nonempty h x 1 vectors, groups of 16 of them, padded per tile of h rows)."""
    tile_columns: dict[int, int]
    """Height of a tile -> nonempty columns, summed over the tiles."""

    def __eq__(self, other: object) -> bool:
        """The same counts, those of the rows among them."""
        if type(self) is not type(other):
            return NotImplemented
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return all(np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y for x, y in pairs)

    @property
    def density(self) -> float:
        """nnz / (M*K); 0 for an empty matrix."""
        size = self.shape[0] * self.shape[1]
        return self.nnz / size if size else 0.0

    @property
    def dense_bytes(self) -> int:
        """Bytes of the dense array."""
        return self.shape[0] * self.shape[1] * value_type(self.dtype).numpy.itemsize

    @property
    def is_two_four(self) -> bool:
        """Whether every group of four columns has at most two nonzeros, and the matrix has any."""
        return self.bad_groups == 0 and self.nnz > 0

    def n_of(self, m: int, vector_length: int) -> int | None:
        """n of the tightest n:m pattern that the matrix fits; None if all columns of some window are nonempty."""
        n = self.window_max[m, vector_length]
        return n if 0 < n < m else None

    @property
    def vectors(self) -> int:
        """Nonempty 8 x 1 vectors."""
        return self.vector_counts[VECTOR_ROWS][0]

    def gather_reuse(self, height: int) -> float:
        """Nonzeros for each nonempty vector of 8 or 16 rows, from 1 to the height; 0 for an empty matrix.

        A kernel that loads a row of B for each such vector uses it for so many nonzeros.
        """
        vectors = self.vector_counts[height][0]
        return self.nnz / vectors if vectors else 0.0

    def block_fill(self, b: int) -> float:
        """Share of the elements of the nonempty b x b blocks that are nonzero; 0 for an empty matrix."""
        stored = self.blocks[b][0] * b * b
        return self.nnz / stored if stored else 0.0

    def grid(self, b: int) -> int:
        """How many b x b blocks the matrix is cut into, empty ones included."""
        return ceil_div(self.shape[0], b) * ceil_div(self.shape[1], b)

    @property
    def mean_row(self) -> float:
        """Nonzeros of a row on average; 0 without rows."""
        return self.nnz / self.shape[0] if self.shape[0] else 0.0

    @property
    def longest_row(self) -> int:
        """Nonzeros of the longest row; 0 without rows."""
        return int(self.row_lengths.max(initial=0))

    @property
    def row_spread(self) -> float:
        """Standard deviation of the row lengths over their mean (the coefficient of variation); 0 if all are empty."""
        return float(self.row_lengths.std()) / self.mean_row if self.nnz else 0.0

    @property
    def two_four_share(self) -> float:
        """Share of the groups of four columns with at most two nonzeros; 1 without groups."""
        return 1 - self.bad_groups / self.groups if self.groups else 1.0

    def kept_share(self, tile_rows: int) -> float:
        """Share of the columns, and so of the rows of B, that a tile of 128 or 256 rows needs; 0 for an empty matrix.

        Packing (NM-SpMM's col_info) pays where this share is small. It is larger than 1 - sparsity unless the rows of a
        tile have their nonzeros in the same columns.
        """
        columns = ceil_div(self.shape[0], tile_rows) * self.shape[1]
        return self.tile_columns[tile_rows] / columns if columns else 0.0

    def rows_by_length(self) -> dict[str, int]:
        """How many rows have a length in each class: "0", "1-8", "9-16", "17-32", ..; for formats with buckets."""
        edges = [0, 8]
        while edges[-1] < (int(self.row_lengths.max()) if self.row_lengths.size else 0):
            edges.append(edges[-1] * 2)
        out = {"0": int((self.row_lengths == 0).sum())}
        for low, high in itertools.pairwise(edges):
            out[f"{low + 1}-{high}"] = int(((self.row_lengths > low) & (self.row_lengths <= high)).sum())
        return out

    # ---------------------------------------------------------------- bytes

    def candidates(self) -> tuple[str, ...]:
        """The formats, as text, that hold this matrix exactly and are worth considering; the simpler ones first."""
        formats = sorted(registered(), key=lambda f: f.tie_rank)
        takes = [f for f in formats if self.dtype in f.value_dtypes]
        return tuple(spec_text(f, params) for f in takes for params in f.candidates(self))

    def sizes(self) -> dict[str, int]:
        """Format text -> exact bytes without the header, for those candidates whose size these counts decide."""
        return dict(self._sizes)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {t: n for t in self.candidates() if (n := self.nbytes(t)) is not None}

    def smallest(self) -> str:
        """The exact format with the fewest bytes; dense if none is smaller. Of equal ones, the simpler."""
        sizes = self._sizes
        return min(sizes, key=sizes.__getitem__)

    def nbytes(self, text: str) -> int | None:
        """The exact bytes of the matrix in a format; None if these counts do not decide them, then convert it."""
        fmt, given = parse_spec(text)
        return fmt.bytes_of(self, fmt.resolve_params(given))


@dataclass(frozen=True, eq=False)
class StackStructure(Structure):
    """Counts of a stack of matrices, summed; sizes are those of the matrices one by one. ``shape`` is (E*M, K)."""

    matrices: tuple[Structure, ...]

    def kept_share(self, tile_rows: int) -> float:
        """The mean over the matrices."""
        return sum(s.kept_share(tile_rows) for s in self.matrices) / len(self.matrices)

    def grid(self, b: int) -> int:
        """Those of all matrices: no block reaches from one into the next."""
        return sum(s.grid(b) for s in self.matrices)

    def nbytes(self, text: str) -> int | None:
        """The exact bytes of all matrices in a format; None if the counts of one of them do not decide it."""
        sizes = [s.nbytes(text) for s in self.matrices]
        return None if None in sizes else sum(n or 0 for n in sizes)


def stacked(structures: Iterable[Structure]) -> StackStructure:
    """The structure of a stack, from those of its matrices, of which there must be one or more."""
    matrices = tuple(structures)
    first = matrices[0]
    return StackStructure(
        shape=(sum(s.shape[0] for s in matrices), first.shape[1]), dtype=first.dtype,
        nnz=sum(s.nnz for s in matrices), negative_zeros=sum(s.negative_zeros for s in matrices),
        row_lengths=np.concatenate([s.row_lengths for s in matrices]),
        bad_groups=sum(s.bad_groups for s in matrices), groups=sum(s.groups for s in matrices),
        window_max={k: max(s.window_max[k] for s in matrices) for k in first.window_max},
        blocks={b: (sum(s.blocks[b][0] for s in matrices), sum(s.blocks[b][1] for s in matrices)) for b in BLOCKS},
        vector_counts={h: (sum(s.vector_counts[h][0] for s in matrices), sum(s.vector_counts[h][1] for s in matrices))
                       for h in first.vector_counts},
        tile_columns={t: sum(s.tile_columns[t] for s in matrices) for t in first.tile_columns}, matrices=matrices,
    )  # fmt: skip


def analyse(x: Array) -> Structure:
    """The structure of a matrix [M, K] of a value type, numpy or CuPy. Memory: a few row chunks; on a device, where a
    kernel counts in one pass, a few numbers for each row."""
    x = checked_values(x, "inspect")
    if x.nbytes > _TINY or is_cupy(x):
        return _analyse(x)
    # A file may hold 100,000 matrices of a few elements, of which most have their nonzeros in the same places.
    pattern = np.ascontiguousarray(x).copy()
    pattern[nonzero_mask(x)] = 1
    formats = tuple(f.name for f in registered())  # the structure remembers the sizes in each of them
    return _of_pattern(pattern.shape, pattern.dtype, pattern.tobytes(), formats)


@lru_cache(4096)
def _of_pattern(shape: tuple[int, int], dtype: np.dtype[Any], raw: bytes, formats: tuple[str, ...]) -> Structure:
    s = _analyse(np.frombuffer(raw, dtype).reshape(shape))
    s.row_lengths.flags.writeable = False  # several callers get the same object
    return s


def _analyse(x: Array) -> Structure:
    (M, K), row = x.shape, value_type(x.dtype)
    counted = edges.take(edges.DENSE, "census", x, {}, x)
    if counted is not None:
        return _from_census(x, *counted)
    row_lengths = np.zeros(M, np.int64)
    window_max = {(m, length): 0 for m in NM_WINDOWS for length in VECTOR_LENGTHS}
    blocks, vector_counts = ({size: [0, 0] for size in sizes} for sizes in (BLOCKS, VECTOR_HEIGHTS))
    bad = stored = 0
    wide = round_up(K, _ROWS)
    step = round_up(max(1, CHUNK // max(1, wide)), max(_ROWS, *TILE_ROWS))
    tile_columns = dict.fromkeys(TILE_ROWS, 0)
    for i in range(0, M if K else 0, step):
        chunk = np.ascontiguousarray(x[i : i + step])
        mask = np.zeros((round_up(chunk.shape[0], _ROWS), wide), np.uint8)
        mask[: chunk.shape[0], :K] = nonzero_mask(chunk)
        stored += int(np.count_nonzero(bits(chunk)))
        row_lengths[i : i + step] = mask.sum(axis=1, dtype=np.int64)[: chunk.shape[0]]
        per_four = _window_sums(mask, 4)
        bad += int((per_four > 2).sum())
        for height in VECTOR_HEIGHTS:
            per_tile = _any_rows(mask, height).sum(axis=1, dtype=np.int64)
            vector_counts[height][0] += int(per_tile.sum())
            vector_counts[height][1] += int((-(-per_tile // VECTOR_STRIDE)).sum())
        for length in VECTOR_LENGTHS:
            nonempty = _any_rows(mask, length)
            sums = _window_sums(nonempty, 4)
            for m in NM_WINDOWS:
                if m > 4:
                    sums = sums[:, 0::2] + sums[:, 1::2]
                window_max[m, length] = max(window_max[m, length], int(sums.max(initial=0)))
        for rows in TILE_ROWS:
            of_tiles = np.maximum.reduceat(
                nonempty, np.arange(0, nonempty.shape[0], rows // VECTOR_LENGTHS[-1]), axis=0
            )
            tile_columns[rows] += int(np.count_nonzero(of_tiles))
        coarse, size = mask, 1
        for b in BLOCKS:
            f = b // size
            coarse = coarse.reshape(coarse.shape[0] // f, f, coarse.shape[1] // f, f).max(axis=(1, 3))
            size = b
            blocks[b][0] += int(coarse.sum(dtype=np.int64))
            blocks[b][1] += int(coarse.any(axis=1).sum())
    nnz = int(row_lengths.sum())
    return Structure(
        shape=(M, K), dtype=row.name, nnz=nnz, negative_zeros=stored - nnz, row_lengths=row_lengths,
        bad_groups=bad, groups=M * ceil_div(K, 4), window_max=window_max,
        blocks={b: (n, rows) for b, (n, rows) in blocks.items()},
        vector_counts={h: (n, groups) for h, (n, groups) in vector_counts.items()}, tile_columns=tile_columns,
    )  # fmt: skip


_KINDS = tuple((m, length) for length in VECTOR_LENGTHS for m in NM_WINDOWS)
_ORDER = tuple((m, length) for m in NM_WINDOWS for length in VECTOR_LENGTHS)


def _from_census(x: Array, row_lengths: Array, counts: Array) -> Structure:
    """The Structure for the counts of the compiled loops, which return them by position (``census_loops.BAD`` ..)."""
    bad, negative, *others = counts.tolist()
    positions = itertools.pairwise((0, 2, 4, 9, 14, 16, 28))
    vectors, groups, nonempty, block_rows, tiles, most = (others[a:b] for a, b in positions)
    window_max = dict(zip(_KINDS, most, strict=True))
    return Structure(
        shape=(x.shape[0], x.shape[1]), dtype=value_type(x.dtype).name, nnz=int(row_lengths.sum()),
        negative_zeros=negative, row_lengths=row_lengths, bad_groups=bad, groups=x.shape[0] * ceil_div(x.shape[1], 4),
        window_max={k: window_max[k] for k in _ORDER},
        blocks={b: (n, rows) for b, n, rows in zip(BLOCKS, nonempty, block_rows, strict=True)},
        vector_counts={h: (n, g) for h, n, g in zip(VECTOR_HEIGHTS, vectors, groups, strict=True)},
        tile_columns=dict(zip(TILE_ROWS, tiles, strict=True)),
    )  # fmt: skip


def count_nonzeros(x: Array) -> tuple[int, int]:
    """(values that are not zero, elements that are -0.0) of a matrix. The host uses all cores and a few chunks of
    memory."""
    counted: tuple[int, int] | None = edges.take(edges.DENSE, "counts", x, {}, x)
    if counted is not None:
        return counted
    row = value_type(x.dtype)
    flat, minus_zero = bits(x).reshape(-1), ~row.bits.type(row.zero_mask)  # 0 for int8, which has no -0
    if is_cupy(x):
        device_counts = (flat != 0).sum(), (flat == minus_zero).sum() if minus_zero else 0
        return int(device_counts[0]) - int(device_counts[1]), int(device_counts[1])  # synchronize!
    pieces = ceil_div(flat.size, CHUNK)
    counts = np.zeros((pieces, 2), np.int64)

    def count(i: int) -> None:
        part = flat[i * CHUNK : (i + 1) * CHUNK]
        counts[i] = np.count_nonzero(part != 0), np.count_nonzero(part == minus_zero) if minus_zero else 0

    threads.run(count, pieces)
    stored, negative = (int(n) for n in counts.sum(axis=0))
    return stored - negative, negative


def _any_rows(mask: Array, length: int) -> Array:
    if length == 1:
        return mask
    return mask.reshape(mask.shape[0] // length, length, mask.shape[1]).max(axis=1)


def _window_sums(mask: Array, m: int) -> Array:
    """uint8[rows, columns/m]: the number of flags that are set in each window."""
    parts = mask.reshape(mask.shape[0], mask.shape[1] // m, m)
    return parts.sum(axis=2, dtype=np.uint8)
