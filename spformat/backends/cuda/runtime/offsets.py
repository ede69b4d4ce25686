"""Counts -> where each segment starts, on the device in one launch.  Kernel: offsets.cu.

A conversion to a sparse format counts what each row or tile will store, computes the offsets, and fills the arrays. The
host must know only how long the arrays are; it waits for that number alone, and the kernel writes it to host memory.
"""

from __future__ import annotations

import functools
from sys import modules

from ....arrays.library import Array, ceil_div, index_dtype
from .c_types import INDEX
from .queue import Kernels
from .scratch import DEFAULT, Counters, Scratch

SOURCE = "runtime/offsets.cu"
THREADS, TILE = 512, 4096
"""Threads of a block that writes starts, and the counts that it takes: as in look_back.cuh."""
KERNELS = Kernels(SOURCE, THREADS)
COUNT = {4: "unsigned int", 8: "unsigned long long"}
"""C++ type of the counts, by bytes of one."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(count, start) for count in COUNT for start in INDEX)


class TileSums:
    """What a kernel with ``sum_before`` of look_back.cuh needs to add up what its blocks count.

    ``total`` must be called after the launch: it waits for the device, which otherwise would write into host memory
    that belongs to somebody else by then.
    """

    __slots__ = ("_counters", "arguments")

    def __init__(self, blocks: int) -> None:
        """blocks: those of the launch."""
        self._counters = Counters(stored=1)
        self.arguments = tile_sums(blocks), self._counters.address
        """The last arguments of the kernel, both addresses."""

    def total(self) -> int:
        """The sum of all."""
        return self._counters.get()[0]  # synchronize!


def tile_sums(blocks: int) -> int:
    """Address of the zeros in which the blocks of the next launch on the current stream publish their sums."""
    cuda = modules["cupy"].cuda
    device, stream, needed = cuda.runtime.getDevice(), cuda.get_current_stream().ptr, 8 * (blocks + 2)
    nbytes, address = _known.get((device, stream), (0, 0))
    if needed > nbytes:
        address = int(_scratch(device).buffer(int(stream), needed))
        if stream in DEFAULT:  # nothing else decides its buffer, which is kept as long as the process
            _known[device, stream] = needed, address
    return address


_known: dict[tuple[int, int], tuple[int, int]] = {}
"""(device, stream) -> (bytes, address) of the last buffer, for streams that cannot be captured."""


class Offsets:
    """``starts`` int[n+1]: the sums of all counts before each of n counts, and of all.

    The array may be used on the current stream at once. ``total`` or ``indptr`` must be called: they wait for the
    device, which otherwise would write into host memory that belongs to somebody else by then.
    """

    __slots__ = ("_counters", "starts")

    def __init__(self, counts: Array, bound: int) -> None:
        """counts: CuPy, 4 or 8 bytes an element, none below 0. bound: what their sum cannot exceed; it decides whether
        starts are int32 or int64."""
        self._counters = Counters(stored=1)
        self.starts = starts_of(counts, bound, self._counters.address)

    def total(self) -> int:
        """The sum of all counts."""
        return self._counters.get()[0]  # synchronize!

    def indptr(self) -> tuple[Array, int]:
        """(the starts in the smallest index type that can represent their sum, the sum)."""
        total = self.total()  # synchronize!
        return self.starts.astype(index_dtype(total), copy=False), total


def starts_of(counts: Array, bound: int, total: int = 0) -> Array:
    """``Offsets.starts`` alone, where the sum is known: nothing waits. total: an address for the sum, or 0."""
    import cupy

    n = counts.size
    starts = cupy.empty(n + 1, index_dtype(bound))
    tiles = tiles_of(n)
    name = _instance(counts.itemsize, starts.itemsize)
    KERNELS.queue(name, "PqPPP", tiles, counts, n, starts, tile_sums(tiles), total)
    return starts


def tiles_of(n: int) -> int:
    """Blocks that add up n counts."""
    return max(1, ceil_div(n, TILE))


@functools.cache
def _scratch(device_id: int) -> Scratch:
    return Scratch(zeros=True, shared="offsets")


@functools.cache
def _instance(count: int, start: int) -> str:
    return f"offsets<{COUNT[count]}, {INDEX[start]}>"
