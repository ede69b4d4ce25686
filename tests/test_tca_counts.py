"""TCA-SpMM's counts of instructions against what the kernel issues, counted where it runs on the CPU."""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from test_schedule import csr_of

from spformat.backends.cuda.runtime import jit
from spformat.preprocess.schedule import WARPS, mma_of_whole_fragments, tca

pytestmark = pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")


@pytest.mark.parametrize("shared", ["false", "true"])
@pytest.mark.parametrize(("dtype", "loads"), [("float16", 1), ("float16", 8), ("float32", 1), ("float32", 4)])
def test_the_kernel_issues_the_instructions_that_are_counted(dtype: str, loads: int, shared: str) -> None:
    """Rows of every class; three times as many for float32, whose products are three of TF32. Lanes that load one value of B at a time issue exactly ``mma_count``; with wider loads, whose
    instructions come in groups, the last group of a warp's share may be a part of one."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation([0, 1, 8, 9, 16, 17, 20, 32, 33, 64, 65, 100, 128, 300])
    a = csr_of(np.concatenate(([0], np.cumsum(lengths))))
    schedule, values = tca(a), rng.integers(-3, 4, a.nnz).astype(dtype)
    dense = np.zeros(a.shape)
    dense[a.rows(), a.indices] = values
    zeros = np.flatnonzero(schedule.num_warps_per_row == 0).astype(np.int64)
    row_id, warpid = (x.astype(np.int32) for x in (schedule.row_id_for_each_warp, schedule.warpid_within_row))
    grid = schedule.blocks + -(-zeros.size // WARPS), 1, 1
    value, size, times = ("__half", 2, 1) if dtype == "float16" else ("float", 4, 3)
    instance = f"spmm_csr_tc<{value}, float, int, int, int, {loads}, {shared}>"
    kernel = emulator.Kernel(jit.HERE / "csr" / "spmm_csr_tc.cu", instance)
    for N in (1, 3, 50, 130) if loads == 1 else (8, 40, 64, 128):
        B, C = rng.integers(-2, 3, (a.shape[1], N)).astype(dtype), np.full((a.shape[0], N), np.nan, np.float32)
        before = kernel.products
        kernel(
            grid, (32 * WARPS, 1, 1), row_id, warpid, schedule.blocks, a.indptr, a.indices, values, zeros, zeros.size,
            B, C, N, size * N, N,
        )  # fmt: skip
        assert (dense @ B.astype(np.float64) == C).all()
        issued, counted = (kernel.products - before) / times, schedule.mma_count(N)
        assert counted <= issued <= mma_of_whole_fragments(a, N)
        if loads == 1 or N in (64, 128):
            assert issued == counted
