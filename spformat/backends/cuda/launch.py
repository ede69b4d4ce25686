"""Check operands and launch: everything between a plan's ``__call__`` and the driver.

A launch goes to ``cuLaunchKernel`` through ctypes with arguments packed once, because a CuPy RawKernel
call costs about 5 us of host time and a plan has 8. The call keeps the GIL (PyDLL), so that one packed
argument block may be shared by threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...dtypes import VALUE_TYPES
from ...errors import DeviceFault, DeviceMemoryError
from ...problem import COL, Plan, Problem

_CTYPES = {"P": ctypes.c_void_p, "i": ctypes.c_int32, "q": ctypes.c_int64, "f": ctypes.c_float}
_OUT_OF_MEMORY = 2


@functools.lru_cache(maxsize=1)
def _driver() -> Any:
    library = ctypes.PyDLL("libcuda.so.1")
    entry = library.cuLaunchKernel
    entry.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    entry.restype = ctypes.c_int
    return entry


class Launch:
    """A compiled function with its fixed arguments packed; only the run-time tail is written at a call.

    ``signature``: one letter per kernel parameter: P pointer, i int32, q int64, f float, or a ctypes
    class for a by-value struct (a 128-byte tensor map). ``fixed``: the leading values. Arrays in
    ``fixed`` are kept alive by the launch.
    """

    __slots__ = ("_entry", "_function", "_keep", "_params", "_slots", "smem", "threads")

    def __init__(
        self, function: Any, signature: Sequence[Any], fixed: Sequence[Any], threads: int, smem: int = 0
    ) -> None:
        kernel = getattr(function, "kernel", function)
        self._keep = (function, kernel, tuple(fixed))
        self._function = kernel.ptr
        values = [_CTYPES[s]() if isinstance(s, str) else s() for s in signature]
        for slot, value in zip(values, fixed, strict=False):
            _set(slot, value.data.ptr if hasattr(value, "data") and hasattr(value.data, "ptr") else value)
        self._params = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        self._slots = (values, values[len(fixed) :])
        self.threads, self.smem = threads, smem
        self._entry = _driver()

    def __call__(self, grid: tuple[int, int, int], stream: int, *tail: Any) -> None:
        """Launch on ``stream`` (a cudaStream_t as int); ``tail``: the run-time arguments, in order."""
        for slot, value in zip(self._slots[1], tail, strict=True):
            _set(slot, value)
        status = self._entry(
            self._function, grid[0], grid[1], grid[2], self.threads, 1, 1, self.smem, stream, self._params, None
        )
        if status:
            _raise(status)


def _set(slot: Any, value: Any) -> None:
    if isinstance(slot, ctypes._SimpleCData):
        slot.value = value
    else:  # a by-value struct, given as an object of the same ctypes class or as bytes
        ctypes.memmove(ctypes.addressof(slot), bytes(value), ctypes.sizeof(slot))


def _raise(status: int) -> None:
    if status == _OUT_OF_MEMORY:
        raise DeviceMemoryError("the device is out of memory at kernel launch")
    raise DeviceFault(f"cuLaunchKernel failed with CUresult {status}; the CUDA context may be lost")


class Operands(NamedTuple):
    """What a launch closure gets: raw pointers and extents, all checked."""

    b: int
    c: int
    n: int
    ldb: int
    """Elements between rows of B (layout "row") or columns (layout "col")."""
    ldc: int
    stream: int


def device_plan(name: str, p: Problem, launch: Callable[[Operands], None], tile: str = "", workspace: int = 0) -> Plan:
    """A Plan whose run checks B and out, allocates out when it is None, and calls ``launch``.

    ``launch`` is called with the plan's device current, M > 0 and N > 0; it must write all of C. K may be 0.
    """
    import cupy

    b_dtype, out_dtype = VALUE_TYPES[p.b_dtype].numpy, _out_dtype(p)
    b_col, out_col = p.b_layout == COL, p.out_layout == COL
    M, K, device_id, order = p.M, p.K, p.device_id, "F" if p.out_layout == COL else "C"
    current_device, empty = cupy.cuda.runtime.getDevice, cupy.empty
    current_stream = cupy.cuda.get_current_stream

    def run(B: Any, out: Any) -> Any:
        if current_device() != device_id:
            with cupy.cuda.Device(device_id):
                return run(B, out)
        shape = B.shape
        if len(shape) != 2 or shape[0] != K:
            raise ValueError(f"B: expected shape ({K}, N), got {shape}")
        n = shape[1]
        if B.dtype != b_dtype:
            raise TypeError(f"B: this plan takes {p.b_dtype}, got {B.dtype}")
        b = B.data
        ldb = _leading("B", B, b, b_col, device_id)
        if out is None:
            out = empty((M, n), out_dtype, order)
            if M and n:
                launch(Operands(b.ptr, out.data.ptr, n, ldb, M if out_col else n, current_stream().ptr))
            return out
        if out.shape != (M, n):
            raise ValueError(f"out: expected shape ({M}, {n}), got {out.shape}")
        if out.dtype != out_dtype:
            raise TypeError(f"out: this plan writes {out_dtype}, got {out.dtype}")
        c = out.data
        ldc = _leading("out", out, c, out_col, device_id)
        if M and n:
            _check_alias(B, out, b.ptr, c.ptr)
            launch(Operands(b.ptr, c.ptr, n, ldb, ldc, current_stream().ptr))
        return out

    return Plan(name, p, run, tile, workspace)


def _out_dtype(p: Problem) -> Any:
    import numpy as np

    return VALUE_TYPES[p.out_dtype].numpy if p.out_dtype in VALUE_TYPES else np.dtype(p.out_dtype)


def _leading(name: str, x: Any, memory: Any, col: bool, device_id: int) -> int:
    """Leading dimension in elements of a matrix that must have unit stride along the other axis."""
    if memory.device_id != device_id:
        raise ValueError(f"{name} is on cuda:{memory.device_id}, the matrix on cuda:{device_id}")
    size: int = x.dtype.itemsize
    n_across, n_along = x.shape
    across, along = x.strides
    if col:
        n_across, n_along, across, along = n_along, n_across, along, across
    if not (n_across and n_along):  # strides of an empty array mean nothing
        return max(1, int(n_along))
    if n_along > 1 and along != size:
        kind = "column-major" if col else "row-major"
        raise ValueError(f"{name}: expected {kind} with unit stride, got strides {x.strides} for shape {x.shape}")
    if memory.ptr % size:
        raise ValueError(f"{name}: pointer is not aligned to its {size}-byte elements")
    if n_across <= 1:
        return int(n_along) or 1
    if across < n_along * size or across % size:
        raise ValueError(f"{name}: leading dimension {across} bytes is shorter than a line of {n_along} elements")
    return int(across) // size


def _extent(x: Any) -> int:
    """Bytes from the first element to the end of the last one."""
    (rows, cols), (down, right) = x.shape, x.strides
    return int((rows - 1) * down + (cols - 1) * right + x.dtype.itemsize) if rows and cols else 0


def _check_alias(B: Any, out: Any, b: int, c: int) -> None:
    if b < c + _extent(out) and c < b + _extent(B):
        raise ValueError("out overlaps B; the product would read what it writes")
