"""Strided row-vector BCRS (SR-BCRS).  Spec: docs/formats/sr-bcrs.md.

Columns of t x 1 vectors, in groups of g, per tile of t rows (Magicube, Li et al., SC 2022; SparseTIR).

    vector_length 2, stride 4        indices [1 2 3 4]  [6 -1 -1 -1]
    rows 4,5: . 3 4 5 6 . 7          data    [3 4 5 6 / 0 0 0 0]  [7 0 0 0 / 0 0 0 0]
              . . . . . . .
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import bits, nonzero_mask, value_type
from ..arrays.library import PAD, Array, ceil_div, index_dtype, namespace
from ..arrays.segments import counts_of, distinct_sorted, offsets_from_counts, pointer, rank_in_row, rows_of
from ..errors import InvariantError, OrderError, PatternError
from ..limits import check_bytes, product
from .base import INDEX, VALUE, Format, RowChunks, array, param
from .csr import CSR
from .hooks import VECTOR_ROWS, VECTOR_STRIDE, Condition, Counts, Measure, dense_cells, percent

_LITTLE = 0.1
"""Share of padding up to which it is not worth a word."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class SRBCRS(Format):
    """Row tiles of ``vector_length`` rows hold the columns that have a nonzero there, padded to ``stride``."""

    name, version = "sr-bcrs", 1
    measures = (Measure("density", True, "share of the vector_length places of its vector that hold a value"),)
    paper = "Magicube: Efficient Quantized Sparse Matrix Operations on Tensor Cores (SC 2022)"

    vector_length: int = param("int", 1, 256, default=8, doc="rows t of a vector, the height of a tile")
    stride: int = param("int", 1, 256, default=16, doc="vectors g of a group, the padding multiple of a tile")
    indptr: Array = array(INDEX, "Mv+1", bound="G", doc="first group of each row tile")
    indices: Array = array(INDEX, "G", "g", bound="K-1", doc="column of each vector; PAD after the last of a tile")
    data: Array = array(VALUE, "G", "t", "g", doc="element (r, s): row r of the tile, vector s")

    @property
    def tiles(self) -> int:
        """Mv: row tiles."""
        return ceil_div(self.shape[0], self.vector_length)

    @property
    def groups(self) -> int:
        """G: stored groups."""
        return self.array_layout()["data"][1][0]

    def dims(self) -> dict[str, int]:
        return {"Mv+1": self.tiles + 1, "K-1": self.shape[1] - 1, "t": self.vector_length, "g": self.stride}

    @classmethod
    def row_chunks(cls, params: dict[str, Any]) -> RowChunks:
        return RowChunks(params["vector_length"], pointers=("indptr",))

    @classmethod
    def bytes_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        t, g = params["vector_length"], params["stride"]
        if g != VECTOR_STRIDE or t not in counts.vector_counts:
            return None
        _, G = counts.vector_counts[t]
        index, value = index_dtype(counts.shape[1] - 1).itemsize, value_type(counts.dtype).numpy.itemsize
        pointers = index_dtype(G).itemsize * (ceil_div(counts.shape[0], t) + 1)
        return int(pointers + G * g * (index + value * t))

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        return ({"vector_length": VECTOR_ROWS, "stride": VECTOR_STRIDE},)

    @classmethod
    def usual_conditions(cls, params: dict[str, Any]) -> tuple[Condition, ...]:
        return (Condition("density", ">=", 0.5),)

    @classmethod
    def covered(cls, a: CSR, params: dict[str, Any], conditions: tuple[Condition, ...]) -> Array:
        return dense_cells(a, (params["vector_length"], 1), conditions)

    @classmethod
    def alternatives(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        others = (h for h in counts.vector_counts if h != VECTOR_ROWS)
        return tuple({"vector_length": h, "stride": VECTOR_STRIDE} for h in others)

    @classmethod
    def stored_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        t, g = params["vector_length"], params["stride"]
        if g != VECTOR_STRIDE or t not in counts.vector_counts:
            return None
        return int(counts.vector_counts[t][1] * g * t)

    @classmethod
    def remark(cls, counts: Counts, params: dict[str, Any]) -> str:
        stored = cls.stored_of(counts, params) if params else None
        if not stored:
            return ""
        t, padding = params["vector_length"], 1 - counts.nnz / stored
        text = f"gather reuse {counts.gather_reuse(t):.1f} at height {t}"
        return text if padding < _LITTLE else f"{text}: {percent(padding)} of the stored values would be padding"

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return (
            {"vector_length": 8, "stride": 16},
            {"vector_length": 3, "stride": 5},
            {"vector_length": 1, "stride": 1},
        )

    @property
    def vectors(self) -> int:
        """Live vectors: a scan."""
        return int((self.indices != PAD).sum())  # synchronize!

    def group_tiles(self) -> Array:
        """int64[G]: row tile of each group."""
        return rows_of(self.indptr, self.groups)

    def check_memory(self) -> None:
        (M, K), t = self.shape, self.vector_length
        scans.pointer(self, "indptr", self.groups)
        scans.within(self, "indices", K, pad=True)
        for s in scans.chunks(self.groups, self.data, max(1, scans.CHUNK // (t * self.stride))):
            under = nonzero_mask(self.data[s]) & (self.indices[s] == PAD)[:, None, :]
            scans.require_none(self, under, "data", "0 under PAD", InvariantError, s.start)
        if M % t:
            start = int(self.indptr[self.tiles - 1])
            part = self.data[start:, M % t :, :]
            scans.zero_in(self, "data", part, f"in rows >= {M}", lambda i: (i[0] + start, i[1] + M % t, i[2]))

    def check_canonical(self) -> None:
        xp, g = namespace(self.data), self.stride
        starts = xp.zeros(self.groups + 1, bool)  # of tiles; the end, which the pointer has too, counts as one
        starts[self.indptr] = True
        flat = self.indices.reshape(-1)
        for s in scans.chunks(self.groups, self.data, max(1, scans.CHUNK // g)):
            pad = self.indices[s] == PAD
            scans.require_none(
                self, pad[:, :1], "indices", "a live column first in each group", InvariantError, s.start
            )
            after = xp.zeros(pad.shape, bool)
            after[:, 1:] = pad[:, :-1] & ~pad[:, 1:]
            scans.require_none(self, after, "indices", "PAD, as in the slot before", InvariantError, s.start)
            inner = pad & ~starts[s.start + 1 : s.stop + 1, None]
            scans.require_none(self, inner, "indices", "PAD in a tile's last group only", InvariantError, s.start)
            drop = xp.zeros(pad.size, bool)
            lo = max(1, s.start * g)
            part, before = flat[lo : s.stop * g], flat[lo - 1 : s.stop * g - 1]
            drop[lo - s.start * g :] = (part <= before) & (part != PAD)
            drop = drop.reshape(pad.shape)
            drop[:, 0] &= ~starts[s]
            scans.require_none(self, drop, "indices", "increasing columns in a tile", OrderError, s.start)
        for s in scans.chunks(self.groups, self.data, max(1, scans.CHUNK // (self.vector_length * g))):
            bare = ~nonzero_mask(self.data[s]).any(axis=1) & (self.indices[s] != PAD)
            scans.require_none(self, bare, "indices", "a vector with a nonzero", PatternError, s.start)
        scans.negative_zero_free(self, "data")

    @classmethod
    def check_groups(cls, n_groups: int, nbytes: int, given: int) -> None:
        """LimitError if ``nbytes``, those of the values, exceed the memory budget. given: bytes of the CSR."""
        check_bytes(nbytes, f"{cls.name}: {n_groups:,} groups", given)

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        a = a.without_zeros()
        xp, (M, K) = namespace(a.data), a.shape
        t, g = params["vector_length"], params["stride"]
        tiles = ceil_div(M, t)
        row, col = a.rows(), a.indices.astype(np.int64)
        vectors, which = distinct_sorted((row // t) * K + col, tiles * K)
        tile = vectors // max(1, K)
        counts = counts_of(tile, tiles)
        groups = -(-counts // g)
        first_group = offsets_from_counts(groups)
        n_groups = int(first_group[-1])  # synchronize!
        cls.check_groups(n_groups, product(n_groups, t, g, a.dtype.itemsize), a.nbytes)
        slot = first_group[tile] * g + rank_in_row(offsets_from_counts(counts), tile)
        indices = xp.full(n_groups * g, PAD, index_dtype(K - 1))
        indices[slot] = vectors % max(1, K)
        data = xp.zeros((n_groups, t, g), a.dtype)
        at = slot[which]
        bits(data)[at // g, row % t, at % g] = bits(a.data)
        indptr = pointer(groups, n_groups)
        return cls.trusted(shape=a.shape, **params, indptr=indptr, indices=indices.reshape(n_groups, g), data=data)

    def _to_csr(self) -> CSR:
        xp = namespace(self.data)
        group, r, s = xp.nonzero(nonzero_mask(self.data))  # synchronize!
        rows = self.group_tiles()[group] * self.vector_length + r
        cols = self.indices[group, s].astype(np.int64)
        return CSR.from_coordinates(self.shape, rows, cols, bits(self.data)[group, r, s].view(self.dtype))

    def _to_dense(self) -> Array:
        out, xp = self.empty_dense(), namespace(self.data)
        group, r, s = xp.nonzero(nonzero_mask(self.data))  # synchronize!
        rows = self.group_tiles()[group] * self.vector_length + r
        bits(out)[rows, self.indices[group, s]] = bits(self.data)[group, r, s]
        return out
