"""What ``torch.load(weights_only=True)`` may construct: matrices, layers, and the numpy arrays that matrices contain.

A file cannot make anything run by them. Contents are validated before a kernel reads them: those of a layer before its
first product, those of a matrix because one that was unpickled is not marked as validated.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy._core import multiarray

from ..arrays.dtypes import SAFETENSORS
from ..formats import FORMATS
from ..formats.base import _rebuild
from ..formats.transposed import Transposed
from .description import Description
from .fused import FusedLinear, Projection, _Pending
from .module import SparseLinear


def allow() -> None:
    """Add the classes to those that torch accepts in this process."""
    dtypes = SAFETENSORS.values()
    scalars = [d.type for d in dtypes if d.type.__module__ != "numpy"]  # those of ml_dtypes go by their scalar types
    torch.serialization.add_safe_globals([
        SparseLinear, FusedLinear, Projection, _Pending, Description, Transposed, *FORMATS, _rebuild,
        bytes, multiarray._reconstruct, np.ndarray, np.dtype, *{type(d) for d in dtypes}, *scalars,
    ])  # fmt: skip
