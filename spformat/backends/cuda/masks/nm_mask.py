"""Masks that keep the n largest of every m columns, on the device, in one pass.  Kernels: nm_mask.cu."""

from __future__ import annotations

from ....arrays.library import Array, ceil_div
from ..runtime.c_types import WORDS, word_type
from ..runtime.queue import Kernels, starts_on
from .keys import Keys, keys_of

THREADS = 256
KERNELS = Kernels("masks/nm_mask.cu", THREADS)
LINES = 8
"""Lines that a block takes together; the same as ``LINES`` in the kernel."""
IN_REGISTERS = (2, 4, 8, 16)
"""Windows that one thread ranks alone, if they lie one behind another."""
WIDE = 16
"""Bytes of a load."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    whole = (_whole(word, m) for word, m in zip(WORDS.values(), (4, 16, 8, 4), strict=True))
    return *whole, _whole(WORDS[2], 4), *map(_any, WORDS.values())


def nm_mask(x: Array, n: int, m: int, mask: Array, odd: int, repeat: int = 1) -> None:
    """Fill mask bool[M, K] with True for the n largest of every m columns of x [ceil(M / repeat), K], both CuPy.

    Line q of x stands for ``repeat`` rows of the mask. odd: address of a word to which the number of values that are
    not finite is added, or 0. 1 <= n <= m <= 256.
    """
    keys, word, (lines, K) = keys_of(x.dtype), word_type(x), x.shape
    if m in IN_REGISTERS and K % m == 0 and repeat == 1 and starts_on(x, WIDE):
        share = max(m, WIDE // x.dtype.itemsize)
        blocks = ceil_div(ceil_div(x.size, share), THREADS)
        KERNELS.queue(_whole(word, m), ("P", "q", "i", Keys, "P", "P"), blocks, x, x.size, n, keys, mask, odd)
        return
    windows = THREADS // m
    strips = ceil_div(K, windows * m)
    KERNELS.queue(
        _any(word), ("P", *"qqqiiiiq", Keys, "P", "P"), strips * ceil_div(lines, LINES),
        x, lines, mask.shape[0], K, n, m, windows, repeat, strips, keys, mask, odd,
    )  # fmt: skip


def _whole(word: str, m: int) -> str:
    return f"spformat::masks::whole_windows<{word}, {m}>"


def _any(word: str) -> str:
    return f"spformat::masks::any_windows<{word}>"
