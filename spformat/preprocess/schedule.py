"""The TCA-SpMM schedule of a CSR matrix: which warp works on which row on tensor cores.

A row of d items gets 1, 2, 4 or 8 warps (d <= 8, 16, 32, 64), a longer one 8 per 64 items; 8 warps make a thread
block. Rows are placed next-fit in row order: a row of at most 64 items never straddles a block, a longer one owns
whole blocks.

    items per row           5  20       20       40              3
    num_warps_per_row       1  4        4        8               1
    row_id_for_each_warp    0 1 1 1 1 . . . | 2 2 2 2 . . . . | 3 3 3 3 3 3 3 3 | 4 . . . . . . .
    warpid_within_row       0 0 1 2 3 . . . | 0 1 2 3 . . . . | 0 1 2 3 4 5 6 7 | 0 . . . . . . .       (. is PAD)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrays import scans
from ..arrays.library import PAD, Array, ceil_div, index_dtype, namespace, on_own_device, to_device
from ..arrays.segments import offsets_from_counts, rank_in_row, rows_of
from ..errors import ArrayError, IndexBoundsError, InvariantError, OrderError, PatternError, UsageError
from ..formats.csr import CSR

WARPS = 8
"""Warps of a thread block."""
FRAGMENT = 64
"""Items of one row in one right-hand fragment."""


ARRAYS = ("num_warps_per_row", "row_id_for_each_warp", "warpid_within_row")
"""The arrays of a schedule."""


@dataclass(frozen=True, eq=False)
class TCASchedule:
    """INDEX arrays, all on the device of the matrix; W is a multiple of 8."""

    name: ClassVar[str] = "tca"
    num_warps_per_row: Array
    """[M]; 0 for an empty row."""
    row_id_for_each_warp: Array
    """[W]: the row a warp works on, PAD if it is idle."""
    warpid_within_row: Array
    """[W]: 0 .. num_warps_per_row[row]-1, PAD if it is idle."""

    @property
    def blocks(self) -> int:
        """Thread blocks: W / 8."""
        return int(self.row_id_for_each_warp.size) // WARPS

    def mma_per_row(self, N: int) -> Array:
        """int64[M]: m16n8k8 instructions of each row for N columns of B.

        A row of up to 8, 16, 32, 64 items uses 1, 2, 4, 8 columns of the right-hand fragment, and so has 16, 8, 4, 2
        results for each instruction; a longer one has 2 for each of its fragments of 64 items.
        """
        xp = namespace(self.num_warps_per_row)
        warps = self.num_warps_per_row.astype(np.int64)
        return -(-warps // WARPS) * -(-N // (16 // xp.clip(warps, 1, WARPS)))

    def mma_count(self, N: int) -> int:
        """m16n8k8 instructions for N columns of B: the sum over the rows."""
        return int(self.mma_per_row(N).sum())  # synchronize!

    def named(self, name: str) -> dict[str, Array]:
        """The arrays under the names with which a file keeps them beside the matrix ``name``.

        sf.save("w.safetensors", {"w": a} | tca(a).named("w"))      # w, w.tca.num_warps_per_row, ..
        tensors = sf.load("w.safetensors", device="cuda")
        TCASchedule.beside(tensors, "w").attach(tensors["w"])       # plans of this matrix use it
        """
        return {f"{name}.{self.name}.{field}": getattr(self, field) for field in ARRAYS}

    @classmethod
    def beside(cls, tensors: Mapping[str, Any], name: str) -> TCASchedule:
        """The schedule that ``named`` put beside the matrix ``name`` (CSR), on its device, and the right one for it.

        tensors: what ``sf.load`` or ``sf.open`` returns. UsageError where the matrix or one of the arrays is missing;
        the errors of ``validate`` for arrays that are not the schedule of this matrix, say because it was pruned since.
        """
        entries = {field: f"{name}.{cls.name}.{field}" for field in ARRAYS}
        missing = [entry for entry in (name, *entries.values()) if entry not in tensors]
        if missing:
            raise UsageError(
                f"tca: expected {missing[0]!r} among the tensors, got none; named({name!r}) gives the names"
            )
        csr = tensors[name]
        if not isinstance(csr, CSR):
            raise UsageError(f"tca: expected {name!r} to be a CSR, got {type(csr).__name__}")
        arrays = {field: tensors[entry] for field, entry in entries.items()}
        schedule = cls(**{field: to_device(a, csr.device) for field, a in arrays.items()})
        schedule.validate(csr.ensure_valid())
        return schedule

    def attach(self, csr: CSR) -> CSR:
        """The same matrix object, whose plans use this schedule instead of computing it.

        The errors of ``validate``; UsageError for anything but a CSR.
        """
        self.validate(csr)
        csr.ensure_valid().kernel_arrays(self.name, lambda: self)
        return csr

    @classmethod
    def of(cls, csr: CSR) -> TCASchedule:
        """The schedule that is attached to a matrix; computed and attached where there is none."""
        schedule: TCASchedule = csr.kernel_arrays(cls.name, lambda: tca(csr))
        return schedule

    def validate(self, csr: CSR | None = None) -> None:
        """Raise an error for the first broken rule: memory safety first, then equality with the schedule of ``csr``.

        O(M + W): that rows are placed next-fit is seen from each row and the one before it.
        """
        for name in ARRAYS:
            a = getattr(self, name)
            if a.ndim != 1 or a.dtype not in (np.int32, np.int64):
                got = f"{a.dtype}{list(a.shape)}"
                raise ArrayError(f"tca: {name}: expected int32 or int64 of one dimension, got {got}", array=name)
        warps, rows, parts = self.num_warps_per_row, self.row_id_for_each_warp, self.warpid_within_row
        if rows.size % WARPS or parts.size != rows.size:
            raise InvariantError(
                f"tca: expected two arrays of one length, a multiple of {WARPS}, got {rows.size} and {parts.size}",
                array="row_id_for_each_warp",
            )
        scans.within(self, "row_id_for_each_warp", warps.size, pad=True)
        idle = rows == PAD
        scans.require_none(
            self, idle != (parts == PAD), "warpid_within_row", "PAD exactly where the row is PAD", PatternError
        )
        if warps.size:
            xp = namespace(rows)
            limit = xp.where(idle, 0, warps[xp.where(idle, 0, rows)])
            bad = ~idle & ((parts < 0) | (parts >= limit))
            scans.require_none(self, bad, "warpid_within_row", "less than the warps of its row", IndexBoundsError)
        if csr is not None:
            warps = warps_per_row(_lengths(csr))
            whole = _placed(warps, _next_fit if (starts := self._starts(warps)) is None else lambda _: starts)
            for name in ARRAYS:
                own, other = getattr(self, name), getattr(whole, name)
                if own.shape != other.shape or own.dtype != other.dtype:
                    raise InvariantError(
                        f"tca: {name}: expected {other.dtype}{list(other.shape)}, got {own.dtype}{list(own.shape)}",
                        array=name,
                    )
                scans.require_none(self, own != other, name, "the next-fit schedule of this matrix", OrderError)

    def _starts(self, warps: Array) -> Array | None:
        """int64[rows with warps]: the first warp of each row if that is next-fit for ``warps`` int64[M], else None."""
        xp = namespace(warps)
        starts, some = xp.flatnonzero(self.warpid_within_row == 0), warps[warps > 0]  # synchronize!
        if starts.size != some.size:
            return None
        end = starts + some
        fits = bool((starts == _next_to(xp.concatenate((xp.zeros(1, np.int64), end))[: some.size], some)).all())
        return starts if fits else None  # synchronize!


def warps_per_row(lengths: Array) -> Array:
    """int64[M]: 0 for no items, 1, 2, 4, 8 up to 8, 16, 32, 64 items, 8 * ceil(d / 64) above."""
    xp = namespace(lengths)
    classes = xp.searchsorted(xp.asarray((0, 8, 16, 32, 64)), lengths)  # 0, 1 .. 4, 5
    short = xp.asarray((0, 1, 2, 4, 8, 0))[classes]
    return xp.where(lengths > FRAGMENT, WARPS * -(-lengths // FRAGMENT), short)


@on_own_device
def mma_of_whole_fragments(csr: CSR, N: int) -> int:
    """TCA-SpMM's Eq. 1: instructions if every row used all 8 columns of its fragments.

    The sum of ceil(d / 64) * ceil(N / 2), d the items of a row. ``TCASchedule.mma_count`` is at most this: rows of up
    to 32 items need fewer.
    """
    lengths = namespace(csr.indptr).diff(csr.indptr.astype(np.int64))
    return int((-(-lengths // FRAGMENT)).sum()) * ceil_div(N, 2)  # synchronize!


@on_own_device
def mma_of_full_fragments(csr: CSR, N: int) -> float:
    """The limit of Eq. 1 for long rows, nnz * N / 128: instructions if no place of any fragment were empty."""
    return csr.nnz * N / (2 * FRAGMENT)


@on_own_device
def tca(csr: CSR) -> TCASchedule:
    """The schedule of a matrix with valid ``indptr``; stored zeros count as items. O(8 M log M + W).

    UsageError for anything but a CSR.
    """
    return _placed(warps_per_row(_lengths(csr)), _next_fit)


def _lengths(csr: CSR) -> Array:
    if not isinstance(csr, CSR):
        raise UsageError(f"tca: expected a CSR, got {type(csr).__name__}; use convert(x, 'csr')")
    return namespace(csr.indptr).diff(csr.indptr.astype(np.int64))


def _placed(warps: Array, starts_of: Callable[[Array], Array]) -> TCASchedule:
    """The schedule with ``warps`` int64[M] for the rows; starts_of: the first warp of each row, from the warps of those
    that have any."""
    xp, M = namespace(warps), warps.size
    rows = xp.flatnonzero(warps)  # synchronize!
    some = warps[rows]
    starts = starts_of(some)
    offsets = offsets_from_counts(some)
    used, last = (int(offsets[-1]), int(starts[-1] + some[-1])) if rows.size else (0, 0)  # synchronize!
    which = rows_of(offsets, used)
    rank = rank_in_row(offsets, which)
    total = WARPS * ceil_div(last, WARPS)
    ids, parts = index_dtype(max(0, M - 1)), index_dtype(used)
    row_id = xp.full(total, PAD, ids)
    warpid = xp.full(total, PAD, parts)
    at = starts[which] + rank
    row_id[at] = rows[which].astype(ids)
    warpid[at] = rank.astype(parts)
    return TCASchedule(warps.astype(parts), row_id, warpid)


def _next_fit(warps: Array) -> Array:
    """int64: the first warp of each row; warps: int64, positive."""
    xp = namespace(warps)
    placed = _placed_before(warps)
    return xp.cumsum(_next_to(placed, warps) - placed + warps) - warps if warps.size else xp.zeros(0, np.int64)


def _next_to(end: Array, warps: Array) -> Array:
    """Where a row of so many warps starts if the row before it ends at ``end``."""
    placed = end % WARPS
    return end + namespace(end).where((placed > 0) & (placed + warps > WARPS), WARPS - placed, 0)


def _placed_before(warps: Array) -> Array:
    """int64[M]: for each row, how many warps the current block has already when the row is placed, 0 .. 7.

    A row maps each of the eight possible states to another. The prefix products of these maps give the state before
    every row, without a loop over the rows.
    """
    xp, M = namespace(warps), warps.size
    state = xp.arange(WARPS, dtype=np.int64)
    fits = (state + warps[:, None] <= WARPS) | (state == 0)
    after: Any = xp.where(fits, state + warps[:, None], warps[:, None]) % WARPS
    step = 1
    while step < M:
        # after[i] becomes after[i] o after[i - step]: now the product of the last 2 * step rows up to i
        after = xp.concatenate((after[:step], xp.take_along_axis(after[step:], after[:-step], axis=1)))
        step *= 2
    return xp.concatenate((xp.zeros(min(1, M), np.int64), after[:-1, 0]))
