"""The functions that converters are built from: offsets, rows and ranks of items in segments of variable length.

Every function works on numpy and CuPy alike and uses only operations both have (cumsum, searchsorted,
repeat, argsort, boolean masks). ``# synchronize!`` marks where the host waits for a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..limits import check_bytes
from .library import Array, ceil_div, index_dtype, namespace


def offsets_from_counts(counts: Array, dtype: Any = None) -> Array:
    """[0, c0, c0+c1, ..]: int[len(counts)+1] of ``dtype`` (int64 when None)."""
    xp = namespace(counts)
    out = xp.zeros(counts.size + 1, dtype or np.int64)
    xp.cumsum(counts, dtype=out.dtype, out=out[1:])
    return out


def pointer(counts: Array, total: int) -> Array:
    """The offsets, in the smallest index type that can represent ``total``, the last of them."""
    return offsets_from_counts(counts, index_dtype(total))


def rows_of(indptr: Array, n: int) -> Array:
    """int64[n]: the segment of each of the n items that ``indptr`` (valid, ending at n) delimits."""
    xp = namespace(indptr)
    rows = indptr.size - 1
    if xp is np:
        return np.repeat(np.arange(rows, dtype=np.int64), np.diff(indptr))
    # cupy.repeat needs its counts on the host; a search leaves everything on the device.
    return xp.searchsorted(indptr[1:], xp.arange(n, dtype=indptr.dtype), side="right").astype(np.int64)


def rank_in_row(indptr: Array, rows: Array) -> Array:
    """int64[n]: 0, 1, 2, .. inside each segment, for items whose segments are ``rows``."""
    xp = namespace(indptr)
    return xp.arange(rows.size, dtype=np.int64) - indptr[rows]


def distinct(keys: Array) -> Array:
    """The distinct keys, ascending.

    Sorted, because numpy.unique fills a hash table since numpy 2.3, which takes up to a hundred times as long for
    millions of keys.
    """
    xp = namespace(keys)
    ascending = xp.sort(keys)
    first = xp.ones(keys.size, bool)
    first[1:] = ascending[1:] != ascending[:-1]
    return ascending[first]  # synchronize!


def distinct_sorted(keys: Array, bound: int) -> tuple[Array, Array]:
    """(the distinct keys, ascending, int64; for every key its position among them). Requires 0 <= key < bound."""
    xp = namespace(keys)
    if bound <= 8 * keys.size + (1 << 20):  # one flag for each possible key is cheaper than sorting
        seen = xp.zeros(bound, bool)
        seen[keys] = True
        return xp.flatnonzero(seen), (xp.cumsum(seen, dtype=np.int64) - 1)[keys]  # synchronize!
    distinct, place = xp.unique(keys, return_inverse=True)  # synchronize!
    return distinct, place.reshape(-1)


def counts_of(ids: Array, n: int) -> Array:
    """int64[n]: how often each of 0 .. n-1 occurs. LimitError if n, which a file declares, exceeds the memory
    budget."""
    xp = namespace(ids)
    check_bytes(8 * n, f"counts of {n} rows or segments", ids.nbytes)
    if ids.size == 0:
        return xp.zeros(n, np.int64)
    return xp.bincount(ids, minlength=n).astype(np.int64, copy=False)


def cells_of(rows: Array, cols: Array, shape: tuple[int, int], cell: tuple[int, int]) -> tuple[Array, Array]:
    """(int64: the items in each nonempty cell of R x C places; int64[n]: the cell of each item at (row, column))."""
    down, across = ceil_div(shape[0], cell[0]), ceil_div(shape[1], cell[1])
    key = (rows.astype(np.int64) // cell[0]) * across + cols.astype(np.int64) // cell[1]
    distinct, place = distinct_sorted(key, down * across)
    return counts_of(place, distinct.size), place


def largest_in_windows(keys: Array, windows: Array, n: int) -> Array:
    """bool[items]: whether an item has one of the n largest keys of its window; among equal keys the first items win.

    windows: the window of each item, ascending. It takes as many passes as the fullest window has items, and no sort.
    """
    xp = namespace(keys)
    before = xp.zeros(keys.size, np.int32)  # items of the same window that win against this one
    for d in range(1, keys.size):
        together = windows[d:] == windows[:-d]
        if not bool(together.any()):  # synchronize!
            break
        loses = keys[d:] <= keys[:-d]
        before[d:] += together & loses
        before[:-d] += together & ~loses
    return before < n


def stable_order(keys: Array, bound: int) -> Array:
    """int64[n]: the permutation that sorts ``keys`` and leaves equal keys in their order; O(n).

    Requires 0 <= key < bound.
    """
    xp = namespace(keys)
    if xp is not np:
        return xp.argsort(keys, kind="stable")  # a radix sort
    # numpy has a radix sort for 16-bit integers, and a slower merge sort for wider ones. So the keys are sorted by one
    # 16-bit digit after the other, the lowest first.
    order = np.argsort((keys & 0xFFFF).astype(np.uint16), kind="stable")
    shift = 16
    while bound > 1 << shift:
        digit = ((keys >> shift) & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
        shift += 16
    return order
