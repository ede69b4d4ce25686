"""Operands of the compiled loops: values as codes, tiles of B, pieces of work, and C in its own dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...arrays import threads
from ...arrays.dtypes import VALUE_TYPES, bits
from ...arrays.library import Array, ceil_div
from ...arrays.rounding import rounded_once
from ...limits import check_bytes
from ...products.problem import Problem

VECTOR = 64
"""Bytes of a vector of the compiled tiles; a tile of B is one or two of them wide."""
PASS = 8 << 20
"""Bytes of B that are copied into tiles at a time."""
SMALL = 1 << 24
"""Multiply-adds (0.4-0.7 ms) below which a second thread does not pay: on a virtual machine a sleeping core takes
0.1-0.4 ms to wake."""
PIECES = 8
"""Pieces of work per thread, so that uneven rows even out."""

_NARROW = frozenset({"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"})


@functools.cache
def cache_bytes() -> int:
    """Bytes of tiles of B that all rows are multiplied with before the next tiles are read: half of an L2 cache."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text(encoding="ascii").strip()
        return max(1 << 19, int(text.removesuffix("K")) << 9)
    except (OSError, ValueError):
        return 1 << 19


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
    """The dtype of the sums: int32 for int8 with int8, float64 when any operand is float64, else float32.

    float64, too, for int8 with int8 where sums may be beyond int32 and C holds them.
    """
    if p.a_dtype == p.b_dtype == "int8":
        beyond = p.inner >= 1 << 17 and "float" in p.out_dtype  # 2^17 products of 2^14
        return np.dtype(np.float64 if beyond else np.int32)
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
        out[...] = rounded_once(sums, out.dtype) if sums.dtype == np.float64 else sums


@dataclass(frozen=True)
class Work:
    """A matrix prepared for its compiled loop.

    loop(lo, hi, target) computes units lo .. hi-1; a unit is ``rows`` rows. ``ends`` int[units+1] is the number of
    items before each unit, by which the work is divided; None: all units cost the same.
    """

    loop: Callable[[int, int, Any], None]
    units: int
    rows: int
    items: int
    ends: Array | None = None
    workspace: int = 0
    decoding: int = 0
    """The cost of finding the items, in multiply-adds."""
    with_columns: Callable[[], Work] | None = None
    """Builds the Work of the same matrix with its columns decoded to an array, which pays for many tiles of B."""
    every_tile: bool = False
    """Whether the loop needs all tiles of a pass together, because each value that it reads serves several rows."""
    by_row: bool = False
    """Whether the loop passes single rows to its target, so that B may be narrower than a vector."""
    arrays: tuple[Any, ...] = ()
    """What the loop reads, for another loop over the same arrays."""

    def pieces(self, count: int) -> list[int]:
        """Unit bounds [0, .., units] of at most ``count`` pieces with about the same number of items."""
        count = max(1, min(count, self.units))
        if self.ends is None or count == 1:
            return [self.units * i // count for i in range(count + 1)]
        # Even a unit without items costs something, because its rows of C are written.
        cost = self.ends + np.arange(self.units + 1) * max(1, self.items // max(1, 4 * self.units))
        at = np.searchsorted(cost, cost[-1] * np.arange(1, count) / count)
        return [0, *sorted({int(i) for i in at} - {0, self.units}), self.units]


def multiply_narrow(work: Work, target: Callable[..., Any], B: Array, out: Array, sums: np.dtype[Any]) -> None:
    """out[M, N] = A @ B for a work ``by_row`` and N below the lanes of a vector, padded to a power of two."""
    (M, N), K = out.shape, B.shape[0]
    width = 1 << (N - 1).bit_length()
    if B.dtype == sums and B.flags.c_contiguous and width == N:
        P = fixed(B.reshape(-1))[0]
    else:
        wide = np.empty((K, width), sums)
        wide[:, N:] = 0
        widened(B, sums, wide[:, :N])
        P = fixed(wide.reshape(-1))[0]
    straight = out.dtype == sums and out.flags.c_contiguous and width == N
    C = out if straight else np.empty((M, width), sums)
    threads_used = threads.cores() if work.items * max(4, width) + work.decoding > SMALL else 1
    bounds = work.pieces(PIECES * threads_used if threads_used > 1 else 1)
    to = target(P, width, width, C.reshape(-1), 0, width)
    threads.run(lambda i: work.loop(bounds[i], bounds[i + 1], to), len(bounds) - 1, threads_used)
    if not straight:
        store(C[:, :N], out)


def multiply(work: Work, target: Callable[..., Any], B: Array, out: Array, sums: np.dtype[Any]) -> None:
    """out[M, N] = A @ B by ``work``.

    A thread copies a few tiles of B to memory that only it reads, and multiplies all rows of A with them, so that they
    stay in its cache. Tiles that are left when they do not divide evenly are shared: each thread computes some rows.
    """
    (M, N), K = out.shape, B.shape[0]
    lanes = VECTOR // sums.itemsize
    vectors = min(2, ceil_div(N, lanes))
    width = vectors * lanes
    tiles = ceil_div(N, width)
    threads_used = threads.cores() if work.items * tiles * width + work.decoding > SMALL else 1

    tile_bytes = max(1, K) * width * sums.itemsize
    # B is used as it is when its rows are read so seldom that copying them into tiles would cost as much, and when a
    # tile would not stay in any cache: then reading a long row misses less often than reading many short ones.
    plain = B.dtype == sums and B.flags.c_contiguous and N % width == 0
    in_place = plain and (work.items < 4 * K or tile_bytes > PASS)
    straight = out.dtype == sums and out.flags.c_contiguous and N % width == 0
    step = tiles if in_place else max(1, PASS // tile_bytes)
    shared = tiles if work.every_tile or in_place else max(1, cache_bytes() // tile_bytes)
    if work.with_columns is not None and tiles > shared:
        work = work.with_columns()

    def rows(lo: int, hi: int, first: int, count: int, P: Array, stride: int, ldb: int) -> None:
        """Units lo .. hi-1 with ``count`` tiles from number ``first`` on."""
        n0 = first * width
        if straight:
            work.loop(lo, hi, target(P, stride, ldb, count, shared, vectors, out.reshape(-1), n0, N))
            return
        r0, r1, ldc = lo * work.rows, min(M, hi * work.rows), count * width
        C, columns = np.empty((r1 - r0) * ldc, sums), out[:, n0 : n0 + ldc]
        work.loop(lo, hi, target(P, stride, ldb, count, shared, vectors, C, -r0 * ldc, ldc))
        store(C.reshape(-1, ldc)[:, : columns.shape[1]], columns[r0:r1])

    def alone(group: int) -> None:
        first = group * shared
        count = min(shared, tiles - first)
        with room(count * K * width, sums) as P:
            fill(P, B[:, first * width : (first + count) * width], width, 1)
            rows(0, work.units, first, count, P, K * width, width)

    def together(first: int, count: int, P: Array, stride: int, ldb: int) -> None:
        groups = ceil_div(count, shared)
        bounds = work.pieces(ceil_div(PIECES * threads_used, groups) if threads_used > 1 else 1)

        def piece(i: int) -> None:
            at, p = i // (len(bounds) - 1) * shared, i % (len(bounds) - 1)
            rows(bounds[p], bounds[p + 1], first + at, min(shared, count - at), P[at * stride :], stride, ldb)

        threads.run(piece, groups * (len(bounds) - 1), threads_used)

    if in_place:
        together(0, tiles, fixed(B.reshape(-1))[0], width, N)
        return
    own = 0 if work.every_tile else ceil_div(tiles, shared) // threads_used * threads_used
    threads.run(alone, own, threads_used)
    for first in range(own * shared, tiles, step):
        count = min(step, tiles - first)
        with room(count * K * width, sums) as P:
            fill(P, B[:, first * width : (first + count) * width], width, threads_used)
            together(first, count, P, K * width, width)


def fill(P: Array, B: Array, width: int, threads_used: int) -> None:
    """Copy the columns of B [K, N] to P as tiles [tiles, K, width] of P's type; the last tile is padded with zeros.

    Tiles are contiguous because rows of B that are a power of two apart would share a few sets of the cache.
    """
    tiles = P.reshape(-1, B.shape[0], width) if P.size else P

    def tile(t: int) -> None:
        part = B[:, t * width : (t + 1) * width]
        tiles[t, :, part.shape[1] :] = 0
        widened(part, P.dtype, tiles[t, :, : part.shape[1]])

    threads.run(tile, len(tiles), threads_used)


_LARGE_PAGE = 2 << 20
_free: dict[int, list[Array]] = {_LARGE_PAGE: [], 4 * _LARGE_PAGE: []}
"""Size in bytes -> free buffers for tiles. One of the smaller size is kept for each core, and one of the larger."""


@contextmanager
def room(size: int, dtype: np.dtype[Any]) -> Iterator[Array]:
    """A flat uninitialised array for tiles, on large pages.

    Rows of B are read in no order: with small pages most reads miss the TLB too (measured: 1.7 cycles for an item of 64
    bytes from large pages, 5 from small ones). numpy requests large pages for arrays of 4 MB and more, so more is
    allocated than is used. Buffers are used again because the system clears every new page.
    """
    nbytes = size * dtype.itemsize
    pooled = next((bound for bound in _free if nbytes <= bound), None)
    try:
        raw = _free[pooled].pop() if pooled else _on_large_pages(nbytes)
    except IndexError:
        raw = _on_large_pages(pooled or 0)
    try:
        yield raw[:nbytes].view(dtype)
    finally:
        if pooled and len(_free[pooled]) < (threads.cores() if pooled == _LARGE_PAGE else 1):
            _free[pooled].append(raw)


def _on_large_pages(nbytes: int) -> Array:
    check_bytes(nbytes, "tiles of a product on the CPU")
    raw = np.empty(nbytes + 2 * _LARGE_PAGE, np.uint8)
    start = -raw.ctypes.data % _LARGE_PAGE
    return raw[start : start + nbytes]


def output_dtypes(p: Problem) -> tuple[str, ...]:
    """The dtypes that C may have."""
    floats = ("float64", "float32", "float16", "bfloat16")
    return ("int32", *floats) if p.a_dtype == p.b_dtype == "int8" else floats
