"""The records of a 16-bit CSR as a dense matrix on the device, in one pass.  Kernel: expand_csr_records.cu."""

from __future__ import annotations

import functools

from ....arrays.library import ceil_div
from ..runtime import jit
from ..runtime.expansion import UNIT, Target, Writer
from ..runtime.launch import Bound, Launch
from .csr_records import PARTS, Records

SOURCE = "csr/expand_csr_records.cu"
WARPS = 8
"""Warps of a block; must match the kernel."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(aligned) for aligned in (True, False))


def writer(records: Records, target: Target) -> Writer:
    """The launches that write the matrix of ``records`` as a dense one."""
    M, steps, parts = records.shape[0], records.steps, PARTS * records.count

    @functools.cache
    def launch(aligned: bool) -> Launch:
        function = jit.load(SOURCE, _instance(aligned), *target)
        return Launch(function, "PPqqqPq", (records.data, records.starts, M, steps, parts), WARPS * 32)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        if not parts:
            return []
        aligned = x % UNIT == 0 and 2 * ld % UNIT == 0
        return [launch(aligned).bind((ceil_div(parts, WARPS), 1, 1), stream, x, ld)]

    return launches


def _instance(aligned: bool) -> str:
    return f"expand_csr_records<{str(aligned).lower()}>"
