"""The mask of the largest magnitudes of an array on the device, of an exact number.  Kernels: magnitude_mask.cu.

float64 is read seven times, float32 four times, 16-bit types three times and 8-bit types twice; the mask is written
once. The host does not wait.
"""

from __future__ import annotations

import functools
from typing import Any

from ....arrays.library import Array, ceil_div
from ..runtime.c_types import WORDS, word_type
from ..runtime.queue import Kernels, starts_on
from .keys import Keys, keys_of

THREADS = 256
"""Threads of a block; the same as ``THREADS`` in scan.cuh."""
KERNELS = Kernels("masks/magnitude_mask.cu", THREADS)
DIGIT = 11
"""Most bits of a digit: its counts fit in 8 KB of shared memory."""
SELECTION = 8
"""Words of ``Selection`` in largest.cuh."""
PIECES, WIDE = 1024, 16
"""Pieces of a tile: 32 a warp; bytes of a piece."""
BLOCKS_PER_MULTIPROCESSOR = 8
"""As many as run at once. Each adds its counts to those of all, so that more of them would only add more often."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    digits = tuple(f"spformat::masks::digit<{word}>" for word in WORDS.values())
    return *digits, *(_keep(word, wide) for word in WORDS.values() for wide in (True, False))


def mask_of_largest(x: Array, count: int, mask: Array, odd: int) -> None:
    """Fill mask bool (as many elements as x) with True for the ``count`` largest magnitudes of x, both CuPy.

    Of equal magnitudes the lowest places stay. count: 1 .. x.size. odd: address of a word to which the number of values
    that are not finite is added.
    """
    tiles = ceil_div(x.nbytes, PIECES * WIDE)
    selection = select(x, count, odd, tiles)
    KERNELS.queue(
        _keep(word_type(x), starts_on(x, WIDE)), ("P", "q", Keys, "P", "P"), tiles,
        x, int(x.size), keys_of(x.dtype), selection, mask,
    )  # fmt: skip


def select(x: Array, count: int, odd: int, tiles: int = 0) -> Array:
    """uint64: a ``Selection`` (largest.cuh) of the ``count`` largest magnitudes of x, once the current stream gets
    there; behind it are the bins of the kernel and zeros for so many tiles. Arguments as for ``mask_of_largest``."""
    import cupy

    keys, word, n = keys_of(x.dtype), word_type(x), int(x.size)
    state = cupy.zeros(SELECTION + (1 << DIGIT) + tiles, "uint64")
    blocks = max(1, min(ceil_div(x.nbytes, WIDE * THREADS), _blocks(x.device.id)))
    for number, (shift, width) in enumerate(digits(keys.bits)):
        KERNELS.queue(
            f"spformat::masks::digit<{word}>", ("P", "q", Keys, *"iiiqPP"), blocks,
            x, n, keys, shift, width, int(number == 0), count, state, odd,
        )  # fmt: skip
    return state


def digits(bits: int) -> list[tuple[int, int]]:
    """(lowest bit, bits) of every digit of a key, from the top; together they are ``bits`` bits."""
    return [(max(0, top - DIGIT), min(DIGIT, top)) for top in range(bits, 0, -DIGIT)]


@functools.cache
def _blocks(device_id: int) -> int:
    import cupy

    attributes: dict[str, Any] = cupy.cuda.Device(device_id).attributes
    return BLOCKS_PER_MULTIPROCESSOR * int(attributes["MultiProcessorCount"])


def _keep(word: str, wide: bool) -> str:
    return f"spformat::masks::keep<{word}, {str(wide).lower()}>"
