"""ELL buckets as a dense matrix on the device, in one pass.  Kernel: expand_ell_buckets.cu.

A row's slots are spread over the buckets, so a list of the slots in row order is derived first. ``source`` holds it
already, turned round: the position of each slot's item in the CSR.
"""

from __future__ import annotations

from typing import Any

from ....arrays.library import PAD, Array, index_dtype, namespace
from ....arrays.segments import counts_of, offsets_from_counts, rows_of
from ....products.problem import Problem
from ..csr import expand_csr_records
from ..csr.csr_records import have_records
from ..runtime import jit, row_images
from ..runtime.c_types import WORDS, index_type
from ..runtime.expansion import Target, Writer
from ..runtime.launch import finish_arrays
from .ell_buckets_records import records
from .ell_buckets_to_dense import bytes_of_runs, writer_by_runs

SOURCE = "ell_buckets/expand_ell_buckets.cu"
SHORT = 16
"""Part of the bytes of a matrix that a list of runs may take."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(size, slot, idx) for size, slot, idx in (
        (1, "int", "int"), (2, "int", "int"), (4, "long long", "int"), (8, "int", "long long"),
    ))  # fmt: skip


def expander(a: Any, p: Problem) -> Writer:
    """The launches that write the ELL buckets ``a`` [M, K] as a dense matrix.

    From its records where it is kept in them; from a list of runs where that is short beside the matrix (few column
    parts), else of all slots by row.
    """
    if have_records(p):
        return expand_csr_records.writer(records(a, p), Target.of(p))
    if a.data.size and p.K and bytes_of_runs(a) <= a.nbytes // SHORT:
        return writer_by_runs(a, Target.of(p))
    indptr, slots = kept_slots(a)
    return _writer(indptr, slots, a.indices, a.data, Target.of(p))


def kept_slots(a: Any) -> tuple[Array, Array]:
    """``slots_by_row``, the same for every plan of a matrix on a device."""

    def build() -> tuple[Array, Array]:
        listed = slots_by_row(a)
        finish_arrays()  # synchronize!
        return listed

    return a.kernel_arrays("slots by row", build)  # type: ignore[no-any-return]


def slots_by_row(a: Any) -> tuple[Array, Array]:
    """(indptr int64[M+1], slots[nnz]): slots[indptr[i] .. indptr[i+1]-1] hold row i's items, columns ascending."""
    xp, M = namespace(a.data), a.shape[0]
    live = xp.flatnonzero(a.source != PAD)  # synchronize!
    row = a.row_ids[rows_of(offsets_from_counts(a.row_widths()), a.data.size)[live]]
    slots = xp.empty(live.size, index_dtype(a.data.size))
    slots[a.source[live]] = live
    return offsets_from_counts(counts_of(row, M)), slots


def derived_bytes(M: int, stored: int) -> int:
    """Upper bound of the bytes that ``slots_by_row`` uses for ``stored`` slots."""
    return 8 * (M + 1) + stored * index_dtype(stored).itemsize


def _writer(indptr: Array, slots: Array, indices: Array, data: Array, target: Target) -> Writer:
    itemsize = data.dtype.itemsize
    function = jit.load(SOURCE, _instance(itemsize, index_type(slots), index_type(indices)), *target)
    return row_images.writer(function, (indptr, slots, indices, data), indptr.size - 1, itemsize)


def _instance(itemsize: int, slot: str, idx: str) -> str:
    return f"expand_ell_buckets<{WORDS[itemsize]}, {slot}, {idx}>"
