"""CSR with few columns in one launch: what the kernel takes, its tiles, exact products on a GPU or the emulated one."""

from __future__ import annotations

import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, equal, hopper, infinite, product
from test_kernels import matrix, on_device, problem

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.csr import spmm_csr_tokens as tokens
from spformat.backends.cuda.csr.spmm_csr_tokens import Tile
from spformat.formats import CSR
from spformat.products.problem import Problem
from spformat.products.roofline import shared_limit

KERNEL = tokens.SpmmCSRTokens()


def layer(M: int, K: int, n: int, dtype: str = "bfloat16", **changes: Any) -> Problem:
    """A tenth of the values of a linear layer, torch's layouts."""
    layouts = ("row", "row") if n == 1 else ("col", "col")
    p = Problem.product("csr", (), M, K, n, M * K // 10, dtype, dtype, dtype, *layouts, device="cuda", sm=90)
    return p.changed(**changes)


# ------------------------------------------------------------------ without a GPU


def test_what_it_takes() -> None:
    assert KERNEL.unsupported(layer(4096, 4096, 16)) == KERNEL.unsupported(layer(8, 113000, 64)) == []
    (refusal,) = KERNEL.unsupported(layer(4096, 4096, 65))
    assert refusal == "takes at most 64 columns, got up to 65"
    (refusal,) = KERNEL.unsupported(layer(64, 200000, 1))
    assert re.fullmatch(r"keeps columns of B in shared memory: K must be at most 11\d,\d{3}, got 200,000", refusal), (
        refusal
    )
    assert "needs sm_80" in "".join(KERNEL.unsupported(layer(8, 8, 1, sm=75)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_tiles_fit_and_have_as_many_columns_as_fit(dtype: str) -> None:
    size, limit = VALUE_TYPES[dtype].numpy.itemsize, shared_limit(90)
    for K in (1, 300, 3500, 4096, 14336, 28000):
        for n in (1, 2, 7, 16, 33, 64):
            p = layer(512, K, n, dtype)
            tiles = KERNEL.options(p)
            assert tiles
            for t in tiles:
                needed = tokens.smem(t.columns, p) + tokens.static_smem(t.columns, t.threads, p)
                assert t.resident * (needed + 1024) <= limit + 1024
                assert (t.resident + 1) * (needed + 1024) > limit + 1024 or t.resident == t.blocks
                assert t.lanes == max(1, t.columns * size // 16)
                assert t.columns * size <= 128
            widest = max(t.columns for t in tiles)
            assert (
                widest >= n or 2 * widest * size > 128 or 2 * widest > 32 or tokens.tile(2 * widest, 512, 8, p) is None
            )


@pytest.mark.parametrize(("n", "epilogue"), [(24, True), (24, False), (40, True)])
def test_it_is_chosen_where_others_need_several_launches(n: int, epilogue: bool) -> None:
    """A layer of 1024 x 1024: B would be transposed, C turned, a bias added."""
    assert sf.explain(layer(1024, 1024, n, epilogue=epilogue), backend="cuda").chosen == KERNEL.name


# ------------------------------------------------------------------ exact products

CASES = [
    # columns, threads, fill, M, K, N, layouts, gap, types
    (16, 512, 32, 331, 2600, 16, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (16, 256, 8, 331, 523, 13, ("col", "row"), 1, "float16", "float32"),
    (8, 256, 16, 205, 1031, 16, ("col", "col"), 3, "bfloat16", "bfloat16"),
    (32, 512, 8, 300, 523, 32, ("row", "row"), 5, "float16", "float16"),
    (4, 512, 16, 300, 523, 9, ("row", "col"), 8, "float32", "float32"),
    (1, 256, 8, 331, 4001, 1, ("row", "row"), 0, "bfloat16", "bfloat16"),
    (2, 256, 8, 331, 4000, 2, ("col", "col"), 0, "float16", "float16"),
    (16, 512, 16, 260, 777, 15, ("col", "col"), 0, "float64", "float64"),
    (32, 512, 32, 260, 777, 64, ("col", "col"), 8, "float32", "float32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}x{c[1]} {c[5]} {c[6]} {c[8]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    columns, threads, fill, M, K, N, layouts, gap, dtype, out = case
    rng = np.random.default_rng(N)
    a, B = matrix(rng, "csr", {}, dtype, (M, K)), rng.integers(-3, 4, (K, N)).astype(VALUE_TYPES[dtype].numpy)
    p = problem(CSR.from_dense(a), N, out, layouts, 90)
    t = tokens.tile(columns, threads, fill, p)
    assert t is not None
    assert_exact(product(KERNEL, t, CSR.from_dense(a), B, out, layouts, gap), a, B)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
def test_rows_in_pieces_are_added_in_their_order(layout: str) -> None:
    """Rows of more than 2048 items: pieces of several blocks, and an epilogue that only the last of them applies."""
    cp, rng = hopper(), np.random.default_rng(2)
    x = np.where(rng.random((40, 5003)) < 0.02, rng.integers(1, 4, (40, 5003)), 0).astype(np.float32)
    x[3], x[17, :4500], x[39] = 1, 2, -1
    B = rng.integers(-3, 4, (5003, 10)).astype(np.float32)
    bias, before = rng.integers(-9, 9, 40).astype(np.float32), rng.integers(-9, 9, (40, 10)).astype(np.float32)
    a = CSR.from_dense(x).validate().to("cuda")
    p = problem(a, 10, "float32", (layout, layout), 90).changed(epilogue=True)
    plan, there = KERNEL.plan(a, p), on_device(cp, B, layout, 3)
    assert int(re.match(r"\d+", plan.tile)[0]) < 10  # two tiles of columns, each with its own count of pieces
    for alpha, beta in ((2.0, -1.0), (0.0, 1.0), (1.0, 0.0)):
        out = cp.asarray(before if layout == "row" else np.asfortranarray(before))
        if layout == "col":
            out = cp.asarray(np.ascontiguousarray(before.T)).T
        for _ in range(2):
            out[:] = cp.asarray(before)
            plan(there, out=out, alpha=alpha, beta=beta, bias=cp.asarray(bias))
            wanted = alpha * (x.astype(np.float64) @ B) + beta * before + bias[:, None]
            np.testing.assert_array_equal(out.get(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
def test_columns_without_nonzeros_meet_no_infinity(layout: str) -> None:
    rng = np.random.default_rng(3)
    x = matrix(rng, "csr", {}, "bfloat16", (136, 1036))
    B, wanted = infinite(rng, x, 60)
    a, p = CSR.from_dense(x), problem(CSR.from_dense(x), 60, "bfloat16", (layout, layout), 90)
    t = tokens.tile(8, 256, 8, p)
    assert equal(product(KERNEL, t, a, B, "bfloat16", (layout, layout), 0), wanted)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, source="csr/spmm_csr_tokens.cu", header="spformat/column_panel.cuh")
stand_in.install(90)
import numpy as np
from exact import equal, product
from test_csr_tokens import CSR, KERNEL, matrix, problem, tokens

rng = np.random.default_rng(0)
x = matrix(rng, "csr", {{}}, "bfloat16", (200, 701))
B = rng.integers(-3, 4, (701, 13)).astype(x.dtype)
wanted, a = (x.astype(np.float64) @ B.astype(np.float64)).astype(x.dtype), CSR.from_dense(x)
t = tokens.tile(16, 256, 8, problem(a, 13, "bfloat16", ("col", "col"), 90))
three_runs(lambda: equal(product(KERNEL, t, a, B, "bfloat16", ({layout!r}, "col"), 1), wanted), planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("layout", "old", "new"),
    [
        ("col", "  __syncthreads();\n\n  for (unsigned block", "  for (unsigned block"),
        ("col", "(e ^ static_cast<int>(reverse))", "e"),
        ("col", "if (pairs && k + 1 == K)", "if (false)"),
        ("row", "    if (col >= n) return;\n", ""),
    ],
    ids=["panel not waited for", "order of rows", "last row", "columns past the last"],
)
def test_a_planted_defect_is_found(layout: str, old: str, new: str) -> None:
    said = printed(PLANTED.format(layout=layout, old=old, new=new))
    assert re.search("DIFFERENT|outside", said), said


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize("layout", ["row", "col"])
def test_without_a_defect_all_is_equal(layout: str) -> None:
    assert printed(PLANTED.format(layout=layout, old="", new="")).split() == ["equal"] * 3


def test_names_of_tiles_are_distinct() -> None:
    assert [str(Tile(16, 2, 512, 32, 1))] == ["16 columns, 512 threads, fill 32"]
    names = [str(t) for t in KERNEL.options(layer(4096, 4096, 16))]
    assert len(names) == len(set(names)) == 10
