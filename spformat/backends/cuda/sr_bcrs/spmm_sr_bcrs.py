"""SpMM on SR-BCRS with CUDA cores: every value type, any vector length and stride.  Kernel: spmm_sr_bcrs.cu.

16-bit values are read in the slots that the tensor cores take (slot_products.cu), so that a matrix is on the device
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div
from ....products.ideal import (
    cache_us,
    memory_us,
    operands_bytes,
    plain_arithmetic,
    product_us,
    stored_bytes,
    written_us,
)
from ....products.kernel import spmm_of
from ....products.problem import COL, ROW, Problem, itemsize
from ....products.roofline import Device, device_of
from ..runtime import jit, refusals
from ..runtime.c_types import index_type
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import MAX_GRID_Y, Bound, Launch, Operands
from .mma_fragments import fragments_of, have_slots
from .slot_products import launch_of as slots_launch

TYPES = ("bfloat16", "float16", "float32", "float64")
ROWS, WARPS = 8, 8  # rows of a tile that a warp sums; warps of a block


@dataclass(frozen=True)
class Tile:
    """Columns of C that a warp sums: one, two or four for each lane."""

    cols: int

    def __str__(self) -> str:
        return f"{ROWS}x{self.cols}"


class SpmmSRBCRS(CudaKernel):
    """C = A @ B for ``SRBCRS`` A of any vector_length and stride; any M, K, N, layout and leading dimension."""

    name = "cuda.spmm_sr_bcrs"
    takes = spmm_of("sr-bcrs")
    terms = ("launch", "memory", "lines of B", "vectors", "products", "rounds", "column-major C")

    def unsupported(self, p: Problem) -> list[str]:
        return refusals.every(p, 80, TYPES)

    def options(self, p: Problem) -> tuple[Tile]:
        """As many columns as N fills, at most two for each lane in float64."""
        return (Tile(32 if p.n <= 32 else 64 if p.n <= 64 or p.a_dtype == "float64" else 128),)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By value size and layout of B."""
        return f"{itemsize(p.a_dtype)}-byte values, {p.b_layout}-major B", f"{p.b_layout}-major B"

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        lines of B: a line of B from L2 for every stored vector of at most 8 rows and every tile of columns. vectors:
        values and indices from L2, once for every tile of columns. products: on the CUDA cores. rounds: the longest of
        the warps, where they are few.
        """
        length, size = p.p["vector_length"], itemsize(p.a_dtype)
        columns = ceil_div(p.n, tile.cols)
        vectors = p.nnz / length * ceil_div(length, ROWS)
        wide = columns * tile.cols if p.b_layout == ROW else p.n * 32 / size
        lines = cache_us(vectors * wide * size, device)
        values = cache_us(columns * stored_bytes(p), device)
        products = product_us(2.0 * p.nnz * columns * tile.cols, plain_arithmetic(p.a_dtype), device)
        units = ceil_div(p.M, ROWS) * columns
        turns = ceil_div(units, device.processors * 16) * p.nnz / max(1, p.M) * 0.01
        memory = memory_us(stored_bytes(p) + operands_bytes(p), device)
        return 1.0, memory, lines, values, products, turns, written_us(p, device)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "spmm_sr_bcrs<float, float, int, int, 4, 8, 1>",
            "spmm_sr_bcrs<__half, float, int, int, 2, 8, 8>",
            "spmm_sr_bcrs<__nv_bfloat16, __nv_bfloat16, long long, long long, 1, 8, 2>",
            "spmm_sr_bcrs<double, double, int, int, 2, 8, 4>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        slots = fragments_of(a, p) if have_slots(p) else None
        cols, t = self.best(p).tile.cols // 32, a.vector_length
        tiles = -(-p.M // t)
        units = -(-p.M // ROWS) if slots else tiles * -(-t // ROWS)
        # Warps share a unit where units alone are too few to fill the machine and each has work to share.
        wanted = 16 * device_of(p).processors // max(1, -(-p.n // (32 * cols)))
        batches = p.nnz // (32 * t * max(1, tiles))
        if slots:  # four steps of slots come at a time, however few slots they have
            batches = max(batches, slots.chunks // 4)
        split = next((s for s in (1, 2, 4) if units * s >= wanted or 2 * s > batches), 8)
        launch = slots_launch(slots, p, cols, WARPS, split) if slots else self._launch(a, p, cols, split)
        blocks = -(-units * split // WARPS)
        b_col, out_col = p.b_layout == COL, p.out_layout == COL

        def prepare(o: Operands) -> tuple[Bound]:
            grid = (blocks, min(MAX_GRID_Y, -(-o.n // (32 * cols))), 1)
            b_strides = (1, o.ldb) if b_col else (o.ldb, 1)
            c_strides = (1, o.ldc) if out_col else (o.ldc, 1)
            return (launch.bind(grid, o.stream, o.b, o.c, o.n, *b_strides, *c_strides),)

        return Prepared(prepare, f"{ROWS}x{32 * cols}, {split} warps")

    def _launch(self, a: Any, p: Problem, cols: int, split: int) -> Launch:
        """The launch that reads the arrays of the format."""
        types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"
        instance = f"spmm_sr_bcrs<{types}, {index_type(a.indptr)}, {index_type(a.indices)}, {cols}, {WARPS}, {split}>"
        function = jit.load("sr_bcrs/spmm_sr_bcrs.cu", instance, jit.architecture(p.sm or 80, ()), p.device_id)
        fixed = (a.indptr, a.indices, a.data, p.M, a.vector_length, a.stride)
        return Launch(function, "PPPqiiPPqqqqq", fixed, 32 * WARPS, waits=True)
