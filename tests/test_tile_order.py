"""The order in which blocks take tiles of C: each tile once, whatever the number of columns that go together."""

from __future__ import annotations

import numpy as np
import pytest
from exact import assert_exact, hopper
from test_kernels import Guarded, matrix, on_device, problem

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime import tile_order
from spformat.backends.cuda.runtime.kernel import CudaKernel
from spformat.backends.cuda.vector_nm import spmm_vector_nm_sm90a, spmm_vector_nm_tma_sm90a
from spformat.formats import VectorNM
from spformat.products.tiles import forced

LONG, SHORT = spmm_vector_nm_sm90a.SpmmVectorNMSm90a(), spmm_vector_nm_tma_sm90a.SpmmVectorNMTMA()


MB = 1 << 20


def test_tiles_go_together_where_a_would_come_several_times() -> None:
    together = tile_order.columns_together
    assert together(4 * MB, 64, 6, 1, 132) == 6  # 24 MB of B, whole
    assert together(4 * MB, 64, 8, 1, 132) == 4  # two groups of four, not six and two
    assert together(7 * MB, 64, 11, 1, 132) == 3
    assert together(32 * MB, 64, 11, 1, 132) == 1
    assert together(4 * MB, 20, 6, 1, 132) == 1  # all of them at one time
    assert together(4 * MB, 64, 4, 1, 132) == 1
    assert together(1 * MB, 16, 12, 2, 132) == 1  # parts of K
    assert together(1 * MB, 8, 0, 1, 132) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "tile", "length"),
    [
        (LONG, "128x64x64 whole", 128), (LONG, "128x64x64 even", 128), (SHORT, "128x64x64", 32),
        (SHORT, "128x64x64 splits 4", 32),
    ],
    ids=lambda x: getattr(x, "name", None),
)  # fmt: skip
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 7])
def test_each_tile_is_written_once(
    columns: int, kernel: CudaKernel, tile: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven columns of tiles, three rows, as if few ran at one time; integers are exact, and C is NaN before."""
    for module in (spmm_vector_nm_sm90a, spmm_vector_nm_tma_sm90a):
        monkeypatch.setattr(module, "columns_together", lambda *_: columns)
    cp, rng, (M, K, N) = hopper(), np.random.default_rng(columns), (331, 520, 7 * 64 - 9)
    params = {"n": 16, "m": 32, "vector_length": length}
    x = matrix(rng, "vector-nm", params, "bfloat16", (M, K))
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    a = VectorNM.from_dense(x, **params)
    p = problem(a, N, "bfloat16", ("row", "col"), 90)
    with forced(kernel.name, tile):
        assert str(kernel.best(p).tile) == tile
        plan = kernel.plan(a.to("cuda"), p)
    guarded = Guarded(cp, (M, N), VALUE_TYPES["bfloat16"].numpy, "col", 0)
    plan(on_device(cp, B, "row", 8), out=guarded.out)
    assert guarded.intact()
    assert_exact(guarded.out.get(), x, B)
