"""cuBLAS for launchers that multiply with it: products of numpy, in float64 for float64 and in float32 for all other types."""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any

import numpy as np

from spformat.arrays.dtypes import VALUE_TYPES

from .build import EmulatorError
from .streams import queue

KINDS = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}
"""cudaDataType_t"""
TRANSPOSED = 1
"""CUBLAS_OP_T"""
NO_NARROW_SUMS = 16
"""CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION"""


class Handle:
    """What a handle remembers."""

    of_address: dict[int, Handle] = {}  # noqa: RUF012
    _addresses = itertools.count(1 << 40, 64)

    def __init__(self) -> None:
        self.stream = self.mode = 0
        self.calls: list[str] = []
        self._busy = threading.Lock()
        self.address = next(self._addresses)
        self.of_address[self.address] = self

    @classmethod
    def entered(cls, address: int, call: str) -> Handle:
        """The handle at ``address``, from ``call`` until ``leave``."""
        handle = cls.of_address.get(address)
        if handle is None:
            raise EmulatorError(f"cuBLAS: {call} with {address}, which is no handle")
        if not handle._busy.acquire(blocking=False):
            raise EmulatorError(f"cuBLAS: {call} while another thread uses the handle")
        handle.calls.append(call)
        return handle

    def leave(self) -> int:
        self._busy.release()
        return 0


def create(out: Any) -> int:
    """``cublasCreate``."""
    ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[0] = Handle().address
    return 0


def set_math_mode(address: int, mode: int) -> int:
    """``cublasSetMathMode``."""
    handle = Handle.entered(address, "cublasSetMathMode")
    handle.mode = mode
    return handle.leave()


def set_stream(address: int, stream: int) -> int:
    """``cublasSetStream``."""
    handle = Handle.entered(address, "cublasSetStream")
    handle.stream = int(stream or 0)
    return handle.leave()


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
    address: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: Any, a: int, a_kind: int, lda: int, b: int, b_kind: int,
    ldb: int, beta: Any, c: int, c_kind: int, ldc: int, compute: int, algorithm: int,
) -> int:  # fmt: skip
    """``cublasGemmEx_64``."""
    handle = Handle.entered(address, "cublasGemmEx")
    narrow = not handle.mode & NO_NARROW_SUMS and KINDS[a_kind] in ("float16", "bfloat16")
    wide: Any = np.float64 if KINDS[a_kind] == "float64" else np.float32
    one, zero = (_factor(x, wide) for x in (alpha, beta))

    def work() -> None:
        left: Any = _matrix(a, a_kind, *((k, m) if op_a == TRANSPOSED else (m, k)), lda).astype(wide)
        right: Any = _matrix(b, b_kind, *((n, k) if op_b == TRANSPOSED else (k, n)), ldb).astype(wide)
        out = _matrix(c, c_kind, m, n, ldc)
        with np.errstate(over="ignore", invalid="ignore"):
            left, right = left.T if op_a == TRANSPOSED else left, right.T if op_b == TRANSPOSED else right
            # In the default mode the library may add parts of the sums up in the type of C.
            cuts = [0, k // 2, k] if narrow else [0, k]
            parts = [left[:, i:j] @ right[i:j] for i, j in itertools.pairwise(cuts)]
            product = sum(x.astype(out.dtype).astype(wide) for x in parts) if narrow else parts[0]
            out[...] = one * product if zero == 0 else one * product + zero * out.astype(wide)

    queue(handle.stream, work)
    return handle.leave()


def _factor(pointer: Any, kind: Any) -> Any:
    at = ctypes.cast(pointer, ctypes.c_void_p).value or 0
    return kind((ctypes.c_double if kind is np.float64 else ctypes.c_float).from_address(at).value)


def install() -> None:
    """From now on launchers find this library."""
    from spformat.backends.cuda.runtime import cublas_handle

    vars(cublas_handle)["library"] = lambda: cublas_handle.Library(create, set_math_mode, set_stream, multiply)
