"""SpMM on BSR and DBSR for N <= 64: streams the blocks once, tensor cores; sm_80 up.  Kernel: spmm_bsr_tokens.cu.

float32 multiplies as in spmm_bsr: three TF32 products per element, which keep about 22 bits.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from ....arrays.library import ceil_div
from ....products.ideal import cache_us, memory_us, rounds, stored_bytes
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, ROW, Problem, itemsize
from ....products.roofline import Device
from ..runtime import jit, refusals
from ..runtime.few_columns import ALONG_K, ALONG_N, SINGLE, column_tiles, expected_way, steps_of, way_of
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands
from .spmm_bsr import C_TYPES, Arrays, arrays_of, index_types, sample_problem, zero_rows

MAX_COLS = 64
UNIT = 16
"""Heights and widths of blocks are multiples of it: rows and depth of a tensor-core product."""
MAX_GRID_Y = 65535
LOADS = {SINGLE: "single loads", ALONG_K: "loads along K", ALONG_N: "loads along N"}


@dataclass(frozen=True)
class Tile:
    """A block of threads computes 16 * ``row_tiles`` rows and 8 * ``column_tiles`` columns of C.

    Each of ``warps`` loads ``ahead`` steps along K together.
    """

    row_tiles: int
    column_tiles: int
    warps: int
    ahead: int

    @property
    def rows(self) -> int:
        return UNIT * self.row_tiles

    @property
    def cols(self) -> int:
        return 8 * self.column_tiles

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}, {self.warps} warps, {self.ahead} ahead"


WARPS = (16, 8, 4)
SUMS = 48 * 1024
"""Bytes of shared memory that the sums of all warps may take."""


def registers(p: Problem, tile: Tile) -> int:
    """About how many a thread needs: sums, what it loads together, addresses."""
    size = itemsize(p.a_dtype)
    loaded = tile.ahead * tile.row_tiles * 2 * at_once(p) * size // 4
    return tile.row_tiles * tile.column_tiles * 2 * size + loaded + 40


@functools.lru_cache(maxsize=256)
def tiles_for(p: Problem) -> tuple[Tile, ...]:
    """All tiles whose sums fit into shared memory, and whose threads have the registers they need."""
    columns = column_tiles(p, MAX_COLS)
    ahead = (1,) if itemsize(p.a_dtype) == 2 else (2, 1)
    row_tiles = (1, 2) if p.p["blocksize"][0] % 32 == 0 else (1,)
    some = (Tile(r, columns, w, u) for w, r, u in itertools.product(WARPS, row_tiles, ahead))
    return tuple(
        t for t in some
        if t.warps * t.rows * t.cols * 4 <= SUMS and registers(p, t) <= min(255, 65536 // (32 * t.warps))
    )  # fmt: skip


class SpmmBSRTokens(CudaKernel):
    """``out = A @ B`` for A in BSR or DBSR and N <= 64. Bytes of A decide its time: each block is read once.

    B is read where it lies, in any layout and with any alignment.
    """

    name = "cuda.spmm_bsr_tokens"
    takes = spmm_of("bsr", "dbsr")
    archs = ("sm_80",)
    product_error = 2.0**-21  # float32, as in spmm_bsr
    terms = ("launch", "memory of A", "memory of B and C", "B by every strip", "single loads", "steps", "products")

    def unsupported(self, p: Problem) -> list[str]:
        height, width = p.p["blocksize"]
        return refusals.every(p, 80, tuple(C_TYPES)) + reasons(
            (height % UNIT or width % UNIT, f"blocks must be multiples of {UNIT} high and wide, got {height}x{width}"),
            (p.n > MAX_COLS, f"takes at most {MAX_COLS} columns, got up to {p.n}"),
        )

    def options(self, p: Problem) -> tuple[Tile, ...]:
        return tiles_for(p)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By value type and how lanes load B."""
        kind = LOADS[expected_way(p, at_once(p), tile.column_tiles)]
        return (kind,) if itemsize(p.a_dtype) == 2 else (f"{p.a_dtype}, {kind}", f"{p.a_dtype}, all")

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        B by every strip: from L2, for each strip of rows of each block. single loads: of one element each, at the rate
        of a load of 32. steps: that a warp takes one after the other, 0.1 us each, in all rounds of blocks of threads;
        products: their fragments of C, 10 ns each.
        """
        (height, width), size = p.p["blocksize"], itemsize(p.a_dtype)
        strips, blocks = ceil_div(p.M, tile.rows), p.nnz / (height * width)
        shared = blocks * (height / tile.rows) * width * min(p.n, tile.cols)
        single = cache_us(shared * 32, device) if expected_way(p, at_once(p), tile.column_tiles) == SINGLE else 0.0
        of_row = round(blocks / ceil_div(p.M, height) * width / (4 * at_once(p)))
        resident = max(1, min(32 // tile.warps, 65536 // (32 * tile.warps * registers(p, tile))))
        steps = rounds(strips, device.processors * resident) * ceil_div(of_row, tile.warps)
        others = memory_us(p.K * p.n * size + p.M * p.n * itemsize(p.out_dtype), device)
        return (
            1.0, memory_us(stored_bytes(p), device), others, cache_us(shared * size, device), single, 0.1 * steps,
            0.01 * steps * tile.row_tiles * tile.column_tiles,
        )  # fmt: skip

    def instances(self) -> tuple[str, ...]:
        """C++ names that together reach every branch, for the compile test."""
        p = sample_problem("bsr", (64, 64), "bfloat16", "bfloat16", COL, COL).changed(n=1)
        q = sample_problem("dbsr", (16, 48), "float16", "float32", ROW, ROW).changed(n=64)
        r = sample_problem("dbsr", (32, 32), "bfloat16", "bfloat16", COL, ROW).changed(n=17)
        f = sample_problem("bsr", (32, 32), "float32", "float32", COL, COL).changed(n=1)
        return (
            instance(p, Tile(1, 1, 16, 1), "int, int, int", ALONG_K),
            instance(q, Tile(1, 8, 4, 1), "long long, int, int", SINGLE),
            instance(q, Tile(1, 8, 4, 1), "int, int, int", ALONG_N),
            instance(r, Tile(2, 3, 8, 1), "int, long long, long long", ALONG_K),
            instance(f, Tile(1, 1, 16, 2), "int, int, int", ALONG_K),
            instance(f, Tile(1, 2, 8, 2), "int, int, int", SINGLE),
            instance(f, Tile(2, 8, 4, 1), "int, int, int", ALONG_N),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        arrays: Arrays = arrays_of(a)
        height, _ = p.p["blocksize"]
        listed, b_col, entries = p.format == "dbsr", p.b_layout == COL, int(arrays.indptr.size) - 1
        gaps = ceil_div(ceil_div(p.M, height) - entries, zero_rows(height)) if listed else 0
        strips = entries * (height // tile.rows) + gaps
        fixed = (arrays.row_ids if listed else 0, *arrays[1:], p.M, p.K, entries)
        arch, size, several = jit.architecture(p.sm or 80, self.archs), itemsize(p.a_dtype), at_once(p)
        variants: dict[str, Launch] = {}

        def variant(way: str) -> Launch:
            if way not in variants:
                name = instance(p, tile, index_types(arrays), way)
                function = jit.load("bsr/spmm_bsr_tokens.cu", name, arch, p.device_id)
                variants[way] = Launch(function, "PPPPqqqPPqqqq", fixed, 32 * tile.warps)
            return variants[way]

        def prepare(o: Operands) -> tuple[Bound]:
            steps = steps_of(b_col, o.n, o.ldb)
            grid = (strips, min(ceil_div(o.n, tile.cols), MAX_GRID_Y), 1)
            launch = variant(way_of(size, several, tile.column_tiles, o.b % 16, o.n, *steps))
            return (launch.bind(grid, o.stream, o.b, o.c, o.n, *steps, o.ldc),)

        return Prepared(prepare, str(tile))


KERNEL = SpmmBSRTokens()


def at_once(p: Problem) -> int:
    """Neighbours of a line of A that a lane takes with one load."""
    return 8 if itemsize(p.a_dtype) == 2 and p.p["blocksize"][1] % 32 == 0 else 4


def instance(p: Problem, t: Tile, types: str, way: str) -> str:
    """The C++ name of the kernel for a problem; way: how lanes load B."""
    height, width = p.p["blocksize"]
    flags = ", ".join((way, *(str(f).lower() for f in (p.out_layout == COL, p.format == "dbsr"))))
    shape = f"{height}, {width}, {t.row_tiles}, {t.column_tiles}, {t.warps}, {t.ahead}, {zero_rows(height)}"
    return f"spmm_bsr_tokens<{C_TYPES[p.a_dtype]}, {C_TYPES[p.out_dtype]}, {types}, {shape}, {flags}>"
