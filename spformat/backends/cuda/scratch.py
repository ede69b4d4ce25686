"""Device memory that a plan needs during a call and keeps between calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ...errors import DeviceMemoryError


class Scratch:
    """Buffers of one plan: one per stream and power of two of bytes, none given back before the plan dies.

    So a captured graph may replay into its buffer, calls on different streams do not share one, and calls of
    different sizes on one stream hold at most twice the largest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], Any] = {}

    @contextlib.contextmanager
    def buffer(self, stream: int, nbytes: int) -> Iterator[int]:
        """Address of ``nbytes`` bytes for the launches of one call, which other threads must not come between."""
        import cupy

        key = stream, max(0, nbytes - 1).bit_length()
        with self._lock:
            if key not in self._held:
                try:
                    self._held[key] = cupy.empty(1 << key[1], "u1")
                except cupy.cuda.memory.OutOfMemoryError as e:
                    raise DeviceMemoryError(f"workspace: {1 << key[1]:,} bytes do not fit the device") from e
            yield self._held[key].data.ptr
