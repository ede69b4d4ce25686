"""Copies of B and C in another layout, for kernels that are slow with theirs.  Kernel: copy_lines.cu.

A row-major operand whose rows do not start on 16-byte boundaries is loaded element by element by every kernel, cuBLAS's
among them. A copy whose lines are aligned costs one pass over the operand, which moves 16 bytes at a time whatever the
alignment. A copy in the other layout costs a little more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....arrays.library import ceil_div, round_up
from ....products.plan import Plan, nothing
from ....products.problem import COL, PITCH, ROW, Problem, itemsize, pitch_of
from . import jit
from .c_types import WORDS
from .device_plan import device_plan
from .epilogue import launches_of
from .launch import Bound, Call, Launch, Operands, one_after_another
from .scratch import Scratch
from .transpose import Transpose, grid

ARCHS = ("sm_80",)
THREADS, UNIT = 256, 16
EACH = (1, 4)
"""Units of a thread: few where there are few, so that more of them load at once."""
MANY = 1 << 17
"""Units from which on there are many."""
MOST_UNITS = 1 << 32
"""Units of a group of lines are counted in 32 bits."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(f"copy_lines<{word}, {each}>" for word in WORDS.values() for each in EACH)


class CopyLines:
    """target[lines, along] = source[lines, along], both with consecutive elements and a distance between lines."""

    def __init__(self, size: int, p: Problem) -> None:
        self._launches = {each: self._loaded(size, each, p) for each in EACH}
        self._size = size

    @staticmethod
    def _loaded(size: int, each: int, p: Problem) -> Launch:
        name, arch = f"copy_lines<{WORDS[size]}, {each}>", jit.architecture(p.sm or 80, ARCHS)
        return Launch(jit.load("runtime/copy_lines.cu", name, arch, p.device_id), "PPiiiqqii", (), THREADS, waits=True)

    def bind(
        self, stream: int, source: int, target: int, lines: int, along: int, ld: int, ld_target: int, fill: int
    ) -> Bound:
        """The launch for two addresses. fill: elements that a line of the target gets, zeros behind ``along``."""
        inside = target % UNIT or ld_target * self._size % UNIT  # a line of the target may start between two units
        units = max(1, ceil_div(fill * self._size, UNIT) + bool(inside))
        each = EACH[lines * units >= MANY]
        group = max(1, min(lines, (MOST_UNITS - each * THREADS) // units))  # lines
        grid = ceil_div(group * units, each * THREADS), ceil_div(lines, group), 1
        return self._launches[each].bind(grid, stream, source, target, lines, group, along, ld, ld_target, fill, units)


Copy = Callable[[int, int, int, int, int, int], Bound]
"""(stream, source, target, N, distance between the source's lines, between the target's) -> the copy."""


def copy_of(rows: int, size: int, source: str, target: str, p: Problem, fills: bool = False) -> Copy:
    """The copy of a matrix [rows, N] from one layout to another. fills: zeros up to the next line of the target."""
    if source != target:
        transpose = Transpose(size).launch(p)

        def turned(stream: int, at: int, to: int, n: int, ld: int, ld_to: int) -> Bound:
            lines, along = (n, rows) if source == COL else (rows, n)
            return transpose.bind(
                grid(lines, along, size), stream, at, to, lines, along, ld, ld_to, ld_to if fills else lines
            )

        return turned
    copy = CopyLines(size, p)

    def same(stream: int, at: int, to: int, n: int, ld: int, ld_to: int) -> Bound:
        lines, along = (n, rows) if source == COL else (rows, n)
        return copy.bind(stream, at, to, lines, along, ld, ld_to, ld_to if fills else along)

    return same


def with_copies(
    name: str, plan: Plan, p: Problem, tile: str, purpose: str, workspace: int, *, copies_b: bool, copies_c: bool
) -> Plan:
    """A plan for ``p`` from one for a problem whose B, C or both have other layouts or aligned lines.

    If both are copied to rows, the inner product has the columns behind N up to a multiple of ``PITCH`` as well. Those
    of B are zero: what memory held before may be infinite, and kernels compute sums that are not finite again, one by
    one. Those of C are not copied back. The copies lie in memory that plans share for ``purpose``: at most
    ``workspace`` bytes of it.
    """
    q, inner = plan.problem, launches_of(plan)
    b_size, c_size = itemsize(p.b_dtype), itemsize(q.out_dtype)
    copy_b = copy_of(p.inner, b_size, p.b_layout, q.b_layout, p, fills=True) if copies_b else None
    copy_c = copy_of(p.rows, c_size, q.out_layout, p.out_layout, p) if copies_c else None
    wider = copies_b and copies_c and q.b_layout == q.out_layout == ROW
    memory = Scratch(shared=purpose)

    def prepare(o: Operands) -> Sequence[Call]:
        ldb, b_bytes = _room(p.inner, o.n, q.b_layout, b_size) if copies_b else (o.ldb, 0)
        ldc, c_bytes = _room(p.rows, o.n, q.out_layout, c_size) if copies_c else (o.ldc, 0)
        at = memory.buffer(o.stream, b_bytes + c_bytes)
        moved, before, after = o._replace(n=round_up(o.n, PITCH)) if wider else o, [], []
        if copy_b and p.inner:
            before = [copy_b(o.stream, o.b, at, o.n, o.ldb, ldb)]
            moved = moved._replace(b=at, ldb=ldb)
        if copy_c:
            moved = moved._replace(c=at + b_bytes, ldc=ldc)
            after = [copy_c(o.stream, at + b_bytes, o.c, o.n, ldc, o.ldc)]
        return one_after_another([*before, *inner(moved), *after])

    return device_plan(name, p, prepare, tile, workspace + plan.workspace, plan.reads or nothing)


def _room(rows: int, n: int, layout: str, size: int) -> tuple[int, int]:
    """Distance between the lines of a copy of a matrix [rows, n], in elements; bytes of the copy."""
    lines, along = (n, rows) if layout == COL else (rows, n)
    pitch = pitch_of(along, size)
    return pitch, round_up(lines * pitch * size, 256)
