"""Describe a matrix to the TMA unit: cuTensorMapEncodeTiled through ctypes. Device side: include/spformat/tma.cuh.

A map is encoded once for each form (everything but the address). For a tensor of a known form at another address only
the address is replaced.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from ....errors import DeviceError
from . import context

# CUtensorMapDataType; fp8 and int8 travel as bytes.
_TYPES = {
    "uint8": 0, "int8": 0, "float8_e4m3fn": 0, "float8_e5m2": 0, "uint16": 1, "uint32": 2, "int32": 3,
    "uint64": 4, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


class TensorMap(ctypes.Structure):
    """The opaque 128 bytes, by value; a kernel takes them as ``const __grid_constant__ TensorMap``."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


UNMAPPED = bytes(128)
"""Passed to a kernel that reads no map in this launch."""


class Mapped(bytes):
    """The bytes of a TensorMap, which know the address that was encoded, and the form."""

    address: int
    form: Form

    def copy(self) -> MapCopy:
        """The map in memory of its own, for launches at other addresses."""
        return MapCopy(self)


class MapCopy:
    """A map whose address is replaced in place. One thread may use it at a time."""

    __slots__ = ("_form", "_replace", "_room", "place")
    place: int
    """Where it lies."""

    def __init__(self, encoded: Mapped) -> None:
        self._room, self.place = _room()
        ctypes.memmove(self.place, encoded, len(encoded))
        self._form, self._replace = encoded.form, _driver()[1]

    def move(self, pointer: int) -> None:
        """Replace the address. DeviceError where the driver refuses it."""
        status = self._replace(self.place, pointer)
        if status:
            status = _again(status, self._replace, self.place, pointer)
            self._form.check("cuTensorMapReplaceAddress", status, pointer)


def _again(status: int, call: Any, *arguments: Any) -> int:
    """The status of another try where the first had no current context, else ``status``."""
    again = status == context.NO_CONTEXT and context.made_current()
    return int(call(*arguments)) if again else status


def _room() -> tuple[Any, int]:
    """Memory for a map and its address: the driver needs 128 bytes on a 64-byte boundary; ctypes aligns to 8."""
    room = ctypes.create_string_buffer(192)
    return room, (ctypes.addressof(room) + 63) & ~63


@functools.lru_cache(maxsize=1)
def _driver() -> tuple[Any, Any]:
    """cuTensorMapEncodeTiled and cuTensorMapReplaceAddress."""
    library = ctypes.PyDLL("libcuda.so.1")
    p, i = ctypes.c_void_p, ctypes.c_int
    encode, replace = library.cuTensorMapEncodeTiled, library.cuTensorMapReplaceAddress
    encode.argtypes = [p, i, ctypes.c_uint32, p, p, p, p, p, i, i, i, i]
    replace.argtypes = [p, p]
    encode.restype = replace.restype = i
    return encode, replace


def aligned(pointer: int, stride: int, itemsize: int) -> bool:
    """Whether TMA can address rows ``stride`` elements apart: pointer and row pitch are multiples of 16 bytes."""
    return pointer % 16 == 0 and stride * itemsize % 16 == 0


def writable(pointer: int, extent: int, stride: int, itemsize: int) -> bool:
    """Whether TMA can write lines of ``extent`` elements, ``stride`` elements apart, and nothing behind them.

    TMA writes pieces of 16 bytes: the end of a line that is no multiple of that takes what lies behind it along.
    """
    return aligned(pointer, stride, itemsize) and extent * itemsize % 16 == 0


def tiled(
    pointer: int,
    dtype: str,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    promotion: int = 128,
) -> Mapped:
    """A map of a tensor, innermost dimension first: the bytes of a TensorMap.

    pointer   device address, 16-byte aligned
    extents   elements per dimension, 1 .. 2^32
    strides   elements between neighbours along dimensions 1, 2, .. (one fewer than extents); 16-byte multiples
    box       elements a load moves per dimension, 1 .. 256; the innermost spans at most a nonzero ``swizzle``
    swizzle   0, 32, 64 or 128 bytes
    promotion L2 fetch size in bytes: 0, 64, 128 or 256

    Raises DeviceError when the driver refuses; check ``aligned`` first.
    """
    key = dtype, extents, strides, box, swizzle, promotion
    form = _forms.get(key)
    if form is None:
        if len(_forms) >= FORMS:
            _forms.clear()
        form = _forms[key] = Form(pointer, *key)
    return form.at(pointer)


def of_c(pointer: int, dtype: str, M: int, n: int, ldc: int, c_col: bool) -> tuple[Mapped | bytes, int]:
    """The map of a C [M, n] of 16-bit values for ``store_64`` in tma_store.cuh, and 1; UNMAPPED and 0 where TMA cannot
    write its lines."""
    along, across = (M, n) if c_col else (n, M)
    if not writable(pointer, along, ldc, 2):
        return UNMAPPED, 0
    return tiled(pointer, dtype, (along, across), (ldc,), (64, 16 if c_col else 64), 128), 1


class Form:
    """A map for tensors of one form, at any address."""

    __slots__ = ("_lock", "_place", "_room", "_text")

    def __init__(self, pointer: int, dtype: str, extents: tuple[int, ...], strides: tuple[int, ...],
                 box: tuple[int, ...], swizzle: int, promotion: int) -> None:  # fmt: skip
        kind, rank = _TYPES[dtype], len(extents)
        size = _SIZES[kind]
        self._room, self._place = _room()
        self._lock = threading.Lock()
        self._text = f"extents {extents}, strides {strides}, box {box}, dtype {dtype}, swizzle {swizzle}"
        described = (
            self._place,
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
        encode = _driver()[0]
        self.check("cuTensorMapEncodeTiled", _again(encode(*described), encode, *described), pointer)

    def at(self, pointer: int) -> Mapped:
        """The map of the tensor at this address."""
        with self._lock:
            replace = _driver()[1]
            status = _again(replace(self._place, pointer), replace, self._place, pointer)
            encoded = Mapped(ctypes.string_at(self._place, 128))
        self.check("cuTensorMapReplaceAddress", status, pointer)
        encoded.address, encoded.form = pointer, self
        return encoded

    def check(self, call: str, status: int, pointer: int) -> None:
        """DeviceError for a CUresult other than success."""
        if status:
            raise DeviceError(
                f"{call}: expected a legal tensor, got CUresult {status} for {self._text}, pointer {pointer:#x}"
            )


FORMS = 1024
"""Forms that are cached, 400 bytes each."""
_forms: dict[Any, Form] = {}
