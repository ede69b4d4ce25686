"""CSR matrices to vector n:m and back on the device, for every value type.  Kernels: vector_nm_csr.cu."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any

import numpy as np

from ....arrays.dtypes import value_type
from ....arrays.library import ceil_div, index_dtype, namespace, round_up
from ....formats.csr import CSR
from ....formats.vector_nm import VectorNM
from ..runtime.c_types import INDEX, WORDS, index_type, word_type
from ..runtime.offsets import Offsets
from ..runtime.queue import Kernels, starts_on
from ..runtime.scratch import Counters

Params = dict[str, Any]
THREADS, WARPS = 256, 8
KERNELS = Kernels("vector_nm/vector_nm_csr.cu", THREADS)
TILE, ROWS = 32768, 64
"""Bytes of a tile in shared memory, rows of a tile at most: the same as in the kernel."""
STRIP = 128
"""Columns of a strip: as many whole windows as fit, at least one."""
WIDE = 16
"""Bytes of a load of neighbours."""
TASKS, ITEMS = 8192, 256
"""Warps that read the items of a CSR, if it has enough: at least so many items for each."""


class Extents(ctypes.Structure):
    """Must match ``Extents`` in the kernel."""

    _fields_ = [(name, ctypes.c_int64) for name in ("M", "Mp", "Q", "W", "words", "strips")] + [
        (name, ctypes.c_int32) for name in ("n", "m", "length", "wide")
    ]


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    words, indices = WORDS.items(), INDEX.values()
    typed = list(itertools.product(WORDS.values(), indices, indices))
    return (
        *(_name("mark", *types) for types in typed),
        "spformat::vector_nm::choose",
        *(_name("place", *types) for types in typed),
        *(_name("count", word, piece) for size, word in words for piece in (1, WIDE // size)),
        *(_name("to_csr", w, p, *types) for (s, w), p, types in zip(
            words, (1, 8, 1, 2), itertools.product(indices, indices), strict=True) if s),
        *(_name("to_csr", word, WIDE // size, "int", "int") for size, word in words),
    )  # fmt: skip


def from_csr(a: CSR, params: Params) -> VectorNM | None:
    """CSR -> VectorNM. Reads columns twice and values twice; waits once, for the number of windows that are refused."""
    if not all(a.shape):
        return None
    xp, (M, _), n, m, length = namespace(a.data), a.shape, params["n"], params["m"], params["vector_length"]
    arrays = VectorNM.array_specs(a.shape, a.dtype, a.nnz, params)
    (W, Mp), Q = arrays["data"][1], arrays["indices"][1][1]
    windows = W // n
    per_strip = max(1, STRIP // m)
    words = ceil_div(windows * m, 32) + 1
    s = Extents(M, Mp, Q, W, words, ceil_div(windows, per_strip), n, m, length, per_strip * m)
    mask = value_type(a.dtype).zero_mask
    used, parts = xp.zeros((Q, words), np.uint32), xp.empty((M, s.strips + 1), np.uint32)
    types, csr = (word_type(a.data), index_type(a.indices), index_type(a.indptr)), (a.indptr, a.indices, a.data)
    shares = max(1, min(TASKS // M, a.nnz // M // ITEMS))
    KERNELS.queue(
        _name("mark", *types), ("P", "P", "P", Extents, *"qqPP"), ceil_div(M * shares, WARPS),
        *csr, s, mask, shares, used, parts,
    )  # fmt: skip
    refused, indices, data = Counters(), xp.empty((W, Q), np.uint8), xp.empty((W, Mp), a.dtype)
    KERNELS.queue(
        "spformat::vector_nm::choose", ("P", Extents, *"qPP"), ceil_div(Q, 32) * ceil_div(windows, WARPS),
        used, s, windows, indices, refused.address,
    )  # fmt: skip
    rows, pitch = _tile(per_strip * n, a.dtype.itemsize)
    KERNELS.queue(
        _name("place", *types), ("P", "P", "P", Extents, *"qiiPPP"), s.strips * ceil_div(Mp, rows),
        *csr, s, mask, rows, pitch, used, parts, data,
        smem=round_up(per_strip * n * pitch * a.dtype.itemsize, WIDE),
    )  # fmt: skip
    count, inverted = refused.get()  # synchronize!
    first = (1 << 64) - 1 - inverted
    if count:  # before the positions are packed: those of refused windows are not there
        VectorNM.refuse(params, windows, (count, first >> 9, first & 511))
    return VectorNM.assemble(a.shape, params, data, indices)


def to_csr(a: VectorNM, params: Params) -> CSR | None:
    """VectorNM -> CSR, in two passes over the values. Waits once, for the number of nonzeros."""
    (M, K), (W, Mp), Q = a.shape, a.data.shape, a.row_groups
    if not (M and K and W):
        return None
    xp, word, itemsize, live = namespace(a.data), word_type(a.data), a.dtype.itemsize, value_type(a.dtype).zero_mask
    tiles = ceil_div(W, 64 if itemsize == 8 else 128)
    piece = WIDE // itemsize if Mp * itemsize % WIDE == 0 and starts_on(a.data, WIDE) else 1
    blocks, counts = tiles * ceil_div(M, ROWS), xp.empty(M * tiles, np.uint32)
    KERNELS.queue(_name("count", word, piece), "PqqqqqP", blocks, a.data, M, Mp, W, tiles, live, counts)
    offsets = Offsets(counts, W * Mp)
    nnz = offsets.total()  # synchronize!
    indptr = xp.ascontiguousarray(offsets.starts[::tiles]).astype(index_dtype(nnz), copy=False)
    indices, data = xp.empty(nnz, index_dtype(K - 1)), xp.empty(nnz, a.dtype)
    if nnz:
        KERNELS.queue(
            _name("to_csr", word, piece, index_type(indices), index_type(offsets.starts)), "PPqqqqiiiqqPPP", blocks,
            a.indices, a.data, M, Mp, Q, W, a.n, a.m, a.vector_length, tiles, live, offsets.starts,
            indices, data,
        )  # fmt: skip
    return CSR.unchecked(shape=a.shape, indptr=indptr, indices=indices, data=data)


def _tile(vectors: int, itemsize: int) -> tuple[int, int]:
    """(rows of a tile, values between its vectors: an odd number of banks, so that those of a row meet every bank)."""
    rows = ROWS
    while True:
        pitch = rows + max(1, 4 // itemsize)
        if rows == 8 or vectors * pitch * itemsize <= TILE:
            return rows, pitch
        rows //= 2


@functools.cache
def _name(kernel: str, *types: str | int) -> str:
    return f"spformat::vector_nm::{kernel}<{', '.join(map(str, types))}>"
