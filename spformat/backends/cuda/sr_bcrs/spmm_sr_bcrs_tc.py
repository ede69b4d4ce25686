"""SpMM on SR-BCRS with tensor cores of sm_80: bf16/f16 in, f32 sums, any (t, g).  Kernel: spmm_sr_bcrs_tc.cu."""

from __future__ import annotations

from typing import Any

from ....products.problem import COL, Problem
from ..runtime import jit
from ..runtime.kernel import Prepared
from ..runtime.launch import Launch, over_tiles
from .mma_fragments import DEPTH, FragmentKernel, Tile, fragments_of, types

LARGE = Tile(2, 4, 2, 1, 8, 3)
MEDIUM = Tile(2, 2, 2, 2, 4, 3)
SMALL = Tile(1, 1, 1, 8, 4, 3)
TILES = (LARGE, MEDIUM, SMALL)


class SpmmSRBCRSTensor(FragmentKernel):
    """``FragmentKernel`` for tensor cores of sm_80 and later."""

    name = "cuda.spmm_sr_bcrs_tc"
    tiles = TILES

    def smem(self, tile: Tile) -> int:
        """bytes: the staged chunks of B, or the sums that warps exchange where those are larger."""
        return max(tile.stages * DEPTH * 2 * (tile.cols + 8), tile.sums)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "spmm_sr_bcrs_tc<__half, __half, int, int, 2, 4, 2, 1, 8, 3, false>",
            "spmm_sr_bcrs_tc<__nv_bfloat16, __nv_bfloat16, int, int, 2, 2, 2, 2, 4, 3, false>",
            "spmm_sr_bcrs_tc<__nv_bfloat16, float, long long, int, 1, 1, 1, 8, 4, 3, true>",
        )

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        b_col, out_col = p.b_layout == COL, p.out_layout == COL
        fragments = fragments_of(a, p, tile.fragments)
        shape = f"{tile.fragments}, {tile.wm}, {tile.wn}, {tile.wk}, {tile.strip}, {tile.stages}"
        instance = f"spmm_sr_bcrs_tc<{types(a, p)}, {shape}, {str(b_col).lower()}>"
        function = jit.load(
            "sr_bcrs/spmm_sr_bcrs_tc.cu", instance, jit.architecture(p.sm or 80, ()), p.device_id, self.smem(tile)
        )
        fixed = (fragments.first, fragments.steps, a.indptr, a.indices, a.data, a.vector_length, a.stride, p.M, p.K)
        launch = Launch(function, "PPPPPiiqqPPqqqq", fixed, 32 * tile.warps, self.smem(tile))
        prepare = over_tiles(launch, -(-p.M // tile.rows), tile.cols, out_col)
        return Prepared(prepare, str(tile), fragments.nbytes)
