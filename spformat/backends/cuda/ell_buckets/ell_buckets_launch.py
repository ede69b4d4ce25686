"""Shared by the kernels that convert ELL buckets: the tables of the buckets on the device."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from ....arrays.library import Array, namespace
from ....formats.declare import MOST_INTS

THREADS = 256
"""Threads of a block, unless a kernel has another number."""
BATCH = 8
"""Slots that a thread converts; the same in the kernels."""


class Widths(ctypes.Structure):
    """Must match ``ell_buckets::Widths`` in ell_buckets.cuh."""

    _fields_ = [("count", ctypes.c_int32), ("width", ctypes.c_int32 * MOST_INTS)]

    @classmethod
    @functools.cache
    def of(cls, widths: tuple[int, ...]) -> bytes:
        """The widths of the buckets of a part as the kernels take them."""
        return bytes(cls(len(widths), (ctypes.c_int32 * MOST_INTS)(*widths)))


def tables(a: Any) -> Array:
    """int64[3, buckets+1] on the device of ``a``: the first ELL row of each bucket, its first slot, its width."""
    rows, widths = np.array(a.rows_per_bucket, np.int64), np.array(a.bucket_widths, np.int64)
    out = np.zeros((3, rows.size + 1), np.int64)
    np.cumsum(rows, out=out[0, 1:])
    np.cumsum(rows * widths, out=out[1, 1:])
    out[2, :-1] = widths
    return namespace(a.data).asarray(out)
