"""Launches of the kernels in include/spformat/expand_rows.cuh, for formats that store their items row by row."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....arrays.library import ceil_div, round_up
from .expansion import ENOUGH, UNIT, Writer
from .launch import Bound, Launch

WARPS, IMAGE = 8, 4096
"""The same as ROW_WARPS and ROW_IMAGE in the header."""
EXTENTS = "qPqqii"
"""Signature from M on: M, x, ld, segments, width, rows."""


class Cut(NamedTuple):
    """How [M, ld] is cut into images, one for each warp: ``rows`` whole rows, or one of ``segments`` parts of a row."""

    segments: int
    width: int
    """Columns of an image."""
    rows: int
    tasks: int

    @property
    def blocks(self) -> int:
        return ceil_div(self.tasks, WARPS)


def cut(M: int, ld: int, itemsize: int) -> Cut:
    """The images for a matrix of that size; M and ld at least 1."""
    line, unit = ld * itemsize, UNIT // itemsize
    if 2 * line > IMAGE:
        segments = ceil_div(line, IMAGE)
        width = round_up(ceil_div(ld, segments), unit)
        segments = ceil_div(ld, width)
        return Cut(segments, width, 1, M * segments)
    rows = 1
    while rows < 32 and 2 * rows * line <= IMAGE and ceil_div(M, 2 * rows) >= ENOUGH:
        rows *= 2
    return Cut(1, ld, rows, ceil_div(M, rows))


def writer(function: Any, fixed: tuple[Any, ...], M: int, itemsize: int) -> Writer:
    """The writer for a compiled kernel. fixed: the kernel's arguments before M; arrays are passed as arrays."""
    launch = Launch(function, "P" * len(fixed) + EXTENTS, (*fixed, M), WARPS * 32)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        if not M:
            return []
        c = cut(M, ld, itemsize)
        return [launch.bind((c.blocks, 1, 1), stream, x, ld, c.segments, c.width, c.rows)]

    return launches
