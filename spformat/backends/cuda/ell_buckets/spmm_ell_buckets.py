"""SpMM on ELL buckets with CUDA cores: every block the same number of stored slots.  Kernel: spmm_ell_buckets.cu."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import Array, ceil_div, namespace
from ....products.kernel import spmm_of
from ....products.problem import Problem
from ..runtime import jit
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Launch
from ..runtime.row_tiles import Device, Tile, choose_tile
from ..runtime.row_work import RowGathering, Rows, bins, gather, longest_piece, order_rows, row_gather_reasons
from ..runtime.transpose import row_major

ARCHS = ("sm_80",)
TYPES = ("float32", "float16", "bfloat16")
MAX_BINS = 32
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

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests: every value type, wide and scalar loads, both index types."""
        tiles = [
            choose_tile(vec, 4, n, 1000, 1000, 10**5, Device()) for vec, n in ((4, 32), (4, 512), (1, 1), (1, 100))
        ]
        names = [f"spmm_ell_buckets<float, float, int, int, {t.template()}, false>" for t in tiles]
        half = choose_tile(8, 2, 128, 1000, 1000, 10**5, Device()).template()
        names += [f"spmm_ell_buckets<{t}, {t}, int, long long, {half}, false>" for t in ("__half", "__nv_bfloat16")]
        return (
            *names,
            f"spmm_ell_buckets<__half, float, long long, int, {half}, true>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        import cupy

        row_ids, indices, data = a.row_ids, a.indices, a.data
        buckets = list(bucket_places(a.rows_per_bucket, a.split_per_bucket, a.bucket_widths))

        def build() -> Rows:
            with cupy.cuda.Device(p.device_id):
                return order_stretches(row_ids, buckets, p.M, longest_piece(int(data.size)))

        rows = a.kernel_arrays("stretches by length", build)
        value, out = VALUE_TYPES[p.a_dtype], VALUE_TYPES[p.out_dtype]
        row, index = ("long long" if x.dtype.itemsize == 8 else "int" for x in (row_ids, indices))
        cut = str(bool(rows.pieces)).lower()
        arch = jit.architecture(p.sm or 0, ARCHS)

        @functools.cache
        def kernels(tile: Tile) -> list[tuple[Launch, int]]:
            instance = f"spmm_ell_buckets<{value.cuda}, {out.cuda}, {row}, {index}, {tile.template()}, {cut}>"
            function = jit.load("ell_buckets/spmm_ell_buckets.cu", instance, arch, p.device_id)
            signature = (BinTable, *"PPPPPPPPPiiqq")
            fixed = (rows.records, row_ids, indices, data, rows.cuts)
            tables = bin_tables(buckets, rows, tile.slots, tile.fill)
            return [(Launch(function, signature, (t, *fixed), tile.threads), t.blocks) for t in tables]

        prepare, tile = gather(self, p, rows, kernels)
        return Prepared(row_major(p, prepare), tile=str(tile), workspace=rows.records.nbytes)


class Bucket(NamedTuple):
    """One bucket: ELL rows first .. first+rows-1, the last ``split`` of them split; its items start at ``start``."""

    log_width: int
    first: int
    rows: int
    split: int
    start: int

    @property
    def direct(self) -> int:
        return self.rows - self.split


def bucket_places(rows: tuple[int, ...], split: tuple[int, ...], widths: tuple[int, ...]) -> Iterator[Bucket]:
    """The buckets with at least one ELL row, ordered by part of K and then by ascending width, a power of two."""
    first = start = 0
    for n, s, width in zip(rows, split, widths, strict=True):
        if n:
            yield Bucket(width.bit_length() - 1, first, n, s, start)
        first += n
        start += n * width


def order_stretches(row_ids: Array, buckets: list[Bucket], M: int, longest: int) -> Rows:
    """Records of the stretches of split rows, and of the rows that own no ELL row (length 0)."""
    xp = namespace(row_ids)
    none = xp.zeros(0, np.int64)
    starts, lengths, rows = [none], [none], [none]
    for b in buckets:
        if b.split:
            row = row_ids[b.first + b.direct : b.first + b.rows].astype(np.int64)
            head = xp.flatnonzero(xp.concatenate((xp.ones(1, bool), row[1:] != row[:-1])))  # synchronize!
            count = xp.diff(xp.concatenate((head, xp.full(1, row.size, head.dtype))))
            starts.append(b.start + ((b.direct + head) << b.log_width))
            lengths.append(count << b.log_width)
            rows.append(row[head])
    owns = xp.zeros(M, bool)
    owns[row_ids] = True
    empty = xp.flatnonzero(~owns)  # synchronize!
    start, length, row = (xp.concatenate(x) for x in (starts, lengths, rows))
    order = xp.argsort(row, kind="stable")
    zeros = xp.zeros(empty.size, np.int64)
    start, length, row = (xp.concatenate((x[order], y)) for x, y in ((start, zeros), (length, zeros), (row, empty)))
    # Empty rows come last; none of them equals the row before it, so they stay whole.
    return order_rows(start, length, row, longest)


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


def bin_tables(buckets: list[Bucket], rows: Rows, slots: int, fill: int) -> list[BinTable]:
    """One table per launch: records, then the direct rows of the buckets, the widest first. Mostly a single one."""
    entries = [(-1, b.log_slots, b.first, b.end, 0, slots >> b.log_slots) for b in bins(rows, slots, fill)]
    for b in sorted(buckets, key=lambda b: -b.log_width):
        if b.direct:
            width = 1 << b.log_width
            log = min(slots, max(1, width // fill)).bit_length() - 1
            rows_in_block = slots * NARROW // width if width < NARROW else slots >> log
            entries.append((b.log_width, log, b.first, b.first + b.direct, b.start, rows_in_block))
    tables = []
    for at in range(0, len(entries), MAX_BINS):
        chunk = entries[at : at + MAX_BINS]
        table = BinTable(count=len(chunk), pieces=0 if at else rows.pieces)
        for i, (log_width, log, first, end, start, rows_in_block) in enumerate(chunk):
            table.bin[i] = BinEntry(table.blocks, log_width, log, first, end, start)
            table.blocks += ceil_div(end - first, rows_in_block)
        tables.append(table)
    return tables
