"""The largest values of a dense array as a CSR on the device, in one pass beside those that select.

Kernels: csr_pruned.cu, masks/magnitude_mask.cu.
"""

from __future__ import annotations

import functools

from ....arrays.library import Array, ceil_div
from ..masks.keys import Keys, keys_of
from ..masks.magnitude_mask import select
from ..runtime.c_types import WORDS
from ..runtime.offsets import tile_sums
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters
from .csr_from_dense import LANES, pieces_of

WARPS = 4
"""The same as in the source."""
KERNELS = Kernels("csr/csr_pruned.cu", WARPS * LANES)
MOST = 2**31
"""Elements that the kernel cannot count."""
HALF = 31
"""Bits of each of the two numbers that it adds up."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(size, narrow) for size in WORDS for narrow in (False, True))


def csr_of_largest(x: Array, count: int) -> tuple[Array, Array, Array, int]:
    """(indptr, indices, data, values of x that are not finite): the ``count`` largest magnitudes of x [M, K], CuPy,
    C-contiguous, aligned to its elements, with 1 to 2^31 - 1 of them; 0 < count <= M*K.

    Of equal magnitudes the first in row-major order stay. Waits for the device once, at the end.
    """
    import cupy

    (M, K), (piece, pieces) = x.shape, pieces_of(x)
    counters, blocks = Counters(), ceil_div(pieces, WARPS)
    selection = select(x, count, counters.address)
    indptr, indices, data = cupy.empty(M + 1, "int32"), cupy.empty(count, "int32"), cupy.empty(count, x.dtype)
    KERNELS.queue(
        _instance(x.itemsize, piece > K), ("P", *"qqq", Keys, *"PPPPPPq"), blocks,
        x, M, K, pieces, keys_of(x.dtype), selection, tile_sums(blocks), counters.address + 8, indptr, indices, data,
        ceil_div(1 << 32, K),
    )  # fmt: skip
    odd, both = counters.get()  # synchronize!
    nnz = stored(both, count)
    if nnz < count:  # copies, so that no memory stays that nothing uses
        indices, data = indices[:nnz].copy(), data[:nnz].copy()
    return indptr, indices, data, odd


def stored(both: int, count: int) -> int:
    """Values that are stored, from what a kernel has added up (``Kept``).

    All that were asked for; fewer if zeros are among them, and then none is said to equal the smallest one.
    """
    return count if both >> HALF else both & ((1 << HALF) - 1)


@functools.cache
def _instance(size: int, narrow: bool) -> str:
    return f"prune_pieces<{WORDS[size]}, {str(narrow).lower()}>"
