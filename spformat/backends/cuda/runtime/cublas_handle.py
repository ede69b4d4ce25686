"""Handles of cuBLAS: one for each thread and device, which nobody else uses.

The math mode and the stream of a handle stay from product to product. CuPy's handle would need both set in each, and
the mode restored, as the program's own calls of CuPy share it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, NamedTuple

from ....arrays.library import library_error
from .scratch import beside_capture

NO_NARROW_SUMS = 16
"""CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, beside the default mode 0. Without it cuBLAS may round the partial
sums of a 16-bit product to 16 bits before it adds them, which costs the accuracy that float32 sums promise."""


class Library(NamedTuple):
    """cublasCreate, cublasSetMathMode, cublasSetStream and cublasGemmEx_64."""

    create: Any
    set_math_mode: Any
    set_stream: Any
    multiply: Any


class Handle:
    """A handle of cuBLAS on one device, of the one thread that uses it now.

    When the thread ends, a later thread may take the handle over. It is never destroyed: that would wait for the device
    and free memory that a captured graph may use, and at the end of the program the driver may be gone before.
    """

    __slots__ = ("_left", "_set_stream", "address", "multiply", "stream")

    def __init__(self, address: int, left: list[int]) -> None:
        """left: takes the address when the thread has ended."""
        self.address, self._left = address, left
        _, _, self._set_stream, self.multiply = library()
        self.stream: int | None = None
        """On which the handle queues work; None if that is unknown."""

    def use(self, stream: int) -> None:
        """Queue work on ``stream`` (a cudaStream_t as int) from now on."""
        self.stream = None  # should the call fail
        check(self._set_stream(self.address, stream))
        self.stream = stream

    def __del__(self) -> None:
        self._left.append(self.address)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.handles: dict[int, Handle] = {}


class Handles:
    """The handles of a process."""

    def __init__(self) -> None:
        self._own = _OfThread()
        self._left: dict[int, list[int]] = {}  # device -> handles of threads that have ended

    def of_thread(self, device: int) -> Handle:
        """The handle of this thread on ``device``, which must be current."""
        return self._own.handles.get(device) or self._taken(device)

    def _taken(self, device: int) -> Handle:
        left = self._left.setdefault(device, [])
        try:
            address = left.pop()  # one call, so that threads never take the same
        except IndexError:
            address = _created()
        handle = self._own.handles[device] = Handle(address, left)
        return handle


HANDLES = Handles()


def _created() -> int:
    """A new handle on the current device."""
    with beside_capture():  # the library allocates
        create, set_math_mode, *_ = library()
        handle = ctypes.c_void_p()
        check(create(ctypes.byref(handle)))
        address = handle.value or 0
        check(set_math_mode(address, NO_NARROW_SUMS))
    return address


@functools.lru_cache(maxsize=1)
def library() -> Library:
    """Functions of the library that CuPy has loaded."""
    from cupy.cuda import cublas, device

    major = cublas.getVersion(device.get_cublas_handle()) // 10_000
    loaded = ctypes.CDLL(f"libcublas.so.{major}")
    p, i, q = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    create, set_math_mode = loaded.cublasCreate_v2, loaded.cublasSetMathMode
    set_stream, multiply = loaded.cublasSetStream_v2, loaded.cublasGemmEx_64
    create.argtypes, set_math_mode.argtypes, set_stream.argtypes = [p], [p, i], [p, p]
    multiply.argtypes = [p, i, i, q, q, q, p, p, i, q, p, i, q, p, p, i, q, i, i]
    return Library(create, set_math_mode, set_stream, multiply)


def check(status: int) -> None:
    """DeviceError for a cublasStatus_t other than success, DeviceFault if the CUDA context is lost."""
    if status:
        raise library_error(f"cuBLAS: status {status}")
