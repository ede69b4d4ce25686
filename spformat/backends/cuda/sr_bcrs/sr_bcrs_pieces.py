"""Offsets of tiles that were counted in pieces: shared by the conversions of SR-BCRS.  Kernel: sr_bcrs_pieces.cu."""

from __future__ import annotations

import functools
from typing import Any

from ....arrays.library import Array, ceil_div, power_of_two
from ..runtime import jit
from ..runtime.expansion import Target
from ..runtime.launch import Launch
from ..runtime.offsets import Offsets

SOURCE = "sr_bcrs/sr_bcrs_pieces.cu"
THREADS, WARP = 256, 32
"""Threads of a block, the same as in the kernel; lanes of a warp."""


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
    launch = _launch(*Target.holding(counts))
    grid = ceil_div(n * lanes, THREADS), 1, 1
    launch(grid, int(cupy.cuda.get_current_stream().ptr), counts.data.ptr, n, pieces, g, lanes, lengths.data.ptr)
    return Offsets(lengths, bound)


@functools.cache
def _launch(arch: str, device_id: int) -> Launch:
    function: Any = jit.load(SOURCE, "tile_lengths", arch, device_id)
    return Launch(function, "PqqiiP", (), THREADS)
