"""Values in another value type, where it holds them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UsageError
from .dtypes import value_type
from .library import Array, namespace
from .scans import chunks


def rounded(x: Array, dtype: Any) -> Array:
    """``x`` of any shape and of a boolean or real type, rounded to the value type ``dtype``; itself if it has it.

    UsageError for a finite value that is beyond the type, for one that int8 does not hold exactly, and for complex
    values, whose imaginary parts would be lost; it says how many there are, and names the first.
    """
    row = value_type(dtype)
    if x.dtype == row.numpy:
        return x
    if x.dtype.kind == "c":
        raise UsageError(f"dtype: complex values do not fit {row.name}; use x.real or abs(x)")
    if np.can_cast(x.dtype, row.numpy):  # it holds every value of the other type
        return x.astype(row.numpy)
    with np.errstate(all="ignore"):
        out, flat = namespace(x).ascontiguousarray(x.astype(row.numpy)), x.reshape(-1)
        count, first = 0, None
        for s in chunks(flat.size, flat):
            narrow = out.reshape(-1)[s]
            if row.name != "int8" and bool(np.isfinite(narrow).all()):  # synchronize!
                continue
            part = flat[s]
            wide = part if part.dtype.kind == "f" else part.astype(np.float64)
            lost = narrow.astype(np.float64) != wide if row.name == "int8" else np.isfinite(wide) & ~np.isfinite(narrow)
            here = int(lost.sum())  # synchronize!
            if here and first is None:
                first = part[lost.argmax()]
            count += here
    if count:
        raise UsageError(f"dtype: {count} values do not fit {row.name}, the first is {first}")
    return out
