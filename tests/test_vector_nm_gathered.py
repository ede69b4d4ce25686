"""Vector n:m with long vectors on Hopper: every tile gives exact products, on a GPU or the emulated one."""

from __future__ import annotations

import numpy as np
import pytest
from exact import assert_exact, hopper
from test_kernels import Guarded, matrix, on_device, problem

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.vector_nm.spmm_vector_nm_sm90a import TILES, SpmmVectorNMSm90a, Tile
from spformat.formats import VectorNM
from spformat.products.roofline import shared_limit
from spformat.products.tiles import forced

KERNEL = SpmmVectorNMSm90a()


def test_tiles_fit_shared_memory() -> None:
    assert max(tile.smem() for tile in TILES) <= shared_limit(90)
    assert len(set(map(str, TILES))) == len(TILES)


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_integers_are_exact(tile: Tile, out: str) -> None:
    """Two columns of tiles, the second one partly past N; C is NaN before. By the copy engine, or by strips."""
    cp, rng, (M, K, N) = hopper(), np.random.default_rng(tile.cols), (140, 328, tile.cols + 40)
    layout, pad = ("row", "col")[tile.cols // 16 % 2], (0, 8, 3)[tile.cols % 3]
    x = matrix(rng, "vector-nm", {"n": 16, "m": 32, "vector_length": 128}, "bfloat16", (M, K))
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    a = VectorNM.from_dense(x, n=16, m=32, vector_length=128)
    with forced(KERNEL.name, str(tile)):
        plan = KERNEL.plan(a.to("cuda"), problem(a, N, out, ("row", layout), 90))
    for _ in range(2):
        guarded = Guarded(cp, (M, N), VALUE_TYPES[out].numpy, layout, pad)
        plan(on_device(cp, B, "row", 8), out=guarded.out)
        assert guarded.intact()
        assert_exact(guarded.out.get(), x, B)
