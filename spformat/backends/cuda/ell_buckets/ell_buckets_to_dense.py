"""ELL buckets as a dense matrix on the device, every element written once.  Kernels: ell_buckets_to_dense.cu.

The host does not wait. Products that expand a matrix again and again keep the list of runs, or where that is long
another list (``expand_ell_buckets``).
"""

from __future__ import annotations

from typing import Any

from ....arrays.library import Array, ceil_div, index_dtype, power_of_two
from ..runtime import jit
from ..runtime.c_types import WORDS, index_type
from ..runtime.expansion import Target, Writer
from ..runtime.launch import Bound, Launch, finish_arrays
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
    if not out.size:
        return
    (M, K), parts, size = a.shape, a.column_parts, a.part_size
    runs = runs_of(a)
    slot, idx = index_type(runs), index_type(a.indices)
    c = cut(M, K, out.itemsize)
    lanes = lanes_of(c.rows, c.width, c.segments, parts, size)
    IMAGES.queue(
        _expand(out.itemsize, idx, slot), "PPPqqiqPqiii", c.blocks,
        runs, a.indices, a.data, M, K, parts, size, out, c.segments, c.width, c.rows, lanes,
    )  # fmt: skip


def runs_of(a: Any) -> Array:
    """[parts, M, 2]: in each column part of each row the first slot, and that after the last item; 0, 0 without
    items."""
    import cupy

    M, R = a.shape[0], a.row_ids.size
    runs = cupy.zeros((a.column_parts, M, 2), index_dtype(a.data.size))
    if R:
        name = _find(index_type(a.row_ids), index_type(a.indices), index_type(runs))
        KERNELS.queue(
            name, ("P", "P", *TABLES, *"iiqqP"), ceil_div(R, THREADS),
            a.row_ids, a.indices, *tables(a), len(a.rows_per_bucket), len(a.widths), R, M, runs,
        )  # fmt: skip
    return runs


def writer_by_runs(a: Any, target: Target) -> Writer:
    """The launches that write ``a`` [M, K] as a dense matrix, whose rows may be longer than K."""
    itemsize, size, M, parts = a.data.dtype.itemsize, a.part_size, a.shape[0], a.column_parts

    def build() -> Array:
        runs = runs_of(a)
        finish_arrays()  # synchronize!
        return runs

    runs = a.kernel_arrays("runs", build)
    function = jit.load(SOURCE, _expand(itemsize, index_type(a.indices), index_type(runs)), *target)
    launch = Launch(function, "PPPqqiqPqiii", (runs, a.indices, a.data, M), 32 * WARPS)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        c = cut(M, ld, itemsize)
        lanes = lanes_of(c.rows, c.width, c.segments, parts, size)
        return [launch.bind((c.blocks, 1, 1), stream, ld, parts, size, x, c.segments, c.width, c.rows, lanes)]

    return launches


def _find(row: str, idx: str, slot: str) -> str:
    return f"find_runs<{row}, {idx}, {slot}>"


def _expand(itemsize: int, idx: str, slot: str) -> str:
    return f"expand_runs<{WORDS[itemsize]}, {idx}, {slot}>"
