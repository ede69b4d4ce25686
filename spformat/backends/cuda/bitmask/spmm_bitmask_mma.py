"""SpMM on Bitmask, float32, tens of columns of B, on tensor cores.  Kernel: spmm_bitmask_mma.cu.

Each product is three TF32 products, which keep about 22 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import cache_us, memory_us, operands_bytes, product_us, rounds, stored_bytes
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem
from ....products.roofline import CUDA_32, TF32_THREE, Device, shared_limit
from ..runtime import jit
from ..runtime.few_columns import ALONG_K, ALONG_N, SINGLE, expected_way, steps_of, way_of
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import MAX_GRID_Y, Bound, Launch, Operands
from ..runtime.token_sums import room
from .bitmask_slices import STEP, bitmask_reasons, slice_columns, values_before

MAX_COLS = 256
SEVERAL = 4
"""Rows of B that a lane takes at once."""


@dataclass(frozen=True)
class Tile:
    """A block has ``parts`` times ``slices`` warps.

    Each has 16 * ``fragments`` rows of A, 8 * ``column_tiles`` columns of C and a slice of K.
    """

    fragments: int
    column_tiles: int
    parts: int
    slices: int

    @property
    def rows(self) -> int:
        return 16 * self.fragments * self.parts

    @property
    def cols(self) -> int:
        return 8 * self.column_tiles

    @property
    def warps(self) -> int:
        return self.parts * self.slices

    @property
    def resident(self) -> int:
        """blocks on a multiprocessor, as registers and shared memory allow"""
        if self.fragments == 2 or self.warps > 8:
            return 1
        return 3 if self.column_tiles == 1 else 2

    @property
    def smem(self) -> int:
        """bytes: two tiles of each warp, or the sums of each slice; beside them the tables of rows"""
        return 4 * max(2 * self.warps * 16 * self.fragments * STEP, self.slices * self.rows * self.cols)

    @property
    def table(self) -> int:
        """bytes of shared memory beside ``smem``"""
        return self.warps * 2 * 2 * 16 * self.fragments * 8

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}, {self.slices}x{self.parts} warps"


def tiles_for(p: Problem) -> list[Tile]:
    """The tiles for a problem: 16 rows or 32 a warp, more warps for fewer rows of A, as shared memory allows."""
    column_tiles = min(4, power_of_two(ceil_div(max(1, p.n), 8)))
    shapes = ((2, 1, 8), (1, 1, 8), (1, 1, 16), (1, 1, 4))
    tiles = [Tile(fragments, column_tiles, parts, slices) for fragments, parts, slices in shapes]
    limit = shared_limit(p.sm)
    fitting = [t for t in tiles if t.smem + t.table <= room(limit, t.resident)]
    return fitting or tiles[-1:]


class SpmmBitmaskTF32(CudaKernel):
    """C = A @ B for float32 ``Bitmask`` A; each warp expands its own tiles in shared memory, and waits for no other."""

    name = "cuda.spmm_bitmask_mma"
    takes = spmm_of("bitmask")
    product_error = 2.0**-21  # float32 as three TF32 products: the product of the two low parts is left out
    terms = ("launch", "memory", "decoding", "products", "B by every warp", "single loads")

    def unsupported(self, p: Problem) -> list[str]:
        return bitmask_reasons(p, ("float32",), ("float32",)) + reasons(
            (p.n > MAX_COLS, f"takes at most {MAX_COLS} columns, got up to {p.n}")
        )

    def options(self, p: Problem) -> list[Tile]:
        return tiles_for(p)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By rows and warps of a tile, and by its columns."""
        rows = f"{tile.rows} rows, {tile.warps} warps"
        return f"{rows}, {tile.cols} columns", rows

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        memory: A, B and C once. decoding: one multiply-add for each element of the dense A and each tile of columns.
        products: dense products of whole tiles. Both in whole rounds of blocks. B by every warp: B from L2 once for
        each warp's rows. single loads: the same once more, where lanes load element by element.
        """
        columns, blocks = ceil_div(p.n, tile.cols), ceil_div(p.M, tile.rows)
        at_once = device.processors * tile.resident
        full = rounds(blocks * columns, at_once) * at_once * tile.rows
        decoding = product_us(2.0 * full * p.K, CUDA_32, device)
        products = product_us(2.0 * full * p.K * tile.cols, TF32_THREE, device)
        lines = cache_us(ceil_div(p.M, 16 * tile.fragments) * columns * p.K * tile.cols * 4, device)
        single = lines if expected_way(p, SEVERAL, tile.column_tiles) == SINGLE else 0.0
        return 1.0, memory_us(stored_bytes(p) + operands_bytes(p), device), decoding, products, lines, single

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            instance("int", Tile(2, 4, 1, 8), ALONG_N),
            instance("int", Tile(1, 2, 1, 16), ALONG_K),
            instance("long long", Tile(1, 1, 1, 4), SINGLE),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        b_col, out_col, arch = p.b_layout == COL, p.out_layout == COL, jit.architecture(p.sm or 80, ())
        before = values_before(a, p, tile.slices)
        ptr = "int" if a.indptr.dtype == "int32" else "long long"
        fixed = (a.indptr, a.bitmask, a.data, before, p.M, p.K, slice_columns(p.K, tile.slices))
        variants: dict[str, Launch] = {}

        def variant(way: str) -> Launch:
            if way not in variants:
                name = instance(ptr, tile, way)
                function = jit.load("bitmask/spmm_bitmask_mma.cu", name, arch, p.device_id, tile.smem)
                variants[way] = Launch(function, "PPPPqqqPPqqqqq", fixed, 32 * tile.warps, tile.smem, waits=True)
            return variants[way]

        def prepare(o: Operands) -> tuple[Bound]:
            steps, c_steps = steps_of(b_col, o.n, o.ldb), (1, o.ldc) if out_col else (o.ldc, 1)
            grid = (ceil_div(p.M, tile.rows), min(ceil_div(o.n, tile.cols), MAX_GRID_Y), 1)
            launch = variant(way_of(4, SEVERAL, tile.column_tiles, o.b % 16, o.n, *steps))
            return (launch.bind(grid, o.stream, o.b, o.c, o.n, *steps, *c_steps),)

        return Prepared(prepare, str(tile), before.nbytes)


def instance(ptr: str, tile: Tile, way: str) -> str:
    """The C++ name of the kernel; way: how lanes load B."""
    shape = f"{tile.fragments}, {tile.column_tiles}, {tile.parts}, {tile.slices}, {tile.resident}"
    return f"spmm_bitmask_mma<{ptr}, {shape}, {way}>"
