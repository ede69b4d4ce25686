"""Norms of blocks of an array on the device, with the bits of the numpy code, in one pass.  Kernels: block_norms.cu.

float64 is read twice, because its norms are scaled by the largest value.
"""

from __future__ import annotations

import math

from ....arrays.library import Array, ceil_div
from ..runtime.c_types import WORDS, word_type
from ..runtime.queue import Kernels, starts_on
from .keys import Keys, cuda_kind, keys_of

THREADS = 256
KERNELS = Kernels("masks/block_norms.cu", THREADS)
COLUMNS = 2048
"""Columns of a strip at most; the same as ``COLUMNS`` in the kernel."""
WIDE = 16
"""Bytes of a load of neighbours."""
ROWS = 64
"""Rows of a block for which a thread writes the mask."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    cases = (
        ("Float64", 8, 2), ("Float64", 8, 1), ("Float32", 4, 4), ("Float16", 2, 1), ("Float16", 2, 8),
        ("BFloat16", 2, 8), ("Float8E4M3", 1, 16), ("Float8E5M2", 1, 1), ("Int8", 1, 16),
    )  # fmt: skip
    norms = (_norms(f"spformat::{kind}", WORDS[size], piece) for kind, size, piece in cases)
    return *norms, "spformat::masks::largest_finite_key", _mask(1), _mask(8)


def block_norms(x: Array, blocksize: tuple[int, int], norm: str, norms: Array, odd: int) -> None:
    """Fill norms float64[cdiv(M, R), cdiv(K, C)] with the "l2" (squared) or "l1" norms of the blocks of x, both CuPy.

    odd: address of a word to which the number of values that are not finite is added.
    """
    import cupy

    (M, K), (R, C), keys, itemsize = x.shape, blocksize, keys_of(x.dtype), x.dtype.itemsize
    largest = 0
    if itemsize == 8:
        largest = cupy.zeros(1, "uint64")
        KERNELS.queue(
            "spformat::masks::largest_finite_key", ("P", "q", Keys, "P"), min(2048, ceil_div(x.size, THREADS)),
            x, x.size, keys, largest,
        )  # fmt: skip
    piece = WIDE // itemsize
    step = math.lcm(C, piece)
    if K % piece or step > COLUMNS or not starts_on(x, WIDE):
        piece, step = 1, C
    wide = min(COLUMNS, max(step, 4 * THREADS if piece == 1 else THREADS * piece)) // step * step
    strips = ceil_div(K, wide)
    KERNELS.queue(
        _norms(cuda_kind(x.dtype), word_type(x), piece), ("P", *"qqiiiiqq", Keys, *"PPP"), strips * ceil_div(M, R),
        x, M, K, R, C, int(norm == "l2"), wide, strips, norms.shape[1], keys, largest, norms, odd,
    )  # fmt: skip


def mask_of_blocks(keep: Array, blocksize: tuple[int, int], mask: Array) -> None:
    """Fill mask bool[M, K] from keep bool[cdiv(M, R), cdiv(K, C)], which says it for whole blocks, both CuPy."""
    (M, K), (R, C) = mask.shape, blocksize
    piece = 8 if K % 8 == 0 else 1
    strips, rows = ceil_div(K, THREADS * piece), min(R, ROWS)
    parts = ceil_div(R, rows)
    KERNELS.queue(
        _mask(piece), "PqqiiqiiqP", strips * parts * keep.shape[0],
        keep, M, K, R, C, keep.shape[1], rows, parts, strips, mask,
    )  # fmt: skip


def _norms(kind: str, word: str, piece: int) -> str:
    return f"spformat::masks::block_norms<{kind}, {word}, {piece}>"


def _mask(piece: int) -> str:
    return f"spformat::masks::mask_of_blocks<{piece}>"
