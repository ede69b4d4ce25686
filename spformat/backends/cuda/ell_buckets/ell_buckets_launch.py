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


class FewBuckets(ctypes.Structure):
    """Must match ``ell_buckets::FewBuckets`` in ell_buckets.cuh."""

    _fields_ = [("table", ctypes.c_int64 * 126)]


SIZE = ctypes.sizeof(FewBuckets)
TABLES = "P", FewBuckets
"""The parameters of a kernel that takes the tables of the buckets."""


def tables(a: Any) -> tuple[Array | None, bytes]:
    """The tables of the buckets of ``a`` as arguments of a kernel, of the types ``TABLES``.

    Few buckets travel with the arguments; a copy to the device would take as long as the kernel. The tables are
    int64[3, buckets+1]: the first ELL row of each bucket, its first slot, its width.
    """
    if 24 * (len(a.rows_per_bucket) + 1) <= SIZE:
        return None, _few(a.rows_per_bucket, a.bucket_widths)
    return namespace(a.data).asarray(_listed(a.rows_per_bucket, a.bucket_widths)), bytes(SIZE)


@functools.lru_cache(maxsize=256)
def _few(rows_per_bucket: tuple[int, ...], bucket_widths: tuple[int, ...]) -> bytes:
    """The tables of few buckets. numpy takes longer for them than the device for a small matrix."""
    return _listed(rows_per_bucket, bucket_widths).tobytes().ljust(SIZE, b"\0")


def _listed(rows_per_bucket: tuple[int, ...], bucket_widths: tuple[int, ...]) -> np.ndarray[Any, Any]:
    rows, widths = np.array(rows_per_bucket, np.int64), np.array(bucket_widths, np.int64)
    out = np.zeros((3, rows.size + 1), np.int64)
    np.cumsum(rows, out=out[0, 1:])
    np.cumsum(rows * widths, out=out[1, 1:])
    out[2, :-1] = widths
    return out
