"""Products with at most ``times.FEW`` columns of B, for which the arrays of A are most of what is read.

The loops in ``few_loops`` take as many values of A at once as fill a vector, and a matrix that does not divide into
such vectors goes through the loops for any number of columns. 8-bit floats do, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...arrays import threads
from ...arrays.library import Array, ceil_div, round_up
from ...formats.bitmask import Bitmask
from ...formats.bsr import BSR
from ...formats.dbsr import DBSR
from ...formats.sr_bcrs import SRBCRS
from ...formats.two_four import TwoFour, meta_places
from ...formats.vector_nm import VectorNM
from .operands import VECTOR, fixed, store, widened
from .times import FEW_SMALL

LEAST = 4
"""Fewest values that are worth a vector, and fewest rows that are worth gathering rows of B for them."""
PIECES = 4
"""Pieces of work per thread."""
APART = 16
"""Columns of X beyond those of A: lines a power of two apart would share a few sets of the cache."""


@dataclass(frozen=True)
class Few:
    """A matrix prepared for its loop: loop(lo, hi, X, ldx, N, C) computes units lo .. hi-1 of ``rows`` rows.

    Loops get the room that they need from outside, so that their code allocates nothing (see ``loops.items``).
    """

    loop: Callable[..., None]
    units: int
    rows: int
    columns: int
    """The numbers of a column of B that the loop may read, those past K zero."""
    items: int
    workspace: int = 0
    """Bytes kept beside the arrays of the matrix."""


def multiply(few: Few, B: Array, out: Array, sums: np.dtype[Any]) -> None:
    """out[M, N] = A @ B for N <= FEW; the order of the sums does not depend on the number of threads."""
    (M, N), K = out.shape, B.shape[0]
    ldx = few.columns + APART
    X = np.empty((N, ldx), sums)
    X[:, K:] = 0
    widened(B.T, sums, X[:, :K])
    straight = out.dtype == sums and out.flags.c_contiguous
    C = out if straight else np.empty((M, N), sums)
    flat_x, flat_c = X.reshape(-1), C.reshape(-1)
    used = threads.cores() if few.items * max(LEAST, N) > FEW_SMALL else 1
    count = min(few.units, PIECES * used if used > 1 else 1)

    def piece(i: int) -> None:
        few.loop(few.units * i // count, few.units * (i + 1) // count, flat_x, ldx, N, flat_c)

    threads.run(piece, count, used)
    if not straight:
        store(C, out)


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


def _converts_float16() -> bool:
    from ...formats.fast.simd import FEATURES

    return bool(FEATURES & {"f16c", "fullfp16"})


def bsr(a: BSR | DBSR, indptr: Array, sums: np.dtype[Any]) -> Few | None:
    """BSR, or DBSR with its pointer spread over all block rows."""
    from . import few_loops

    (M, K), (R, width), values = a.shape, a.blocksize, _values(a.data)
    lanes = _lanes(sums, width)
    if values is None or not lanes or R < LEAST:
        return None
    most = int(np.diff(indptr).max(initial=0))
    arrays = (M, R, width, *fixed(indptr, a.indices), values)
    loop = few_loops.bsr(lanes)

    def piece(*given: Any) -> None:
        loop(*given, np.empty(most, np.int64), *arrays)

    return Few(piece, ceil_div(M, R), R, round_up(K, width), a.stored)


def sr_bcrs(a: SRBCRS, sums: np.dtype[Any]) -> Few | None:
    """SR-BCRS."""
    from . import few_loops

    (M, K), t, g, values = a.shape, a.vector_length, a.stride, _values(a.data)
    lanes = _lanes(sums, g)
    if values is None or not lanes or t < LEAST:
        return None
    most = int(np.diff(a.indptr).max(initial=0))
    arrays = (M, K, t, g, *fixed(a.indptr, a.indices), values)
    loop, starts, ldg = few_loops.sr_bcrs(lanes), np.arange(most, dtype=np.int64) * g, most * g

    def piece(lo: int, hi: int, X: Array, ldx: int, N: int, C: Array) -> None:
        loop(lo, hi, X, ldx, N, C, starts, np.empty(ldg, np.int64), np.empty(N * ldg, X.dtype), *arrays)

    return Few(piece, a.tiles, t, K + 1, a.stored)


def vector_nm(a: VectorNM, sums: np.dtype[Any]) -> Few | None:
    """Vector n:m, plain or packed."""
    from . import few_loops

    (M, K), L, values = a.shape, a.vector_length, _values(a.data)
    lanes = _lanes(sums, L)
    if values is None or not lanes:
        return None
    W, Mp = a.data.shape
    arrays = (M, a.n, a.m, L, *fixed(a.indices), values, Mp)
    loop, window = few_loops.vector_nm(lanes), few_loops.WINDOW

    def piece(lo: int, hi: int, X: Array, ldx: int, N: int, C: Array) -> None:
        lds = (hi - lo) * L + lanes  # columns of sums do not share sets of the cache
        room = np.zeros(N * lds, X.dtype), np.empty(window, np.int64), np.empty(window, np.int64)
        loop(lo, hi, X, ldx, N, C, *room, *arrays)

    return Few(piece, ceil_div(M, L), L, max(K, ceil_div(W, a.n) * a.m), a.stored)


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
    loop = few_loops.two_four(lanes)
    return Few(lambda *given: loop(*given, *arrays), M, 1, steps * 2 * lanes, a.stored)


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
    loop = few_loops.bitmask(lanes)
    return Few(lambda *given: loop(*given, *arrays), M, 1, round_up(K, lanes), a.nnz, copied)
