"""Describe a matrix to the TMA unit: cuTensorMapEncodeTiled through ctypes. Device side: include/spformat/tma.cuh."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ...errors import DeviceError

# CUtensorMapDataType; fp8 and int8 travel as bytes.
_TYPES = {
    "uint8": 0, "int8": 0, "float8_e4m3fn": 0, "float8_e5m2": 0, "uint16": 1, "uint32": 2, "int32": 3,
    "uint64": 4, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
MAX_EXTENT = 2**32
MAX_BOX = 256


class TensorMap(ctypes.Structure):
    """The opaque 128 bytes, by value; a kernel takes them as ``const __grid_constant__ TensorMap``."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


@functools.lru_cache(maxsize=1)
def _encode() -> Any:
    entry = ctypes.PyDLL("libcuda.so.1").cuTensorMapEncodeTiled
    p, i = ctypes.c_void_p, ctypes.c_int
    entry.argtypes = [p, i, ctypes.c_uint32, p, p, p, p, p, i, i, i, i]
    entry.restype = i
    return entry


def aligned(pointer: int, stride: int, itemsize: int) -> bool:
    """Whether TMA can address rows ``stride`` elements apart: pointer and row pitch are multiples of 16 bytes."""
    return pointer % 16 == 0 and stride * itemsize % 16 == 0


@functools.lru_cache(maxsize=256)
def tiled(
    pointer: int,
    dtype: str,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    promotion: int = 128,
) -> TensorMap:
    """A map of a tensor, innermost dimension first.

    The same arguments give the same object: it holds an address and extents, no memory, and products run over and over
    on the same buffers.

    pointer   device address, 16-byte aligned
    extents   elements per dimension, 1 .. 2^32
    strides   elements between neighbours along dimensions 1, 2, .. (one fewer than extents); 16-byte multiples
    box       elements a load moves per dimension, 1 .. 256; the innermost spans at most a nonzero ``swizzle``
    swizzle   0, 32, 64 or 128 bytes
    promotion L2 fetch size in bytes: 0, 64, 128 or 256

    Raises DeviceError when the driver refuses; ``aligned`` tells beforehand.
    """
    kind, rank = _TYPES[dtype], len(extents)
    size = _SIZES[kind]
    # The driver wants its 128 bytes on a 64-byte boundary; ctypes promises 8.
    room = ctypes.create_string_buffer(192)
    place = (ctypes.addressof(room) + 63) & ~63
    status = _encode()(
        place,
        kind,
        rank,
        pointer,
        (ctypes.c_uint64 * rank)(*extents),
        (ctypes.c_uint64 * max(1, rank - 1))(*[s * size for s in strides]),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLES[swizzle],
        _PROMOTIONS[promotion],
        0,
    )
    if status:
        raise DeviceError(
            f"cuTensorMapEncodeTiled: expected a legal tensor, got CUresult {status} for extents {tuple(extents)}, "
            f"strides {tuple(strides)}, box {tuple(box)}, dtype {dtype}, swizzle {swizzle}, pointer {pointer:#x}"
        )
    return TensorMap.from_buffer_copy(ctypes.string_at(place, 128))
