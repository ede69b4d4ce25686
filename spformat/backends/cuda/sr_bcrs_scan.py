"""Whether an SR-BCRS on the device is valid, in one pass.  Kernel: sr_bcrs_scan.cu.

The scans of ``formats.sr_bcrs`` name the offender; where there is none, this one launch has the answer sooner.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ...arrays import Array
from ...dtypes import value_type
from . import jit
from .launch import Launch
from .scratch import Counters

SOURCE = "sr_bcrs_scan.cu"
THREADS = 256
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
INDEX = {4: "int", 8: "long long"}


class Extents(ctypes.Structure):
    """Twin of ``sr_bcrs::Extents``."""

    _fields_ = [(name, ctypes.c_int64) for name in ("M", "K", "groups", "tiles")] + [
        (name, ctypes.c_int32) for name in ("t", "g")
    ]


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return _instance(1, 8, 4), _instance(2, 4, 4), _instance(8, 4, 8)


def sr_bcrs_sound(shape: tuple[int, int], indptr: Array, indices: Array, data: Array) -> bool:
    """Whether indptr [tiles+1], indices [G, g] and data [G, t, g], CuPy, hold a valid matrix; waits for the device."""
    import cupy

    groups, t, g = data.shape
    tiles = indptr.size - 1
    device = data.device
    instance = _instance(data.dtype.itemsize, indices.dtype.itemsize, indptr.dtype.itemsize)
    launch = _launch(instance, jit.architecture(int(device.compute_capability), ()), device.id)
    found, extents = Counters(), Extents(*shape, groups, tiles, t, g)
    pointers = indptr.data.ptr, indices.data.ptr, data.data.ptr
    stream = int(cupy.cuda.get_current_stream().ptr)
    launch((tiles, 1, 1), stream, *pointers, extents, value_type(data.dtype).zero_mask, found.address)
    return found.get()[0] == 0


@functools.cache
def _launch(instance: str, arch: str, device_id: int) -> Launch:
    signature: tuple[Any, ...] = ("P", "P", "P", Extents, "q", "P")
    return Launch(jit.load(SOURCE, instance, arch, device_id), signature, (), THREADS)


def _instance(value: int, index: int, pointer: int) -> str:
    """C++ name of the kernel for the sizes of value, column and pointer."""
    return f"spformat::sr_bcrs::scan<{WORDS[value]}, {INDEX[index]}, {INDEX[pointer]}>"
