"""Copies between files and a device through pinned host buffers: one piece is copied while the next is read or written.

Each thread of ``crc.in_segments`` uses a stream and two pinned buffers. A piece is read from the file into one buffer,
checksummed while it is in the core's cache, and copied to the device; meanwhile the other buffer is filled. Nothing as
large as the tensor is ever allocated on the host. CuPy is imported when the first copy begins.
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
"""Bytes of one pinned buffer. For every piece a thread needs the interpreter lock, which costs more than the cache
misses of a longer piece: on the host of an H200, 1, 2, 4 and 8 MiB loaded 3.7, 5.3, 6.6 and 6.0 GB/s."""
SEGMENT = 16 << 20
"""Bytes that one thread copies in a row; 4, 8, 16 and 64 MiB loaded 4.6, 5.3, 6.9 and 5.4 GB/s."""
_TO_DEVICE, _TO_HOST = 1, 2
"""cudaMemcpyKind."""


class _PinnedBuffers:
    """What one thread needs: a stream, two pinned buffers and, for each of them, an event after its last copy."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._pinned = cupy.cuda.alloc_pinned_memory(2 * PIECE)
        memory = np.frombuffer(self._pinned, np.uint8, 2 * PIECE)
        self.buffers = memory[:PIECE], memory[PIECE:]
        self._addresses = tuple(b.ctypes.data for b in self.buffers)
        self.events = tuple(cupy.cuda.Event(disable_timing=True) for _ in self.buffers)

    def copy(self, buffer: int, at: int, n: int, kind: int) -> None:
        """Start copying ``n`` bytes between a buffer and the device address ``at``."""
        host = self._addresses[buffer]
        ends = (at, host) if kind == _TO_DEVICE else (host, at)
        self.cupy.cuda.runtime.memcpyAsync(*ends, n, kind, self.stream.ptr)
        self.events[buffer].record(self.stream)


class DeviceCopy:
    """Copies between one device and files. The buffers of a thread are created when it first copies, and used again."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._free: SimpleQueue[_PinnedBuffers] = SimpleQueue()

    @contextmanager
    def _pinned_buffers(self, ready: Any) -> Iterator[_PinnedBuffers]:
        """Buffers for the calling thread, with this device current. Their stream waits for the event ``ready`` first,
        and has finished at the end of the block."""
        cupy = import_cupy()
        with cupy.cuda.Device(self.device):
            try:
                pinned = self._free.get_nowait()
            except Empty:
                pinned = _PinnedBuffers(cupy)
            pinned.stream.wait_event(ready)
            try:
                yield pinned
            finally:
                pinned.stream.synchronize()  # synchronize!
                self._free.put(pinned)

    def fill(
        self, shape: tuple[int, ...], dtype: Any, fetch: Callable[[memoryview, int], None], *, summed: bool
    ) -> tuple[Array, int]:
        """A new device array, filled with the bytes from ``fetch``, and their CRC32 (0 unless ``summed``).

        ``fetch(into, at)`` must write the bytes that start at offset ``at`` to ``into``; several threads call it.
        Raises DeviceMemoryError, DeviceUnavailable, ArrayError (a dtype that CuPy lacks), and what ``fetch`` raises.
        """
        cupy, n = import_cupy(), limits.product(*shape, np.dtype(dtype).itemsize)
        with device_errors(f"cuda:{self.device}", dtype, n), cupy.cuda.Device(self.device):
            target = cupy.empty(shape, dtype)
            ready = _now(cupy)  # kernels that were launched earlier may still read the memory that the pool reuses

            def work(lo: int, hi: int) -> int:
                computed = 0
                with self._pinned_buffers(ready) as pinned:
                    for i, at in enumerate(range(lo, hi, PIECE)):
                        size = min(PIECE, hi - at)
                        pinned.events[i % 2].synchronize()  # synchronize!
                        piece = pinned.buffers[i % 2][:size].data
                        fetch(piece, at)
                        computed = zlib.crc32(piece, computed) if summed else 0
                        pinned.copy(i % 2, target.data.ptr + at, size, _TO_DEVICE)
                return computed

            return target, crc.in_segments(n, work, SEGMENT)

    def drain(self, a: Array, store: Callable[[memoryview, int], None]) -> int:
        """Pass the bytes of a C-contiguous device array to ``store(piece, at)``, from several threads.

        Returns their CRC32.
        """
        cupy = import_cupy()
        with device_errors(f"cuda:{self.device}", a.dtype, a.nbytes), cupy.cuda.Device(self.device):
            ready = _now(cupy)

            def work(lo: int, hi: int) -> int:
                computed = 0
                pieces = [(at, min(PIECE, hi - at)) for at in range(lo, hi, PIECE)]
                with self._pinned_buffers(ready) as pinned:
                    for i, (at, size) in enumerate(pieces):
                        if i == 0:
                            pinned.copy(0, a.data.ptr + at, size, _TO_HOST)
                        if i + 1 < len(pieces):
                            following, length = pieces[i + 1]
                            pinned.copy((i + 1) % 2, a.data.ptr + following, length, _TO_HOST)
                        pinned.events[i % 2].synchronize()  # synchronize!
                        piece = pinned.buffers[i % 2][:size].data
                        computed = zlib.crc32(piece, computed)
                        store(piece, at)
                return computed

            return crc.in_segments(a.nbytes, work, SEGMENT)


def _now(cupy: Any) -> Any:
    """An event after everything that was launched so far on the caller's stream."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record(cupy.cuda.get_current_stream())
    return event
