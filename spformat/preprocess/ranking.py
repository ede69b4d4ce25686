"""Which values are the largest: the norms of blocks, and the selection of keys, for the masks in ``masks``.

The code runs under numpy and CuPy with the same result, bit for bit: see the rules in ``masks``. Keys are those of
``arrays.magnitudes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays.library import Array, ceil_div, namespace, round_up
from ..arrays.magnitudes import largest_finite_key, magnitudes, square_scale

HOST_CHUNK, DEVICE_CHUNK = 1 << 17, 1 << 24
"""Elements that are processed together; on the host their temporaries stay in cache."""


def row_chunks(x: Array, multiple: int = 1) -> Iterator[slice]:
    """Slices of rows, each of about a chunk of elements, that start at multiples of ``multiple``."""
    M, K = x.shape
    size = HOST_CHUNK if namespace(x) is np else DEVICE_CHUNK
    step = round_up(max(1, size // max(1, K)), multiple)
    return (slice(i, min(i + step, M)) for i in range(0, M, step))


def power_of(x: Array, norm: str) -> Callable[[Array], Array]:
    """The function that gives the terms of a norm: |x| or |x|^2 in float64. float64 values are scaled, so that no sum
    overflows; squares of values below 3e-162 of the largest may be 0. block_norms.cu has the same scale and gives the
    same bits."""
    largest = max((largest_finite_key(x[s]) for s in row_chunks(x)), default=0) if x.dtype == np.float64 else 0
    scale = square_scale(x.dtype, largest)

    def power(part: Array) -> Array:
        size = magnitudes(part) * scale
        return size if norm == "l1" else size * size

    return power


def block_norms(x: Array, R: int, C: int, power: Callable[[Array], Array]) -> Array:
    """float64[cdiv(rows, R), cdiv(cols, C)]: ``power`` summed over each block, rows first, in index order.

    Hand-written, because the reductions of numpy and CuPy add in different orders: rounding would then select different
    values on host and device.
    """
    (rows, cols), xp = x.shape, namespace(x)
    tall = xp.zeros((ceil_div(rows, R), cols), np.float64)
    with np.errstate(all="ignore"):  # signalling NaNs, products of infinities
        for r in range(min(R, rows)):
            part = x[r::R]
            tall[: part.shape[0]] += power(part)
        if C == 1:
            return tall
        out = xp.zeros((tall.shape[0], ceil_div(cols, C)), np.float64)
        for c in range(min(C, cols)):
            strip = tall[:, c::C]
            out[:, : strip.shape[1]] += strip
    return out


def keep_nm(keys: Array, n: int, m: int) -> Array:
    """bool[rows, cols]: the n largest keys of every m columns, the lower column first among equals.

    The rank of a key is the number of keys that come before it. It takes m-1 comparisons of whole planes, and no sort.
    """
    xp, (rows, cols) = namespace(keys), keys.shape
    padded = round_up(cols, m)
    if padded != cols:
        # The zeros at the end come after every real column, because they have higher indices.
        keys, short = xp.zeros((rows, padded), keys.dtype), keys
        keys[:, :cols] = short
    planes = xp.ascontiguousarray(keys.reshape(-1, m).T)
    rank = xp.zeros(planes.shape, np.uint8)  # at most m-1 = 255
    for i in range(m - 1):
        beaten = planes[i + 1 :] > planes[i]
        rank[i] += beaten.sum(axis=0, dtype=np.uint8)
        rank[i + 1 :] += ~beaten
    return xp.ascontiguousarray((rank < n).T).reshape(rows, padded)[:, :cols]


def keep_largest(
    keys_of: Callable[[slice], Array], chunks: list[slice], shape: tuple[int, int], count: int, xp: Any
) -> Array:
    """bool[shape]: the ``count`` largest of all keys, the lower row-major index first among equals."""
    mask = xp.zeros(shape, np.bool_)
    if count == 0:
        return mask
    threshold, ties = _threshold(keys_of, chunks, count)
    for s in chunks:
        keys = keys_of(s)
        equal = keys == keys.dtype.type(threshold)
        mask[s] = keys > keys.dtype.type(threshold)
        if ties:
            place = xp.cumsum(equal.reshape(-1), dtype=np.int64).reshape(equal.shape)
            mask[s] |= equal & (place <= ties)
            ties = max(0, ties - int(place[-1, -1]))  # synchronize!
    return mask


def _threshold(keys_of: Callable[[slice], Array], chunks: list[slice], count: int) -> tuple[int, int]:
    """(the count-th largest key, how many keys equal to it are among the ``count`` largest).

    A radix selection, 16 bits at a time from the top. Each pass needs one histogram, and no copy of the keys is sorted.
    """
    prefix, remaining = 0, count
    width = 8 * keys_of(chunks[0]).dtype.itemsize
    digit = min(16, width)
    for shift in range(width - digit, -1, -digit):
        counts: Any = 0
        for s in chunks:
            keys = keys_of(s).reshape(-1)
            xp, unsigned = namespace(keys), keys.dtype.type
            if shift + digit < width:
                keys = keys[keys >> unsigned(shift + digit) == unsigned(prefix)]  # synchronize!
            digits = (keys >> unsigned(shift)) & unsigned((1 << digit) - 1)
            counts = counts + xp.bincount(digits.astype(np.int64), minlength=1 << digit)
        above = xp.cumsum(counts[::-1])  # keys with this digit or a higher one, from the top
        place = int((above < remaining).sum())  # synchronize!
        remaining -= int(above[place - 1]) if place else 0
        prefix = prefix << digit | ((1 << digit) - 1 - place)
    return prefix, remaining
