"""The order in which blocks take tiles of C: each tile once, whatever the number of columns that go together."""

from __future__ import annotations

import numpy as np
import pytest
from exact import assert_exact, hopper
from test_kernels import Guarded, matrix, on_device, problem

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime import tile_order
from spformat.backends.cuda.runtime.kernel import CudaKernel
from spformat.backends.cuda.runtime.tile_order import columns_together
from spformat.backends.cuda.vector_nm.spmm_vector_nm_sm90a import SpmmVectorNMSm90a
from spformat.backends.cuda.vector_nm.spmm_vector_nm_tma_sm90a import SpmmVectorNMTMA
from spformat.formats import VectorNM
from spformat.products.tiles import forced

LONG, SHORT = SpmmVectorNMSm90a(), SpmmVectorNMTMA()


def test_columns_that_go_together_share_a_part_of_b() -> None:
    assert columns_together(2 * 3584, 816, 224) == 4  # 6 MB of B, whole
    assert columns_together(2 * 8192, 2000, 256) == 4  # eight columns of 4 MB: two groups of four, not six and two
    assert columns_together(2 * 14336, 2611, 256) == 3  # eleven columns, three at a time
    assert columns_together(2 << 20, 2611, 256) == 1
    assert columns_together(2 * 64, 0, 64) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "tile", "length"),
    [
        (LONG, "128x64x64 whole", 128), (LONG, "128x64x64 even", 128), (SHORT, "128x64x64", 32),
        (SHORT, "128x64x64 splits 3", 32),
    ],
    ids=lambda x: getattr(x, "name", None),
)  # fmt: skip
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 100])
def test_each_tile_is_written_once(
    columns: int, kernel: CudaKernel, tile: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven columns of tiles, three rows; integers are exact, and C is NaN before."""
    cp, rng, (M, K, N) = hopper(), np.random.default_rng(columns), (331, 520, 7 * 64 - 9)
    monkeypatch.setattr(tile_order, "PART_OF_B", columns * 2 * K * 64)
    params = {"n": 16, "m": 32, "vector_length": length}
    x = matrix(rng, "vector-nm", params, "bfloat16", (M, K))
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    a = VectorNM.from_dense(x, **params)
    p = problem(a, N, "bfloat16", ("row", "col"), 90)
    with forced(kernel.name, tile):
        plan = kernel.plan(a.to("cuda"), p)
    guarded = Guarded(cp, (M, N), VALUE_TYPES["bfloat16"].numpy, "col", 0)
    plan(on_device(cp, B, "row", 8), out=guarded.out)
    assert guarded.intact()
    assert_exact(guarded.out.get(), x, B)
