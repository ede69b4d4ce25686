"""What the launchers share whose blocks keep some columns of B, all K rows of them, in shared memory: few columns, one
launch, any layouts. The kernels' side is include/spformat/column_panel.cuh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ....arrays.library import ceil_div
from ....products.ideal import SECTOR, b_alignment, load_us
from ....products.problem import COL, ROW, Problem, itemsize
from ....products.roofline import Device
from . import jit
from .launch import MAX_GRID_Y, Bound, Launch, Operands, Prepare

TAIL = "PPiqqqPdd"
"""The types of the last arguments: B, C, columns, distance between lines of B, both of C, bias, alpha, beta."""
WORD = 16
"""Bytes of a row of B that a lane loads at once, at most."""
PREFETCHED = 32 << 20
"""Bytes of A up to which a kernel asks for all of it in L2 at its start."""


def smem(columns: int, p: Problem) -> int:
    """bytes: ``columns`` columns of B."""
    return p.K * columns * itemsize(p.b_dtype)


def single_us(columns: int, p: Problem, device: Device) -> float:
    """Ideal time of one multiprocessor to load ``columns`` columns of B by single elements, as if each were a sector.

    0 for a column-major B, and where every row of B starts on a word and is a whole number of words.
    """
    size = itemsize(p.b_dtype)
    word = min(columns * size, WORD)
    if p.b_layout != ROW or p.n == 1 or (b_alignment(p) >= word and p.n * size % word == 0):
        return 0.0
    return load_us(p.K * columns * SECTOR, device)


def by_layout(
    p: Problem, archs: tuple[str, ...], source: str, name: str, signature: Sequence[Any], fixed: Sequence[Any],
    threads: int, smem: int, waits: bool = False,
) -> Callable[[bool], Launch]:  # fmt: skip
    """The launch of a kernel for column-major B (True) and for row-major B, compiled when it is first asked for.

    name: in C++, up to the last two template arguments, which are this layout and whether there is an epilogue.
    signature, fixed: without TAIL, and the values that are known. waits: as of ``Launch``.
    """
    arch = jit.architecture(p.sm or 80, archs)

    @functools.lru_cache(maxsize=2)
    def launch(by_columns: bool) -> Launch:
        instance = f"{name}, {by_columns}, {p.epilogue}>".replace("True", "true").replace("False", "false")
        function = jit.load(source, instance, arch, p.device_id, smem)
        return Launch(function, (*signature, *TAIL), fixed, threads, smem, waits)

    return launch


def over_panels(
    p: Problem,
    columns: int,
    at_once: int,
    blocks: int,
    variant: Callable[[bool], Launch],
    workspace: Callable[[Operands, int, int], tuple[Any, ...]] = lambda o, n, panels: (),
) -> Prepare:
    """The ``Prepare`` of a plan: a grid of at most ``blocks`` blocks for every ``columns`` columns of C.

    at_once: blocks that run at a time on the device. variant(by_columns): the launch for a layout of B, whose signature
    ends in what workspace(operands, columns, panels) gives, and TAIL.
    """
    b_size, out_size = itemsize(p.b_dtype), itemsize(p.out_dtype)
    b_col, c_col = p.b_layout == COL, p.out_layout == COL
    variant(b_col or p.n == 1)  # compile this variant now, and the other at the first call that needs it

    def prepare(o: Operands) -> list[Bound]:
        by_columns = b_col or (o.n == 1 and o.ldb == 1)  # a contiguous vector is both
        c_row, c_step = (1, o.ldc) if c_col else (o.ldc, 1)
        calls = []
        for first in range(0, o.n, MAX_GRID_Y * columns):
            n = min(o.n - first, MAX_GRID_Y * columns)
            panels = ceil_div(n, columns)
            b = o.b + first * b_size * (o.ldb if by_columns else 1)
            c = o.c + first * out_size * c_step
            tail = *workspace(o, n, panels), b, c, n, o.ldb, c_row, c_step, o.bias, o.alpha, o.beta
            grid = max(1, min(blocks, at_once // panels)), panels, 1
            calls.append(variant(by_columns).bind(grid, o.stream, *tail))
        return calls

    return prepare
