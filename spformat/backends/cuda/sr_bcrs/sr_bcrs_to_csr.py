"""SR-BCRS to CSR on the device: two passes over the values.  Kernel: sr_bcrs_to_csr.cu."""

from __future__ import annotations

import functools

from ....arrays.library import Array, ceil_div
from ..runtime.c_types import INDEX
from ..runtime.expansion import UNIT
from ..runtime.queue import Kernels
from .sr_bcrs_from_dense import value_words

SOURCE = "sr_bcrs/sr_bcrs_to_csr.cu"
THREADS = 256
"""Threads of a block; the same as in the kernel."""
KERNELS = Kernels(SOURCE, THREADS)
WARPS = THREADS // 32
ENOUGH, SHORTEST = 8192, 1024
"""Warps that fill a large device; least slots (on average) of a part of a row."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(words, wide, start, idx, ptr, write) for words, wide, start, idx, ptr, write in (
        ("unsigned char, false", True, "int", "int", "long long", False),
        ("unsigned char, false", True, "int", "int", "int", True),
        ("unsigned short, true", True, "int", "int", "long long", False),
        ("unsigned short, true", True, "int", "int", "int", True),
        ("unsigned short, true", False, "int", "int", "int", True),
        ("unsigned int, true", True, "long long", "int", "int", True),
        ("unsigned int, true", False, "int", "int", "long long", False),
        ("unsigned long long, true", True, "int", "long long", "int", True),
        ("unsigned long long, true", False, "long long", "long long", "long long", True),
    ))  # fmt: skip


def count(M: int, first: Array, columns: Array, data: Array) -> Array:
    """Launches the first pass over the arrays of a valid SR-BCRS with M rows and with groups.

    Returns uint32[M, parts]: the nonzeros of every row in each part of its tile's groups.
    """
    import cupy

    counts = cupy.empty((M, parts(M, data.shape)), "uint32")
    _launch_kernel(first, columns, data, counts, None, None, None)
    return counts


def fill(
    first: Array, columns: Array, data: Array, before: Array, indptr: Array, indices: Array, values: Array
) -> None:
    """Launches the second pass: writes indices [nnz] and values [nnz], which are not empty.

    before: uint32[M, parts], the nonzeros of earlier parts of a row; indptr: int[M+1].
    """
    _launch_kernel(first, columns, data, before, indptr, indices, values)


def parts(M: int, stored: tuple[int, int, int]) -> int:
    """Warps that share a row: more than one only if there are few rows, with many slots each. stored: shape of data."""
    G, t, g = stored
    slots = G * t * g // M
    return max(1, min(ceil_div(ENOUGH, M), slots // SHORTEST))


def _launch_kernel(
    first: Array, columns: Array, data: Array, counts: Array, indptr: Array | None, indices: Array | None,
    values: Array | None,
) -> None:  # fmt: skip
    (M, of_row), (_, t, g) = counts.shape, data.shape
    wide = g * data.dtype.itemsize % UNIT == 0
    ptr, write = INDEX[8 if indptr is None else indptr.itemsize], values is not None
    words = value_words(data.dtype)
    instance = _instance(words, wide, INDEX[first.itemsize], INDEX[columns.itemsize], ptr, write)
    KERNELS.queue(
        instance, "PPPqiiqPPPP", ceil_div(ceil_div(M, t) * t * of_row, WARPS),
        first, columns, data, M, t, g, of_row, counts, indptr, indices, values,
    )  # fmt: skip


@functools.cache
def _instance(words: str, wide: bool, start: str, idx: str, ptr: str, write: bool) -> str:
    flag = str(wide).lower()
    return f"sr_bcrs_to_csr<{words}, {flag}, {start}, {idx}, {ptr}, {str(write).lower()}>"
