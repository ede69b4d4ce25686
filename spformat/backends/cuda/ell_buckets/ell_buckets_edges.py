"""The conversions of ELL buckets on CUDA, as edges: functions around the kernels beside this file."""

from __future__ import annotations

import functools
from typing import Any

from ....arrays.library import Array, index_dtype, namespace
from ....formats.csr import CSR
from ....formats.ell_buckets import ELLBuckets, mean_width, widths_of, widths_up_to
from ....limits import always_allowed, check_bytes
from ..csr import csr_from_dense
from ..runtime.scratch import Workspace
from .ell_buckets_from_csr import Items, placed, placed_none
from .ell_buckets_to_csr import ell_buckets_to_csr
from .ell_buckets_to_dense import bytes_of_runs, ell_buckets_to_dense

RUNS = 1 << 28
"""Bytes of the list of runs that are always allowed. A longer list may take as many bytes as the dense matrix."""


def from_dense(x: Array, params: dict[str, Any]) -> ELLBuckets | None:
    """Array [M, K] -> ELLBuckets, by way of the arrays of its CSR."""
    if not x.size or not csr_from_dense.aligned(x):
        return None
    if not always_allowed(8 * x.shape[0] * params["column_parts"]):
        return None  # the general code refuses it, or not, by the bytes of its CSR
    first, (M, K), dtype = csr_from_dense.count(x), x.shape, x.dtype
    column = index_dtype(K - 1)
    nnz = first.sums.total()  # synchronize!
    pointer = index_dtype(nnz)
    work = Workspace(pointer.itemsize * (M + 1), column.itemsize * nnz, dtype.itemsize * nnz)
    indptr, indices, data = work.places
    csr = Items(indptr, indices, data, pointer, column, dtype, nnz)
    if nnz:
        csr_from_dense.fill(x, first, pointer.itemsize, indptr, indices, data)
    widths = params.get("widths") or _widths(params.get("max_width") or mean_width(nnz, M))
    return _matrix(x.shape, csr, params["column_parts"], widths)


def from_csr(a: CSR, params: dict[str, Any]) -> ELLBuckets:
    """CSR -> ELLBuckets."""
    parts, widths, segments = params["column_parts"], widths_of(params), a.shape[0] * params["column_parts"]
    if not always_allowed(8 * segments):  # the same refusal as the general code
        check_bytes(8 * segments, f"counts of {segments} rows or segments", 8 * a.nnz)
    indptr, indices, data = a.indptr, a.indices, a.data
    csr = Items(indptr, indices, data, indptr.dtype, indices.dtype, data.dtype, data.size)
    return _matrix(a.shape, csr, parts, widths)


def _matrix(shape: tuple[int, int], csr: Items, parts: int, widths: tuple[int, ...]) -> ELLBuckets:
    """The matrix of an ordered CSR."""
    p = placed(shape, csr, parts, widths) if csr.nnz else placed_none(shape, csr, parts, widths)
    return ELLBuckets.unchecked(
        shape=shape, column_parts=parts, max_width=widths[-1], widths=widths,
        rows_per_bucket=p.rows_per_bucket, split_per_bucket=p.split_per_bucket,
        row_ids=p.row_ids, indices=p.indices, data=p.data, source=p.source,
    )  # fmt: skip


_widths = functools.lru_cache(maxsize=64)(widths_up_to)


def to_csr(a: ELLBuckets, params: dict[str, Any]) -> CSR | None:
    """ELLBuckets -> CSR. The general code converts what ``check_canonical`` asks for: it may be invalid."""
    if not a.is_validated:
        return None
    indptr, indices, data = ell_buckets_to_csr(a)
    return CSR.unchecked(shape=a.shape, indptr=indptr, indices=indices, data=data)


def to_dense(a: ELLBuckets, params: dict[str, Any]) -> Array | None:
    """ELLBuckets -> array [M, K]."""
    if bytes_of_runs(a) > max(RUNS, a.shape[0] * a.shape[1] * a.dtype.itemsize):
        return None
    out = namespace(a.data).empty(a.shape, a.dtype)
    ell_buckets_to_dense(a, out)
    return out
