"""Offsets of tiles that were counted in pieces: shared by the conversions of SR-BCRS.  Kernels: sr_bcrs_pieces.cu."""

from __future__ import annotations

from typing import Any

from ....arrays.library import Array, ceil_div, index_dtype, power_of_two
from ..runtime import offsets
from ..runtime.c_types import INDEX
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters

SOURCE = "sr_bcrs/sr_bcrs_pieces.cu"
THREADS, WARP = 256, 32
"""Threads of a block, the same as in the kernel; lanes of a warp."""
KERNELS, FEW_PIECES = Kernels(SOURCE, THREADS), Kernels(SOURCE, offsets.THREADS)
"""The kernels of the file by the threads of their blocks."""
FEW = 8
"""Pieces that a thread adds up; the same as in the kernel."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return ("tile_lengths", *(f"tile_starts<{index}>" for index in INDEX.values()))


def starts_of_tiles(counts: Any, n: int, pieces: int, g: int, bound: int) -> tuple[Array, int]:
    """(indptr [n+1] of n tiles of ceil(items / g) entries each, all entries). Waits for the device once.

    bound: what the sum of all entries cannot exceed. counts: uint32[n, pieces], or its address: the items of each piece
    of a tile; it becomes the items of the pieces before it.
    """
    import cupy

    total = Counters(stored=1)
    if pieces <= FEW:
        starts, tiles = cupy.empty(n + 1, index_dtype(bound)), max(1, ceil_div(n, offsets.THREADS))
        FEW_PIECES.queue(
            f"tile_starts<{INDEX[starts.itemsize]}>", "PqqiPPP", tiles,
            counts, n, pieces, g, starts, offsets.tile_sums(tiles), total.address,
        )  # fmt: skip
    else:
        lengths, lanes = cupy.empty(n, "uint32"), min(WARP, power_of_two(pieces))
        KERNELS.queue("tile_lengths", "PqqiiP", ceil_div(n * lanes, THREADS), counts, n, pieces, g, lanes, lengths)
        starts = offsets.starts_of(lengths, bound, total.address)
    entries = total.get()[0]  # synchronize!
    return starts.astype(index_dtype(entries), copy=False), entries
