"""2:4 matrices as Bitmask and back on the device, without a dense matrix between.  Kernels: bitmask_two_four.cu."""

from __future__ import annotations

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div
from ..runtime.c_types import INDEX, WORDS
from ..runtime.offsets import TileSums
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters, Workspace
from ..two_four.two_four_scan import Places
from .bitmask_pack import THREADS, nonzeros, tiles
from .bitmask_unpack import starts_of

SOURCE = "bitmask/bitmask_two_four.cu"
KERNELS = Kernels(SOURCE, THREADS)


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    back = [_to_two_four(*sizes) for sizes in ((1, 4), (2, 4), (2, 8), (4, 4))]
    return (*(_bits(size) for size in (1, 2, 4)), *back)


def bitmask_from_two_four(
    shape: tuple[int, int], data: Array, meta: Array, steps: tuple[int, ...]
) -> tuple[Array, Array, Array]:
    """(indptr [M+1], bitmask uint8[M, ceil(K/8)], data [nnz]) of a valid 2:4 matrix with M and K at least 1.

    data [Mp, Kp/2] and meta, CuPy; steps: ``formats.meta_orders.meta_steps``. Waits for the number of nonzeros.
    """
    import cupy

    (M, K), length = shape, data.shape[1]
    bitmask, blocks = cupy.empty((M, ceil_div(K, 8)), "u1"), tiles(data, M * length)
    work, sums = Workspace(8 * blocks), TileSums(blocks)
    KERNELS.queue(
        _bits(data.itemsize), (*"PPqqq", Places, *"qPPPP"), blocks,
        data, meta, M, K, 2 * length, Places(*steps), value_type(data.dtype).zero_mask, bitmask, *work.places,
        *sums.arguments,
    )  # fmt: skip
    indptr, values = nonzeros(data, M, length, blocks, work.places[0], sums)
    return indptr, bitmask, values


def bitmask_to_two_four(
    indptr: Array, bitmask: Array, values: Array, nibbles: int, steps: tuple[int, ...], data: Array, meta: Array
) -> tuple[int, int, int]:
    """Fill data [Mp, Kp/2] and meta from the arrays of a valid Bitmask, all CuPy; waits for the device.

    Returns (number of groups with more than two nonzeros, the first of them as row * Kp/4 + group, its nonzeros). If
    there are any, data and meta must not be used. nibbles: those of each nonzero mask; steps: ``meta_steps``.
    """
    (M, wide), (Mp, half), starts, refused = bitmask.shape, data.shape, starts_of(bitmask), Counters()
    KERNELS.queue(
        _to_two_four(data.itemsize, indptr.itemsize), (*"PPPPqqqqq", Places, *"qPPP"),
        ceil_div(Mp * half // 16, THREADS),
        indptr, bitmask, starts, values, values.size, M, wide, Mp, 2 * half, Places(*steps), nibbles, data, meta,
        refused.address,
    )  # fmt: skip
    count, inverted = refused.get()  # synchronize!
    first, nonzero = divmod(2**64 - 1 - inverted, 8) if count else (0, 0)
    return count, first, nonzero


def _bits(size: int) -> str:
    return f"two_four_bits<{WORDS[size]}>"


def _to_two_four(size: int, index: int) -> str:
    return f"bitmask_to_two_four<{WORDS[size]}, {INDEX[index]}>"
