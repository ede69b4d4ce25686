"""cuBLAS for launchers that multiply with it: products of numpy, in float64 for float64 and in float32 for all other types."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from spformat.arrays.dtypes import VALUE_TYPES

from .build import EmulatorError
from .streams import queue

KINDS = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}
"""cudaDataType_t"""
TRANSPOSED = 1
"""CUBLAS_OP_T"""
_stream = 0


def set_stream(handle: int, stream: int) -> int:
    """``cublasSetStream``."""
    global _stream
    _stream = int(stream or 0)
    return 0


def _matrix(at: int, kind: int, rows: int, cols: int, lead: int) -> np.ndarray[Any, Any]:
    """A column-major [rows, cols] matrix."""
    dtype = VALUE_TYPES[KINDS[kind]].numpy
    size = ((cols - 1) * lead + rows) * dtype.itemsize if rows and cols else 0
    if lead < max(1, rows):
        raise EmulatorError(f"cuBLAS: a leading dimension of {lead} for {rows} rows")
    if at % dtype.itemsize:
        raise EmulatorError("cuBLAS: a matrix that is not aligned to its type")
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(at)) if size else np.empty(0, np.uint8)
    return np.lib.stride_tricks.as_strided(
        memory.view(dtype), (rows, cols), (dtype.itemsize, lead * dtype.itemsize), writeable=True
    )


def multiply(
    handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: Any, a: int, a_kind: int, lda: int, b: int, b_kind: int,
    ldb: int, beta: Any, c: int, c_kind: int, ldc: int, compute: int, algorithm: int,
) -> int:  # fmt: skip
    """``cublasGemmEx_64``."""
    wide: Any = np.float64 if KINDS[a_kind] == "float64" else np.float32
    one, zero = (_factor(x, wide) for x in (alpha, beta))

    def work() -> None:
        left: Any = _matrix(a, a_kind, *((k, m) if op_a == TRANSPOSED else (m, k)), lda).astype(wide)
        right: Any = _matrix(b, b_kind, *((n, k) if op_b == TRANSPOSED else (k, n)), ldb).astype(wide)
        out = _matrix(c, c_kind, m, n, ldc)
        with np.errstate(over="ignore", invalid="ignore"):
            product = (left.T if op_a == TRANSPOSED else left) @ (right.T if op_b == TRANSPOSED else right)
            out[...] = one * product if zero == 0 else one * product + zero * out.astype(wide)

    queue(_stream, work)
    return 0


def _factor(pointer: Any, kind: Any) -> Any:
    at = ctypes.cast(pointer, ctypes.c_void_p).value or 0
    return kind((ctypes.c_double if kind is np.float64 else ctypes.c_float).from_address(at).value)


def install() -> None:
    """From now on launchers find this library."""
    from spformat.backends.cuda.runtime import cublas

    mode = ctypes.c_int()

    def get_mode(handle: int, out: Any) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = mode.value
        return 0

    def set_mode(handle: int, value: int) -> int:
        mode.value = value
        return 0

    vars(cublas)["library"] = lambda: (set_stream, multiply)
    vars(cublas)["math_modes"] = lambda: (get_mode, set_mode)
