"""Check in one launch whether the arrays of a matrix on the device are valid: shared by the ``*_scan`` modules.

The checks of a format name the invalid element. For a valid matrix a scan is faster: one launch, every array read once,
one wait. A scan answers only yes or no. After a no, the checks of the format run and report what is wrong.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ....arrays.library import ceil_div, is_cupy
from .queue import Kernels
from .scratch import Counters

THREADS = 256
"""Threads of a block; the same as ``THREADS`` in scan.cuh."""
BLOCKS = 2048
"""Most blocks of a launch: enough to fill any device. Each block loops over its share of the work."""
WARP, WIDE = 32, 16
"""Lanes of a warp; bytes of a load."""


def span(nbytes: int) -> int:
    """Lanes that read a piece of ``nbytes`` together: a power of two, at most a warp."""
    return min(WARP, 1 << (ceil_div(nbytes, WIDE) - 1).bit_length()) if nbytes else 1


class Pass(NamedTuple):
    """One launch of a scan."""

    instance: str
    """C++ name of the kernel."""
    signature: Any
    """The letters of ``args``, as for ``Launch``. The last parameter, the address of the counters, is left out."""
    args: tuple[Any, ...]
    """CuPy arrays stand for their addresses."""
    threads: int
    """Number of threads that have work."""


def finds_nothing(source: str, *passes: Pass) -> bool:
    """Whether none of the passes finds an invalid element. Waits for the device.

    False also for arrays that are not aligned to their elements, which the kernels cannot read.
    """
    arrays = [a for p in passes for a in p.args if is_cupy(a)]
    if any(a.data.ptr % a.dtype.itemsize for a in arrays):
        return False
    kernels, counters = _kernels(source), Counters()
    for p in passes:
        blocks = max(1, min(BLOCKS, ceil_div(p.threads, THREADS)))
        kernels.queue(p.instance, (*p.signature, "P"), blocks, *p.args, counters.address)
    return counters.get()[0] == 0


@functools.cache
def _kernels(source: str) -> Kernels:
    return Kernels(source, THREADS)
