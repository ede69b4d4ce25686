"""Packed vector n:m: the columns that each tile needs, and where each index stands among them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.library import PAD, Array, namespace
from . import edges


def pack(indices: Array, params: dict[str, Any], padded: tuple[int, int]) -> tuple[Array, Array]:
    """(col_info int16[Tr, Tk, tile_cols], ranks uint8[Tr, W, Qs]) of indices uint8[W, Q] for the tile of ``params``.

    The paper's queryColInfo (columns a tile uses), reorderingIdx (place of each) and transformLayout.
    """
    xp, (W, Q) = namespace(indices), indices.shape
    n, m, L = params["n"], params["m"], params["vector_length"]
    tile_rows, tile_cols = params["tile_rows"], params["tile_cols"]
    if not tile_rows:
        return xp.empty((0, 0, tile_cols), np.int16), xp.empty((0, W, 0), np.uint8)
    Tr, Tk, Qs, per_tile = padded[0] // tile_rows, padded[1] // tile_cols, tile_rows // L, tile_cols // m
    if not Tr:
        return xp.empty((Tr, Tk, tile_cols), np.int16), xp.empty((Tr, W, Qs), np.uint8)
    packed: tuple[Array, Array] | None = edges.take("vector-nm:indices", "vector-nm:packed", indices, params, indices)
    if packed is not None:
        return packed
    window = xp.arange(W, dtype=np.int64) // n
    offset = (window % per_tile * m)[:, None] + indices  # [W, Q], inside the k tile
    tile_r, tile_k = xp.arange(Q, dtype=np.int64) // Qs, window // per_tile
    needed = xp.zeros((Tr, Tk, tile_cols), bool)
    needed[tile_r[None, :], tile_k[:, None], offset] = True
    rank = xp.cumsum(needed, axis=2, dtype=np.int16) - np.int16(1)
    col_info = xp.full((Tr, Tk, tile_cols), PAD, np.int16)
    r, k, o = xp.nonzero(needed)  # synchronize!
    col_info[r, k, rank[r, k, o]] = o
    ranks = rank[tile_r[None, :], tile_k[:, None], offset].astype(np.uint8)
    return col_info, xp.ascontiguousarray(ranks.reshape(W, Tr, Qs).transpose(1, 0, 2))
