"""Rows of a column-major B that a kernel's own blocks write before they gather them.  Device: turned_rows.cuh."""

from __future__ import annotations

from typing import NamedTuple

from ....arrays.library import ceil_div, round_up
from ....products.problem import COL, Problem, itemsize
from .launch import Operands
from .scratch import Scratch
from .tensor_map import aligned

COLUMNS, DEPTH = 32, 64
"""Columns and rows of an item of work, as in the kernel."""
SIGNATURE = "PqP"
"""The types of ``Rows.rest``."""
NOTHING = (0, 0, 0)
"""The same arguments of a launch whose rows are there."""


class Rows(NamedTuple):
    """Rows that a launch writes and reads: their address, the bytes between them, further arguments, items of work."""

    address: int
    pitch: int
    rest: tuple[int, int, int]
    items: int


class TurnedRows:
    """The workspaces of a plan for the rows of a B [K, N] of 16-bit values."""

    def __init__(self, K: int) -> None:
        self._K = K
        self._rows, self._words = Scratch(), Scratch(zeros=True)

    @staticmethod
    def suit(p: Problem) -> bool:
        """Whether B may be such an operand, as far as a problem says: column-major, with whole units of 16 bytes."""
        return p.b_layout == COL and itemsize(p.b_dtype) == 2 and p.K % 8 == 0 and p.K > 0

    def of(self, o: Operands, panel: int) -> Rows | None:
        """The rows of a column-major B; None where its lines do not start on 16-byte boundaries.

        panel: columns of a tile, a multiple of COLUMNS.
        """
        pitch = 2 * round_up(o.n, 8)
        if not aligned(o.b, o.ldb, 2) or pitch >= 1 << 31:
            return None
        to = self._rows.buffer(o.stream, self._K * pitch)
        words = self._words.buffer(o.stream, 4 * (2 + ceil_div(o.n, panel)))
        items = ceil_div(o.n, COLUMNS) * ceil_div(self._K, DEPTH)
        return Rows(to, pitch, (o.b, o.ldb, words), items)
