"""SpMM on SR-BCRS with tensor cores of sm_80: bf16/f16 in, f32 sums, any (t, g).  Kernel: spmm_sr_bcrs_tc.cu."""

from __future__ import annotations

from typing import Any

from ....products.problem import COL, Problem
from ..runtime import jit
from ..runtime.kernel import Prepared
from ..runtime.launch import Launch, over_tiles
from .mma_fragments import DEPTH, MOST_BYTES, FragmentKernel, Tile, fragments_of, types

TILES = tuple(Tile(*extent, stages) for stages in (3, 2) for extent in ((4, 2, 1, 8), (2, 2, 2, 4), (1, 1, 8, 4)))
"""128 x 128, 64 x 64 and 32 x 32; of the same extent, the one with more stages is taken where shared memory allows."""


class SpmmSRBCRSTensor(FragmentKernel):
    """``FragmentKernel`` for tensor cores of sm_80 and later."""

    name = "cuda.spmm_sr_bcrs_tc"
    tiles = TILES

    def smem(self, tile: Tile) -> int:
        """bytes: the staged chunks of B and records, or the sums that warps exchange where those are larger."""
        return max(tile.stages * (DEPTH * 2 * (tile.cols + 8) + tile.wm * MOST_BYTES), tile.sums)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "spmm_sr_bcrs_tc<__half, __half, 4, 2, 1, 8, 3, false>",
            "spmm_sr_bcrs_tc<__nv_bfloat16, __nv_bfloat16, 2, 2, 2, 4, 2, false>",
            "spmm_sr_bcrs_tc<__nv_bfloat16, float, 1, 1, 8, 4, 3, true>",
        )

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        b_col, out_col = p.b_layout == COL, p.out_layout == COL
        fragments = fragments_of(a, p)
        shape = f"{tile.wm}, {tile.wn}, {tile.wk}, {tile.strip}, {tile.stages}"
        instance = f"spmm_sr_bcrs_tc<{types(p)}, {shape}, {str(b_col).lower()}>"
        function = jit.load(
            "sr_bcrs/spmm_sr_bcrs_tc.cu", instance, jit.architecture(p.sm or 80, ()), p.device_id, self.smem(tile)
        )
        fixed = (fragments.first, fragments.pieces, p.M, p.K)
        launch = Launch(function, "PPqqPPqqqq", fixed, 32 * tile.warps, self.smem(tile))
        prepare = over_tiles(launch, -(-p.M // tile.rows), tile.cols, out_col)
        return Prepared(prepare, str(tile))
