"""ELL buckets back to CSR on the device.  Kernels: ell_buckets_to_csr.cu."""

from __future__ import annotations

from typing import Any

from ....arrays.library import INT32_MAX, Array, ceil_div
from ..runtime.c_types import WORDS, index_type
from ..runtime.offsets import COUNT, Offsets
from ..runtime.queue import Kernels
from .ell_buckets_launch import BATCH, TABLES, THREADS, tables

SOURCE = "ell_buckets/ell_buckets_to_csr.cu"
KERNELS = Kernels(SOURCE, THREADS)


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    kinds = (("long long", "int"), ("int", "int"), ("int", "long long"), ("long long", "long long"))
    scatter = [_scatter(size, idx, source) for size, (idx, source) in zip(WORDS, kinds, strict=True)]
    return (_count("int", "int", 4), _count("long long", "int", 4), _count("int", "long long", 8), *scatter)


def ell_buckets_to_csr(a: Any) -> tuple[Array, Array, Array]:
    """(indptr, indices, data) of the CSR of a valid ELLBuckets of CuPy arrays. Waits once, for the number of items."""
    import cupy

    (M, K), R, S = a.shape, a.row_ids.size, a.data.size
    counts = cupy.zeros(M, "uint32" if K <= INT32_MAX else "uint64")  # no row has more than K items
    idx = index_type(a.indices)
    if R:
        KERNELS.queue(
            _count(index_type(a.row_ids), idx, counts.itemsize), ("P", "P", *TABLES, *"iqP"), ceil_div(R, THREADS),
            a.row_ids, a.indices, *tables(a), len(a.rows_per_bucket), R, counts,
        )  # fmt: skip
    indptr, nnz = Offsets(counts, S).indptr()  # synchronize!
    indices, data = cupy.empty(nnz, a.indices.dtype), cupy.empty(nnz, a.data.dtype)
    if S:
        KERNELS.queue(
            _scatter(data.itemsize, idx, index_type(a.source)), "PPPqPP", ceil_div(S, THREADS * BATCH),
            a.indices, a.data, a.source, S, indices, data,
        )  # fmt: skip
    return indptr, indices, data


def _count(row: str, idx: str, count: int) -> str:
    return f"count_items<{row}, {idx}, {COUNT[count]}>"


def _scatter(itemsize: int, idx: str, source: str) -> str:
    return f"scatter_items<{WORDS[itemsize]}, {idx}, {source}>"
