"""The transpose of a CSR on the device: a radix sort of its items by column.  Kernels: csr_transpose.cu.

It takes O(nnz) for every eight bits of a column index, whatever the columns are, and it is stable, so rows ascend
inside a column without another sort. Two alternatives were not taken. Items that take their places in a column by
atomics would have to be sorted by row afterwards. CuPy's argsort sorts pairs of a key and a 64-bit position by all 32
bits of the key, and values and rows then have to be gathered from anywhere. Matrices with many columns and not few
items in them go another way (csr_transpose_tiles.py).
"""

from __future__ import annotations

import functools

from ....arrays.library import Array, ceil_div, index_dtype
from ..runtime.c_types import INDEX, WORDS
from ..runtime.offsets import starts_of
from ..runtime.queue import Kernels
from . import csr_transpose_tiles

SOURCE = "csr/csr_transpose.cu"
THREADS, TILE = 512, 4096
"""The same as in the source."""
KERNELS = Kernels(SOURCE, THREADS)
MOST_BITS = 8
"""Bits of a column by which a pass sorts, at most; 2**MOST_BITS is DIGITS of the source."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    pairs = [(4, 4), (4, 8), (8, 4), (8, 8)]
    places = [_place(size, *pair, *pair[::-1], first)
              for size, pair in zip(WORDS, pairs, strict=True) for first in (True, False)]  # fmt: skip
    starts = [f"column_starts<{INDEX[c]}, {INDEX[p]}>" for c, p in pairs]
    return (*places, *starts, *(f"count_digits<{c}>" for c in INDEX.values()))


def transposed(shape: tuple[int, int], indptr: Array, indices: Array, data: Array) -> tuple[Array, Array, Array]:
    """(indptr [K+1], indices, data) of the transpose of a valid CSR [M, K], CuPy, with at least one item.

    Does not wait for the device.
    """
    import cupy

    if csr_transpose_tiles.fits(shape, data.size):
        return csr_transpose_tiles.transposed(shape, indptr, indices, data)
    (M, K), n = shape, data.size
    tiles, all_bits = ceil_div(n, TILE), max(1, (K - 1).bit_length())
    passes = ceil_div(all_bits, MOST_BITS)
    bits = ceil_div(all_bits, passes)
    row_type = index_dtype(M - 1)
    counts = cupy.empty(tiles << bits, "uint32")
    count_digits = f"count_digits<{INDEX[indices.itemsize]}>"
    source = indices, indices, data  # columns, rows and values; the first pass reads no rows
    for i in range(passes):
        columns, rows, values = source
        KERNELS.queue(count_digits, "PqiiP", tiles, columns, n, i * bits, bits, counts)
        starts = starts_of(counts, n)
        widths = indices.itemsize, row_type.itemsize, indptr.itemsize, starts.itemsize
        source = cupy.empty(n, indices.dtype), cupy.empty(n, row_type), cupy.empty(n, data.dtype)
        KERNELS.queue(
            _place(data.itemsize, *widths, i == 0), "PPPqPqiiPPPP", tiles,
            columns, rows, indptr, M, values, n, i * bits, bits, starts, *source,
        )  # fmt: skip
    columns, rows, values = source
    pointer = cupy.empty(K + 1, index_dtype(n))
    instance = f"column_starts<{INDEX[columns.itemsize]}, {INDEX[pointer.itemsize]}>"
    KERNELS.queue(instance, "PqqP", ceil_div(K + 1, THREADS), columns, n, K, pointer)
    return pointer, rows, values


@functools.cache
def _place(size: int, column: int, row: int, ptr: int, start: int, first: bool) -> str:
    types = WORDS[size], *(INDEX[width] for width in (column, row, ptr, start)), str(first).lower()
    return f"place_items<{', '.join(types)}>"
