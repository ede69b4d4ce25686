"""Bitmask with 16-bit values in the order of the tensor cores' registers, once per matrix.  See bitmask_records.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.library import ceil_div
from ....products.problem import Problem
from ..runtime import jit
from ..runtime.launch import Launch, finish_arrays
from .bitmask_slices import STEP, values_before

SOURCE = "bitmask/bitmask_records.cu"
THREADS = 256
ROWS = 16  # of a record; it has STEP columns


@dataclass(frozen=True)
class Records:
    """The records of a ``Bitmask``: ``data`` uint8, and ``starts`` uint32[records + 1] in pieces of 16 bytes."""

    data: Any
    starts: Any
    steps: int
    """records of a row tile"""
    longest: int
    """bytes of the longest record"""

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes + self.starts.nbytes)


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return ("bitmask_record_sizes", "bitmask_records<int>", "bitmask_records<long long>")


def pieces_at_most(p: Problem) -> int:
    """Upper bound of the pieces of 16 bytes in all records of the problem's matrix."""
    return ceil_div(p.nnz, 8) + 10 * ceil_div(p.M, ROWS) * ceil_div(p.K, STEP)


def records(a: Any, p: Problem) -> Records:
    """The records of ``a``, the same for every plan of the matrix."""
    packed: Records = a.kernel_arrays("bitmask records", lambda: _pack(a, p))
    return packed


def _pack(a: Any, p: Problem) -> Records:
    import cupy

    steps, width = ceil_div(p.K, STEP), ceil_div(p.K, 8)
    count = ceil_div(p.M, ROWS) * steps
    arch = jit.architecture(p.sm or 80, ())
    with cupy.cuda.Device(p.device_id):
        stream = cupy.cuda.get_current_stream(p.device_id)
        starts = cupy.zeros(count + 1, "uint32")
        if not count:
            return Records(cupy.zeros(16, "uint8"), starts, steps, 0)
        grid = (ceil_div(32 * count, THREADS), 1, 1)
        measure = jit.load(SOURCE, "bitmask_record_sizes", arch, p.device_id)
        Launch(measure, "PPqqqq", (a.bitmask, starts[1:], p.M, width, steps, count), THREADS)(grid, stream.ptr)
        longest = 16 * int(starts.max())  # synchronize!
        cupy.cumsum(starts, out=starts)
        data = cupy.empty(16 * int(starts[-1]), "uint8")  # synchronize!
        name = f"bitmask_records<{'int' if a.indptr.dtype == 'int32' else 'long long'}>"
        before = values_before(a, p, steps)
        fixed = (a.indptr, a.bitmask, a.data, before, starts, data, p.M, width, steps, count)
        Launch(jit.load(SOURCE, name, arch, p.device_id), "PPPPPPqqqq", fixed, THREADS)(grid, stream.ptr)
        finish_arrays()  # synchronize!
        return Records(data, starts, steps, longest)


def expected_room(p: Problem) -> int:
    """``room_of`` estimated before there are records: for 16 x 64 elements with slightly more values than the mean."""
    share = min(1.0, p.nnz / max(1, p.M * p.K))
    return 128 * ceil_div(round(1024 * share * 2 * 1.15) + 160, 128)


def room_of(records: Records) -> int:
    """Bytes of shared memory for the longest record, rounded up so that what follows starts on a row of banks."""
    return 128 * ceil_div(records.longest, 128)
