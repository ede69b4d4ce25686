"""SpMM on ELL buckets with CUDA cores: every block the same number of stored slots.  Kernel: spmm_ell_buckets.cu."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import Array, ceil_div, namespace
from ....products import ideal, roofline
from ....products.kernel import spmm_of
from ....products.problem import Problem, itemsize
from ..csr.csr_records import instead_of_arrays
from ..runtime import jit
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Launch, restored
from ..runtime.row_tiles import Device, Tile, choose_tile
from ..runtime.row_work import (
    RowGathering,
    Rows,
    bins,
    gather,
    gathered_rows,
    longest_piece,
    order_rows,
    row_gather_reasons,
)
from ..runtime.transpose import row_major

ARCHS = ("sm_80",)
TYPES = ("float32", "float16", "bfloat16")
MAX_BINS = 32
ADDED = -2
"""Stands for the width of a bucket in a bin of records whose sums are added to C."""
PIECES_OF_A_LAUNCH = 1024
"""Parts of K get a launch each where more pieces than this, on average, would be summed in the workspace. Predicted: a
launch takes 3 us, a piece with a block of its own some nanoseconds of the whole device."""
NARROW = 8
"""Slots of a lane group's load: ELL rows of narrower buckets share it."""


class SpmmELLBuckets(RowGathering, CudaKernel):
    """Direct rows are stored, split rows combined in a fixed order. B or C column-major: through a transposed copy."""

    name = "cuda.spmm_ell_buckets"
    takes = spmm_of("ell-buckets")
    archs = ARCHS

    def unsupported(self, p: Problem) -> list[str]:
        odd = [w for w in p.p.get("widths", ()) if w & (w - 1)]
        text = f"widths must be powers of two, got {', '.join(map(str, odd))}"
        return [*row_gather_reasons(p, TYPES), *([text] if odd else [])]

    def only_by_name(self, p: Problem) -> str:
        return instead_of_arrays(p)

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests: every value type, wide and scalar loads, both index types."""
        tiles = [
            choose_tile(vec, 4, n, 1000, 1000, 10**5, Device()) for vec, n in ((4, 32), (4, 512), (1, 1), (1, 100))
        ]
        names = [f"spmm_ell_buckets<float, float, int, int, {t.template()}, {flags}>"
                 for t in tiles for flags in ("false, false", "false, true")]  # fmt: skip
        half = choose_tile(8, 2, 128, 1000, 1000, 10**5, Device()).template()
        for t in ("__half", "__nv_bfloat16"):
            names.append(f"spmm_ell_buckets<{t}, {t}, int, long long, {half}, false, false>")
        return (
            *names,
            f"spmm_ell_buckets<__half, float, long long, int, {half}, true, false>",
            f"spmm_ell_buckets<__half, float, long long, int, {half}, true, true>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        import cupy

        stored = restored(a)
        row_ids, indices, data = stored.row_ids, stored.indices, stored.data
        buckets = list(bucket_places(a.rows_per_bucket, a.split_per_bucket, a.bucket_widths))

        exact = p.out_dtype == "float32"  # C can hold a sum between two launches

        def build() -> Work:
            with cupy.cuda.Device(p.device_id):
                return order_stretches(row_ids, buckets, p.M, longest_piece(int(data.size)), exact)

        work = a.kernel_arrays(f"stretches by {'part' if exact else 'row'}", build)
        rows = work.rows
        value, out = VALUE_TYPES[p.a_dtype], VALUE_TYPES[p.out_dtype]
        row, index = ("long long" if x.dtype.itemsize == 8 else "int" for x in (row_ids, indices))
        flags = f"{bool(rows.pieces)}, {any(g.adds for g in work.groups)}".lower()
        arch = jit.architecture(p.sm or 0, ARCHS)

        @functools.cache
        def kernels(tile: Tile) -> list[tuple[Launch, int]]:
            instance = f"spmm_ell_buckets<{value.cuda}, {out.cuda}, {row}, {index}, {tile.template()}, {flags}>"
            function = jit.load("ell_buckets/spmm_ell_buckets.cu", instance, arch, p.device_id)
            signature = (BinTable, *"PPPPPPPPPiiqq")
            fixed = (rows.records, row_ids, indices, data, rows.cuts)
            tables = bin_tables(buckets, work, tile.slots, tile.fill)
            return [
                (Launch(function, signature, (t, *fixed), tile.threads, waits=tile.early), t.blocks) for t in tables
            ]

        prepare, tile = gather(self, p, rows, kernels)
        return Prepared(row_major(p, prepare), tile=str(tile), workspace=rows.records.nbytes)

    def quantities(self, p: Problem, tile: Tile, device: roofline.Device) -> tuple[float, ...]:
        """As for CSR; parts of K with a launch each read less of B from memory, but C again, and are more launches.

        Rows are taken to have items in all parts, or as many parts as they have items.
        """
        usual = RowGathering.quantities(self, p, tile, device)
        parts, pieces = p.p.get("column_parts", 1), min(p.nnz, p.M * p.p.get("column_parts", 1))
        if parts == 1 or p.out_dtype != "float32" or not apart(pieces, parts):
            return usual
        now = dict(zip(self.terms, usual, strict=True))
        part = p.changed(K=ceil_div(p.K, parts))
        now["rows past L2"] = gathered_rows(part, device)[1]
        now["memory"] += ideal.memory_us(2 * max(0, pieces - p.M) * p.n * itemsize(p.out_dtype), device)
        now["second launches"] += parts - 1
        return tuple(now[term] for term in self.terms)


class Bucket(NamedTuple):
    """One bucket: ELL rows first .. first+rows-1, the last ``split`` of them split; its items start at ``start``."""

    log_width: int
    first: int
    rows: int
    split: int
    start: int
    part: int = 0

    @property
    def direct(self) -> int:
        return self.rows - self.split


def bucket_places(rows: tuple[int, ...], split: tuple[int, ...], widths: tuple[int, ...]) -> Iterator[Bucket]:
    """The buckets with at least one ELL row, ordered by part of K and then by ascending width, a power of two."""
    first = start = part = before = 0
    for n, s, width in zip(rows, split, widths, strict=True):
        part, before = part + (width <= before), width  # widths ascend in a part
        if n:
            yield Bucket(width.bit_length() - 1, first, n, s, start, part)
        first += n
        start += n * width


class Group(NamedTuple):
    """Records of one launch, longest first; none is a piece."""

    part: int
    """Part of K, which is the number of the launch."""
    adds: bool
    """Their rows have items in parts before this one too: sums are added to C."""
    first: int
    counts: tuple[int, ...]
    """Records in each length class, as ``Rows.counts``."""


class Work(NamedTuple):
    """The records of all launches."""

    rows: Rows
    """Pieces, then records of the first launch that are stored, then those of ``groups``."""
    groups: tuple[Group, ...]


def apart(pieces: int, parts: int) -> bool:
    """Whether the parts of K get a launch each, and rows that are in several parts are summed in C, not a workspace."""
    return pieces > PIECES_OF_A_LAUNCH * parts


def order_stretches(row_ids: Array, buckets: list[Bucket], M: int, longest: int, exact: bool = True) -> Work:
    """Records of the stretches of split rows, and of the rows that own no ELL row (length 0).

    exact: C has the type of the sums, so a row may be summed there by one launch after another. In a canonical
    matrix a row has at most one stretch in a part, since all of its ELL rows there are of one width. Rows with two, and
    rows with a stretch longer than ``longest``, which fills whole blocks, are pieces all the same.
    """
    xp = namespace(row_ids)
    none = xp.zeros(0, np.int64)
    starts, lengths, rows, parts = [none], [none], [none], [none]
    for b in buckets:
        if b.split:
            row = row_ids[b.first + b.direct : b.first + b.rows].astype(np.int64)
            head = xp.flatnonzero(xp.concatenate((xp.ones(1, bool), row[1:] != row[:-1])))  # synchronize!
            count = xp.diff(xp.concatenate((head, xp.full(1, row.size, head.dtype))))
            starts.append(b.start + ((b.direct + head) << b.log_width))
            lengths.append(count << b.log_width)
            rows.append(row[head])
            parts.append(xp.full(head.size, b.part, np.int64))
    owns = xp.zeros(M, bool)
    owns[row_ids] = True
    empty = xp.flatnonzero(~owns)  # synchronize!
    zeros = xp.zeros(empty.size, np.int64)
    order = xp.argsort(xp.concatenate(rows), kind="stable")  # parts ascend in a row
    start, length, row, part = (xp.concatenate(x)[order] for x in (starts, lengths, rows, parts))
    again = row[1:] == row[:-1]
    adds = xp.concatenate((xp.zeros(min(1, row.size), bool), again))
    several = int(adds.sum())  # synchronize!
    groups: list[Group] = []
    later = []
    if exact and apart(several, 1 + max((b.part for b in buckets), default=0)):
        long = xp.zeros(M, bool)
        long[row[length > longest]] = True
        long[row[1:][again & (part[1:] == part[:-1])]] = True
        whole = ~long[row]
        for number in range(1 + max(b.part for b in buckets)):
            for added in (False, True):
                some = xp.flatnonzero(whole & (part == number) & (adds == added))  # synchronize!
                if some.size:
                    ordered = order_rows(start[some], length[some], row[some], longest)
                    later.append(ordered.records)
                    groups.append(Group(number, added, 0, ordered.counts))
        start, length, row = (x[~whole] for x in (start, length, row))
    # Empty rows come last; none of them equals the row before it, so they stay whole.
    start, length, row = (xp.concatenate((x, y)) for x, y in ((start, zeros), (length, zeros), (row, empty)))
    out = order_rows(start, length, row, longest)
    at = len(out.records)
    for i, records in enumerate(later):
        groups[i] = groups[i]._replace(first=at)
        at += len(records)
    return Work(out._replace(records=xp.concatenate((out.records, *later))), tuple(groups))


class BinEntry(ctypes.Structure):
    """``struct Bin`` of spmm_ell_buckets.cu."""

    _fields_ = (
        ("first_block", ctypes.c_uint32),
        ("log_width", ctypes.c_int16),
        ("log_slots", ctypes.c_int16),
        ("first", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("start", ctypes.c_int64),
    )


class BinTable(ctypes.Structure):
    """``struct Bins`` of spmm_ell_buckets.cu."""

    _fields_ = (
        ("blocks", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("pieces", ctypes.c_int64),
        ("bin", BinEntry * MAX_BINS),
    )


def bin_tables(buckets: list[Bucket], work: Work, slots: int, fill: int) -> list[BinTable]:
    """One table per launch: records, then the direct rows of the buckets, the widest first. Mostly a single one.

    With groups of records, a launch for each part of K at least, in ascending order.
    """
    rows = work.rows
    first: list[tuple[int, ...]]
    first = [(-1, b.log_slots, b.first, b.end, 0, slots >> b.log_slots) for b in bins(rows, slots, fill)]
    tables: list[BinTable] = []
    parts = 1 + max(b.part for b in buckets) if work.groups else 1
    for part in range(parts):
        entries = [] if part else first
        for g in work.groups:
            if g.part == part:
                runs = bins(Rows(rows.records, g.counts, 0, rows.cuts), slots, fill)
                entries += [
                    (ADDED if g.adds else -1, b.log_slots, g.first + b.first, g.first + b.end, 0, slots >> b.log_slots)
                    for b in runs
                ]
        entries += [
            _direct_rows(b, slots, fill)
            for b in sorted(buckets, key=lambda b: -b.log_width)
            if b.direct and (parts == 1 or b.part == part)
        ]
        tables += _tables(entries, 0 if part else rows.pieces)
    return tables


def _direct_rows(b: Bucket, slots: int, fill: int) -> tuple[int, ...]:
    width = 1 << b.log_width
    log = min(slots, max(1, width // fill)).bit_length() - 1
    rows_in_block = slots * NARROW // width if width < NARROW else slots >> log
    return b.log_width, log, b.first, b.first + b.direct, b.start, rows_in_block


def _tables(entries: list[tuple[int, ...]], pieces: int) -> list[BinTable]:
    tables = []
    for at in range(0, len(entries), MAX_BINS):
        chunk = entries[at : at + MAX_BINS]
        table = BinTable(count=len(chunk), pieces=0 if at else pieces)
        for i, (log_width, log, first, end, start, rows_in_block) in enumerate(chunk):
            table.bin[i] = BinEntry(table.blocks, log_width, log, first, end, start)
            table.blocks += ceil_div(end - first, rows_in_block)
        tables.append(table)
    return tables
