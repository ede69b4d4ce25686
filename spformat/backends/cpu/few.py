"""Products with at most ``times.FEW`` columns of B, for which the arrays of A are most of what is read.

The loops in ``few_loops`` take as many values of A at once as fill a vector, and a matrix that does not divide into
such vectors goes through the loops for any number of columns. 8-bit floats do, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...arrays.library import Array, ceil_div, round_up
from ...formats.bitmask import Bitmask
from ...formats.bsr import BSR
from ...formats.csr import CSR
from ...formats.dbsr import DBSR
from ...formats.ell_buckets import ELLBuckets
from ...formats.meta_orders import meta_places
from ...formats.sr_bcrs import SRBCRS
from ...formats.two_four import TwoFour
from ...formats.vector_nm import VectorNM
from ...limits import check_bytes
from . import team
from .board import PIECES
from .operands import VECTOR, Work, fixed, store, widened
from .times import FEW_SMALL, ITEM, turn

LEAST = 4
"""Fewest values that are worth a vector, and fewest rows that are worth gathering rows of B for them."""
APART = 16
"""Columns of X beyond those of A: lines a power of two apart would share a few sets of the cache."""


@dataclass(frozen=True)
class Loop:
    """A compiled loop and what it needs: loop(lo, hi, thread, .., integers, numbers, *arrays) computes some units."""

    run: Callable[..., None]
    """Of ``team_loops.shared``."""
    arrays: tuple[Any, ...]
    integers: int = 0
    """The int64 numbers that a thread needs beside its operands."""
    numbers: Callable[[int, int], int] = lambda columns, units: 0
    """(columns of B, most units of a piece) -> the numbers of the type of the sums that a thread needs."""


@dataclass(frozen=True)
class Few:
    """A matrix prepared for few columns of B.

    There are two kinds of loops. ``along_rows``: a lane is an item of A (``few_loops``), X[n, k] = B[k, n].
    ``along_columns``: a lane is a column of B (``column_loops``), which pays from ``turn`` columns on.
    """

    units: int
    rows: int
    """Rows of a unit."""
    columns: int
    """The numbers of a column of B that a loop may read, those past K zero."""
    cost: int
    """Multiply-adds that take as long on one core as a product with one column."""
    along_rows: Loop | None
    along_columns: Callable[[int], Loop] | None = None
    """By the width to which B is padded, a power of two."""
    turn: int = 1
    workspace: int = 0
    """Bytes kept beside the arrays of the matrix."""
    cut: Callable[[int], list[int]] | None = None
    """(pieces) -> bounds of about the same number of items; None: all units cost the same."""
    pieces: int = PIECES
    """Pieces of work per thread, at most PIECES."""
    _bounds: dict[int, Array] = field(default_factory=dict)

    def bounds(self, count: int) -> Array:
        """int64 [0, .., units] of at most ``count`` pieces."""
        known = self._bounds.get(count)
        if known is None:
            count = max(1, min(count, self.units))
            cut = self.cut(count) if self.cut else [self.units * i // count for i in range(count + 1)]
            known = self._bounds[count] = np.array(cut, np.int64)
        return known


def multiply(few: Few, B: Array, out: Array, sums: np.dtype[Any]) -> None:
    """out[M, N] = A @ B for N <= FEW; the order of the sums does not depend on the number of threads."""
    M, N = out.shape
    shape: tuple[int, ...]
    if few.along_columns is not None and few.turn <= N:
        width = 1 << (N - 1).bit_length()
        loop = few.along_columns(width)
        X, shape = fixed(_rows_of_b(B, few.columns, width, sums))[0], (width,)
    else:
        assert few.along_rows is not None
        loop, width = few.along_rows, N
        X = _columns_of_b(B, few.columns, sums)
        shape = X.shape[1], N
    straight = out.dtype == sums and out.flags.c_contiguous and width == N
    C = out if straight else np.empty((M, width), sums)

    flat_x, flat_c = X.reshape(-1), C.reshape(-1)

    def product(used: int) -> tuple[Array, Any]:
        bounds = few.bounds(few.pieces * used if used > 1 else 1)
        integers = np.empty((used, loop.integers), np.int64)
        numbers = np.empty((used, loop.numbers(width, ceil_div(few.units, bounds.size - 1))), sums)
        return bounds, (flat_x, *shape, flat_c, integers, numbers, *loop.arrays)

    team.run(loop.run, 1 + few.cost * max(LEAST, N) // max(1, FEW_SMALL), product)
    if not straight:
        store(C[:, :N], out)


def _rows_of_b(B: Array, rows: int, width: int, sums: np.dtype[Any]) -> Array:
    """B [K, N] itself, or a copy [rows, width] in the type of the sums, padded with zeros."""
    K, N = B.shape
    if B.dtype == sums and (rows, width) == (K, N) and B.flags.c_contiguous and not _address(B) % VECTOR:
        return B
    X = _aligned(rows * width, sums).reshape(rows, width)
    X[K:], X[:, N:] = 0, 0
    widened(B, sums, X[:K, :N])
    return X


def _columns_of_b(B: Array, columns: int, sums: np.dtype[Any]) -> Array:
    """A copy of B^T in the type of the sums, [N, columns + APART], padded with zeros."""
    K, N = B.shape
    check_bytes(N * (columns + APART) * sums.itemsize, "tiles of a product on the CPU")
    X = np.empty((N, columns + APART), sums)
    X[:, K:] = 0
    if N > 1 and B.dtype != sums:  # turned in the same pass, narrow types take three times as long
        wide = np.empty_like(B, sums)
        widened(B, sums, wide)
        X[:, :K] = wide.T
    else:
        widened(B.T, sums, X[:, :K])
    return X


def _address(x: Array) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


def _aligned(count: int, dtype: np.dtype[Any]) -> Array:
    """An uninitialised array that begins with a line of the cache, so that no vector lies in two."""
    check_bytes(count * dtype.itemsize, "tiles of a product on the CPU")
    raw = np.empty(count + VECTOR // dtype.itemsize, dtype)
    start = -_address(raw) % VECTOR // dtype.itemsize
    return raw[start : start + count]


def _lanes(sums: np.dtype[Any], count: int) -> int:
    """The most lanes, a power of two, into which ``count`` values divide; 0 for fewer than LEAST."""
    lanes = VECTOR // sums.itemsize
    while lanes >= LEAST and count % lanes:
        lanes //= 2
    return lanes if lanes >= LEAST else 0


def _values(data: Array) -> Array | None:
    """The stored values as the loops take them, flat; None for types that they do not take."""
    name = data.dtype.name
    if name.startswith("float8") or (name == "float16" and not _converts_float16()):
        return None
    codes = data.view(np.int16) if name == "bfloat16" else data.view(np.uint16) if name == "float16" else data
    return fixed(codes.reshape(-1))[0]


def _shared(loop: Any, name: str) -> Any:
    from .team_loops import shared

    return shared(loop, name)


def _converts_float16() -> bool:
    from ...formats.fast.simd import FEATURES

    return bool(FEATURES & {"f16c", "fullfp16"})


def csr(a: CSR, work: Work, sums: np.dtype[Any]) -> Few | None:
    """CSR. A single column is gathered by the indices, on machines that do so with vectors."""
    from ...formats.fast.simd import WIDE
    from . import column_loops, few_loops

    values = _values(a.data)
    if values is None:
        return None
    arrays, single = (*fixed(a.indptr, a.indices), values), None
    if 4 in WIDE and sums == np.float32 and a.indices.dtype == np.int32:
        single = Loop(_shared(few_loops.csr(16), "csr 16"), arrays)
    return Few(work.units, 1, a.shape[1], ITEM * work.items, single, _by_width(column_loops.csr, "csr", arrays),
               2 if single else 1, cut=work.pieces)  # fmt: skip


def ell_buckets(a: ELLBuckets, work: Work, sums: np.dtype[Any]) -> Few | None:
    """ELL buckets."""
    from . import column_loops

    values = _values(a.data)
    if values is None:
        return None
    loop = _by_width(column_loops.ell_buckets, "ell-buckets", (*work.arrays, values))
    return Few(work.units, 1, a.shape[1], ITEM * work.items, None, loop, cut=work.pieces)


def _by_width(loop: Callable[[int], Any], name: str, arrays: tuple[Any, ...]) -> Callable[[int], Loop]:
    """A loop for each width of the rows of B."""
    return functools.cache(lambda width: Loop(_shared(loop(width), f"{name} columns {width}"), arrays))


def bsr(a: BSR | DBSR, indptr: Array, sums: np.dtype[Any]) -> Few | None:
    """BSR, or DBSR with its pointer spread over all block rows."""
    from . import column_loops, few_loops

    (M, K), (R, width), values = a.shape, a.blocksize, _values(a.data)
    lanes = _lanes(sums, width)
    if values is None or not lanes or R < LEAST:
        return None
    most = int(np.diff(indptr).max(initial=0))
    arrays = (M, R, width, *fixed(indptr, a.indices), values)
    loop = Loop(_shared(few_loops.bsr(lanes), f"bsr {lanes}"), arrays, most)
    needs = most * width, lambda *_: max(column_loops.CHUNK, R * width)
    other = Loop(_shared(column_loops.bsr(lanes), f"bsr columns {lanes}"), arrays, *needs)
    return Few(ceil_div(M, R), R, round_up(K, width), a.stored, loop, lambda _: other, turn(a.name, R))


def sr_bcrs(a: SRBCRS, sums: np.dtype[Any]) -> Few | None:
    """SR-BCRS."""
    from . import column_loops, few_loops

    (M, K), t, g, values = a.shape, a.vector_length, a.stride, _values(a.data)
    lanes = _lanes(sums, g)
    if values is None or not lanes or t < LEAST:
        return None
    most = int(np.diff(a.indptr).max(initial=0))
    starts, ldg = fixed(np.arange(most, dtype=np.int64) * g)[0], most * g
    arrays = (starts, M, K, t, g, *fixed(a.indptr, a.indices), values)
    loop = Loop(_shared(few_loops.sr_bcrs(lanes), f"sr-bcrs {lanes}"), arrays, ldg, lambda N, _: N * ldg)
    needs = ldg, lambda *_: max(column_loops.CHUNK, t * g)
    other = Loop(_shared(column_loops.sr_bcrs(lanes), f"sr-bcrs columns {lanes}"), arrays[1:], *needs)
    return Few(a.tiles, t, K + 1, a.stored, loop, lambda _: other, turn(a.name, t))


def vector_nm(a: VectorNM, sums: np.dtype[Any]) -> Few | None:
    """Vector n:m, plain or packed."""
    from . import few_loops

    (M, K), L, values = a.shape, a.vector_length, _values(a.data)
    lanes = _lanes(sums, L)
    if values is None or not lanes:
        return None
    W, Mp = a.data.shape
    arrays = (M, a.n, a.m, L, *fixed(a.indices), values, Mp)
    run = _shared(few_loops.vector_nm(lanes), f"vector-nm {lanes}")
    loop = Loop(run, arrays, 2 * few_loops.WINDOW, lambda N, units: N * (units * L + lanes))
    # A piece reads a part of every row of values; the shorter the parts, the more pages of memory for the same bytes.
    return Few(ceil_div(M, L), L, max(K, ceil_div(W, a.n) * a.m), a.stored, loop, pieces=1)


def two_four(a: TwoFour, sums: np.dtype[Any]) -> Few | None:
    """2:4 in any meta_order, on machines that pick lanes of two vectors at once."""
    from ...formats.fast.simd import WIDE

    values = _values(a.data)
    if 4 not in WIDE or values is None:
        return None
    from . import few_loops

    (M, K), lanes = a.shape, VECTOR // sums.itemsize
    row_offset, shift, outer, inner = meta_places(a.padded_shape, a.meta_order)
    pair = outer if shift == 0 else inner
    if lanes == 16:  # two words at a time
        shift, outer, inner = (0, 2 * outer, 0) if shift == 0 else (shift - 1, outer, 2 * inner)
    steps = ceil_div(K, 2 * lanes)
    arrays = (values, a.data.shape[1], *fixed(a.meta, row_offset), steps, shift, outer, (1 << shift) - 1, inner, pair)
    loop = Loop(_shared(few_loops.two_four(lanes), f"two-four {lanes}"), arrays)
    return Few(M, 1, steps * 2 * lanes, a.stored, loop)


def bitmask(a: Bitmask, sums: np.dtype[Any]) -> Few | None:
    """Bitmask, on machines that spread the lanes of a vector over the set bits."""
    from ...formats.fast.simd import WIDE

    values = _values(a.data)
    if 4 not in WIDE or values is None:
        return None
    from . import few_loops

    (M, K), lanes, mask = a.shape, VECTOR // sums.itemsize, a.bitmask
    row, copied = round_up(mask.shape[1], lanes // 8), 0
    if row != mask.shape[1]:
        mask = np.pad(mask, ((0, 0), (0, row - mask.shape[1])))
        copied = mask.nbytes
    base = max(0, values.size - lanes)
    tail = np.zeros(2 * lanes, values.dtype)
    tail[: values.size - base] = values[base:]
    safe = int(np.searchsorted(a.indptr[1:], base, side="right")) if base else 0
    arrays = (values, *fixed(tail), base, safe, *fixed(a.indptr, mask.reshape(-1)), row, ceil_div(K, lanes))
    loop = Loop(_shared(few_loops.bitmask(lanes), f"bitmask {lanes}"), arrays)
    return Few(M, 1, round_up(K, lanes), a.nnz, loop, workspace=copied)
