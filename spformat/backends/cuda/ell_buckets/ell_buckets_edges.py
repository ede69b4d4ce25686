"""The conversions of ELL buckets on CUDA, as edges: functions around the kernels beside this file."""

from __future__ import annotations

import functools
from typing import Any

from ....arrays.library import Array, namespace
from ....formats.csr import CSR
from ....formats.ell_buckets import ELLBuckets, mean_width, widths_of, widths_up_to
from ....limits import always_allowed, check_bytes
from ..csr.csr_from_dense import aligned, csr_from_dense
from .ell_buckets_from_csr import ell_buckets_from_csr, empty
from .ell_buckets_to_csr import ell_buckets_to_csr
from .ell_buckets_to_dense import bytes_of_runs, ell_buckets_to_dense

RUNS = 1 << 28
"""Bytes of the list of runs that are always allowed. A longer list may take as many bytes as the dense matrix."""


def from_dense(x: Array, params: dict[str, Any]) -> ELLBuckets | None:
    """Array [M, K] -> ELLBuckets, by way of the arrays of its CSR."""
    if not x.size or not aligned(x):
        return None
    if not always_allowed(8 * x.shape[0] * params["column_parts"]):
        return None  # the general code refuses it, or not, by the bytes of its CSR
    csr = csr_from_dense(x)
    widths = params.get("widths") or _widths(params.get("max_width") or mean_width(csr[2].size, x.shape[0]))
    return _placed(x.shape, csr, params["column_parts"], widths)


def from_csr(a: CSR, params: dict[str, Any]) -> ELLBuckets:
    """CSR -> ELLBuckets."""
    parts, widths, segments = params["column_parts"], widths_of(params), a.shape[0] * params["column_parts"]
    if not always_allowed(8 * segments):  # the same refusal as the general code
        check_bytes(8 * segments, f"counts of {segments} rows or segments", 8 * a.nnz)
    return _placed(a.shape, (a.indptr, a.indices, a.data), parts, widths)


def _placed(shape: tuple[int, int], csr: tuple[Array, Array, Array], parts: int, widths: tuple[int, ...]) -> ELLBuckets:
    """The matrix of an ordered CSR's (indptr, indices, data)."""
    placed = ell_buckets_from_csr(shape, *csr, parts, widths) if csr[2].size else empty(shape, *csr[1:], parts, widths)
    return ELLBuckets.unchecked(
        shape=shape, column_parts=parts, max_width=widths[-1], widths=widths,
        rows_per_bucket=placed.rows_per_bucket, split_per_bucket=placed.split_per_bucket,
        row_ids=placed.row_ids, indices=placed.indices, data=placed.data, source=placed.source,
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
