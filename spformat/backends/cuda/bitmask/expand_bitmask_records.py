"""The records of a 16-bit Bitmask as a dense matrix on the device, in one pass.  Kernel: expand_bitmask_records.cu."""

from __future__ import annotations

import functools

from ....arrays.library import ceil_div
from ..runtime import jit
from ..runtime.expansion import UNIT, Target, Writer
from ..runtime.launch import Bound, Launch
from ..runtime.record_products import room_of
from .bitmask_records import Records

SOURCE = "bitmask/expand_bitmask_records.cu"
WARPS = 8
"""Warps of a block; must match the kernel."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(aligned) for aligned in (True, False))


def writer(records: Records, target: Target) -> Writer:
    """The launches that write the matrix of ``records`` as a dense one."""
    (M, _), steps, room = records.shape, records.steps, room_of(records.longest)
    count, smem = records.count, WARPS * room

    @functools.cache
    def launch(aligned: bool) -> Launch:
        function = jit.load(SOURCE, _instance(aligned), *target, smem)
        return Launch(function, "PPqqqiPq", (records.data, records.starts, M, steps, count, room), WARPS * 32, smem)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        if not count:
            return []
        aligned = x % UNIT == 0 and 2 * ld % UNIT == 0
        return [launch(aligned).bind((ceil_div(count, WARPS), 1, 1), stream, x, ld)]

    return launches


def _instance(aligned: bool) -> str:
    return f"expand_bitmask_records<{str(aligned).lower()}>"
