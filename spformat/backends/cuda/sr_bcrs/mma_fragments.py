"""SR-BCRS of any (t, g) with 16-bit values in slots, the order of the tensor cores.  Kernels: mma_fragments.cu.

A panel is 32 rows of A, which a warp multiplies; a chunk is ``DEPTH`` columns of A. The columns that a panel uses in a
chunk, 16 at a time, are the steps of the product. A slot is eight rows of a panel in one column; only those with a
value are stored. So slots hold all of the matrix, with vectors of 8 rows in fewer bytes than the format. They therefore
replace its arrays (``Format.kernel_order``), and every kernel of a 16-bit SR-BCRS reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import PAD, Array, ceil_div, index_dtype
from ....products.ideal import (
    b_alignment,
    cache_us,
    load_us,
    memory_us,
    operands_bytes,
    rounds,
    stored_bytes,
    tile_us,
)
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, ROW, Problem, itemsize
from ....products.roofline import TENSOR_16, Device, shared_limit
from ..runtime import jit, refusals
from ..runtime.c_types import index_type
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Launch, finish_device
from ..runtime.queue import Kernels

SOURCE = "sr_bcrs/mma_fragments.cu"
DEPTH, PANEL, FRAGMENTS = 128, 32, 2
"""Columns of A in a chunk, rows of a panel, and fragments of 16 rows in it; as in the kernels."""
MMA_TYPES = ("bfloat16", "float16")
MOST_STEPS, HEADER = DEPTH // 16, 32
"""Steps of a record at most, and bytes of a step's header."""
MOST_BYTES = MOST_STEPS * HEADER + PANEL // 8 * DEPTH * 16
"""Bytes of a record at most."""
MOST_PIECES = 1 << 28
"""Pieces of 16 bytes are counted in 28 bits."""
THREADS, WARPS = 256, 8
"""Threads and warps of a block of the conversions."""
KERNELS = Kernels(SOURCE, THREADS)


@dataclass(frozen=True)
class Tile:
    """How warps divide the tile of a block: ``wm`` panels x ``wn`` strips of 8 * ``strip`` columns x ``wk`` warps.

    ``wk`` warps share the steps of a panel, ``stages`` chunks of B are in shared memory at a time, and the ``cluster``
    blocks of a cluster share them.
    """

    wm: int
    wn: int
    wk: int
    strip: int
    stages: int
    cluster: int = 1

    @property
    def rows(self) -> int:
        return self.wm * PANEL

    @property
    def cols(self) -> int:
        return self.wn * self.strip * 8

    @property
    def warps(self) -> int:
        return self.wm * self.wn * self.wk

    @property
    def sums(self) -> int:
        """Bytes of the sums that the warps of one panel exchange."""
        return self.warps * FRAGMENTS * self.strip * 512 if self.wk > 1 else 0

    def blocks(self, M: int, n: int) -> int:
        return -(-M // self.rows) * -(-n // self.cols)

    def __str__(self) -> str:
        extent = f"{self.rows}x{self.cols}x{DEPTH}, {self.wk} warps a panel"
        return f"{extent}, {self.stages} stages, clusters of {self.cluster}"


@dataclass(frozen=True, eq=False)
class Fragments:
    """The arrays of ``include/spformat/mma_fragments.cuh``: first uint32[P*Q+1], pieces uint8[count, 16]; and what the
    arrays of the format have beside them."""

    first: Any
    pieces: Any
    shape: tuple[int, int]
    """(M, K) of the matrix"""
    vector_length: int
    stride: int
    dtype: np.dtype[Any]
    """of the values"""
    longest: int
    """bytes of the longest record"""

    @property
    def panels(self) -> int:
        return ceil_div(self.shape[0], PANEL)

    @property
    def chunks(self) -> int:
        return ceil_div(self.shape[1], DEPTH)

    @property
    def nbytes(self) -> int:
        return int(self.first.nbytes + self.pieces.nbytes)

    def arrays(self) -> tuple[Array, ...]:
        return self.first, self.pieces

    def restore(self) -> dict[str, Array]:
        """Name -> new array of the ``SRBCRS`` that the slots were written from, bit by bit."""
        import cupy

        (M, K), t, g = self.shape, self.vector_length, self.stride
        tiles, chunks = ceil_div(M, t), self.chunks
        column = index_dtype(K - 1)
        if not tiles * chunks:
            return {
                "indptr": cupy.zeros(tiles + 1, index_dtype(0)),
                "indices": cupy.zeros((0, g), column),
                "data": cupy.zeros((0, t, g), self.dtype),
            }
        slots, blocks = (self.first, self.pieces, M, t), ceil_div(tiles * chunks, WARPS)
        vectors, before = cupy.empty(tiles * chunks, "uint32"), cupy.zeros(tiles * chunks + 1, "int64")
        KERNELS.queue("tile_vectors", "PPqiqqP", blocks, *slots, tiles, chunks, vectors)
        cupy.cumsum(vectors.astype("int64"), out=before[1:])
        until = before[::chunks]
        groups = -(-(until[1:] - until[:-1]) // g)
        ends = cupy.cumsum(groups)
        count = int(ends[-1])  # synchronize!
        indptr = cupy.zeros(tiles + 1, index_dtype(count))
        indptr[1:] = ends
        indices = cupy.full((count, g), PAD, column)
        data = cupy.zeros((count, t, g), self.dtype)
        name = f"tile_fill<{index_type(indptr)}, {index_type(indices)}>"
        KERNELS.queue(name, "PPqiiqqPPPP", blocks, *slots, g, tiles, chunks, before, indptr, indices, data)
        return {"indptr": indptr, "indices": indices, "data": data}


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    indices = ("int, int", "long long, long long", "int, long long")
    return ("tile_vectors", *(f"{name}<{i}>" for name in ("panel_pieces", "panel_fill", "tile_fill") for i in indices))


def pieces_at_most(p: Problem) -> int:
    """Upper bound of the pieces of 16 bytes in all records of the problem's matrix."""
    records = ceil_div(p.M, PANEL) * ceil_div(p.K, DEPTH)
    return min(p.nnz, records * (PANEL // 8) * DEPTH) + records * MOST_STEPS * HEADER // 16


def have_slots(p: Problem) -> bool:
    """Whether the problem's matrix can be in slots: all its products are computed from them then."""
    return p.a_dtype in MMA_TYPES and pieces_at_most(p) < MOST_PIECES


def too_many(p: Problem) -> list[str]:
    """Why a matrix cannot be in slots."""
    return reasons((pieces_at_most(p) >= MOST_PIECES, f"slots must stay below 4 GiB, got nnz = {p.nnz} in {p.M}x{p.K}"))


def expected_record(p: Problem) -> int:
    """Bytes of a record with more slots than the mean, if vectors lie at random."""
    length = p.p["vector_length"]
    share = min(1.0, p.nnz / length / max(1, ceil_div(p.M, length) * p.K))
    alone = max(1, PANEL // max(8, length))  # vectors of a column in a panel, or slots, whichever are taller
    taken = 1 - (1 - share) ** max(1, 8 // length)
    slots = DEPTH * PANEL // 8 * taken
    slots += 4 * PANEL // 8 / alone * (DEPTH * alone * taken * (1 - taken)) ** 0.5
    used = DEPTH * (1 - (1 - taken) ** alone)  # columns of which the panel has a slot
    expected: int = round(16 * slots) + HEADER * ceil_div(round(used), 16)
    return min(MOST_BYTES, expected)


def types(p: Problem) -> str:
    """The leading template arguments of a kernel that reads slots: T, Out."""
    return f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"


TERMS = ("launch", "memory", "lines of B", "chunks", "products", "panels", "tiles", "column-major C", "pieces of B",
         "rounds of resident blocks")  # fmt: skip
"""The terms of the expected time of the kernels that read fragments."""
SHARED, RESIDENT = 227 << 10, 1024
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
        return refusals.every(p, 80, MMA_TYPES) + too_many(p)

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
    the fragments from L2, once for every tile of columns. tiles: C as written in each round. pieces of B:
    0.1 us for each piece of eight values that a thread copies to shared memory itself. rounds of resident blocks: the
    chunks again, where the blocks of one multiprocessor hide each other's waiting.
    """
    length = p.p["vector_length"]
    rows, columns = ceil_div(p.M, tile.rows), ceil_div(p.n, tile.cols)
    turns = rounds(rows * columns, device.processors)
    lines = turns * load_us(p.K * tile.cols * 2, device)
    chunks = turns * ceil_div(p.K, DEPTH) * 0.1
    share = min(1.0, p.nnz / length / max(1, ceil_div(p.M, length) * p.K))
    named = p.K * (1 - (1 - share) ** max(1, PANEL // length))  # columns that a panel uses, if vectors lie at random
    products = turns * tile_us(tile.rows, tile.cols, named, TENSOR_16, device)
    loaded = cache_us(ceil_div(p.M, PANEL) * named * columns * PANEL * 2, device)
    written = turns * load_us(tile.rows * tile.cols * itemsize(p.out_dtype), device)
    memory = memory_us(stored_bytes(p) + operands_bytes(p), device)
    turned = written if p.out_layout == COL else 0.0
    pieces = turns * p.K * (p.n / columns) / 8 / (32 * tile.warps) * 0.1
    resident = min(SHARED // (tile.stages * DEPTH * 2 * (tile.cols + 8)), RESIDENT // (32 * tile.warps))
    waiting = rounds(rows * columns, device.processors * max(1, resident)) * ceil_div(p.K, DEPTH) * 0.1
    return 1.0, memory, lines, chunks, products, loaded, written, turned, pieces, waiting


def fragments_of(a: Any, p: Problem) -> Fragments:
    """The slots of ``a``, built on its device once and kept with the matrix for later plans."""
    built: Fragments = a.kernel_order("sr-bcrs slots", lambda: _build_fragments(a, p))
    return built


def _build_fragments(a: Any, p: Problem) -> Fragments:
    import cupy

    indptr, indices, data = a.indptr, a.indices, a.data
    described = (p.M, p.K), a.vector_length, a.stride, data.dtype
    panels, chunks = ceil_div(p.M, PANEL), ceil_div(p.K, DEPTH)
    grid = (ceil_div(panels * chunks, WARPS), 1, 1)
    arch, of_index = jit.architecture(p.sm or 80, ()), f"<{index_type(indptr)}, {index_type(indices)}>"
    with cupy.cuda.Device(p.device_id):
        stream = cupy.cuda.get_current_stream(p.device_id).ptr
        first = cupy.zeros(panels * chunks + 1, "uint32")
        if not panels * chunks:
            return Fragments(first, cupy.zeros((1, 16), "uint8"), *described, 0)
        stored = (indptr, indices, data, p.M, a.vector_length, a.stride, panels, chunks)
        measured = cupy.empty(panels * chunks, "uint32")
        function = jit.load(SOURCE, f"panel_pieces{of_index}", arch, p.device_id)
        Launch(function, "PPPqiiqqP", (*stored, measured), THREADS)(grid, stream)
        sizes = measured & np.uint32(MOST_PIECES - 1)
        cupy.cumsum(sizes, out=first[1:])
        longest, count = cupy.stack((sizes.max(), first[-1])).tolist()  # synchronize!
        pieces = cupy.zeros((max(1, count), 16), "uint8")
        first[:-1] |= measured & np.uint32(2**32 - MOST_PIECES)
        function = jit.load(SOURCE, f"panel_fill{of_index}", arch, p.device_id)
        Launch(function, "PPPqiiqqPP", (*stored, first, pieces), THREADS)(grid, stream)
        finish_device()  # synchronize!
        return Fragments(first, pieces, *described, 16 * longest)
