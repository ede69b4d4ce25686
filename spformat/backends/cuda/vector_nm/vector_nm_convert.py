"""Dense to and from vector n:m on the device: the counterpart of the compiled host code, for CuPy arrays.

The arrays are allocated by the format and passed by ``edges.py``. The numpy code is the reference, and results equal it
bit for bit. Kernels: vector_nm_convert.cu. Each direction takes one pass over the dense array, pruning included. If the
rows of a group do not fit in shared memory, encoding takes two passes (positions, then values), and
``preprocess.masks`` prunes. Most conversions of values of two bytes are made by ``vector_nm_quads.py``.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div, round_up
from ....products.problem import Problem
from ....products.roofline import shared_limit
from ..runtime.c_types import WORDS
from ..runtime.expansion import Target, Writer
from ..runtime.launch import Bound
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters
from . import vector_nm_quads

SOURCE = "vector_nm/vector_nm_convert.cu"
THREADS = 256
KERNELS = Kernels(SOURCE, THREADS)
STRIP, ROWS = 64, 64
"""Columns (at least one window) and rows that a block takes together."""
ALIGN, ONE_PASS = 16, 48 * 1024
"""Bytes of a load of neighbours; of shared memory for a strip of whole row groups: more is left to a second pass."""
WIDE_ROWS = 32
"""Rows of a block whose strip is wider than ``STRIP``: a strip then needs 65 KB at most."""
KINDS = {"bfloat16": ("BFLOAT16", 0x7F80), "float16": ("FLOAT16", 0x7C00), "float32": ("FLOAT32", 0x7F800000)}
"""Value types whose vectors are ranked on the device -> name of the kernel, bits of infinity. Squares are exact."""
EXACT = "EXACT"


class Sizes(ctypes.Structure):
    """Must match ``vector_nm::Sizes`` in the kernel."""

    _fields_ = [(name, ctypes.c_int64) for name in ("M", "K", "W", "Q", "Mp")] + [
        (name, ctypes.c_int32) for name in ("n", "m", "length", "windows", "rows", "strips")
    ]


class Ranking(ctypes.Structure):
    """Must match ``vector_nm::Ranking`` in the kernel."""

    _fields_ = [("squares", ctypes.c_int32), ("infinite", ctypes.c_uint32), ("norms", ctypes.c_int32)]


class Packing(ctypes.Structure):
    """Must match ``vector_nm::Packing`` in the kernel."""

    _fields_ = [(name, ctypes.c_int64) for name in ("W", "Q")] + [
        (name, ctypes.c_int32) for name in ("n", "m", "tile_cols", "groups", "k_tiles")
    ]


SCATTER = ("P", "P", Sizes, *"qiPq")
"""The parameters of the kernel that writes a dense array."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    encoders = [
        _instance("encode", size, *flags, EXACT)
        for size in (2, 4)
        for flags in itertools.product((True, False), repeat=2)
    ]
    rest = [_instance("gather", size) for size in (1, 8)]
    rest += [_instance("scatter", size, wide) for size in (1, 2, 4, 8) for wide in (True, False)]
    return (
        *encoders,
        _instance("encode", 1, True, True, EXACT),
        _instance("encode", 8, True, True, EXACT),
        _instance("encode", 2, True, True, "BFLOAT16"),
        _instance("encode", 2, False, True, "FLOAT16"),
        _instance("encode", 4, True, True, "FLOAT32"),
        *rest,
        _instance("pack", 0),
    )


def vector_nm_encode(x: Array, n: int, m: int, length: int, indices: Array, data: Array) -> Counters:
    """Fill indices uint8[W, Q] and data [W, Mp] from x [M, K], all CuPy; does not wait for the device.

    Returns counters: refused windows, and all ones minus (row group * windows + window) * 512 + vectors of the first.
    """
    if vector_nm_quads.takes(x.data.ptr, x.shape[1], x.shape[1], data, m, length):
        return vector_nm_quads.encode(x, n, m, length, indices, data)
    sizes, groups, pitch, smem, strip = _encoding(x, n, m, length, indices, data)
    refused = Counters()
    whole = smem + strip <= ONE_PASS
    _encode(x, sizes, groups, pitch, smem + strip * whole, whole, EXACT, Ranking(), indices, data, refused.address)
    if not whole:
        pitch, smem = _strip(sizes, x.dtype.itemsize)
        KERNELS.queue(
            _instance("gather", x.dtype.itemsize), ("P", Sizes, *"qiPP"), sizes.strips * ceil_div(sizes.Mp, sizes.rows),
            x, sizes, value_type(x.dtype).zero_mask, pitch, indices, data, smem=smem,
        )  # fmt: skip
    return refused


def vector_nm_prune(
    x: Array, n: int, m: int, length: int, norm: str, indices: Array, data: Array, odd: int
) -> bool:  # fmt: skip
    """``vector_nm_encode`` that keeps only the n vectors of largest norm ("l2", "l1") of every window, in one pass.

    odd: address of a word to which the number of values that are not finite is added, or 0. False, and nothing is done,
    for value types that are not in ``KINDS`` and where a row group does not fit in shared memory.
    """
    if x.dtype.name not in KINDS:
        return False
    sizes, groups, pitch, smem, strip = _encoding(x, n, m, length, indices, data)
    before = round_up(smem + strip, 8)
    smem = before + 8 * groups * sizes.windows * m
    if smem > shared_limit(int(x.device.compute_capability)):
        return False
    kind, infinite = KINDS[x.dtype.name]
    by = Ranking(norm == "l2", infinite, before // 8)
    _encode(x, sizes, groups, pitch, smem, True, kind, by, indices, data, odd)
    return True


def _encoding(x: Array, n: int, m: int, length: int, indices: Array, data: Array) -> tuple[Sizes, int, int, int, int]:
    """(extents, row groups of a block, values between rows of its strip, bytes of positions, bytes of the strip)"""
    sizes, groups = _sizes(x.shape, indices, data, n, m, length), max(1, ROWS // length)
    pitch, _ = _strip(sizes, x.dtype.itemsize)
    sizes.rows = groups * length
    used = 4 * (sizes.windows * m // 32 + 2)  # columns of a group that stay, a bit each
    return sizes, groups, pitch, groups * (used + sizes.windows * n), round_up(sizes.rows * pitch, 8) * x.dtype.itemsize


def _encode(
    x: Array, sizes: Sizes, groups: int, pitch: int, smem: int, whole: bool, kind: str, by: Ranking, indices: Array,
    data: Array, refused: int,
) -> None:  # fmt: skip
    itemsize, mask = x.dtype.itemsize, value_type(x.dtype).zero_mask
    aligned = _wide(sizes, x.data.ptr, x.shape[1], itemsize)
    KERNELS.queue(
        _instance("encode", itemsize, aligned, whole, kind), ("P", Sizes, "q", Ranking, *"iPPP"),
        sizes.strips * ceil_div(sizes.Q, groups),
        x, sizes, mask, by, pitch, indices, data, refused, smem=smem,
    )  # fmt: skip


def expander(a: Any, p: Problem) -> Writer:
    """The launches that write the vector n:m matrix ``a`` [M, K] as a dense one."""
    return _writer((p.M, p.K), a.indices, a.data, (a.n, a.m, a.vector_length), Target.of(p))


def vector_nm_to_dense(indices: Array, data: Array, n: int, m: int, length: int, out: Array) -> None:
    """Write out [M, K], all of it, from indices uint8[W, Q] and data [W, Mp], all CuPy."""
    if not out.size:
        return
    if vector_nm_quads.takes(out.data.ptr, out.shape[1], out.shape[1], data, m, length):
        vector_nm_quads.to_dense(indices, data, n, m, length, out)
        return
    itemsize, mask = data.dtype.itemsize, value_type(data.dtype).zero_mask
    sizes, pitch, smem, blocks = _scattering(out.shape, indices, data, (n, m, length))
    wide = _wide(sizes, out.data.ptr, out.shape[1], itemsize)
    KERNELS.queue(
        _instance("scatter", itemsize, wide), SCATTER, blocks,
        indices, data, sizes, mask, pitch, out, out.shape[1], smem=smem,
    )  # fmt: skip


def _writer(shape: tuple[int, int], indices: Array, data: Array, nm: tuple[int, int, int], target: Target) -> Writer:
    mask, itemsize = value_type(data.dtype).zero_mask, data.dtype.itemsize
    sizes, pitch, smem, blocks = _scattering(shape, indices, data, nm)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        if not all(shape):
            return []
        if vector_nm_quads.takes(x, ld, shape[1], data, *nm[1:]):
            return [vector_nm_quads.launch(shape, indices, data, nm, target, (x, ld, stream))]
        name = _instance("scatter", itemsize, _wide(sizes, x, ld, itemsize))
        read = indices.data.ptr, data.data.ptr, bytes(sizes), mask, pitch
        return [KERNELS.launch(name, SCATTER, target, smem).bind((blocks, 1, 1), stream, *read, x, ld)]

    return launches


def _scattering(
    shape: tuple[int, int], indices: Array, data: Array, nm: tuple[int, int, int]
) -> tuple[Sizes, int, int, int]:
    """(extents, values between rows of a block's strip, its bytes, blocks) of the kernel that writes [M, K]."""
    sizes = _sizes(shape, indices, data, *nm)
    pitch, smem = _strip(sizes, data.dtype.itemsize)
    return sizes, pitch, smem, sizes.strips * ceil_div(sizes.M, sizes.rows)


def _wide(sizes: Sizes, address: int, ld: int, itemsize: int) -> bool:
    """Whether the strips of a dense array start on ``ALIGN`` bytes."""
    return not (address % ALIGN or ld * itemsize % ALIGN or sizes.windows * sizes.m * itemsize % ALIGN)


def vector_nm_pack(indices: Array, n: int, m: int, col_info: Array, ranks: Array) -> None:
    """Fill col_info int16[Tr, Tk, tile_cols] and ranks uint8[Tr, W, Qs] from indices uint8[W, Q], all CuPy."""
    (row_tiles, k_tiles, tile_cols), groups = col_info.shape, ranks.shape[2]
    packing = Packing(*indices.shape, n, m, tile_cols, groups, k_tiles)
    blocks = row_tiles * k_tiles
    KERNELS.queue(_instance("pack", 0), ("P", Packing, "P", "P"), blocks, indices, packing, col_info, ranks)


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
def _instance(name: str, itemsize: int, *arguments: bool | str) -> str:
    """C++ name of a kernel for values of a size; 0: not a template."""
    named = [f"spformat::vector_nm::{a}" if isinstance(a, str) else str(a).lower() for a in arguments]
    given = ", ".join((WORDS[itemsize], *named)) if itemsize else ""
    return f"spformat::vector_nm::{name}" + (f"<{given}>" if given else "")
