"""SpMM on vector n:m (NM-SpMM) for N <= 16: streams the values once; sm_80 up.  Kernel: spmm_vector_nm_tokens.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import cache_us, memory_us, plain_arithmetic, product_us, rounds, stored_bytes
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import Device, device_of
from ..runtime import jit
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands
from ..runtime.scratch import Scratch
from .vector_nm_launch import C_TYPES, pattern, vector_reasons

MAX_COLS = 16
ROWS, WARPS = 128, 16
STAGED = 40 << 10
"""Bytes of B in shared memory at a time, unless a single window needs more."""
MAX_GRID_Z = 65535


@dataclass(frozen=True)
class Tile:
    """A block of threads computes 128 rows and ``cols`` columns of C; ``ranges`` of them share the windows of a row.

    ``chunk``: windows whose rows of B are in shared memory at a time.
    """

    cols: int
    ranges: int
    chunk: int

    @property
    def resident(self) -> int:
        """Blocks of threads that a multiprocessor runs at once."""
        return 2 if self.cols <= 4 else 1

    def smem(self, m: int) -> int:
        """bytes: rows of B of a chunk, or the sums of half of the warps."""
        return 4 * self.cols * max(self.chunk * m, WARPS // 2 * ROWS)

    def __str__(self) -> str:
        return f"{ROWS}x{self.cols}, {self.ranges} ranges of windows"


def choose(p: Problem, processors: int) -> Tile:
    """The narrowest tile that holds N, and as many ranges as fill the device once."""
    form, cols = pattern(p), power_of_two(min(max(p.n, 1), MAX_COLS))
    windows, row_tiles = max(1, ceil_div(p.K, form.m)), max(1, ceil_div(p.M, ROWS))
    ranges = max(1, min(windows, processors * (2 if cols <= 4 else 1) // row_tiles))
    share = ceil_div(windows, ranges)
    chunk = min(share, max(1, STAGED // (4 * cols * form.m)))
    return Tile(cols, ceil_div(windows, share), chunk)


class SpmmVectorNMTokens(CudaKernel):
    """``out = A @ B`` for A in VectorNM and N <= 16, without tensor cores. B is read where it lies, in any layout.

    Sums are float32; those of the ranges of windows are added in a fixed order by the block that finishes last.
    """

    name = "cuda.spmm_vector_nm_tokens"
    takes = spmm_of("vector-nm")
    archs = ("sm_80",)
    terms = ("launch", "memory of A", "memory of B and C", "B by every row tile", "products", "parts", "rounds")

    def unsupported(self, p: Problem) -> list[str]:
        return vector_reasons(p, ("bfloat16", "float16", "float32")) + reasons(
            (p.n > MAX_COLS, f"takes at most {MAX_COLS} columns, got up to {p.n}"),
        )

    def options(self, p: Problem) -> tuple[Tile]:
        """The one tile that suits the shape."""
        return (choose(p, device_of(p).processors),)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By value size, and by whether four rows share their columns."""
        size = f"{itemsize(p.a_dtype)}-byte values"
        alike = "" if p.p["vector_length"] % 4 == 0 else ", short vectors"
        return f"{size}{alike}, {tile.cols} columns", f"{size}{alike}", size

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        B by every row tile: from L2, single values at the rate of a load of 32 bytes. parts: partial sums written to L2
        and read again. rounds: of blocks of threads, each with its kept columns in turn, 0.1 us for 16 warps.
        """
        form, size = pattern(p), itemsize(p.a_dtype)
        row_tiles = ceil_div(p.M, ROWS)
        loads = cache_us(row_tiles * p.K * p.n * 32, device)
        parts = cache_us(8 * (tile.ranges - 1) * row_tiles * ROWS * tile.cols, device)
        products = product_us(2.0 * p.nnz * tile.cols, plain_arithmetic("float32"), device)
        kept = ceil_div(ceil_div(p.K, form.m), tile.ranges) * form.n
        turns = rounds(row_tiles * tile.ranges, device.processors * tile.resident) * ceil_div(kept, 4 * WARPS)
        others = memory_us(p.K * p.n * size + p.M * p.n * itemsize(p.out_dtype), device)
        return 1.0, memory_us(stored_bytes(p), device), others, loads, products, parts, 0.1 * turns

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            instance("bfloat16", "bfloat16", 1, True, True),
            instance("float16", "float32", 8, True, False),
            instance("float32", "float32", 16, False, False),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, choose(p, device_of(p).processors))

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        form = pattern(p)
        pitch, groups = int(a.data.shape[1]), int(a.indices.shape[1])
        windows = int(a.indices.shape[0]) // form.n
        share, row_tiles, smem = ceil_div(max(1, windows), tile.ranges), ceil_div(p.M, ROWS), tile.smem(form.m)
        name = instance(p.a_dtype, p.out_dtype, tile.cols, pitch % 4 == 0, form.vector_length % 4 == 0)
        arch = jit.architecture(p.sm or 80, self.archs)
        function = jit.load("vector_nm/spmm_vector_nm_tokens.cu", name, arch, p.device_id, smem)
        fixed = (a.data, a.indices, p.M, p.K, pitch, groups, form.vector_length, form.n, form.m, windows, share,
                 tile.chunk)  # fmt: skip
        launch = Launch(function, "PPqqqqiiiiiiPPqqqqqPP", fixed, 32 * WARPS, smem)
        sums, arrivals = Scratch(), Scratch(zeros=True)
        b_col, c_col = p.b_layout == COL, p.out_layout == COL

        def prepare(o: Operands) -> tuple[Bound]:
            tiles = min(ceil_div(o.n, tile.cols), MAX_GRID_Z)
            all_tiles, parts, arrived = ceil_div(o.n, tile.cols), 0, 0
            if tile.ranges > 1:
                parts = sums.buffer(o.stream, all_tiles * row_tiles * tile.ranges * ROWS * tile.cols * 4)
                arrived = arrivals.buffer(o.stream, all_tiles * row_tiles * 4)
            steps = ((1, o.ldb) if b_col else (o.ldb, 1)) + ((1, o.ldc) if c_col else (o.ldc, 1))
            grid = (row_tiles, tile.ranges, tiles)
            return (launch.bind(grid, o.stream, o.b, o.c, o.n, *steps, parts, arrived),)

        owned = row_tiles * tile.ranges * ROWS * tile.cols * 4 if tile.ranges > 1 else 0
        return Prepared(prepare, str(tile), owned)


def instance(dtype: str, out: str, cols: int, wide: bool, alike: bool) -> str:
    """C++ name of the kernel. wide: four values of A can be loaded at once; alike: four rows share their columns."""
    flags = ", ".join(str(f).lower() for f in (wide, alike))
    return f"spmm_vector_nm_tokens<{C_TYPES[dtype]}, {C_TYPES[out]}, {cols}, {flags}>"
