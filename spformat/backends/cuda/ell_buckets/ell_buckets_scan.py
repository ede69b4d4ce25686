"""Whether an ELL bucket matrix on the device is valid, in two passes: ``scan_launch``.  Kernels: ell_buckets_scan.cu.

Beside the arrays it takes eight bytes a slot: which ELL row starts, and which ends, at each position of the CSR.
"""

from __future__ import annotations

import ctypes

import numpy as np

from ....arrays.library import INT32_MAX, Array, namespace
from ..runtime.c_types import INDEX, WORDS, index_type, word_type
from ..runtime.scan_launch import Pass, finds_nothing

SOURCE = "ell_buckets/ell_buckets_scan.cu"


class Extents(ctypes.Structure):
    """Must match ``ell_buckets::Extents`` in the kernel."""

    _fields_ = [(name, ctypes.c_int64) for name in ("M", "K", "R", "S", "part")] + [
        (name, ctypes.c_int32) for name in ("buckets", "levels")
    ]


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    slots = [_instance("slots", value, "int", "int") for value in WORDS.values()]
    rows = [_instance("rows", *types) for types in (("int", "int", "int"), ("long long", "int", "int"))]
    return (*slots, *rows, _instance("rows", "int", *INDEX.values()), _instance("slots", WORDS[2], *INDEX.values()))


def ell_buckets_sound(
    shape: tuple[int, int],
    part: int,
    widths: tuple[int, ...],
    buckets: Array,
    row_ids: Array,
    indices: Array,
    data: Array,
    source: Array,
) -> bool:
    """Whether row_ids [R], indices, data and source [S], CuPy, are those of a valid matrix; waits for the device.

    part: columns of a part. widths: those of the buckets of a part, ascending. buckets: int64[parts, levels, 2] on the
    host, ELL rows and split ELL rows of each.
    """
    S, R = data.size, row_ids.size
    if S >= INT32_MAX:
        return False
    if not S:
        return True
    xp, (parts, levels, _) = namespace(data), buckets.shape
    tables = np.zeros((4, parts * levels + 1), np.int64)
    rows, split = buckets.reshape(-1, 2).T
    tables[0, 1:] = np.cumsum(rows)
    tables[3, :-1] = np.tile(widths, parts)
    tables[1, 1:] = np.cumsum(rows * tables[3, :-1])
    tables[2, :-1] = tables[0, 1:] - split
    chain = xp.full((2, S + 1), -1, np.int32)
    extents = Extents(*shape, R, S, part, parts * levels, levels)
    rest = (xp.asarray(tables), chain[0], chain[1], extents)
    slots = _instance("slots", word_type(data), index_type(indices), index_type(source))
    chained = _instance("rows", index_type(row_ids), index_type(indices), index_type(source))
    signature = (*"PPPPPP", Extents)
    return finds_nothing(
        SOURCE,
        Pass(slots, signature, (indices, data, source, *rest), S),
        Pass(chained, signature, (row_ids, indices, source, *rest), R),
    )


def _instance(kernel: str, *types: str) -> str:
    return f"spformat::ell_buckets::{kernel}_scan<{', '.join(types)}>"
