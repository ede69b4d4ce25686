"""The vector n:m kernel that expands A on its way to the registers: its table, what it takes, and exact products on a GPU or
the emulated one."""

from __future__ import annotations

import re
from typing import Any

import emulator
import numpy as np
import pytest
from test_emulator import python
from test_kernels import Guarded, matrix, on_device, problem

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.vector_nm import spmm_vector_nm_expanding_sm90a as expanding
from spformat.backends.cuda.vector_nm.vector_nm_tiles import Pattern
from spformat.backends.cuda.vector_nm.vector_nm_times import Split
from spformat.formats import VectorNM
from spformat.products.roofline import device_of

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


def test_it_is_chosen_for_few_columns_in_the_layout_of_torch() -> None:
    a = VectorNM.from_dense(np.zeros((128, 64), np.float16), n=16, m=32, vector_length=128)
    p = problem(a, 16, "float16", ("col", "col"), 90).changed(M=4096, K=4096, nnz=4096 * 2048)
    assert sf.explain(p).chosen == KERNEL.name
    assert sf.explain(p.changed(n=4096)).chosen != KERNEL.name


def test_k_tiles_that_start_anywhere_need_a_copy_of_a_column_major_b() -> None:
    assert [m for m in range(1, 65) if not expanding.starts_aligned(m)][:8] == [3, 5, 6, 7, 9, 10, 11, 12]
    a = VectorNM.from_dense(np.zeros((16, 128), np.float16), n=2, m=7, vector_length=8)
    p = problem(a, 40, "float16", ("col", "col"), 90)
    tile = KERNEL.best(p).tile
    device = device_of(p)
    copies = [KERNEL.quantities(q, tile, device)[-1] for q in (p, p.changed(b_layout="row"))]
    assert copies[0] > 0 == copies[1]


def products(
    tile: Split[expanding.Tile], a: VectorNM, x: np.ndarray[Any, Any], B: np.ndarray[Any, Any], out: str,
    layouts: tuple[str, str], pad: int,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """C of one tile, twice, the same bits and nothing written around them."""
    cp = pytest.importorskip("cupy")
    p = problem(a, B.shape[1], out, layouts, 90)
    assert not KERNEL.unsupported(p)
    plan, there = KERNEL.plan_with(a, p, tile), on_device(cp, B, layouts[0], pad)
    runs = []
    for _ in range(2):
        guarded = Guarded(cp, (x.shape[0], B.shape[1]), VALUE_TYPES[out].numpy, layouts[1], pad)
        plan(there, out=guarded.out)
        runs.append(guarded.out.get())
        assert guarded.intact(), "wrote outside C"
    assert runs[0].tobytes() == runs[1].tobytes()
    return runs[0]


def on_hopper(cp: Any) -> None:
    if int(cp.cuda.Device().compute_capability) != 90:
        pytest.skip("needs sm_90a")


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
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{expanding.TILES[c[0]]} splits {c[1]} {c[2]} {c[5]} {c[6]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    """5:7, vectors of 8 and 203 columns, column-major, by ordinary stores: where the lost kernel failed (decision 0028)."""
    on_hopper(pytest.importorskip("cupy"))
    number, splits, (n, m, length), M, K, N, layouts, pad, dtype, out = case
    rng, params = np.random.default_rng(number), {"n": n, "m": m, "vector_length": length}
    x = matrix(rng, "vector-nm", params, dtype, (M, K))
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    a = VectorNM.from_dense(x, **params).to("cuda")
    got = products(Split(expanding.TILES[number], splits), a, x, B, out, layouts, pad)
    wanted = (x.astype(np.float64) @ B.astype(np.float64)).astype(got.dtype)
    assert (got.astype(np.float64) == wanted.astype(np.float64)).all(), f"{(got != wanted).sum()} of {got.size} wrong"


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(("number", "splits"), [(0, 1), (2, 8), (3, 2), (4, 1)])
def test_columns_that_are_not_kept_meet_no_infinity(number: int, splits: int, layout: str) -> None:
    """B is infinite or NaN in rows that half of the row groups do not keep; C is as over the stored elements."""
    on_hopper(pytest.importorskip("cupy"))
    rng, (M, K, N) = np.random.default_rng(3), (136, 136, 72)
    x = matrix(rng, "vector-nm", {"n": 2, "m": 4, "vector_length": 8}, "bfloat16", (M, K))
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    B[5, 3:40], B[70, 7], B[71, 8], B[130, 50] = np.inf, -np.inf, np.nan, np.inf
    a = VectorNM.from_dense(x, n=2, m=4, vector_length=8)
    got = products(Split(expanding.TILES[number], splits), a.to("cuda"), x, B, "bfloat16", (layout, layout), 0)
    with np.errstate(invalid="ignore"):
        every = x.astype(np.float32)[:, :, None] * B.astype(np.float32)[None]
        wanted = np.where((x != 0)[:, :, None], every, 0).sum(axis=1).astype(x.dtype)
    assert 0 < np.isfinite(wanted.astype(np.float32)).sum() < wanted.size
    assert np.array_equal(got.astype(np.float32), wanted.astype(np.float32), equal_nan=True)


PLANTED = """
import sys
from emulator import stand_in
from emulator.planted import plant

planted = plant({old!r}, {new!r}, header="spformat/expanding.cuh")

stand_in.install(90)
import emulator
import numpy as np
from spformat.backends.cuda.vector_nm.vector_nm_times import Split
from spformat.formats import VectorNM
from spformat.products.roofline import device_of
from test_kernels import matrix
from test_vector_nm_expanding import expanding, products

rng, (M, K, N) = np.random.default_rng(0), (136, 816, 24)
x = matrix(rng, "vector-nm", {{"n": {n}, "m": {m}, "vector_length": 8}}, "bfloat16", (M, K))
B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
B[100, 5] = np.inf
a = VectorNM.from_dense(x, n={n}, m={m}, vector_length=8).to("cuda")
wanted = np.array(x.astype("f4") @ np.where(np.isfinite(B.astype("f4")), B.astype("f4"), 0))
wanted[:, 5] += np.where(x[:, 100] != 0, np.sign(x[:, 100].astype("f4")) * np.float32(np.inf), 0)
wanted = wanted.astype(x.dtype)
for seed in range(3):
    stand_in.OPTIONS.update(seed=seed, shuffle_threads=True)
    try:
        got = products(Split(expanding.TILES[0], {parts}), a, x, B, "bfloat16", ({layout!r}, "row"), 0)
        print("equal" if np.array_equal(got.astype("f4"), wanted.astype("f4")) else "DIFFERENT")
    except (Exception, SystemExit) as e:
        print(e)
assert any(planted)
"""


SUM = "cluster::sync();\n#pragma unroll 1"


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
        ("row", 1, "barrier::wait(empty + 8 * stage, number / STAGES - 1 & 1);", "", "."),
        ("col", 1, "BCol ? 32 : 16 * LINE", "BCol ? 64 : 16 * LINE", "not in the first line of the swizzle pattern"),
        ("row", 1, "redo(m0 + warp * 16, n0 + i * STRIP, STRIP);", ";", "DIFFERENT"),
        ("row", 4, "redo(row, col, 16);", ";", "DIFFERENT"),
        ("row", 1, "wgmma::wait<0>();", "", "DIFFERENT|in flight"),
        ("row", 1, "    if (lane == 0) tma::store_wait_read<0>();\n}", "}", "still uses its shared memory"),
        ("row", 4, SUM, SUM.partition("\n")[2], "DIFFERENT|race|another"),
    ],
    ids=[
        "not kept", "copy not waited for", "stage not free", "step of B", "infinity", "infinity in parts", "product", "store",
        "sums not there",
    ],
)  # fmt: skip
def test_a_planted_defect_is_found(layout: str, parts: int, old: str, new: str, text: str) -> None:
    # 7 does not divide the 64 columns of a k tile, so that a column-major B would be copied.
    n, m = (5, 7) if layout == "row" else (2, 4)
    done = python("-c", PLANTED.format(layout=layout, n=n, m=m, parts=parts, old=old, new=new))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(text, done.stdout), done.stdout
    assert done.stdout.split() != ["equal"] * 3


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
def test_the_emulator_refuses_boxes_that_the_copy_engine_cannot_load() -> None:
    """Without the copy of B, 5:7 would start k tiles at odd columns: an H200 answers *illegal instruction*."""
    same = "line == NONE ? zero :"
    planted = PLANTED.format(layout="col", n=5, m=7, parts=1, old=same, new=same)
    planted = planted.replace("rng, (M", "expanding.starts_aligned = lambda m: True\nrng, (M", 1)
    done = python("-c", planted)
    found = "a copy of a box that starts at no multiple of 16 bytes of its lines" in done.stdout
    assert found, done.stdout + done.stderr
