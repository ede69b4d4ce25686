"""Dense arrays to CSR on the device, in two passes over the bytes; and their nonzeros counted in one.

Kernels: csr_from_dense.cu.
"""

from __future__ import annotations

import functools
from sys import modules
from typing import Any, NamedTuple

import numpy as np

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div, index_dtype
from ..runtime.c_types import INDEX, WORDS
from ..runtime.offsets import TileSums
from ..runtime.queue import Kernels
from ..runtime.scratch import Workspace

SOURCE = "csr/csr_from_dense.cu"
COUNT_WARPS, FILL_WARPS, TOTAL_THREADS = 8, 4, 256
"""The same as in the source."""
UNIT, LANES, BATCH = 16, 32, 4
COUNT, FILL = Kernels(SOURCE, COUNT_WARPS * LANES), Kernels(SOURCE, FILL_WARPS * LANES)
TOTAL = Kernels(SOURCE, TOTAL_THREADS)
"""The kernels of the file by the threads of their blocks."""
MOST_BLOCKS = 2048
"""Blocks that count a whole array; they fill any device."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    words = ((1, False), (1, True), (2, True), (4, True), (8, True))
    indices = ((4, 4), (4, 8), (8, 4), (8, 8))
    fills = [_fill(*word, *pair, (i + j) % 2 == 0) for i, word in enumerate(words) for j, pair in enumerate(indices)]
    return (*fills, *(_count(name, *word) for name in ("count_pieces", "count_all") for word in words))


def csr_from_dense(x: Array) -> tuple[Array, Array, Array]:
    """(indptr, indices, data) of x [M, K], CuPy, C-contiguous, aligned to its elements and not empty.

    Waits for the device once, for the number of nonzeros.
    """
    empty, shape, dtype = modules["cupy"].empty, x.shape, x.dtype
    p = _passes(shape, dtype, x.data.ptr % UNIT)
    (M, K), pieces, pointer = shape, p.pieces, p.pointer
    work, sums = Workspace(8 * (pieces + 1)), TileSums(p.blocks)
    (starts,) = work.places
    COUNT.queue(p.counting, "PqqPPP", p.blocks, x, M * K, pieces, starts, *sums.arguments)
    indptr = empty(M + 1, pointer)  # while the kernel runs
    nnz = sums.total()  # synchronize!
    if pointer is not index_dtype(nnz):
        pointer = index_dtype(nnz)
        indptr = empty(M + 1, pointer)
    indices, data = empty(nnz, p.column), empty(nnz, dtype)
    FILL.queue(
        _fill(*p.word, pointer.itemsize, p.column.itemsize, p.narrow), "PqqqPPPPq", p.fill_blocks,
        x, M, K, pieces, starts, indptr, indices, data, p.inverse,
    )  # fmt: skip
    return indptr, indices, data


class _Passes(NamedTuple):
    """What both passes need and the shape of a matrix, its type and its first address decide."""

    word: tuple[int, bool]
    pieces: int
    counting: str
    blocks: int
    pointer: np.dtype[Any]
    """Of row pointers, if every element is a nonzero."""
    column: np.dtype[Any]
    narrow: bool
    fill_blocks: int
    inverse: int


@functools.lru_cache(maxsize=256)
def _passes(shape: tuple[int, int], dtype: np.dtype[Any], start: int) -> _Passes:
    (M, K), size = shape, dtype.itemsize
    word, (piece, pieces) = _word(dtype), _pieces(size, start, M * K)
    return _Passes(
        word, pieces, _count("count_pieces", *word), ceil_div(pieces, COUNT_WARPS), index_dtype(M * K),
        index_dtype(K - 1), piece > K, ceil_div(pieces, FILL_WARPS), ceil_div(1 << 32, K),
    )  # fmt: skip


def count_nonzeros(x: Array) -> tuple[int, int]:
    """(values of x that are not zero, elements that are -0.0); x CuPy, contiguous, aligned to its elements. Waits for
    the device."""
    import cupy

    totals = cupy.zeros(2, "uint64")
    blocks = min(MOST_BLOCKS, ceil_div(x.nbytes + UNIT, UNIT * TOTAL_THREADS * BATCH))
    TOTAL.queue(_count("count_all", *value_word(x)), "PqP", blocks, x, x.size, totals)
    nonzeros, negative = totals.get().tolist()  # synchronize!
    return nonzeros, negative


def aligned(x: Array) -> bool:
    """Whether an array starts on a multiple of its elements' width, as every kernel here requires."""
    return bool(x.data.ptr % x.itemsize == 0)


def pieces_of(x: Array) -> tuple[int, int]:
    """(elements of a piece, pieces of x); the first one starts at the 16-byte boundary at or before x."""
    return _pieces(x.itemsize, x.data.ptr % UNIT, x.size)


def _pieces(size: int, start: int, elements: int) -> tuple[int, int]:
    piece = (4 if size == 1 else 8) * LANES * (UNIT // size)
    return piece, ceil_div(start // size + elements, piece)


def value_word(x: Array) -> tuple[int, bool]:
    """(bytes of a value, whether it has a sign that does not count)."""
    return _word(x.dtype)


@functools.cache
def _word(dtype: np.dtype[Any]) -> tuple[int, bool]:
    return dtype.itemsize, not value_type(dtype).zero_mask >> (8 * dtype.itemsize - 1)


@functools.cache
def _count(kernel: str, size: int, signed: bool) -> str:
    return f"{kernel}<{WORDS[size]}, {str(signed).lower()}>"


@functools.cache
def _fill(size: int, signed: bool, ptr: int, idx: int, narrow: bool) -> str:
    flags = str(signed).lower(), INDEX[ptr], INDEX[idx], str(narrow).lower()
    return f"fill_pieces<{', '.join((WORDS[size], *flags))}>"
