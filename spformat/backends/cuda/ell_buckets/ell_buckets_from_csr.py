"""CSR to ELL buckets on the device, every array written once.  Kernels: ell_buckets_from_csr.cu.

The host waits once, for the numbers of ELL rows in the buckets; they are the tables of the format.
"""

from __future__ import annotations

import functools
from operator import mul
from sys import modules
from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Array, ceil_div, index_dtype, namespace, round_up
from ..runtime.c_types import INDEX, WORDS
from ..runtime.offsets import tile_sums
from ..runtime.queue import Kernels
from ..runtime.scratch import Words, Workspace, new_arrays
from .ell_buckets_launch import BATCH, THREADS, Widths

SOURCE = "ell_buckets/ell_buckets_from_csr.cu"
TILE_WARPS, TABLE_THREADS = 4, 1024
"""Tiles of a block; threads of the one block that sums. The same in the kernels."""
KERNELS, TILES_OF_ROWS = Kernels(SOURCE, THREADS), Kernels(SOURCE, 32 * TILE_WARPS)
TABLES = Kernels(SOURCE, TABLE_THREADS)
"""The kernels of the file by the threads of their blocks."""
FEW = 2048
"""Counts of all tiles that the last block of the counting kernel adds up; of more, a larger block in another launch."""
COUNTING, PLACING, SUMMING = (*"PPPqiqq", Widths, *"PPiPP"), (*"PPPqiqq", Widths, *"PPP"), (*"Pqi", Widths, *"PP")
"""The parameters of the kernels."""
TILES, COUNTS = 4096, 1 << 16
"""Most tiles of a matrix, and most counts of all tiles. One block sums the counts, so that there must be few."""


class Cut(NamedTuple):
    """How the rows are cut into tiles, one for each warp and part."""

    tiles: int
    rows: int


class Placed(NamedTuple):
    """The arrays and tables of the matrix."""

    rows_per_bucket: tuple[int, ...]
    split_per_bucket: tuple[int, ...]
    row_ids: Array
    indices: Array
    data: Array
    source: Array


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    kinds = (("long long", "int"), ("int", "int"), ("int", "long long"), ("long long", "long long"))
    fill = [_fill(size, idx, ptr, ptr) for size, (ptr, idx) in zip(WORDS, kinds, strict=True)]
    per_pointer = [f for ptr in INDEX.values() for f in (_cut(ptr, "int"), _count(ptr), _place(ptr, "int"))]
    return (*per_pointer, _place("int", "long long"), _cut("int", "long long"), "sum_ell_rows", *fill)


@functools.lru_cache(maxsize=256)
def cut(M: int, parts: int, levels: int) -> Cut:
    """The tiles of M > 0 rows: so many that they keep a device busy, and not too many to sum their counts."""
    most = max(1, min(ceil_div(TILES, parts), COUNTS // (2 * levels * parts)))
    rows = round_up(ceil_div(M, most), 32)
    return Cut(ceil_div(M, rows), rows)


def ell_buckets_from_csr(
    shape: tuple[int, int], indptr: Array, indices: Array, data: Array, parts: int, widths: tuple[int, ...]
) -> Placed:
    """The arrays and tables of ELLBuckets for an ordered CSR of CuPy arrays that stores something."""
    return placed(
        shape, Items(indptr, indices, data, indptr.dtype, indices.dtype, data.dtype, data.size), parts, widths
    )


class Items(NamedTuple):
    """The arrays of an ordered CSR, or their addresses, with their types."""

    indptr: Any
    indices: Any
    data: Any
    pointer: np.dtype[Any]
    column: np.dtype[Any]
    value: np.dtype[Any]
    nnz: int


def placed(shape: tuple[int, int], csr: Items, parts: int, widths: tuple[int, ...]) -> Placed:
    """``ell_buckets_from_csr``. What the addresses belong to must be kept until it returns."""
    cuda, empty = modules["cupy"].cuda, modules["cupy"].empty
    indptr, indices, data, pointer, column, value, nnz = csr
    M, ptr_size, idx_size = shape[0], pointer.itemsize, column.itemsize
    p = _passes(shape, parts, widths, ptr_size)
    # With one part the kernels need neither of these.
    cuts, split = (empty((parts - 1, M), pointer), empty(M, np.uint8)) if parts > 1 else (None, None)
    if parts > 1:
        args = (indptr, indices, cuts, split, M, parts, ceil_div(shape[1], parts), widths[-1])
        KERNELS.queue(_cut(INDEX[ptr_size], INDEX[idx_size]), "PPPPqiqi", ceil_div(M, 32), *args)
    # A segment of n items becomes at most n / widest + 1 ELL rows.
    most, buckets = parts * M + nnz // widths[-1], p.buckets
    work = Workspace(*p.room, 2 * most * ptr_size)
    (starts, tables, spans), counts = work.places, Words.taken(2 * buckets)
    segments = (indptr, cuts, split, M, parts, *p.cut, p.widths)
    summed = (tile_sums(0), buckets, tables, counts.address) if p.few else (0, 0, 0, 0)
    TILES_OF_ROWS.queue(p.counting, COUNTING, p.blocks, *segments, starts, *summed)
    if not p.few:
        TABLES.queue("sum_ell_rows", SUMMING, 1, starts, p.cut.tiles, buckets, p.widths, tables, counts.address)
    stream = cuda.get_current_stream()
    source = index_dtype(nnz - 1)  # while the kernel runs
    fill = _fill(value.itemsize, INDEX[idx_size], INDEX[source.itemsize], INDEX[ptr_size])
    stream.synchronize()  # synchronize!
    rows, split_rows = counts.words[:buckets], counts.words[buckets : 2 * buckets]
    counts.give_back()
    R, S = sum(rows), sum(map(mul, rows, p.all_widths))
    row_ids, *out = new_arrays(((R,), p.row_ids), ((S,), column), ((S,), value), ((S,), source))
    TILES_OF_ROWS.queue(p.placing, PLACING, p.blocks, *segments, starts, row_ids, spans)
    KERNELS.queue(fill, "PPPPiqPPP", ceil_div(S, THREADS * BATCH), indices, data, spans, tables, buckets, S, *out)
    return Placed(tuple(rows), tuple(split_rows), row_ids, *out)


class _Passes(NamedTuple):
    """What the kernels need and the shape, the params and the types of indices decide."""

    buckets: int
    all_widths: tuple[int, ...]
    widths: bytes
    cut: Cut
    blocks: int
    few: bool
    """Whether the counting kernel sums its counts itself."""
    room: tuple[int, int]
    """Bytes of the first ELL rows of tiles, and of the tables."""
    row_ids: np.dtype[Any]
    counting: str
    placing: str


@functools.lru_cache(maxsize=256)
def _passes(shape: tuple[int, int], parts: int, widths: tuple[int, ...], ptr_size: int) -> _Passes:
    M, levels, ptr, row_ids = shape[0], len(widths), INDEX[ptr_size], index_dtype(shape[0] - 1)
    buckets, c = parts * levels, cut(M, parts, levels)
    groups = 2 * buckets * c.tiles
    return _Passes(
        buckets, widths * parts, Widths.of(widths), c, ceil_div(parts * c.tiles, TILE_WARPS), groups <= FEW,
        (8 * groups, 24 * (buckets + 1)), row_ids, _count(ptr), _place(ptr, INDEX[row_ids.itemsize]),
    )  # fmt: skip


def placed_none(shape: tuple[int, int], csr: Items, parts: int, widths: tuple[int, ...]) -> Placed:
    """What ``placed`` returns for a matrix that stores nothing; arrays may be numpy's, too."""
    xp = modules["cupy"] if isinstance(csr.data, int) else namespace(csr.data)
    empty, none = xp.empty, (0,) * (parts * len(widths))
    row_ids, source = empty(0, index_dtype(shape[0] - 1)), empty(0, index_dtype(-1))
    return Placed(none, none, row_ids, empty(0, csr.column), empty(0, csr.value), source)


@functools.cache
def _cut(ptr: str, idx: str) -> str:
    return f"cut_rows_at_parts<{ptr}, {idx}>"


@functools.cache
def _count(ptr: str) -> str:
    return f"count_ell_rows<{ptr}>"


@functools.cache
def _place(ptr: str, row: str) -> str:
    return f"place_ell_rows<{ptr}, {row}>"


@functools.cache
def _fill(itemsize: int, idx: str, source: str, ptr: str) -> str:
    return f"fill_ell_slots<{WORDS[itemsize]}, {idx}, {source}, {ptr}>"
