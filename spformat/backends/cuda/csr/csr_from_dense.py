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
from ..runtime.scratch import Workspace, new_arrays

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
    empty, first, M, dtype = modules["cupy"].empty, count(x), x.shape[0], x.dtype
    pointer = first.passes.pointer
    indptr = empty(M + 1, pointer)  # while the kernel runs
    nnz = first.sums.total()  # synchronize!
    if pointer is not index_dtype(nnz):
        pointer = index_dtype(nnz)
        indptr = empty(M + 1, pointer)
    indices, data = new_arrays(((nnz,), first.passes.column), ((nnz,), dtype))
    fill(x, first, pointer.itemsize, indptr, indices, data)
    return indptr, indices, data


class Counted(NamedTuple):
    """The first pass over an array, which was queued. ``sums.total()``, the number of nonzeros, must be asked for."""

    passes: Passes
    work: Workspace
    sums: TileSums


def count(x: Array) -> Counted:
    """The first pass over x, as ``csr_from_dense`` takes it."""
    p = _passes(x.shape, x.dtype, x.data.ptr % UNIT)
    work, sums = Workspace(p.room), TileSums(p.blocks)
    COUNT.queue(p.counting, "PqqPPP", p.blocks, x, p.size, p.pieces, work.places[0], *sums.arguments)
    return Counted(p, work, sums)


def fill(x: Array, first: Counted, pointer: int, indptr: Any, indices: Any, data: Any) -> None:
    """The second pass, which writes the arrays of the CSR. They may be addresses: indptr of ``pointer`` bytes an entry,
    indices as for the columns of x, data as in x."""
    p = first.passes
    name = p.narrowest if pointer == 4 else _fill(*p.word, pointer, p.column.itemsize, p.narrow)
    FILL.queue(
        name, "PqqqPPPPq", p.fill_blocks,
        x, *x.shape, p.pieces, first.work.places[0], indptr, indices, data, p.inverse,
    )  # fmt: skip


class Passes(NamedTuple):
    """What both passes need and the shape of a matrix, its type and its first address decide."""

    word: tuple[int, bool]
    size: int
    pieces: int
    room: int
    """Bytes of ``starts``."""
    counting: str
    blocks: int
    pointer: np.dtype[Any]
    """Of row pointers, if every element is a nonzero."""
    column: np.dtype[Any]
    narrow: bool
    narrowest: str
    """The second kernel for pointers of 4 bytes."""
    fill_blocks: int
    inverse: int


@functools.lru_cache(maxsize=256)
def _passes(shape: tuple[int, int], dtype: np.dtype[Any], start: int) -> Passes:
    (M, K), size = shape, dtype.itemsize
    word, (piece, pieces), column = _word(dtype), _pieces(size, start, M * K), index_dtype(K - 1)
    narrow = piece > K
    return Passes(
        word, M * K, pieces, 8 * (pieces + 1), _count("count_pieces", *word), ceil_div(pieces, COUNT_WARPS),
        index_dtype(M * K), column, narrow, _fill(*word, 4, column.itemsize, narrow), ceil_div(pieces, FILL_WARPS),
        ceil_div(1 << 32, K),
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
