"""Panels: SR-BCRS of any (t, g) re-chunked on the device into the fragments of m16n8k16.  Kernels: mma_fragments.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....products.kernel import reasons
from ....products.problem import Problem
from ..runtime import jit, refusals
from ..runtime.launch import Launch, finish_arrays

SOURCE = "sr_bcrs/mma_fragments.cu"
DEPTH = 128  # columns of A in a chunk
MMA_TYPES = ("bfloat16", "float16")
BLOCK_ROWS = 128  # rows of a large block, which share what they load of B
SLACK = 32  # steps that a kernel may read past the last one


@dataclass(frozen=True)
class Tile:
    """Warps of a block: ``wm`` panels of 16 * ``fragments`` rows x ``wn`` strips of 8 * ``strip`` columns x ``wk``.

    ``wk`` warps share the steps of a panel; ``stages`` chunks are in shared memory; ``cluster`` blocks share them.
    """

    fragments: int
    wm: int
    wn: int
    wk: int
    strip: int
    stages: int
    cluster: int = 1

    @property
    def rows(self) -> int:
        return self.wm * self.fragments * 16

    @property
    def cols(self) -> int:
        return self.wn * self.strip * 8

    @property
    def warps(self) -> int:
        return self.wm * self.wn * self.wk

    @property
    def sums(self) -> int:
        """bytes of the sums that warps of one panel exchange"""
        return self.warps * self.fragments * self.strip * 512 if self.wk > 1 else 0

    def blocks(self, M: int, n: int) -> int:
        return -(-M // self.rows) * -(-n // self.cols)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{DEPTH}, {self.wk} warps a panel, clusters of {self.cluster}"


@dataclass(frozen=True)
class Panels:
    """What ``include/spformat/mma_fragments.cuh`` describes: first uint32[P*Q+1], steps uint8[count, step_bytes]."""

    first: Any
    steps: Any

    @property
    def nbytes(self) -> int:
        return int(self.first.nbytes + self.steps.nbytes)


def step_bytes(fragments: int) -> int:
    """bytes of a step: 16 places and the A fragments."""
    return 16 + 512 * fragments


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return ("panel_steps<int, int>", "panel_steps<long long, long long>", "panel_fill<__half, int, long long>")


def index_type(array: Any) -> str:
    """C++ name of the elements of an INDEX array."""
    return "int" if array.dtype == "int32" else "long long"


def types(a: Any, p: Problem) -> str:
    """The leading template arguments of a kernel over panels: T, Out, Ptr, Index."""
    values = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"
    return f"{values}, {index_type(a.indptr)}, {index_type(a.indices)}"


def panel_reasons(p: Problem) -> list[str]:
    """Why no tensor-core kernel over panels takes ``p``."""
    # Lines of B that blocks of BLOCK_ROWS rows load, against those that the vectors name.
    staged, named = -(-p.M // BLOCK_ROWS) * p.K, p.nnz // max(1, p.p.get("vector_length", 1))
    return refusals.every(p, 80, MMA_TYPES) + reasons(
        (
            named and staged > 4 * named,
            f"{BLOCK_ROWS} rows share what they load of B: that pays from {staged // 4} vectors on, got {named}",
        ),
    )


def panels(a: Any, p: Problem, fragments: int) -> Panels:
    """The panels of ``a``, made on its device once and kept with the matrix for the plans that follow."""
    built: Panels = a.kernel_arrays((SOURCE, fragments), lambda: _panels(a, p, fragments))
    return built


def _panels(a: Any, p: Problem, fragments: int) -> Panels:
    import cupy

    rows = 16 * fragments
    count, chunks = -(-p.M // rows), -(-p.K // DEPTH)
    arch, stream = jit.architecture(p.sm or 80, ()), cupy.cuda.get_current_stream().ptr
    index_types = f"{index_type(a.indptr)}, {index_type(a.indices)}"
    grid = (-(-count * chunks // 8), 1, 1)
    extents = (p.M, a.vector_length, a.stride, rows, count, chunks)
    first = cupy.zeros(count * chunks + 1, "uint32")
    if count * chunks:
        counts = cupy.empty(count * chunks, "uint32")
        counted = (a.indptr, a.indices, *extents, counts)
        function = jit.load(SOURCE, f"panel_steps<{index_types}>", arch, p.device_id)
        Launch(function, "PPqiiiqqP", counted, 256)(grid, stream)
        cupy.cumsum(counts, out=first[1:])
    steps = cupy.zeros((int(first[-1]) + SLACK, step_bytes(fragments)), "uint8")  # synchronize!
    if count * chunks:
        filled = (a.indptr, a.indices, a.data, *extents, first, steps)
        function = jit.load(SOURCE, f"panel_fill<{VALUE_TYPES[p.a_dtype].cuda}, {index_types}>", arch, p.device_id)
        Launch(function, "PPPqiiiqqPP", filled, 256)(grid, stream)
    finish_arrays()  # synchronize!
    return Panels(first, steps)
