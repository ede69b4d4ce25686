"""The largest values of a dense matrix as a Bitmask on the device, in one pass beside those that select.

Kernels: bitmask_pruned.cu, masks/magnitude_mask.cu.
"""

from __future__ import annotations

from ....arrays.library import Array, ceil_div
from ..csr.csr_pruned import stored
from ..masks.keys import Keys, keys_of
from ..masks.magnitude_mask import select
from ..runtime.c_types import WORDS
from ..runtime.offsets import tile_sums
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters
from .bitmask_pack import THREADS, tiles

KERNELS = Kernels("bitmask/bitmask_pruned.cu", THREADS)


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(f"prune_tiles<{word}>" for word in WORDS.values())


def bitmask_of_largest(x: Array, count: int) -> tuple[Array, Array, Array, int]:
    """(indptr, bitmask, data, values of x that are not finite): the ``count`` largest magnitudes of x [M, K], CuPy,
    C-contiguous, aligned to its elements, with 1 to 2^31 - 1 of them; 0 < count <= M*K.

    Of equal magnitudes the first in row-major order stay. Waits for the device once, at the end.
    """
    import cupy

    (M, K), counters, blocks = x.shape, Counters(), tiles(x)
    selection = select(x, count, counters.address)
    bitmask = cupy.empty((M, ceil_div(K, 8)), "u1")
    indptr, data = cupy.empty(M + 1, "int32"), cupy.empty(count, x.dtype)
    KERNELS.queue(
        f"prune_tiles<{WORDS[x.itemsize]}>", ("P", "q", "q", Keys, *"PPPPPP"), blocks,
        x, M, K, keys_of(x.dtype), selection, bitmask, tile_sums(blocks), counters.address + 8, data, indptr,
    )  # fmt: skip
    odd, both = counters.get()  # synchronize!
    nnz = stored(both, count)
    return indptr, bitmask, data if nnz == count else data[:nnz].copy(), odd
