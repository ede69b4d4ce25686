"""BSR and DBSR as a dense matrix on the device, in one pass.  Kernel: expand_bsr.cu."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ....arrays.library import Array, ceil_div
from ....products.problem import Problem
from ..runtime import jit
from ..runtime.c_types import WORDS, index_type
from ..runtime.expansion import UNIT, Target, Writer
from ..runtime.launch import Bound, Launch
from ..runtime.queue import Kernels

SOURCE = "bsr/expand_bsr.cu"
THREADS, MOST = 256, 2048
"""Must match the constants of the kernel: threads of a block, block columns that it may take."""
KERNELS = Kernels(SOURCE, THREADS)
BYTES = 32 * 1024
"""What a block of threads is to write."""


class Cut(NamedTuple):
    """How x is cut: ``segments`` pieces of ``blocks`` block columns; block rows into ``strips`` of ``height`` rows."""

    segments: int
    blocks: int
    strips: int
    height: int


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(size, indices, how) for size, indices, how in (
        (1, ("int", "int", "int"), (False, True, 16)),
        (2, ("int", "int", "int"), (False, True, 8)),
        (2, ("int", "int", "int"), (True, True, 1)),
        (4, ("long long", "int", "long long"), (True, True, 2)),
        (4, ("int", "long long", "int"), (False, False, 1)),
        (8, ("int", "int", "int"), (True, False, 1)),
    ))  # fmt: skip


def expander(a: Any, p: Problem) -> Writer:
    """The launches that write the BSR or DBSR ``a`` [M, K] as a dense matrix."""
    return _writer(p.M, a.row_ids if p.format == "dbsr" else None, a.indptr, a.indices, a.data, Target.of(p))


def bsr_to_dense(row_ids: Array | None, indptr: Array, indices: Array, data: Array, out: Array) -> None:
    """Write out [M, K], all of it, from the arrays of a valid BSR or, with row_ids, DBSR, all CuPy."""
    (M, K), (_, R, C), itemsize = out.shape, data.shape, out.dtype.itemsize
    if not out.size:
        return
    aligned = out.data.ptr % UNIT == 0 and K * itemsize % UNIT == 0
    c = cut(K, (R, C), itemsize, aligned)
    # A launch without fixed arguments serves all matrices: to build another one takes half as long as the kernel.
    instance, arrays = _kernel(row_ids, indptr, indices, data, aligned)
    KERNELS.queue(
        instance, "PqPPPqiiPqqiii", ceil_div(M, R) * c.strips * c.segments,
        *arrays, M, R, C, out, K, *c,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def cut(ld: int, blocksize: tuple[int, int], itemsize: int, aligned: bool) -> Cut:
    """The pieces of a matrix whose rows take ``ld`` elements (at least 1); aligned: each starts on 16 bytes."""
    R, C = blocksize
    step = 1
    if aligned:
        unit = UNIT // itemsize
        step = unit // math.gcd(unit, C)
    all_blocks = ceil_div(ld, C)
    wanted = min(MOST, all_blocks, max(1, BYTES // (min(R, 32) * C * itemsize)))
    blocks = ceil_div(wanted, step) * step
    strips = ceil_div(R, max(1, BYTES // (min(blocks, all_blocks) * C * itemsize)))
    return Cut(ceil_div(all_blocks, blocks), blocks, strips, ceil_div(R, strips))


def _writer(M: int, row_ids: Array | None, indptr: Array, indices: Array, data: Array, target: Target) -> Writer:
    (_, R, C), itemsize = data.shape, data.dtype.itemsize

    @functools.cache
    def launch(aligned: bool) -> Launch:
        instance, arrays = _kernel(row_ids, indptr, indices, data, aligned)
        return Launch(jit.load(SOURCE, instance, *target), "PqPPPqiiPqqiii", (*arrays, M, R, C), THREADS)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        if not M:
            return []
        aligned = x % UNIT == 0 and ld * itemsize % UNIT == 0
        c = cut(ld, (R, C), itemsize, aligned)
        grid = (ceil_div(M, R) * c.strips * c.segments, 1, 1)
        return [launch(aligned).bind(grid, stream, x, ld, *c)]

    return launches


def _kernel(
    row_ids: Array | None, indptr: Array, indices: Array, data: Array, aligned: bool
) -> tuple[str, tuple[Any, ...]]:
    """(C++ name of the kernel for these arrays, its first arguments)"""
    itemsize, C = data.dtype.itemsize, data.shape[2]
    first = indptr if row_ids is None else row_ids  # read only where block rows are listed
    types = index_type(first), index_type(indptr), index_type(indices)
    piece = math.gcd(UNIT // itemsize, C) if aligned else 1
    count = 0 if row_ids is None else row_ids.size
    return _instance(itemsize, types, (row_ids is not None, aligned, piece)), (first, count, indptr, indices, data)


@functools.cache
def _instance(itemsize: int, indices: tuple[str, ...], how: tuple[bool, bool, int]) -> str:
    flags = ", ".join(str(flag).lower() for flag in how)
    return f"expand_bsr<{WORDS[itemsize]}, {', '.join(indices)}, {flags}>"
