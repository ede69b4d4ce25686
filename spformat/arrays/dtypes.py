"""One table of value types: name <-> numpy <-> safetensors code <-> CUDA C type, and the bit views.

Converters move value bits and never compute with them, so that NaN payloads survive and numpy and
CuPy (which lacks arithmetic on some 16- and 8-bit types) run the same code on unsigned integers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ArrayError


@dataclass(frozen=True)
class ValueType:
    """One row of the table."""

    name: str
    numpy: np.dtype[Any]
    safetensors: str
    cuda: str
    zero_mask: int
    """The bits that decide whether a value is zero: all bits except the sign of a float."""

    @property
    def bits(self) -> np.dtype[Any]:
        return np.dtype(f"uint{8 * self.numpy.itemsize}")


VALUE_TYPES = {
    t.name: t
    for t in (
        ValueType("float64", np.dtype(np.float64), "F64", "double", 0x7FFFFFFFFFFFFFFF),
        ValueType("float32", np.dtype(np.float32), "F32", "float", 0x7FFFFFFF),
        ValueType("float16", np.dtype(np.float16), "F16", "__half", 0x7FFF),
        ValueType("bfloat16", np.dtype(ml_dtypes.bfloat16), "BF16", "__nv_bfloat16", 0x7FFF),
        ValueType("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), "F8_E4M3", "__nv_fp8_e4m3", 0x7F),
        ValueType("float8_e5m2", np.dtype(ml_dtypes.float8_e5m2), "F8_E5M2", "__nv_fp8_e5m2", 0x7F),
        ValueType("int8", np.dtype(np.int8), "I8", "signed char", 0xFF),
    )
}

_SHORT = {
    "f64": "float64", "double": "float64", "fp64": "float64",
    "f32": "float32", "float": "float32", "fp32": "float32",
    "f16": "float16", "half": "float16", "fp16": "float16",
    "bf16": "bfloat16", "i8": "int8",
    "f8_e4m3": "float8_e4m3fn", "fp8": "float8_e4m3fn", "f8_e5m2": "float8_e5m2",
}  # fmt: skip

# The dtype code in a safetensors file -> numpy dtype. Codes of types that numpy and ml_dtypes lack (less than one byte)
# are absent; tensors of such a type are copied as raw bytes.
SAFETENSORS = {t.safetensors: t.numpy for t in VALUE_TYPES.values()} | {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "C64": np.dtype(np.complex64),
}
SAFETENSORS_CODE = {dtype: code for code, dtype in SAFETENSORS.items()}


_OF_DTYPE = {t.numpy: t for t in VALUE_TYPES.values()}


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """``dtype.name``, cached: numpy builds the text at every access (25 us)."""
    return dtype.name


@functools.cache
def is_native_value(dtype: np.dtype[Any]) -> bool:
    """Whether it is a value type in the byte order of this machine."""
    return dtype in _OF_DTYPE and dtype.isnative


def value_type(dtype: Any) -> ValueType:
    """The row of the table for a numpy dtype, a name or a short name; ArrayError with all names for any other."""
    if isinstance(dtype, np.dtype) and dtype in _OF_DTYPE:
        return _OF_DTYPE[dtype]
    if isinstance(dtype, str):
        dtype = _SHORT.get(dtype.lower(), dtype)
        if dtype in VALUE_TYPES:
            return VALUE_TYPES[dtype]
    try:
        row = VALUE_TYPES.get(np.dtype(dtype).name)
    except (TypeError, ValueError, SyntaxError):  # numpy parses text of many forms, with Python's parser, too
        row = None
    if row is None:
        raise ArrayError(f"dtype {dtype} is not a value type; use one of {', '.join(VALUE_TYPES)}")
    return row


def is_real(dtype: np.dtype[Any]) -> bool:
    """Whether it is a boolean, integer or floating-point type, of numpy or ml_dtypes."""
    return dtype.kind in "biuf" or np.can_cast(dtype, np.float64)  # types of ml_dtypes have the kind "V", as records


def largest_finite(dtype: Any) -> int:
    """The bits of the largest finite value. The next larger integer is infinity (NaN in a type without infinity)."""
    row = value_type(dtype)
    if row.name == "int8":
        return 255
    finfo: Any = ml_dtypes.finfo
    return int(np.array([finfo(row.numpy).max], row.numpy).view(row.bits)[0])


def bits(a: Any) -> Any:
    """The same memory as unsigned integers of the same width (numpy or CuPy, any contiguous shape)."""
    return a.view(value_type(a.dtype).bits)


def nonzero_mask(a: Any) -> Any:
    """bool array: value != 0. +0 and -0 are zero, NaN is not."""
    row = value_type(a.dtype)
    return (bits(a) & row.bits.type(row.zero_mask)) != 0
