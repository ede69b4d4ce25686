"""CSR and ELL buckets in records with few columns: what the kernel takes, its tiles, exact products on a GPU or the emulated one."""

from __future__ import annotations

import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, equal, hopper, matrix, product
from test_kernels import on_device, problem

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.csr import spmm_csr_records as few
from spformat.formats import CSR
from spformat.formats.ell_buckets import ELLBuckets
from spformat.products.problem import Problem
from spformat.products.roofline import shared_limit

KERNEL = few.SpmmCSRRecords()


def layer(M: int, K: int, n: int, share: float = 0.1, **changes: Any) -> Problem:
    """A linear layer of which a share is stored, bfloat16, torch's layouts."""
    nnz = round(M * K * share)
    p = Problem.product("csr", (), M, K, n, nnz, *["bfloat16"] * 3, "col", "col", device="cuda", sm=90)
    return p.changed(**changes)


# ------------------------------------------------------------------ without a GPU


def test_what_it_takes() -> None:
    assert KERNEL.unsupported(layer(4096, 4096, 4)) == KERNEL.unsupported(layer(0, 64, 1)) == []
    (refusal,) = KERNEL.unsupported(layer(64, 64, 5))
    assert refusal == "takes at most 4 columns, got up to 5"
    (refusal,) = KERNEL.unsupported(layer(64, 200000, 1))
    fits = few.most_rows_of_b(layer(64, 200000, 1))
    assert refusal == f"keeps columns of B in shared memory: K must be at most {fits:,}, got 200,000"
    assert few.tile(layer(64, fits, 1), 1, 1, few.LEAST_WARPS, 32) is not None
    assert few.tile(layer(64, fits + 1, 1), 1, 1, few.LEAST_WARPS, 32) is None
    (refusal,) = KERNEL.unsupported(layer(1 << 23, 4096, 1).changed(nnz=1 << 34))
    assert refusal == f"records must stay below 64 GiB, got nnz = {1 << 34}"
    assert "float32" in "".join(KERNEL.unsupported(layer(64, 64, 1, a_dtype="float32", b_dtype="float32")))


@pytest.mark.parametrize("n", range(1, few.MAX_COLS + 1))
@pytest.mark.parametrize("share", [0.04, 0.1, 1])
def test_tiles_fit(n: int, share: float) -> None:
    limit = shared_limit(90)
    for K in (1, 300, 4096, 14336, 28000):
        p = layer(512, K, n, share)
        tiles = KERNEL.options(p)
        assert tiles
        assert len({str(t) for t in tiles}) == len(tiles)
        for t in tiles:
            assert t.resident * (few.smem(p, t.columns, t.parts * t.warps) + 1024) <= limit + 1024
            assert t.resident * t.threads <= 1024
            assert t.parts * t.warps % 8 == 0
            assert t.rows == 16 * t.parts * 32 // t.lanes
            loaded = 4 * t.lanes * few.loads_of(p, t.lanes)  # items of a record that need no further load
            assert loaded >= min(1024 * share, 4 * t.lanes * few.LONGEST)


# ------------------------------------------------------------------ exact products

CASES = [
    # columns, parts, warps, lanes, share of nonzeros, M, K, N, layouts, gap, types
    (1, 1, 8, 32, 0.1, 331, 4001, 1, ("row", "row"), 0, "bfloat16", "bfloat16"),
    (1, 1, 8, 16, 0.04, 331, 6500, 1, ("row", "row"), 8, "float16", "float16"),
    (1, 2, 8, 16, 0.05, 70, 2600, 1, ("col", "col"), 3, "float16", "float32"),
    (1, 4, 8, 32, 0.3, 33, 523, 3, ("row", "col"), 0, "float16", "float16"),
    (2, 1, 8, 32, 1.0, 131, 523, 2, ("col", "row"), 0, "float16", "float16"),
    (2, 2, 4, 16, 0.1, 300, 1523, 3, ("col", "row"), 8, "bfloat16", "float32"),
    (2, 1, 16, 32, 0.1, 300, 1528, 2, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (4, 1, 16, 16, 0.2, 300, 523, 4, ("row", "row"), 0, "bfloat16", "bfloat16"),
    (4, 4, 4, 32, 0.5, 100, 777, 3, ("col", "col"), 5, "float16", "float16"),
    (4, 1, 8, 32, 0.02, 17, 18000, 3, ("row", "col"), 1, "bfloat16", "bfloat16"),
    (1, 1, 8, 16, 0.0, 17, 70, 1, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (2, 4, 8, 32, 0.1, 1, 1, 4, ("col", "row"), 0, "float16", "float32"),
]


def tile_of(p: Problem, columns: int, parts: int, warps: int, lanes: int) -> few.Tile:
    tile = few.tile(p, columns, parts, warps, lanes)
    assert tile is not None
    return tile


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[:4]} {c[4]} {c[7]} {c[8]}")
@pytest.mark.parametrize("fmt", [CSR, ELLBuckets])
def test_integers_are_exact(fmt: Any, case: tuple[Any, ...]) -> None:
    *extents, share, M, K, N, layouts, gap, dtype, out = case
    rng = np.random.default_rng(N)
    x = matrix(rng, M, K, share, dtype)
    B = rng.integers(-3, 4, (K, N)).astype(VALUE_TYPES[dtype].numpy)
    a = fmt.from_dense(x)
    assert_exact(product(KERNEL, tile_of(problem(a, N, out, layouts, 90), *extents), a, B, out, layouts, gap), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", [16, 32])
def test_parts_of_any_number_of_items(lanes: int) -> None:
    """0 to 200 items in 16 rows x 64 columns: each number of repeated items, and of loads."""
    rng = np.random.default_rng(7)
    x = np.zeros((16 * 67, 192), np.float16)
    for i, part in enumerate(x.reshape(67, 16, 3, 64).transpose(0, 2, 1, 3).reshape(201, -1)):
        part[rng.permutation(1024)[:i]] = rng.choice([-2, -1, 1, 2, 3], i)
        x[i // 3 * 16 : i // 3 * 16 + 16, i % 3 * 64 : i % 3 * 64 + 64] = part.reshape(16, 64)
    B = rng.integers(-3, 4, (192, 2)).astype(np.float16)
    a, layouts = CSR.from_dense(x), ("col", "col")
    tile = tile_of(problem(a, 2, "float16", layouts, 90), 2, 1, 8, lanes)
    assert_exact(product(KERNEL, tile, a, B, "float16", layouts, 0), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
def test_only_what_is_stored_meets_infinity(layout: str) -> None:
    """A stored zero is an item as any other; the last item of a part is repeated in records, but multiplied once."""
    hopper()
    rng = np.random.default_rng(3)
    x = matrix(rng, 136, 200, 0.1, "bfloat16")
    a = CSR.from_dense(x)
    data = a.data.copy()
    data[::7] = 0
    stored = CSR(shape=a.shape, indptr=a.indptr, indices=a.indices, data=data)
    B = rng.integers(-3, 4, (200, 3)).astype(x.dtype)
    B[5, 1], B[70, 2], B[131, 0] = np.inf, -np.inf, np.nan
    rows = np.repeat(np.arange(136), np.diff(a.indptr))
    wanted = np.zeros((136, 3), np.float32)
    with np.errstate(invalid="ignore"):
        np.add.at(wanted, rows, data.astype(np.float32)[:, None] * B[a.indices].astype(np.float32))
    tile = tile_of(problem(stored, 3, "bfloat16", (layout, layout), 90), 4, 2, 8, 32)
    got = product(KERNEL, tile, stored, B, "bfloat16", (layout, layout), 0)
    assert np.isnan(wanted).any()
    assert 0 < np.isfinite(wanted).sum() < wanted.size
    assert equal(got, wanted.astype(x.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
def test_alpha_beta_and_bias(layout: str) -> None:
    cp, rng = hopper(), np.random.default_rng(2)
    x = matrix(rng, 70, 300, 0.1, "float16")
    B = rng.integers(-3, 4, (300, 3)).astype(np.float16)
    bias, before = rng.integers(-9, 9, 70).astype(np.float16), rng.integers(-9, 9, (70, 3)).astype(np.float16)
    a = CSR.from_dense(x).validate().to("cuda")
    plan = KERNEL.plan(a, problem(a, 3, "float16", (layout, layout), 90).changed(epilogue=True))
    there = on_device(cp, B, layout, 3)
    for alpha, beta in ((2.0, -1.0), (0.0, 1.0), (1.0, 0.0)):
        out = cp.asarray(np.ascontiguousarray(before.T)).T if layout == "col" else cp.asarray(before)
        plan(there, out=out, alpha=alpha, beta=beta, bias=cp.asarray(bias))
        wanted = alpha * (x.astype(np.float64) @ B) + beta * before + bias[:, None]
        np.testing.assert_array_equal(out.get().astype(np.float64), wanted)


# ------------------------------------------------------------------ defects

PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, source="csr/spmm_csr_records.cu")
stand_in.install(90)
import numpy as np
from exact import equal, matrix, problem, product
from test_spmm_csr_records import CSR, KERNEL, tile_of

rng = np.random.default_rng(0)
x = matrix(rng, 72, {K}, {share}, "bfloat16")
B = rng.integers(-3, 4, ({K}, {columns})).astype(x.dtype)
a, layouts = CSR.from_dense(x), ("col", "col")
tile = tile_of(problem(a, {columns}, "float32", layouts, 90), {columns}, {parts}, 8, {lanes})
wanted = x.astype(np.float64) @ B.astype(np.float64)
three_runs(lambda: equal(product(KERNEL, tile, a, B, "float32", layouts, 0), wanted), planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("columns", "parts", "lanes", "share", "K", "old", "new"),
    [
        (1, 1, 32, 0.1, 203, "four.w != four.z ? sums + sums_row<NC>(four.w) : unused", "sums + sums_row<NC>(four.w)"),
        (2, 2, 16, 0.3, 203, "i < end; i += LANES", "false; i += LANES"),
        (1, 1, 16, 0.05, 6500, "part_of(start_of(step)), fetch_first();", ";"),
        (1, 1, 32, 0.1, 203, "if (own + EACH > K)", "if (false)"),
        (2, 1, 32, 0.1, 203, "own < K && c < left", "own < K - 1 && c < left"),
        (1, 2, 16, 0.1, 203, "lane / 16 * 16 + (lane + i) % 16", "(lane + i) % 16"),
        (4, 1, 32, 0.1, 203, "fetch_first);\n    __syncthreads();", "fetch_first);\n"),
    ],
    ids=["repeated items", "long records", "second batch", "last rows", "single elements", "sums of lanes", "barrier"],
)
def test_a_planted_defect_is_found(
    columns: int, parts: int, lanes: int, share: float, K: int, old: str, new: str
) -> None:
    source = PLANTED.format(columns=columns, parts=parts, lanes=lanes, share=share, K=K, old=old, new=new)
    assert re.search("DIFFERENT|race", printed(source))


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(("lanes", "K"), [(32, 203), (16, 6500)])
def test_without_a_defect_all_is_equal(lanes: int, K: int) -> None:
    source = PLANTED.format(columns=1, parts=2, lanes=lanes, share=0.1, K=K, old="T", new="T")
    assert printed(source).split() == ["equal"] * 3
