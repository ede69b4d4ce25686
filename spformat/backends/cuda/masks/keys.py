"""How the kernels of masks order the values of a type: ``arrays.magnitudes.magnitude_keys`` in four numbers."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from ....arrays.dtypes import largest_finite, value_type

KINDS = {
    "float64": "Float64", "float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16",
    "float8_e4m3fn": "Float8E4M3", "float8_e5m2": "Float8E5M2", "int8": "Int8",
}  # fmt: skip
"""Value types -> their ``ValueKind`` in magnitudes.cuh."""


class Keys(ctypes.Structure):
    """Must match ``Keys`` in magnitudes.cuh."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("live", "nan", "finite")] + [
        (name, ctypes.c_int32) for name in ("integers", "unused")
    ]

    @property
    def bits(self) -> int:
        """Bits of the largest key."""
        return 8 if self.integers else int(self.nan).bit_length()


@functools.cache
def keys_of(dtype: np.dtype[Any]) -> Keys:
    """The order of the magnitudes of a value type."""
    live, most = value_type(dtype).zero_mask, largest_finite(dtype)
    return Keys(live, min(most + 2, live), most, dtype == np.int8, 0)


def cuda_kind(dtype: np.dtype[Any]) -> str:
    """C++ name of the kind of values, for kernels that compute with their magnitudes."""
    return f"spformat::{KINDS[value_type(dtype).name]}"
