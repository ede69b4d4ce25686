"""A dense matrix as a Bitmask on the device in one pass, all values or the largest.

Kernels: bitmask_one_pass.cu, masks/magnitude_mask.cu.
"""

from __future__ import annotations

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div
from ..csr.csr_pruned import HALF, stored
from ..masks.keys import Keys, keys_of
from ..masks.magnitude_mask import select
from ..runtime.c_types import WORDS
from ..runtime.offsets import tile_sums
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters
from .bitmask_pack import THREADS, TILE, tiles

KERNELS = Kernels("bitmask/bitmask_one_pass.cu", THREADS)
SAMPLES = 512
"""Tiles of a sample, about."""
SLACK = 32
"""The bound for the number of values is a part in so many above what the sample says."""
LARGE = 96 << 20
"""Bytes from which a matrix is sampled and read once; below, the second wait takes longer than reading it twice."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(
        f"{kernel}<{word}>" for kernel in ("prune_tiles", "pack_tiles", "sample_tiles") for word in WORDS.values()
    )


def bitmask_of_largest(x: Array, count: int) -> tuple[Array, Array, Array, int]:
    """(indptr, bitmask, data, values of x that are not finite): the ``count`` largest magnitudes of x [M, K], CuPy,
    C-contiguous, aligned to its elements, with 1 to 2^31 - 1 of them; 0 < count <= M*K.

    Of equal magnitudes the first in row-major order stay. Waits for the device once, at the end.
    """
    (M, K), counters, blocks = x.shape, Counters(), tiles(x)
    selection = select(x, count, counters.address)
    indptr, bitmask, data = _empty(x, count)
    KERNELS.queue(
        f"prune_tiles<{WORDS[x.itemsize]}>", ("P", "q", "q", Keys, *"PPPPqPP"), blocks,
        x, M, K, keys_of(x.dtype), selection, bitmask, tile_sums(blocks), counters.address + 8, count, data, indptr,
    )  # fmt: skip
    odd, both = counters.get()  # synchronize!
    nnz = stored(both, count)
    return indptr, bitmask, data if nnz == count else data[:nnz].copy(), odd


def bitmask_by_sample(x: Array) -> tuple[Array, Array, Array] | None:
    """(indptr, bitmask, data) of x, as for ``bitmask_of_largest``; None if it has more values than a sample promises.

    data is the start of an allocation that is a few percent larger. Waits for the device twice.
    """
    (M, K), live, blocks, sample = x.shape, value_type(x.dtype).zero_mask, tiles(x), Counters()
    step = max(1, blocks // SAMPLES)
    taken = ceil_div(blocks, step)
    KERNELS.queue(
        f"sample_tiles<{WORDS[x.itemsize]}>", "PqqqPP", taken, x, x.size, step, live, tile_sums(0), sample.address
    )
    seen, counters = sample.get()[0], Counters()  # synchronize!
    expected = ceil_div(seen * x.size, min(x.size, taken * (TILE // x.itemsize)))
    capacity = min(x.size, expected + expected // SLACK + TILE)
    indptr, bitmask, data = _empty(x, capacity)
    KERNELS.queue(
        f"pack_tiles<{WORDS[x.itemsize]}>", "PqqqPPPqPP", blocks,
        x, M, K, live, bitmask, tile_sums(blocks), counters.address, capacity, data, indptr,
    )  # fmt: skip
    nnz = counters.get()[0] & ((1 << HALF) - 1)  # synchronize!
    return (indptr, bitmask, data[:nnz]) if nnz <= capacity else None


def _empty(x: Array, values: int) -> tuple[Array, Array, Array]:
    """(indptr, bitmask, data) for so many values of x, uninitialised."""
    import cupy

    (M, K) = x.shape
    return cupy.empty(M + 1, "int32"), cupy.empty((M, ceil_div(K, 8)), "u1"), cupy.empty(values, x.dtype)
