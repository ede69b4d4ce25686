"""Check operands and launch: everything between a plan's ``__call__`` and the driver.

A launch packs its run-time arguments into one buffer with one call and hands that to ``cuLaunchKernel``,
because a CuPy RawKernel call costs about 5 us of host time and a whole plan has 8.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...arrays import device_error
from ...dtypes import VALUE_TYPES
from ...errors import DeviceError, DeviceMemoryError
from ...problem import COL, Plan, Problem
from ..host import check_bias, numpy_dtype

_CODES = {"P": "Q", "i": "i", "q": "q", "f": "f", "d": "d"}
MAX_GRID_Y = 65535
"""The driver's bound on the second extent of a grid; a kernel walks what lies beyond it."""


class Launch:
    """A compiled function with its fixed arguments packed; only the run-time tail is written at a call.

    ``signature``: one letter per kernel parameter: P pointer, i int32, q int64, f float, d double, or a ctypes
    class for a by-value struct (a 128-byte tensor map). ``fixed``: the leading values. Arrays in
    ``fixed`` are kept alive by the launch. Threads may share a launch.
    """

    __slots__ = ("_buffer", "_driver", "_function", "_keep", "_lock", "_pack", "_params", "_structs", "smem", "threads")

    def __init__(
        self, function: Any, signature: Sequence[Any], fixed: Sequence[Any], threads: int, smem: int = 0
    ) -> None:
        from cupy_backends.cuda.api import driver

        kernel = getattr(function, "kernel", function)
        self._function, self._driver = kernel.ptr, driver
        codes = [_CODES[s] if isinstance(s, str) else f"{ctypes.sizeof(s)}s" for s in signature]
        # Natural alignment, as a C struct: where each parameter starts in the buffer that holds them all.
        starts = [struct.calcsize("@" + "".join(codes[: i + 1])) - struct.calcsize(c) for i, c in enumerate(codes)]
        cut = len(fixed)
        first = starts[cut] if cut < len(starts) else 0
        self._buffer = ctypes.create_string_buffer(max(1, struct.calcsize("@" + "".join(codes))))
        base = ctypes.addressof(self._buffer)
        values = [_plain(v) for v in fixed]
        for start, code, value in zip(starts, codes, values, strict=False):
            struct.pack_into("@" + code, self._buffer, start, value)
        places = (ctypes.c_void_p * max(1, len(codes)))(*[base + start for start in starts])
        tail = struct.Struct("@" + "".join(codes[cut:]))
        room = memoryview(self._buffer)[first : first + tail.size]
        self._pack = _packer(tail, room, [start - first for start in starts[cut:]], codes[cut:])
        self._structs = [i for i, s in enumerate(signature[cut:]) if not isinstance(s, str)]
        self._params = ctypes.addressof(places)
        self._keep = (function, kernel, tuple(fixed), places)
        self._lock = threading.Lock()
        self.threads, self.smem = threads, smem

    def __call__(self, grid: tuple[int, int, int], stream: int, *tail: Any) -> None:
        """Launch on ``stream`` (a cudaStream_t as int); ``tail``: the run-time arguments, in order.

        A grid with an empty extent has nothing to do, and the driver would refuse it.
        """
        if not (grid[0] and grid[1] and grid[2]):
            return
        if self._structs:
            values = list(tail)
            for i in self._structs:
                values[i] = bytes(values[i])
            tail = tuple(values)
        try:
            with self._lock:  # the driver copies the arguments before it returns
                self._pack(*tail)
                self._driver.launchKernel(
                    self._function, grid[0], grid[1], grid[2], self.threads, 1, 1, self.smem, stream, self._params, 0
                )
        except self._driver.CUDADriverError as e:
            typed = device_error(e) or DeviceError(str(e))
            typed.message = f"kernel launch: {typed.message}"
            raise typed from e


def _plain(value: Any) -> Any:
    """A device array as its address, a by-value struct as its bytes, a number as it is."""
    memory: Any = getattr(value, "data", None)
    if hasattr(memory, "ptr"):
        return memory.ptr
    return value if isinstance(value, (int, float)) else bytes(value)


def _packer(tail: struct.Struct, room: memoryview, starts: list[int], codes: list[str]) -> Callable[..., None]:
    """Writes the tail in one call where C alignment from its start is C alignment from the buffer's."""
    natural = [struct.calcsize("@" + "".join(codes[: i + 1])) - struct.calcsize(c) for i, c in enumerate(codes)]
    if natural == starts:
        pack = tail.pack_into

        def all_at_once(*values: Any) -> None:
            pack(room, 0, *values)

        return all_at_once

    def one_by_one(*values: Any) -> None:
        for start, code, value in zip(starts, codes, values, strict=True):
            struct.pack_into("@" + code, room, start, value)

    return one_by_one


class Operands(NamedTuple):
    """What a launch closure gets: raw pointers and extents, all checked."""

    b: int
    c: int
    n: int
    ldb: int
    """Elements between rows of B (layout "row") or columns (layout "col")."""
    ldc: int
    stream: int
    bias: int = 0
    """[M] in the dtype of C, or 0; with ``alpha`` and ``beta`` for problems with an epilogue."""
    alpha: float = 1.0
    beta: float = 0.0


def over_tiles(launch: Launch, row_tiles: int, cols: int, out_col: bool) -> Callable[[Operands], None]:
    """Run a kernel whose grid is row tiles x tiles of ``cols`` columns of C, and whose tail is B, C, N, ldb and the
    elements between rows and between columns of C."""

    def run(o: Operands) -> None:
        grid = (row_tiles, min(MAX_GRID_Y, -(-o.n // cols)), 1)
        c_row, c_col = (1, o.ldc) if out_col else (o.ldc, 1)
        launch(grid, o.stream, o.b, o.c, o.n, o.ldb, c_row, c_col)

    return run


def device_plan(name: str, p: Problem, launch: Callable[[Operands], None], tile: str = "", workspace: int = 0) -> Plan:
    """A Plan whose run checks B and out, allocates out when it is None, and calls ``launch``.

    ``launch`` is called with the plan's device current, M > 0 and N > 0; it must write all of C. K may be 0.
    """
    import cupy

    b_dtype, out_dtype = VALUE_TYPES[p.b_dtype].numpy, numpy_dtype(p.out_dtype)
    b_col, out_col, order = p.b_layout == COL, p.out_layout == COL, "F" if p.out_layout == COL else "C"
    M, K, device_id = p.M, p.K, p.device_id
    b_size, out_size = b_dtype.itemsize, out_dtype.itemsize
    current_device, current_stream = cupy.cuda.runtime.getDevice, cupy.cuda.get_current_stream

    def empty(shape: tuple[int, int]) -> Any:
        try:
            return cupy.empty(shape, out_dtype, order)
        except cupy.cuda.memory.OutOfMemoryError as e:
            text = f"out: {shape[0] * shape[1] * out_size:,} bytes for {shape} do not fit the device; the CUDA context"
            raise DeviceMemoryError(f"{text} is usable. Multiply fewer columns of B at a time") from e

    def run(B: Any, out: Any, epilogue: tuple[Any, ...] = ()) -> Any:
        if current_device() != device_id:
            with cupy.cuda.Device(device_id):
                return run(B, out, epilogue)
        shape = B.shape
        if len(shape) != 2 or shape[0] != K:
            raise ValueError(f"B: expected shape ({K}, N), got {shape}")
        n = shape[1]
        if B.dtype != b_dtype:
            raise TypeError(f"B: this plan takes {p.b_dtype}, got {B.dtype}")
        b = B.data
        ldb = leading("B", shape, B.strides, b, b_size, b_col, device_id)
        if out is None:
            out = empty((M, n))
            if M and n:
                launch(Operands(b.ptr, out.data.ptr, n, ldb, M if out_col else n, current_stream().ptr, *epilogue))
            return out
        if out.shape != (M, n):
            raise ValueError(f"out: expected shape ({M}, {n}), got {out.shape}")
        if out.dtype != out_dtype:
            raise TypeError(f"out: this plan writes {out_dtype}, got {out.dtype}")
        c = out.data
        ldc = leading("out", (M, n), out.strides, c, out_size, out_col, device_id)
        if M and n:
            b_at, c_at = b.ptr, c.ptr
            b_end = b_at + b_size * (((n - 1) * ldb + K) if b_col else ((K - 1) * ldb + n)) if K else b_at
            c_end = c_at + out_size * (((n - 1) * ldc + M) if out_col else ((M - 1) * ldc + n))
            if b_at < c_end and c_at < b_end:
                raise ValueError("out overlaps B; the product would read what it writes")
            launch(Operands(b_at, c_at, n, ldb, ldc, current_stream().ptr, *epilogue))
        return out

    def run_epilogue(B: Any, out: Any, alpha: float, beta: float, bias: Any) -> Any:
        return run(B, out, (bias_pointer(p, bias, beta, out), float(alpha), float(beta)))

    return Plan(name, p, run_epilogue if p.epilogue else run, tile, workspace)


def bias_pointer(p: Problem, bias: Any, beta: float, out: Any) -> int:
    """Address of a bias that fits ``p``, 0 without one; also refuses a beta without a C."""
    check_bias(p, bias, beta, out)
    if bias is None:
        return 0
    if bias.data.device_id != p.device_id:
        raise ValueError(f"bias is on cuda:{bias.data.device_id}, the matrix on cuda:{p.device_id}")
    if not bias.flags.c_contiguous:
        raise ValueError(f"bias: expected consecutive values, got strides {bias.strides}")
    return int(bias.data.ptr)


def leading(
    name: str, shape: tuple[int, int], strides: tuple[int, int], memory: Any, size: int, col: bool, device_id: int
) -> int:
    """Leading dimension in elements of a matrix that must have unit stride along the other axis."""
    if memory.device_id != device_id:
        raise ValueError(f"{name} is on cuda:{memory.device_id}, the matrix on cuda:{device_id}")
    if memory.ptr % size:
        raise ValueError(f"{name}: pointer is not aligned to its {size}-byte elements")
    lines, line = shape
    across, along = strides
    if col:
        lines, line, across, along = line, lines, along, across
    if along == size and across == line * size:
        return line or 1
    if not (lines and line):  # strides of an empty array mean nothing
        return line or 1
    if line > 1 and along != size:
        kind = "column-major" if col else "row-major"
        raise ValueError(f"{name}: expected {kind} with unit stride, got strides {strides} for shape {shape}")
    if lines == 1:
        return line
    if across < line * size or across % size:
        raise ValueError(f"{name}: leading dimension {across} bytes is shorter than a line of {line} elements")
    return across // size
