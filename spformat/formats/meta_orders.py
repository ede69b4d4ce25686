"""The orders of the metadata words of 2:4: permutations of the same words, for different instructions and libraries.

A word is for a row r and 16 columns, number q of its row. ``logical`` is row-major, ``ldmatrix`` and ``fragment`` are
orders in which a warp loads words for ``mma.sp``, ``cutlass-sm80`` is that of CUTLASS and torch.  Spec:
docs/formats/two-four.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.library import Array, namespace

META_ORDERS = ("logical", "ldmatrix", "fragment", "cutlass-sm80")


def order_view(meta: Array, shape: tuple[int, int], order: str) -> Array:
    """The logical words [Mp, Kp/16] (indexed [r, q]) as a *view* of ``meta`` stored in ``order``.

    ``shape`` is (Mp, Kp). With h = (r%16)//8, i = r%8 the closed forms of the word offset are
    ldmatrix (8*(r//16)+i)*(Kp/8) + 2q + h; fragment 64*((r//16)*(Kp/64) + q//4) + 8i + 2*(q%4) + h;
    cutlass-sm80 2*Mp*(q//2) + 64*(r//32) + 8i + 4*((r%32)//16) + 2*(q%2) + h.
    The view has split axes where a row or a column is not one stride; reshape it to [Mp, Kp/16] to read.
    """
    Mp, Q = shape[0], shape[1] // 16
    if order == "logical":
        return meta.reshape(Mp, Q)
    if order == "ldmatrix":  # stored [r//16, i, q, h]
        return meta.reshape(Mp // 16, 8, Q, 2).transpose(0, 3, 1, 2)
    if order == "fragment":  # stored [r//16, q//4, i, q%4, h]
        return meta.reshape(Mp // 16, Q // 4, 8, 4, 2).transpose(0, 4, 2, 1, 3)
    # stored [q//2, r//32, i, (r%32)//16, q%2, h]
    return meta.reshape(Q // 2, Mp // 32, 8, 2, 2, 2).transpose(1, 3, 5, 2, 0, 4)


def reorder_meta(meta: Array, shape: tuple[int, int], old: str, new: str) -> Array:
    """Metadata words uint16[Mp*Kp/16] of padded ``shape`` (Mp, Kp) moved from one order to another."""
    if old == new:
        return meta
    xp = namespace(meta)
    out = xp.empty_like(meta)
    target = order_view(out, shape, new)
    words = order_view(meta, shape, old).reshape(shape[0], shape[1] // 16)
    target[...] = words.reshape(target.shape)
    return out


def meta_steps(shape: tuple[int, int], order: str) -> tuple[int, int, int, int, int, int, int]:
    """(r32, r16, r8, r1, shift, outer, inner) of padded ``shape`` (Mp, Kp): ``order_view`` in numbers.

    word(r, q) is at r//32*r32 + r%32//16*r16 + r%16//8*r8 + r%8*r1 + (q >> shift)*outer + (q % 2**shift)*inner.
    """
    Mp, Q = shape[0], shape[1] // 16
    if order == "logical":
        return 32 * Q, 16 * Q, 8 * Q, Q, 0, 1, 0
    if order == "ldmatrix":
        return 32 * Q, 16 * Q, 1, 2 * Q, 0, 2, 0
    if order == "fragment":
        return 32 * Q, 16 * Q, 1, 8, 2, 64, 2
    return 64, 4, 1, 8, 1, 2 * Mp, 2


def meta_places(shape: tuple[int, int], order: str) -> tuple[np.ndarray[Any, Any], int, int, int]:
    """(row_offset int64[Mp], shift, outer, inner) of ``meta_steps``: where loops over words find those of a row."""
    r32, r16, r8, r1, shift, outer, inner = meta_steps(shape, order)
    r = np.arange(shape[0], dtype=np.int64)
    return r // 32 * r32 + r % 32 // 16 * r16 + r % 16 // 8 * r8 + r % 8 * r1, shift, outer, inner
