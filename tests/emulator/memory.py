"""Memory of the emulated device: every array ends before a page that cannot be touched."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from .build import EmulatorError

PAGE = mmap.PAGESIZE
STACK, THREADS, MOST_THREADS = 64 * 1024, 1024, 8192
"""Bytes of the stack of a thread, and the most threads of a block and of a cluster, as in device/fibers.cpp."""
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
NO_RESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Span = tuple[int, int, int, Any]
"""First byte, the one behind the last, place among the arguments, array."""


def _mapped(size: int, flags: int = PRIVATE) -> int:
    base = _libc.mmap(None, size, READ_WRITE, flags, -1, 0)
    if base in (None, 2**64 - 1):
        raise MemoryError(f"mmap of {size} bytes: error {ctypes.get_errno()}")
    return int(base)


def _closed(at: int) -> None:
    if _libc.mprotect(at, PAGE, 0):
        raise MemoryError(f"mprotect: error {ctypes.get_errno()}")


def stacks(threads: int) -> int:
    """The stacks of the threads of a block or a cluster, the lowest page of each closed: one set for all kernels of a
    process, since the pages that are closed apart count among the 65,530 maps that Linux gives a process."""
    return _stacks(THREADS if threads <= THREADS else MOST_THREADS)


@functools.cache
def _stacks(threads: int) -> int:
    base = _mapped(threads * STACK, PRIVATE | NO_RESERVE)
    for t in range(threads):
        _closed(base + t * STACK)
    return base


class Room:
    """``size`` bytes between two pages that cannot be touched, the second at most 15 bytes behind them."""

    def __init__(self, size: int, shift: int = 0, fill: int = 0) -> None:
        """``shift``: how far behind a boundary of 16 bytes they start. ``fill``: the byte everywhere."""
        self.size, self._length = size, ((size + 31 + PAGE - 1) // PAGE + 2) * PAGE
        self._base = _mapped(self._length)
        self._last = self._base + self._length - PAGE
        self.start = (self._last - size - shift) // 16 * 16 + shift
        ctypes.memset(self._base, fill, self._length)
        for at in (self._base, self._last):
            _closed(at)

    def before(self) -> bytes:
        """The bytes between the first page and the array."""
        return ctypes.string_at(self._base + PAGE, self.start - self._base - PAGE)

    def behind(self) -> bytes:
        """The bytes between the array and the last page."""
        return ctypes.string_at(self.start + self.size, self._last - self.start - self.size)

    def __del__(self) -> None:
        if hasattr(self, "_base"):
            _libc.munmap(self._base, self._length)


class Copies:
    """The arrays of one call, each as a copy in a ``Room``. Arrays that overlap share a copy."""

    FILL = 0xB7

    def __init__(self, arguments: Sequence[Any], pointers: Sequence[bool], misalign: int | dict[int, int]) -> None:
        self.addresses: dict[int, int] = {}
        self._groups: list[tuple[int, Room, list[Span]]] = []
        spans = []
        for i, (argument, pointer) in enumerate(zip(arguments, pointers, strict=True)):
            if not pointer:
                if isinstance(argument, np.ndarray) and argument.size != 1:
                    raise EmulatorError(f"argument {i} is an array for a parameter by value")
            elif argument is None or isinstance(argument, int | np.integer):
                self.addresses[i] = int(argument or 0)
            elif isinstance(argument, np.ndarray):
                spans.append((*bounds(argument), i, argument))
            else:
                raise EmulatorError(
                    f"argument {i} is for a pointer: give an array, an address or None, not {argument!r}"
                )
        for members in _overlapping(spans):
            low, size = members[0][0], max(m[1] for m in members) - members[0][0]
            shift = misalign.get(members[0][2], 0) if isinstance(misalign, dict) else misalign
            room = Room(size, shift % 16, self.FILL)
            ctypes.memmove(room.start, low, size)
            self._groups.append((low, room, members))
            self.addresses.update({i: room.start + first - low for first, _, i, _ in members})

    def near(self, at: int) -> str:
        """Where the address is, relative to the closest array: ", 4 bytes before argument 0 (400 bytes)"."""
        best: tuple[int, str] | None = None
        for _, room, members in self._groups:
            start, end = room.start, room.start + room.size
            distance = start - at if at < start else at - end + 1 if at >= end else 0
            if distance <= 1 << 20 and (best is None or distance < best[0]):
                side = (
                    f"{distance} bytes before"
                    if at < start
                    else f"{at - end} bytes behind the end of"
                    if distance
                    else "inside"
                )
                best = distance, f", {side} {_named(members, room.size)}"
        return best[1] if best else ""

    def damage(self) -> str:
        """What a kernel wrote into the bytes around an array; "" if nothing."""
        for _, room, members in self._groups:
            for text, side in ((room.before(), "before"), (room.behind(), "behind the end of")):
                wrong = np.flatnonzero(np.frombuffer(text, np.uint8) != self.FILL)
                if wrong.size:
                    gap = len(text) - int(wrong[-1]) if side == "before" else int(wrong[0])
                    return f"writes {gap} bytes {side} {_named(members, room.size)}"
        return ""

    def copy_back(self) -> None:
        """The results into the arrays that were given."""
        for low, room, members in self._groups:
            if any(m[3].flags.writeable for m in members):
                ctypes.memmove(low, room.start, room.size)


def _named(members: list[Span], size: int) -> str:
    return f"argument {' / '.join(str(m[2]) for m in members)} ({size} bytes)"


def bounds(a: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Addresses of the first byte of an array and of the one behind its last."""
    low = high = a.__array_interface__["data"][0]
    if a.size == 0:
        return low, low
    for n, s in zip(a.shape, a.strides, strict=True):
        low, high = (low + (n - 1) * s, high) if s < 0 else (low, high + (n - 1) * s)
    return low, high + a.itemsize


def _overlapping(spans: list[Span]) -> list[list[Span]]:
    """Groups of arrays that share bytes, or that are the same empty one."""
    groups: list[list[Span]] = []
    end = 0
    for span in sorted(spans, key=lambda s: s[:3]):
        if groups and ((span[0] < end and span[1] > span[0]) or span[:2] == groups[-1][0][:2]):
            groups[-1].append(span)
            end = max(end, span[1])
        else:
            groups.append([span])
            end = span[1]
    return groups
