"""The counts of a dense matrix on the device that ``preprocess.structure`` needs, in one pass.  Kernel: census.cu."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ....arrays.library import Array, ceil_div, round_up
from ..csr.csr_from_dense import aligned, value_word
from ..runtime.c_types import WORDS
from ..runtime.queue import Kernels

THREADS, SIDE = 256, 256
"""Threads of a block; rows and columns that it takes. As in the kernel."""
KERNELS = Kernels("dense/census.cu", THREADS)
COUNTS, UNIT = 21, 16
"""Numbers that the kernel adds up for the whole matrix; bytes of a load."""
BLOCKS = (8, 16, 32, 64, 128)
"""Heights of blocks: each is twice the one before it."""
GROUP_BITS = 4
GROUP = 1 << GROUP_BITS
"""Vectors of a group: ``VECTOR_STRIDE`` of the formats."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    words = ((1, False), (1, True), (2, True), (4, True), (8, True))
    return tuple(_instance(*word, wide) for word in words for wide in (True, False))


def census(x: Array) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(row lengths int64[M], counts int64[30]) on the host, in the order of ``census_loops``, of x [M, K], CuPy, in C
    order. Waits for the device."""
    import cupy

    (M, K), counts = x.shape, np.zeros(30, np.int64)
    if not x.size:
        return np.zeros(M, np.int64), counts
    if not aligned(x):
        x = x.copy()
    ends = np.cumsum([2 * COUNTS, M, ceil_div(M, 8), ceil_div(M, 16)]).tolist()
    room, start = cupy.zeros(ends[-1], "uint32"), ends[:-1]
    across, base = ceil_div(K, SIDE), room.data.ptr
    wide = x.data.ptr % UNIT == 0 and K * x.itemsize % UNIT == 0
    KERNELS.queue(
        _instance(*value_word(x), wide), "PqqqPPPP", ceil_div(M, SIDE) * across,
        x, M, K, across, room, *(base + 4 * at for at in start),
    )  # fmt: skip
    host = room.get()  # synchronize!
    bad, negative, *others = host[: 2 * COUNTS].view(np.uint64).tolist()
    lengths, eights, pairs = (host[a:b] for a, b in zip(start, ends[1:], strict=True))
    groups = [int((n + np.uint32(GROUP - 1) >> GROUP_BITS).sum()) for n in (eights, pairs)]
    counts[:] = bad, negative, eights.sum(), pairs.sum(), *groups, *others[:5], *block_rows(lengths), *others[5:]
    return lengths.astype(np.int64), counts


def block_rows(lengths: np.ndarray[Any, Any]) -> list[int]:
    """Block rows that are not empty, for each height in ``BLOCKS``, by the nonzeros of each row."""
    some = np.zeros(round_up(lengths.size, BLOCKS[-1]), np.bool_)
    np.not_equal(lengths, 0, out=some[: lengths.size])
    some = some.view(f"u{BLOCKS[0]}")  # rows are joined as words: a reduction over so few elements is slow
    counted = [int(np.count_nonzero(some))]
    for _ in BLOCKS[1:]:
        some = some[::2] | some[1::2]
        counted.append(int(np.count_nonzero(some)))
    return counted


@functools.cache
def _instance(size: int, signed: bool, wide: bool) -> str:
    return f"census<{WORDS[size]}, {str(signed).lower()}, {str(wide).lower()}>"
