"""What the launchers share whose kernels end by include/spformat/token_sums.cuh: few columns, K cut into ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ....arrays.library import ceil_div
from ....products.problem import COL, Problem, itemsize
from .launch import Bound, Launch, Operands, Prepare
from .scratch import Scratch

RESERVED = 1024
"""Bytes of shared memory that the driver keeps for itself in a block."""
CLUSTER_SM = 90
"""From this architecture on, thread block clusters add up the ranges of K."""
TAIL = "PPiqqPPPff"
"""The types of the arguments behind those of A: B, C, columns, both distances between lines, partials to beta."""


class Tile(Protocol):
    """``splits`` blocks share K; each computes ``rows`` x ``cols`` sums."""

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def splits(self) -> int: ...


def room(limit: int, blocks: int) -> int:
    """Bytes of shared memory for a block where ``blocks`` run on a multiprocessor, and one alone may have ``limit``."""
    return (limit + RESERVED) // blocks - RESERVED


def clustered(p: Problem, tile: Tile) -> bool:
    """Whether the ranges of K are a cluster; else the block that finishes last adds them."""
    return (p.sm or 0) >= CLUSTER_SM and tile.splits > 1


def launches(p: Problem, tile: Tile, variant: Callable[[bool], Launch]) -> tuple[Prepare, int]:
    """The ``Prepare`` of a plan: a launch for every ``tile.cols`` columns; and the bytes it keeps for sums.

    variant(b_col): the launch for a layout of B, whose signature ends in TAIL.
    """
    tiles, size, b_col, c_col = ceil_div(p.M, tile.rows), itemsize(p.b_dtype), p.b_layout == COL, p.out_layout == COL
    variant(b_col)  # compile this variant now, and the other at the first call that needs it
    shared = tile.splits > 1 and not clustered(p, tile)
    sums, arrivals = Scratch(), Scratch(zeros=True)
    grid, sum_bytes = (tiles, tile.splits, 1), tiles * tile.splits * tile.rows * tile.cols * 4

    def prepare(o: Operands) -> list[Bound]:
        partials = sums.buffer(o.stream, sum_bytes) if shared else 0
        counters = arrivals.buffer(o.stream, tiles * 4) if shared else 0
        rest = partials, counters, o.bias, o.alpha, o.beta
        if o.n == 1 and (b_col or o.ldb == 1):  # a vector: contiguous along K in both layouts
            return [variant(True).bind(grid, o.stream, o.b, o.c, 1, 16 // size, o.ldc, *rest)]
        launch, calls = variant(b_col), []
        for first in range(0, o.n, tile.cols):
            b = o.b + first * size * (o.ldb if b_col else 1)
            c = o.c + first * itemsize(p.out_dtype) * (o.ldc if c_col else 1)
            calls.append(launch.bind(grid, o.stream, b, c, min(tile.cols, o.n - first), o.ldb, o.ldc, *rest))
        return calls

    return prepare, sum_bytes + tiles * 4 if shared else 0
