"""The order in which blocks take tiles of C: each tile once, whatever the number of columns that go together."""

from __future__ import annotations

import numpy as np
import pytest
from exact import assert_exact, hopper
from test_kernels import Guarded, matrix, on_device, problem

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.vector_nm import spmm_vector_nm_sm90a as sm90a
from spformat.formats import VectorNM
from spformat.products.tiles import forced

KERNEL = sm90a.SpmmVectorNMSm90a()


def test_columns_that_go_together_share_a_part_of_b() -> None:
    assert sm90a.together(3584, 816, 224) == 4  # 6 MB of B, whole
    assert sm90a.together(8192, 2000, 256) == 4  # eight columns of 4 MB: two groups of four, not six and two
    assert sm90a.together(14336, 2611, 256) == 3  # eleven columns, three at a time
    assert sm90a.together(1 << 20, 2611, 256) == 1
    assert sm90a.together(64, 0, 64) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("even", ["whole", "even"])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 100])
def test_each_tile_is_written_once(columns: int, even: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven columns of tiles, three rows; integers are exact, and C is NaN before."""
    cp, rng, (M, K, N) = hopper(), np.random.default_rng(columns), (331, 520, 7 * 64 - 9)
    monkeypatch.setattr(sm90a, "PART_OF_B", columns * 2 * K * 64)
    x = matrix(rng, "vector-nm", {"n": 16, "m": 32, "vector_length": 128}, "bfloat16", (M, K))
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    a = VectorNM.from_dense(x, n=16, m=32, vector_length=128)
    p = problem(a, N, "bfloat16", ("row", "col"), 90)
    with forced(KERNEL.name, f"128x64x64 {even}"):
        plan = KERNEL.plan(a.to("cuda"), p)
    guarded = Guarded(cp, (M, N), VALUE_TYPES["bfloat16"].numpy, "col", 0)
    plan(on_device(cp, B, "row", 8), out=guarded.out)
    assert guarded.intact()
    assert_exact(guarded.out.get(), x, B)
