"""The conversions of BSR and DBSR on CUDA: what ``EDGES`` names. The numpy code of the formats defines the results.

Each function returns None where the general code has to run: an empty matrix, a dense array that does not start on an
element, a grid of blocks so large and so empty that a bit for each of them would need more memory than the matrix.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from ....arrays.dtypes import nonzero_mask
from ....arrays.library import Array, index_dtype
from ....formats.blocks import block_grid
from ....formats.bsr import BSR
from ....formats.csr import CSR
from ....formats.dbsr import DBSR
from ....limits import always_allowed, check_bytes
from . import bsr_from_csr, bsr_from_dense, bsr_to_csr, bsr_transpose, expand_bsr

Params = dict[str, Any]
Blocks = TypeVar("Blocks", BSR, DBSR)


def bsr_from_dense_array(x: Array, params: Params) -> BSR | None:
    """Array [M, K] -> BSR."""
    return _from_dense(BSR, x, params)


def dbsr_from_dense_array(x: Array, params: Params) -> DBSR | None:
    """Array [M, K] -> DBSR."""
    return _from_dense(DBSR, x, params)


def bsr_of_largest(x: Array, params: Params) -> tuple[BSR, int] | None:
    """Array [M, K] -> (BSR of the ``count`` blocks of largest ``norm``, values that are not finite)."""
    return _of_largest(BSR, x, params)


def dbsr_of_largest(x: Array, params: Params) -> tuple[DBSR, int] | None:
    """Array [M, K] -> (DBSR of the ``count`` blocks of largest ``norm``, values that are not finite)."""
    return _of_largest(DBSR, x, params)


def bsr_of_csr(a: CSR, params: Params) -> BSR | None:
    """CSR -> BSR."""
    return _from_csr(BSR, a, params)


def dbsr_of_csr(a: CSR, params: Params) -> DBSR | None:
    """CSR -> DBSR."""
    return _from_csr(DBSR, a, params)


def blocks_to_csr(a: BSR | DBSR, params: Params) -> CSR | None:
    """BSR or DBSR -> CSR."""
    if not a.nnzb:
        return None
    return CSR.unchecked(shape=a.shape, **bsr_to_csr.csr_of_blocks(a.shape, *_arrays(a)))


def blocks_to_dense(a: BSR | DBSR, params: Params) -> Array | None:
    """BSR or DBSR -> array [M, K]."""
    import cupy

    if not a.nnzb:
        return None
    out = cupy.empty(a.shape, a.dtype)
    expand_bsr.bsr_to_dense(*_arrays(a), out)
    return out


def blocks_transposed(a: BSR | DBSR, params: Params) -> BSR | None:
    """BSR or DBSR [M, K] -> BSR [K, M] of the transposed blocks."""
    if not (a.nnzb and bsr_transpose.worth(a.grid, a.data.nbytes)):
        return None
    (M, K), (R, C) = a.shape, a.blocksize
    arrays, data = bsr_transpose.transposed_blocks(a.grid, *_arrays(a))
    return BSR.unchecked(shape=(K, M), blocksize=(C, R), data=data, **arrays)


def _from_dense(cls: type[Blocks], x: Array, params: Params) -> Blocks | None:
    if not x.size or x.data.ptr % x.itemsize:
        return None
    blocksize = params["blocksize"]
    arrays, data = bsr_from_dense.blocks_of_dense(x, blocksize, cls is DBSR)
    return cls.unchecked(shape=x.shape, blocksize=blocksize, data=data, **arrays)


def _of_largest(cls: type[Blocks], x: Array, params: Params) -> tuple[Blocks, int] | None:
    vanish = (
        x.dtype == np.float64 and params["norm"] == "l2"
    )  # squares of small values, so that a norm of 0 says nothing
    if not (x.size and params["count"]) or x.data.ptr % x.itemsize or vanish:
        return None
    blocksize = params["blocksize"]
    arrays, data, odd = bsr_from_dense.blocks_of_largest(x, blocksize, params["count"], params["norm"], cls is DBSR)
    return cls.unchecked(shape=x.shape, blocksize=blocksize, data=data, **arrays), odd


def _from_csr(cls: type[Blocks], a: CSR, params: Params) -> Blocks | None:
    blocksize = params["blocksize"]
    if not (a.nnz and bsr_from_csr.worth(block_grid(a.shape, blocksize), a.nnz)):
        return None

    def accept(nnzb: int) -> None:
        nbytes = nnzb * blocksize[0] * blocksize[1] * a.dtype.itemsize
        if not always_allowed(nbytes):
            check_bytes(nbytes, f"{BSR.name}: {nnzb:,} blocks", _bytes_without_zeros(a))

    csr = a.indptr, a.indices, a.data
    arrays, data = bsr_from_csr.blocks_of_csr(a.shape, csr, blocksize, cls is DBSR, accept)
    return cls.unchecked(shape=a.shape, blocksize=blocksize, data=data, **arrays)


def _bytes_without_zeros(a: CSR) -> int:
    """``a.without_zeros().nbytes``"""
    nnz = int(nonzero_mask(a.data).sum())  # synchronize!
    if nnz == a.nnz:
        return a.nbytes
    item = a.indices.dtype.itemsize + a.dtype.itemsize
    return int(index_dtype(nnz).itemsize * (a.shape[0] + 1) + nnz * item)


def _arrays(a: BSR | DBSR) -> tuple[Array | None, Array, Array, Array]:
    return a.row_ids if isinstance(a, DBSR) else None, a.indptr, a.indices, a.data
