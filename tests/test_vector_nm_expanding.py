"""The vector n:m kernel that expands A on its way to the registers: its table, what it takes, and exact products on a GPU or
the emulated one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, equal, hopper, infinite, product
from test_kernels import matrix, problem

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.vector_nm import spmm_vector_nm_expanding_sm90a as expanding
from spformat.backends.cuda.vector_nm.vector_nm_tiles import Pattern
from spformat.backends.cuda.vector_nm.vector_nm_times import Split
from spformat.formats import VectorNM
from spformat.products.roofline import A100, device_of

KERNEL = expanding.SpmmVectorNMExpanding()
PATTERNS = ((1, 1, 8), (5, 7, 8), (2, 4, 16), (3, 33, 24), (16, 32, 128), (8, 32, 32), (64, 64, 40), (1, 64, 8))


@pytest.mark.parametrize(("n", "m", "length"), PATTERNS)
def test_the_table_names_the_line_of_every_kept_column(n: int, m: int, length: int) -> None:
    M, K = 2 * length + 3, 2 * (64 // m * m) + m // 2 + 1  # the last window ends past K
    x = matrix(np.random.default_rng(0), "vector-nm", {"n": n, "m": m, "vector_length": length}, "float16", (M, K))
    a = VectorNM.from_dense(x, n=n, m=m, vector_length=length)
    lines = expanding.lines_of(a.indices, Pattern(M, K, n, m, length))
    windows = 64 // m
    assert lines.shape == (-(-a.windows // windows), a.row_groups, 16, 4)
    assert lines.dtype == np.uint8
    dense = np.zeros((M, K), x.dtype)
    for tile, q, j, s in np.argwhere(lines != expanding.NONE):
        rows = np.arange(q * length, min(M, q * length + length))
        column = tile * windows * m + 16 * s + j
        dense[rows, column] = a.data[tile * windows * n + lines[tile, q, j, s], rows]
    assert (dense == x).all()


def test_what_it_takes() -> None:
    def refused(**more: Any) -> str:
        params = {"n": 2, "m": 4, "vector_length": 8} | {k: more.pop(k) for k in ("m", "vector_length") if k in more}
        a = VectorNM.from_dense(np.zeros((16, 128), VALUE_TYPES[more.pop("dtype", "bfloat16")].numpy), **params)
        p = problem(a, 40, a.dtype.name, ("col", "col"), 90).changed(**more)
        return "\n".join(KERNEL.unsupported(p))

    assert refused() == ""
    assert "m must be at most 64 (a k tile has whole windows), got 65" in refused(m=65)
    assert "vector_length must be a multiple of 8 (the lines of ldmatrix), got 12" in refused(vector_length=12)
    assert "needs sm_90a (wgmma), got sm_80" in refused(sm=80)
    assert "A must not be empty" in refused(M=0)
    assert "float32" in refused(dtype="float32")


def test_it_is_chosen_for_tens_of_columns_in_the_layout_of_torch() -> None:
    """Up to 16 columns another kernel is about as fast."""
    a = VectorNM.from_dense(np.zeros((128, 64), np.float16), n=16, m=32, vector_length=128)
    p = problem(a, 24, "float16", ("col", "col"), 90).changed(M=4096, K=4096, nnz=4096 * 2048)
    assert sf.explain(p).chosen == KERNEL.name
    assert sf.explain(p.changed(n=4096)).chosen != KERNEL.name


def test_parts_of_k_are_clusters_that_run_at_the_same_time() -> None:
    """32 tiles of 128 rows: 39 clusters of three run at a time on an H200, and 30 of four."""
    a = VectorNM.from_dense(np.zeros((128, 64), np.float16), n=16, m=32, vector_length=128)
    p = problem(a, 128, "float16", ("col", "col"), 90).changed(M=4096, K=4096, nnz=4096 * 2048)
    device = device_of(p)
    assert [device.clusters(size) for size in (1, 3, 4)] == [132, 39, 30]
    assert device.clusters(4, 2) == 60
    assert [A100.clusters(size) for size in (1, 4)] == [108, 27]  # blocks that are no clusters
    assert {t.splits for t in KERNEL.options(p) if t.tile.cols == 128} == {1, 2, 3}
    assert {t.splits for t in KERNEL.options(p.changed(M=1920)) if t.tile.cols == 128} == {1, 2, 3, 4, 5, 6, 7, 8}
    for t in KERNEL.options(p):
        assert (
            t.splits == 1 or KERNEL.quantities(p, t, device)[1] < KERNEL.quantities(p, replace(t, splits=1), device)[1]
        )


def test_no_cluster_waits_for_others() -> None:
    """2304 x 2048 with 942 columns, column-major: eight parts of 270 tiles took 75 us on an H100, whole ones of 160 columns 29."""
    a = VectorNM.from_dense(np.zeros((128, 64), np.float16), n=16, m=32, vector_length=128)
    p = problem(a, 942, "float16", ("col", "col"), 90).changed(M=2304, K=2048, nnz=2304 * 1024)
    device = device_of(p)
    for q in (p, p.changed(n=232), p.changed(n=64)):
        tiles = {t: 18 * -(-q.n // t.tile.cols) for t in KERNEL.options(q)}
        assert all(t.splits == 1 or tiles[t] <= device.clusters(t.splits, t.tile.resident) for t in tiles)
        assert {t.tile for t in tiles if t.splits == 1} == {t.tile for t in tiles}
    assert {t.splits for t in KERNEL.options(p)} == {1}


def test_k_tiles_that_start_anywhere_need_a_copy_of_a_column_major_b() -> None:
    assert [m for m in range(1, 65) if not expanding.starts_aligned(m)][:8] == [3, 5, 6, 7, 9, 10, 11, 12]
    a = VectorNM.from_dense(np.zeros((16, 128), np.float16), n=2, m=7, vector_length=8)
    p = problem(a, 40, "float16", ("col", "col"), 90)
    tile = KERNEL.best(p).tile
    device = device_of(p)
    copies = [KERNEL.quantities(q, tile, device)[-1] for q in (p, p.changed(b_layout="row"))]
    assert copies[0] > 0 == copies[1]


CASES = [
    # tile, parts, pattern, M, K, N, layouts, gap, types
    (0, 1, (5, 7, 8), 300, 131, 13, ("col", "row"), 0, "bfloat16", "bfloat16"),
    (0, 8, (8, 32, 32), 331, 523, 16, ("row", "col"), 8, "float16", "float16"),
    (0, 1, (16, 32, 128), 131, 264, 16, ("col", "col"), 8, "bfloat16", "bfloat16"),
    (0, 1, (1, 64, 8), 136, 640, 24, ("row", "row"), 0, "float16", "float32"),
    (1, 1, (3, 33, 24), 200, 141, 32, ("row", "row"), 0, "bfloat16", "bfloat16"),
    (1, 4, (2, 4, 16), 128, 800, 40, ("col", "col"), 8, "float16", "float32"),
    (2, 1, (64, 64, 40), 130, 200, 72, ("col", "col"), 6, "bfloat16", "bfloat16"),
    (2, 1, (1, 1, 8), 128, 64, 64, ("row", "col"), 0, "float16", "float16"),
    (3, 1, (12, 32, 256), 264, 523, 136, ("row", "row"), 0, "bfloat16", "bfloat16"),
    (3, 1, (5, 7, 8), 331, 523, 203, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (3, 1, (5, 7, 8), 331, 523, 203, ("col", "col"), 5, "float16", "float16"),
    (4, 1, (5, 7, 8), 331, 528, 203, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (4, 2, (4, 16, 64), 136, 264, 264, ("row", "row"), 8, "float16", "float16"),
    (2, 8, (5, 7, 8), 331, 523, 61, ("col", "col"), 5, "bfloat16", "bfloat16"),
    (3, 8, (2, 4, 8), 203, 300, 150, ("row", "col"), 0, "float16", "float32"),
    (4, 4, (2, 4, 8), 203, 300, 203, ("col", "row"), 4, "bfloat16", "bfloat16"),
    (5, 1, (16, 32, 128), 200, 520, 90, ("row", "row"), 6, "bfloat16", "bfloat16"),
    (5, 3, (8, 32, 32), 200, 520, 190, ("col", "col"), 0, "float16", "float16"),
    (6, 1, (8, 32, 32), 136, 392, 151, ("row", "row"), 1, "bfloat16", "bfloat16"),
    (6, 1, (16, 32, 128), 200, 520, 161, ("col", "col"), 8, "float16", "float32"),
    (6, 2, (2, 4, 8), 203, 264, 136, ("row", "col"), 0, "bfloat16", "bfloat16"),
    (7, 1, (8, 32, 32), 200, 520, 270, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (7, 3, (5, 7, 8), 331, 523, 203, ("row", "row"), 5, "float16", "float32"),
    (7, 1, (2, 4, 8), 136, 64, 250, ("row", "col"), 0, "bfloat16", "bfloat16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{expanding.TILES[c[0]]} splits {c[1]} {c[2]} {c[5]} {c[6]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    """5:7, vectors of 8 and 203 columns, column-major, by ordinary stores: where the lost kernel failed (decision 0028)."""
    number, splits, (n, m, length), M, K, N, layouts, pad, dtype, out = case
    rng, params = np.random.default_rng(number), {"n": n, "m": m, "vector_length": length}
    x = matrix(rng, "vector-nm", params, dtype, (M, K))
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    a = VectorNM.from_dense(x, **params)
    assert_exact(product(KERNEL, Split(expanding.TILES[number], splits), a, B, out, layouts, pad), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(("number", "splits"), [(0, 1), (2, 8), (3, 2), (4, 1)])
def test_columns_that_are_not_kept_meet_no_infinity(number: int, splits: int, layout: str) -> None:
    """B is infinite or NaN in rows that half of the row groups do not keep."""
    hopper()
    rng = np.random.default_rng(3)
    x = matrix(rng, "vector-nm", {"n": 2, "m": 4, "vector_length": 8}, "bfloat16", (136, 136))
    B, wanted = infinite(rng, x, 72)
    a, tile = VectorNM.from_dense(x, n=2, m=4, vector_length=8), Split(expanding.TILES[number], splits)
    assert equal(product(KERNEL, tile, a, B, "bfloat16", (layout, layout), 0), wanted)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, header="spformat/expanding.cuh")
stand_in.install(90)
import numpy as np
from exact import equal, infinite, product
from test_vector_nm_expanding import KERNEL, Split, VectorNM, expanding, matrix

rng, params = np.random.default_rng(0), {{"n": {n}, "m": {m}, "vector_length": 8}}
x = matrix(rng, "vector-nm", params, "bfloat16", (136, 816))
(B, wanted), a, tile = infinite(rng, x, 72), VectorNM.from_dense(x, **params), Split(expanding.TILES[0], {parts})
three_runs(lambda: equal(product(KERNEL, tile, a, B, "bfloat16", ({layout!r}, "row"), 0), wanted), planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("layout", "parts", "old", "new", "text"),
    [
        ("row", 1, "line == NONE ? zero :", "", "DIFFERENT"),
        (
            "row",
            1,
            "barrier::wait(full + 8 * stage, number / STAGES & 1);",
            "",
            "more arrivals at an mbarrier than its phase has",
        ),
        ("row", 1, "barrier::wait(empty + 8 * stage, number / STAGES - 1 & 1);", "", "more arrivals|DIFFERENT"),
        ("col", 1, "BCol ? 32 : 16 * LINE", "BCol ? 64 : 16 * LINE", "not in the first line of the swizzle pattern"),
        ("row", 1, "redo(warp, row, n0 + (__ffs(not_finite) - 1) * STRIP, STRIP);", ";", "DIFFERENT"),
        ("row", 4, "redo(of_warp, row, col, 16 * RUN);", ";", "DIFFERENT"),
        ("row", 1, "wgmma::wait<0>();", "", "DIFFERENT|in flight"),
        ("row", 1, "    if (lane == 0) tma::store_wait_read<0>();\n}", "}", "still uses its shared memory"),
        ("row", 4, "barrier::wait_cluster(bar, 0);", "", "DIFFERENT|still uses its shared memory"),
    ],
    ids=[
        "not kept", "copy not waited for", "stage not free", "step of B", "infinity", "infinity in parts", "product", "store",
        "sums not there",
    ],
)  # fmt: skip
def test_a_planted_defect_is_found(layout: str, parts: int, old: str, new: str, text: str) -> None:
    # 7 does not divide the 64 columns of a k tile, so that a column-major B would be copied.
    n, m = (5, 7) if layout == "row" else (2, 4)
    assert re.search(text, printed(PLANTED.format(layout=layout, n=n, m=m, parts=parts, old=old, new=new)))


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(("layout", "parts"), [("row", 1), ("row", 4), ("col", 1)])
def test_without_a_defect_all_is_equal(layout: str, parts: int) -> None:
    program = PLANTED.format(layout=layout, n=2, m=4, parts=parts, old="", new="")
    assert printed(program).split() == ["equal"] * 3


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
def test_the_emulator_refuses_boxes_that_the_copy_engine_cannot_load() -> None:
    """Without the copy of B, 5:7 would start k tiles at odd columns: an H200 answers *illegal instruction*."""
    program = PLANTED.format(layout="col", n=5, m=7, parts=1, old="", new="")
    reported = printed(program.replace("rng, params", "expanding.starts_aligned = lambda m: True\nrng, params", 1))
    assert "a copy of a box that starts at no multiple of 16 bytes of its lines" in reported
