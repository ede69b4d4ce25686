"""Dense 16-bit matrices to 2:4 on the device, and 2:4 of any value type back, in one pass over the bytes.

Kernels: two_four_pack.cu.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div
from ....products.problem import Problem
from ..runtime import jit
from ..runtime.c_types import WORDS
from ..runtime.expansion import Target, Writer
from ..runtime.launch import Bound, Launch
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters
from .two_four_records import TwoFourRecords

SOURCE = "two_four/two_four_pack.cu"
ORDERS = {"logical": "Logical", "ldmatrix": "Ldmatrix", "fragment": "Fragment", "cutlass-sm80": "CutlassSm80"}
ROWS = 32
"""Rows of a block; the format pads to it."""
ALIGN = 16
"""Bytes of a vector load: lines that start on it are read and written eight values at a time, others value by value."""


@dataclass(frozen=True)
class TwoFourPack:
    """A block of ``threads`` turns 32 rows x ``cols`` columns (a multiple of 64)."""

    cols: int = 256
    threads: int = 256

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        packs = [self._pack_instance(t, o, p, a) for t, o, p, a in (
            ("bfloat16", "logical", False, True), ("bfloat16", "ldmatrix", False, False),
            ("float16", "fragment", True, True), ("bfloat16", "cutlass-sm80", True, False),
        )]  # fmt: skip
        unpacks = (2, "ldmatrix", True), (2, "cutlass-sm80", False), (4, "fragment", True), (1, "logical", False)
        return (*packs, *(self._unpack_instance(*u) for u in unpacks))

    def pack(self, x: Array, order: str, prune: bool, data: Array, meta: Array, refused: int) -> None:
        """Queue the launch that fills data [Mp, Kp/2] and meta from x [M, K], all CuPy.

        refused: address of two zeros that the host reads, see the kernel; 0 if ``prune`` and nobody asks.
        """
        blocks, extents = self._grid(data.shape)
        self._kernels.queue(
            self._pack_instance(x.dtype.name, order, prune, _aligned(x)), "PqqPPqqqP", blocks,
            x, *x.shape, data, meta, *extents, refused,
        )  # fmt: skip

    def unpack(self, data: Array, meta: Array, order: str, out: Array) -> None:
        """Queue the launch that fills out [M, K]."""
        blocks, extents = self._grid(data.shape)
        name = self._unpack_instance(data.dtype.itemsize, order, _aligned(out))
        self._kernels.queue(name, "PPPqqqqq", blocks, data, meta, out, *out.shape, *extents)

    def writer(self, data: Array, meta: Array, order: str, M: int, target: Target) -> Writer:
        """The launches that write the first M rows of the matrix stored in data and meta, which must be valid."""
        blocks, extents = self._grid(data.shape)

        @functools.cache
        def launch(aligned: bool) -> Launch:
            function = jit.load(SOURCE, self._unpack_instance(data.dtype.itemsize, order, aligned), *target)
            return Launch(function, "PPPqqqqq", (data, meta), self.threads)

        def launches(x: int, ld: int, stream: int) -> list[Bound]:
            # Columns behind K are padding, zeros that may be written too, so that rows are ``ld`` columns here.
            aligned = ld % 8 == 0 and x % ALIGN == 0
            return [launch(aligned).bind((blocks, 1, 1), stream, x, M, ld, *extents)] if M else []

        return launches

    @property
    def _kernels(self) -> Kernels:
        return _kernels(self.threads)

    def _grid(self, packed: tuple[int, int]) -> tuple[int, tuple[int, int, int]]:
        """(blocks, (strips of rows, words in a row, pieces of columns)) for data of that shape, [Mp, Kp/2]."""
        Kp = 2 * packed[1]
        strips, pieces = packed[0] // ROWS, ceil_div(Kp, self.cols)
        return strips * pieces, (strips, Kp // 16, pieces)

    def _pack_instance(self, dtype: str, order: str, prune: bool, aligned: bool) -> str:
        flags = ", ".join(str(f).lower() for f in (prune, aligned))
        return f"two_four_pack<{value_type(dtype).cuda}, {ORDERS[order]}, {flags}, {self.cols}, {self.threads}>"

    def _unpack_instance(self, size: int, order: str, aligned: bool) -> str:
        return f"two_four_unpack<{WORDS[size]}, {ORDERS[order]}, {str(aligned).lower()}, {self.cols}, {self.threads}>"


BLOCK = TwoFourPack()
"""The block that was fastest on an H200."""


def two_four_pack(
    x: Any, order: str, data: Any, meta: Any, prune: bool = False, counted: bool = True
) -> tuple[int, int, int]:  # fmt: skip
    """Fill ``data`` [Mp, Kp/2] and ``meta`` uint16[Mp*Kp/16] from x [M, K], all CuPy; waits for the device.

    Returns (number of refused groups, the first of them as row * Kp/4 + group, its nonzeros). If any group is refused,
    data and meta must not be used. prune: the first number counts values that are not finite, the others are 0, and the
    arrays are correct; unless ``counted`` it is 0, too, and nothing is waited for.
    """
    if prune and not counted:
        BLOCK.pack(x, order, prune, data, meta, 0)
        return 0, 0, 0
    refused = Counters()
    BLOCK.pack(x, order, prune, data, meta, refused.address)
    count, inverted = refused.get()  # synchronize!
    first, nonzeros = divmod((1 << 64) - 1 - inverted, 8) if count and not prune else (0, 0)
    return count, first, nonzeros


def expander(a: Any, p: Problem) -> Writer:
    """The launches that write the 2:4 matrix ``a`` [M, K] as a dense one, rows at most round_up(K, 64) apart."""
    if a.dtype.itemsize == 2:
        records = TwoFourRecords()
        return records.writer(records.of(a, p), p)
    return BLOCK.writer(a.data, a.meta, a.meta_order, p.M, Target.of(p))


def two_four_unpack(data: Any, meta: Any, order: str, out: Any) -> None:
    """Write out [M, K] from data [Mp, Kp/2] and meta, all CuPy and valid: nothing is checked."""
    BLOCK.unpack(data, meta, order, out)


def _aligned(x: Any) -> bool:
    return bool(x.shape[1] % 8 == 0 and x.data.ptr % ALIGN == 0)


@functools.cache
def _kernels(threads: int) -> Kernels:
    return Kernels(SOURCE, threads)
