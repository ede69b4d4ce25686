"""Shared by the kernels that write a sparse matrix as a dense one: where they write and how they are launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ....arrays.library import Array, round_up
from ....products.problem import Problem
from . import jit
from .launch import Bound

Writer = Callable[[int, int, int], list[Bound]]
"""(address of a row-major array [M, ld], ld in elements, stream) -> the launches that write columns 0 .. K-1 of it.

Columns K .. ld-1 may be written (with zeros) or left as they are. A writer keeps the arrays that it reads alive, and
never the Format.
"""

UNIT, LINE = 16, 128
"""Bytes of a vector store and of a cache line."""
INDEX = {4: "int", 8: "long long"}
"""C++ type of an index array, by bytes of an element."""
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

    @classmethod
    def holding(cls, x: Array) -> Target:
        """The device of a CuPy array."""
        return cls(jit.architecture(int(x.device.compute_capability), ()), int(x.device.id))


def leading_dimension(K: int, itemsize: int) -> int:
    """Elements between rows of a dense copy of [M, K]: rows start on 16 bytes, long ones on cache lines."""
    align = (LINE if K * itemsize >= 8 * LINE else UNIT) // itemsize
    return round_up(max(1, K), align)


def write_now(writer: Writer, out: Array) -> None:
    """Fill the CuPy array ``out`` [M, K], C-contiguous, on the current stream. Does not wait for the device."""
    import cupy

    if out.size:
        for launch in writer(out.data.ptr, out.shape[1], int(cupy.cuda.get_current_stream().ptr)):
            launch()


def index_type(x: Any) -> str:
    """C++ type of an index array's elements."""
    return INDEX[x.dtype.itemsize]
