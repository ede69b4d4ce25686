"""The vector n:m kernel on tensor cores for few columns: its table, what it takes, exact products on a GPU or the emulated one."""

from __future__ import annotations

import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, equal, infinite, product
from test_kernels import matrix, problem

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.vector_nm import spmm_vector_nm_tokens_tc as tokens
from spformat.backends.cuda.vector_nm.spmm_vector_nm_tokens_tc import Tile
from spformat.backends.cuda.vector_nm.vector_nm_tiles import Pattern
from spformat.formats import VectorNM
from spformat.products.roofline import H200, shared_limit

KERNEL = tokens.SpmmVectorNMTokensTensor()
PATTERNS = (
    (1, 1, 16), (5, 7, 32), (2, 4, 16), (3, 33, 48), (16, 32, 128), (8, 32, 32), (64, 64, 80), (1, 248, 16), (40, 41, 16),
)  # fmt: skip


@pytest.mark.parametrize(("n", "m", "length"), PATTERNS)
@pytest.mark.parametrize("fragments", [2, 8])
def test_the_table_names_the_line_of_every_kept_column(n: int, m: int, length: int, fragments: int) -> None:
    slab = tokens.slab_of(n, m)
    assert slab is not None
    M, K = 2 * length + 3, 2 * slab.columns + m // 2 + 1  # the last slab has fewer windows, the last window ends past K
    x = matrix(np.random.default_rng(0), "vector-nm", {"n": n, "m": m, "vector_length": length}, "float16", (M, K))
    a = VectorNM.from_dense(x, n=n, m=m, vector_length=length)
    share = tokens.share_of(length, fragments)
    places = tokens.places_of(a.indices, Pattern(M, K, n, m, length), slab, fragments)
    assert places.shape == (-(-M // (16 * fragments)), -(-a.windows // slab.windows), fragments // share, slab.padded)
    assert places.dtype == np.uint8
    dense = np.zeros((M, K + slab.columns), x.dtype)
    for tile, number, group, kept in np.argwhere(places != slab.lines - 1):
        row = (tile * fragments + group * share) * 16
        rows = np.arange(row, min(M, row + 16 * share))
        dense[rows, number * slab.columns + places[tile, number, group, kept]] = a.data[number * slab.kept + kept, rows]
    assert (dense[:, :K] == x).all()


def test_slabs_are_small_and_waste_few_kept_columns() -> None:
    """(windows, kept columns that only fill up the last step) of a slab."""
    wanted = {(8, 32): (2, 0), (16, 32): (1, 0), (2, 4): (8, 0), (5, 7): (8, 8), (64, 64): (1, 0), (12, 32): (1, 4)}
    slabs = {pattern: tokens.slab_of(*pattern) for pattern in wanted}
    assert {pattern: (s.windows, s.padded - s.kept) for pattern, s in slabs.items() if s} == wanted
    assert tokens.slab_of(1, 249) is None


def test_what_it_takes() -> None:
    def refused(**more: Any) -> str:
        params = {"n": 2, "m": 4, "vector_length": 16} | {
            k: more.pop(k) for k in ("n", "m", "vector_length") if k in more
        }
        a = VectorNM.from_dense(np.zeros((16, 256), VALUE_TYPES[more.pop("dtype", "bfloat16")].numpy), **params)
        p = problem(a, more.pop("n_columns", 9), a.dtype.name, ("col", "col"), 90).changed(**more)
        return "\n".join(KERNEL.unsupported(p))

    assert refused() == refused(M=0) == refused(K=0) == refused(M=1 << 20) == refused(sm=80) == ""
    assert "takes at most 16 columns, got up to 17" in refused(n_columns=17)
    assert "vector_length must be a multiple of 16 (the rows of a fragment), got 24" in refused(vector_length=24)
    assert "m must be at most 248 (places are bytes), got 249" in refused(m=249)
    assert "two slabs of 240:241 windows for each of 8 warps must fit in" in refused(n=240, m=241)
    assert "float32" in refused(dtype="float32")


def test_tiles_fit_and_their_clusters_run_at_the_same_time() -> None:
    a = VectorNM.from_dense(np.zeros((128, 64), np.float16), n=8, m=32, vector_length=32)
    p = problem(a, 16, "float16", ("col", "col"), 90).changed(M=4096, K=4096, nnz=4096 * 1024)
    slab, limit = tokens.slab_of(8, 32), shared_limit(90)
    assert slab is not None
    for n in (1, 8, 16):
        for tile in KERNEL.options(p.changed(n=n)):
            rows, smem = -(-p.M // tile.rows), tile.smem(slab, tokens.share_of(32, tile.fragments), True, limit)
            assert tile.splits == 1 or rows * (tile.splits - 1) < H200.clusters(1, tile.blocks)
            assert tile.blocks * (smem + 1024) <= limit + 1024
    few = {t.splits for t in KERNEL.options(p) if t.fragments == 8 and t.blocks == 1}
    assert few == {1, 2, 3}  # of 32 tiles 30 could be clusters of four


CASES = [
    # tile, pattern, M, K, N, layouts, gap, types
    (Tile(8, 16, 1, 3), (8, 32, 32), 331, 2600, 16, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (Tile(8, 16, 1, 1), (16, 32, 128), 300, 523, 13, ("row", "row"), 8, "float16", "float16"),
    (Tile(8, 16, 1, 1), (16, 32, 128), 300, 523, 13, ("row", "row"), 5, "float16", "float16"),
    (Tile(4, 16, 1, 7), (2, 4, 16), 200, 4500, 15, ("col", "row"), 8, "bfloat16", "float32"),
    (Tile(4, 16, 1, 2), (5, 7, 48), 203, 900, 16, ("row", "col"), 0, "float16", "float16"),
    (Tile(2, 8, 2, 4), (5, 7, 32), 131, 4000, 1, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (Tile(2, 8, 2, 1), (1, 248, 16), 64, 4000, 1, ("row", "row"), 0, "float16", "float16"),
    (Tile(2, 16, 1, 3), (64, 64, 80), 170, 1300, 11, ("col", "col"), 8, "bfloat16", "bfloat16"),
    (Tile(8, 8, 2, 2), (3, 33, 16), 130, 2113, 5, ("row", "row"), 3, "bfloat16", "bfloat16"),
    (Tile(8, 16, 2, 5), (12, 32, 256), 264, 2623, 14, ("col", "row"), 1, "float16", "float32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[1]} {c[4]} {c[5]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    tile, (n, m, length), M, K, N, layouts, pad, dtype, out = case
    rng, params = np.random.default_rng(N), {"n": n, "m": m, "vector_length": length}
    x = matrix(rng, "vector-nm", params, dtype, (M, K))
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    assert_exact(product(KERNEL, tile, VectorNM.from_dense(x, **params), B, out, layouts, pad), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("tile", [Tile(8, 16, 1, 1), Tile(4, 8, 1, 2), Tile(2, 8, 2, 1)], ids=str)
def test_columns_that_are_not_kept_meet_no_infinity(tile: Tile, layout: str) -> None:
    """B is infinite or NaN in rows that half of the row groups do not keep."""
    rng = np.random.default_rng(3)
    x = matrix(rng, "vector-nm", {"n": 2, "m": 4, "vector_length": 16}, "bfloat16", (136, 1036))
    B, wanted = infinite(rng, x, 60)
    a, used = VectorNM.from_dense(x, n=2, m=4, vector_length=16), slice(0, tile.cols)
    got = product(KERNEL, tile, a, np.ascontiguousarray(B[:, used]), "bfloat16", (layout, layout), 0)
    assert equal(got, wanted[:, used])


@pytest.mark.gpu
def test_a_last_slab_of_few_windows_keeps_no_values_of_the_one_before() -> None:
    """An infinite value that stayed in shared memory would be multiplied by zero: NaN where C is infinite."""
    rng = np.random.default_rng(4)
    x = np.abs(matrix(rng, "vector-nm", {"n": 2, "m": 4, "vector_length": 16}, "float16", (64, 32 * 80 + 4)))
    x[0, x[0] != 0] = np.inf
    a, B = VectorNM.from_dense(x, n=2, m=4, vector_length=16), np.ones((x.shape[1], 8), x.dtype)
    got = product(KERNEL, Tile(2, 8, 1, 1), a, B, "float16", ("row", "row"), 0)
    assert (got[0] == np.inf).all()
    assert_exact(got[1:], x[1:], B)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, source="vector_nm/spmm_vector_nm_tokens_tc.cu")
stand_in.install(90)
import numpy as np
from exact import equal, product
from test_vector_nm_tokens_tc import KERNEL, Tile, VectorNM, matrix

rng, params = np.random.default_rng(0), {{"n": 5, "m": 7, "vector_length": 32}}
x = matrix(rng, "vector-nm", params, "bfloat16", (136, 7 * 16 * 20 + 3))
B = rng.integers(-3, 4, (x.shape[1], 13)).astype(x.dtype)
wanted, a = (x.astype(np.float64) @ B.astype(np.float64)).astype(x.dtype), VectorNM.from_dense(x, **params)
three_runs(lambda: equal(product(KERNEL, Tile(4, 16, 1, 1), a, B, "bfloat16", ({layout!r}, "row"), 8), wanted), planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("layout", "old", "new"),
    [
        ("row", "cp_async_wait<Slots - 1>();", ""),
        ("col", "from += 64 / NT", "from += 32 / NT"),
        ("col", "a_from += a_next, ", ""),
        ("row", "cp_async_wait<0>();\n    __syncthreads();", ""),
    ],
    ids=["copy not waited for", "tiles of B", "slab", "ring in use"],
)
def test_a_planted_defect_is_found(layout: str, old: str, new: str) -> None:
    said = printed(PLANTED.format(layout=layout, old=old, new=new))
    assert re.search("DIFFERENT|another|in flight|of the dynamic shared memory", said)


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize("layout", ["row", "col"])
def test_without_a_defect_all_is_equal(layout: str) -> None:
    assert printed(PLANTED.format(layout=layout, old="", new="")).split() == ["equal"] * 3
