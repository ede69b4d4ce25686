"""SpMM on Bitmask for few columns of B: weights stream once, bits become mma tiles.  Kernel: spmm_bitmask.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...dtypes import VALUE_TYPES
from ...problem import COL, STRIDED, Plan, Problem, reasons
from . import jit
from .launch import Launch, Operands, device_plan

SOURCE = "spmm_bitmask.cu"
STEP = 64  # columns of A a warp expands at a time
TYPES = ("bfloat16", "float16", "float32", "float64")
MAX_GRID_Y = 65535


@dataclass(frozen=True)
class Tile:
    """What one block computes: 16 * ``fragments`` rows x ``cols`` columns of C, K shared by ``warps``."""

    fragments: int
    cols: int
    warps: int

    @property
    def rows(self) -> int:
        return 16 * self.fragments

    def smem(self, itemsize: int, b_col: bool) -> int:
        """bytes: per warp the expanded tile, two staged pieces of B and the row table; ``Layout`` in the kernel."""
        pad = 8 if itemsize == 2 else 2
        lines, line = (self.cols, STEP) if b_col else (STEP, self.cols)
        warp = self.rows * (STEP + pad) * itemsize + 2 * lines * (line + 16 // itemsize) * itemsize + self.rows * 16
        sums = self.rows * self.cols * max(itemsize, 4)
        return self.warps * max(warp, sums)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}, {self.warps} warps"


def choose(p: Problem, sms: int, smem: int) -> Tile:
    """Narrowest tile that holds N, 32 rows where they fill the machine, as many warps as fit ``smem`` bytes."""
    itemsize = VALUE_TYPES[p.a_dtype].numpy.itemsize
    widest = {2: 64, 4: 16, 8: 8}[itemsize]
    cols = min(widest, max(8, p.n))
    row_tiles = -(-p.M // 32)
    fragments = 2 if itemsize < 8 and row_tiles >= 0.75 * sms else 1
    tiles = [Tile(fragments, cols, warps) for warps in (16, 8, 4, 2, 1) if warps < 16 or (itemsize == 2 and cols <= 16)]
    return next(t for t in tiles if t.smem(itemsize, p.b_layout == COL) <= smem)


def instance(p: Problem, tile: Tile, pointer: str) -> str:
    """The C++ name of the kernel for ``p``."""
    types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}, {pointer}"
    return f"spmm_bitmask<{types}, {tile.cols}, {tile.fragments}, {tile.warps}, {str(p.b_layout == COL).lower()}>"


class SpmmBitmask:
    """C = A @ B for ``Bitmask`` A; made for N <= 64, right for any M, K, N, layout and leading dimension."""

    name = "cuda.spmm_bitmask"
    formats = frozenset({"bitmask"})

    def unsupported(self, p: Problem) -> list[str]:
        outs = (p.a_dtype,) if p.a_dtype == "float64" else (p.a_dtype, "float32")
        return reasons(
            (p.format not in self.formats, f"takes bitmask, got {p.format}"),
            (p.device != "cuda", f"operands are on {p.device}; move them with .to('cuda')"),
            (p.a_dtype not in TYPES, f"a.dtype must be one of {', '.join(TYPES)}, got {p.a_dtype}"),
            (p.b_dtype != p.a_dtype, f"b.dtype must equal a.dtype ({p.a_dtype}), got {p.b_dtype}"),
            (p.out_dtype not in outs, f"out.dtype must be {' or '.join(dict.fromkeys(outs))}, got {p.out_dtype}"),
            (STRIDED in (p.b_layout, p.out_layout), "B and out must be row- or column-major; use ascontiguousarray"),
            (p.sm is None or p.sm < 80, f"needs sm_80 or newer, got {p.sm_name}"),
            (p.K >= 1 << 26, f"K must be below 2^26, got {p.K}"),
        )

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "bitmask_before",
            "spmm_bitmask<__nv_bfloat16, __nv_bfloat16, int, 16, 2, 16, false>",
            "spmm_bitmask<__nv_bfloat16, float, long long, 8, 1, 16, true>",
            "spmm_bitmask<__half, __half, int, 64, 2, 8, false>",
            "spmm_bitmask<float, float, int, 16, 2, 8, true>",
            "spmm_bitmask<double, double, int, 8, 1, 8, false>",
        )

    def plan(self, a: Any, p: Problem) -> Plan:
        import cupy

        limits = cupy.cuda.Device(p.device_id).attributes
        return self.plan_with(a, p, choose(p, limits["MultiProcessorCount"], limits["MaxSharedMemoryPerBlockOptin"]))

    def plan_with(self, a: Any, p: Problem, tile: Tile) -> Plan:
        """The plan for one tile; ``plan`` chooses it."""
        import cupy

        arch, b_col, out_col = jit.architecture(p.sm or 80, ()), p.b_layout == COL, p.out_layout == COL
        smem = tile.smem(VALUE_TYPES[p.a_dtype].numpy.itemsize, b_col)
        width = STEP * -(-p.K // (STEP * tile.warps))  # columns of A per warp
        stream = cupy.cuda.get_current_stream().ptr

        before = cupy.empty((p.M, tile.warps), "uint32")
        if p.M:
            count = jit.load(SOURCE, "bitmask_before", arch, p.device_id)
            counted = (a.bitmask, before, p.M, -(-p.K // 8), width, tile.warps)
            Launch(count, "PPqqqi", counted, 256)((-(-p.M // 8), 1, 1), stream)

        pointer = "int" if a.indptr.dtype == "int32" else "long long"
        function = jit.load(SOURCE, instance(p, tile, pointer), arch, p.device_id, smem)
        fixed = (a.indptr, a.bitmask, a.data, before, p.M, p.K, width)
        launch = Launch(function, "PPPPqqqPPqqqq", fixed, 32 * tile.warps, smem)
        row_tiles = -(-p.M // tile.rows)

        def run(o: Operands) -> None:
            grid = (row_tiles, min(MAX_GRID_Y, -(-o.n // tile.cols)), 1)
            c_row, c_col = (1, o.ldc) if out_col else (o.ldc, 1)
            launch(grid, o.stream, o.b, o.c, o.n, o.ldb, c_row, c_col)

        return device_plan(self.name, p, run, str(tile), before.nbytes)
