"""The edges of Bitmask on CUDA: from and to a dense array, CSR and 2:4. Empty matrices are left to the general code."""

from __future__ import annotations

from typing import Any

from ....arrays.library import Array, index_dtype, namespace
from ....formats.bitmask import Bitmask
from ....formats.csr import CSR
from ....formats.meta_orders import meta_steps
from ....formats.two_four import NIBBLES, TwoFour
from ....limits import check_bytes, product
from ..csr import csr_from_dense, csr_pruned
from . import bitmask_from_csr, bitmask_pack, bitmask_pruned, bitmask_two_four, bitmask_unpack

Params = dict[str, Any]


def from_dense(x: Array, params: Params) -> Bitmask | None:
    """Array [M, K] -> Bitmask: two passes over the array, with one wait for the number of nonzeros between them."""
    if not x.size:
        return None
    indptr, bitmask, data = bitmask_pack.bitmask_from_dense(x)
    return Bitmask.unchecked(shape=x.shape, indptr=indptr, bitmask=bitmask, data=data)


def of_largest(x: Array, params: Params) -> tuple[Bitmask, int] | None:
    """Array [M, K] -> (Bitmask of the ``count`` largest values, values that are not finite)."""
    if not (0 < x.size < csr_pruned.MOST and params["count"] and csr_from_dense.aligned(x)):
        return None
    indptr, bitmask, data, odd = bitmask_pruned.bitmask_of_largest(x, params["count"])
    return Bitmask.unchecked(shape=x.shape, indptr=indptr, bitmask=bitmask, data=data), odd


def to_dense(a: Bitmask, params: Params) -> Array | None:
    """Bitmask -> array [M, K] in one pass, without a wait."""
    if 0 in a.shape:
        return None
    out = namespace(a.data).empty(a.shape, a.dtype)
    bitmask_unpack.bitmask_to_dense(a.indptr, a.bitmask, a.data, out)
    return out


def from_csr(a: CSR, params: Params) -> Bitmask | None:
    """CSR -> Bitmask: one launch that also says whether zeros are stored; without any, the values are shared."""
    if 0 in a.shape:
        return None
    bitmask, zeros = bitmask_from_csr.bitmask_from_csr(a.shape, a.indptr, a.indices, a.data)
    if zeros.get()[0]:  # synchronize!
        a = a.without_zeros()
    indptr = a.indptr.astype(index_dtype(a.nnz), copy=False)
    return Bitmask.unchecked(shape=a.shape, indptr=indptr, bitmask=bitmask, data=a.data)


def to_csr(a: Bitmask, params: Params) -> CSR | None:
    """Bitmask -> CSR, which shares pointer and values, without a wait."""
    if 0 in a.shape:
        return None
    indices = bitmask_unpack.bitmask_columns(a.indptr, a.bitmask, a.shape[1], a.nnz)
    return CSR.unchecked(shape=a.shape, indptr=a.indptr, indices=indices, data=a.data)


def from_two_four(a: TwoFour, params: Params) -> Bitmask | None:
    """TwoFour -> Bitmask: two passes over the values, with one wait for the number of nonzeros between them."""
    if 0 in a.shape:
        return None
    steps = meta_steps(a.padded_shape, a.meta_order)
    indptr, bitmask, data = bitmask_two_four.bitmask_from_two_four(a.shape, a.data, a.meta, steps)
    return Bitmask.unchecked(shape=a.shape, indptr=indptr, bitmask=bitmask, data=data)


def to_two_four(a: Bitmask, params: Params) -> TwoFour | None:
    """Bitmask -> TwoFour; StructureError for a matrix that does not fit, LimitError for one that would be too large."""
    if 0 in a.shape:
        return None
    specs = TwoFour.array_specs(a.shape, a.dtype, a.nnz, params)
    needed, given = (
        sum(product(dtype.itemsize, *shape) for dtype, shape in arrays.values())
        for arrays in (specs, CSR.array_specs(a.shape, a.dtype, a.nnz, {}))
    )
    check_bytes(needed, f"{TwoFour.name}: arrays of a matrix of shape {a.shape}", given)
    data, meta = (namespace(a.data).empty(specs[name][1], specs[name][0]) for name in ("data", "meta"))
    order, padded = params["meta_order"], (data.shape[0], 2 * data.shape[1])
    steps = meta_steps(padded, order)
    refused = bitmask_two_four.bitmask_to_two_four(a.indptr, a.bitmask, a.data, NIBBLES, steps, data, meta)
    return TwoFour.encoded(a.shape, order, data, meta, refused)
