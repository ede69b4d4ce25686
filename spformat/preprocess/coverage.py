"""How much of a matrix the usual parts of a sum would take, from one pass over the values; for ``spformat inspect``.

The counts are those of the cover rules (``formats.cover``), which divide a matrix when it is converted.
"""

from __future__ import annotations

import numpy as np

from ..arrays import threads
from ..arrays.dtypes import nonzero_mask
from ..arrays.library import Array, ceil_div, round_up
from ..formats.base import checked_values

BLOCK, SHORT = 32, 8
RULES = (f"bsr:blocksize={BLOCK}x{BLOCK},density>=0.5", f"ell-buckets:max_width={SHORT}", "two-four")
"""The rules that are counted, as text."""
_CHUNK = 1 << 20
"""Elements that a thread counts together."""


def coverage(x: Array) -> dict[str, float]:
    """Rule -> the share of the nonzeros of a host matrix [M, K] that it would take as the first part of a sum.

    Empty for a matrix without nonzeros.
    """
    taken = covered(x)
    nnz = taken.pop("nnz")
    return {rule: n / nnz for rule, n in taken.items()} if nnz else {}


def covered(x: Array) -> dict[str, int]:
    """As ``coverage``, in nonzeros; all of them are counted as "nnz"."""
    x = checked_values(x, "inspect")
    M, K = x.shape
    step = round_up(max(1, _CHUNK // max(1, K)), BLOCK)
    counts = np.zeros((ceil_div(M, step) if K else 0, 1 + len(RULES)), np.int64)

    def count(i: int) -> None:
        chunk = x[i * step : (i + 1) * step]
        mask = np.zeros((round_up(chunk.shape[0], BLOCK), round_up(K, BLOCK)), np.uint8)
        mask[: chunk.shape[0], :K] = nonzero_mask(chunk)
        eights = np.bitwise_count(mask.view(np.uint64))
        lengths = eights.sum(axis=1, dtype=np.int64)
        blocks = eights.reshape(eights.shape[0] // BLOCK, BLOCK, -1, BLOCK // 8).sum(axis=(1, 3), dtype=np.int64)
        fours = np.minimum(np.bitwise_count(mask.view(np.uint32)), 2)
        dense, short = blocks[2 * blocks >= BLOCK * BLOCK], lengths[lengths <= SHORT]
        counts[i] = lengths.sum(), dense.sum(), short.sum(), fours.sum(dtype=np.int64)

    threads.run(count, len(counts))
    return dict(zip(("nnz", *RULES), counts.sum(axis=0).tolist(), strict=True))
