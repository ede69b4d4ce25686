"""The order of values by magnitude, and their magnitudes in float64; the same bits under numpy and CuPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .dtypes import bits, largest_finite, value_type
from .library import Array, namespace


def magnitude_keys(x: Array) -> Array:
    """Unsigned integers with the order of the magnitudes of x. All NaN have the same integer, above infinity."""
    row, xp = value_type(x.dtype), namespace(x)
    raw, unsigned = bits(x), row.bits.type
    if row.name == "int8":
        return xp.where(raw < 128, raw, ~raw + unsigned(1))  # |-128| = 128 fits uint8
    nan = min(largest_finite(x.dtype) + 2, row.zero_mask)
    return xp.minimum(raw & unsigned(row.zero_mask), unsigned(nan))


def magnitudes(x: Array) -> Array:
    """|x| in float64, exactly; also for value types with which the library cannot compute."""
    xp, row = namespace(x), value_type(x.dtype)
    if row.bits.itemsize == 1:
        every = np.arange(256, dtype=np.uint8).view(row.numpy).astype(np.float64)
        return xp.asarray(np.abs(every))[bits(x)]
    if row.name == "bfloat16":
        x = (bits(x).astype(np.uint32) << 16).view(np.float32)  # a bfloat16 is the upper half of a float32
    return xp.abs(x.astype(np.float64))


def largest_finite_key(x: Array) -> int:
    """The largest ``magnitude_keys`` of x, infinity and NaN counted as the largest finite value; 0 without values."""
    limit = value_type(x.dtype).bits.type(largest_finite(x.dtype))
    return int(namespace(x).minimum(magnitude_keys(x), limit).max()) if x.size else 0  # synchronize!


def square_scale(dtype: np.dtype[Any], largest: int) -> float:
    """The power of two by which float64 values are multiplied so that no sum of their squares overflows; 1 for other
    types. largest: the ``largest_finite_key`` of all of them."""
    if dtype != np.float64 or not largest:
        return 1.0
    exponent = (largest >> 52) - 1022  # of the largest finite magnitude, as frexp counts
    return math.ldexp(1.0, min(1000, -exponent))
