"""The counts of a dense matrix on the device that ``preprocess.structure`` needs, in one pass.  Kernel: census.cu."""

from __future__ import annotations

import functools
from sys import modules
from typing import Any

import numpy as np

from ....arrays.library import Array, ceil_div, round_up
from ..csr.csr_from_dense import aligned, value_word
from ..runtime.c_types import WORDS
from ..runtime.queue import Kernels
from ..runtime.scratch import Words, Workspace

THREADS, SIDE = 256, 256
"""Threads of a block; rows and columns that it takes. As in the kernel."""
KERNELS = Kernels("dense/census.cu", THREADS)
COUNTS, UNIT = 21, 16
"""Numbers that the kernel adds up for the whole matrix; bytes of a load."""
BLOCKS = (8, 16, 32, 64, 128)
"""Heights of blocks: each is twice the one before it."""
GROUP_BITS = 4
GROUP_LESS_ONE = np.uint32((1 << GROUP_BITS) - 1)
"""Vectors of a group, ``VECTOR_STRIDE`` of the formats: their logarithm, and one less."""
TO_HOST = 2
"""cudaMemcpyDeviceToHost"""
MOST_PINNED = 1 << 20
"""Bytes of pinned memory that stay with the process."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    words = ((1, False), (1, True), (2, True), (4, True), (8, True))
    return tuple(_instance(*word, wide) for word in words for wide in (True, False))


def census(x: Array) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(row lengths int64[M], counts int64[30]) on the host, in the order of ``census_loops``, of x [M, K], CuPy, in C
    order. Waits for the device."""
    M, K = x.shape
    if not x.size:
        return np.zeros(M, np.int64), np.zeros(30, np.int64)
    if not aligned(x):
        x = x.copy()
    lengths, eights = 2 * COUNTS, 2 * COUNTS + M
    pairs = eights + ceil_div(M, 8)
    end, across = pairs + ceil_div(M, 16), ceil_div(K, SIDE)
    work, cuda = Workspace(4 * end), modules["cupy"].cuda
    (base,), stream = work.places, cuda.get_current_stream()
    cuda.runtime.memsetAsync(base, 0, 4 * end, stream.ptr)
    wide = x.data.ptr % UNIT == 0 and K * x.itemsize % UNIT == 0
    KERNELS.queue(
        _instance(*value_word(x), wide), "PqqqPPPP", ceil_div(M, SIDE) * across,
        x, M, K, across, base, base + 4 * lengths, base + 4 * eights, base + 4 * pairs,
    )  # fmt: skip
    host = _copied(base, end, stream)  # synchronize!
    bad, negative, *others = host[:lengths].view(np.uint64).tolist()
    of_rows, of_eight, of_sixteen = host[lengths:eights], host[eights:pairs], host[pairs:]
    groups = [int((n + GROUP_LESS_ONE >> GROUP_BITS).sum()) for n in (of_eight, of_sixteen)]
    vectors = int(of_eight.sum()), int(of_sixteen.sum())
    counts = bad, negative, *vectors, *groups, *others[:5], *block_rows(of_rows), *others[5:]
    return of_rows.astype(np.int64), np.array(counts, np.int64)


def _copied(base: int, n: int, stream: Any) -> np.ndarray[Any, Any]:
    """uint32[n] from a device address, after everything that is queued on the stream.

    By way of pinned memory, from which a copy takes half as long; unless it is so large that it should not be kept.
    """
    runtime = modules["cupy"].cuda.runtime
    if 4 * n > MOST_PINNED:
        large = np.empty(n, np.uint32)
        runtime.memcpyAsync(large.ctypes.data, base, 4 * n, TO_HOST, stream.ptr)
        stream.synchronize()  # synchronize!
        return large
    words = Words.taken(ceil_div(n, 2))
    runtime.memcpyAsync(words.address, base, 4 * n, TO_HOST, stream.ptr)
    stream.synchronize()  # synchronize!
    pinned: Any = words.words
    out: np.ndarray[Any, Any] = np.frombuffer(pinned, np.uint32, n).copy()
    words.give_back()
    return out


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
