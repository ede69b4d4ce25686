"""Conversions from and to matrices of other libraries. scipy and torch are imported by the functions that need them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import VALUE_TYPES
from ..arrays.library import Array, array_of, current_device, index_dtype, is_cupy, namespace, unmasked
from ..arrays.rounding import rounded
from ..arrays.torch_tensors import array_to_torch, import_torch, is_torch, torch_to_array
from ..errors import ArrayError, IndexBoundsError, InvariantError, OrderError, PointerError, UsageError
from .base import Format, checked_values
from .blocks import blocks_to_csr
from .bsr import BSR
from .coo import COO
from .csc import CSC
from .csr import CSR
from .dense import Dense
from .transposed import Transposed

SCIPY_VALUES = ("float64", "float32", "int8")


def to_scipy(f: Format) -> Any:
    """``scipy.sparse.bsr_array`` of a BSR whose blocks tile its shape, ``csc_array`` of a CSC, ``coo_array`` of a COO,
    else ``csr_array``; arrays are shared.

    ArrayError for 16- and 8-bit floats, which scipy cannot hold, and for arrays on a device.
    """
    import scipy.sparse as sp

    if f.device != "cpu":
        raise ArrayError(f"{f.name}: scipy works on the host; use .to('cpu').to_scipy()")
    if f.dtype.name not in SCIPY_VALUES:
        message = f"{f.name}: scipy.sparse has no {f.dtype.name}; cast first, e.g. to_dense().astype('float32')"
        raise ArrayError(message, array="data")
    if isinstance(f, BSR) and all(s % b == 0 for s, b in zip(f.shape, f.blocksize, strict=True)):
        f.ensure_valid()
        return sp.bsr_array((f.data, f.indices, f.indptr), shape=f.shape)
    if isinstance(f, CSC):
        f.ensure_valid()
        return sp.csc_array((f.data, f.indices, f.indptr), shape=f.shape)
    if isinstance(f, COO):
        f.ensure_valid()
        return sp.coo_array((f.data, (f.row, f.col)), shape=f.shape)
    a = f.to_csr()
    return sp.csr_array((a.data, a.indices, a.indptr), shape=a.shape)


Format.to_scipy = to_scipy


def from_scipy(x: Any, *, dtype: Any = None) -> Format:
    """A scipy.sparse (or cupyx.scipy.sparse) matrix in the layout it has: CSR, CSC, COO or BSR; CSR of any other.

    Stored zeros of CSR, CSC and COO are kept if their items are in order. Duplicates are refused, not summed.

    dtype: round the values to this type first, as ``rounded`` does; it may be one that scipy does not have.
    """
    if not (hasattr(x, "tocsr") and hasattr(x, "format")):
        raise UsageError(f"from_scipy: expected a scipy.sparse matrix, got {type(x).__name__}; use convert(x, 'csr')")
    if dtype is None and np.dtype(x.dtype).name not in VALUE_TYPES:
        what = f"values of dtype {x.dtype} are not representable; use one of {', '.join(VALUE_TYPES)}"
        raise ArrayError(f"scipy: {what}, as by a.astype('float32')", array="data")
    if len(x.shape) != 2:
        raise UsageError(f"scipy: expected a matrix [M, K], got shape {tuple(x.shape)}")
    c = x if x.format in ("csr", "csc", "coo", "bsr") else x.tocsr()
    data = rounded(c.data, np.dtype(x.dtype) if dtype is None else dtype)  # a.astype(..) of scipy sums duplicates
    with current_device(data):
        if c.format == "coo":  # its tocsr() sums
            return _from_coordinates(x.shape, c.row, c.col, data)
        _refuse_unused(c)
        if c.format == "bsr":
            return from_blocks(x.shape, c.indptr, c.indices, data)
        a = _compressed(CSC if c.format == "csc" else CSR, c.shape, c.indptr, c.indices, data)
        try:
            return a.validate()
        except ValueError:
            return a.canonical()


def _refuse_unused(c: Any) -> None:
    """PointerError for a CSR, CSC or BSR of scipy with more indices and values than its pointer counts."""
    if not c.indptr.size or c.indptr.dtype.kind not in "iu":
        return  # refused later
    size, end = int(c.indices.size), int(c.indptr[-1])  # synchronize!
    if 0 <= end < size and c.data.shape[0] >= end:
        at, expected = int(c.indptr.size) - 1, f"{size}, the number of items it points into"
        fix = f"x.prune() of scipy removes the {size - end} items behind it"
        raise PointerError(f"{c.format}: indptr[{at}]: expected {expected}, got {end}; {fix}",
                           array="indptr", index=at, value=end, expected=expected)  # fmt: skip


def _compressed(fmt: type[CSR] | type[CSC], shape: Any, indptr: Array, indices: Array, data: Array) -> CSR | CSC:
    """A CSR or CSC whose indices are known to lie inside, in any order."""
    a = fmt(shape=shape, **_fitted(fmt.name, indptr, indices, data, shape[1] if fmt is CSR else shape[0]))
    a.check_memory()
    return a


def from_blocks(shape: tuple[int, ...], indptr: Array, indices: Array, data: Array) -> BSR:
    """BSR of blocks in any order. Blocks of zeros are dropped, and -0.0 becomes +0.0. Duplicates are refused."""
    R, C = int(data.shape[1]), int(data.shape[2])
    b = BSR(shape=(shape[0], shape[1]), blocksize=(R, C), **_fitted("bsr", indptr, indices, data, shape[1] // C))
    try:
        return b.validate()
    except InvariantError:  # other libraries allow unordered blocks and blocks of zeros
        b.check_memory()
    return BSR.from_csr(blocks_to_csr(b, b.block_rows()).canonical(), blocksize=(R, C))


def _from_coordinates(shape: tuple[int, int], rows: Array, cols: Array, data: Array) -> COO:
    """COO of items in any order. IndexBoundsError, or OrderError for an element that is stored twice."""
    narrow = {}
    for key, name, index, size in (("row", "row", rows, shape[0]), ("col", "column", cols, shape[1])):
        outside = scans.first_true((index < 0) | (index >= size)) if index.size else None  # synchronize!
        if outside:
            (at, count), expected = outside, f"a {name} index in 0 .. {size - 1}"
            value, more = int(index[at]), f" ({count} such)" if count > 1 else ""
            raise IndexBoundsError(
                f"coo: {key}[{at}]: expected {expected}, got {value}{more}",
                array=key, index=at, value=value, expected=expected, count=count,
            )  # fmt: skip
        narrow[key] = index.astype(index_dtype(size - 1))
    a = COO(shape=shape, **narrow, data=_side_by_side(data))
    try:
        return a.validate()
    except OrderError:
        return a.in_order()


def _fitted(where: str, indptr: Array, indices: Array, data: Array, columns: int) -> dict[str, Array]:
    """Index arrays in the types that their bounds require. PointerError or IndexBoundsError for a number that is too
    large."""
    n = int(indices.size)
    end, inside = f"at most {n}, the number of items it points into", f"an index in [0, {columns})"
    return {
        "indptr": _narrowed(where, "indptr", indptr, index_dtype(n), end, PointerError),
        "indices": _narrowed(where, "indices", indices, index_dtype(columns - 1), inside, IndexBoundsError),
        "data": _side_by_side(data),
    }


def _side_by_side(data: Array) -> Array:
    """``data``, copied if it has strides: the real part of complex values, one value that was expanded to many."""
    return namespace(data).ascontiguousarray(data)


def _narrowed(
    where: str, name: str, x: Array, dtype: np.dtype[Any], expected: str, error: type[InvariantError]
) -> Array:
    if x.dtype.kind not in "iu":
        raise ArrayError(f"{where}: {name}: expected integers, got {x.dtype}", array=name)
    narrow = x.astype(dtype)
    wrapped = None if np.can_cast(x.dtype, dtype) else scans.first_true(narrow != x)  # 2^32 + 3 became 3
    if wrapped:
        at, count = wrapped
        more = f" ({count} such)" if count > 1 else ""
        value = int(x[at])
        raise error(f"{where}: {name}[{at}]: expected {expected}, got {value}{more}",
                    array=name, index=at, value=value, expected=expected, count=count)  # fmt: skip
    return narrow


def to_torch(f: Format) -> Any:
    """A torch tensor on the same device: strided of a Dense, sparse_bsr of a BSR that tiles its shape, sparse_csc of a
    CSC, sparse_coo (coalesced, int64 indices) of a COO, else sparse_csr."""
    torch, tensor = import_torch(), array_to_torch
    if isinstance(f, Dense):
        return tensor(f.data)
    f.ensure_valid()
    if isinstance(f, BSR) and all(s % b == 0 for s, b in zip(f.shape, f.blocksize, strict=True)):
        parts = (tensor(f.indptr), tensor(f.indices), tensor(f.data))
        return torch.sparse_bsr_tensor(*parts, size=f.shape, check_invariants=False)
    if isinstance(f, COO):
        indices = torch.stack((tensor(f.row).long(), tensor(f.col).long()))
        return torch.sparse_coo_tensor(indices, tensor(f.data), f.shape, check_invariants=False, is_coalesced=True)
    a = f if isinstance(f, CSC) else f.to_csr()
    parts = (tensor(a.indptr), tensor(a.indices), tensor(a.data))
    make = torch.sparse_csc_tensor if isinstance(f, CSC) else torch.sparse_csr_tensor
    return make(*parts, size=a.shape, check_invariants=False)


Format.to_torch = to_torch


def from_torch(t: Any, *, dtype: Any = None) -> Format:
    """A torch tensor in the layout it has: Dense (strided), CSR, CSC, COO or BSR. Duplicates are refused, and stored
    zeros dropped.

    dtype: round the values to this type first, as ``rounded`` does; without it, other types than the value types are
    refused.
    """
    if not is_torch(t):
        raise UsageError(f"from_torch: expected a torch tensor, got {type(t).__name__}; use convert(x, 'csr')")
    import torch

    if getattr(t, "BACKEND", "") in ("cutlass", "cusparselt"):
        raise UsageError("a SparseSemiStructuredTensor is read by interop.torch_semi_structured.from_semi_structured")
    if t.layout == torch.strided:
        return Dense.from_dense(_torch_values(t, dtype))
    if t.layout == torch.sparse_coo:
        if t.dense_dim() or t.dim() != 2:
            raise UsageError(f"torch: expected a matrix without dense dimensions, got shape {tuple(t.shape)} with "
                             f"{t.dense_dim()} dense dimensions; use t.to_dense()")  # fmt: skip
        (rows, cols), data = torch_to_array(t._indices()), _torch_values(t._values(), dtype)
        with current_device(data):
            return _from_coordinates(tuple(t.shape), rows, cols, data).without_zeros()
    if t.layout not in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr):
        raise UsageError(f"torch layout {t.layout} is not read; use t.to_sparse_csr() or t.to_dense()")
    if t.dim() != 2 or t.dense_dim():
        raise UsageError(f"torch: expected one matrix, got {t.layout} of shape {tuple(t.shape)}; use t[i] of a batch")
    data, shape = _torch_values(t.values(), dtype), tuple(t.shape)
    with current_device(data):
        if t.layout == torch.sparse_csc:
            indptr, indices = torch_to_array(t.ccol_indices()), torch_to_array(t.row_indices())
            return _compressed(CSC, shape, indptr, indices, data).canonical()
        indptr, indices = torch_to_array(t.crow_indices()), torch_to_array(t.col_indices())
        if t.layout == torch.sparse_bsr:
            return from_blocks(shape, indptr, indices, data)
        return _compressed(CSR, shape, indptr, indices, data).canonical()


def _torch_values(t: Any, dtype: Any) -> Array:
    """The array that shares the memory of a strided tensor, or its values rounded to ``dtype``."""
    values = torch_to_array(t)
    return values if dtype is None else rounded(values, dtype)


def as_array(x: Any) -> Array:
    """A matrix or vector as a numpy or CuPy array, which shares the memory of an array or torch tensor.

    UsageError for what ``as_format`` does not take.
    """
    if isinstance(x, (list, tuple)):
        x = array_of(x)
        return x if x.ndim == 1 else as_format(x).to_dense()
    if isinstance(x, np.ndarray) or is_cupy(x):
        return unmasked(x)
    return torch_to_array(x) if is_torch(x) else as_format(x).to_dense()


def refuse_sparse(name: str, x: Any) -> None:
    """UsageError for a sparse matrix as the dense operand of a product: nobody asked to make it dense."""
    torch_sparse = is_torch(x) and str(x.layout) != "torch.strided"
    if torch_sparse or isinstance(x, Transposed) or (isinstance(x, Format) and not isinstance(x, Dense)):
        fix = "to_dense()"
    elif not isinstance(x, Format) and hasattr(x, "tocsr") and hasattr(x, "format"):  # scipy.sparse, cupyx.scipy.sparse
        fix = "toarray()"
    else:
        return
    raise UsageError(f"{name}: expected a dense operand, got a sparse matrix ({type(x).__name__}); use {name}.{fix}")


def as_format(x: Any) -> Format:
    """A matrix of any of these kinds as a Format: spformat, numpy, CuPy, scipy.sparse, cupyx.scipy.sparse, torch,
    array-likes.

    Nothing is copied between host and device. UsageError for any other object.
    """
    if isinstance(x, Format):
        return x
    if isinstance(x, Transposed):
        return x.materialize()
    if isinstance(x, np.ndarray) or is_cupy(x):
        return Dense.from_dense(x)
    if is_torch(x):
        return from_torch(x)
    if hasattr(x, "tocsr") and hasattr(x, "format"):
        return from_scipy(x)
    if hasattr(x, "__cuda_array_interface__"):
        from ..arrays.library import import_cupy

        return Dense.from_dense(import_cupy().asarray(x))
    if hasattr(x, "__array__") or isinstance(x, (list, tuple)):
        return Dense.from_dense(checked_values(array_of(x), "array"))
    raise UsageError(f"expected a matrix (numpy, CuPy, scipy.sparse, torch or spformat), got {type(x).__name__}")
