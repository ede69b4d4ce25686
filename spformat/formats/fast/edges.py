"""The edges of the host: each wraps loops of ``compiled``. One function and one line of ``EDGES`` per edge."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.dtypes import largest_finite
from ...arrays.library import Array, ceil_div, index_dtype
from ...arrays.segments import counts_of, offsets_from_counts, pointer
from ..base import Format
from ..bitmask import Bitmask
from ..blocks import block_grid
from ..bsr import BSR
from ..csr import CSR
from ..edges import CHECK, DENSE, Edge
from ..ell_buckets import ELLBuckets, Layout, mean_width, widths_of
from ..meta_orders import meta_places
from ..sr_bcrs import SRBCRS
from ..two_four import NIBBLES, TwoFour
from ..vector_nm import VectorNM
from . import compiled

Params = dict[str, Any]


def csr_from_dense(x: Array, params: Params) -> CSR:
    """Array [M, K] -> CSR."""
    indptr, indices, data = compiled.csr_from_dense(x, index_dtype(x.shape[1] - 1))
    return CSR.trusted(shape=x.shape, indptr=indptr, indices=indices, data=data)


def csr_to_dense(a: CSR, params: Params) -> Array:
    """CSR -> array [M, K]."""
    out = a.empty_dense()
    compiled.csr_to_dense(a.indptr, a.indices, a.data, out)
    return out


def bitmask_from_dense(x: Array, params: Params) -> Bitmask:
    """Array [M, K] -> Bitmask."""
    indptr, bitmask, data = compiled.bitmask_from_dense(x)
    return Bitmask.trusted(shape=x.shape, indptr=indptr, bitmask=bitmask, data=data)


def bitmask_to_dense(a: Bitmask, params: Params) -> Array:
    """Bitmask -> array [M, K]."""
    out = a.empty_dense()
    compiled.bitmask_to_dense(a.indptr, a.bitmask, a.data, out)
    return out


def bsr_from_dense(x: Array, params: Params) -> BSR:
    """Array [M, K] -> BSR."""
    index = index_dtype(block_grid(x.shape, params["blocksize"])[1] - 1)
    indptr, indices, data = compiled.bsr_from_dense(x, params["blocksize"], index)
    return BSR.trusted(shape=x.shape, **params, indptr=indptr, indices=indices, data=data)


def sr_bcrs_from_dense(x: Array, params: Params) -> SRBCRS:
    """Array [M, K] -> SRBCRS."""
    t, g = params["vector_length"], params["stride"]
    indptr, indices, data = compiled.sr_bcrs_from_dense(x, t, g, index_dtype(x.shape[1] - 1))
    return SRBCRS.trusted(shape=x.shape, **params, indptr=indptr, indices=indices, data=data)


def sr_bcrs_to_dense(a: SRBCRS, params: Params) -> Array:
    """SRBCRS -> array [M, K]."""
    out = a.empty_dense()
    compiled.sr_bcrs_to_dense(a.indptr, a.indices, a.data, out)
    return out


def ell_from_dense(x: Array, params: Params) -> ELLBuckets:
    """Array [M, K] -> ELLBuckets."""
    (M, K), parts = x.shape, params["column_parts"]
    counts = compiled.ell_counts(x, parts, max(1, ceil_div(K, parts)))
    nnz = int(counts.sum())
    params = {"max_width": mean_width(nnz, M)} | params
    layout = Layout.of(counts, widths_of(params))
    out = ELLBuckets.without_items((M, K), nnz, x.dtype, layout, params)
    indptr = pointer(counts.sum(axis=1), nnz)
    compiled.ell_from_dense(x, indptr, layout.by_row(), (out.indices, out.data, out.source))
    return out


def ell_from_csr(a: CSR, params: Params) -> ELLBuckets:
    """CSR -> ELLBuckets."""
    parts = params["column_parts"]
    counts = compiled.ell_counts_of_csr(a.indptr, a.indices, parts, max(1, ceil_div(a.shape[1], parts)))
    layout = Layout.of(counts, widths_of(params))
    out = ELLBuckets.without_items(a.shape, a.nnz, a.dtype, layout, params)
    slots = (out.indices, out.data, out.source)
    compiled.ell_from_csr(a.indptr, (a.indices, a.data), layout.by_row(), slots)
    return out


def ell_to_csr(a: ELLBuckets, params: Params) -> CSR:
    """ELLBuckets -> CSR."""
    starts = a.slot_starts()
    live = compiled.ell_live(starts, a.source)
    nnz = int(live.sum())
    indices, data = np.empty(nnz, index_dtype(a.shape[1] - 1)), np.empty(nnz, a.dtype)
    compiled.ell_to_csr(starts, (a.indices, a.data, a.source), (indices, data))
    order = np.argsort(a.row_ids, kind="stable")
    ends = offsets_from_counts(live[order])[offsets_from_counts(counts_of(a.row_ids, a.shape[0]))]
    construct = CSR.trusted if a.is_validated else CSR  # an unchecked object may have columns out of order
    return construct(shape=a.shape, indptr=ends.astype(index_dtype(nnz)), indices=indices, data=data)


def ell_to_dense(a: ELLBuckets, params: Params) -> Array:
    """ELLBuckets -> array [M, K]."""
    out = a.empty_dense()
    compiled.ell_to_dense(a.slot_starts(), a.row_ids, a.indices, a.data, out)
    return out


def two_four_from_dense(x: Array, params: Params) -> TwoFour:
    """Array [M, K] -> TwoFour."""
    (data, meta), order = _two_four_arrays(x), params["meta_order"]
    refused = compiled.two_four_encode(x, NIBBLES, _places(data, order), data, meta)
    return TwoFour.encoded(x.shape, order, data, meta, refused)


def two_four_pruned(x: Array, params: Params) -> tuple[TwoFour, int]:
    """Array [M, K] -> (TwoFour of the two largest of every four, values that are not finite)."""
    (data, meta), order = _two_four_arrays(x), params["meta_order"]
    count = compiled.two_four_prune(x, largest_finite(x.dtype) + 1, _places(data, order), data, meta)
    return TwoFour.trusted(shape=x.shape, meta_order=order, data=data, meta=meta), count


def two_four_to_dense(a: TwoFour, params: Params) -> Array:
    """TwoFour -> array [M, K]."""
    out = np.empty(a.shape, a.dtype)
    compiled.two_four_decode(a.data, a.meta, _places(a.data, a.meta_order), out)
    return out


def two_four_check(a: TwoFour, params: Params) -> bool:
    """Whether all contents are valid."""
    return compiled.two_four_sound(a.shape, a.data, a.meta, NIBBLES, _places(a.data, a.meta_order))


def _two_four_arrays(x: Array) -> tuple[Array, Array]:
    """(data, meta) filled with zeros and the words of empty groups, because the loops do not write the padding."""
    data, meta = TwoFour.empty_arrays(x)
    # Fresh zeros cost nothing until they are touched; filling ``data`` would be a pass over it.
    return np.zeros(data.shape, data.dtype), np.full(meta.shape, 0x4444, meta.dtype)


def _places(data: Array, order: str) -> tuple[Array, int, int, int]:
    return meta_places((data.shape[0], 2 * data.shape[1]), order)


def vector_nm_from_dense(x: Array, params: Params) -> VectorNM:
    """Array [M, K] -> VectorNM."""
    indices, data = VectorNM.empty_arrays(x, params)
    refused = compiled.vector_nm_encode(x, params["n"], params["m"], params["vector_length"], indices, data)
    return VectorNM.assemble(x.shape, params, data, indices).accepted(refused)


def vector_nm_to_dense(a: VectorNM, params: Params) -> Array:
    """VectorNM -> array [M, K]."""
    out = a.empty_dense()
    compiled.vector_nm_to_dense(a.indices, a.data, a.n, a.m, a.vector_length, out)
    return out


def _worth(x: Array, elements: int) -> bool:
    return compiled.serves(x, elements)


def _edge(source: str | type[Format], target: str | type[Format], function: Any) -> Edge:
    start, end = (f if isinstance(f, str) else f.name for f in (source, target))
    return Edge(start, end, "cpu", function, _worth)


EDGES: tuple[Edge, ...] = (
    _edge(DENSE, CSR, csr_from_dense),
    _edge(CSR, DENSE, csr_to_dense),
    _edge(DENSE, Bitmask, bitmask_from_dense),
    _edge(Bitmask, DENSE, bitmask_to_dense),
    _edge(DENSE, BSR, bsr_from_dense),
    _edge(DENSE, SRBCRS, sr_bcrs_from_dense),
    _edge(SRBCRS, DENSE, sr_bcrs_to_dense),
    _edge(DENSE, ELLBuckets, ell_from_dense),
    _edge(CSR, ELLBuckets, ell_from_csr),
    _edge(ELLBuckets, CSR, ell_to_csr),
    _edge(ELLBuckets, DENSE, ell_to_dense),
    _edge(DENSE, TwoFour, two_four_from_dense),
    _edge(DENSE, "two-four:pruned", two_four_pruned),
    _edge(TwoFour, DENSE, two_four_to_dense),
    _edge(TwoFour, CHECK, two_four_check),
    _edge(DENSE, VectorNM, vector_nm_from_dense),
    _edge(VectorNM, DENSE, vector_nm_to_dense),
    _edge(DENSE, "counts", lambda x, _: compiled.count_nonzeros(x)),
    _edge(DENSE, "census", lambda x, _: compiled.census(x)),
)
