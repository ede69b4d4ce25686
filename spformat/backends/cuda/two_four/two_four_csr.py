"""CSR matrices to 2:4 and back on the device, values of 1, 2 and 4 bytes.  Kernels: two_four_csr.cu."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any

import numpy as np

from ....arrays.dtypes import value_type
from ....arrays.library import ceil_div, index_dtype, namespace
from ....formats.csr import CSR
from ....formats.meta_orders import meta_steps
from ....formats.two_four import ROWS, TwoFour
from ..runtime.c_types import INDEX, WORDS, index_type, word_type
from ..runtime.offsets import Offsets
from ..runtime.queue import Kernels, starts_on
from ..runtime.scratch import Counters

Params = dict[str, Any]
THREADS, WARP = 256, 32
KERNELS = Kernels("two_four/two_four_csr.cu", THREADS)
TILE, PART = 16384, 4096
"""Bytes of a dense tile in shared memory; columns that a warp takes on the way back: the same as in the kernel."""
WIDE = 16
"""Bytes of a load."""


class Steps(ctypes.Structure):
    """Must match ``Steps`` in the kernel."""

    _fields_ = [(name, ctypes.c_int64) for name in ("r32", "r16", "r8", "r1", "outer", "inner")] + [
        (name, ctypes.c_int32) for name in ("shift", "unused")
    ]


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    words, indices = [WORDS[size] for size in (1, 2, 4)], INDEX.values()
    return (
        *(_name("from_csr", *types) for types in itertools.product(words, indices, indices)),
        *(_name("count", word) for word in words),
        *(_name("to_csr", *types) for types in itertools.product(words, indices, indices)),
    )


def from_csr(a: CSR, params: Params) -> TwoFour | None:
    """CSR -> TwoFour, in one pass. Waits once, for the number of groups that are refused."""
    M, K = a.shape
    Mp, Kp, order = -(-M // ROWS) * ROWS, -(-K // 64) * 64, params["meta_order"]
    if not (M and K):
        return None
    xp, itemsize = namespace(a.data), a.dtype.itemsize
    data, meta = xp.empty((Mp, Kp // 2), a.dtype), xp.empty(Mp * Kp // 16, np.uint16)
    cols = min(Kp, TILE // itemsize)
    rows = min(32, 1 << (TILE // itemsize // cols).bit_length() - 1)
    strips, refused = ceil_div(Kp, cols), Counters()
    name = _name("from_csr", word_type(a.data), index_type(a.indices), index_type(a.indptr))
    KERNELS.queue(
        name, (*"PPPqqqiiq", Steps, *"PPP"), strips * (Mp // rows),
        a.indptr, a.indices, a.data, M, Kp, value_type(a.dtype).zero_mask, rows, cols, strips, _steps((Mp, Kp), order),
        data, meta, refused.address,
    )  # fmt: skip
    count, inverted = refused.get()  # synchronize!
    first, nonzeros = divmod((1 << 64) - 1 - inverted, 8) if count else (0, 0)
    return TwoFour.encoded(a.shape, order, data, meta, (count, first, nonzeros))


def to_csr(a: TwoFour, params: Params) -> CSR | None:
    """TwoFour -> CSR, in two passes over the values. Waits once, for the number of nonzeros."""
    (M, K), (Mp, Kp) = a.shape, a.padded_shape
    if not (M and K) or not starts_on(a.data, WIDE):
        return None
    xp, word, live = namespace(a.data), word_type(a.data), value_type(a.dtype).zero_mask
    parts, wide = ceil_div(Kp, PART), Kp // 16
    size, blocks = M * parts, ceil_div(M * parts, THREADS // WARP)
    counts = xp.empty(size, np.uint32)
    KERNELS.queue(_name("count", word), "PqqqqP", blocks, a.data, size, wide, parts, live, counts)
    offsets = Offsets(counts, M * Kp // 2)
    nnz = offsets.total()  # synchronize!
    indptr = xp.ascontiguousarray(offsets.starts[::parts]).astype(index_dtype(nnz), copy=False)
    indices, data = xp.empty(nnz, index_dtype(K - 1)), xp.empty(nnz, a.dtype)
    if nnz:
        KERNELS.queue(
            _name("to_csr", word, index_type(indices), index_type(offsets.starts)), (*"PPqqqq", Steps, *"PPP"), blocks,
            a.data, a.meta, size, wide, parts, live, _steps((Mp, Kp), a.meta_order), offsets.starts,
            indices, data,
        )  # fmt: skip
    return CSR.unchecked(shape=a.shape, indptr=indptr, indices=indices, data=data)


def _steps(padded: tuple[int, int], order: str) -> Steps:
    r32, r16, r8, r1, shift, outer, inner = meta_steps(padded, order)
    return Steps(r32, r16, r8, r1, outer, inner, shift, 0)


@functools.cache
def _name(kernel: str, *types: str) -> str:
    return f"spformat::two_four::{kernel}<{', '.join(types)}>"
