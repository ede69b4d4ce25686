"""Around the compiled loops: values as codes, tiles of B, pieces of work, and C in the dtype asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import threads
from ...arrays import Array, ceil_div
from ...dtypes import VALUE_TYPES, bits
from ...problem import Problem

VECTOR = 64
"""Bytes of a vector of the compiled tiles; a tile of B is one or two of them wide."""
CACHE = 5 << 17
"""Bytes of tiles of B that rows of one item each are multiplied with together: most of an L2 cache."""
PASS = 8 << 20
"""Bytes of B held as tiles at a time."""
SMALL = 1 << 17
"""Multiply-adds that are over before a second thread has started."""
PIECES = 8
"""Pieces of work per thread, so that uneven rows even out."""

_NARROW = frozenset({"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"})


@functools.cache
def _table(name: str, sums: str) -> Array:
    """Every value of a 16- or 8-bit type, by its bits, as ``sums``: read-only, 256 or 65536 entries."""
    row = VALUE_TYPES[name]
    codes = np.arange(1 << (8 * row.numpy.itemsize), dtype=np.int64).astype(row.bits)
    with np.errstate(invalid="ignore"):  # signalling NaNs among all bit patterns
        table = codes.view(row.numpy).astype(np.float64 if sums == "float64" else np.float32).astype(sums)
    return table


@functools.cache
def _no_table(sums: str) -> Array:
    return np.zeros(0, sums)


def sums_dtype(p: Problem) -> np.dtype[Any]:
    """What is added up: int32 for int8 with int8, float64 when anything is float64, else float32."""
    if p.a_dtype == p.b_dtype == "int8":
        return np.dtype(np.int32)
    return np.dtype(np.float64 if "float64" in (p.a_dtype, p.b_dtype, p.out_dtype) else np.float32)


def coded(data: Array, sums: np.dtype[Any]) -> tuple[Array, Array]:
    """(values as the compiled loops take them, their table): no copy."""
    name = data.dtype.name
    if name == "bfloat16":
        codes, table = data.view(np.int16), _no_table(sums.name)
    elif name in _NARROW:
        codes, table = bits(data), _table(name, sums.name)
    else:
        codes, table = data, _no_table(sums.name)
    return fixed(codes)[0], fixed(table)[0]


def fixed(*arrays: Array) -> tuple[Array, ...]:
    """Read-only views: arrays from files are read-only, others are not, and numba would compile for both."""
    views = tuple(a.view() for a in arrays)
    for v in views:
        v.flags.writeable = False
    return views


def widened(x: Array, sums: np.dtype[Any], into: Array) -> None:
    """Write x, any value type and strides, into an array of the sums' type; exact."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        into[...] = x if x.dtype.itemsize > 1 else np.take(_table(x.dtype.name, sums.name), x.view(np.uint8))


def store(sums: Array, out: Array) -> None:
    """Round sums to the dtype of ``out``, once; overflow gives inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = sums


@dataclass(frozen=True)
class Work:
    """A matrix made ready for its compiled loop.

    loop(lo, hi, target) computes units lo .. hi-1; a unit is ``rows`` rows. ``ends`` int[units+1] are the items
    before each unit, to share them out evenly; None: all units cost the same.
    """

    loop: Callable[[int, int, Any], None]
    units: int
    rows: int
    items: int
    ends: Array | None = None
    workspace: int = 0
    costly: bool = False
    """Decoding takes about as long as a tile: more of them share it, though they overflow the L2 cache a little."""

    def pieces(self, count: int) -> list[int]:
        """Unit bounds [0, .., units] of at most ``count`` pieces with about the same number of items."""
        count = max(1, min(count, self.units))
        if self.ends is None:
            return [self.units * i // count for i in range(count + 1)]
        # Every unit costs something even without items: it is written.
        cost = self.ends + np.arange(self.units + 1) * max(1, self.items // max(1, 4 * self.units))
        at = np.searchsorted(cost, cost[-1] * np.arange(1, count) / count)
        return [0, *sorted({int(i) for i in at} - {0, self.units}), self.units]


def multiply(work: Work, target: Callable[..., Any], B: Array, out: Array, sums: np.dtype[Any]) -> None:
    """out[M, N] = A @ B by ``work``, in passes of a few tiles of B."""
    (M, N), K = out.shape, B.shape[0]
    lanes = VECTOR // sums.itemsize
    vectors = min(2, ceil_div(N, lanes))
    width = vectors * lanes
    tiles = ceil_div(N, width)
    threads_used = threads.cores() if work.items * tiles * width > SMALL else 1
    bounds = work.pieces(PIECES * threads_used if threads_used > 1 else 1)

    tile_bytes = max(1, K) * width * sums.itemsize
    # B as it stands serves when its rows are read so seldom that putting them into tiles would cost as much, and when
    # a tile would not stay in any cache: then a long row is read with fewer misses than many short ones.
    plain = B.dtype == sums and B.flags.c_contiguous and N % width == 0
    in_place = plain and (tiles == 1 or work.items < 4 * K or tile_bytes > PASS)
    straight = out.dtype == sums and out.flags.c_contiguous and N % width == 0
    step = tiles if in_place else max(1, PASS // tile_bytes)
    shared = tiles if work.rows >= 4 or in_place else max(1, (1 + work.costly) * CACHE // tile_bytes)

    def tile_pass(first: int) -> None:
        count = min(step, tiles - first)
        n0 = first * width
        if in_place:
            P, stride, ldb = fixed(B.reshape(-1))[0], width, N
        else:
            P, stride, ldb = _tiles(B[:, n0 : n0 + count * width], count, width, sums, threads_used), K * width, width
        columns = out[:, n0 : n0 + count * width]

        def piece(i: int) -> None:
            lo, hi = bounds[i], bounds[i + 1]
            r0, r1 = lo * work.rows, min(M, hi * work.rows)
            if straight:
                work.loop(lo, hi, target(P, stride, ldb, count, shared, vectors, out.reshape(-1), n0, N))
                return
            ldc = count * width
            C = np.empty((r1 - r0) * ldc, sums)
            work.loop(lo, hi, target(P, stride, ldb, count, shared, vectors, C, -r0 * ldc, ldc))
            store(C.reshape(-1, ldc)[:, : columns.shape[1]], columns[r0:r1])

        threads.run(piece, len(bounds) - 1, threads_used)

    for first in range(0, tiles, step):
        tile_pass(first)


def _tiles(B: Array, count: int, width: int, sums: np.dtype[Any], threads_used: int) -> Array:
    """Columns of B as flat tiles [count, K, width] of the sums' type; the last tile is filled up with zeros.

    Tiles are compact because rows of B that lie a power of two apart fall into a few sets of the cache.
    """
    P = _on_large_pages(count * B.shape[0] * width, sums).reshape(count, B.shape[0], width)

    def tile(t: int) -> None:
        part = B[:, t * width : (t + 1) * width]
        P[t, :, part.shape[1] :] = 0
        widened(part, sums, P[t, :, : part.shape[1]])

    threads.run(tile, count, threads_used)
    return fixed(P.reshape(-1))[0]


def _on_large_pages(size: int, dtype: np.dtype[Any]) -> Array:
    """A flat uninitialised array, from 1 MB on at a multiple of 2 MB.

    Rows of B are read in no order: with small pages most reads miss the TLB too (measured: 1.4 times the time at
    N = 512). numpy asks for large pages from 4 MB on; what is allocated here to reach that is never touched.
    """
    nbytes = size * dtype.itemsize
    if nbytes < _LARGE_PAGE // 2:
        return np.empty(size, dtype)
    raw = np.empty(nbytes + 2 * _LARGE_PAGE, np.uint8)
    start = -raw.ctypes.data % _LARGE_PAGE
    return raw[start : start + nbytes].view(dtype)


_LARGE_PAGE = 2 << 20


def output_dtypes(p: Problem) -> tuple[str, ...]:
    """What C may be stored as."""
    floats = ("float64", "float32", "float16", "bfloat16")
    return ("int32", *floats) if p.a_dtype == p.b_dtype == "int8" else floats
