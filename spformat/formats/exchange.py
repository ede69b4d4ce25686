"""In and out of other libraries' matrices. scipy and torch are imported inside the functions that need them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..arrays import Array, index_dtype, is_cupy
from ..dtypes import bits
from ..errors import ArrayError, UsageError
from .base import Format, checked_values
from .bsr import BSR
from .csr import CSR
from .dense import Dense

SCIPY_VALUES = ("float64", "float32", "int8")


def to_scipy(f: Format) -> Any:
    """``scipy.sparse.bsr_array`` of a BSR whose blocks tile its shape, else ``csr_array``; arrays are shared.

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
    a = f.to_csr()
    return sp.csr_array((a.data, a.indices, a.indptr), shape=a.shape)


def from_scipy(x: Any) -> Format:
    """A scipy.sparse (or cupyx.scipy.sparse) matrix as BSR (of a bsr) or CSR. Duplicates are refused, not summed."""
    if x.format == "bsr":
        arrays = _fitted(x.indptr, x.indices, x.data, x.shape[1] // x.blocksize[1])
        b = BSR(shape=x.shape, blocksize=(int(x.blocksize[0]), int(x.blocksize[1])), **arrays)
        try:
            return b.validate()
        except ValueError:  # unsorted blocks, stored zero blocks, -0.0: legal there, not here; the hub sorts them
            return BSR.from_csr(from_scipy(x.tocsr(copy=True)).to_csr(), blocksize=b.blocksize)
    c = x if x.format == "csr" else x.tocsr()
    a = CSR(shape=c.shape, **_fitted(c.indptr, c.indices, c.data, c.shape[1]))
    a.check_memory()
    try:
        return a.validate()
    except ValueError:
        return a.canonical()


def _fitted(indptr: Array, indices: Array, data: Array, columns: int) -> dict[str, Array]:
    """Index arrays in the types their bounds demand."""
    n = indices.size
    return {"indptr": indptr.astype(index_dtype(n)), "indices": indices.astype(index_dtype(columns - 1)), "data": data}


def to_torch(f: Format) -> Any:
    """A torch tensor on the same device: sparse_bsr of a BSR that tiles its shape, strided of a Dense, sparse_csr."""
    import torch

    tensor = array_to_torch
    if isinstance(f, Dense):
        return tensor(f.data)
    f.ensure_valid()
    if isinstance(f, BSR) and all(s % b == 0 for s, b in zip(f.shape, f.blocksize, strict=True)):
        parts = (tensor(f.indptr), tensor(f.indices), tensor(f.data))
        return torch.sparse_bsr_tensor(*parts, size=f.shape, check_invariants=False)
    a = f.to_csr()
    parts = (tensor(a.indptr), tensor(a.indices), tensor(a.data))
    return torch.sparse_csr_tensor(*parts, size=a.shape, check_invariants=False)


def array_to_torch(x: Array) -> Any:
    """A torch tensor that shares the memory of a numpy or CuPy array (read-only arrays are copied)."""
    import torch

    if x.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        # Neither numpy nor DLPack of numpy carries these: move the bits, then view.
        return array_to_torch(bits(x)).view(getattr(torch, x.dtype.name))
    if is_cupy(x):
        return torch.from_dlpack(x)
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def from_torch(t: Any) -> Format:
    """A torch tensor as Dense (strided), CSR (sparse_csr; sparse_coo when coalesced) or BSR (sparse_bsr)."""
    import torch

    if getattr(t, "BACKEND", "") in ("cutlass", "cusparselt"):
        raise UsageError("a SparseSemiStructuredTensor is read by interop.torch_semi_structured.from_semi_structured")
    if t.layout == torch.strided:
        return Dense.from_dense(torch_to_array(t))
    if t.layout == torch.sparse_coo:
        t = t.coalesce().to_sparse_csr()
    if t.layout not in (torch.sparse_csr, torch.sparse_bsr):
        raise UsageError(f"torch layout {t.layout} is not read; use t.to_sparse_csr() or t.to_dense()")
    indptr, indices = torch_to_array(t.crow_indices()), torch_to_array(t.col_indices())
    data, shape = torch_to_array(t.values()), tuple(t.shape)
    if t.layout == torch.sparse_bsr:
        blocksize = (int(data.shape[1]), int(data.shape[2]))
        return BSR(
            shape=shape, blocksize=blocksize, **_fitted(indptr, indices, data, shape[1] // blocksize[1])
        ).validate()
    a = CSR(shape=shape, **_fitted(indptr, indices, data, shape[1]))
    a.check_memory()
    return a.canonical()


def torch_to_array(t: Any) -> Array:
    """A numpy or CuPy array that shares the memory of a torch tensor, strides included."""
    import torch

    t = t.detach()
    name = str(t.dtype).removeprefix("torch.")
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        raw = torch_to_array(t.view(torch.uint16 if t.element_size() == 2 else torch.uint8))
        return raw.view(np.dtype(getattr(ml_dtypes, name)))
    if t.is_cuda:
        from ..arrays import import_cupy

        return import_cupy().from_dlpack(t)
    return t.numpy()


def as_format(x: Any) -> Format:
    """Whatever a user holds, as its format: ours, numpy, CuPy, scipy.sparse, cupyx.scipy.sparse, torch, array-likes.

    Nothing moves between host and device. UsageError for what none of these is.
    """
    if isinstance(x, Format):
        return x
    if isinstance(x, np.ndarray) or is_cupy(x):
        return Dense.from_dense(x)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return from_torch(x)
    if hasattr(x, "tocsr") and hasattr(x, "format"):
        return from_scipy(x)
    if hasattr(x, "__cuda_array_interface__"):
        from ..arrays import import_cupy

        return Dense.from_dense(import_cupy().asarray(x))
    if hasattr(x, "__array__") or isinstance(x, (list, tuple)):
        return Dense.from_dense(checked_values(np.asarray(x), "array"))
    raise UsageError(f"expected a matrix (numpy, CuPy, scipy.sparse, torch or spformat), got {type(x).__name__}")
