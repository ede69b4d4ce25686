"""The uses of a list of decoded items. The loop of every format works with each of these targets.

``Target``    C = A @ B: rows of B are gathered by column, and a row of C is summed in registers.
``Narrow``    the same for a B narrower than a vector, in loops that decode a row at a time.
``Scatter``   C = A^T @ B: a row of B stays in registers and is added, times a value, to the row of C of each column.
``Panel``     the items are written to their places in a dense array of a few rows of A.

numba compiles a loop once for each kind of target that it is called with.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from numba.core import types
from numba.extending import overload

from ...formats.fast.numba_cache import compiled
from .tiles import NARROW, OCT, PAIR, QUAD, SCATTER_PAIR, SCATTER_QUAD, SCATTER_SINGLE, SINGLE, VECTOR

Array = Any


class Target(NamedTuple):
    """B and C of a product A @ B, in tiles that are ``vectors`` * 64 bytes wide."""

    P: Array
    """Flat; B[k, n] of tile t is P[t*stride + k*ldb + n]."""
    stride: int
    ldb: int
    tiles: int
    group: int
    """Tiles multiplied while a list is at hand."""
    vectors: int
    C: Array
    """Flat; C[i, n] of tile t is C[c0 + i*ldc + t*width + n]."""
    c0: int
    ldc: int


class Narrow(NamedTuple):
    """B and C of a product A @ B with 1, 2, 4 or 8 columns: a single tile."""

    P: Array
    """Flat; B[k, n] is P[k*ldb + n]."""
    ldb: int
    width: int
    C: Array
    """Flat; C[i, n] is C[c0 + i*ldc + n]."""
    c0: int
    ldc: int
    tiles: int = 1
    group: int = 1


class Scatter(NamedTuple):
    """B and C of a product A^T @ B, in tiles that are ``vectors`` * 64 bytes wide."""

    P: Array
    """Flat; B[i, n] of tile t is P[b0 + t*stride + i*ldb + n], i the row of A."""
    b0: int
    stride: int
    ldb: int
    tiles: int
    group: int
    """Tiles multiplied while a list is at hand."""
    vectors: int
    C: Array
    """Flat, with the sums so far; C[k, n] of tile t is C[t*span + k*width + n], k the column of A."""
    span: int


class Panel(NamedTuple):
    """A dense array to which the items of A are written; its other elements are not changed."""

    P: Array
    """Flat; A[i, k] is P[p0 + i*K + k]."""
    p0: int
    K: int
    tiles: int = 1
    group: int = 1


@compiled
def _gather(to: Target, t0: int, t1: int, i: int, h: int, first: bool, vals: Array, v: int, cols: Array,
            j: int, count: int) -> None:  # fmt: skip
    """C[i .. i+h, tiles t0 .. t1] (+)= vals[v + x*h + r] * B[cols[j+x]], x < count."""
    lanes = VECTOR // to.P.itemsize
    for t in range(t0, t1):
        b, c = t * to.stride, to.c0 + i * to.ldc + t * to.vectors * lanes
        r = 0
        if to.vectors == 2:
            while r + 8 <= h:
                OCT(to.C, c + r * to.ldc, to.ldc, first, vals, v + r, h, cols, j, count, to.P, b, to.ldb)
                r += 8
        while r + 4 <= h:
            for k in range(to.vectors):
                QUAD(to.C, c + r * to.ldc + k * lanes, to.ldc, first, vals, v + r, h, cols, j, count,
                     to.P, b + k * lanes, to.ldb)  # fmt: skip
            r += 4
        while r < h:
            if to.vectors == 2:
                PAIR(to.C, c + r * to.ldc, to.ldc, first, vals, v + r, h, cols, j, count, to.P, b, to.ldb)
            else:
                SINGLE(to.C, c + r * to.ldc, to.ldc, first, vals, v + r, h, cols, j, count, to.P, b, to.ldb)
            r += 1


N1, N2, N4, N8 = (NARROW[width] for width in (1, 2, 4, 8))


@compiled
def _gather_narrow(to: Narrow, i: int, first: bool, vals: Array, v: int, cols: Array, j: int, count: int) -> None:
    """C[i] (+)= vals[v + x] * B[cols[j+x]], x < count."""
    c = to.c0 + i * to.ldc
    if to.width == 1:
        N1(to.C, c, to.ldc, first, vals, v, 1, cols, j, count, to.P, 0, to.ldb)
    elif to.width == 2:
        N2(to.C, c, to.ldc, first, vals, v, 1, cols, j, count, to.P, 0, to.ldb)
    elif to.width == 4:
        N4(to.C, c, to.ldc, first, vals, v, 1, cols, j, count, to.P, 0, to.ldb)
    else:
        N8(to.C, c, to.ldc, first, vals, v, 1, cols, j, count, to.P, 0, to.ldb)


@compiled
def _scatter(to: Scatter, t0: int, t1: int, i: int, h: int, vals: Array, v: int, cols: Array, j: int,
             count: int) -> None:  # fmt: skip
    """C[cols[j+x], tiles t0 .. t1] += vals[v + x*h + r] * B[i+r], r < h, x < count."""
    lanes = VECTOR // to.P.itemsize
    ldc = to.vectors * lanes
    for t in range(t0, t1):
        b, c = to.b0 + t * to.stride + i * to.ldb, t * to.span
        r = 0
        while r + 4 <= h:
            for k in range(to.vectors):
                SCATTER_QUAD(to.C, c + k * lanes, ldc, vals, v + r, h, cols, j, count,
                             to.P, b + r * to.ldb + k * lanes, to.ldb)  # fmt: skip
            r += 4
        while r < h:
            if to.vectors == 2:
                SCATTER_PAIR(to.C, c, ldc, vals, v + r, h, cols, j, count, to.P, b + r * to.ldb, to.ldb)
            else:
                SCATTER_SINGLE(to.C, c, ldc, vals, v + r, h, cols, j, count, to.P, b + r * to.ldb, to.ldb)
            r += 1


@compiled
def _write(to: Panel, i: int, h: int, vals: Array, v: int, cols: Array, j: int, count: int) -> None:
    """A[i+r, cols[j+x]] = vals[v + x*h + r], r < h, x < count."""
    for r in range(h):
        row = to.p0 + (i + r) * to.K
        for x in range(count):
            to.P[row + cols[j + x]] = vals[v + x * h + r]


def stripe(to: Any, t0: int, t1: int, i: int, h: int, first: bool, vals: Array, v: int, cols: Array, j: int,
           count: int) -> None:  # fmt: skip
    """Rows i .. i+h-1 share ``count`` columns: vals[v + x*h + r] stands at row i + r, column cols[j+x].

    first: no item of these rows came before. Compiled code only: numba takes the body for the target's type.
    """
    raise NotImplementedError


@overload(stripe)
def _stripe_by_target(
    to: Any, t0: Any, t1: Any, i: Any, h: Any, first: Any, vals: Any, v: Any, cols: Any, j: Any, count: Any
) -> Any:
    def gathered(
        to: Any, t0: Any, t1: Any, i: Any, h: Any, first: Any, vals: Any, v: Any, cols: Any, j: Any, count: Any
    ) -> Any:
        _gather(to, t0, t1, i, h, first, vals, v, cols, j, count)

    def gathered_narrow(
        to: Any, t0: Any, t1: Any, i: Any, h: Any, first: Any, vals: Any, v: Any, cols: Any, j: Any, count: Any
    ) -> Any:
        _gather_narrow(to, i, first, vals, v, cols, j, count)

    def scattered(
        to: Any, t0: Any, t1: Any, i: Any, h: Any, first: Any, vals: Any, v: Any, cols: Any, j: Any, count: Any
    ) -> Any:
        _scatter(to, t0, t1, i, h, vals, v, cols, j, count)

    def written(
        to: Any, t0: Any, t1: Any, i: Any, h: Any, first: Any, vals: Any, v: Any, cols: Any, j: Any, count: Any
    ) -> Any:
        _write(to, i, h, vals, v, cols, j, count)

    kind = to.instance_class if isinstance(to, types.NamedTuple | types.NamedUniTuple) else None
    return {Target: gathered, Narrow: gathered_narrow, Scatter: scattered, Panel: written}.get(cast(Any, kind))
