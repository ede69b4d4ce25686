"""Named, seeded matrices that every format must take; small, so that each can be read.

``CASES`` maps a name to a function (dtype) -> array [M, K]. The values are drawn as bit patterns, so that
NaN payloads, infinities, subnormals and -0.0 are among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.formats import by_name

Array = np.ndarray[Any, Any]


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Random values of a type; one in eight is a special bit pattern."""
    row = VALUE_TYPES[dtype]
    raw = rng.integers(0, 2 ** (8 * row.bits.itemsize), shape, dtype=np.uint64, endpoint=False)
    plain = rng.integers(1, 8, shape).astype(row.numpy).view(row.bits)
    picked = np.where(rng.random(shape) < 0.125, raw.astype(row.bits), plain)
    return picked.astype(row.bits).view(row.numpy)


def sparse(rng: np.random.Generator, shape: tuple[int, int], dtype: str, density: float) -> Array:
    """A matrix with that share of values, the rest +0."""
    x = values(rng, shape, dtype)
    x.view(VALUE_TYPES[dtype].bits)[rng.random(shape) >= density] = 0
    return x


def _drawn(shape: tuple[int, int], density: float) -> Callable[[str], Array]:
    def make(dtype: str) -> Array:
        return sparse(np.random.default_rng(shape[0] * 1009 + shape[1] + int(100 * density)), shape, dtype, density)

    return make


def _one_full_row(dtype: str) -> Array:
    # . . . . .
    # x x x x x
    # . . . . .
    x = np.zeros((17, 70), VALUE_TYPES[dtype].numpy)
    x[5] = values(np.random.default_rng(5), (70,), dtype)
    return x


def _empty_between_full(dtype: str) -> Array:
    # x x x
    # . . .
    # x x x
    x = values(np.random.default_rng(6), (9, 33), dtype)
    x[1::2] = 0
    return x


def _corner(dtype: str) -> Array:
    # the only value is in the last row and column
    x = np.zeros((65, 129), VALUE_TYPES[dtype].numpy)
    x[-1, -1] = 3
    return x


def _negative_zeros(dtype: str) -> Array:
    x = sparse(np.random.default_rng(7), (12, 40), dtype, 0.3)
    raw = x.view(VALUE_TYPES[dtype].bits)
    raw[raw == 0] = ~raw.dtype.type(VALUE_TYPES[dtype].zero_mask)  # int8 has no -0: the matrix is then empty
    return x


def _two_four(dtype: str) -> Array:
    # fits 2:4, and so 2:4 with vectors of 1; rows and columns ragged
    x = values(np.random.default_rng(8), (37, 90), dtype)
    keep = np.random.default_rng(9).random((37, 23, 4)).argsort(axis=2) < 2
    x.view(VALUE_TYPES[dtype].bits)[~keep.reshape(37, 92)[:, :90]] = 0
    return x


def _vectors(dtype: str) -> Array:
    # groups of 8 rows share 2 of every 4 columns
    x = values(np.random.default_rng(10), (43, 62), dtype)
    keep = (np.random.default_rng(11).random((6, 16, 4)).argsort(axis=2) < 2).reshape(6, 64)[:, :62]
    x.view(VALUE_TYPES[dtype].bits)[~np.repeat(keep, 8, axis=0)[:43]] = 0
    return x


def _blocks(dtype: str) -> Array:
    # 16 x 16 blocks, half of them, and one empty block row
    x = values(np.random.default_rng(12), (80, 70), dtype)
    keep = np.random.default_rng(13).random((5, 5)) < 0.5
    keep[2] = False
    x.view(VALUE_TYPES[dtype].bits)[~np.kron(keep, np.ones((16, 16), bool))[:80, :70]] = 0
    return x


CASES: dict[str, Callable[[str], Array]] = {
    "no_rows": _drawn((0, 5), 0.5),
    "no_columns": _drawn((5, 0), 0.5),
    "nothing": _drawn((0, 0), 0.5),
    "one": _drawn((1, 1), 1.0),
    "one_row": _drawn((1, 37), 0.4),
    "one_column": _drawn((37, 1), 0.4),
    "all_zero": _drawn((20, 30), 0.0),
    "all_dense": _drawn((9, 21), 1.0),
    "prime": _drawn((31, 53), 0.2),
    "wide": _drawn((3, 300), 0.1),
    "tall": _drawn((300, 3), 0.3),
    "even": _drawn((64, 128), 0.15),
    "one_full_row": _one_full_row,
    "empty_between_full": _empty_between_full,
    "corner": _corner,
    "negative_zeros": _negative_zeros,
    "two_four": _two_four,
    "vectors": _vectors,
    "blocks": _blocks,
}


def params_of(name: str) -> tuple[dict[str, Any], ...]:
    """The parameter sets with which a format asks to be tested."""
    return by_name(name).examples()


def codes(dtype: str, held: np.ndarray, seed: int = 0) -> np.ndarray:
    """Random nonzero bits (NaN payloads, infinities, subnormals) where ``held``; elsewhere zeros of both signs."""
    t = VALUE_TYPES[dtype]
    rng = np.random.default_rng(seed)
    some = rng.integers(0, 256, (*held.shape, t.numpy.itemsize), np.uint8).view(t.bits)[..., 0]
    some[(some & t.bits.type(t.zero_mask)) == 0] = 1
    sign = t.bits.type((1 << (8 * t.numpy.itemsize)) - 1 - t.zero_mask)
    return np.where(held, some, np.where(rng.random(held.shape) < 0.5, sign, 0)).astype(t.bits).view(t.numpy)


def nm_places(shape: tuple[int, int], n: int, m: int, L: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    groups, windows = -(-shape[0] // L), -(-shape[1] // m)
    kept = (np.argsort(rng.random((groups, windows, m)), axis=2) < n).reshape(groups, windows * m)
    return np.repeat(kept, L, axis=0)[: shape[0], : shape[1]] & (rng.random(shape) < 0.8)
