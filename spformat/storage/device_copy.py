"""Bytes between files and a device through pinned host buffers: one piece crosses while the next is read or written.

Each thread of ``crc.in_segments`` takes a lane: a stream and two pinned buffers. A piece is read from the file,
summed while it is in the core's cache, and sent; the other buffer is filled meanwhile. Nothing as large as the
tensor is ever allocated on the host. CuPy is not imported before a lane is asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from .. import limits
from ..arrays.library import Array, device_errors, import_cupy
from . import crc

PIECE = 4 << 20
"""Bytes of one pinned buffer. Threads take turns in the interpreter for every piece, which costs more than the cache
misses of a longer one: on an H200's host 1, 2, 4 and 8 MiB loaded 3.7, 5.3, 6.6 and 6.0 GB/s."""
SEGMENT = 16 << 20
"""Bytes that one thread moves in a row; 4, 8, 16 and 64 MiB loaded 4.6, 5.3, 6.9 and 5.4 GB/s."""
_TO_DEVICE, _TO_HOST = 1, 2
"""cudaMemcpyKind."""


class _Lane:
    """What one thread needs: a stream, two pinned buffers and, for each, the event that says it is free again."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._pinned = cupy.cuda.alloc_pinned_memory(2 * PIECE)
        room = np.frombuffer(self._pinned, np.uint8, 2 * PIECE)
        self.buffers = room[:PIECE], room[PIECE:]
        self._addresses = tuple(b.ctypes.data for b in self.buffers)
        self.events = tuple(cupy.cuda.Event(disable_timing=True) for _ in self.buffers)

    def copy(self, buffer: int, at: int, n: int, kind: int) -> None:
        """Start moving ``n`` bytes between a buffer and the address ``at`` of the device."""
        host = self._addresses[buffer]
        ends = (at, host) if kind == _TO_DEVICE else (host, at)
        self.cupy.cuda.runtime.memcpyAsync(*ends, n, kind, self.stream.ptr)
        self.events[buffer].record(self.stream)


class DeviceCopy:
    """The lanes of one device, made when a thread first asks and used again; close when the file is closed."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._free: SimpleQueue[_Lane] = SimpleQueue()

    @contextmanager
    def _lane(self, ready: Any) -> Iterator[_Lane]:
        """A lane, on this device in this thread, that starts after ``ready`` and is idle again at the end."""
        cupy = import_cupy()
        with cupy.cuda.Device(self.device):
            try:
                lane = self._free.get_nowait()
            except Empty:
                lane = _Lane(cupy)
            lane.stream.wait_event(ready)
            try:
                yield lane
            finally:
                lane.stream.synchronize()  # synchronize!
                self._free.put(lane)

    def fill(
        self, shape: tuple[int, ...], dtype: Any, fetch: Callable[[memoryview, int], None], *, summed: bool
    ) -> tuple[Array, int]:
        """A device array of the bytes that ``fetch`` brings, and their CRC32 (0 unless ``summed``).

        fetch(into, at): put the bytes that start at offset ``at`` into ``into``; called from several threads.
        Raises DeviceMemoryError, DeviceUnavailable, ArrayError (a dtype CuPy lacks), and what ``fetch`` raises.
        """
        cupy, n = import_cupy(), limits.product(*shape, np.dtype(dtype).itemsize)
        with device_errors(f"cuda:{self.device}", dtype, n), cupy.cuda.Device(self.device):
            target = cupy.empty(shape, dtype)
            ready = _now(cupy)  # what the memory pool gave may still be read by kernels launched before

            def work(lo: int, hi: int) -> int:
                found = 0
                with self._lane(ready) as lane:
                    for i, at in enumerate(range(lo, hi, PIECE)):
                        size = min(PIECE, hi - at)
                        lane.events[i % 2].synchronize()  # synchronize!
                        piece = lane.buffers[i % 2][:size].data
                        fetch(piece, at)
                        found = zlib.crc32(piece, found) if summed else 0
                        lane.copy(i % 2, target.data.ptr + at, size, _TO_DEVICE)
                return found

            return target, crc.in_segments(n, work, SEGMENT)

    def drain(self, a: Array, store: Callable[[memoryview, int], None]) -> int:
        """Hand the bytes of a C-contiguous device array to ``store(piece, at)``, from several threads; their CRC32."""
        cupy = import_cupy()
        with device_errors(f"cuda:{self.device}", a.dtype, a.nbytes), cupy.cuda.Device(self.device):
            ready = _now(cupy)

            def work(lo: int, hi: int) -> int:
                found = 0
                pieces = [(at, min(PIECE, hi - at)) for at in range(lo, hi, PIECE)]
                with self._lane(ready) as lane:
                    for i, (at, size) in enumerate(pieces):
                        if i == 0:
                            lane.copy(0, a.data.ptr + at, size, _TO_HOST)
                        if i + 1 < len(pieces):
                            following, length = pieces[i + 1]
                            lane.copy((i + 1) % 2, a.data.ptr + following, length, _TO_HOST)
                        lane.events[i % 2].synchronize()  # synchronize!
                        piece = lane.buffers[i % 2][:size].data
                        found = zlib.crc32(piece, found)
                        store(piece, at)
                return found

            return crc.in_segments(a.nbytes, work, SEGMENT)


def _now(cupy: Any) -> Any:
    """An event after everything launched so far on the caller's stream."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record(cupy.cuda.get_current_stream())
    return event
