"""Matrices in records as dense matrices, a block of threads for each run of records: see record_run.cuh."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ....arrays.library import ceil_div
from . import jit
from .expansion import UNIT, Target, Writer
from .launch import Bound, Launch
from .record_products import Records

EACH = 4
"""Records of a run."""
PITCH = 528
"""Bytes between rows that are put together in shared memory. All as in the headers."""


def writer(records: Records, source: str, instance: Callable[[bool], str], warps: int, target: Target) -> Writer:
    """The launches that write the matrix of ``records`` as a dense one.

    instance: the C++ name of the kernel, by whether rows start on 16 bytes; warps: of a block.
    """
    M, steps, smem = records.shape[0], records.steps, records.rows * PITCH + EACH * records.longest

    @functools.cache
    def launch(aligned: bool) -> Launch:
        function = jit.load(source, instance(aligned), *target, smem)
        return Launch(function, "PPqiPq", (records.data, records.starts, M, steps), 32 * warps, smem)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        if not records.count:
            return []
        blocks = ceil_div(M, records.rows) * ceil_div(steps, EACH)
        return [launch(x % UNIT == 0 and 2 * ld % UNIT == 0).bind((blocks, 1, 1), stream, x, ld)]

    return launches
