"""CSR with 16-bit values as items with their places in the registers of the tensor cores.  See csr_records.cu.

Records hold all of the matrix in two thirds of its bytes. They replace its arrays where products come from them
(``have_records``, ``Format.kernel_order``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.library import Array, ceil_div
from ....products.problem import Problem, itemsize
from ..runtime import jit, record_products
from ..runtime.c_types import index_type
from ..runtime.launch import Launch, finish_device
from ..runtime.offsets import starts_of
from ..runtime.queue import Kernels
from ..runtime.record_products import MOST_PIECES, room_of

SOURCE = "csr/csr_records.cu"
THREADS = 256
ROWS, COLUMNS, IMAGE = 64, 64, 2048
"""Extents of a record, bytes of the fragments of 16 rows; as in csr_records.cuh."""
PARTS, ITEM, PIECE = 4, 4, 16
"""Parts of a record, of 16 rows each; bytes of an item, and of what parts are rounded up to."""
LEAST_SHARE = 0.04
"""Share of stored elements from which on all products come from records. With fewer, they are of use to few products,
and all come from the arrays (docs/decisions/0061-csr-in-records.md)."""
KERNELS = Kernels(SOURCE, THREADS)


@dataclass(frozen=True, eq=False)
class Records(record_products.Records):
    """The records of a ``CSR``."""

    rows = ROWS
    dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]]
    """of indptr, indices and data"""

    def restore(self) -> dict[str, Array]:
        """Name -> new array of the ``CSR`` that the records were written from, bit by bit."""
        import cupy

        M, steps, count = self.shape[0], self.steps, self.count
        of_pointers, of_indices, of_values = self.dtypes
        indices, data = cupy.empty(self.nnz, of_indices), cupy.empty(self.nnz, of_values)
        if not count:
            return {"indptr": cupy.zeros(M + 1, of_pointers), "indices": indices, "data": data}
        counts, blocks = cupy.empty(M * steps, "uint32"), ceil_div(32 * count, THREADS)
        packed, sizes = (self.data, self.starts, counts), (M, steps, count)
        KERNELS.queue("counts_of_records", "PPPqqq", blocks, *packed, *sizes)
        firsts = starts_of(counts, self.nnz)
        name = f"items_of_records<{index_type(firsts)}, {index_type(indices)}>"
        KERNELS.queue(name, "PPPPPPqqq", blocks, *packed, firsts, indices, data, *sizes)
        return {"indptr": firsts[::steps].astype(of_pointers), "indices": indices, "data": data}


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    types = ("int, int", "long long, int", "long long, long long", "int, long long")
    of_types = ("csr_record_sizes", "csr_records_of", "items_of_records")
    return ("counts_of_records", *(f"{name}<{t}>" for name in of_types for t in types))


def pieces_at_most(p: Problem) -> int:
    """Upper bound of the pieces of 16 bytes in all records of the problem's matrix."""
    count = ceil_div(p.M, ROWS) * ceil_div(p.K, COLUMNS)
    return ceil_div(ITEM * p.nnz, PIECE) + count + min(p.nnz, PARTS * count)


def expected_bytes(p: Problem) -> float:
    """Bytes of all records and of where they start, with half of the padding that there may be."""
    count = ceil_div(p.M, ROWS) * ceil_div(p.K, COLUMNS)
    return ITEM * (p.nnz + 1.5 * min(p.nnz, PARTS * count)) + (PIECE + 4) * count


def have_records(p: Problem) -> bool:
    """Whether the problem's matrix is kept in records: the dispatcher computes all its products from them then."""
    many = p.M * p.K > 0 and p.nnz >= LEAST_SHARE * p.M * p.K
    return many and p.device == "cuda" and p.sm == 90 and itemsize(p.a_dtype) == 2 and pieces_at_most(p) < MOST_PIECES


def instead_of_arrays(p: Problem) -> str:
    """Why a kernel that reads the arrays of the matrix is not chosen: they would have to be kept beside the records."""
    return "the matrix is kept in records, from which other kernels multiply" if have_records(p) else ""


def beside_arrays(p: Problem) -> str:
    """Why a kernel that multiplies from records is not chosen: they would be kept beside the arrays of the matrix."""
    return "" if have_records(p) else "the matrix is kept in its arrays, from which other kernels multiply"


def records(a: Any, p: Problem) -> Records:
    """The records of ``a``, the same for every plan of the matrix."""
    if have_records(p):
        packed: Records = a.kernel_order("csr records", lambda: pack(a, p))
    else:
        packed = a.kernel_arrays("csr records", lambda: pack(a, p))
    return packed


def pack(a: Any, p: Problem) -> Records:
    """New records of a valid CSR. Waits for the device."""
    import cupy

    a = a.restored()
    indptr, indices, values = a.indptr, a.indices, a.data
    steps = ceil_div(p.K, COLUMNS)
    count = ceil_div(p.M, ROWS) * steps
    size, dtypes = ((p.M, p.K), int(values.size)), (indptr.dtype, indices.dtype, values.dtype)
    arch, types = jit.architecture(p.sm or 80, ()), f"{index_type(indptr)}, {index_type(indices)}"
    grid, sizes = (ceil_div(32 * count, THREADS), 1, 1), (p.M, steps, count)
    with cupy.cuda.Device(p.device_id):
        stream = cupy.cuda.get_current_stream(p.device_id)
        starts = cupy.zeros(count + 1, "uint32")
        if not count:
            return Records(cupy.zeros(16, "uint8"), starts, *size, 0, dtypes)
        measure = jit.load(SOURCE, f"csr_record_sizes<{types}>", arch, p.device_id)
        Launch(measure, "PPPqqq", (indptr, indices, starts[1:], *sizes), THREADS)(grid, stream.ptr)
        longest = PIECE * int(starts.max())  # synchronize!
        cupy.cumsum(starts, out=starts)
        data = cupy.empty(PIECE * int(starts[-1]), "uint8")  # synchronize!
        fill = jit.load(SOURCE, f"csr_records_of<{types}>", arch, p.device_id)
        Launch(fill, "PPPPPqqq", (indptr, indices, values, starts, data, *sizes), THREADS)(grid, stream.ptr)
        finish_device()  # synchronize!
        return Records(data, starts, *size, longest, dtypes)


def expected_room(p: Problem) -> int:
    """``room_of`` estimated before there are records: for 64 x 64 elements with more items than the mean."""
    mean = ROWS * COLUMNS * min(1.0, p.nnz / max(1, p.M * p.K))
    return room_of(4 * PIECE + round(ITEM * min(ROWS * COLUMNS, mean + 4 * mean**0.5)))
