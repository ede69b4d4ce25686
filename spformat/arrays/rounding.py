"""Values in another value type, where it holds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import StructureError, UsageError
from .dtypes import is_real, value_type
from .library import Array, current_device, namespace
from .scans import chunks


def rounded_once(x: Array, dtype: np.dtype[Any]) -> Array:
    """``x.astype(dtype)`` for a value type: the nearest value, also where libraries go by way of float32.

    ml_dtypes and CuPy round float64 and wide integers to float32, and then to a narrower type. A value that the first
    rounding has moved to the middle between two may then become the wrong one of them. So the first one is to odd here:
    a value that float32 does not hold becomes the neighbour whose last bit is 1, which lies in no such middle.
    """
    if dtype.name not in _BY_WAY_OF_FLOAT32 or x.dtype.itemsize < 4 or x.dtype == np.float32:
        return x.astype(dtype)
    x = x.astype(np.float64)
    near = x.astype(np.float32)
    inexact = near.astype(np.float64) != x  # also true for NaN, which stays NaN
    codes = near.view(np.int32)
    codes = codes - (abs(near) > abs(x)).astype(np.int32)
    odd = namespace(x).where(inexact & (x == x), codes | 1, near.view(np.int32))
    return odd.astype(np.int32).view(np.float32).astype(dtype)


_BY_WAY_OF_FLOAT32 = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})


def rounded(x: Array, dtype: Any) -> Array:
    """``x`` of any shape and of a boolean or real type, rounded to the value type ``dtype``; itself if it has it.

    UsageError for a value that is beyond the type, for one that int8 does not hold exactly, and for complex values,
    whose imaginary parts would be lost; it says how many there are, and names the first. StructureError for arrays of
    anything but numbers: objects, text, dates, durations, records.
    """
    row = value_type(dtype)
    if x.dtype == row.numpy:
        return x
    if x.dtype.kind == "c":
        raise UsageError(f"dtype: complex values do not fit {row.name}; use x.real or abs(x)")
    if not is_real(x.dtype):
        what = f"values of dtype {x.dtype} are not representable in {row.name}"
        fix = "use booleans, integers or floats, as by x.astype('float64') if each of them is a number"
        raise StructureError(f"dtype: {what}; {fix}", unit="dtype", found=str(x.dtype))
    if np.can_cast(x.dtype, row.numpy):  # it holds every value of the other type
        with current_device(x):
            return x.astype(row.numpy)
    with current_device(x), np.errstate(all="ignore"):
        out, flat = namespace(x).ascontiguousarray(rounded_once(x, row.numpy)), x.reshape(-1)
        count, first = 0, None
        for s in chunks(flat.size, flat):
            narrow = out.reshape(-1)[s]
            if row.name != "int8" and bool(np.isfinite(narrow).all()):  # synchronize!
                continue
            part = flat[s]
            wide = part if part.dtype.kind == "f" else part.astype(np.float64)
            if row.name == "int8":
                lost = narrow.astype(np.float64) != wide
            else:  # float8_e4m3fn has no infinity: what is too large for it becomes NaN
                lost = np.isfinite(wide) & ~np.isfinite(narrow) | np.isinf(wide) & np.isnan(narrow)
            here = int(lost.sum())  # synchronize!
            if here and first is None:
                first = part[lost.argmax()]
            count += here
    if count:
        raise UsageError(f"dtype: {count} values do not fit {row.name}, the first is {first}")
    return out
