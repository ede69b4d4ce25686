"""SpMM on SR-BCRS with CUDA cores: every value type, any vector length and stride.  Kernel: spmm_sr_bcrs.cu."""

from __future__ import annotations

from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....products.problem import COL, STRIDED, Plan, Problem, reasons
from ..runtime import jit
from ..runtime.launch import MAX_GRID_Y, Bound, Launch, Operands, device_plan
from .mma_fragments import index_type

TYPES = ("bfloat16", "float16", "float32", "float64")
ROWS, WARPS = 8, 8  # rows of a tile that a warp sums; warps of a block


class SpmmSRBCRS:
    """C = A @ B for ``SRBCRS`` A of any vector_length and stride; any M, K, N, layout and leading dimension."""

    name = "cuda.spmm_sr_bcrs"
    formats = frozenset({"sr-bcrs"})

    def unsupported(self, p: Problem) -> list[str]:
        outs = (p.a_dtype,) if p.a_dtype == "float64" else (p.a_dtype, "float32")
        return reasons(
            (p.format not in self.formats, f"takes sr-bcrs, got {p.format}"),
            (p.device != "cuda", f"operands are on {p.device}; move them with .to('cuda')"),
            (p.a_dtype not in TYPES, f"a.dtype must be one of {', '.join(TYPES)}, got {p.a_dtype}"),
            (p.b_dtype != p.a_dtype, f"b.dtype must equal a.dtype ({p.a_dtype}), got {p.b_dtype}"),
            (p.out_dtype not in outs, f"out.dtype must be {' or '.join(dict.fromkeys(outs))}, got {p.out_dtype}"),
            (STRIDED in (p.b_layout, p.out_layout), "B and out must be row- or column-major; use ascontiguousarray"),
            (p.sm is None or p.sm < 80, f"needs sm_80 or newer, got {p.sm_name}"),
        )

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "spmm_sr_bcrs<float, float, int, int, 4, 8, 1>",
            "spmm_sr_bcrs<__half, float, int, int, 2, 8, 8>",
            "spmm_sr_bcrs<__nv_bfloat16, __nv_bfloat16, long long, long long, 1, 8, 2>",
            "spmm_sr_bcrs<double, double, int, int, 2, 8, 4>",
        )

    def plan(self, a: Any, p: Problem) -> Plan:
        import cupy

        tiles = -(-p.M // a.vector_length)
        units = tiles * -(-a.vector_length // ROWS)
        cols = 1 if p.n <= 32 else 2 if p.n <= 64 or p.a_dtype == "float64" else 4
        # Warps share a unit where units alone are too few to fill the machine and each has work to share.
        wanted = 16 * cupy.cuda.Device(p.device_id).attributes["MultiProcessorCount"] // max(1, -(-p.n // (32 * cols)))
        batches = a.indices.size // (32 * max(1, tiles))
        split = next((s for s in (1, 2, 4) if units * s >= wanted or 2 * s > batches), 8)
        types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"
        instance = f"spmm_sr_bcrs<{types}, {index_type(a.indptr)}, {index_type(a.indices)}, {cols}, {WARPS}, {split}>"
        function = jit.load("sr_bcrs/spmm_sr_bcrs.cu", instance, jit.architecture(p.sm or 80, ()), p.device_id)
        fixed = (a.indptr, a.indices, a.data, p.M, a.vector_length, a.stride)
        launch = Launch(function, "PPPqiiPPqqqqq", fixed, 32 * WARPS)
        blocks = -(-units * split // WARPS)
        b_col, out_col = p.b_layout == COL, p.out_layout == COL

        def prepare(o: Operands) -> tuple[Bound]:
            grid = (blocks, min(MAX_GRID_Y, -(-o.n // (32 * cols))), 1)
            b_strides = (1, o.ldb) if b_col else (o.ldb, 1)
            c_strides = (1, o.ldc) if out_col else (o.ldc, 1)
            return (launch.bind(grid, o.stream, o.b, o.c, o.n, *b_strides, *c_strides),)

        return device_plan(self.name, p, prepare, f"{ROWS}x{32 * cols}, {split} warps")
