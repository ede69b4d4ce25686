"""Dense to and from vector n:m on the device for values of two bytes, four rows at a time: vector_nm_quads.cu.

They run a fraction of the instructions of the kernels of ``vector_nm_convert.py``, which takes what does not fit here.
"""

from __future__ import annotations

import ctypes
import functools

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div
from ..runtime.expansion import Target
from ..runtime.launch import Bound
from ..runtime.queue import Kernels
from ..runtime.scratch import Counters

SOURCE = "vector_nm/vector_nm_quads.cu"
THREADS = 256
KERNELS = Kernels(SOURCE, THREADS)
COLUMNS, ROWS, QUAD = 64, 128, 4
"""Columns and (at most) rows that a block takes; rows that are moved together."""
ALIGN = 16
"""Bytes of a load of neighbours in a row of the dense array."""
LARGEST_WINDOW = 32
"""Columns of a window that a warp decides on together."""
ENCODE, SCATTER = (f"spformat::vector_nm_quads::{name}" for name in ("encode", "scatter"))


class Sizes(ctypes.Structure):
    """Must match ``vector_nm_quads::Sizes`` in the kernels."""

    _fields_ = [(name, ctypes.c_int64) for name in ("M", "K", "Q", "Mp")] + [
        (name, ctypes.c_int32) for name in ("n", "log_m", "all", "groups", "per", "reciprocal", "windows", "strips")
    ]


ENCODING, SCATTERING = ("P", Sizes, *"iPPP"), ("P", "P", Sizes, *"iPq")
"""The parameters of the kernels."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return ENCODE, SCATTER


def takes(address: int, ld: int, K: int, data: Array, m: int, length: int) -> bool:
    """Whether these kernels convert a dense array [M, K] to or from data [W, Mp].

    address, ld: where the dense array starts and the elements between its rows. They take values of two bytes, windows
    of a power of two of at most ``LARGEST_WINDOW`` columns, row groups of whole quads and at most ``ROWS`` rows, and
    rows of whole loads that start on ``ALIGN`` bytes.
    """
    return (
        data.dtype.itemsize == 2
        and m <= LARGEST_WINDOW
        and m & (m - 1) == 0
        and length % QUAD == 0
        and length <= ROWS
        and not (address % ALIGN or ld * 2 % ALIGN or K * 2 % ALIGN)
        and data.data.ptr % (2 * QUAD) == 0
        and data.shape[0] < 2**31
    )


def encode(x: Array, n: int, m: int, length: int, indices: Array, data: Array) -> Counters:
    """``vector_nm_convert.vector_nm_encode`` for what ``takes`` takes."""
    refused = Counters()
    sizes, blocks = _sizes(x.shape, indices.shape, data.shape[1], n, m, length)
    KERNELS.queue(ENCODE, ENCODING, blocks, x, sizes, _live(data), indices, data, refused.address)
    return refused


def to_dense(indices: Array, data: Array, n: int, m: int, length: int, out: Array) -> None:
    """``vector_nm_convert.vector_nm_to_dense`` for what ``takes`` takes."""
    sizes, blocks = _sizes(out.shape, indices.shape, data.shape[1], n, m, length)
    KERNELS.queue(SCATTER, SCATTERING, blocks, indices, data, sizes, _live(data), out, out.shape[1])


def launch(
    shape: tuple[int, int], indices: Array, data: Array, nm: tuple[int, int, int], target: Target,
    to: tuple[int, int, int],
) -> Bound:  # fmt: skip
    """The launch that writes a dense array of ``shape``, for what ``takes`` takes.

    nm: n, m, rows of a group. to: address of the array, elements between its rows, stream.
    """
    sizes, blocks = _sizes(shape, indices.shape, data.shape[1], *nm)
    bound, (x, ld, stream) = KERNELS.launch(SCATTER, SCATTERING, target), to
    return bound.bind((blocks, 1, 1), stream, indices.data.ptr, data.data.ptr, sizes, _live(data), x, ld)


@functools.lru_cache(maxsize=256)
def _sizes(shape: tuple[int, int], vectors: tuple[int, int], Mp: int, n: int, m: int, length: int) -> tuple[bytes, int]:
    """(extents, blocks) for a dense array of ``shape`` and indices of shape ``vectors``."""
    (M, K), (W, Q), groups, per = shape, vectors, ROWS // length, length // QUAD
    strips = ceil_div(W // n, COLUMNS // m)
    log_m, reciprocals = m.bit_length() - 1, (ceil_div(1 << 16, per), ceil_div(1 << 16, n))
    sizes = Sizes(M, K, Q, Mp, n, log_m, W // n, groups, per, *reciprocals, strips)
    return bytes(sizes), strips * ceil_div(Q, groups)


def _live(data: Array) -> int:
    """The bits that decide whether a value is zero, twice in a word, as a signed number."""
    twice = value_type(data.dtype).zero_mask * 0x10001
    return twice - (twice >> 31 << 32)
