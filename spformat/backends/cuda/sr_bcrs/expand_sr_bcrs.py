"""SR-BCRS as a dense matrix on the device, in one pass.  Kernel: expand_sr_bcrs.cu."""

from __future__ import annotations

from typing import Any

from ....arrays.library import Array, ceil_div, round_up
from ....products.problem import Problem
from ..runtime import jit
from ..runtime.c_types import WORDS, index_type
from ..runtime.expansion import UNIT, Target, Writer
from ..runtime.launch import Bound, Launch
from ..runtime.queue import Kernels
from . import expand_sr_bcrs_slots
from .mma_fragments import fragments_of, have_slots

SOURCE = "sr_bcrs/expand_sr_bcrs.cu"
SIGNATURE = "PPPqiiPqqi"
THREADS, IMAGES, TALLEST = 256, 32 * 1024, 256
"""Must match the constants of the kernel: threads of a block, bytes of its images, the tallest vector."""
KERNELS = Kernels(SOURCE, THREADS)


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(size, ptr, idx, wide) for size, ptr, idx, wide in (
        (1, "int", "int", True), (2, "int", "int", True), (2, "int", "int", False), (4, "long long", "int", True),
        (8, "int", "long long", True),
    ))  # fmt: skip


def expander(a: Any, p: Problem) -> Writer:
    """The launches that write the SR-BCRS ``a`` [M, K] as a dense matrix.

    From the slots that the other kernels read, where it has them, so that a matrix is on the device once.
    """
    if have_slots(p):
        return expand_sr_bcrs_slots.writer(fragments_of(a, p), Target.of(p))
    return _writer(p.M, a.indptr, a.indices, a.data, Target.of(p))


def sr_bcrs_to_dense(indptr: Array, indices: Array, data: Array, out: Array) -> None:
    """Write out [M, K], all of it, from the arrays of a valid SR-BCRS, all CuPy."""
    if not out.size:
        return
    (M, K), (_, t, g) = out.shape, data.shape
    segments, width = cut(K, t, out.itemsize)
    KERNELS.queue(
        _instance_of(indptr, indices, data), SIGNATURE, ceil_div(M, t) * segments,
        indptr, indices, data, M, t, g, out, K, segments, width,
    )  # fmt: skip


def cut(ld: int, t: int, itemsize: int) -> tuple[int, int]:
    """(segments of a row tile, columns of each, a multiple of 16 bytes): a block each. ld at least 1."""
    unit = UNIT // itemsize
    most = IMAGES // (t * UNIT) * unit
    segments = ceil_div(ld, most)
    width = round_up(ceil_div(ld, segments), unit)
    return ceil_div(ld, width), width


def _writer(M: int, indptr: Array, indices: Array, data: Array, target: Target) -> Writer:
    (_, t, g), itemsize = data.shape, data.dtype.itemsize
    function = jit.load(SOURCE, _instance_of(indptr, indices, data), *target)
    launch = Launch(function, SIGNATURE, (indptr, indices, data, M, t, g), THREADS)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        if not M:
            return []
        segments, width = cut(ld, t, itemsize)
        return [launch.bind((ceil_div(M, t) * segments, 1, 1), stream, x, ld, segments, width)]

    return launches


def _instance_of(indptr: Array, indices: Array, data: Array) -> str:
    itemsize, g = data.dtype.itemsize, data.shape[2]
    return _instance(itemsize, index_type(indptr), index_type(indices), g * itemsize % UNIT == 0)


def _instance(itemsize: int, ptr: str, idx: str, wide: bool) -> str:
    return f"expand_sr_bcrs<{WORDS[itemsize]}, {ptr}, {idx}, {str(wide).lower()}>"
