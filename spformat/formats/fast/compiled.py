"""Conversions of dense host arrays to and from sparse layouts in compiled code, faster than the numpy code.

``serves(x)`` says whether the compiled code is worth using: the array is large, or others were converted before it, and
numba is installed. The edges in ``edges.py`` wrap these functions for the formats. The numpy code is the reference;
results equal it bit for bit. numba is imported by the first conversion that uses it, never by importing spformat.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays import collector, threads
from ...arrays.dtypes import bits, value_type
from ...arrays.interrupts import deferred_interrupts
from ...arrays.library import PAD, Array, ceil_div, round_up
from ...arrays.segments import pointer

LARGE, WARM = 16 << 20, 1 << 20
"""Bytes of a dense array from which importing numba pays (0.3 s in each process), and from which a call pays once it is
imported."""
MANY = 64 << 20
"""Bytes of smaller arrays after which numba is imported: numpy has taken longer for them than the import takes."""
PIECE = 1 << 19
"""Dense elements that a thread processes at a time."""


_LOOPS = f"{__package__}.numba_cache"


def load_numba() -> None:
    """Import numba without Python's garbage collector, which would take a third of the time of the first product."""
    if "numba" in sys.modules:
        return
    with deferred_interrupts(), collector.at_rest():  # half of an import could not be repeated in this process
        importlib.import_module("numba")


@functools.cache
def _usable() -> bool:
    """Whether numba is installed and works with this numpy; imports it."""
    try:
        load_numba()
        importlib.import_module(_LOOPS)
    except ImportError:  # not installed, or built for another numpy; then the numpy code is used
        return False
    return True


_bytes_so_far = 0


def serves(x: Array, elements: int | None = None) -> bool:
    """Whether compiled code is used for ``x``: a dense array, or the values of a matrix of ``elements`` elements.

    The layers of a small model are converted one at a time, and none of them is worth an import. So their bytes are
    added up over the process.
    """
    global _bytes_so_far
    size = (x.size if elements is None else elements) * x.dtype.itemsize
    if not isinstance(x, np.ndarray) or size < WARM:
        return False
    if size < LARGE and _LOOPS not in sys.modules:
        _bytes_so_far += size
        if _bytes_so_far < MANY:
            return False
    return _usable()


def prepare(size: int) -> None:
    """Load the compiled code in a thread, if ``size`` bytes of dense arrays are about to be converted in pieces."""
    if size >= LARGE and _LOOPS not in sys.modules:
        threading.Thread(target=_warm_up, name="spformat", daemon=True).start()


def _warm_up() -> None:
    """Call one loop: numba spends most of its start-up time, under a lock of its own, in the first call of any."""
    if _usable():
        _count_rows(np.zeros((1, 4), np.float16))


def count_nonzeros(x: Array) -> tuple[int, int] | None:
    """(values that are not zero, elements that are -0.0) of 16-bit x [M, K]; None if numpy must count them."""
    if not isinstance(x, np.ndarray) or x.ndim != 2 or not _fours(x) or not serves(x):
        return None
    counts, negative = _count_rows(x)
    return int(counts.sum()), int(negative.sum())


def _fours(x: Array) -> bool:
    """Whether the values have 16 bits and can be read four at a time."""
    whole = x.dtype.itemsize == 2 and x.shape[1] % 4 == 0
    return bool(whole and x.flags.c_contiguous and x.ctypes.data % 8 == 0)


def _count_rows(x: Array) -> tuple[Array, Array]:
    """int64[M] each: nonzeros, and, of 16-bit values in whole fours only, -0.0 in each row."""
    M, K = x.shape
    counts, negative = np.zeros(M, np.int64), np.zeros(M, np.int64)
    if _fours(x):
        _rows(_loops("row").count_fours, M, K, bits(x).view(np.uint64), counts, negative)
    else:
        _rows(_loops("row").count, M, K, bits(x), _zero(x), counts)
    return counts, negative


def census(x: Array) -> tuple[Array, Array] | None:
    """(int64[M] nonzeros of each row, int64[30] ``census_loops.BAD`` ..) of x [M, K]; None if numpy must count them."""
    if not isinstance(x, np.ndarray) or not serves(x):
        return None
    loops: Any = importlib.import_module(f"{__package__}.census_loops")
    (M, K), row = x.shape, value_type(x.dtype)
    lengths, strips = np.zeros(M, np.int64), ceil_div(M, loops.STRIP)
    counts = np.zeros((strips, loops.WINDOWS + 12), np.int64)
    fours, values = _fours(x), bits(x)

    def strip(i: int) -> None:
        lo, hi = i * loops.STRIP, min(M, (i + 1) * loops.STRIP)
        words = np.empty((hi - lo, ceil_div(K, 64)), np.uint64)
        if fours:
            negative = loops.pack_fours(lo, hi, values.view(np.uint64), words)
        else:
            negative = loops.pack_any(lo, hi, values, row.bits.type(row.zero_mask), words)
        loops.census(words, lengths[lo:hi], counts[i])
        counts[i, loops.NEGATIVE] = negative

    threads.run(strip, strips)
    most = counts[:, loops.WINDOWS :].max(axis=0, initial=0)
    return lengths, np.concatenate((counts[:, : loops.WINDOWS].sum(axis=0), most))


def _loops(layout: str) -> Any:
    return importlib.import_module(f"{__package__}.{layout}_loops")


def _rows(loop: Callable[..., None], rows: int, width: int, *args: Any) -> None:
    """loop(lo, hi, *args) over all rows, a piece at a time."""
    step = max(1, PIECE // max(1, width))
    threads.run(lambda i: loop(i * step, min(rows, (i + 1) * step), *args), ceil_div(rows, step))


def _rows_or_refusal(loop: Callable[..., None], rows: int, width: int, *args: Any) -> tuple[int, int, int]:
    """As ``_rows``, for loops that may refuse groups: (refused groups, the first in row-major order, its nonzeros)."""
    step = max(1, PIECE // max(1, width))
    pieces = ceil_div(rows, step)
    refused = np.zeros((pieces, 3), np.int64)
    threads.run(lambda i: loop(i * step, min(rows, (i + 1) * step), *args, refused[i]), pieces)
    count = int(refused[:, 0].sum())
    if not count:
        return 0, 0, 0
    first = refused[int(np.flatnonzero(refused[:, 0])[0])]
    return count, int(first[1]), int(first[2])


def _zero(x: Array) -> Any:
    row = value_type(x.dtype)
    return row.bits.type(row.zero_mask)


def csr_from_dense(x: Array, index: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """(indptr, indices, data) of value != 0 in x [M, K]."""
    M, K = x.shape
    counts, _ = _count_rows(x)
    nnz = int(counts.sum())
    indptr = pointer(counts, nnz)
    indices, data = np.empty(nnz, index), np.empty(nnz, x.dtype)
    _rows(_loops("row").csr_items, M, K, bits(x), _zero(x), indptr, indices, bits(data))
    return indptr, indices, data


def csr_to_dense(indptr: Array, indices: Array, data: Array, out: Array) -> None:
    """Write the items into ``out`` [M, K], all zeros."""
    _rows(_loops("row").csr_scatter, *out.shape, indptr, indices, bits(data), bits(out))


def bitmask_from_dense(x: Array) -> tuple[Array, Array, Array]:
    """(indptr, bitmask, data) of x [M, K]."""
    M, K = x.shape
    counts, _ = _count_rows(x)
    nnz = int(counts.sum())
    indptr = pointer(counts, nnz)
    bitmask, data = np.empty((M, ceil_div(K, 8)), np.uint8), np.empty(nnz, x.dtype)
    _rows(_loops("row").bitmask_items, M, K, bits(x), _zero(x), indptr, bitmask, bits(data))
    return indptr, bitmask, data


def bitmask_to_dense(indptr: Array, bitmask: Array, data: Array, out: Array) -> None:
    """Write the values into ``out`` [M, K], all zeros."""
    _rows(_loops("row").bitmask_scatter, *out.shape, indptr, bitmask, bits(data), bits(out))


def ell_counts(x: Array, parts: int, part: int) -> Array:
    """int64[M, parts]: nonzeros of each row of x [M, K] in each part of ``part`` columns."""
    M, K = x.shape
    if parts == 1:
        return _count_rows(x)[0].reshape(M, 1)
    counts = np.zeros((M, parts), np.int64)
    _rows(_loops("row").part_counts_of_dense, M, K, bits(x), _zero(x), part, counts)
    return counts


def ell_counts_of_csr(indptr: Array, indices: Array, parts: int, part: int) -> Array:
    """As ``ell_counts`` for the items of an ordered CSR, zeros among them too."""
    M = indptr.size - 1
    if parts == 1:
        return np.diff(indptr).astype(np.int64).reshape(M, 1)
    counts = np.zeros((M, parts), np.int64)
    _rows(_loops("row").part_counts_of_csr, M, ceil_div(indices.size, max(1, M)), indptr, indices, part, counts)
    return counts


def ell_from_dense(x: Array, indptr: Array, places: tuple[Array, Array, Array], into: tuple[Array, ...]) -> None:
    """Fill (indices, data, source), every slot, from x [M, K]. indptr: of the CSR, int[M+1].

    places: the ELL rows of each row, ell_ptr int64[M+1]; (first slot, width) of each, int64[R, 2]; its items, int64[R].
    """
    indices, data, source = into
    args = (bits(x), _zero(x), indptr, *places, PAD, indices, bits(data), source)
    _rows(_loops("row").ell_items_of_dense, *x.shape, *args)


def ell_from_csr(
    indptr: Array, items: tuple[Array, Array], places: tuple[Array, Array, Array], into: tuple[Array, ...]
) -> None:
    """As ``ell_from_dense`` from the (indices, data) of an ordered CSR."""
    (indices, data, source), M = into, indptr.size - 1
    args = (items[0], bits(items[1]), indptr, *places, PAD, indices, bits(data), source)
    _rows(_loops("row").ell_items_of_csr, M, ceil_div(items[0].size, max(1, M)), *args)


def ell_live(starts: Array, source: Array) -> Array:
    """int64[R]: slots of each ELL row, starts[e] .. starts[e+1]-1, that hold an item."""
    R = starts.size - 1
    live = np.zeros(R, np.int64)
    _rows(_loops("row").ell_live, R, ceil_div(source.size, max(1, R)), starts, source, PAD, live)
    return live


def ell_to_csr(starts: Array, slots: tuple[Array, Array, Array], into: tuple[Array, Array]) -> None:
    """Fill the (indices, data) of a CSR from slots (indices, data, source) whose sources are each of its items."""
    (indices, data, source), R = slots, starts.size - 1
    args = (starts, indices, bits(data), source, PAD, into[0], bits(into[1]))
    _rows(_loops("row").ell_to_csr, R, ceil_div(source.size, max(1, R)), *args)


def ell_to_dense(starts: Array, row_ids: Array, indices: Array, data: Array, out: Array) -> None:
    """Write the items into ``out`` [M, K], all zeros."""
    R = starts.size - 1
    args = (starts, row_ids, indices, bits(data), bits(out))
    _rows(_loops("row").ell_scatter, R, ceil_div(indices.size, max(1, R)), *args)


def two_four_encode(
    x: Array, nibbles: int, places: tuple[Array, int, int, int], data: Array, meta: Array
) -> tuple[int, int, int]:
    """Fill the rows of ``data`` [Mp, Kp/2] and words of ``meta`` that belong to x [M, K].

    ``nibbles``: 16 of them, that of nonzero mask 0 in the lowest bits. ``places``: of the metadata words
    (``two_four.meta_places``). Returns (refused groups, the first of them as
    row * Kp/4 + group, its nonzeros); when any is refused, data and meta are of no use.
    """
    (M, K), loop, values = x.shape, _loops("two_four").two_four_encode, bits(x)
    args = (np.uint64(nibbles), *places, data.view(np.uint32), meta)
    if _fours(values):
        return _rows_or_refusal(loop, M, K, values.view(np.uint64), *args)

    row_offset, pairs = places[0], data.view(np.uint32)

    def padded(lo: int, hi: int, refused: Array) -> None:
        part = np.zeros((hi - lo, round_up(K, 4)), np.uint16)
        part[:, :K] = values[lo:hi]
        loop(0, hi - lo, part.view(np.uint64), args[0], row_offset[lo:], *places[1:], pairs[lo:], meta, refused)
        refused[1] += lo * pairs.shape[1]

    return _rows_or_refusal(padded, M, K)


def two_four_prune(x: Array, infinite: int, places: tuple[Array, int, int, int], data: Array, meta: Array) -> int:
    """As ``two_four_encode``, the two largest magnitudes of every group kept as ``masks.magnitude_nm`` ranks them.

    infinite: the bits of infinity. Returns how many values are not finite; data and meta hold them like others.
    """
    args = (bits(x), infinite, *places, data.view(np.uint32), meta)
    return _rows_or_refusal(_loops("two_four").two_four_prune, *x.shape, *args)[0]


def two_four_decode(data: Array, meta: Array, places: tuple[Array, int, int, int], out: Array) -> None:
    """Fill ``out`` [M, K], all of it."""
    (M, K), loop, values, (row_offset, *steps) = out.shape, _loops("two_four").two_four_decode, bits(out), places
    pairs = data.view(np.uint32)
    if _fours(values):
        _rows(loop, M, K, pairs, meta, row_offset, *steps, values.view(np.uint64))
        return

    def padded(lo: int, hi: int) -> None:
        part = np.empty((hi - lo, round_up(K, 4)), np.uint16)
        loop(0, hi - lo, pairs[lo:], meta, row_offset[lo:], *steps, part.view(np.uint64))
        values[lo:hi] = part[:, :K]

    _rows(padded, M, K)


def two_four_sound(
    shape: tuple[int, int], data: Array, meta: Array, nibbles: int, places: tuple[Array, int, int, int]
) -> bool:
    """Whether ``data`` [Mp, Kp/2] and ``meta`` are what ``two_four_encode`` makes of some matrix of ``shape``."""
    pairs, loop = data.view(np.uint32), _loops("two_four").two_four_faults
    return _rows_or_refusal(loop, *pairs.shape, pairs, meta, np.uint64(nibbles), shape, *places)[0] == 0


def bsr_from_dense(x: Array, blocksize: tuple[int, int], index: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """(indptr, indices, data) of x [M, K] in blocks R x C."""
    (M, K), (R, C), loops = x.shape, blocksize, _loops("block")
    Mb, args = ceil_div(M, R), (bits(x), _zero(x), R, C)
    nonempty = np.zeros((Mb, ceil_div(K, C)), np.uint8)
    _rows(loops.block_flags, Mb, R * K, *args, nonempty)
    indptr = pointer(nonempty.sum(axis=1, dtype=np.int64), int(nonempty.sum(dtype=np.int64)))
    indices, data = np.empty(int(indptr[-1]), index), np.empty((int(indptr[-1]), R, C), x.dtype)
    _rows(loops.block_items, Mb, R * K, *args, nonempty, indptr, indices, bits(data))
    return indptr, indices, data


def sr_bcrs_from_dense(x: Array, t: int, g: int, index: np.dtype[Any]) -> tuple[Array, Array, Array]:
    """(indptr, indices, data) of x [M, K] in groups of g columns of t rows."""
    (M, K), loops, args = x.shape, _loops("block"), (bits(x), _zero(x), t)
    tiles = ceil_div(M, t)
    counts = np.zeros(tiles, np.int64)
    _rows(loops.vector_counts, tiles, t * K, *args, counts)
    groups = -(-counts // g)
    total = int(groups.sum())
    indptr, indices, data = pointer(groups, total), np.empty((total, g), index), np.empty((total, t, g), x.dtype)
    _rows(loops.vector_items, tiles, t * K, *args, g, PAD, indptr, indices, bits(data))
    return indptr, indices, data


def sr_bcrs_to_dense(indptr: Array, indices: Array, data: Array, out: Array) -> None:
    """Write the vectors into ``out`` [M, K], all zeros."""
    (M, K), t = out.shape, data.shape[1]
    _rows(_loops("block").vector_scatter, ceil_div(M, t), t * K, indptr, indices, bits(data), t, bits(out))


def vector_nm_encode(x: Array, n: int, m: int, length: int, indices: Array, data: Array) -> tuple[int, int, int]:
    """Fill indices uint8[W, Q] and data [W, Mp], both zeros before, from x [M, K].

    Returns (refused windows, the first of them as row group * windows + window, its vectors); when any is refused,
    data is of no use.
    """
    args = (bits(x), _zero(x), n, m, length, indices, bits(data))
    return _rows_or_refusal(_loops("vector_nm").vector_nm_encode, indices.shape[1], length * x.shape[1], *args)


def vector_nm_to_dense(indices: Array, data: Array, n: int, m: int, length: int, out: Array) -> None:
    """Write the values into ``out`` [M, K], all zeros."""
    M, K = out.shape
    args = (indices, bits(data), n, m, length, bits(out))
    _rows(_loops("vector_nm").vector_nm_scatter, ceil_div(M, length), length * K, *args)
