"""Bitmask with 16-bit values in the order of the tensor cores' registers, once per matrix.  See bitmask_records.cu.

Records hold all of the matrix, in 1.02 (half of the values zero) to 1.09 (nine in ten) times its bytes. They therefore
replace its arrays (``Format.kernel_order``), and every kernel of a 16-bit Bitmask reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.library import Array, ceil_div, index_dtype
from ....products.problem import Problem, itemsize
from ..runtime import jit, record_products
from ..runtime.c_types import INDEX, index_type
from ..runtime.launch import Launch, finish_device
from ..runtime.offsets import starts_of
from ..runtime.queue import Kernels
from ..runtime.record_products import MOST_PIECES, room_of
from .bitmask_slices import STEP, counted_before

SOURCE = "bitmask/bitmask_records.cu"
THREADS = 256
ROWS = 16  # of a record; it has STEP columns
KERNELS = Kernels(SOURCE, THREADS)


@dataclass(frozen=True, eq=False)
class Records(record_products.Records):
    """The records of a ``Bitmask``."""

    rows = ROWS
    dtype: np.dtype[Any]
    """of the values"""

    def restore(self) -> dict[str, Array]:
        """Name -> new array of the ``Bitmask`` that the records were written from, bit by bit."""
        import cupy

        (M, K), steps, count = self.shape, self.steps, self.count
        width = ceil_div(K, 8)
        bitmask = cupy.empty((M, width), "uint8")
        data = cupy.empty(self.nnz, self.dtype)
        if not count:
            return {"indptr": cupy.zeros(M + 1, index_dtype(self.nnz)), "bitmask": bitmask, "data": data}
        counts, blocks = cupy.empty(M * steps, "uint32"), ceil_div(32 * count, THREADS)
        packed, sizes = (self.data, self.starts), (M, width, steps, count)
        KERNELS.queue("bitmask_of_records", "PPPPqqqq", blocks, *packed, bitmask, counts, *sizes)
        firsts = starts_of(counts, self.nnz)
        name = f"values_of_records<{index_type(firsts)}>"
        KERNELS.queue(name, "PPPPqq", blocks, *packed, firsts, data, steps, count)
        return {"indptr": firsts[::steps].copy(), "bitmask": bitmask, "data": data}


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    of_index = (f"{name}<{index}>" for name in ("bitmask_records", "values_of_records") for index in INDEX.values())
    return ("bitmask_record_sizes", "bitmask_of_records", *of_index)


def pieces_at_most(p: Problem) -> int:
    """Upper bound of the pieces of 16 bytes in all records of the problem's matrix."""
    return ceil_div(p.nnz, 8) + 10 * ceil_div(p.M, ROWS) * ceil_div(p.K, STEP)


def have_records(p: Problem) -> bool:
    """Whether the problem's matrix can be in records: all its products are computed from them then."""
    return itemsize(p.a_dtype) == 2 and pieces_at_most(p) < MOST_PIECES


def records(a: Any, p: Problem) -> Records:
    """The records of ``a``, the same for every plan of the matrix."""
    packed: Records = a.kernel_order("bitmask records", lambda: _pack(a, p))
    return packed


def _pack(a: Any, p: Problem) -> Records:
    import cupy

    indptr, bitmask, values = a.indptr, a.bitmask, a.data
    steps, width = ceil_div(p.K, STEP), ceil_div(p.K, 8)
    count = ceil_div(p.M, ROWS) * steps
    size = (p.M, p.K), int(values.size)
    arch = jit.architecture(p.sm or 80, ())
    with cupy.cuda.Device(p.device_id):
        stream = cupy.cuda.get_current_stream(p.device_id)
        starts = cupy.zeros(count + 1, "uint32")
        if not count:
            return Records(cupy.zeros(16, "uint8"), starts, *size, 0, values.dtype)
        grid = (ceil_div(32 * count, THREADS), 1, 1)
        measure = jit.load(SOURCE, "bitmask_record_sizes", arch, p.device_id)
        Launch(measure, "PPqqqq", (bitmask, starts[1:], p.M, width, steps, count), THREADS)(grid, stream.ptr)
        longest = 16 * int(starts.max())  # synchronize!
        cupy.cumsum(starts, out=starts)
        data = cupy.empty(16 * int(starts[-1]), "uint8")  # synchronize!
        before = counted_before(bitmask, p, steps)
        fixed = (indptr, bitmask, values, before, starts, data, p.M, width, steps, count)
        function = jit.load(SOURCE, f"bitmask_records<{index_type(indptr)}>", arch, p.device_id)
        Launch(function, "PPPPPPqqqq", fixed, THREADS)(grid, stream.ptr)
        finish_device()  # synchronize!
        return Records(data, starts, *size, longest, values.dtype)


def expected_room(p: Problem) -> int:
    """``room_of`` estimated before there are records: for 16 x 64 elements with slightly more values than the mean."""
    share = min(1.0, p.nnz / max(1, p.M * p.K))
    return room_of(round(1024 * share * 2 * 1.15) + 160)
