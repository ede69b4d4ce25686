"""Memory of plans and kernels that outlives no call of theirs, or is kept between calls."""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from ....errors import DeviceMemoryError

DEFAULT, PER_THREAD = (0, 1), 2
"""Streams that every device has: the default one under two names, and one for each thread of the host."""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


def identity(stream: int) -> Any:
    """What tells a stream (a cudaStream_t as int) from others: one handle stands for the streams of all threads."""
    return (stream, threading.get_ident()) if stream == PER_THREAD else stream


def captured(stream: int) -> bool:
    """Whether work on the stream (a cudaStream_t as int) is recorded into a CUDA graph now."""
    if stream in DEFAULT:  # cannot be
        return False
    from cupy.cuda import runtime

    return bool(runtime.streamIsCapturing(stream))


@contextmanager
def allocating() -> Iterator[None]:
    """Memory may be taken from the driver while a stream is captured in the usual mode (torch's), which forbids it.
    It is no part of what the graph does."""
    exchange, mode = _exchange_mode(), ctypes.c_int(RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.lru_cache(maxsize=1)
def _exchange_mode() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode


class Room:
    """Device memory that lives as long as somebody holds it."""

    __slots__ = ("__weakref__", "array")

    def __init__(self, nbytes: int, zeros: bool) -> None:
        import cupy

        try:
            with allocating():
                self.array = (cupy.zeros if zeros else cupy.empty)(nbytes, "u1")
        except cupy.cuda.memory.OutOfMemoryError as e:
            raise DeviceMemoryError(f"workspace: {nbytes:,} bytes do not fit the device") from e


class Scratch:
    """Buffers of one plan: one per stream and power of two of bytes, none given back before the plan dies.

    So a captured graph may replay into its buffer, calls on different streams do not share one, and calls of
    different sizes on one stream hold at most twice the largest.
    """

    _lent: ClassVar[weakref.WeakValueDictionary[Any, Room]] = weakref.WeakValueDictionary()
    """By device, stream, power of two, purpose and whether it is zeros between calls: what plans share."""
    _lock: ClassVar = threading.Lock()

    def __init__(self, zeros: bool = False, shared: str = "") -> None:
        """``zeros``: a buffer is zeros at first; what uses it leaves zeros, whatever part of it that is. ``shared``:
        a purpose for which all plans share buffers, as the work of a stream is done in turn; a graph may be replayed
        on another stream, so what is prepared while a stream is captured gets memory of its own."""
        self._zeros, self._shared = zeros, shared
        self._recorded: list[Room] = []
        self._held: dict[tuple[Any, int], Room] = {}

    def buffer(self, stream: int, nbytes: int) -> int:
        """Address of ``nbytes`` bytes, 256-byte aligned, for the launches of one call: they follow one another on the
        stream, and another call's must not come between them."""
        key = identity(stream), max(0, nbytes - 1).bit_length()
        with self._lock:
            private = bool(self._shared) and captured(stream)
            held = None if private else self._held.get(key)
            if held is None:
                held = self._borrowed(*key) if self._shared and not private else Room(1 << key[1], self._zeros)
                # Zeros are cleared when the graph runs, not now: nobody else may have them.
                if private or (self._zeros and captured(stream)):
                    self._recorded.append(held)
                else:
                    self._held[key] = held
            return int(held.array.data.ptr)

    def _borrowed(self, stream: Any, bits: int) -> Room:
        from cupy.cuda import runtime

        key = runtime.getDevice(), stream, bits, self._shared, self._zeros
        room = self._lent.get(key)
        if room is None:
            room = self._lent[key] = Room(1 << bits, self._zeros)
        return room


class Counters:
    """Two 64-bit words, zeros at first, that kernels of this stream count in and the host reads.

    They are pinned host memory, which a device addresses as it is: for counts that are rarely other than zero this
    saves a launch that clears them and a copy that fetches them.
    """

    __slots__ = ("_memory", "_stream", "_words", "address")

    def __init__(self) -> None:
        import cupy

        self._memory = cupy.cuda.alloc_pinned_memory(16)
        self._words = np.frombuffer(self._memory, np.uint64, 2)
        self._words[:] = 0
        self._stream = cupy.cuda.get_current_stream()
        self.address = int(self._memory.ptr)

    def get(self) -> tuple[int, int]:
        """The words, after the stream's launches so far."""
        self._stream.synchronize()  # synchronize!
        return int(self._words[0]), int(self._words[1])
