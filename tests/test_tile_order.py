"""The order in which blocks take tiles of C: each tile once, whatever the number of columns that go together."""

from __future__ import annotations

import numpy as np
import pytest
from exact import assert_exact, hopper
from test_kernels import Guarded, matrix, on_device, problem

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime import tile_order
from spformat.backends.cuda.runtime.kernel import CudaKernel
from spformat.backends.cuda.runtime.tile_order import TileOrder, read_once
from spformat.backends.cuda.vector_nm.spmm_vector_nm_sm90a import SpmmVectorNMSm90a
from spformat.backends.cuda.vector_nm.spmm_vector_nm_tma_sm90a import SpmmVectorNMTMA
from spformat.formats import VectorNM
from spformat.products.tiles import forced

LONG, SHORT = SpmmVectorNMSm90a(), SpmmVectorNMTMA()


MB = 1 << 20


def test_a_that_is_large_is_evicted_first_where_its_tiles_run_at_one_time() -> None:
    assert read_once(24 * MB, 2, 128, 132)  # 8192 x 3072 at 16:32 with 184 columns: one round
    assert read_once(56 * MB, 1, 300, 132)  # one column of tiles
    assert not read_once(28 * MB, 4, 224, 132)  # 14336 x 4096 at 8:32 with 432 columns: two rounds
    assert not read_once(12 * MB, 1, 64, 132)  # stays in L2, whatever comes beside it


def test_tiles_go_together_where_a_would_come_several_times() -> None:
    order = tile_order.tile_order
    assert order(64 * MB, 4 * MB, 64, 6, 1, 132) == TileOrder(6, 1)  # 24 MB of B, whole
    assert order(64 * MB, 4 * MB, 64, 8, 1, 132) == TileOrder(4, 0)  # two groups of four, not six and two
    assert order(64 * MB, 7 * MB, 64, 11, 1, 132) == TileOrder(3, 0)
    assert order(64 * MB, 32 * MB, 64, 11, 1, 132) == TileOrder(1, 0)
    assert order(64 * MB, 4 * MB, 64, 2, 1, 132) == TileOrder(1, 1)  # all of them at one time
    assert order(64 * MB, 4 * MB, 64, 4, 1, 132) == TileOrder(1, 0)
    assert order(64 * MB, 1 * MB, 16, 12, 2, 132) == TileOrder(1, 0)  # parts of K
    assert order(4 * MB, 1 * MB, 8, 64, 1, 132) == TileOrder(1, 0)
    assert order(4 * MB, 1 * MB, 8, 0, 1, 132) == TileOrder(1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "tile", "length"),
    [
        (LONG, "128x64x64 whole", 128), (LONG, "128x64x64 even", 128), (SHORT, "128x64x64", 32),
        (SHORT, "128x64x64 splits 4", 32),
    ],
    ids=lambda x: getattr(x, "name", None),
)  # fmt: skip
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 100])
def test_each_tile_is_written_once(
    columns: int, kernel: CudaKernel, tile: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven columns of tiles, three rows, as if A were too large for L2; integers are exact, and C is NaN before."""
    monkeypatch.setattr(tile_order, "STAYS", 0)
    monkeypatch.setattr(tile_order, "read_once", lambda *_: False)
    cp, rng, (M, K, N) = hopper(), np.random.default_rng(columns), (331, 520, 7 * 64 - 9)
    monkeypatch.setattr(tile_order, "PART_OF_B", columns * 2 * K * 64)
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
