"""SpMM on BSR and DBSR for N <= 64, 16-bit values: streams the blocks once; sm_80 up.  Kernel: spmm_bsr_tokens.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import b_alignment, cache_us, memory_us, rounds, stored_bytes
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, LINE, ROW, Problem, itemsize
from ....products.roofline import Device
from ..runtime import jit, refusals
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands
from .spmm_bsr import C_TYPES, Arrays, arrays_of, index_types, sample_problem, zero_rows

MAX_COLS = 64
UNIT = 16
"""Heights and widths of blocks are multiples of it: rows and depth of a tensor-core product."""
MAX_GRID_Y = 65535


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
        return f"{self.rows}x{self.cols}, {self.warps} warps"


def choose(height: int, n: int) -> Tile:
    """The narrowest tile that holds N; 32 rows where so many columns make B the larger operand."""
    column_tiles = power_of_two(min(max(n, 8), MAX_COLS)) // 8
    row_tiles = 2 if column_tiles >= 4 and height % 32 == 0 else 1
    return Tile(row_tiles, column_tiles, 4 if column_tiles == 8 else 8, {1: 4, 2: 4, 4: 2}.get(column_tiles, 1))


class SpmmBSRTokens(CudaKernel):
    """``out = A @ B`` for A in BSR or DBSR and N <= 64. Bytes of A decide its time: each block is read once.

    B is read where it lies, in any layout and with any alignment.
    """

    name = "cuda.spmm_bsr_tokens"
    takes = spmm_of("bsr", "dbsr")
    archs = ("sm_80",)
    terms = ("launch", "memory of A", "memory of B and C", "B by every strip", "single loads", "rounds")

    def unsupported(self, p: Problem) -> list[str]:
        height, width = p.p["blocksize"]
        return refusals.every(p, 80, ("bfloat16", "float16")) + reasons(
            (height % UNIT or width % UNIT, f"blocks must be multiples of {UNIT} high and wide, got {height}x{width}"),
            (p.n > MAX_COLS, f"takes at most {MAX_COLS} columns, got up to {p.n}"),
        )

    def options(self, p: Problem) -> tuple[Tile]:
        """The one tile that suits the shape."""
        return (choose(p.p["blocksize"][0], p.n),)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By whether B is read eight values at a time along K."""
        kind = "loads along K" if along_k(p) else "single loads"
        return f"{kind}, {tile.cols} columns", kind

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        B by every strip: from L2, for each strip of rows of each block. single loads: of 2 bytes each, at the rate of a
        load of 32. rounds: of blocks of threads, eight of which a multiprocessor runs at once, with the average number
        of steps of a warp, 0.3 us each.
        """
        height, width = p.p["blocksize"]
        strips, blocks = ceil_div(p.M, tile.rows), p.nnz / (height * width)
        shared = blocks * (height / tile.rows) * width * tile.cols * 2
        single = 0.0 if along_k(p) else cache_us(shared * 16, device)
        steps = blocks / ceil_div(p.M, height) * width / (32 if width % 32 == 0 else 16)
        turns = rounds(strips, device.processors * 8) * ceil_div(round(steps), tile.warps * tile.ahead)
        others = memory_us(p.K * p.n * 2 + p.M * p.n * itemsize(p.out_dtype), device)
        return 1.0, memory_us(stored_bytes(p), device), others, cache_us(shared, device), single, 0.3 * turns

    def instances(self) -> tuple[str, ...]:
        """C++ names that together reach every branch, for the compile test."""
        p = sample_problem("bsr", (64, 64), "bfloat16", "bfloat16", COL, COL).changed(n=1)
        q = sample_problem("dbsr", (16, 48), "float16", "float32", ROW, ROW).changed(n=64)
        r = sample_problem("dbsr", (32, 32), "bfloat16", "bfloat16", COL, ROW).changed(n=17)
        return (
            instance(p, choose(64, 1), "int, int, int", True),
            instance(q, choose(16, 64), "long long, int, int", False),
            instance(r, choose(32, 17), "int, long long, long long", True),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, choose(p.p["blocksize"][0], p.n))

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        arrays: Arrays = arrays_of(a)
        height, width = p.p["blocksize"]
        listed, b_col, entries = p.format == "dbsr", p.b_layout == COL, int(arrays.indptr.size) - 1
        gaps = ceil_div(ceil_div(p.M, height) - entries, zero_rows(height)) if listed else 0
        strips = entries * (height // tile.rows) + gaps
        fixed = (arrays.row_ids if listed else 0, *arrays[1:], p.M, p.K, entries)
        arch, at_once = jit.architecture(p.sm or 80, self.archs), 8 if width % 32 == 0 else 4
        variants: dict[bool, Launch] = {}

        def variant(wide: bool) -> Launch:
            if wide not in variants:
                name = instance(p, tile, index_types(arrays), wide)
                function = jit.load("bsr/spmm_bsr_tokens.cu", name, arch, p.device_id)
                variants[wide] = Launch(function, "PPPPqqqPPqqqq", fixed, 32 * tile.warps)
            return variants[wide]

        def prepare(o: Operands) -> tuple[Bound]:
            vector = o.n == 1 and (b_col or o.ldb == 1)  # contiguous along K in both layouts
            k_step, n_step = (1, o.ldb) if b_col or vector else (o.ldb, 1)
            aligned = o.b % (2 * at_once) == 0 and (o.n == 1 or n_step % at_once == 0)
            grid = (strips, min(ceil_div(o.n, tile.cols), MAX_GRID_Y), 1)
            call = variant(k_step == 1 and aligned).bind(grid, o.stream, o.b, o.c, o.n, k_step, n_step, o.ldc)
            return (call,)

        return Prepared(prepare, str(tile))


KERNEL = SpmmBSRTokens()


def along_k(p: Problem) -> bool:
    """Whether lines of B along K start on 16-byte boundaries."""
    return p.n == 1 or (p.b_layout == COL and b_alignment(p) == LINE)


def instance(p: Problem, t: Tile, types: str, wide: bool) -> str:
    """The C++ name of the kernel for a problem; wide: whether B allows loads of several values along K."""
    height, width = p.p["blocksize"]
    flags = ", ".join(str(f).lower() for f in (wide, p.out_layout == COL, p.format == "dbsr"))
    shape = f"{height}, {width}, {t.row_tiles}, {t.column_tiles}, {t.warps}, {t.ahead}, {zero_rows(height)}"
    return f"spmm_bsr_tokens<{C_TYPES[p.a_dtype]}, {C_TYPES[p.out_dtype]}, {types}, {shape}, {flags}>"
