"""Check in one launch whether the arrays of a matrix on the device are valid: shared by the ``*_scan`` modules.

The checks of a format name the invalid element. For a valid matrix a scan is faster: one launch, every array read once,
one wait. A scan answers only yes or no. After a no, the checks of the format run and report what is wrong.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ....arrays.library import Array, ceil_div, is_cupy
from . import jit
from .launch import Launch
from .scratch import Counters

THREADS = 256
"""Threads of a block; the same as ``THREADS`` in scan.cuh."""
BLOCKS = 2048
"""Most blocks of a launch: enough to fill any device. Each block loops over its share of the work."""
WARP, WIDE = 32, 16
"""Lanes of a warp; bytes of a load."""
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
INDEX = {4: "int", 8: "long long"}


def word(a: Array) -> str:
    """C++ type of the values of ``a`` as unsigned words."""
    return WORDS[a.dtype.itemsize]


def index(a: Array) -> str:
    """C++ type of the indices in ``a``."""
    return INDEX[a.dtype.itemsize]


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
    import cupy

    arrays = [a for p in passes for a in p.args if is_cupy(a)]
    if any(a.data.ptr % a.dtype.itemsize for a in arrays):
        return False
    target = jit.architecture(int(arrays[0].device.compute_capability), ()), int(arrays[0].device.id)
    counters, stream = Counters(), int(cupy.cuda.get_current_stream().ptr)
    for p in passes:
        launch = _launch(source, p.instance, p.signature, *target)
        blocks = max(1, min(BLOCKS, ceil_div(p.threads, THREADS)))
        launch((blocks, 1, 1), stream, *(a.data.ptr if is_cupy(a) else a for a in p.args), counters.address)
    return counters.get()[0] == 0


@functools.cache
def _launch(source: str, instance: str, signature: Any, arch: str, device_id: int) -> Launch:
    return Launch(jit.load(source, instance, arch, device_id), (*signature, "P"), (), THREADS)
