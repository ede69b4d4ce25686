"""ELL buckets as a dense matrix on the device, every element written once.  Kernels: ell_buckets_to_dense.cu.

The host does not wait. The products that expand a matrix again and again derive another list, ``expand_ell_buckets``.
"""

from __future__ import annotations

from typing import Any

from ....arrays.library import Array, ceil_div, index_dtype, power_of_two
from ..runtime.c_types import WORDS, index_type
from ..runtime.queue import Kernels
from ..runtime.row_images import WARPS, cut
from .ell_buckets_launch import TABLES, THREADS, tables

SOURCE = "ell_buckets/ell_buckets_to_dense.cu"
KERNELS, IMAGES = Kernels(SOURCE, THREADS), Kernels(SOURCE, 32 * WARPS)


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    kinds = (("long long", "int"), ("int", "int"), ("int", "long long"), ("long long", "long long"))
    expand = [_expand(size, idx, slot) for size, (idx, slot) in zip(WORDS, kinds, strict=True)]
    return (_find("int", *kinds[1]), _find("int", *kinds[0]), _find("long long", *kinds[2]), *expand)


def lanes_of(rows: int, width: int, segments: int, parts: int, part_size: int) -> int:
    """Lanes that take one run of an image of ``rows`` x ``width`` elements: the warp takes all of them at once."""
    across = min(parts, ceil_div(width, part_size) + (segments > 1))
    return 32 // min(32, power_of_two(rows * across))


def bytes_of_runs(a: Any) -> int:
    """Bytes of the list of runs."""
    return int(2 * a.column_parts * a.shape[0] * index_dtype(a.data.size).itemsize)


def ell_buckets_to_dense(a: Any, out: Array) -> None:
    """Write out [M, K], all of it, from a valid ELLBuckets of CuPy arrays."""
    import cupy

    if not out.size:
        return
    (M, K), parts, size = a.shape, a.column_parts, a.part_size
    runs = cupy.zeros((parts, M, 2), index_dtype(a.data.size))
    slot, idx, R = index_type(runs), index_type(a.indices), a.row_ids.size
    if R:
        KERNELS.queue(
            _find(index_type(a.row_ids), idx, slot), ("P", "P", *TABLES, *"iiqqP"), ceil_div(R, THREADS),
            a.row_ids, a.indices, *tables(a), len(a.rows_per_bucket), len(a.widths), R, M, runs,
        )  # fmt: skip
    c = cut(M, K, out.itemsize)
    lanes = lanes_of(c.rows, c.width, c.segments, parts, size)
    IMAGES.queue(
        _expand(out.itemsize, idx, slot), "PPPqqiqPqiii", c.blocks,
        runs, a.indices, a.data, M, K, parts, size, out, c.segments, c.width, c.rows, lanes,
    )  # fmt: skip


def _find(row: str, idx: str, slot: str) -> str:
    return f"find_runs<{row}, {idx}, {slot}>"


def _expand(itemsize: int, idx: str, slot: str) -> str:
    return f"expand_runs<{WORDS[itemsize]}, {idx}, {slot}>"
