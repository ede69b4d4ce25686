"""Device memory for plans and kernels: workspaces that are kept between calls, and counters that the host reads."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from sys import modules
from typing import Any, ClassVar

from ....errors import DeviceMemoryError

DEFAULT, PER_THREAD = (0, 1), 2
"""Handles of the streams that every device has: the default stream has two, and one stands for per-thread streams."""
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


def identity(stream: int) -> Any:
    """A key for a stream (a cudaStream_t as int). The handle PER_THREAD means another stream in every thread."""
    return (stream, threading.get_ident()) if stream == PER_THREAD else stream


def captured(stream: int) -> bool:
    """Whether work on the stream (a cudaStream_t as int) is recorded into a CUDA graph now."""
    if stream in DEFAULT:  # the default stream cannot be captured
        return False
    from cupy.cuda import runtime

    return bool(runtime.streamIsCapturing(stream))


@contextmanager
def beside_capture() -> Iterator[None]:
    """Inside the block memory may be allocated while a stream is captured, which the usual capture mode, also torch's,
    forbids. That does not become part of the graph."""
    exchange, mode = _exchange_mode(), ctypes.c_int(RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.lru_cache(maxsize=1)
def _exchange_mode() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode


class Buffer:
    """Device memory, freed when the last reference to it is gone."""

    __slots__ = ("__weakref__", "array")

    def __init__(self, nbytes: int, zeros: bool) -> None:
        import cupy

        try:
            with beside_capture():
                self.array = (cupy.zeros if zeros else cupy.empty)(nbytes, "u1")
        except cupy.cuda.memory.OutOfMemoryError as e:
            raise DeviceMemoryError(f"workspace: {nbytes:,} bytes do not fit the device") from e


class Place(int):
    """An address in a buffer, which is not freed while a launch has the address among its arguments."""

    buffer: Buffer

    @classmethod
    def of(cls, address: int, buffer: Buffer) -> Place:
        """The address, with its buffer."""
        place = cls(address)
        place.buffer = buffer
        return place

    def __add__(self, distance: int) -> Place:
        return Place.of(int.__add__(self, distance), self.buffer)

    __radd__ = __add__


class Scratch:
    """The workspaces of one plan: one buffer for each stream and power of two of bytes, kept as long as the plan.

    A captured graph can therefore be replayed into its buffer, and calls on different streams never share one. Calls of
    different sizes on one stream take at most twice the memory of the largest.
    """

    _shared_buffers: ClassVar[weakref.WeakValueDictionary[Any, Buffer]] = weakref.WeakValueDictionary()
    """(device, stream, power of two, purpose, whether it is zeros between calls) -> a buffer that plans share."""
    _lock: ClassVar = threading.Lock()

    def __init__(self, zeros: bool = False, shared: str = "") -> None:
        """``zeros``: a new buffer is filled with zeros, and every kernel that uses a part of it leaves zeros there.

        ``shared``: a purpose, for which all plans share buffers: a stream runs their work in order. A graph may be
        replayed on another stream, so work that is prepared while a stream is captured gets memory of its own.
        """
        self._zeros, self._purpose = zeros, shared
        self._recorded: list[Buffer] = []
        self._buffers: dict[tuple[Any, int], Buffer] = {}

    def buffer(self, stream: int, nbytes: int) -> int:
        """Address of ``nbytes`` bytes, 256-byte aligned, for the launches of one call on ``stream``.

        The launches of another call must not be queued between them.
        """
        key = identity(stream), max(0, nbytes - 1).bit_length()
        with self._lock:
            private = bool(self._purpose) and captured(stream)
            buffer = None if private else self._buffers.get(key)
            if buffer is None:
                shares = self._purpose and not private
                buffer = self._shared_buffer(*key) if shares else Buffer(1 << key[1], self._zeros)
                # While a graph is captured, a buffer is filled with zeros only when the graph runs: no other call may
                # use it.
                if private or (self._zeros and captured(stream)):
                    self._recorded.append(buffer)
                else:
                    self._buffers[key] = buffer
            return Place.of(int(buffer.array.data.ptr), buffer)

    def _shared_buffer(self, stream: Any, bits: int) -> Buffer:
        from cupy.cuda import runtime

        key = runtime.getDevice(), stream, bits, self._purpose, self._zeros
        buffer = self._shared_buffers.get(key)
        if buffer is None:
            buffer = self._shared_buffers[key] = Buffer(1 << bits, self._zeros)
        return buffer


class Workspace:
    """Device memory that the launches of one call need: one allocation, cut into pieces.

    It must be kept until the last of them is queued. CuPy's pool then gives it to later work on the same stream only.
    """

    __slots__ = ("_memory", "places")

    def __init__(self, *nbytes: int) -> None:
        """nbytes: those of each piece."""
        self._memory, self.places = self._allocated(nbytes)
        """``places``: the address of each piece, on a multiple of 256 bytes."""

    @staticmethod
    def _allocated(nbytes: tuple[int, ...]) -> tuple[Any, list[int]]:
        starts, end = _cut(nbytes)
        memory = modules["cupy"].cuda.alloc(end)
        address = memory.ptr
        return memory, [address + start for start in starts]


@functools.lru_cache(maxsize=1024)
def _cut(nbytes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Where each piece of a workspace starts, and its end."""
    starts, end = [], 0
    for n in nbytes:
        starts.append(end)
        end += -(-n // 256) * 256
    return tuple(starts), end


def new_arrays(*specs: tuple[tuple[int, ...], Any]) -> list[Any]:
    """Uninitialised arrays on the current device, of each (shape, dtype).

    Small ones share an allocation: asking CuPy for every array takes the host as long as a launch. The memory of all is
    free when the last of them is, so they should belong to one matrix; of large ones none waits for another.
    """
    return _carved(specs)


def _carved(specs: tuple[tuple[tuple[int, ...], Any], ...]) -> list[Any]:
    cupy, starts, end = modules["cupy"], [], 0
    for shape, dtype in specs:
        starts.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // 256) * 256
    if end > SMALL:
        return [cupy.empty(*spec) for spec in specs]
    memory, array = cupy.cuda.alloc(end), cupy.ndarray
    return [
        array(shape, dtype, memory + at if at else memory) for (shape, dtype), at in zip(specs, starts, strict=True)
    ]


SMALL = 1 << 20
"""Bytes of arrays that may share an allocation."""


class Words:
    """64-bit words in pinned host memory, which a device can address."""

    __slots__ = ("_memory", "address", "words")
    FEW, AT_ONCE = 16, 64
    """Words that are taken at least, so that no cache line is shared; how many such pieces are allocated together."""
    _free: ClassVar[defaultdict[int, list[Words]]] = defaultdict(list)
    """Number of words, a power of two -> those that no kernel writes to any more."""

    def __init__(self, memory: Any, address: int, count: int) -> None:
        self._memory, self.address = memory, address
        self.words = (ctypes.c_uint64 * count).from_address(address)

    @classmethod
    def taken(cls, count: int = FEW) -> Words:
        """``count`` words or more that nobody else uses; any contents."""
        size = cls.FEW if count <= cls.FEW else 1 << (count - 1).bit_length()
        free = cls._free[size]
        try:
            return free.pop()  # one call, so that threads never take the same
        except IndexError:
            import cupy

            pieces = cls.AT_ONCE if size == cls.FEW else 1
            memory = cupy.cuda.alloc_pinned_memory(8 * size * pieces)
            new = [cls(memory, int(memory.ptr) + 8 * size * i, size) for i in range(pieces)]
            free.extend(new[1:])
            return new[0]

    def give_back(self) -> None:
        """Let others take them. The device must have finished what writes to them."""
        self._free[len(self.words)].append(self)


class Counters:
    """Two 64-bit words in which kernels of the current stream count, and which the host reads; at first zero.

    They are in pinned host memory. For counts that are mostly zero this saves a launch that clears them and a copy back
    to the host. ``get`` gives the memory back. Where it is not called, after an error, nobody else gets that memory: a
    kernel may still write to it.

    Words that a kernel stores once, rather than add to them, may be read as soon as they are there, while the kernel
    still runs. A driver that is asked to wait tells the host some microseconds later.
    """

    __slots__ = ("_counted", "_stored", "_stream", "_words", "address")
    POLLS: ClassVar = 400
    """How often words are looked at, some 20 us together, before the driver is asked to wait: it knows of errors, and
    lets other threads run."""

    def __init__(self, stored: int = 0) -> None:
        """stored: how many of the words, the first or both, the next launches store once."""
        taken = Words.taken()
        words = taken.words
        words[0] = _UNKNOWN if stored else 0
        words[1] = _UNKNOWN if stored > 1 else 0
        self._stored = stored
        self._words: Words | None = taken
        self._counted = 0, 0
        self._stream = modules["cupy"].cuda.get_current_stream()
        self.address = taken.address

    def get(self) -> tuple[int, int]:
        """The words after all launches that were queued on the stream before the first ``get``; none may follow."""
        taken = self._words
        if taken is not None:
            words, polls = taken.words, self.POLLS if self._stored else 0
            while polls and (words[0] == _UNKNOWN or words[1] == _UNKNOWN):
                polls -= 1
            if not polls:
                self._stream.synchronize()  # synchronize!
            self._counted, self._words = (words[0], words[1]), None
            taken.give_back()
        return self._counted


_UNKNOWN = 2**64 - 1
"""What no kernel stores."""
