"""``freeze``: layers for serving, which keep their weights once, in the order of the kernels.

A layer's buffers are the arrays of its format, which others may read and replace; so what kernels derive from them is
kept beside them, and a 16-bit 2:4 layer takes twice its bytes after its first product. A frozen layer gives this up:
its only buffers are the memory of that order, and everything else is computed from it when it is asked for.
"""

from __future__ import annotations

import torch

from ..arrays.dtypes import dtype_name
from ..arrays.torch_tensors import array_to_torch
from ..dispatch import api
from ..errors import UsageError
from ..formats.base import Format
from .models import require_module
from .module import SparseLinear

TOKENS = (1, 64)
"""Rows of the products by which a matrix gets its order: kernels for few rows, and those for many."""


def freeze(model: torch.nn.Module) -> dict[str, SparseLinear]:
    """Keep the weights of ``SparseLinear`` layers on a GPU once, for serving; returns name -> layer for each changed.

    For formats whose kernels read an order of their own (two-four, bitmask and sr-bcrs with 16-bit values, on Hopper
    csr and ell-buckets where 8 % or more is stored), the arrays of a layer are replaced by that order: 1.0 times the
    bytes of a 2:4 weight after products, not 2.0. Other layers stay as they are, for their kernels read the arrays. One
    layer is converted after the other.

    Products, gradients, ``weight``, ``matrix``, graphs and compilers are as before. A state dict, ``save_pretrained``
    and a copy (``copy.deepcopy``, pickle) have the arrays of the format, computed anew. Refused by name: loading, other
    dtypes and devices, a product whose weight is not that of this process (``torch.export``).

    Raises UsageError for a model whose sparse layers are not on a GPU, or without such layers.
    """
    require_module(model)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear) and m.has_buffers}
    if not layers:
        raise UsageError("expected a model with SparseLinear layers, got none: spformat.torch.sparsify or load first")
    elsewhere = [f"{name or 'the model'} ({m.device})" for name, m in layers.items() if not _on_device(m)]
    if elsewhere:
        more = f" and {len(elsewhere) - 1} more" if len(elsewhere) > 1 else ""
        raise UsageError(f"expected layers on a GPU, got {elsewhere[0]}{more}: move the model first, then freeze")
    frozen = {}
    for name, layer in layers.items():
        if not layer.is_frozen and _freeze(layer):
            frozen[name] = layer
    return frozen


def _on_device(layer: SparseLinear) -> bool:
    return bool(layer.device.type == "cuda")


def _freeze(layer: SparseLinear) -> bool:
    """Replace the buffers of a layer by the order of its kernels, if there is one that replaces the arrays."""
    layer.matrix  # noqa: B018 - validates the buffers
    with torch.inference_mode(False), torch.no_grad():
        matrix = layer.description.matrix(layer._tensors())
        own = type(matrix).trusted(**matrix.fields())
        del matrix
        put_in_order(own)
        order = own.order_now() if own.in_kernel_order else None
        if order is None or own.dtype.itemsize != 2:
            return False
        # In the dtype of the values, by which operators and compilers know that of results.
        tensors = [array_to_torch(a.reshape(-1).view("uint8")).view(layer.dtype) for a in order.order.arrays()]
        layer.keep_in_order(own, tensors)
    return True


def put_in_order(matrix: Format) -> None:
    """Let the kernels of the first products derive their order."""
    dtype = getattr(torch, dtype_name(matrix.dtype))
    for rows in TOKENS:
        if not matrix.in_kernel_order:
            x = torch.zeros(rows, matrix.shape[1], dtype=dtype, device=matrix.device)
            api.linear(x, matrix, None)
