"""CSR to SR-BCRS on the device, in time that grows with the items.  Kernel: sr_bcrs_from_csr.cu."""

from __future__ import annotations

import functools

from ....arrays.library import Array, ceil_div
from ..runtime.c_types import INDEX
from ..runtime.queue import Kernels
from .sr_bcrs_from_dense import value_words

SOURCE = "sr_bcrs/sr_bcrs_from_csr.cu"
THREADS = 256
"""Threads of a block; the same as in the kernel."""
KERNELS = Kernels(SOURCE, THREADS)
ENOUGH, NARROWEST, FEWEST = 1024, 8192, 4096
"""Blocks that fill a large device; least columns and items (on average) of a part of a row tile."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(words, ptr, idx, start, write) for words, ptr, idx, start, write in (
        ("unsigned char, false", "int", "int", "int", False), ("unsigned char, false", "int", "int", "int", True),
        ("unsigned short, true", "int", "int", "int", False), ("unsigned short, true", "int", "int", "int", True),
        ("unsigned int, true", "long long", "int", "int", False),
        ("unsigned int, true", "int", "int", "long long", True),
        ("unsigned long long, true", "int", "long long", "int", False),
        ("unsigned long long, true", "long long", "long long", "long long", True),
    ))  # fmt: skip


def count(shape: tuple[int, int], indptr: Array, indices: Array, values: Array, t: int) -> Array:
    """Launches the first pass over a valid CSR of this shape, with items.

    Returns uint32[Mv, parts]: the columns with a nonzero in each part of a row tile.
    """
    import cupy

    (M, K), nnz = shape, values.size
    counts = cupy.empty((ceil_div(M, t), parts(M, K, nnz, t)), "uint32")
    _launch_kernel(shape, indptr, indices, values, t, 1, counts, None, None, None)
    return counts


def fill(
    shape: tuple[int, int], indptr: Array, indices: Array, values: Array, before: Array, first: Array, columns: Array,
    data: Array,
) -> None:  # fmt: skip
    """Launches the second pass: writes columns [G, g] and data [G, t, g], which are not empty.

    before: uint32[Mv, parts], the columns of earlier parts of a tile; first: int[Mv+1], the first group of each tile.
    """
    _, t, g = data.shape
    _launch_kernel(shape, indptr, indices, values, t, g, before, first, columns, data)


def parts(M: int, K: int, nnz: int, t: int) -> int:
    """Blocks that share a row tile: more than one only if there are few tiles, with many items each."""
    tiles = ceil_div(M, t)
    wanted = max(1, min(ceil_div(ENOUGH, tiles), K // NARROWEST, nnz // tiles // FEWEST))
    return ceil_div(K, ceil_div(K, wanted))


def _launch_kernel(
    shape: tuple[int, int], indptr: Array, indices: Array, values: Array, t: int, g: int, counts: Array,
    first: Array | None, columns: Array | None, data: Array | None,
) -> None:  # fmt: skip
    tiles, of_tile = counts.shape
    start = INDEX[8 if first is None else first.itemsize]
    instance = _instance(
        value_words(values.dtype), INDEX[indptr.itemsize], INDEX[indices.itemsize], start, data is not None
    )
    KERNELS.queue(
        instance, "PPPqqiiqqPPPP", tiles * of_tile,
        indptr, indices, values, *shape, t, g, of_tile, ceil_div(shape[1], of_tile), counts, first, columns, data,
    )  # fmt: skip


@functools.cache
def _instance(words: str, ptr: str, idx: str, start: str, write: bool) -> str:
    return f"sr_bcrs_from_csr<{words}, {ptr}, {idx}, {start}, {str(write).lower()}>"
