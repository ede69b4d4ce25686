"""ELL buckets: (column part, row) pairs grouped by width, ELL inside a bucket.  Spec: docs/formats/ell-buckets.md.

SparseTIR's hyb(c, k) (Ye et al., ASPLOS 2023). Columns are cut into ``column_parts``; the items of a row in
a part go to the bucket of the smallest power of two that holds them, and are cut into chunks of
``max_width`` when none does. Buckets lie end to end in flat arrays; the tables say how many ELL rows each has.

    row 4: 3 4 5 6 . 7    column_parts 1, max_width 4      row_ids [0 6 4 4]
    (5 items: split)      rows_per_bucket  (0, 2, 2)       indices [0 3 | 1 6 | 1 2 3 4 | 6 -1 -1 -1]
                          split_per_bucket (0, 0, 2)       data    [1 2 | 8 9 | 3 4 5 6 | 7  0  0  0]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import bits, nonzero_mask, value_type
from ..arrays.library import PAD, Array, ceil_div, current_device, index_dtype, namespace
from ..arrays.segments import counts_of, distinct_sorted, offsets_from_counts, pointer, rank_in_row, rows_of
from ..errors import IndexBoundsError, InvariantError, UsageError
from .base import AUTO, INDEX, VALUE, Format, array, param, table
from .csr import CSR
from .declare import OMITTED
from .hooks import ROW_LENGTH, Condition, Counts

MAX_WIDTH = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class ELLBuckets(Format):
    """Rows grouped by length into ELL blocks of a few widths; stored zeros are kept with their bits.

    ``widths`` is the tuple of the widths of a part: 1, 2, 4, .., ``max_width``, or what the parameter says.
    ``widths=(w,)`` is plain ELL: one width, and longer rows are split. Files of matrices with other widths than
    1, 2, 4, .. have version 2 of the format, which releases up to 0.2.0 refuse.
    """

    name, version = "ell-buckets", 1
    keeps_stored_zeros, selective = True, True
    paper = "SparseTIR: Composable Abstractions for Sparse Compilation in Deep Learning (ASPLOS 2023), hyb(c, k)"

    column_parts: int = param("int", 1, 1024, default=1, doc="parts of K, each with its own buckets")
    max_width: int = param("int", 1, MAX_WIDTH, default=AUTO, doc="widest bucket; a power of two without widths")
    widths: tuple[int, ...] = param(
        "ints",
        1,
        MAX_WIDTH,
        default=OMITTED,
        since=2,
        doc="widths of the buckets of a part; else 1, 2, 4, .., max_width",
    )
    rows_per_bucket: tuple[int, ...] = table("buckets", "ELL rows in each bucket")
    split_per_bucket: tuple[int, ...] = table("buckets", "how many of them, at its end, belong to split rows")
    row_ids: Array = array(INDEX, "R", bound="M-1", doc="row of each ELL row; direct rows, then split rows")
    indices: Array = array(INDEX, "S", bound="K-1", doc="global column; PAD after the last item of an ELL row")
    data: Array = array(VALUE, "S", doc="value, +0 at PAD")
    source: Array = array(INDEX, "S", bound="nnz-1", doc="position of the item in the CSR it came from, PAD at PAD")

    def __post_init__(self) -> None:
        given = self.resolve_params({d.name: getattr(self, d.name) for d in self.declared_params()})
        if "max_width" not in given:
            raise UsageError(f"{self.name}: expected max_width or widths, got neither; from_csr finds a max_width")
        object.__setattr__(self, "max_width", given["max_width"])
        object.__setattr__(self, "widths", widths_of(given))
        Format.__post_init__(self)

    def params(self) -> dict[str, Any]:
        given = Format.params(self)  # super() is lost when slots=True remakes the class
        return {key: value for key, value in given.items() if key != "widths" or value != widths_up_to(self.max_width)}

    @classmethod
    def param_problems(cls, params: dict[str, Any]) -> list[str]:
        widest, widths = params.get("max_width"), params.get("widths")
        if widths and widest not in (None, widths[-1]):
            return [f"max_width: expected {widths[-1]}, the last of widths, got {widest}; leave one of them out"]
        if not widths and widest and widest & (widest - 1):
            return [f"max_width: expected a power of two, got {widest}; widths={widest} has this width alone"]
        return []

    @classmethod
    def auto_params(cls, a: CSR, params: dict[str, Any]) -> dict[str, Any]:
        """max_width: the last of widths, or else the smallest power of two w with w * M >= nnz."""
        return {"max_width": params["widths"][-1] if "widths" in params else mean_width(a.nnz, a.shape[0])}

    @classmethod
    def normal_params(cls, params: dict[str, Any]) -> dict[str, Any]:
        """max_width follows from widths; widths of 1, 2, 4, .. follow from max_width and are left out."""
        widths = params.get("widths")
        if not widths:
            return params
        with_width = params | {"max_width": widths[-1]}
        if widths == widths_up_to(widths[-1]):
            del with_width["widths"]
        return with_width

    @classmethod
    def changed_params(cls, params: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """A new max_width replaces given widths, and the reverse."""
        decided = {"max_width", "widths"} if {"max_width", "widths"} & given.keys() else set()
        return {key: value for key, value in params.items() if key not in decided} | given

    @classmethod
    def bytes_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        if params["column_parts"] != 1:
            return None
        M, K = counts.shape
        rows, slots = _counted(counts, widths_of({"max_width": mean_width(counts.nnz, M)} | params))
        index = index_dtype(K - 1).itemsize + index_dtype(counts.nnz - 1).itemsize
        return index_dtype(M - 1).itemsize * rows + (index + value_type(counts.dtype).numpy.itemsize) * slots

    @classmethod
    def usual_conditions(cls, params: dict[str, Any]) -> tuple[Condition, ...]:
        return (Condition(ROW_LENGTH.name, "<=", params["max_width"]),) if "max_width" in params else ()

    @classmethod
    def alternatives(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        """A widest bucket of a quarter and of four times the default width; never wider than the longest row needs.

        Parts of K are not among them: no kernel expects another time for them.
        """
        usual = mean_width(counts.nnz, counts.shape[0])
        most = 1 << max(0, counts.longest_row - 1).bit_length()
        widths = {usual // 4, min(4 * usual, most, MAX_WIDTH)} - {0, usual}
        return tuple({"max_width": w} for w in sorted(widths)) if counts.nnz else ()

    @classmethod
    def params_of(cls, counts: Counts, given: dict[str, Any]) -> dict[str, Any] | None:
        usual = {} if given.get("widths") else {"max_width": mean_width(counts.nnz, counts.shape[0])}
        return cls.resolve_params(usual | given)

    @classmethod
    def stored_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        return _counted(counts, widths_of(params))[1] if params["column_parts"] == 1 else None

    @classmethod
    def remark(cls, counts: Counts, params: dict[str, Any]) -> str:
        if not counts.nnz:
            return ""
        return f"rows have {counts.mean_row:.1f} nonzeros on average, the longest {counts.longest_row}"

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        odd: tuple[dict[str, Any], ...] = ({"widths": (3, 5, 17)}, {"column_parts": 2, "widths": (6,)})
        return {}, {"column_parts": 3, "max_width": 4}, {"column_parts": 1, "max_width": 1}, *odd

    @property
    def bucket_widths(self) -> tuple[int, ...]:
        """Width of every bucket, parts outermost."""
        return self.widths * self.column_parts

    @property
    def part_size(self) -> int:
        """Columns in a part: column j belongs to part j // part_size."""
        return max(1, ceil_div(self.shape[1], self.column_parts))

    def dims(self) -> dict[str, int]:
        slots = sum(r * w for r, w in zip(self.rows_per_bucket, self.bucket_widths, strict=False))
        sizes = {"buckets": len(self.bucket_widths), "M-1": self.shape[0] - 1, "K-1": self.shape[1] - 1}
        sizes |= {"R": sum(self.rows_per_bucket), "S": slots}
        # nnz is only known by counting live slots; up to 2^31 slots it cannot need int64.
        return sizes | ({"nnz-1": slots} if slots < 2**31 else {})

    def layout_problems(self) -> list[tuple[str, str]]:
        problems = Format.layout_problems(self)  # super() is lost when slots=True remakes the class
        for b, (rows, split) in enumerate(zip(self.rows_per_bucket, self.split_per_bucket, strict=False)):
            if split > rows:
                text = f"split_per_bucket[{b}]: expected at most rows_per_bucket[{b}] = {rows}, got {split}"
                problems.append(("tables.split_per_bucket", text))
        return problems

    @property
    def stored_zeros(self) -> int:
        """Items whose value is zero: a scan."""
        with current_device(self.data):
            return int(((self.source != PAD) & ~nonzero_mask(self.data)).sum())  # synchronize!

    # ---------------------------------------------------------------- places of slots and ELL rows

    def row_widths(self) -> Array:
        """int64[R]: width of each ELL row."""
        xp = namespace(self.data)
        return xp.repeat(xp.asarray(self.bucket_widths, dtype=np.int64), list(self.rows_per_bucket))

    def is_split(self) -> Array:
        """bool[R]: the ELL row belongs to a split row, so its result must be added, not stored."""
        xp = namespace(self.data)
        counts = [n for r, s in zip(self.rows_per_bucket, self.split_per_bucket, strict=True) for n in (r - s, s)]
        return xp.repeat(xp.asarray([False, True] * len(self.rows_per_bucket)), counts)

    def _live_rows(self) -> tuple[Array, Array]:
        """(positions of live slots int64[nnz], row of each)."""
        xp = namespace(self.data)
        live = xp.flatnonzero(self.source != PAD)  # synchronize!
        ell_row = rows_of(offsets_from_counts(self.row_widths()), self.data.size)
        return live, self.row_ids[ell_row[live]].astype(np.int64)

    # ---------------------------------------------------------------- checking

    def check_memory(self) -> None:
        M, K = self.shape
        xp = namespace(self.data)
        scans.within(self, "row_ids", M)
        scans.within(self, "indices", K, pad=True)
        paired = (self.indices == PAD) != (self.source == PAD)
        scans.require_none(self, paired, "source", "PAD exactly where indices is PAD", IndexBoundsError)
        live = self.source[self.source != PAD]
        scans.within(self, "source", live.size, pad=True)
        twice = xp.zeros(self.source.shape, bool)
        twice[self.source != PAD] = counts_of(live, live.size)[live] != 1
        scans.require_none(self, twice, "source", "each CSR position exactly once", InvariantError)
        _, place = distinct_sorted(self.row_ids, M)
        owned = counts_of(place, place.size)[place]
        bad = ~self.is_split() & (owned != 1)
        scans.require_none(self, bad, "row_ids", "a row assigned once, as its ELL row is direct", InvariantError)

    def check_canonical(self) -> None:
        rows, compact = self._compact()
        owned = counts_of(compact.row_ids, rows.size)[compact.row_ids]
        bad = self.is_split() & (owned < 2)
        scans.require_none(self, bad, "row_ids", "a row with several ELL rows, as this one is split", InvariantError)
        # All remaining rules together say that this object is what from_csr builds from its items. So it is rebuilt and
        # compared.
        a = compact.to_hub()
        scans.increasing_in_segments(a, "indptr", "indices")
        rebuilt = type(self).from_hub(a, self.params())
        if rebuilt.tables() != self.tables():
            for key, got in self.tables().items():
                wanted = rebuilt.tables()[key]
                if got != wanted:
                    b = next(i for i, (x, y) in enumerate(zip(got, wanted, strict=True)) if x != y)
                    scans.fail(self, InvariantError, f"tables.{key}", b, got[b], f"{wanted[b]} for the rows it holds")
        row_ids = rows[rebuilt.row_ids].astype(self.row_ids.dtype)
        for key, wanted in (rebuilt.arrays() | {"row_ids": row_ids}).items():
            scans.same_as(self, key, wanted, "what from_csr places here")

    def _compact(self) -> tuple[Array, Self]:
        """(the rows that occur, ascending; this object with only these rows). So the cost of a check depends on what is
        stored, and not on M."""
        rows, place = distinct_sorted(self.row_ids, self.shape[0])
        fields = {**self.params(), **self.tables(), **self.arrays()}
        fields["row_ids"] = place.astype(index_dtype(rows.size - 1))
        return rows, type(self)(shape=(rows.size, self.shape[1]), **fields)

    # ---------------------------------------------------------------- converting

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        xp, (M, K) = namespace(a.data), a.shape
        parts = params["column_parts"]
        part_size = max(1, ceil_div(K, parts))
        counts = counts_of(a.rows() * parts + a.indices.astype(np.int64) // part_size, M * parts)
        layout = Layout.of(counts.reshape(M, parts), widths_of(params))
        out = cls.without_items(a.shape, a.nnz, a.dtype, layout, params)

        live_offsets = offsets_from_counts(layout.live)
        owner = rows_of(live_offsets, a.nnz)
        rank = rank_in_row(live_offsets, owner)
        slot, item = layout.slots[owner] + rank, layout.first[owner] + rank
        out.indices[...], out.source[...], out.data[...] = PAD, PAD, xp.zeros((), a.dtype)
        out.indices[slot], out.source[slot] = a.indices[item], item
        bits(out.data)[slot] = bits(a.data)[item]
        return out

    @classmethod
    def without_items(
        cls, shape: tuple[int, int], nnz: int, dtype: np.dtype[Any], layout: Layout, params: dict[str, Any]
    ) -> Self:
        """The object with its row numbers and tables. The caller must fill every slot of indices, data and source."""
        xp, (M, K), n_slots = namespace(layout.row), shape, int(layout.slots[-1])  # synchronize!
        return cls.trusted(
            shape=shape,
            **params,
            rows_per_bucket=tuple(layout.rows_per_bucket.tolist()),  # synchronize!
            split_per_bucket=tuple(layout.split_per_bucket.tolist()),
            row_ids=layout.row.astype(index_dtype(M - 1)),
            indices=xp.empty(n_slots, index_dtype(K - 1)),
            data=xp.empty(n_slots, dtype),
            source=xp.empty(n_slots, index_dtype(nnz - 1)),
        )

    def slot_starts(self) -> Array:
        """int64[R+1]: the first slot of each ELL row."""
        return offsets_from_counts(self.row_widths())

    def _to_csr(self) -> CSR:
        xp, M, index = namespace(self.data), self.shape[0], index_dtype(self.shape[1] - 1)
        live, row = self._live_rows()
        at = self.source[live]
        indices, data = xp.empty(live.size, index), xp.empty(live.size, self.dtype)
        indices[at], bits(data)[at] = self.indices[live], bits(self.data)[live]
        indptr = pointer(counts_of(row, M), live.size)
        construct = CSR.trusted if self.is_validated else CSR  # an unchecked object may hold columns out of order
        return construct(shape=self.shape, indptr=indptr, indices=indices, data=data)


def _counted(counts: Counts, given: tuple[int, ...]) -> tuple[int, int]:
    """(ELL rows, slots) of a matrix in one part of K, for buckets of the ``given`` widths."""
    length, widths = counts.row_lengths[counts.row_lengths > 0], np.array(given)
    chunks = -(-length // widths[-1])
    width = widths[np.searchsorted(widths, np.minimum(length, widths[-1]))]
    return int(chunks.sum()), int((chunks * np.where(chunks > 1, widths[-1], width)).sum())


def widths_up_to(widest: int) -> tuple[int, ...]:
    """(1, 2, 4, .., widest)."""
    return tuple(1 << i for i in range(widest.bit_length()))


def widths_of(params: dict[str, Any]) -> tuple[int, ...]:
    """The widths of the buckets of one part, from resolved params."""
    return params.get("widths") or widths_up_to(params["max_width"])


def mean_width(nnz: int, rows: int) -> int:
    """The smallest power of two w with w * rows >= nnz."""
    mean = ceil_div(nnz, rows) if rows else 1
    return min(MAX_WIDTH, 1 << max(0, mean - 1).bit_length())


@dataclass(frozen=True)
class Layout:
    """For each ELL row, where its items come from and where they go. Arrays are in bucket order, except ``order``."""

    row: Array
    """int64[R]: the row of each ELL row."""
    first: Array
    """int64[R]: the CSR position of its first item."""
    live: Array
    """int64[R]: the number of its items."""
    slots: Array
    """int64[R+1]: its first slot."""
    order: Array
    """int64[R]: its number if ELL rows are counted by row, part and chunk."""
    rows: int
    rows_per_bucket: Array
    split_per_bucket: Array

    @classmethod
    def of(cls, counts: Array, widths: tuple[int, ...]) -> Layout:
        """counts int64[M, parts]: items of each row in each part, which are neighbours in an ordered CSR. widths:
        those of the buckets of a part, ascending."""
        xp, (M, parts), levels, widest = namespace(counts), counts.shape, len(widths), widths[-1]
        width_of = xp.asarray(widths, dtype=np.int64)
        counts = counts.reshape(-1)
        starts = offsets_from_counts(counts)[:-1]
        segments = xp.flatnonzero(counts)  # synchronize!
        row, part, length, start = segments // parts, segments % parts, counts[segments], starts[segments]

        # ELL rows: one a segment, or chunks of the widest bucket.
        chunks = -(-length // widest)
        ell_offsets = offsets_from_counts(chunks)
        n_ell = int(ell_offsets[-1])  # synchronize!
        segment = rows_of(ell_offsets, n_ell)
        chunk = rank_in_row(ell_offsets, segment)
        live = xp.minimum(length[segment] - chunk * widest, widest)
        level = xp.searchsorted(width_of, xp.minimum(length, widest))[segment]
        split = counts_of(row[segment], M)[row[segment]] > 1
        bucket = part[segment] * levels + level

        # Stable: inside a bucket rows ascend and the chunks of a row stay in order.
        order = xp.argsort(bucket * 2 + split, kind="stable")
        bucket, split, segment = bucket[order], split[order], segment[order]
        return cls(
            row=row[segment],
            first=start[segment] + chunk[order] * widest,
            live=live[order],
            slots=offsets_from_counts(width_of[bucket % levels]),
            order=order,
            rows=M,
            rows_per_bucket=counts_of(bucket, parts * levels),
            split_per_bucket=counts_of(bucket[split], parts * levels),
        )

    def by_row(self) -> tuple[Array, Array, Array]:
        """(ell_ptr int64[M+1], (first slot, width) int64[R, 2], items int64[R]) with ELL rows by row, part, chunk."""
        places, live = np.empty((self.row.size, 2), np.int64), np.empty(self.row.size, np.int64)
        places[self.order, 0], places[self.order, 1] = self.slots[:-1], np.diff(self.slots)
        live[self.order] = self.live
        return offsets_from_counts(counts_of(self.row, self.rows)), places, live
