"""2:4 weights in the order of the tensor cores' registers, written once per matrix.  Kernels: two_four_records.cu.

The records are the arrays in another order, no more bytes and no fewer. They therefore replace the arrays of the matrix
(``Format.kernel_order``), and every kernel of 16-bit 2:4 reads them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.library import Array, ceil_div, round_up
from ....formats.meta_orders import reorder_meta
from ....products.problem import Problem
from ..runtime import jit, tensor_map
from ..runtime.expansion import Target, Writer
from ..runtime.launch import Bound, Launch, finish_device

SOURCE = "two_four/two_four_records.cu"
WORDS = 288  # uint32 in a record: 256 of values and 32 of metadata, for 16 rows and 64 columns
VALUES = 256
SPARE = 8  # records at the end that kernels may load ahead but do not use
THREADS = 256


@dataclass(frozen=True, eq=False)
class Records:
    """A matrix in kernel order, with what says how it gets its arrays back."""

    words: Array
    """uint32[Mp/16 * Kp/64 + SPARE, 288]"""
    padded: tuple[int, int]
    dtype: np.dtype[Any]
    meta_order: str

    def arrays(self) -> tuple[Array, ...]:
        return (self.words,)

    def restore(self) -> dict[str, Array]:
        """``data`` and ``meta`` by the numbers on top of two_four_records.cu."""
        (Mp, Kp), words = self.padded, self.words[:-SPARE]
        # word 128s + 16g + 4t + 2i + h of record (T, b): row 16T + 8h + g, pair 16b + 8s + 4i + t of it
        pairs = words[:, :VALUES].reshape(Mp // 16, Kp // 64, 2, 8, 4, 2, 2).transpose(0, 6, 3, 1, 2, 5, 4)
        meta = words[:, VALUES:].reshape(-1).view(np.uint16)
        return {
            "data": pairs.reshape(Mp, Kp // 4).view(self.dtype),
            "meta": reorder_meta(meta, self.padded, "fragment", self.meta_order),
        }


def record_map(words: Any, p: Problem, rows: int) -> tensor_map.Mapped:
    """The map by which the copy engine loads the records of ``rows`` rows and 64 columns at a time; for M and K > 0."""
    line = ceil_div(p.K, 64) * WORDS // 2  # in units of 8 bytes: a box has at most 256 of anything
    return tensor_map.tiled(
        words.data.ptr, "uint64", (line, round_up(p.M, 32) // 16), (line,), (WORDS // 2, rows // 16), 0
    )


class TwoFourRecords:
    """The records of ``TwoFour`` matrices with 16-bit values on the device."""

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests."""
        return "two_four_records", "two_four_expand<true>", "two_four_expand<false>"

    def of(self, a: Any, p: Problem) -> Any:
        """uint32[Mp/16 * Kp/64 + SPARE, 288] of ``a``, the same array for every plan of the matrix."""
        import cupy

        def build() -> Records:
            data, padded = a.data, a.padded_shape
            slabs = padded[1] // 64
            count = padded[0] // 16 * slabs
            meta = reorder_meta(a.meta, padded, a.meta_order, "fragment")
            with cupy.cuda.Device(p.device_id):
                out = cupy.empty((count + SPARE, WORDS), "uint32")
                function = jit.load(SOURCE, "two_four_records", jit.architecture(p.sm or 80, ()), p.device_id)
                launch = Launch(function, "PPPqi", (data, meta, out, count, slabs), THREADS)
                if count:
                    stream = cupy.cuda.get_current_stream(p.device_id)
                    launch((ceil_div(count * WORDS // 4, THREADS), 1, 1), stream.ptr)
                finish_device()  # synchronize!
            return Records(out, padded, data.dtype, a.meta_order)

        return a.kernel_order("two-four records", build).words

    def writer(self, words: Any, p: Problem) -> Writer:
        """The launches that write the matrix [M, K] with records ``words`` as a dense one, rows at most round_up(K, 64)
        apart."""
        slabs = ceil_div(p.K, 64)
        tasks = ceil_div(p.M, 16) * slabs

        @functools.cache
        def launch(aligned: bool) -> Launch:
            function = jit.load(SOURCE, f"two_four_expand<{str(aligned).lower()}>", *Target.of(p))
            return Launch(function, "PPqqqi", (words,), THREADS)

        def write(x: int, ld: int, stream: int) -> list[Bound]:
            # Columns behind K are padding, zeros that may be written too, so that rows are ``ld`` columns here.
            if not tasks:
                return []
            grid = ceil_div(tasks, THREADS // 32), 1, 1
            return [launch(ld % 4 == 0 and x % 8 == 0).bind(grid, stream, x, p.M, ld, tasks, slabs)]

        return write
