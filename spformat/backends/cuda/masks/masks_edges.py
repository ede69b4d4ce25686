"""Magnitude masks of arrays on a device, for ``preprocess.masks``: (mask bool[M, K], values that are not finite).

The param ``uncounted`` says that nobody asks for the second; where one launch writes the mask, nothing is waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....arrays.library import Array, ceil_div, namespace
from ..runtime.scratch import Counters
from . import block_norms, magnitude_mask
from .nm_mask import nm_mask

Params = dict[str, Any]
Masked = tuple[Array, int]


def largest(x: Array, params: Params) -> Masked | None:
    """The ``count`` largest magnitudes of x."""
    if not x.size:
        return None
    mask, odd = _empty_mask(x), Counters()
    magnitude_mask.mask_of_largest(x, max(1, params["count"]), mask, odd.address)
    if not params["count"]:
        mask.fill(False)
    return mask, odd.get()[0]  # synchronize!


def nm(x: Array, params: Params) -> Masked | None:
    """The ``n`` largest magnitudes of every ``m`` columns."""
    if not x.size:
        return None
    mask = _empty_mask(x)
    if params.get("uncounted"):
        nm_mask(x, params["n"], params["m"], mask, 0)
        return mask, 0
    odd = Counters()
    nm_mask(x, params["n"], params["m"], mask, odd.address)
    return mask, odd.get()[0]  # synchronize!


def vectors(x: Array, params: Params) -> Masked | None:
    """The ``n`` vectors of largest ``norm`` in every ``m`` columns of every group of ``vector_length`` rows."""
    if not x.size:
        return None
    length, mask, odd = params["vector_length"], _empty_mask(x), Counters()
    norms = namespace(x).empty((ceil_div(x.shape[0], length), x.shape[1]), np.float64)
    block_norms.block_norms(x, (length, 1), params["norm"], norms, odd.address)
    nm_mask(norms, params["n"], params["m"], mask, 0, length)
    return mask, odd.get()[0]  # synchronize!


def blocks(x: Array, params: Params) -> Masked | None:
    """The ``count`` blocks of ``blocksize`` of largest ``norm``."""
    if not x.size:
        return None
    (M, K), (R, C) = x.shape, params["blocksize"]
    mask, odd = _empty_mask(x), Counters()
    norms = namespace(x).empty((ceil_div(M, R), ceil_div(K, C)), np.float64)
    block_norms.block_norms(x, (R, C), params["norm"], norms, odd.address)
    if params["count"]:
        keep = _empty_mask(norms)
        ignored = odd.address + 8  # the second word: norms that are not finite have been counted by their values
        magnitude_mask.mask_of_largest(norms, params["count"], keep, ignored)
        block_norms.mask_of_blocks(keep, (R, C), mask)
    else:
        mask.fill(False)
    return mask, odd.get()[0]  # synchronize!


def _empty_mask(x: Array) -> Array:
    return namespace(x).empty(x.shape, np.bool_)
