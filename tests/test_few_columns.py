"""BSR and Bitmask in float32 with few columns of B: tiles, how B is loaded, exact products on a GPU or the emulated one."""

from __future__ import annotations

import itertools
import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, equal, infinite, product
from test_kernels import matrix

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.bitmask import spmm_bitmask_mma as mma
from spformat.backends.cuda.bitmask import spmm_bitmask_tokens as tokens
from spformat.backends.cuda.bsr import spmm_bsr_tokens as bsr
from spformat.backends.cuda.runtime.few_columns import ALONG_K, ALONG_N, SINGLE, expected_way, way_of
from spformat.formats import BSR, DBSR, Bitmask
from spformat.products.problem import Problem
from spformat.products.roofline import shared_limit

TOKENS, TENSOR = tokens.SpmmBitmaskTokens(), mma.SpmmBitmaskTF32()
needs_emulator = pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")


def layer(format: str, M: int, K: int, n: int, density: float, layout: str, **params: Any) -> Problem:
    """A float32 layer with B and C in one layout."""
    nnz = int(M * K * density)
    return Problem.product(
        format, tuple(params.items()), M, K, n, nnz, *["float32"] * 3, layout, layout, device="cuda", sm=90
    )


# ------------------------------------------------------------------ without a GPU


def test_how_b_is_loaded() -> None:
    """Values along K wherever they lie side by side and start on a boundary, else along a row, else one by one."""
    assert way_of(4, 4, 8, 0, 9, 1, 100) == ALONG_K
    assert way_of(4, 4, 8, 8, 9, 1, 100) == way_of(4, 4, 8, 0, 9, 1, 102) == SINGLE
    assert way_of(4, 4, 8, 0, 1, 1, 102) == ALONG_K  # one column: no other line must be aligned
    assert way_of(4, 4, 8, 0, 12, 12, 1) == way_of(4, 4, 2, 8, 12, 14, 1) == way_of(2, 8, 8, 0, 8, 8, 1) == ALONG_N
    assert way_of(4, 4, 8, 0, 12, 14, 1) == way_of(4, 4, 8, 8, 12, 12, 1) == way_of(4, 4, 1, 0, 8, 8, 1) == SINGLE
    assert way_of(2, 8, 8, 0, 12, 12, 1) == SINGLE  # eight halves would leave 16 bytes
    assert expected_way(layer("bitmask", 64, 64, 7, 0.3, "row"), 4, 2) == SINGLE
    assert expected_way(layer("bitmask", 64, 64, 7, 0.3, "col"), 4, 2) == ALONG_K


@pytest.mark.parametrize("kernel", [TOKENS, TENSOR], ids=lambda k: k.name)
def test_what_bitmask_takes(kernel: Any) -> None:
    most = 32 if kernel is TOKENS else 256
    p = layer("bitmask", 64, 64, most, 0.3, "row")
    assert kernel.unsupported(p) == []
    (refusal,) = kernel.unsupported(p.changed(n=most + 1))
    assert refusal == f"takes at most {most} columns, got up to {most + 1}"
    half = Problem.product("bitmask", (), 64, 64, 8, 999, *["bfloat16"] * 3, "row", "row", device="cuda", sm=90)
    assert "a.dtype must be" in "".join(kernel.unsupported(half))


def test_tiles_of_bitmask_fit() -> None:
    for M in (1, 64, 1000, 2112, 4096, 100000):
        for n in (1, 2, 3, 8, 9, 31):
            p = layer("bitmask", M, 512, n, 0.3, "row")
            (t,) = TOKENS.options(p)
            assert t.cols >= min(n, 8)
            assert t.warps in (8, 16)
            assert t.warps * t.resident == 16
            assert t.warps * t.rows_each * t.cols * 4 + t.warps * 4 * t.rows_each * 8 <= 48 << 10
            for x in TENSOR.options(p.changed(n=8 * n)):
                assert x.resident * (x.smem + x.table + 1024) <= shared_limit(90) + 1024
                assert x.cols >= min(8 * n, 32)


@pytest.mark.parametrize("layout", ["row", "col"])
def test_they_are_chosen(layout: str) -> None:
    """One column is for the CUDA cores, tens of columns for tensor cores."""
    for n, kernel in ((1, TOKENS), (16, TENSOR), (64, TENSOR)):
        assert sf.explain(layer("bitmask", 3072, 3072, n, 0.3, layout), backend="cuda").chosen == kernel.name
    for n in (1, 8, 16):
        blocks = layer("bsr", 5120, 5120, n, 0.2, layout, blocksize=(32, 32))
        assert sf.explain(blocks, backend="cuda").chosen == bsr.KERNEL.name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_tiles_of_blocks(dtype: str, layout: str) -> None:
    """Every tile holds the columns, its sums fit into static shared memory, and names are distinct."""
    for height, n in itertools.product((16, 32, 48), (1, 9, 17, 33, 64)):
        p = Problem.product(
            "bsr", (("blocksize", (height, 32)),), 1024, 4096, n, 1 << 19, *[dtype] * 3, layout, layout, device="cuda", sm=90
        )  # fmt: skip
        some = bsr.KERNEL.options(p)
        assert len({str(t) for t in some}) == len(some) > 1
        for t in some:
            assert n <= t.cols <= max(8, n + 7 if layout == "col" else 2 * n)
            assert height % t.rows == 0
            assert t.warps * t.rows * t.cols * 4 <= 48 << 10


# ------------------------------------------------------------------ exact products

BITMASK = [
    # kernel, tile, M, K, N, layouts, gap, type
    (TOKENS, tokens.Tile(16, 1, 1, 8), 70, 1100, 1, ("row", "row"), 0, "float32"),
    (TOKENS, tokens.Tile(16, 2, 1, 16), 33, 1100, 2, ("col", "row"), 0, "float32"),
    (TOKENS, tokens.Tile(16, 2, 1, 8), 33, 999, 3, ("row", "col"), 0, "float32"),
    (TOKENS, tokens.Tile(8, 4, 2, 4), 33, 512, 4, ("row", "row"), 0, "float32"),
    (TOKENS, tokens.Tile(8, 8, 2, 4), 40, 513, 19, ("row", "row"), 1, "float32"),
    (TOKENS, tokens.Tile(8, 8, 1, 16), 40, 513, 13, ("col", "col"), 3, "float32"),
    (TOKENS, tokens.Tile(8, 1, 2, 4), 40, 513, 1, ("col", "col"), 1, "float64"),
    (TOKENS, tokens.Tile(4, 4, 4, 2), 40, 513, 6, ("row", "row"), 0, "float64"),
    (TENSOR, mma.Tile(2, 4, 1, 8), 70, 1100, 32, ("row", "row"), 0, "float32"),
    (TENSOR, mma.Tile(2, 4, 1, 8), 70, 1100, 33, ("row", "col"), 1, "float32"),
    (TENSOR, mma.Tile(1, 4, 1, 16), 70, 1100, 41, ("col", "row"), 0, "float32"),
    (TENSOR, mma.Tile(1, 2, 2, 4), 70, 130, 15, ("col", "col"), 3, "float32"),
    (TENSOR, mma.Tile(2, 2, 2, 4), 70, 200, 16, ("row", "col"), 4, "float32"),
    (TENSOR, mma.Tile(1, 1, 1, 4), 70, 999, 8, ("row", "row"), 1, "float32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", BITMASK, ids=lambda c: f"{c[0].name} {c[1]} {c[4]} {c[5]} {c[7]}")
def test_integers_of_bitmask_are_exact(case: tuple[Any, ...]) -> None:
    kernel, tile, M, K, N, layouts, gap, dtype = case
    rng = np.random.default_rng(N)
    x = matrix(rng, "bitmask", {}, dtype, (M, K))
    x[3], x[5] = 0, 1  # a row without values and a full one
    B = rng.integers(-3, 4, (K, N)).astype(VALUE_TYPES[dtype].numpy)
    assert_exact(product(kernel, tile, Bitmask.from_dense(x), B, dtype, layouts, gap), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [TOKENS, TENSOR], ids=lambda k: k.name)
@pytest.mark.parametrize("layout", ["row", "col"])
def test_zeros_of_bitmask_meet_no_infinity(kernel: Any, layout: str) -> None:
    """Columns of A without values, whose rows of B are infinite: their zeros are in the tiles, yet not in the result."""
    rng = np.random.default_rng(3)
    x = matrix(rng, "bitmask", {}, "float32", (70, 301))
    B, wanted = (m[:, : 32 if kernel is TOKENS else 60] for m in infinite(rng, x, 60))
    tile = tokens.Tile(8, 8, 2, 4) if kernel is TOKENS else mma.Tile(2, 2, 1, 8)
    assert equal(product(kernel, tile, Bitmask.from_dense(x), B, "float32", (layout, layout), 0), wanted)


@pytest.mark.gpu
def test_largest_numbers_of_bitmask_are_not_infinite() -> None:
    """The largest float rounds up to infinity as a TF32 number; the sum is then computed again."""
    x = np.zeros((32, 64), np.float32)
    x[np.arange(32), np.arange(32)] = np.finfo(np.float32).max
    B = np.zeros((64, 16), np.float32)
    B[:, :8] = 1
    c = product(TENSOR, mma.Tile(2, 2, 1, 4), Bitmask.from_dense(x), B, "float32", ("row", "row"), 0)
    np.testing.assert_array_equal(np.asarray(c), x @ B)


BLOCKS = [
    # format, blocksize, tile, M, K, N, layouts, gap, types
    (BSR, (32, 32), bsr.Tile(1, 1, 8, 4), 200, 333, 1, ("col", "col"), 0, "float32", "float32"),
    (BSR, (32, 32), bsr.Tile(2, 4, 8, 2), 200, 333, 32, ("row", "row"), 0, "float32", "float32"),
    (BSR, (32, 48), bsr.Tile(2, 8, 4, 1), 200, 333, 43, ("row", "col"), 1, "float32", "float32"),
    (BSR, (16, 16), bsr.Tile(1, 8, 4, 1), 200, 333, 44, ("row", "row"), 0, "float32", "float32"),
    (DBSR, (16, 64), bsr.Tile(1, 2, 8, 4), 200, 332, 9, ("col", "row"), 0, "float32", "float32"),
    (DBSR, (64, 16), bsr.Tile(1, 2, 8, 4), 200, 332, 16, ("row", "col"), 0, "float32", "float32"),
    (BSR, (32, 32), bsr.Tile(2, 8, 4, 1), 200, 333, 64, ("row", "row"), 0, "bfloat16", "bfloat16"),
    (BSR, (64, 64), bsr.Tile(2, 4, 8, 2), 200, 333, 28, ("row", "col"), 0, "float16", "float32"),
    (DBSR, (16, 16), bsr.Tile(1, 2, 8, 4), 200, 333, 10, ("row", "row"), 0, "bfloat16", "bfloat16"),
    (BSR, (32, 32), bsr.Tile(1, 3, 16, 1), 200, 336, 19, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (BSR, (64, 64), bsr.Tile(2, 5, 8, 1), 200, 335, 40, ("col", "row"), 0, "float16", "float16"),
    (DBSR, (16, 48), bsr.Tile(1, 7, 4, 2), 200, 336, 55, ("col", "col"), 0, "float32", "float32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", BLOCKS, ids=lambda c: f"{c[0].__name__} {c[1]} {c[2]} {c[5]} {c[6]} {c[8]}")
def test_integers_of_blocks_are_exact(case: tuple[Any, ...]) -> None:
    kind, blocksize, tile, M, K, N, layouts, gap, dtype, out = case
    rng = np.random.default_rng(N)
    x = matrix(rng, kind.name, {"blocksize": blocksize}, dtype, (M, K))
    B = rng.integers(-3, 4, (K, N)).astype(VALUE_TYPES[dtype].numpy)
    assert_exact(product(bsr.KERNEL, tile, kind.from_dense(x, blocksize=blocksize), B, out, layouts, gap), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", [("row", "row"), ("col", "col")])
def test_float32_blocks_keep_22_bits_and_infinities(layouts: tuple[str, str]) -> None:
    """The small products of an infinity are NaN; the result is infinite, as IEEE arithmetic has it."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(64, 96)).astype(np.float32)
    B = rng.normal(size=(96, 8)).astype(np.float32)
    a, t = BSR.from_dense(x, blocksize=(32, 32)), bsr.Tile(1, 1, 8, 4)
    exact = x.astype(np.float64) @ B.astype(np.float64)
    bound = (2.0**-20) * (np.abs(x).astype(np.float64) @ np.abs(B))
    assert (np.abs(np.asarray(product(bsr.KERNEL, t, a, B, "float32", layouts, 0)) - exact) <= bound).all()
    B[7, 2] = np.inf
    c = np.asarray(product(bsr.KERNEL, t, a, B, "float32", layouts, 0))
    np.testing.assert_array_equal(c[:, 2], np.copysign(np.inf, x[:, 7]))
    assert np.isfinite(np.delete(c, 2, 1)).all()


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, source={source!r})
stand_in.install(90)
import numpy as np
from exact import equal, product
from test_few_columns import BSR, TENSOR, TOKENS, Bitmask, bsr, matrix, mma, tokens

rng = np.random.default_rng(0)
format, kernel, tile, params = {{
    "bsr": (BSR, bsr.KERNEL, bsr.Tile(2, 4, 8, 2), {{"blocksize": (32, 32)}}),
    "tokens": (Bitmask, TOKENS, tokens.Tile(8, 8, 2, 4), {{}}),
    "mma": (Bitmask, TENSOR, mma.Tile(2, 2, 1, 4), {{}}),
}}[{which!r}]
x = matrix(rng, format.name, params, "float32", (100, 701))
B = rng.integers(-3, 4, (701, 28)).astype(np.float32)
wanted, a = x.astype(np.float64) @ B, format.from_dense(x, **params)
three_runs(lambda: equal(product(kernel, tile, a, B, "float32", ({layout!r}, "col"), {gap}), wanted), planted)
"""
HERE = "bsr/spmm_bsr_tokens.cu", "bitmask/spmm_bitmask_tokens.cu", "bitmask/spmm_bitmask_mma.cu"


@needs_emulator
@pytest.mark.parametrize(
    ("which", "old", "new", "layout", "gap"),
    [
        ("bsr", "acc.multiply(x[u], b[j], j)", "acc.multiply(x[u], b[0], j)", "row", 0),
        ("bsr", "column_of<Way, NT>(of % 4 * 2 + i % 2, fragment % NT)", "fragment % NT * 8 + of % 4 * 2 + i % 2", "row", 0),
        ("bsr", "mma_m16n8k8_tf32(high[m][j], a, b_high[0], b_high[1])", "", "col", 3),
        ("tokens", "mask[r] & bit0 ? two[r] : one[r]", "two[r]", "row", 0),
        ("tokens", "row.y + __popc(row.x & below)", "row.y", "col", 0),
        ("tokens", "            __syncwarp();  // of two", "            // of two", "row", 1),
        ("mma", "from + first, second", "from + 1, second", "col", 0),
        ("mma", "^ (row % 2 * 4)", "^ 0", "row", 0),
        ("mma", "        __syncthreads();  // the sums take the place of the tiles\n", "", "col", 1),
    ],
    ids=[
        "fragment of B", "columns of C", "a product left out", "value of the second column", "rank of a value",
        "table not waited for", "value of the second column again", "exchanged units", "tiles overwritten",
    ],
)  # fmt: skip
def test_a_planted_defect_is_found(which: str, old: str, new: str, layout: str, gap: int) -> None:
    source = dict(zip(("bsr", "tokens", "mma"), HERE, strict=True))[which]
    said = printed(PLANTED.format(which=which, old=old, new=new, source=source, layout=layout, gap=gap))
    assert re.search("DIFFERENT|outside", said), said


@needs_emulator
@pytest.mark.parametrize("which", ["bsr", "tokens", "mma"])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_without_a_defect_all_is_equal(which: str, layout: str) -> None:
    source = dict(zip(("bsr", "tokens", "mma"), HERE, strict=True))[which]
    said = printed(PLANTED.format(which=which, old="", new="", source=source, layout=layout, gap=0))
    assert said.split() == ["equal"] * 3
