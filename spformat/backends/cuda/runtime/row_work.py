"""Divide rows of very different lengths into equal work: records, bins, tiles. Shared by the row-gathering kernels.

2^log slots of a block (a slot is some lanes of a warp) compute a row of A, so that every slot gets about ``fill``
items. Rows with the same log form a bin. The arrays are computed with numpy or CuPy, so this runs, and is tested,
without a GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import Array, ceil_div, namespace
from ....arrays.segments import offsets_from_counts, rank_in_row, rows_of
from ....errors import LimitError
from ....products import ideal, rates, roofline, tiles
from ....products.kernel import Kernel, reasons, tile_us
from ....products.problem import COL, Problem, itemsize
from . import refusals
from .launch import MAX_GRID_Y, Bound, Launch, Operands, Prepare
from .row_tiles import SHAPES, Device, Tile, choose_tile, device_of, filled, vector_width
from .scratch import Scratch

GROUP = 4
"""Lengths of rows are rounded up to multiples of it."""
CLASSES = 40
"""Length classes: 0 is empty, class c >= 1 holds lengths of 2^(c-2)+1 .. 2^(c-1) groups."""
MAX_BINS = 16
TYPES = ("float32", "float16", "bfloat16", "float64")


class Rows(NamedTuple):
    """Rows of A in the order in which they are computed, longest first."""

    records: Array
    """int64[R, 2]. The first number is the first item. The second has the row in its low 32 bits (of a piece: the index
    of its row in ``cuts``) and the number of items in its high 32 bits. The ``pieces`` pieces come first."""
    counts: tuple[int, ...]
    """Records behind the pieces in each length class."""
    pieces: int
    """Number of records that are pieces, which means segments of a row that has several segments."""
    cuts: Array
    """int64[rows in pieces, 3]: row, first piece, number of pieces."""


def order_rows(starts: Array, lengths: Array, rows: Array, longest: int) -> Rows:
    """The records of segments. starts, lengths, rows: int64[n], first item, number of items and row of each segment.

    Rows ascend, and a row may have several segments. A segment longer than ``longest`` is cut. Segments of a row that
    then has more than one become pieces.
    """
    xp = namespace(starts)
    parts = xp.maximum(1, -(-lengths // longest))
    offsets = offsets_from_counts(parts)
    total = int(offsets[-1])  # synchronize!
    if total > rows.size:
        owner = rows_of(offsets, total)
        begin = rank_in_row(offsets, owner) * longest
        starts, rows = starts[owner] + begin, rows[owner]
        lengths = xp.minimum(lengths[owner] - begin, longest)

    again = rows[1:] == rows[:-1]
    no = xp.zeros(min(1, total), bool)
    shared = xp.concatenate((no, again)) | xp.concatenate((again, no))
    heads = shared & ~xp.concatenate((no, again))
    rank = xp.cumsum(shared, dtype=np.int64) - 1
    packed = xp.stack((starts, xp.where(shared, xp.cumsum(heads) - 1, rows) | (lengths << 32)), axis=1)
    pieces, whole = packed[shared], packed[~shared]  # synchronize!
    first = rank[heads]
    counts = xp.diff(xp.concatenate((first, xp.full(1, len(pieces), np.int64))))
    cuts = xp.stack((rows[heads], first, counts), axis=1)

    groups = -(-lengths[~shared] // GROUP)
    # Stable, longest first. One sort of unique keys: row numbers stay ascending among equals.
    key = xp.sort(((2**30 - groups) << 32) | xp.arange(groups.size, dtype=np.int64))
    limits = xp.asarray([0] + [1 << c for c in range(CLASSES - 2)], dtype=np.int64)
    counts = xp.bincount(xp.searchsorted(limits, groups), minlength=CLASSES) if groups.size else xp.zeros(CLASSES, int)
    records = xp.concatenate((pieces, whole[key & 0xFFFFFFFF]))
    return Rows(xp.ascontiguousarray(records), tuple(counts.tolist()), len(pieces), cuts)  # synchronize!


def longest_piece(items: int) -> int:
    """A row with more items is cut: half of the share of one of 128 SMs, rounded to a power of two, at least 2048."""
    return min(1 << 24, max(2048, 1 << max(0, (items // 256).bit_length())))


def rows_by_length(a: Any, p: Problem) -> Rows:
    """The records of the rows of a CSR matrix on the device of ``p``; kept with the matrix."""
    indptr = a.indptr

    def build() -> Rows:
        import cupy

        with cupy.cuda.Device(p.device_id):
            starts = indptr[:-1].astype(np.int64)
            lengths = indptr[1:].astype(np.int64) - starts
            return order_rows(starts, lengths, cupy.arange(p.M, dtype=np.int64), longest_piece(p.nnz))

    rows: Rows = a.kernel_arrays("rows by length", build)
    return rows


class Bin(NamedTuple):
    log_slots: int
    first: int
    end: int
    """Records first .. end-1."""


def bins(rows: Rows, slots: int, fill: int) -> list[Bin]:
    """Runs of records with the same number of slots each, longest rows first; a slot gets about ``fill`` items."""
    most, free = slots.bit_length() - 1, (fill // GROUP).bit_length() - 1
    runs = [Bin(most, 0, rows.pieces)] if rows.pieces else []
    at = rows.pieces
    for c in reversed(range(CLASSES)):
        log = min(most, max(0, c - 1 - free))
        if rows.counts[c] == 0:
            continue
        if runs and runs[-1].log_slots == log and at > rows.pieces:
            runs[-1] = runs[-1]._replace(end=at + rows.counts[c])
        else:
            runs.append(Bin(log, at, at + rows.counts[c]))
        at += rows.counts[c]
    return runs


class BinEntry(ctypes.Structure):
    """``struct Bin`` of row_bins.cuh."""

    _fields_ = (
        ("first_block", ctypes.c_uint32),
        ("log_slots", ctypes.c_int32),
        ("first", ctypes.c_int64),
        ("end", ctypes.c_int64),
    )


class BinTable(ctypes.Structure):
    """``struct Bins`` of row_bins.cuh."""

    _fields_ = (
        ("blocks", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("pieces", ctypes.c_int64),
        ("bin", BinEntry * MAX_BINS),
    )


def bin_table(rows: Rows, slots: int, fill: int) -> BinTable:
    """The bins, each with its first block."""
    table = BinTable(pieces=rows.pieces)
    for i, b in enumerate(bins(rows, slots, fill)):
        table.bin[i] = BinEntry(table.blocks, b.log_slots, b.first, b.end)
        table.blocks += ceil_div(b.end - b.first, slots >> b.log_slots)
        table.count = i + 1
    return table


def row_gather_reasons(p: Problem, types: tuple[str, ...] = TYPES) -> list[str]:
    """The reasons for which a row-gathering kernel refuses ``p``."""
    return refusals.every(p, 80, types) + reasons(
        (p.M >= 2**32, f"row numbers are 32 bits in the work table: M must be below 2**32, got {p.M}"),
    )


Kernels = Callable[[Tile], Sequence[tuple[Launch, int]]]
"""The launches of one product and the number of tasks of each."""


def gather(kernel: RowGathering, p: Problem, rows: Rows, kernels: Kernels) -> Gather:
    """The launches of a product, prepared for any operands, and the tile for the N of ``p``.

    Every launch of ``kernels`` gets as run-time arguments: sums of pieces, counts of finished pieces, B, C, n, ldb in
    bytes, ldc, bytes of B to prefetch.
    """
    value_size, out_size = (VALUE_TYPES[t].numpy.itemsize for t in (p.a_dtype, p.out_dtype))
    sum_size, sums, arrivals = 8 if p.a_dtype == "float64" else 4, Scratch(), Scratch(zeros=True)
    device, K, cuts = device_of(p.device_id), p.K, len(rows.cuts)

    @functools.lru_cache(maxsize=256)
    def slabs(n: int, vec: int) -> tuple[Tile, list[tuple[int, int, int, list[tuple[Launch, tuple[int, int, int]]]]]]:
        """The tile, and the slabs of columns that one grid can cover.

        For each slab: first column, number of columns, number of column panels, launches with their grids.
        """
        tile, parts = kernel.tile_for(p.changed(n=n), vec), []
        for first in range(0, n, MAX_GRID_Y * tile.columns):
            width = min(n - first, MAX_GRID_Y * tile.columns)
            panels = ceil_div(width, tile.columns)
            launches = [(main, (tile.blocks_of(blocks, panels, device), panels, 1)) for main, blocks in kernels(tile)]
            parts.append((first, width, panels, launches))
        return tile, parts

    def prepare(o: Operands) -> list[Bound]:
        if o.ldb * value_size >= 2**31:
            raise LimitError(f"B: a line of {o.ldb} elements passes 2 GiB; multiply fewer columns at a time")
        tile, parts = slabs(o.n, vector_width(value_size, out_size, o.n, o.b & 15, o.c & 15, o.ldb, o.ldc))
        calls = []
        for first, n, panels, launches in parts:
            b, c = o.b + first * value_size, o.c + first * out_size
            prefetch = ((K - 1) * o.ldb + n) * value_size if tile.prefetch and K else 0
            sums_at, arrivals_at = 0, 0
            if cuts:
                sums_at = sums.buffer(o.stream, rows.pieces * n * sum_size)
                arrivals_at = arrivals.buffer(o.stream, cuts * panels * 4)
            for main, grid in launches:
                tail = sums_at, arrivals_at, b, c, n, o.ldb * value_size, o.ldc, prefetch
                calls.append(main.bind(grid, o.stream, *tail))
        return calls

    return Gather(prepare, slabs(max(1, p.n), expected_vector(p))[0])


def expected_vector(p: Problem) -> int:
    """How many elements of B and C a lane may take at once, if both start on 16 bytes and nothing is between lines.

    Column-major ones are copied to aligned rows first.
    """
    n = max(1, p.n)
    ldb, ldc = (8 * ceil_div(n, 8) if layout == COL else n for layout in (p.b_layout, p.out_layout))
    return vector_width(itemsize(p.a_dtype), itemsize(p.out_dtype), n, 0, 0, ldb, ldc)


class Gather(NamedTuple):
    prepare: Prepare
    tile: Tile
    """The tile for the N of the problem; its kernels are compiled."""


class RowGathering(Kernel):
    """Tiles and expected time of the kernels that gather a row of B for every item of A."""

    terms = ("launch", "memory", "rows of B", "rows past L2", "items", "products", "longest", "copies",
             "second launches")  # fmt: skip
    resident: ClassVar[bool] = False
    """Whether the kernel can keep a panel of B in shared memory."""

    def options(self, p: Problem) -> list[Tile]:
        """Tiles for contiguous operands. Column-major ones are first copied to aligned rows."""
        return self._tiles(p, expected_vector(p))

    def tile_for(self, p: Problem, vec: int) -> Tile:
        """The tile with the least expected time for loads of ``vec`` elements of B."""
        device, known = roofline.device_of(p), rates.constants(self.name, self.terms, p)
        options = self._tiles(p, vec)
        forced = tiles.forced_tile(self.name)
        matching = [t for t in options if str(t) == forced]
        return min(matching or options, key=lambda t: tile_us(self, p, t, device, known))

    def _tiles(self, p: Problem, vec: int) -> list[Tile]:
        device = Device(roofline.device_of(p).processors, smem=roofline.shared_limit(p.sm))
        cut = itemsize(p.a_dtype), p.n, p.K, p.M, p.nnz, device
        vectors = ceil_div(p.n, vec)
        wide = [shape for shape in SHAPES if vectors > max(4, shape[0] * shape[1] // 4)]
        options = [choose_tile(vec, *cut, self.resident), *(filled(vec, shape, *cut) for shape in wide)]
        return list(dict.fromkeys(options))

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By value size, and by how many bytes of B a lane loads at a time; a vector B apart."""
        values = f"{itemsize(p.a_dtype)}-byte values, "
        if p.n == 1:
            return values + "a vector", "a vector"
        loads = "resident" if tile.resident else f"loads of {tile.vec * itemsize(p.a_dtype)} bytes"
        return values + loads, loads

    def quantities(self, p: Problem, tile: Tile, device: roofline.Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        rows of B: from L2, for each item, in sectors of 32 bytes. rows past L2: the share of it that a B larger than L2
        makes come from memory. items: values and indices from L2 once for every tile of columns. products: with lanes
        past the last column. longest: rounds of tasks, where rows are few. copies: column-major B and C transposed.
        second launches: one for each of those.
        """
        size = itemsize(p.a_dtype)
        panels = ceil_div(p.n, tile.columns)
        items = ideal.cache_us(panels * p.nnz * (size + ideal.INDEX), device)
        kind = ideal.plain_arithmetic(p.a_dtype)
        products = ideal.product_us(2.0 * p.nnz * panels * tile.columns, kind, device)
        capacity = device.processors * tile.blocks * tile.threads / tile.lanes
        slots = max(p.M, p.nnz / tile.fill) * panels
        longest = (slots / capacity + 1) * tile.fill * 0.01
        memory, rows, past, copies, launches = _of_every_tile(p, device)
        return 1.0, memory, rows, past, items, products, longest, copies, launches


@functools.lru_cache(maxsize=256)
def _of_every_tile(p: Problem, device: roofline.Device) -> tuple[float, float, float, float, float]:
    """Ideal microseconds of memory and of the rows of B (``gathered_rows``); of the copies, and their number."""
    return ideal.traffic_us(p, device), *gathered_rows(p, device), *transposed_copies(p, device)


def gathered_rows(p: Problem, device: roofline.Device) -> tuple[float, float]:
    """Ideal microseconds for a row of B for each item: from L2, and the part that a B larger than L2 adds."""
    size = itemsize(p.b_dtype)
    nbytes = p.nnz * ceil_div(p.n * size, ideal.SECTOR) * ideal.SECTOR
    past = max(0.0, 1 - ideal.L2 / max(1, p.K * p.n * size))
    return ideal.cache_us(nbytes, device), ideal.memory_us(nbytes, device) * past


def transposed_copies(p: Problem, device: roofline.Device) -> tuple[float, float]:
    """Ideal microseconds of the copies of column-major operands to rows or back, and how many there are."""
    b, c = p.b_layout == COL, p.out_layout == COL
    nbytes = (p.K * b + p.M * c) * p.n * itemsize(p.a_dtype) * 2
    return ideal.memory_us(nbytes, device), float(b + c)
