"""ELL buckets as a dense matrix on the device, every element written once.  Kernels: ell_buckets_to_dense.cu.

The host does not wait. The products that expand a matrix again and again derive another list, ``expand_ell_buckets``.
"""

from __future__ import annotations

from typing import Any

from ....arrays.library import Array, ceil_div, index_dtype, power_of_two
from ..runtime.expansion import Target, index_type
from ..runtime.row_images import WARPS, cut
from ..runtime.transpose import WORDS
from .ell_buckets_launch import THREADS, launch, stream, tables

SOURCE = "ell_buckets/ell_buckets_to_dense.cu"


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
    (M, K), parts, size, target, now = a.shape, a.column_parts, a.part_size, Target.holding(a.data), stream()
    runs = cupy.zeros((parts, M, 2), index_dtype(a.data.size))
    slot, idx, R = index_type(runs), index_type(a.indices), a.row_ids.size
    if R:
        buckets = tables(a)
        finding = launch(SOURCE, _find(index_type(a.row_ids), idx, slot), "PPPiiqqP", target)
        numbers = len(a.rows_per_bucket), len(a.widths), R, M
        at = (a.row_ids.data.ptr, a.indices.data.ptr, buckets.data.ptr)
        finding((ceil_div(R, THREADS), 1, 1), now, *at, *numbers, runs.data.ptr)
    c = cut(M, K, out.itemsize)
    lanes = lanes_of(c.rows, c.width, c.segments, parts, size)
    expanding = launch(SOURCE, _expand(out.itemsize, idx, slot), "PPPqqiqPqiii", target, 32 * WARPS)
    given = (runs.data.ptr, a.indices.data.ptr, a.data.data.ptr, M, K, parts, size)
    expanding((c.blocks, 1, 1), now, *given, out.data.ptr, c.segments, c.width, c.rows, lanes)


def _find(row: str, idx: str, slot: str) -> str:
    return f"find_runs<{row}, {idx}, {slot}>"


def _expand(itemsize: int, idx: str, slot: str) -> str:
    return f"expand_runs<{WORDS[itemsize]}, {idx}, {slot}>"
