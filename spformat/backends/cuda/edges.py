"""The edges (checks and conversions) on CUDA: each is a function around a kernel, and one line of ``EDGES``.

Arrays are CuPy arrays. The numpy code of the formats, which also runs on CuPy, defines what an edge has to compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.library import Array, namespace
from ...formats.base import Format
from ...formats.bitmask import Bitmask
from ...formats.bsr import BSR
from ...formats.csc import CSC
from ...formats.csr import CSR
from ...formats.dbsr import DBSR
from ...formats.edges import CHECK, DENSE, TRANSPOSED, Edge
from ...formats.ell_buckets import ELLBuckets
from ...formats.meta_orders import meta_steps
from ...formats.sr_bcrs import SRBCRS
from ...formats.two_four import NIBBLES, TwoFour
from ...formats.vector_nm import VectorNM
from ...formats.vector_nm_pack import pack
from .bitmask import bitmask_edges, bitmask_scan
from .bsr import bsr_edges, bsr_scan
from .csr import csr_from_dense, csr_pruned, csr_scan, csr_transpose, expand_csr
from .dense import census
from .ell_buckets import ell_buckets_edges, ell_buckets_scan
from .masks import masks_edges
from .runtime.scratch import Counters
from .sr_bcrs import sr_bcrs_edges, sr_bcrs_scan
from .two_four import two_four_csr, two_four_pack, two_four_scan
from .vector_nm import vector_nm_convert, vector_nm_csr, vector_nm_scan

Params = dict[str, Any]

TWO_FOUR = tuple(TwoFour.edge_name(np.dtype(f"u{size}")) for size in (1, 2, 4))
"""The names of two-four for values of each size."""


# ------------------------------------------------------------------ checks: True if all contents are valid


def check_csr(a: CSR, params: Params) -> bool:
    """One launch over indptr and indices."""
    return csr_scan.csr_sound(a.shape, a.indptr, a.indices)


def check_bitmask(a: Bitmask, params: Params) -> bool:
    """One launch over all arrays."""
    return bitmask_scan.bitmask_sound(a.shape, a.indptr, a.bitmask, a.data)


def check_blocks(a: BSR | DBSR, params: Params) -> bool:
    """One launch over all arrays."""
    row_ids = a.row_ids if isinstance(a, DBSR) else None
    return bsr_scan.bsr_sound(a.shape, a.blocksize, row_ids, a.indptr, a.indices, a.data)


def check_sr_bcrs(a: SRBCRS, params: Params) -> bool:
    """One launch over all arrays."""
    return sr_bcrs_scan.sr_bcrs_sound(a.shape, a.indptr, a.indices, a.data)


def check_ell_buckets(a: ELLBuckets, params: Params) -> bool:
    """Two launches: slots, then chains of the items of a row."""
    counts = np.array((a.rows_per_bucket, a.split_per_bucket), np.int64)
    buckets = counts.T.reshape(a.column_parts, len(a.widths), 2)
    arrays = a.row_ids, a.indices, a.data, a.source
    return ell_buckets_scan.ell_buckets_sound(a.shape, a.part_size, a.widths, buckets, *arrays)


def check_two_four(a: TwoFour, params: Params) -> bool:
    """One launch over all arrays."""
    steps = meta_steps(a.padded_shape, a.meta_order)
    return two_four_scan.two_four_sound(a.shape, a.data, a.meta, NIBBLES, steps)


def check_vector_nm(a: VectorNM, params: Params) -> bool:
    """One launch over indices and data. For a packed matrix, packing is repeated and the results are compared."""
    if not vector_nm_scan.vector_nm_sound(a.shape, a.n, a.m, a.vector_length, a.indices, a.data):
        return False
    if not a.packed:
        return True
    wanted = pack(a.indices, a.params(), a.padded_shape)
    return all(bool((x == y).all()) for x, y in zip(wanted, (a.col_info, a.ranks), strict=True))  # synchronize!


# ------------------------------------------------------------------ conversions


def dense_to_csr(x: Array, params: Params) -> CSR | None:
    """Array [M, K] -> CSR."""
    if not x.size or not csr_from_dense.aligned(x):
        return None
    indptr, indices, data = csr_from_dense.csr_from_dense(x)
    return CSR.unchecked(shape=x.shape, indptr=indptr, indices=indices, data=data)


def csr_of_largest(x: Array, params: Params) -> tuple[CSR, int] | None:
    """Array [M, K] -> (CSR of the ``count`` largest values, values that are not finite)."""
    if not (0 < x.size < csr_pruned.MOST and params["count"] and csr_from_dense.aligned(x)):
        return None
    indptr, indices, data, odd = csr_pruned.csr_of_largest(x, params["count"])
    return CSR.unchecked(shape=x.shape, indptr=indptr, indices=indices, data=data), odd


def csr_to_dense(a: CSR, params: Params) -> Array:
    """CSR -> array [M, K]."""
    out = namespace(a.data).empty(a.shape, a.dtype)
    expand_csr.csr_to_dense(a.indptr, a.indices, a.data, out)
    return out


def csr_transposed(a: CSR, params: Params) -> CSR | None:
    """CSR [M, K] -> the transpose, CSR [K, M]."""
    if not a.nnz:
        return None
    (M, K), (indptr, indices, data) = a.shape, csr_transpose.transposed(a.shape, a.indptr, a.indices, a.data)
    return CSR.unchecked(shape=(K, M), indptr=indptr, indices=indices, data=data)


def csc_to_dense(a: CSC, params: Params) -> Array:
    """CSC -> array [M, K], by way of CSR."""
    return a.to_csr().to_dense()


def count_nonzeros(x: Array, params: Params) -> tuple[int, int] | None:
    """Array [M, K] -> (values that are not zero, elements that are -0.0)."""
    if not x.size or not csr_from_dense.aligned(x):
        return None
    return csr_from_dense.count_nonzeros(x)


def two_four_from_dense(x: Array, params: Params) -> TwoFour:
    """Array [M, K] -> TwoFour."""
    (data, meta), order = TwoFour.empty_arrays(x), params["meta_order"]
    refused = two_four_pack.two_four_pack(x, order, data, meta)
    return TwoFour.encoded(x.shape, order, data, meta, refused)


def two_four_pruned(x: Array, params: Params) -> tuple[TwoFour, int]:
    """Array [M, K] -> (TwoFour of the two largest of every four, values that are not finite)."""
    (data, meta), order = TwoFour.empty_arrays(x), params["meta_order"]
    counted = not params.get("uncounted")
    count, _, _ = two_four_pack.two_four_pack(x, order, data, meta, prune=True, counted=counted)
    return TwoFour.unchecked(shape=x.shape, meta_order=order, data=data, meta=meta), count


def two_four_to_dense(a: TwoFour, params: Params) -> Array:
    """TwoFour -> array [M, K]."""
    out = namespace(a.data).empty(a.shape, a.dtype)
    two_four_pack.two_four_unpack(a.data, a.meta, a.meta_order, out)
    return out


def vector_nm_from_dense(x: Array, params: Params) -> VectorNM:
    """Array [M, K] -> VectorNM, packed while the encoder still runs."""
    indices, data = VectorNM.empty_arrays(x, params)
    n, m, length = params["n"], params["m"], params["vector_length"]
    counters = vector_nm_convert.vector_nm_encode(x, n, m, length, indices, data)
    matrix = VectorNM.assemble(x.shape, params, data, indices)
    count, inverted = counters.get()  # synchronize!
    first = 2**64 - 1 - inverted
    return matrix.accepted((count, first >> 9, first & 511) if count else (0, 0, 0))


def vector_nm_pruned(x: Array, params: Params) -> tuple[VectorNM, int] | None:
    """Array [M, K] -> (VectorNM of the n vectors of largest ``norm`` in every window, values that are not finite)."""
    odd, norm = None if params.get("uncounted") else Counters(), params["norm"]
    params = {k: v for k, v in params.items() if k not in ("norm", "uncounted")}
    indices, data = VectorNM.empty_arrays(x, params)
    n, m, length = params["n"], params["m"], params["vector_length"]
    taken = vector_nm_convert.vector_nm_prune(x, n, m, length, norm, indices, data, odd.address if odd else 0)
    matrix = VectorNM.assemble(x.shape, params, data, indices) if taken else None
    count = odd.get()[0] if odd else 0  # synchronize!
    return (matrix, count) if matrix is not None else None


def vector_nm_to_dense(a: VectorNM, params: Params) -> Array:
    """VectorNM -> array [M, K]."""
    out = namespace(a.data).empty(a.shape, a.dtype)
    vector_nm_convert.vector_nm_to_dense(a.indices, a.data, a.n, a.m, a.vector_length, out)
    return out


def vector_nm_packed(indices: Array, params: Params) -> tuple[Array, Array]:
    """indices uint8[W, Q] -> col_info int16[Tr, Tk, tile_cols], ranks uint8[Tr, W, Qs], as ``vector_nm_pack.pack``."""
    xp, (W, Q), n, m = namespace(indices), indices.shape, params["n"], params["m"]
    rows, cols = params["tile_rows"] // params["vector_length"], params["tile_cols"]
    col_info = xp.empty((Q // rows, W // n * m // cols, cols), np.int16)
    ranks = xp.empty((Q // rows, W, rows), np.uint8)
    vector_nm_convert.vector_nm_pack(indices, n, m, col_info, ranks)
    return col_info, ranks


TWO_FOUR = (TwoFour.name, "two-four:8-bit", "two-four:32-bit")
"""The names of 2:4 in the table, for values of 2, 1 and 4 bytes (``TwoFour.edge_name``)."""


def _edge(source: str | type[Format], target: str | type[Format], function: Any) -> Edge:
    start, end = (f if isinstance(f, str) else f.name for f in (source, target))
    return Edge(start, end, "cuda", function)


EDGES: tuple[Edge, ...] = (
    _edge(CSR, CHECK, check_csr),
    _edge(Bitmask, CHECK, check_bitmask),
    _edge(BSR, CHECK, check_blocks),
    _edge(DBSR, CHECK, check_blocks),
    _edge(SRBCRS, CHECK, check_sr_bcrs),
    _edge(ELLBuckets, CHECK, check_ell_buckets),
    _edge(TwoFour, CHECK, check_two_four),
    _edge(VectorNM, CHECK, check_vector_nm),
    _edge(DENSE, ELLBuckets, ell_buckets_edges.from_dense),
    _edge(CSR, ELLBuckets, ell_buckets_edges.from_csr),
    _edge(ELLBuckets, CSR, ell_buckets_edges.to_csr),
    _edge(ELLBuckets, DENSE, ell_buckets_edges.to_dense),
    _edge(DENSE, CSR, dense_to_csr),
    _edge(DENSE, "csr:pruned", csr_of_largest),
    _edge(CSR, DENSE, csr_to_dense),
    _edge(CSR, TRANSPOSED, csr_transposed),
    _edge(CSC, DENSE, csc_to_dense),
    _edge(DENSE, "counts", count_nonzeros),
    _edge(DENSE, "census", lambda x, _: census.census(x)),
    _edge(DENSE, TwoFour, two_four_from_dense),
    _edge(DENSE, "two-four:pruned", two_four_pruned),
    _edge(TwoFour, DENSE, two_four_to_dense),
    _edge("two-four:32-bit", DENSE, two_four_to_dense),
    _edge("two-four:8-bit", DENSE, two_four_to_dense),
    _edge(DENSE, VectorNM, vector_nm_from_dense),
    _edge(DENSE, "vector-nm:pruned", vector_nm_pruned),
    _edge(VectorNM, DENSE, vector_nm_to_dense),
    *(_edge(CSR, name, two_four_csr.from_csr) for name in TWO_FOUR),
    *(_edge(name, CSR, two_four_csr.to_csr) for name in TWO_FOUR),
    _edge(CSR, VectorNM, vector_nm_csr.from_csr),
    _edge(VectorNM, CSR, vector_nm_csr.to_csr),
    _edge(DENSE, "dense:magnitude-mask", masks_edges.largest),
    _edge(DENSE, "dense:nm-mask", masks_edges.nm),
    _edge(DENSE, "dense:vectors-mask", masks_edges.vectors),
    _edge(DENSE, "dense:blocks-mask", masks_edges.blocks),
    _edge("vector-nm:indices", "vector-nm:packed", vector_nm_packed),
    _edge(DENSE, Bitmask, bitmask_edges.from_dense),
    _edge(DENSE, "bitmask:pruned", bitmask_edges.of_largest),
    _edge(Bitmask, DENSE, bitmask_edges.to_dense),
    _edge(CSR, Bitmask, bitmask_edges.from_csr),
    _edge(Bitmask, CSR, bitmask_edges.to_csr),
    *(_edge(name, Bitmask, bitmask_edges.from_two_four) for name in TWO_FOUR),
    *(_edge(Bitmask, name, bitmask_edges.to_two_four) for name in TWO_FOUR),
    _edge(DENSE, BSR, bsr_edges.bsr_from_dense_array),
    _edge(DENSE, DBSR, bsr_edges.dbsr_from_dense_array),
    _edge(DENSE, "bsr:pruned", bsr_edges.bsr_of_largest),
    _edge(DENSE, "dbsr:pruned", bsr_edges.dbsr_of_largest),
    _edge(BSR, DENSE, bsr_edges.blocks_to_dense),
    _edge(DBSR, DENSE, bsr_edges.blocks_to_dense),
    _edge(CSR, BSR, bsr_edges.bsr_of_csr),
    _edge(CSR, DBSR, bsr_edges.dbsr_of_csr),
    _edge(BSR, CSR, bsr_edges.blocks_to_csr),
    _edge(DBSR, CSR, bsr_edges.blocks_to_csr),
    _edge(BSR, TRANSPOSED, bsr_edges.blocks_transposed),
    _edge(DBSR, TRANSPOSED, bsr_edges.blocks_transposed),
    _edge(DENSE, SRBCRS, sr_bcrs_edges.from_dense),
    _edge(SRBCRS, DENSE, sr_bcrs_edges.to_dense),
    _edge(CSR, SRBCRS, sr_bcrs_edges.from_csr),
    _edge(SRBCRS, CSR, sr_bcrs_edges.to_csr),
)
