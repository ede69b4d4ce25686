"""Shared by the kernels that write a sparse matrix as a dense one: where they write and how they are launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ....arrays.library import round_up
from ....products.problem import CACHE_LINE, Problem
from . import jit
from .launch import Bound

Writer = Callable[[int, int, int], list[Bound]]
"""(address of a row-major array [M, ld], ld in elements, stream) -> the launches that write columns 0 .. K-1 of it.

Columns K .. ld-1 may be written (with zeros) or left as they are. A writer keeps the arrays that it reads alive, and
never the Format.
"""

UNIT = 16
"""Bytes of a vector store."""
ENOUGH = 16384
"""Warps that keep every multiprocessor of a large GPU busy for several rounds. More warps only add their own cost."""


class Target(NamedTuple):
    """The device that a kernel is compiled for."""

    arch: str
    device_id: int

    @classmethod
    def of(cls, p: Problem) -> Target:
        """The device of a problem."""
        return cls(jit.architecture(p.sm or 0, ()), p.device_id)


def leading_dimension(K: int, itemsize: int) -> int:
    """Elements between rows of a dense copy of [M, K]: rows start on 16 bytes, long ones on cache lines."""
    align = (CACHE_LINE if K * itemsize >= 8 * CACHE_LINE else UNIT) // itemsize
    return round_up(max(1, K), align)
