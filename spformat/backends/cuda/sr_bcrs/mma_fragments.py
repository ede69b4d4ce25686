"""SR-BCRS of any (t, g) converted on the device into operand fragments of mma m16n8k16.  Kernels: mma_fragments.cu.

A panel is the ``16 * fragments`` rows of A that a warp multiplies; a chunk is ``DEPTH`` columns of A. The columns that
a panel uses in a chunk, 16 at a time, are the steps of the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....products.ideal import (
    b_alignment,
    cache_us,
    ceil_div,
    load_us,
    memory_us,
    operands_bytes,
    rounds,
    stored_bytes,
    tile_us,
)
from ....products.kernel import spmm_of
from ....products.problem import COL, ROW, Problem, itemsize
from ....products.roofline import TENSOR_16, Device, shared_limit
from ..runtime import jit, refusals
from ..runtime.c_types import index_type
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Launch, finish_arrays

SOURCE = "sr_bcrs/mma_fragments.cu"
DEPTH = 128  # columns of A in a chunk
MMA_TYPES = ("bfloat16", "float16")
SLACK = 32  # steps that a kernel may read past the last one


@dataclass(frozen=True)
class Tile:
    """How warps divide the tile of a block: ``wm`` panels x ``wn`` strips of 8 * ``strip`` columns x ``wk`` warps.

    ``wk`` warps share the steps of a panel, ``stages`` chunks of B are in shared memory at a time, and the ``cluster``
    blocks of a cluster share them.
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
        """Bytes of the sums that the warps of one panel exchange."""
        return self.warps * self.fragments * self.strip * 512 if self.wk > 1 else 0

    def blocks(self, M: int, n: int) -> int:
        return -(-M // self.rows) * -(-n // self.cols)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{DEPTH}, {self.wk} warps a panel, clusters of {self.cluster}"


@dataclass(frozen=True)
class Fragments:
    """The arrays of ``include/spformat/mma_fragments.cuh``: first uint32[P*Q+1], steps uint8[count, step_bytes]."""

    first: Any
    steps: Any

    @property
    def nbytes(self) -> int:
        return int(self.first.nbytes + self.steps.nbytes)


def step_bytes(fragments: int) -> int:
    """Bytes of a step: 16 column positions and the fragments of A."""
    return 16 + 512 * fragments


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return ("panel_steps<int, int>", "panel_steps<long long, long long>", "panel_fill<__half, int, long long>")


def types(a: Any, p: Problem) -> str:
    """The leading template arguments of a kernel that reads fragments: T, Out, Ptr, Index."""
    values = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"
    return f"{values}, {index_type(a.indptr)}, {index_type(a.indices)}"


TERMS = ("launch", "memory", "lines of B", "chunks", "products", "panels", "tiles", "column-major C", "pieces of B",
         "rounds of resident blocks")  # fmt: skip
"""The terms of the expected time of the kernels that read fragments."""
SHARED, THREADS = 227 << 10, 1024
"""Bytes of shared memory of a multiprocessor, and threads that the registers of these kernels leave room for."""


class FragmentKernel(CudaKernel):
    """C = A @ B for 16-bit ``SRBCRS`` A of any vector_length and stride; any M, K, N, layout and leading dimension.

    Subclasses give ``name``, ``tiles``, ``smem`` and the launches of one tile (``prepared_with``).
    """

    takes = spmm_of("sr-bcrs")
    terms = TERMS

    def smem(self, tile: Tile) -> int:
        """Bytes of shared memory that a block needs."""
        raise NotImplementedError(f"{type(self).__name__} does not implement smem")

    def unsupported(self, p: Problem) -> list[str]:
        return refusals.every(p, 80, MMA_TYPES)

    def options(self, p: Problem) -> list[Tile]:
        """The tiles that shared memory has room for."""
        return [t for t in self.tiles if self.smem(t) <= shared_limit(p.sm)]

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By tile, layout of B, and whether rows of a row-major B start on 16-byte boundaries."""
        lines = ", unaligned" if p.b_layout == ROW and b_alignment(p) < 16 else ""
        return (f"{tile.rows}x{tile.cols}, {p.b_layout}-major B{lines}",)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        return fragment_quantities(p, tile, device)

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)


def fragment_quantities(p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
    """Ideal microseconds of each of TERMS.

    lines of B: every tile of C loads all K lines of its columns from L2, in whole rounds of tiles. chunks: 0.1 us for
    each chunk of 128 lines that a tile waits for. products: the rows of a panel times the columns that it uses. panels:
    the stored fragments from L2, once for every tile of columns. tiles: C as written in each round. pieces of B:
    0.1 us for each piece of eight values that a thread copies to shared memory itself. rounds of resident blocks: the
    chunks again, where the blocks of one multiprocessor hide each other's waiting.
    """
    length = p.p["vector_length"]
    rows, columns = ceil_div(p.M, tile.rows), ceil_div(p.n, tile.cols)
    turns = rounds(rows * columns, device.processors)
    lines = turns * load_us(p.K * tile.cols * 2, device)
    chunks = turns * ceil_div(p.K, DEPTH) * 0.1
    share = min(1.0, p.nnz / length / max(1, ceil_div(p.M, length) * p.K))
    high = 16 * tile.fragments
    named = p.K * (1 - (1 - share) ** max(1, high // length))  # columns that a panel uses, if vectors lie at random
    products = turns * tile_us(tile.rows, tile.cols, named, TENSOR_16, device)
    loaded = cache_us(ceil_div(p.M, high) * named * columns * high * 2, device)
    written = turns * load_us(tile.rows * tile.cols * itemsize(p.out_dtype), device)
    memory = memory_us(stored_bytes(p) + operands_bytes(p), device)
    turned = written if p.out_layout == COL else 0.0
    pieces = turns * p.K * (p.n / columns) / 8 / (32 * tile.warps) * 0.1
    resident = min(SHARED // (tile.stages * DEPTH * 2 * (tile.cols + 8)), THREADS // (32 * tile.warps))
    waiting = rounds(rows * columns, device.processors * max(1, resident)) * ceil_div(p.K, DEPTH) * 0.1
    return 1.0, memory, lines, chunks, products, loaded, written, turned, pieces, waiting


def fragments_of(a: Any, p: Problem, fragments: int) -> Fragments:
    """The fragments of ``a``, built on its device once and kept with the matrix for later plans."""
    built: Fragments = a.kernel_arrays((SOURCE, fragments), lambda: _build_fragments(a, p, fragments))
    return built


def _build_fragments(a: Any, p: Problem, fragments: int) -> Fragments:
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
    return Fragments(first, steps)
