"""The driver's functions for tensor maps and clusters: they refuse what the driver refuses, and write what the emulator reads.

A map is a ``emu::TensorMap`` of device/copy_engine.h in the first 104 of the driver's 128 bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any

from strict_cupy import Device

from .kernel import MOST_BLOCKS

MAGIC = 0x70614D726F736E54
INVALID_VALUE = 1
"""CUDA_ERROR_INVALID_VALUE"""
SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
"""CUtensorMapDataType -> bytes of an element."""
SPANS = (0, 32, 64, 128)
"""CUtensorMapSwizzle -> bytes of the span within which pieces of 16 bytes change places."""
DIMENSIONS, MOST_EXTENT, MOST_BOX, MOST_STRIDE, MOST_STEP = 5, 2**32, 256, 2**40, 8


class TensorMap(ctypes.Structure):
    """``emu::TensorMap``."""

    _fields_ = (
        ("magic", ctypes.c_uint64), ("address", ctypes.c_uint64), ("extents", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 4), ("box", ctypes.c_uint16 * 5), ("item", ctypes.c_uint8),
        ("rank", ctypes.c_uint8), ("swizzle", ctypes.c_uint16), ("spare", ctypes.c_uint16),
    )  # fmt: skip


def encode(
    place: int, kind: int, rank: int, address: int, extents: Any, strides: Any, box: Any, steps: Any, interleave: int,
    swizzle: int, promotion: int, fill: int,
) -> int:  # fmt: skip
    """``cuTensorMapEncodeTiled``; 0, or ``INVALID_VALUE`` for what the driver refuses. Of interleaved tensors and steps other
    than 1 nothing is known here: they are refused, too."""
    if rank not in range(1, DIMENSIONS + 1) or kind not in SIZES or swizzle not in range(len(SPANS)):
        return INVALID_VALUE
    size, outer = SIZES[kind], range(rank - 1)
    sound = (
        place % 64 == 0
        and address % 16 == 0
        and all(1 <= extents[d] <= MOST_EXTENT for d in range(rank))
        and all(strides[d] % 16 == 0 and 0 < strides[d] < MOST_STRIDE for d in outer)
        and all(1 <= box[d] <= MOST_BOX for d in range(rank))
        and box[0] * size % 16 == 0
        and all(steps[d] == 1 for d in range(rank))
        and interleave == 0
        and (swizzle == 0 or box[0] * size <= SPANS[swizzle])
        and promotion in range(4)
        and fill == 0
    )
    if not sound:
        return INVALID_VALUE
    ctypes.memset(place, 0, 128)
    m = TensorMap.from_address(place)
    m.magic, m.address, m.item, m.rank, m.swizzle = MAGIC, int(address), size, rank, SPANS[swizzle]
    for d in range(rank):
        m.extents[d], m.box[d] = extents[d], box[d]
    for d in outer:
        m.strides[d] = strides[d]
    return 0


def replace(place: int, address: int) -> int:
    """``cuTensorMapReplaceAddress``."""
    m = TensorMap.from_address(place)
    if place % 64 or m.magic != MAGIC or address % 16:
        return INVALID_VALUE
    m.address = int(address)
    return 0


def max_active_clusters(out: Any, function: int, config: Any) -> int:
    """``cuOccupancyMaxActiveClusters``: one block runs on a multiprocessor at a time, and one cluster on any device."""
    from .stand_in import Function

    asked, kernel = config._obj, Function.of_handle[function]
    blocks = asked.grid[0] * asked.grid[1] * asked.grid[2]
    shared = kernel.emulated.static_shared + asked.smem
    if (
        blocks > MOST_BLOCKS
        or shared > Device.attributes["MaxSharedMemoryPerBlockOptin"]
        or asked.smem > max(48 << 10, kernel.max_dynamic_shared_size_bytes)
    ):
        return INVALID_VALUE
    out._obj.value = max(1, Device.attributes["MultiProcessorCount"] // blocks)
    return 0


def install() -> None:
    """From now on launchers find these functions."""
    from spformat.backends.cuda.runtime import occupancy, tensor_map

    vars(tensor_map)["_driver"] = lambda: (encode, replace)
    vars(occupancy)["_query"] = lambda: max_active_clusters
