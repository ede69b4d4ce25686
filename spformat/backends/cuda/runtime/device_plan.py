"""A plan on a device: it checks operands, prepares launches for new ones, and repeats those of known operands."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....errors import DeviceMemoryError, LimitError
from ....products.plan import OVERWRITES, Plan, Reads, nothing
from ....products.problem import COL, Problem
from ...host import numpy_dtype
from .addresses import alignment
from .launch import MAX_COLUMNS, Call, LaunchSequence, Library, Operands, Prepare
from .moving import Moving, moving
from .operands import REMEDY, bias_pointer, leading, share_memory
from .scratch import PER_THREAD, captured, identity

REMEMBERED = 64
"""Sets of operands whose launches a plan keeps, a few hundred bytes each: a serving loop or a training step uses the
same ones again."""

_locks: dict[int, Any] = {}
"""Device -> the lock under which several launches are queued as one, because plans share workspaces (``Scratch``).
It is reentrant: a plan that calls the ``run`` of another plan takes it twice."""


def _nothing() -> None:
    """Stands for a weak reference whose array no longer exists."""


def device_plan(
    name: str, p: Problem, prepare: Prepare | Library, tile: str = "", workspace: int = 0,
    reads: Reads = nothing,
) -> Plan:  # fmt: skip
    """A Plan whose run checks B and out, allocates out when it is None, and runs the calls of ``prepare``.

    ``reads``: where A is in memory, which ``out`` must not overlap (``Plan.reads``).

    ``prepare`` is called with the plan's device current, and only if C has rows and columns. Its calls must write all
    of C. B may have no rows.
    """
    import cupy

    b_dtype, out_dtype = VALUE_TYPES[p.b_dtype].numpy, numpy_dtype(p.out_dtype)
    b_col, out_col, order = p.b_layout == COL, p.out_layout == COL, "F" if p.out_layout == COL else "C"
    M, K, device_id, ndarray = p.rows, p.inner, p.device_id, cupy.ndarray
    b_size, out_size = b_dtype.itemsize, out_dtype.itemsize
    current_device, current_stream = cupy.cuda.runtime.getDevice, cupy.cuda.get_current_stream
    several = cupy.cuda.runtime.getDeviceCount() > 1
    lock = _locks.setdefault(device_id, threading.RLock())
    # Variables of this function, not of an object: their access is part of the time of every call.
    calls_of: dict[Any, Call] = {}  # addresses, shapes, strides, dtypes, stream, epilogue of operands -> their launches
    moving_of: dict[Any, Moving] = {}  # what launches depend on beside addresses -> the product at any of them
    # The latest operands as weak references, the properties of them that may change, and their launches.
    latest: tuple[Any, Any, Any, Any] = (_nothing, _nothing, None, None)

    def run(B: Any, out: Any, epilogue: tuple[Any, ...] = ()) -> Any:
        if out is None:
            return first(B, None, epilogue, None)
        nonlocal latest
        stream = current_stream().ptr
        if stream == PER_THREAD:
            stream = identity(stream)
        b_seen, out_seen, properties, call = latest  # read once: another thread may replace it
        # Of the same objects only the shape can change.
        if b_seen() is not B or out_seen() is not out or properties != (B.shape, out.shape, stream, epilogue):
            try:  # all that the checks and the launches depend on; an address also identifies the device
                key = (B.data.ptr, out.data.ptr, B.shape, B.strides, B.dtype, out.shape, out.strides, out.dtype,
                       stream, epilogue)  # fmt: skip
                call = calls_of.get(key)
            except AttributeError:  # not CuPy arrays
                return first(B, out, epilogue, None)
            if call is None:
                return first(B, out, epilogue, key)
            latest = weakref.ref(B), weakref.ref(out), (B.shape, out.shape, stream, epilogue), call
        if several and current_device() != device_id:
            return first(B, out, epilogue, None)
        call()
        return out

    def first(B: Any, out: Any, epilogue: tuple[Any, ...], key: Any) -> Any:
        """``run`` for new operands: check them, prepare the launches, remember these under ``key``."""
        if current_device() != device_id:
            with cupy.cuda.Device(device_id):  # each device has its own current stream
                return run(B, out, epilogue)
        if not isinstance(B, ndarray) or not (out is None or isinstance(out, ndarray)):
            label, x = ("out", out) if isinstance(B, ndarray) else ("B", B)
            kind = type(x).__name__
            raise TypeError(f"{label}: expected a CuPy array on cuda:{device_id}, got {kind}; {REMEDY}")
        shape = B.shape
        if len(shape) != 2 or shape[0] != K:
            raise ValueError(f"B: expected shape ({K}, N), got {shape}")
        n = shape[1]
        if n > MAX_COLUMNS:
            raise LimitError(f"B: {n:,} columns are more than {MAX_COLUMNS:,}; multiply fewer columns at a time")
        if out is None:
            return run(B, empty((M, n)), epilogue)
        if B.dtype != b_dtype:
            raise TypeError(f"B: this plan takes {p.b_dtype}, got {B.dtype}")
        if out.shape != (M, n):
            raise ValueError(f"out: expected shape {(M, n)}, got {out.shape}")
        if out.dtype != out_dtype:
            raise TypeError(f"out: this plan writes {out_dtype}, got {out.dtype}")
        b, c = B.data, out.data
        ldb = leading("B", shape, B.strides, b, b_size, b_col, device_id)
        ldc = leading("out", (M, n), out.strides, c, out_size, out_col, device_id)
        if not (M and n):
            return out
        b_at, c_at = b.ptr, c.ptr
        b_end = b_at + b_size * (((n - 1) * ldb + K) if b_col else ((K - 1) * ldb + n)) if K else b_at
        c_end = c_at + out_size * (((n - 1) * ldc + M) if out_col else ((M - 1) * ldc + n))
        if b_at < c_end and c_at < b_end and share_memory(B, out):
            raise ValueError("out overlaps B; the product would read what it writes")
        for start, end in reads():
            if start < c_end and c_at < end:
                raise ValueError(OVERWRITES)
        if epilogue and epilogue[0]:
            if epilogue[0] % out_size:
                raise ValueError(f"bias: pointer is not aligned to its {out_size}-byte elements")
            if epilogue[0] < c_end and c_at < epilogue[0] + M * out_size:
                raise ValueError("out overlaps the bias; the product would overwrite what it adds")
        operands = Operands(b_at, c_at, n, ldb, ldc, current_stream().ptr, *epilogue)
        addresses = b_at, c_at, operands.bias
        form = alignment(*addresses, identity(operands.stream)), bool(operands.bias), n, ldb, ldc, epilogue[1:]
        keeps = not epilogue or epilogue[1]  # alpha = -0.0 would have the same key as alpha = 0.0
        moved = moving_of.get(form) if keeps else None
        if moved is None:
            call, repeatable, moved = ready(operands)
        else:
            call, repeatable = functools.partial(moved, addresses), True
        call()
        if repeatable and keeps:
            if len(calls_of) >= REMEMBERED:
                calls_of.clear()
            calls_of[key] = call
            if moved is not None:
                if len(moving_of) >= REMEMBERED:
                    moving_of.clear()
                moving_of[form] = moved
        return out

    def ready(operands: Operands) -> tuple[Call, bool, Moving | None]:
        """The call for checked operands, with the plan's device current, whether it may be kept, and the product for
        operands of the same form at other addresses.

        What is prepared while a graph is captured may use memory that only the graph clears; it is not kept.
        """
        if captured(operands.stream):
            return _one_call(prepare(operands), operands, prepare, lock), False, None
        calls, moved = moving(prepare, operands, lock)
        if moved is None:
            return _one_call(calls, operands, prepare, lock), True, None
        return functools.partial(moved, (operands.b, operands.c, operands.bias)), True, moved

    def empty(shape: tuple[int, int]) -> Any:
        try:
            return cupy.empty(shape, out_dtype, order)
        except cupy.cuda.memory.OutOfMemoryError as e:
            text = f"out: {shape[0] * shape[1] * out_size:,} bytes for {shape} do not fit the device; the CUDA context"
            raise DeviceMemoryError(f"{text} is usable. Multiply fewer columns of B at a time") from e

    def run_epilogue(B: Any, out: Any, alpha: float, beta: float, bias: Any) -> Any:
        return run(B, out, (bias_pointer(p, bias, beta, out), float(alpha), float(beta)))

    return Plan(name, p, run_epilogue if p.epilogue else run, tile, workspace, reads, prepare, ready)


def _one_call(calls: Sequence[Call], o: Operands, prepare: Prepare | Library, lock: Any) -> Call:
    if len(calls) == 1:
        return calls[0]
    return LaunchSequence(calls, o.stream, lock, functools.partial(prepare, o))
