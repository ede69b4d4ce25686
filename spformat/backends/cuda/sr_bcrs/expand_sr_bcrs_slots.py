"""A 16-bit SR-BCRS in slots as a dense matrix on the device, in one pass.  Kernel: expand_sr_bcrs_slots.cu."""

from __future__ import annotations

import functools

from ....arrays.library import ceil_div
from ..runtime import jit
from ..runtime.expansion import UNIT, Target, Writer
from ..runtime.launch import Bound, Launch
from .mma_fragments import Fragments

SOURCE = "sr_bcrs/expand_sr_bcrs_slots.cu"
THREADS, EACH = 256, 2
"""Threads of a block, and records side by side that it writes; must match the kernel."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(aligned) for aligned in (True, False))


def writer(slots: Fragments, target: Target) -> Writer:
    """The launches that write the matrix of ``slots`` as a dense one."""
    M, chunks = slots.shape[0], slots.chunks

    @functools.cache
    def launch(aligned: bool) -> Launch:
        function = jit.load(SOURCE, _instance(aligned), *target)
        return Launch(function, "PPqiPq", (slots.first, slots.pieces, M, chunks), THREADS)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        blocks = slots.panels * ceil_div(chunks, EACH)
        if not blocks:
            return []
        return [launch(x % UNIT == 0 and 2 * ld % UNIT == 0).bind((blocks, 1, 1), stream, x, ld)]

    return launches


def _instance(aligned: bool) -> str:
    return f"expand_sr_bcrs_slots<{str(aligned).lower()}>"
