"""One launch that answers whether the arrays of a matrix on the device are valid: what the ``*_scan`` modules share.

The checks of a format name the offender; where there is none, a scan has the answer sooner: one launch, every array
read once, one wait. A scan only says yes or no, and no leaves the word to the checks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ....arrays.library import Array, ceil_div, is_cupy
from . import jit
from .launch import Launch
from .scratch import Counters

THREADS = 256
"""Of a block: ``THREADS`` of scan.cuh."""
BLOCKS = 2048
"""At most so many, which go round: enough for any device, and few where a matrix is small."""
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
    """Lanes, a power of two of at most a warp, that look at a piece of ``nbytes`` together."""
    return min(WARP, 1 << (ceil_div(nbytes, WIDE) - 1).bit_length()) if nbytes else 1


class Pass(NamedTuple):
    """One launch of a scan."""

    instance: str
    """C++ name of the kernel."""
    signature: Any
    """As for ``Launch``, of ``args``; the kernel's last parameter, where it reports, is left out of both."""
    args: tuple[Any, ...]
    """CuPy arrays stand for their addresses."""
    threads: int
    """So many have work."""


def finds_nothing(source: str, *passes: Pass) -> bool:
    """Whether the kernels of ``source``, one after the other, find all in order; waits for the device."""
    import cupy

    arrays = [a for p in passes for a in p.args if is_cupy(a)]
    if any(a.data.ptr % a.dtype.itemsize for a in arrays):
        return False
    target = jit.architecture(int(arrays[0].device.compute_capability), ()), int(arrays[0].device.id)
    found, stream = Counters(), int(cupy.cuda.get_current_stream().ptr)
    for p in passes:
        launch = _launch(source, p.instance, p.signature, *target)
        blocks = max(1, min(BLOCKS, ceil_div(p.threads, THREADS)))
        launch((blocks, 1, 1), stream, *(a.data.ptr if is_cupy(a) else a for a in p.args), found.address)
    return found.get()[0] == 0


@functools.cache
def _launch(source: str, instance: str, signature: Any, arch: str, device_id: int) -> Launch:
    return Launch(jit.load(source, instance, arch, device_id), (*signature, "P"), (), THREADS)
