"""Copies of B that the blocks of a product write themselves before they multiply: include/spformat/own_copy.cuh."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from ....products.roofline import Device
from .scratch import Scratch

COUNT = 256
"""Bytes in front of a copy, which begin with a count, as in the header."""


class CopyTo(ctypes.Structure):
    """Must match ``CopyTo`` in the header."""

    _fields_ = [("at", ctypes.c_uint64), ("ld", ctypes.c_int64), ("shares", ctypes.c_int32)]


class OwnCopy(NamedTuple):
    """A copy that one launch writes and reads."""

    mapped: tuple[int, int] | None
    """Its address and its pitch in elements; None: no copy."""
    to: bytes
    """What the kernel is told: a ``CopyTo``."""


NO_COPY = OwnCopy(None, bytes(ctypes.sizeof(CopyTo)))
"""For a B that the copy engine loads from where it lies."""


class OwnCopies:
    """The copies of B of one plan, with 16-bit values: one place for each stream and power of two of bytes."""

    def __init__(self) -> None:
        self._places = Scratch(zeros=True)  # of the counts; nobody relies on zeros behind them

    def of(self, stream: int, lines: int, ld: int, blocks: int, device: Device) -> OwnCopy:
        """The copy of so many lines, ``ld`` elements apart, for a launch of so many blocks on ``stream``.

        As many blocks as a device has multiprocessors copy a part each: these run at one time.
        """
        at = self._places.buffer(stream, COUNT + 2 * lines * ld)
        return OwnCopy((at + COUNT, ld), bytes(CopyTo(at, ld, min(blocks, device.processors))))
