"""SpMM on SR-BCRS for Hopper: TMA and clusters behind the tensor cores, any (t, g).  Kernel: spmm_sr_bcrs_sm90a.cu."""

from __future__ import annotations

import functools
from typing import Any

from ....products.kernel import reasons
from ....products.problem import COL, Problem
from ..runtime import jit, tensor_map
from ..runtime.kernel import Prepared
from ..runtime.launch import MAX_GRID_Y, Bound, Launch, Operands
from .mma_fragments import DEPTH, MOST_BYTES, FragmentKernel, Tile, fragments_of, types

SOURCE = "sr_bcrs/spmm_sr_bcrs_sm90a.cu"
ARCHS = ("sm_90a",)
TILES = (
    Tile(4, 2, 1, 8, 3),  # 128 x 128
    Tile(2, 2, 2, 4, 4),  # 64 x 64
    Tile(1, 2, 4, 4, 6),  # 32 x 64
    Tile(1, 1, 4, 4, 5),  # 32 x 32
)
"""Largest first."""


def mappable(p: Problem, o: Operands) -> bool:
    """Whether a tensor map can bring B: row-major, in 16-byte pieces, its row numbers in 32 bits."""
    return p.b_layout != COL and tensor_map.aligned(o.b, o.ldb, 2) and 0 < p.K <= 2**31 - DEPTH


class SpmmSRBCRSHopper(FragmentKernel):
    """``FragmentKernel`` for Hopper."""

    name = "cuda.spmm_sr_bcrs_sm90a"
    tiles = TILES

    def smem(self, tile: Tile) -> int:
        """bytes: stages of B and records, the warps' sums, barriers, zeros and counts; ``Layout`` in the kernel."""
        stage = DEPTH * 2 * tile.cols + tile.wm * MOST_BYTES
        stage = -(-stage // 1024) * 1024
        return 1024 + tile.stages * (stage + 16 + 4 * tile.wm) + tile.sums + 16

    def unsupported(self, p: Problem) -> list[str]:
        return super().unsupported(p) + reasons((p.sm != 90, f"needs sm_90, got {p.sm_name}"))

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "spmm_sr_bcrs_sm90a<__half, __half, 4, 2, 1, 8, 3, 4, true>",
            "spmm_sr_bcrs_sm90a<__nv_bfloat16, __nv_bfloat16, 2, 2, 2, 4, 4, 1, true>",
            "spmm_sr_bcrs_sm90a<__nv_bfloat16, float, 1, 1, 4, 4, 5, 1, false>",
            "spmm_sr_bcrs_sm90a<__nv_bfloat16, __nv_bfloat16, 1, 2, 4, 4, 6, 1, true>",
        )

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        b_col, out_col = p.b_layout == COL, p.out_layout == COL
        fragments = fragments_of(a, p)
        fixed = (fragments.first, fragments.pieces, p.M, p.K)
        leading, line = types(p), min(64, tile.cols)

        @functools.cache
        def launcher(tma: bool) -> tuple[Launch, int]:
            """The launch and its blocks along M; the variant without TMA is built when operands first need it."""
            cluster = tile.cluster if tma else 1
            shape = f"{tile.wm}, {tile.wn}, {tile.wk}, {tile.strip}, {tile.stages}, {cluster}"
            instance = f"spmm_sr_bcrs_sm90a<{leading}, {shape}, {str(tma).lower()}>"
            function = jit.load(SOURCE, instance, jit.architecture(90, ARCHS), p.device_id, self.smem(tile))
            signature = (*"PPqq", tensor_map.TensorMap, *"PPqqqqq")
            threads = 32 * (tile.warps + (1 if tma else 4))
            launch = Launch(function, signature, fixed, threads, self.smem(tile))
            return launch, -(-p.M // (tile.rows * cluster)) * cluster

        if not b_col and p.K > 0:
            launcher(True)

        def prepare(o: Operands) -> tuple[Bound]:
            tma = mappable(p, o)
            launch, blocks = launcher(tma)
            mapped, box = tensor_map.UNMAPPED, (line, DEPTH // tile.cluster)
            if tma:
                mapped = tensor_map.tiled(o.b, p.b_dtype, (o.n, p.K), (o.ldb,), box, 2 * line)
            grid = (blocks, min(MAX_GRID_Y, -(-o.n // tile.cols)), 1)
            b_strides = (1, o.ldb) if b_col else (o.ldb, 1)
            c_strides = (1, o.ldc) if out_col else (o.ldc, 1)
            return (launch.bind(grid, o.stream, mapped, o.b, o.c, o.n, *b_strides, *c_strides),)

        return Prepared(prepare, str(tile))
