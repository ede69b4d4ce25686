"""Whether a 2:4 matrix on the device is valid, in one launch: ``scan_launch``.  Kernel: two_four_scan.cu."""

from __future__ import annotations

import ctypes

from ....arrays.library import Array
from ..runtime.scan_launch import WARP, WIDE, Pass, finds_nothing

SOURCE = "two_four/two_four_scan.cu"
INSTANCE = "spformat::two_four_scan"


class Places(ctypes.Structure):
    """Must match ``Places`` in the kernel: the steps of ``formats.meta_orders.meta_steps``."""

    _fields_ = [(name, ctypes.c_int64) for name in ("r32", "r16", "r8", "r1", "shift", "outer", "inner")]


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return (INSTANCE,)


def two_four_sound(shape: tuple[int, int], data: Array, meta: Array, nibbles: int, steps: tuple[int, ...]) -> bool:
    """Whether data [Mp, Kp/2] and meta [Mp*Kp/16], CuPy, are those of a valid matrix; waits for the device.

    nibbles: those that the encoder writes for each nonzero mask; steps: ``formats.meta_orders.meta_steps``.
    """
    if data.data.ptr % WIDE:
        return False
    Mp, Kp = data.shape[0], 2 * data.shape[1]
    args = (data, meta, *shape, Mp, Kp, Places(*steps), nibbles)
    return finds_nothing(SOURCE, Pass(INSTANCE, ("P", "P", "q", "q", "q", "q", Places, "q"), args, Mp * WARP))
