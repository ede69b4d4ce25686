"""CSR to ELL buckets on the device, every array written once.  Kernels: ell_buckets_from_csr.cu.

The host waits once, for the numbers of ELL rows in the buckets; they are the tables of the format.
"""

from __future__ import annotations

import functools
from operator import mul
from typing import NamedTuple

import numpy as np

from ....arrays.library import Array, ceil_div, index_dtype, namespace, round_up
from ..runtime.c_types import INDEX, WORDS, index_type
from ..runtime.offsets import tile_sums
from ..runtime.queue import Kernels
from ..runtime.scratch import Words, Workspace
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
    import cupy

    (M, K), levels, nnz = shape, len(widths), data.size
    part_size, buckets = ceil_div(K, parts), parts * levels
    ptr, idx, by_value = index_type(indptr), index_type(indices), Widths.of(widths)
    # With one part the kernels need neither of these.
    cuts, split = (cupy.empty((parts - 1, M), indptr.dtype), cupy.empty(M, np.uint8)) if parts > 1 else (None, None)
    if parts > 1:
        args = (indptr, indices, cuts, split, M, parts, part_size, widths[-1])
        KERNELS.queue(_cut(ptr, idx), "PPPPqiqi", ceil_div(M, 32), *args)
    c = cut(M, parts, levels)
    # A segment of n items becomes at most n / widest + 1 ELL rows.
    most, groups = parts * M + nnz // widths[-1], 2 * buckets * c.tiles
    work = Workspace(8 * groups, 24 * (buckets + 1), 2 * most * indptr.itemsize)
    (starts, tables, spans), counts = work.places, Words.taken(2 * buckets)
    blocks = ceil_div(parts * c.tiles, TILE_WARPS)
    segments = (indptr, cuts, split, M, parts, c.tiles, c.rows, by_value)
    summed: tuple[int, ...] = (tile_sums(0), buckets, tables, counts.address) if groups <= FEW else (0, 0, 0, 0)
    TILES_OF_ROWS.queue(_count(ptr), COUNTING, blocks, *segments, starts, *summed)
    if groups > FEW:
        TABLES.queue("sum_ell_rows", SUMMING, 1, starts, c.tiles, buckets, by_value, tables, counts.address)
    cupy.cuda.get_current_stream().synchronize()  # synchronize!
    rows, split_rows = counts.words[:buckets], counts.words[buckets : 2 * buckets]
    counts.give_back()
    R = sum(rows)
    S = sum(map(mul, rows, widths * parts))
    row_ids = cupy.empty(R, index_dtype(M - 1))
    name = _place(ptr, index_type(row_ids))
    TILES_OF_ROWS.queue(name, PLACING, blocks, *segments, starts, row_ids, spans)
    out = cupy.empty(S, indices.dtype), cupy.empty(S, data.dtype), cupy.empty(S, index_dtype(nnz - 1))
    KERNELS.queue(
        _fill(data.itemsize, idx, index_type(out[2]), ptr), "PPPPiqPPP", ceil_div(S, THREADS * BATCH),
        indices, data, spans, tables, buckets, S, *out,
    )  # fmt: skip
    return Placed(tuple(rows), tuple(split_rows), row_ids, *out)


def empty(shape: tuple[int, int], indices: Array, data: Array, parts: int, widths: tuple[int, ...]) -> Placed:
    """What ``ell_buckets_from_csr`` returns for a matrix that stores nothing."""
    xp, none = namespace(data), (0,) * (parts * len(widths))
    row_ids, source = xp.empty(0, index_dtype(shape[0] - 1)), xp.empty(0, index_dtype(-1))
    return Placed(none, none, row_ids, xp.empty(0, indices.dtype), xp.empty(0, data.dtype), source)


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
