"""SpMM on Bitmask, float32 and float64, a handful of columns of B: values go straight to registers.

Kernel: spmm_bitmask_tokens.cu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import cache_us, memory_us, operands_bytes, plain_arithmetic, product_us, rounds, stored_bytes
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import Device, device_of
from ..runtime import jit
from ..runtime.few_columns import ALONG_K, ALONG_N, SINGLE, expected_way, steps_of, way_of
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import MAX_GRID_Y, Bound, Launch, Operands
from .bitmask_slices import bitmask_reasons, slice_columns, values_before

MAX_COLS = 32
WIDEST = {4: 8, 8: 4}
"""Columns of the widest tile, by bytes of a value: more sums than that do not fit in registers."""
ROWS = {4: {1: 16, 2: 16, 4: 8, 8: 8}, 8: {1: 8, 2: 8, 4: 4}}
"""Rows of a warp, by bytes of a value and columns: as many as 128 registers allow."""
PAIR = 2
"""Columns of A that a lane owns in a step."""


@dataclass(frozen=True)
class Tile:
    """A block has ``parts`` times ``slices`` warps.

    Each has ``rows_each`` rows of A, ``cols`` columns of C and a slice of K.
    """

    rows_each: int
    cols: int
    parts: int
    slices: int

    @property
    def rows(self) -> int:
        return self.rows_each * self.parts

    @property
    def warps(self) -> int:
        return self.parts * self.slices

    @property
    def resident(self) -> int:
        """blocks that registers leave room for: 128 of them a thread"""
        return max(1, 16 // self.warps)

    def group(self, size: int) -> int:
        """Rows whose values of ``size`` bytes are loaded together."""
        return min(self.rows_each, 16 if size == 4 else 4)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}, {self.slices}x{self.parts} warps"


def tiles_for(p: Problem, sms: int) -> tuple[Tile, ...]:
    """The tiles for a problem.

    16 warps where blocks of 8 would leave multiprocessors half empty; warps that share a slice of K where there are few
    rounds of blocks (measured: docs/decisions/0043-few-columns-of-float32.md).
    """
    size = itemsize(p.a_dtype)
    cols = min(WIDEST[size], power_of_two(max(1, p.n)))
    rows, few = ROWS[size][cols], ceil_div(p.M, 16) < sms
    rows = min(rows, 8) if few else rows
    parts = 16 // rows if 1 <= ceil_div(p.M, 16) / sms < 4 else 1
    warps = 16 if ceil_div(p.M, rows * parts) <= sms else 8
    return (Tile(rows, cols, parts, warps // parts),)


class SpmmBitmaskTokens(CudaKernel):
    """C = A @ B for ``Bitmask`` A with values of 32 or 64 bits; each lane multiplies what its own columns of A hold."""

    name = "cuda.spmm_bitmask_tokens"
    takes = spmm_of("bitmask")
    terms = ("launch", "memory", "decoding", "products", "B by every warp", "single loads")

    def unsupported(self, p: Problem) -> list[str]:
        return bitmask_reasons(p, ("float32", "float64"), (p.a_dtype,)) + reasons(
            (p.n > MAX_COLS, f"takes at most {MAX_COLS} columns, got up to {p.n}")
        )

    def options(self, p: Problem) -> tuple[Tile, ...]:
        """The tile that suits the shape."""
        return tiles_for(p, device_of(p).processors)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By value type and columns of the tile."""
        return f"{p.a_dtype}, {tile.cols} columns", p.a_dtype

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        memory: A, B and C once. decoding: one multiply-add for each element of the dense A and each tile of columns.
        products: dense products of whole tiles. Both in whole rounds of blocks. B by every warp: B from L2 once for
        each warp's rows. single loads: the same once more, where lanes load element by element.
        """
        size = itemsize(p.a_dtype)
        columns, blocks = ceil_div(p.n, tile.cols), ceil_div(p.M, tile.rows)
        at_once = device.processors * tile.resident
        full = max(1.0, rounds(blocks * columns, at_once) * at_once / (blocks * columns))
        kind = plain_arithmetic(p.a_dtype)
        dense = product_us(2.0 * blocks * tile.rows * p.K * columns, kind, device) * full
        lines = cache_us(ceil_div(p.M, tile.rows_each) * columns * p.K * tile.cols * size, device)
        single = lines if expected_way(p, PAIR, tile.cols) == SINGLE else 0.0
        return 1.0, memory_us(stored_bytes(p) + operands_bytes(p), device), dense, dense * tile.cols, lines, single

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            instance("float", "int", Tile(16, 1, 1, 8), 4, ALONG_K),
            instance("float", "int", Tile(8, 8, 2, 4), 4, ALONG_N),
            instance("float", "long long", Tile(16, 2, 1, 16), 4, SINGLE),
            instance("double", "long long", Tile(8, 4, 2, 4), 8, ALONG_N),
            instance("double", "int", Tile(16, 1, 1, 8), 8, ALONG_K),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        b_col, out_col, size = p.b_layout == COL, p.out_layout == COL, itemsize(p.a_dtype)
        before = values_before(a, p, tile.slices)
        ptr = "int" if a.indptr.dtype == "int32" else "long long"
        fixed = (a.indptr, a.bitmask, a.data, before, p.M, p.K, slice_columns(p.K, tile.slices))
        variants: dict[str, Launch] = {}

        def variant(way: str) -> Launch:
            if way not in variants:
                name = instance(VALUE_TYPES[p.a_dtype].cuda, ptr, tile, size, way)
                function = jit.load(
                    "bitmask/spmm_bitmask_tokens.cu", name, jit.architecture(p.sm or 80, ()), p.device_id
                )
                variants[way] = Launch(function, "PPPPqqqPPqqqqq", fixed, 32 * tile.warps)
            return variants[way]

        def prepare(o: Operands) -> tuple[Bound]:
            steps, c_steps = steps_of(b_col, o.n, o.ldb), (1, o.ldc) if out_col else (o.ldc, 1)
            grid = (ceil_div(p.M, tile.rows), min(ceil_div(o.n, tile.cols), MAX_GRID_Y), 1)
            launch = variant(way_of(size, PAIR, tile.cols, o.b % 16, o.n, *steps))
            return (launch.bind(grid, o.stream, o.b, o.c, o.n, *steps, *c_steps),)

        return Prepared(prepare, str(tile), before.nbytes)


def instance(value: str, ptr: str, tile: Tile, size: int, way: str) -> str:
    """The C++ name of the kernel for values of ``size`` bytes; way: how lanes load B."""
    shape = f"{tile.rows_each}, {tile.cols}, {tile.parts}, {tile.slices}, {tile.group(size)}, {tile.resident}"
    return f"spmm_bitmask_tokens<{value}, {ptr}, {shape}, {way}>"
