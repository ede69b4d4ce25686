"""Offsets of tiles that were counted in pieces: shared by the conversions of SR-BCRS.  Kernel: sr_bcrs_pieces.cu."""

from __future__ import annotations

from ....arrays.library import Array, ceil_div, power_of_two
from ..runtime.offsets import Offsets
from ..runtime.queue import Kernels

SOURCE = "sr_bcrs/sr_bcrs_pieces.cu"
THREADS, WARP = 256, 32
"""Threads of a block, the same as in the kernel; lanes of a warp."""
KERNELS = Kernels(SOURCE, THREADS)


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return ("tile_lengths",)


def offsets_of_tiles(counts: Array, g: int, bound: int) -> Offsets:
    """Offsets of tiles of ceil(items / g) entries each. bound: what their sum cannot exceed.

    counts: uint32[tiles, pieces], the items of each piece of a tile; it becomes the items of the pieces before it.
    """
    import cupy

    n, pieces = counts.shape
    lengths, lanes = cupy.empty(n, "uint32"), min(WARP, power_of_two(pieces))
    KERNELS.queue("tile_lengths", "PqqiiP", ceil_div(n * lanes, THREADS), counts, n, pieces, g, lanes, lengths)
    return Offsets(lengths, bound)
