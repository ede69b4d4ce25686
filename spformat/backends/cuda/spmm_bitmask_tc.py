"""SpMM on Bitmask with tensor cores, bf16/f16 in, f32 sums, few columns of B.  Kernel: spmm_bitmask_tc.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...dtypes import VALUE_TYPES
from ...problem import COL, Plan, Problem
from . import jit
from .bitmask_slices import STEP, refusals, slice_columns, values_before
from .launch import Launch, device_plan, over_tiles

SOURCE = "spmm_bitmask_tc.cu"
PITCH = 144  # bytes of a row's staged values


@dataclass(frozen=True)
class Tile:
    """What one block computes: 16 * ``fragments`` rows x ``cols`` columns of C, K shared by ``warps``.

    ``stages`` steps of a warp are in shared memory or on their way there.
    """

    fragments: int
    cols: int
    warps: int
    stages: int

    @property
    def rows(self) -> int:
        return 16 * self.fragments

    @property
    def smem(self) -> int:
        """bytes: per warp the stages of values, B and bits (``Layout`` in the kernel), or its sums."""
        stage = self.rows * (PITCH + 16) + STEP * self.cols * 2
        return self.warps * max(self.stages * stage, self.rows * self.cols * 4)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}, {self.warps} warps, {self.stages} stages"


def choose(M: int, n: int, sms: int, smem: int) -> Tile:
    """Narrowest tile that holds N. Many row tiles: few warps each, several blocks on an SM; few: more warps share K."""
    cols = min(64, max(8, n))
    tall = -(-M // 32)
    fragments = 2 if cols > 16 and tall >= 0.75 * sms else 1
    row_tiles = -(-M // (16 * fragments))
    most = 4 if row_tiles >= 3 * sms else 8 if cols > 16 or row_tiles >= sms else 16
    stages = 3 if cols <= 16 and most == 8 else 2
    tiles = (Tile(fragments, cols, warps, stages) for warps in (16, 8, 4, 2, 1) if warps <= most)
    return next(t for t in tiles if t.smem <= smem)


class SpmmBitmaskTensor:
    """C = A @ B for 16-bit ``Bitmask`` A; made for N <= 64, right for any M, K, N, layout and leading dimension."""

    name = "cuda.spmm_bitmask_tc"
    formats = frozenset({"bitmask"})

    def unsupported(self, p: Problem) -> list[str]:
        return refusals(p, ("bfloat16", "float16"), (p.a_dtype, "float32"))

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "spmm_bitmask_tc<__nv_bfloat16, __nv_bfloat16, int, 16, 1, 8, 3, false>",
            "spmm_bitmask_tc<__nv_bfloat16, float, long long, 8, 1, 16, 3, true>",
            "spmm_bitmask_tc<__half, __half, int, 64, 2, 8, 2, false>",
        )

    def plan(self, a: Any, p: Problem) -> Plan:
        import cupy

        limits = cupy.cuda.Device(p.device_id).attributes
        tile = choose(p.M, p.n, limits["MultiProcessorCount"], limits["MaxSharedMemoryPerBlockOptin"])
        return self.plan_with(a, p, tile)

    def plan_with(self, a: Any, p: Problem, tile: Tile) -> Plan:
        """The plan for one tile; ``plan`` chooses it."""
        b_col, out_col = p.b_layout == COL, p.out_layout == COL
        before = values_before(a, p, tile.warps)
        data = a.data if a.data.data.ptr % 16 == 0 else a.data.copy()  # the kernel reads it in 16-byte pieces
        types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"
        types = f"{types}, {'int' if a.indptr.dtype == 'int32' else 'long long'}"
        shape = f"{tile.cols}, {tile.fragments}, {tile.warps}, {tile.stages}"
        instance = f"spmm_bitmask_tc<{types}, {shape}, {str(b_col).lower()}>"
        function = jit.load(SOURCE, instance, jit.architecture(p.sm or 80, ()), p.device_id, tile.smem)
        fixed = (a.indptr, a.bitmask, data, before, p.M, p.K, slice_columns(p.K, tile.warps))
        launch = Launch(function, "PPPPqqqPPqqqq", fixed, 32 * tile.warps, tile.smem)
        prepare = over_tiles(launch, -(-p.M // tile.rows), tile.cols, out_col)
        return device_plan(self.name, p, prepare, str(tile), before.nbytes)
