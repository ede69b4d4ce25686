"""Vector-wise n:m sparsity (NM-SpMM).  Spec: docs/formats/vector-nm.md.

In every window of m consecutive columns, a group of ``vector_length`` rows keeps n columns. ``data`` is
k-major: A[i, (u//n)*m + indices[u, i//L]] = data[u, i]. Packed objects also list, per tile of
``tile_rows`` x ``tile_cols``, the columns it needs (``col_info``) and each index's place there (``ranks``).

    1:4, L = 2      1 . . . | . . . 5      data    [1 1] [5 5]
                    1 . . . | . . . 5      indices [0]   [3]
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import bits, nonzero_mask
from ..arrays.library import PAD, Array, ceil_div, is_cupy, namespace, on_own_device, round_up
from ..arrays.magnitudes import largest_finite_key, magnitude_keys, magnitudes, square_scale
from ..arrays.segments import counts_of, distinct_sorted, largest_in_windows, offsets_from_counts, stable_order
from ..errors import IndexBoundsError, InvariantError, PatternError, StructureError
from .base import POS, VALUE, Format, RowChunks, array, param
from .csr import CSR
from .hooks import Condition, Counts, Pattern, Vectors
from .vector_nm_pack import pack

ROW_CHUNK = 1 << 22
"""Dense elements that the host processes at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class VectorNM(Format):
    """n of every m columns kept, the same ones for ``vector_length`` rows; optionally packed for a tile."""

    name, version, tie_rank = "vector-nm", 1, 5
    torch_layout, selective = "", True
    paper = "NM-SpMM: Accelerating Matrix Multiplication Using N:M Sparsity with GPGPU (IPDPS 2025)"

    n: int = param("int", 1, 256, doc="columns kept in a window")
    m: int = param("int", 1, 256, doc="columns of a window")
    vector_length: int = param("int", 1, 512, default=32, doc="rows L that share their columns")
    tile_rows: int = param("int", 0, 1 << 30, default=0, doc="0, or packed: rows of a tile, a multiple of L")
    tile_cols: int = param("int", 0, 256, default=0, doc="0, or packed: columns of a tile, a multiple of m")
    data: Array = array(VALUE, "W", "Mp", doc="data[u, i]: value of row i at its kept column number u, in window u//n")
    indices: Array = array(POS, "W", "Q", doc="position in the window, for rows qL .. qL+L-1; increasing in a window")
    col_info: Array = array("int16", "Tr", "Tk", "tile_cols", doc="packed: columns the tile needs, ascending, then PAD")
    ranks: Array = array(POS, "Tr", "W", "Qs", doc="packed: place in col_info of indices[u, b*Qs+s]")

    @classmethod
    def param_problems(cls, params: dict[str, Any]) -> list[str]:
        n, m, L = params["n"], params["m"], params["vector_length"]
        rows, cols = params["tile_rows"], params["tile_cols"]
        problems = []
        if n > m:
            problems.append(f"n: expected at most m = {m}, got {n}")
        if (rows == 0) != (cols == 0):
            problems.append(f"tile_rows, tile_cols: expected both 0 or both positive, got {rows} and {cols}")
        if rows % L:
            problems.append(f"tile_rows: expected a multiple of vector_length = {L}, got {rows}")
        if cols % m:
            problems.append(f"tile_cols: expected a multiple of m = {m}, got {cols}")
        return problems

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        (Mp, Kp), L, rows, cols = (
            _padded(shape, params),
            *(params[k] for k in ("vector_length", "tile_rows", "tile_cols")),
        )
        W, (Tr, Tk, Qs) = Kp // params["m"] * params["n"], (Mp // rows, Kp // cols, rows // L) if rows else (0, 0, 0)
        pos = np.dtype(np.uint8)
        return {
            "data": (dtype, (W, Mp)),
            "indices": (pos, (W, Mp // L)),
            "col_info": (np.dtype(np.int16), (Tr, Tk, cols)),
            "ranks": (pos, (Tr, W, Qs)),
        }

    @classmethod
    def row_layout(cls, params: dict[str, Any]) -> RowChunks:
        return RowChunks(params["tile_rows"] or params["vector_length"], second_axis=("data", "indices"))

    @classmethod
    def pattern(cls, params: dict[str, Any]) -> Pattern:
        return Vectors(params["n"], params["m"], params["vector_length"])

    @classmethod
    def covered(cls, a: CSR, params: dict[str, Any], conditions: tuple[Condition, ...]) -> Array:
        """The n vectors of largest l2 norm in every window of m columns, the lower column first among equals."""
        K, L, m = a.shape[1], params["vector_length"], params["m"]
        row = a.rows()
        vectors, which = distinct_sorted(row // L * K + a.indices, ceil_div(a.shape[0], L) * K)
        window = vectors // max(1, K) * ceil_div(K, m) + vectors % max(1, K) // m
        norms = _norms(a.data, row % L, which, vectors.size, L)
        return largest_in_windows(magnitude_keys(norms), window, params["n"])[which]

    @classmethod
    def fits(cls, counts: Counts, params: dict[str, Any]) -> bool:
        most = counts.window_max.get((params["m"], params["vector_length"]))
        return most is not None and most <= params["n"]

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        kinds = ((most, m, length) for (m, length), most in counts.window_max.items() if 0 < most < m)
        return tuple({"n": n, "m": m, "vector_length": length} for n, m, length in kinds)

    @classmethod
    def remark(cls, counts: Counts, params: dict[str, Any]) -> str:
        if not params:
            full = "in every pattern some window of columns is full"
            return full if counts.nnz else "there are no nonzeros to have a pattern"
        length, of = params["vector_length"], f"of {params['m']} columns"
        rows = "" if length == 1 else f" in the same {length} rows"
        return f"at most {counts.window_max[params['m'], length]} {of} are needed{rows}"

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return (
            {"n": 2, "m": 4, "vector_length": 8},
            {"n": 2, "m": 4, "vector_length": 1},
            {"n": 2, "m": 4, "vector_length": 8, "tile_rows": 16, "tile_cols": 8},
            {"n": 7, "m": 7, "vector_length": 3},
            {"n": 256, "m": 256, "vector_length": 32},
        )

    @property
    def packed(self) -> bool:
        """Whether col_info and ranks are there."""
        return self.tile_rows > 0

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(Mp, Kp)."""
        return _padded(self.shape, self.params())

    @property
    def windows(self) -> int:
        """Windows of m columns in a padded row."""
        return self.padded_shape[1] // self.m

    @property
    def row_groups(self) -> int:
        """Q: groups of vector_length rows."""
        return self.padded_shape[0] // self.vector_length

    def dims(self) -> dict[str, int]:
        (Mp, Kp), L = self.padded_shape, self.vector_length
        sizes = {"W": Kp // self.m * self.n, "Mp": Mp, "Q": Mp // L, "tile_cols": self.tile_cols}
        if not self.packed:
            return sizes | {"Tr": 0, "Tk": 0, "Qs": 0}
        return sizes | {"Tr": Mp // self.tile_rows, "Tk": Kp // self.tile_cols, "Qs": self.tile_rows // L}

    @property
    def kept_share(self) -> float:
        """Share of the columns of a tile that it needs; 1.0 if not packed. Packing pays only if this is small."""
        size = int(self.col_info.size)
        return int((self.col_info != PAD).sum()) / size if size else 1.0  # synchronize!

    @on_own_device
    def columns(self) -> Array:
        """int64[W, Q]: the column of every kept vector; >= K where a filler points past the last column."""
        xp = namespace(self.data)
        base = xp.arange(self.indices.shape[0], dtype=np.int64) // self.n * self.m
        return base[:, None] + self.indices

    @on_own_device
    def repacked(self, tile_rows: int, tile_cols: int) -> VectorNM:
        """The same matrix packed for another tile (0, 0: plain)."""
        params = self.params() | {"tile_rows": tile_rows, "tile_cols": tile_cols}
        if params == self.params():
            return self
        return VectorNM.from_csr(self.to_csr(), **params)

    # ---------------------------------------------------------------- checking

    def check_memory(self) -> None:
        (M, K), n, m = self.shape, self.n, self.m
        xp = namespace(self.data)
        scans.within(self, "indices", m, error=PatternError)
        scans.zero_in(self, "data", xp.ascontiguousarray(self.data[:, M:]), f"in rows >= {M}",
                      lambda i: (i[0], i[1] + M))  # fmt: skip
        first = K // m * n  # kept columns from here on may decode past the last column
        if K % m or first < self.data.shape[0]:
            over = (self.columns()[first:] >= K)[:, _group_of_row(xp, self)]
            tail = nonzero_mask(self.data[first:]) & over
            scans.require_none(self, tail, "data", f"0 in columns >= {K}", IndexBoundsError, first)
        if self.packed:
            scans.within(self, "col_info", self.tile_cols, pad=True)
            live = xp.cumprod((self.col_info != PAD).astype(np.int16), axis=2).sum(axis=2)  # before the first PAD
            limit = xp.repeat(live, self.tile_cols // m * n, axis=1)[:, :, None]
            scans.require_none(self, self.ranks >= limit, "ranks", "a place of a live col_info entry", InvariantError)

    def check_canonical(self) -> None:
        xp, n = namespace(self.data), self.n
        rank = xp.arange(n).astype(np.uint8)[:, None]
        for s in scans.chunks(self.windows, self.data, max(1, scans.CHUNK // max(1, n * self.data.shape[1]))):
            rows = slice(s.start * n, s.stop * n)
            stepped = self.indices[rows].reshape(s.stop - s.start, n, self.row_groups)
            bad = xp.zeros(stepped.shape, bool)
            bad[:, 1:] = stepped[:, 1:] <= stepped[:, :-1]
            what = "increasing in its window"
            scans.require_none(self, bad.reshape(self.indices[rows].shape), "indices", what, PatternError, rows.start)
            nonempty = _any_in_vectors(nonzero_mask(self.data[rows]), self.vector_length).reshape(stepped.shape)
            # Positions ascend, so an entry equals its rank exactly if every lower position is used, too.
            bad = ~nonempty & (stepped != rank)
            what = "the lowest free position, as the values there are zero"
            scans.require_none(self, bad.reshape(self.indices[rows].shape), "indices", what, PatternError, rows.start)
        scans.negative_zero_free(self, "data")
        if self.packed:
            col_info, ranks = pack(self.indices, self.params(), self.padded_shape)
            scans.same_as(self, "col_info", col_info, "the columns its tile uses, ascending, then PAD")
            scans.same_as(self, "ranks", ranks, "the place of its column in col_info")

    # ---------------------------------------------------------------- converting

    @classmethod
    def _from_dense(cls, x: Array, **params: Any) -> Self:
        xp, (M, K) = namespace(x), x.shape
        L, n, m = params["vector_length"], params["n"], params["m"]
        Mp, Kp = _padded(x.shape, params)
        step = max(1, ROW_CHUNK // max(1, L * Kp))

        used = xp.zeros((Mp // L, Kp), bool)
        for q in range(0, ceil_div(M, L), step):
            chunk = _rows_in_groups(x, q * L, (q + step) * L, L, K)
            used[q : q + step, :K][: chunk.shape[0]] = nonzero_mask(chunk).any(axis=1)
        used = used.reshape(Mp // L, Kp // m, m)
        _require_fit(used, n)
        indices = _positions(_select(used, n), n)

        columns = indices.T.astype(np.int64) + xp.arange(indices.shape[0], dtype=np.int64) // n * m  # [Q, W]
        data = xp.zeros((indices.shape[0], Mp), bits(x).dtype)
        for q in range(0, ceil_div(M, L) if K else 0, step):
            chunk = bits(_rows_in_groups(x, q * L, (q + step) * L, L, K))
            at = columns[q : q + chunk.shape[0]]
            inside = at < K
            values = xp.take_along_axis(chunk, xp.where(inside, at, 0)[:, None, :], axis=2)
            values[xp.broadcast_to(~inside[:, None, :], values.shape)] = 0
            data[:, q * L : q * L + chunk.shape[0] * L] = values.transpose(2, 0, 1).reshape(indices.shape[0], -1)
        data[~nonzero_mask(data.view(x.dtype))] = 0  # a kept -0.0 becomes +0
        return cls.assemble((M, K), params, data.view(x.dtype), indices)

    def accepted(self, refused: tuple[int, int, int]) -> Self:
        """This matrix, whose arrays an edge has filled; StructureError if windows were refused.

        refused: (how many windows have more than n nonempty vectors, the first of them as row group * windows + window,
        its nonempty vectors).
        """
        self.refuse(self.params(), self.windows, refused)
        return self

    @classmethod
    def refuse(cls, params: dict[str, Any], windows: int, refused: tuple[int, int, int]) -> None:
        """StructureError if windows were refused, of ``windows`` in a row; refused: as for ``accepted``."""
        count, first, vectors = refused
        if count:
            _refuse(count, divmod(first, windows), vectors, params["n"], params["m"])

    @classmethod
    def empty_arrays(cls, x: Array, params: dict[str, Any]) -> tuple[Array, Array]:
        """(indices, data) for x [M, K]; zeros on the host."""
        xp, (Mp, Kp) = namespace(x), _padded(x.shape, params)
        W, new = Kp // params["m"] * params["n"], xp.empty if is_cupy(x) else xp.zeros
        return new((W, Mp // params["vector_length"]), np.uint8), new((W, Mp), x.dtype)

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        a = a.without_zeros()
        xp, L, n, m = namespace(a.data), params["vector_length"], params["n"], params["m"]
        Mp, Kp = _padded(a.shape, params)
        row, col = a.rows(), a.indices.astype(np.int64)
        used = xp.zeros((Mp // L, Kp), bool)
        used[row // L, col] = True
        used = used.reshape(Mp // L, Kp // m, m)
        _require_fit(used, n)
        selected = _select(used, n)
        place = xp.cumsum(selected, axis=2, dtype=np.int16) - 1
        u = col // m * n + place.reshape(Mp // L, Kp)[row // L, col]
        data = xp.zeros((Kp // m * n, Mp), a.dtype)
        bits(data)[u, row] = bits(a.data)
        return cls.assemble(a.shape, params, data, _positions(selected, n))

    @classmethod
    def assemble(cls, shape: tuple[int, int], params: dict[str, Any], data: Array, indices: Array) -> Self:
        """The matrix of valid positions and values, packed if ``params`` say so."""
        col_info, ranks = pack(indices, params, _padded(shape, params))
        return cls.unchecked(shape=shape, **params, data=data, indices=indices, col_info=col_info, ranks=ranks)

    def _to_csr(self) -> CSR:
        xp = namespace(self.data)
        u, row = xp.nonzero(nonzero_mask(self.data))  # synchronize!
        cols = u // self.n * self.m + self.indices[u, row // self.vector_length]
        return CSR.from_coordinates(self.shape, row, cols, bits(self.data)[u, row].view(self.dtype))

    def _to_dense(self) -> Array:
        out = self.empty_dense()
        xp = namespace(self.data)
        step = max(1, ROW_CHUNK // max(1, self.data.shape[1]))
        for s in scans.chunks(self.data.shape[0], self.data, step):
            nonzero = nonzero_mask(self.data[s])
            u, row = xp.nonzero(nonzero)  # synchronize!
            cols = (u + s.start) // self.n * self.m + self.indices[u + s.start, row // self.vector_length]
            bits(out)[row, cols] = bits(self.data)[s][nonzero]
        return out


def _norms(values: Array, place: Array, which: Array, vectors: int, L: int) -> Array:
    """float64[vectors]: the sum of squares of each vector, its rows added in order as ``preprocess.masks`` adds them.

    place: row of each value in its vector; which: its vector.
    """
    norms = namespace(values).zeros(vectors, np.float64)
    scale = square_scale(values.dtype, largest_finite_key(values) if values.dtype == np.float64 else 0)
    order = stable_order(place, L)
    starts = offsets_from_counts(counts_of(place, L)).tolist()  # synchronize!
    with np.errstate(all="ignore"):  # signalling NaNs, products of infinities
        terms = magnitudes(values) * scale
        terms *= terms
        for first, last in itertools.pairwise(starts):
            items = order[first:last]  # at most one of each vector
            norms[which[items]] += terms[items]
    return norms


def _padded(shape: tuple[int, int], params: dict[str, Any]) -> tuple[int, int]:
    rows = params["tile_rows"] or params["vector_length"]
    return round_up(shape[0], rows), round_up(shape[1], params["tile_cols"] or params["m"])


def _rows_in_groups(x: Array, start: int, stop: int, L: int, K: int) -> Array:
    """Rows start .. stop of x as [groups, L, K], the last group filled up with zeros."""
    xp, part = namespace(x), x[start:stop]
    if part.shape[0] % L:
        full = xp.zeros((round_up(part.shape[0], L), K), x.dtype)
        bits(full)[: part.shape[0]] = bits(part)
        part = full
    return part.reshape(part.shape[0] // L, L, K)


def _any_in_vectors(mask: Array, length: int) -> Array:
    """bool[.., n/length]: whether any of ``length`` neighbours in the last axis is True."""
    together = math.gcd(length, 8)  # bools compared as one integer
    some = mask.view(np.dtype(f"uint{8 * together}")) != 0
    return (
        some
        if length == together
        else some.reshape(*mask.shape[:-1], mask.shape[-1] // length, length // together).any(axis=-1)
    )


def _group_of_row(xp: Any, f: VectorNM) -> Array:
    return xp.arange(f.data.shape[1], dtype=np.int64) // f.vector_length


def _require_fit(used: Array, n: int) -> None:
    """StructureError unless every window of ``used`` bool[Q, windows, m] has at most n True."""
    counts = used.sum(axis=2, dtype=np.int16)
    offenders = scans.first_true(counts > n)
    if offenders is None:
        return
    first = scans.place(offenders[0], counts.shape)
    _refuse(offenders[1], first, int(counts[first]), n, used.shape[2])


def _refuse(count: int, first: tuple[int, int], vectors: int, n: int, m: int) -> None:
    q, w = first
    raise StructureError(
        f"vector-nm: {count} window(s) of {m} columns hold more than {n} nonempty vectors; first: row "
        f"group {q}, window {w} holds {vectors}, limit {n}. To drop the smallest vectors, apply "
        "preprocess.masks.magnitude_vector_nm, or convert --prune magnitude",
        unit="window", count=count, first=first, found=vectors, limit=n, hint="preprocess.masks.magnitude_vector_nm",
    )  # fmt: skip


def _select(used: Array, n: int) -> Array:
    """bool[Q, windows, m] with exactly n True in every window: the used ones and the lowest free ones."""
    xp = namespace(used)
    missing = n - used.sum(axis=2, dtype=np.int16)
    free_rank = xp.cumsum(~used, axis=2, dtype=np.int16)
    return used | (free_rank <= missing[:, :, None])


def _positions(selected: Array, n: int) -> Array:
    """uint8[windows*n, Q]: the selected positions of every window, ascending."""
    xp, (Q, windows, _) = namespace(selected), selected.shape
    at = xp.nonzero(selected)[2].astype(np.uint8)  # synchronize!
    return xp.ascontiguousarray(at.reshape(Q, windows * n).T)
