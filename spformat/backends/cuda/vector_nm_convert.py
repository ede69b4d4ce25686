"""Dense to and from vector n:m on the device: the twin of the compiled host code, for CuPy arrays.

``formats.compiled`` names these functions and hands them the arrays that the format allocated; the numpy code is the
law, and results equal it bit for bit. Kernels: vector_nm_convert.cu. Encoding reads the dense array twice (positions,
then values), the reverse writes it once.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from ...arrays import Array, ceil_div
from ...dtypes import bits, value_type
from . import jit
from .launch import Launch

SOURCE = "vector_nm_convert.cu"
THREADS = 256
WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
STRIP, ROWS = 64, 64
"""Columns (at least one window) and rows that a block takes together."""
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
    kernels = ("positions", "gather", "scatter")
    return (*(_instance(k, size) for k in kernels for size in WORDS), _instance("pack", 1))


def vector_nm_encode(x: Array, n: int, m: int, length: int, indices: Array, data: Array) -> tuple[int, int, int]:
    """Fill indices uint8[W, Q] and data [W, Mp] from x [M, K], all CuPy.

    Returns (refused windows, the first of them as row group * windows + window, its vectors); waits for the device.
    """
    import cupy

    refused = cupy.asarray(np.array([0, 2**64 - 1], np.uint64))
    raw, mask, stream = bits(x), value_type(x.dtype).zero_mask, cupy.cuda.get_current_stream().ptr
    sizes, groups = _sizes(x.shape, indices, data, n, m, length), max(1, ROWS // length)
    sizes.rows = groups * length
    wide = sizes.windows * m
    smem = groups * (4 * (wide // 32 + 2) + sizes.windows * n)  # columns that are used, a bit each, and the positions
    kernel = _kernel("positions", x, ("P", Sizes, "q", "P", "P"), smem)
    grid = (sizes.strips * ceil_div(sizes.Q, groups), 1, 1)
    kernel(grid, stream, raw.data.ptr, sizes, mask, indices.data.ptr, refused.data.ptr)
    pitch, smem = _strip(sizes, x.dtype.itemsize)
    kernel = _kernel("gather", x, ("P", Sizes, "q", "i", "P", "P"), smem)
    grid = (sizes.strips * ceil_div(sizes.Mp, sizes.rows), 1, 1)
    kernel(grid, stream, raw.data.ptr, sizes, mask, pitch, indices.data.ptr, data.data.ptr)
    count, first = (int(v) for v in refused.get())  # synchronize!
    return (count, first >> 9, first & 511) if count else (0, 0, 0)


def vector_nm_to_dense(indices: Array, data: Array, n: int, m: int, length: int, out: Array) -> None:
    """Write out [M, K], all of it, from indices uint8[W, Q] and data [W, Mp], all CuPy."""
    import cupy

    sizes, mask = _sizes(out.shape, indices, data, n, m, length), value_type(data.dtype).zero_mask
    pitch, smem = _strip(sizes, data.dtype.itemsize)
    kernel = _kernel("scatter", data, ("P", "P", Sizes, "q", "i", "P"), smem)
    grid = (sizes.strips * ceil_div(sizes.M, sizes.rows), 1, 1)
    stream = cupy.cuda.get_current_stream().ptr
    kernel(grid, stream, indices.data.ptr, data.data.ptr, sizes, mask, pitch, out.data.ptr)


def vector_nm_pack(indices: Array, n: int, m: int, col_info: Array, ranks: Array) -> None:
    """Fill col_info int16[Tr, Tk, tile_cols] and ranks uint8[Tr, W, Qs] from indices uint8[W, Q], all CuPy."""
    import cupy

    (row_tiles, k_tiles, tile_cols), groups = col_info.shape, ranks.shape[2]
    packing = Packing(*indices.shape, n, m, tile_cols, groups, k_tiles)
    kernel = _kernel("pack", indices, ("P", Packing, "P", "P"), 0)
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


def _kernel(name: str, like: Array, signature: tuple[Any, ...], smem: int) -> Launch:
    """The launch of a kernel for values as wide as those of ``like``, on its device."""
    device = like.device
    arch = jit.architecture(int(device.compute_capability), ())
    return _launch(_instance(name, like.dtype.itemsize), arch, device.id, signature, smem)


def _instance(name: str, itemsize: int) -> str:
    """C++ name of a kernel."""
    word = f"<{WORDS[itemsize]}>" if name != "pack" else ""
    return f"spformat::vector_nm::{name}{word}"
