"""Memory of plans and kernels that outlives no call of theirs, or is kept between calls."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ...errors import DeviceMemoryError


def captured(stream: int) -> bool:
    """Whether work on the stream (a cudaStream_t as int) is recorded into a CUDA graph now."""
    if stream == 0:  # the default stream cannot be
        return False
    from cupy.cuda import runtime

    return bool(runtime.streamIsCapturing(stream))


class Scratch:
    """Buffers of one plan: one per stream and power of two of bytes, none given back before the plan dies.

    So a captured graph may replay into its buffer, calls on different streams do not share one, and calls of
    different sizes on one stream hold at most twice the largest.
    """

    def __init__(self, zeros: bool = False) -> None:
        """``zeros``: a buffer is zeros at first; what uses it leaves zeros, whatever part of it that is."""
        self._lock = threading.Lock()
        self._zeros = zeros
        self._recorded: list[Any] = []
        self._held: dict[tuple[int, int], Any] = {}

    def buffer(self, stream: int, nbytes: int) -> int:
        """Address of ``nbytes`` bytes, 256-byte aligned, for the launches of one call: they follow one another on the
        stream, and another call's must not come between them."""
        import cupy

        key = stream, max(0, nbytes - 1).bit_length()
        with self._lock:
            held = self._held.get(key)
            if held is None:
                try:
                    held = (cupy.zeros if self._zeros else cupy.empty)(1 << key[1], "u1")
                except cupy.cuda.memory.OutOfMemoryError as e:
                    raise DeviceMemoryError(f"workspace: {1 << key[1]:,} bytes do not fit the device") from e
                if self._zeros and captured(stream):  # cleared when the graph runs, not now: nobody else may have it
                    self._recorded.append(held)
                else:
                    self._held[key] = held
            return int(held.data.ptr)


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
