"""Column-major operands for kernels that gather whole rows: one transposed copy per call.  Kernel: transpose.cu.

A gathered row of a column-major B would be one 32-byte sector per element; a copy costs two passes over B.
"""

from __future__ import annotations

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, round_up
from ....products.problem import COL, Problem
from . import jit
from .c_types import WORDS
from .launch import MAX_GRID_Y, Bound, Launch, Operands, Prepare, one_after_another
from .scratch import Scratch

ARCHS = ("sm_80",)
ALIGN = 8
"""The leading dimension of a copy is a multiple of it, in elements: 16-bit rows then start on 16-byte boundaries."""


class Transpose:
    """target[cols, rows] = source[rows, cols], both row-major with leading dimensions."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        """Bytes of an element: 1, 2, 4 or 8."""

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests."""
        return tuple(f"transpose<{word}>" for word in WORDS.values())

    def launch(self, p: Problem) -> Launch:
        """The kernel for the device of ``p``: (grid, stream, source, target, rows, cols, ld, ld of target, fill).

        Lines of the target get zeros up to element ``fill``, which is at least ``rows``.
        """
        arch = jit.architecture(p.sm or 0, ARCHS)
        function = jit.load("runtime/transpose.cu", f"transpose<{WORDS[self.size]}>", arch, p.device_id)
        return Launch(function, "PPqqqqq", (), 256, waits=True)


def grid(rows: int, cols: int, size: int) -> tuple[int, int, int]:
    """A block for each tile of a source [rows, cols] of elements of ``size`` bytes, as many as a grid may have."""
    side = 64 if size == 2 else 32  # SIDE of the kernel
    return min(ceil_div(cols, side), 1 << 20), min(ceil_div(rows, side), MAX_GRID_Y), 1


def row_major(p: Problem, prepare: Prepare) -> Prepare:
    """``prepare``, which takes row-major B and C, for the layouts of ``p``."""
    turn_b, turn_c = p.b_layout == COL and p.K > 0, p.out_layout == COL
    if not turn_b and not turn_c:
        return prepare
    b_size, c_size = (VALUE_TYPES[t].numpy.itemsize for t in (p.b_dtype, p.out_dtype))
    transpose_b, transpose_c = Transpose(b_size).launch(p), Transpose(c_size).launch(p)
    scratch = Scratch()

    def turned(o: Operands) -> list[Bound]:
        ld = round_up(o.n, ALIGN)
        b_bytes = round_up(p.K * ld * b_size, 256) if turn_b else 0
        at = scratch.buffer(o.stream, b_bytes + (p.M * ld * c_size if turn_c else 0))
        inner, before, after = o, [], []
        if turn_b:
            before = [transpose_b.bind(grid(o.n, p.K, b_size), o.stream, o.b, at, o.n, p.K, o.ldb, ld, o.n)]
            inner = inner._replace(b=at, ldb=ld)
        if turn_c:
            inner = inner._replace(c=at + b_bytes, ldc=ld)
            after = [transpose_c.bind(grid(p.M, o.n, c_size), o.stream, inner.c, o.c, p.M, o.n, ld, o.ldc, p.M)]
        return one_after_another([*before, *prepare(inner), *after])

    return turned
