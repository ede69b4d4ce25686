"""The conversions of SR-BCRS on CUDA.  The numpy code of formats/sr_bcrs.py and formats/csr.py is the reference.

Each counts in a first pass, waits once for the length of the arrays, and writes them in a second pass. What is rare
(empty matrices, 2^32 columns) is left to the general code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....arrays.dtypes import nonzero_mask
from ....arrays.library import Array, ceil_div, index_dtype
from ....formats.csr import CSR
from ....formats.sr_bcrs import SRBCRS
from ....limits import always_allowed
from ..runtime.scratch import new_arrays
from . import expand_sr_bcrs, sr_bcrs_from_csr, sr_bcrs_from_dense, sr_bcrs_to_csr
from .sr_bcrs_pieces import starts_of_tiles

Params = dict[str, Any]
MOST_COLUMNS, MOST_TILES = 2**32 - 1, 2**31 - 1
"""The kernels count the columns of a row tile, and the row tiles, with 32 bits."""


def from_dense(x: Array, params: Params) -> SRBCRS | None:
    """Array [M, K] -> SRBCRS."""
    (M, K), t, g = x.shape, params["vector_length"], params["stride"]
    if not x.size or not _in_range(ceil_div(M, t), K) or x.data.ptr % x.dtype.itemsize:
        return None

    def csr_bytes() -> int:
        nnz = int(nonzero_mask(x).sum())  # synchronize!
        per_item = index_dtype(K - 1).itemsize + x.dtype.itemsize
        return int(index_dtype(nnz).itemsize * (M + 1) + per_item * nnz)

    marked = sr_bcrs_from_dense.mark(x, t, g)
    tiles, pieces = marked.tiles, marked.pieces
    if marked.total:
        indptr, groups = marked.starts, marked.total.get()[0]  # synchronize!
    else:
        indptr, groups = starts_of_tiles(marked.counts, tiles, pieces, g, tiles * ceil_div(K, g))  # synchronize!
    indices, data = _empty_arrays(groups, K, x, params, csr_bytes)
    if groups:
        sr_bcrs_from_dense.fill(x, marked, indptr, indices, data)
    return SRBCRS.unchecked(shape=x.shape, **params, indptr=indptr, indices=indices, data=data)


def to_dense(a: SRBCRS, params: Params) -> Array:
    """SRBCRS -> array [M, K]."""
    import cupy

    out = cupy.empty(a.shape, a.dtype)
    expand_sr_bcrs.sr_bcrs_to_dense(a.indptr, a.indices, a.data, out)
    return out


def from_csr(a: CSR, params: Params) -> SRBCRS | None:
    """CSR -> SRBCRS. Stored zeros are dropped."""
    (M, K), t, g = a.shape, params["vector_length"], params["stride"]
    if not a.nnz or not _in_range(ceil_div(M, t), K):
        return None
    arrays = a.indptr, a.indices, a.data
    counts = sr_bcrs_from_csr.count(a.shape, *arrays, t)
    tiles, pieces = counts.shape
    indptr, groups = starts_of_tiles(counts, tiles, pieces, g, min(a.nnz, tiles * ceil_div(K, g)))  # synchronize!
    indices, data = _empty_arrays(groups, K, a.data, params, lambda: a.without_zeros().nbytes)
    if groups:
        sr_bcrs_from_csr.fill(a.shape, *arrays, counts, indptr, indices, data)
    return SRBCRS.unchecked(shape=a.shape, **params, indptr=indptr, indices=indices, data=data)


def to_csr(a: SRBCRS, params: Params) -> CSR | None:
    """SRBCRS -> CSR."""
    import cupy

    M, K = a.shape
    if not a.groups or not _in_range(M, K):
        return None
    arrays = a.indptr, a.indices, a.data
    counts = sr_bcrs_to_csr.count(M, *arrays)
    indptr, nnz = starts_of_tiles(counts, counts.shape[0], counts.shape[1], 1, a.stored)  # synchronize!
    indices, data = cupy.empty(nnz, a.indices.dtype), cupy.empty(nnz, a.dtype)
    sr_bcrs_to_csr.fill(*arrays, counts, indptr, indices, data)
    return CSR.unchecked(shape=a.shape, indptr=indptr, indices=indices, data=data)


def _in_range(lines: int, K: int) -> bool:
    """Whether the kernels take that many columns and row tiles, or rows, for whose counts there is always memory."""
    return K <= MOST_COLUMNS and lines <= MOST_TILES and always_allowed(8 * lines)


def _empty_arrays(
    groups: int, K: int, like: Array, params: Params, csr_bytes: Callable[[], int]
) -> tuple[Array, Array]:
    """Uninitialised indices [G, g] and data [G, t, g] for values ``like`` these. LimitError over the memory budget.

    csr_bytes: the bytes of the matrix as CSR, on which the budget depends; called only if they matter.
    """
    t, g, dtype = params["vector_length"], params["stride"], like.dtype
    needed = groups * t * g * dtype.itemsize
    if not always_allowed(needed):
        SRBCRS.check_groups(groups, needed, csr_bytes())
    indices, data = new_arrays(((groups, g), index_dtype(K - 1)), ((groups, t, g), dtype))
    return indices, data
