"""Dense to and from vector n:m on the device: the twin of the compiled host code, for CuPy arrays.

``formats.compiled`` names these functions and hands them the arrays that the format allocated; the numpy code is the
law, and results equal it bit for bit. Kernels: vector_nm_convert.cu. One pass over the dense array each way; where the
rows of a group do not fit in shared memory, encoding takes two (positions, then values).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from ...arrays import Array, ceil_div, round_up
from ...dtypes import bits, value_type
from . import jit
from .launch import Launch

SOURCE = "vector_nm_convert.cu"
THREADS = 256
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
STRIP, ROWS = 64, 64
"""Columns (at least one window) and rows that a block takes together."""
ALIGN, ONE_PASS = 16, 48 * 1024
"""Bytes of a load of neighbours; of shared memory for a strip of whole row groups: more is left to a second pass."""
WIDE_ROWS = 32
"""Rows of a block whose strip is wider than ``STRIP``: a strip then needs 65 KB at most."""


class Sizes(ctypes.Structure):
    """Twin of ``vector_nm::Sizes``."""

    _fields_ = [(name, ctypes.c_int64) for name in ("M", "K", "W", "Q", "Mp")] + [
        (name, ctypes.c_int32) for name in ("n", "m", "length", "windows", "rows", "strips")
    ]


class Packing(ctypes.Structure):
    """Twin of ``vector_nm::Packing``."""

    _fields_ = [(name, ctypes.c_int64) for name in ("W", "Q")] + [
        (name, ctypes.c_int32) for name in ("n", "m", "tile_cols", "groups", "k_tiles")
    ]


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    encoders = [
        _instance("encode", size, wide, whole) for size in (2, 4) for wide in (True, False) for whole in (True, False)
    ]
    rest = [_instance(name, size) for name in ("gather", "scatter") for size in (1, 8)]
    return (
        *encoders,
        _instance("encode", 1, True, True),
        _instance("encode", 8, True, True),
        *rest,
        _instance("pack", 0),
    )


def vector_nm_encode(x: Array, n: int, m: int, length: int, indices: Array, data: Array) -> Array:
    """Fill indices uint8[W, Q] and data [W, Mp] from x [M, K], all CuPy; does not wait for the device.

    Returns uint64[2]: refused windows, and all ones minus (row group * windows + window) * 512 + vectors of the first.
    """
    import cupy

    refused = cupy.zeros(2, np.uint64)
    raw, itemsize, mask = bits(x), x.dtype.itemsize, value_type(x.dtype).zero_mask
    stream = cupy.cuda.get_current_stream().ptr
    sizes, groups = _sizes(x.shape, indices, data, n, m, length), max(1, ROWS // length)
    pitch, _ = _strip(sizes, itemsize)
    sizes.rows = groups * length
    wide, strip = sizes.windows * m, round_up(sizes.rows * pitch, 8) * itemsize
    smem = groups * (4 * (wide // 32 + 2) + sizes.windows * n)  # columns that are used, a bit each, and the positions
    whole = smem + strip <= ONE_PASS
    aligned = not (raw.data.ptr % ALIGN or x.shape[1] * itemsize % ALIGN or wide * itemsize % ALIGN)
    kernel = _kernel("encode", itemsize, x, ("P", Sizes, "q", "i", "P", "P", "P"), smem + strip * whole, aligned, whole)
    grid = (sizes.strips * ceil_div(sizes.Q, groups), 1, 1)
    kernel(grid, stream, raw.data.ptr, sizes, mask, pitch, indices.data.ptr, data.data.ptr, refused.data.ptr)
    if not whole:
        pitch, smem = _strip(sizes, itemsize)
        kernel = _kernel("gather", itemsize, x, ("P", Sizes, "q", "i", "P", "P"), smem)
        grid = (sizes.strips * ceil_div(sizes.Mp, sizes.rows), 1, 1)
        kernel(grid, stream, raw.data.ptr, sizes, mask, pitch, indices.data.ptr, data.data.ptr)
    return refused


def vector_nm_to_dense(indices: Array, data: Array, n: int, m: int, length: int, out: Array) -> None:
    """Write out [M, K], all of it, from indices uint8[W, Q] and data [W, Mp], all CuPy."""
    import cupy

    sizes, mask = _sizes(out.shape, indices, data, n, m, length), value_type(data.dtype).zero_mask
    pitch, smem = _strip(sizes, data.dtype.itemsize)
    kernel = _kernel("scatter", data.dtype.itemsize, data, ("P", "P", Sizes, "q", "i", "P"), smem)
    grid = (sizes.strips * ceil_div(sizes.M, sizes.rows), 1, 1)
    stream = cupy.cuda.get_current_stream().ptr
    kernel(grid, stream, indices.data.ptr, data.data.ptr, sizes, mask, pitch, out.data.ptr)


def vector_nm_pack(indices: Array, n: int, m: int, col_info: Array, ranks: Array) -> None:
    """Fill col_info int16[Tr, Tk, tile_cols] and ranks uint8[Tr, W, Qs] from indices uint8[W, Q], all CuPy."""
    import cupy

    (row_tiles, k_tiles, tile_cols), groups = col_info.shape, ranks.shape[2]
    packing = Packing(*indices.shape, n, m, tile_cols, groups, k_tiles)
    kernel = _kernel("pack", 0, indices, ("P", Packing, "P", "P"), 0)
    stream = cupy.cuda.get_current_stream().ptr
    kernel((row_tiles * k_tiles, 1, 1), stream, indices.data.ptr, packing, col_info.data.ptr, ranks.data.ptr)


def _sizes(shape: tuple[int, int], indices: Array, data: Array, n: int, m: int, length: int) -> Sizes:
    """The extents, with strips of whole windows; ``rows`` is left to the caller."""
    (W, Q), Mp, windows = indices.shape, data.shape[1], max(1, STRIP // m)
    return Sizes(*shape, W, Q, Mp, n, m, length, windows, 0, ceil_div(W // n, windows))


def _strip(sizes: Sizes, itemsize: int) -> tuple[int, int]:
    """(values between rows of a block's strip in shared memory, its bytes); sets ``sizes.rows``.

    A row is an odd number of words (values of eight bytes: an odd number of those), so that a column of the strip meets
    every bank.
    """
    wide = sizes.windows * sizes.m
    sizes.rows = ROWS if wide <= STRIP else WIDE_ROWS
    word = max(4, itemsize)
    pitch = (ceil_div(wide * itemsize, word) | 1) * word // itemsize
    return pitch, sizes.rows * pitch * itemsize


@functools.cache
def _launch(instance: str, arch: str, device_id: int, signature: tuple[Any, ...], smem: int) -> Launch:
    return Launch(jit.load(SOURCE, instance, arch, device_id, smem), signature, (), THREADS, smem)


def _kernel(name: str, itemsize: int, like: Array, signature: tuple[Any, ...], smem: int, *flags: bool) -> Launch:
    """The launch of a kernel on the device of ``like``."""
    device = like.device
    arch = jit.architecture(int(device.compute_capability), ())
    return _launch(_instance(name, itemsize, *flags), arch, device.id, signature, smem)


def _instance(name: str, itemsize: int, *flags: bool) -> str:
    """C++ name of a kernel for values of a size; 0: not a template."""
    arguments = ", ".join((WORDS[itemsize], *(str(f).lower() for f in flags))) if itemsize else ""
    return f"spformat::vector_nm::{name}" + (f"<{arguments}>" if arguments else "")
