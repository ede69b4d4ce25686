"""Compiled: whether bfloat16 numbers are such as instructions for that type multiply exactly."""

from __future__ import annotations

from typing import Any

from ...formats.fast.numba_cache import compiled

STEP = 4096
"""Numbers that are looked at before the loop may end: an inner loop that cannot end early becomes vector code."""


@compiled
def holds_unusual(codes: Any) -> bool:
    """Whether any of uint16[n], the bits of bfloat16 numbers, is subnormal, infinite or NaN."""
    for start in range(0, codes.size, STEP):
        some = False
        for i in range(start, min(codes.size, start + STEP)):
            magnitude = codes[i] & 0x7FFF
            some |= (magnitude >= 0x7F80) | ((magnitude < 0x80) & (magnitude != 0))
        if some:
            return True
    return False
