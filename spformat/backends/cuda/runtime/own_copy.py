"""Copies of B that the blocks of a product write themselves before they multiply: include/spformat/own_copy.cuh."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from ....products.roofline import Device
from .scratch import Scratch


class CopyTo(ctypes.Structure):
    """Must match ``CopyTo`` in the header."""

    _fields_ = [
        ("count", ctypes.c_uint64), ("lines", ctypes.c_uint64), ("ld", ctypes.c_int64), ("shares", ctypes.c_int32),
    ]  # fmt: skip


class Packed(bytes):
    """The bytes of a ``CopyTo``. They keep the memory of its count while a launch has them among its arguments."""

    place: int
    """The address of the count, with its buffer."""


class OwnCopy(NamedTuple):
    """A copy that one launch writes and reads."""

    mapped: tuple[int, int] | None
    """Its address and its pitch in elements; None: no copy."""
    to: bytes
    """The argument of the kernel: a ``CopyTo``."""


NO_COPY = OwnCopy(None, bytes(ctypes.sizeof(CopyTo)))
"""For a B that the copy engine loads from where it lies."""


def copying(clusters: int, parts: int, resident: int, device: Device) -> int:
    """Blocks that copy a part of B each, out of so many clusters of ``parts`` blocks.

    At most one for each multiprocessor, which runs ``resident`` blocks at a time.

    They run at one time. All blocks wait for all parts, so that one that is not there until others end would keep them
    waiting, for milliseconds: more clusters than run at one time belong to a product of which many tiles are zero.
    """
    at_once = min(clusters, device.clusters(parts, resident))
    return min(parts * at_once, device.processors)


class OwnCopies:
    """The copies of B of one plan, with 16-bit values: one place for each stream and power of two of bytes."""

    def __init__(self) -> None:
        self._counts, self._lines = Scratch(zeros=True), Scratch()

    def of(self, stream: int, lines: int, ld: int, blocks: int) -> OwnCopy:
        """The copy of so many lines, ``ld`` elements apart, by so many blocks (``copying``) of a launch."""
        count, at = self._counts.buffer(stream, 4), self._lines.buffer(stream, 2 * lines * ld)
        packed = Packed(CopyTo(count, at, ld, blocks))
        packed.place = count
        return OwnCopy((at, ld), packed)
