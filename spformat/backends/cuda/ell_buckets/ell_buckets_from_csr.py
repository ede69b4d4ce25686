"""CSR to ELL buckets on the device, every array written once.  Kernels: ell_buckets_from_csr.cu.

The host waits once, for the numbers of ELL rows in the buckets; they are the tables of the format.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ....arrays.library import Array, ceil_div, index_dtype, namespace, round_up
from ..runtime.expansion import INDEX, Target, index_type
from ..runtime.transpose import WORDS
from .ell_buckets_launch import BATCH, THREADS, Widths, launch, stream

SOURCE = "ell_buckets/ell_buckets_from_csr.cu"
TILE_WARPS, TABLE_THREADS = 4, 1024
"""Tiles of a block; threads of the one block that sums. The same in the kernels."""
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
    part_size, buckets, target, now = ceil_div(K, parts), parts * levels, Target.holding(data), stream()
    ptr, idx, by_value = index_type(indptr), index_type(indices), Widths.of(widths)
    # With one part the kernels need neither of these.
    cuts, split = (cupy.empty((parts - 1, M), indptr.dtype), cupy.empty(M, np.uint8)) if parts > 1 else (None, None)
    if parts > 1:
        args = (indptr.data.ptr, indices.data.ptr, *_addresses(cuts, split), M, parts, part_size, widths[-1])
        launch(SOURCE, _cut(ptr, idx), "PPPPqiqi", target)((ceil_div(M, 32), 1, 1), now, *args)
    c = cut(M, parts, levels)
    starts, tables = cupy.empty(2 * buckets * c.tiles, np.int64), cupy.empty(3 * (buckets + 1), np.int64)
    memory = cupy.cuda.alloc_pinned_memory(16 * buckets)
    counts = np.frombuffer(memory, np.int64, 2 * buckets).reshape(2, buckets)
    grid, signature = (ceil_div(parts * c.tiles, TILE_WARPS), 1, 1), ("P", "P", "P", "q", "i", "q", "q", Widths)
    segments = (indptr.data.ptr, *_addresses(cuts, split), M, parts, c.tiles, c.rows, by_value)
    warps = 32 * TILE_WARPS
    launch(SOURCE, _count(ptr), (*signature, "P"), target, warps)(grid, now, *segments, starts.data.ptr)
    summing = launch(SOURCE, "sum_ell_rows", ("P", "q", "i", Widths, "P", "P"), target, TABLE_THREADS)
    summing((1, 1, 1), now, starts.data.ptr, c.tiles, buckets, by_value, tables.data.ptr, int(memory.ptr))
    cupy.cuda.get_current_stream().synchronize()  # synchronize!

    rows, split_rows = counts.tolist()
    R = sum(rows)
    S = sum(n * w for n, w in zip(rows, widths * parts, strict=True))
    row_ids, spans = cupy.empty(R, index_dtype(M - 1)), cupy.empty((R, 2), indptr.dtype)
    placing = launch(SOURCE, _place(ptr, index_type(row_ids)), (*signature, *"PPP"), target, warps)
    placing(grid, now, *segments, starts.data.ptr, row_ids.data.ptr, spans.data.ptr)
    out = cupy.empty(S, indices.dtype), cupy.empty(S, data.dtype), cupy.empty(S, index_dtype(nnz - 1))
    filling = launch(SOURCE, _fill(data.itemsize, idx, index_type(out[2]), ptr), "PPPPiqPPP", target)
    given = (indices.data.ptr, data.data.ptr, spans.data.ptr, tables.data.ptr, buckets, S)
    filling((ceil_div(S, THREADS * BATCH), 1, 1), now, *given, *_addresses(*out))
    return Placed(tuple(rows), tuple(split_rows), row_ids, *out)


def empty(shape: tuple[int, int], indices: Array, data: Array, parts: int, widths: tuple[int, ...]) -> Placed:
    """What ``ell_buckets_from_csr`` returns for a matrix that stores nothing."""
    xp, none = namespace(data), (0,) * (parts * len(widths))
    row_ids, source = xp.empty(0, index_dtype(shape[0] - 1)), xp.empty(0, index_dtype(-1))
    return Placed(none, none, row_ids, xp.empty(0, indices.dtype), xp.empty(0, data.dtype), source)


def _addresses(*arrays: Any) -> list[int]:
    return [0 if a is None else a.data.ptr for a in arrays]


def _cut(ptr: str, idx: str) -> str:
    return f"cut_rows_at_parts<{ptr}, {idx}>"


def _count(ptr: str) -> str:
    return f"count_ell_rows<{ptr}>"


def _place(ptr: str, row: str) -> str:
    return f"place_ell_rows<{ptr}, {row}>"


def _fill(itemsize: int, idx: str, source: str, ptr: str) -> str:
    return f"fill_ell_slots<{WORDS[itemsize]}, {idx}, {source}, {ptr}>"
