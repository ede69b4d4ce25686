"""What only a device has compiled code for: scans that find a matrix valid in one launch, packing and pruning.

The numpy code, which CuPy runs too, stays the law: results and verdicts equal it. The modules of backends/cuda are
loaded by name, when first called, because backends stand above formats.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..arrays.library import Array, current_device, is_cupy

ON_DEVICE = {
    "bitmask_sound": "bitmask.bitmask_scan",
    "bsr_sound": "bsr.bsr_scan",
    "csr_sound": "csr.csr_scan",
    "ell_buckets_sound": "ell_buckets.ell_buckets_scan",
    "sr_bcrs_sound": "sr_bcrs.sr_bcrs_scan",
    "two_four_sound": "two_four.two_four_scan",
    "vector_nm_sound": "vector_nm.vector_nm_scan",
    "vector_nm_encode": "vector_nm.vector_nm_convert",
    "vector_nm_prune": "vector_nm.vector_nm_convert",
    "vector_nm_to_dense": "vector_nm.vector_nm_convert",
    "vector_nm_pack": "vector_nm.vector_nm_convert",
    "two_four_pack": "two_four.two_four_pack",
    "two_four_unpack": "two_four.two_four_pack",
}
"""Edge -> the module of backends/cuda with a function of that name, which takes what the function here (or, where the
host has one too, in ``compiled``) takes, as CuPy arrays."""


def call(edge: str, *args: Any) -> Any:
    """The function of an edge, called with the device of its first array current."""
    twin = importlib.import_module(f"spformat.backends.cuda.{ON_DEVICE[edge]}")
    with current_device(next(a for a in args if is_cupy(a))):
        return getattr(twin, edge)(*args)


def _finds(edge: str, *args: Any) -> bool:
    """Whether a scan found nothing wrong; False too where no device holds the arrays: the named checks then tell."""
    return edge in ON_DEVICE and any(map(is_cupy, args)) and bool(call(edge, *args))


def csr_sound(shape: tuple[int, int], indptr: Array, indices: Array) -> bool:
    """Whether the arrays, its values aside, are seen to hold a valid CSR [M, K]."""
    return _finds("csr_sound", shape, indptr, indices)


def bitmask_sound(shape: tuple[int, int], indptr: Array, bitmask: Array, data: Array) -> bool:
    """Whether the arrays are seen to hold a valid bitmask matrix [M, K]."""
    return _finds("bitmask_sound", shape, indptr, bitmask, data)


def bsr_sound(
    shape: tuple[int, int],
    blocksize: tuple[int, int],
    row_ids: Array | None,
    indptr: Array,
    indices: Array,
    data: Array,
) -> bool:
    """Whether the arrays are seen to hold a valid BSR [M, K], or with ``row_ids`` a DBSR."""
    return _finds("bsr_sound", shape, blocksize, row_ids, indptr, indices, data)


def sr_bcrs_sound(shape: tuple[int, int], indptr: Array, indices: Array, data: Array) -> bool:
    """Whether the arrays are seen to hold a valid SR-BCRS [M, K]."""
    return _finds("sr_bcrs_sound", shape, indptr, indices, data)


def ell_buckets_sound(
    shape: tuple[int, int], part: int, buckets: Array, row_ids: Array, indices: Array, data: Array, source: Array
) -> bool:
    """Whether the arrays are seen to hold a valid ELL bucket matrix [M, K] of parts of ``part`` columns.

    buckets: int64[parts, levels, 2] on the host, ELL rows and split ELL rows of each.
    """
    return _finds("ell_buckets_sound", shape, part, buckets, row_ids, indices, data, source)


def two_four_sound(shape: tuple[int, int], data: Array, meta: Array, nibbles: int, steps: tuple[int, ...]) -> bool:
    """Whether data [Mp, Kp/2] and meta are seen to be those of a valid matrix. steps: ``two_four.meta_steps``."""
    return _finds("two_four_sound", shape, data, meta, nibbles, steps)


def vector_nm_sound(shape: tuple[int, int], n: int, m: int, length: int, indices: Array, data: Array) -> bool:
    """Whether indices [W, Q] and data [W, Mp] are seen to be those of a valid matrix [M, K]."""
    return _finds("vector_nm_sound", shape, n, m, length, indices, data)


def two_four_pack(x: Array, order: str, data: Array, meta: Array, prune: bool = False) -> tuple[int, int, int]:
    """Fill ``data`` [Mp, Kp/2] and ``meta`` [Mp*Kp/16], all of both, from x [M, K].

    Returns what ``compiled.two_four_encode`` does. prune: the two largest magnitudes of every group stay, as
    ``masks.magnitude_nm`` ranks them; refused are then values that are not finite, and only their count is given.
    """
    refused: tuple[int, int, int] = call("two_four_pack", x, order, data, meta, prune)
    return refused


def two_four_unpack(data: Array, meta: Array, order: str, out: Array) -> None:
    """Write ``out`` [M, K], all of it, from valid ``data`` and ``meta``."""
    call("two_four_unpack", data, meta, order, out)


def vector_nm_prune(x: Array, n: int, m: int, length: int, norm: str, indices: Array, data: Array) -> Any:
    """``compiled.vector_nm_encode`` of x with the vectors kept that ``masks.magnitude_vector_nm`` keeps.

    Returns None where the kernel does not take x, else what has the count of values that are not finite as first word
    of ``get()``, which waits for the device.
    """
    return call("vector_nm_prune", x, n, m, length, norm, indices, data)


def vector_nm_pack(indices: Array, n: int, m: int, col_info: Array, ranks: Array) -> None:
    """Fill col_info int16[Tr, Tk, tile_cols] and ranks uint8[Tr, W, Qs] of indices uint8[W, Q]."""
    call("vector_nm_pack", indices, n, m, col_info, ranks)
