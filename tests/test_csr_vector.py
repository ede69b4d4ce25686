"""CSR with up to 64 columns: what the kernel takes, its tiles, exact products on a GPU or the emulated one."""

from __future__ import annotations

import re
from typing import Any

import emulator
import numpy as np
import pytest
from emulator.process import printed
from exact import assert_exact, equal, hopper, infinite, product, rows_of_lengths
from test_kernels import matrix, on_device, problem

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.csr import spmm_csr_vector as vector
from spformat.backends.cuda.runtime.column_panels import smem
from spformat.formats import CSR
from spformat.products.problem import Problem
from spformat.products.roofline import shared_limit

KERNEL = vector.SpmmCSRVector()


def layer(M: int, K: int, n: int, dtype: str = "bfloat16", **changes: Any) -> Problem:
    """A tenth of the values of a linear layer, torch's layouts."""
    layouts = ("row", "row") if n == 1 else ("col", "col")
    p = Problem.product("csr", (), M, K, n, M * K // 10, dtype, dtype, dtype, *layouts, device="cuda", sm=90)
    return p.changed(**changes)


# ------------------------------------------------------------------ without a GPU


def test_what_it_takes() -> None:
    assert KERNEL.unsupported(layer(4096, 4096, 64)) == KERNEL.unsupported(layer(8, 113000, 1)) == []
    (refusal,) = KERNEL.unsupported(layer(4096, 4096, 65))
    assert refusal == "takes at most 64 columns, got up to 65"
    (refusal,) = KERNEL.unsupported(layer(64, 200000, 1))
    assert re.fullmatch(r"keeps columns of B in shared memory: K must be at most 11\d,\d{3}, got 200,000", refusal), (
        refusal
    )
    (refusal,) = KERNEL.unsupported(layer(50000, 50000, 1).changed(nnz=2**31))
    assert refusal == "numbers items with 31 bits: nnz must be below 2**31, got 2147483648"
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
                assert t.resident * (smem(t.columns, p) + 1024) <= limit + 1024
                assert t.resident * t.threads == 1024
                assert t.lanes == max(1, t.columns * size // 16)
                assert t.columns * size <= 128
            widest = max(t.columns for t in tiles)
            larger = None if 2 * widest * size > 128 or 2 * widest > 32 else vector.tile(2 * widest, 8, p)
            assert widest >= n or larger is None


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_is_chosen_for_large_layers_and_small_ones(n: int, dtype: str) -> None:
    for size in (2048, 8192):
        p = layer(size, size, n, dtype, epilogue=size == 2048)
        assert sf.explain(p.changed(nnz=p.nnz // 4), backend="cuda").chosen == KERNEL.name
        chosen = sf.explain(p, backend="cuda").chosen
        if dtype == "bfloat16":  # in records, see test_csr_records.py
            assert chosen in {"cuda.spmm_csr_expanding_sm90a", "cuda.spmm_csr_records"}
        else:
            assert chosen == KERNEL.name


# ------------------------------------------------------------------ exact products

CASES = [
    # columns, fill, M, K, N, layouts, gap, types
    (1, 8, 331, 4001, 1, ("row", "row"), 0, "bfloat16", "bfloat16"),
    (1, 32, 70, 2600, 1, ("col", "col"), 3, "float16", "float32"),
    (8, 16, 331, 523, 8, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (8, 8, 60, 12031, 7, ("row", "col"), 1, "float16", "float16"),
    (2, 32, 300, 1523, 5, ("col", "row"), 8, "bfloat16", "float32"),
    (4, 16, 300, 523, 4, ("row", "row"), 0, "float32", "float32"),
    (4, 16, 300, 523, 15, ("col", "col"), 5, "float32", "float32"),
    (2, 8, 260, 777, 3, ("col", "col"), 0, "float64", "float64"),
    (16, 16, 331, 2600, 16, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (32, 8, 300, 523, 45, ("row", "row"), 5, "float16", "float16"),
    (16, 8, 205, 1031, 13, ("row", "col"), 1, "float32", "float32"),
    (32, 16, 260, 777, 64, ("col", "col"), 8, "float32", "float32"),
    (16, 16, 260, 777, 15, ("col", "row"), 0, "float64", "float64"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} columns {c[4]} {c[5]} {c[7]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    columns, fill, M, K, N, layouts, gap, dtype, out = case
    rng = np.random.default_rng(N)
    x, B = matrix(rng, "csr", {}, dtype, (M, K)), rng.integers(-3, 4, (K, N)).astype(VALUE_TYPES[dtype].numpy)
    a = CSR.from_dense(x)
    t = vector.tile(columns, fill, problem(a, N, out, layouts, 90))
    assert t is not None
    assert_exact(product(KERNEL, t, a, B, out, layouts, gap), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_rows_start_and_end_at_any_item(dtype: str) -> None:
    """Rows of 0 to 40 items, so that every distance from a 16-byte boundary and every last load occur."""
    rng = np.random.default_rng(7)
    lengths = np.concatenate((np.arange(41), rng.permutation(41), np.full(30, 3), [0, 0, 1]))
    x = rows_of_lengths(lengths, 300, dtype)
    B = rng.integers(-3, 4, (300, 2)).astype(x.dtype)
    a = CSR.from_dense(x)
    for fill in (8, 32):
        t = vector.tile(2, fill, problem(a, 2, dtype, ("col", "col"), 90))
        assert_exact(product(KERNEL, t, a, B, dtype, ("col", "col"), 0), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
def test_rows_in_pieces_are_added_in_their_order(layout: str) -> None:
    """Rows of more than 2048 items: pieces of several warps, and an epilogue that only the last of them applies."""
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
        out = cp.asarray(np.ascontiguousarray(before.T)).T if layout == "col" else cp.asarray(before)
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
    B, wanted = (every[:, 3:11] for every in infinite(rng, x, 60))
    a = CSR.from_dense(x)
    t = vector.tile(8, 8, problem(a, 8, "bfloat16", (layout, layout), 90))
    assert equal(product(KERNEL, t, a, B, "bfloat16", (layout, layout), 0), wanted)


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, source="csr/spmm_csr_vector.cu", header="spformat/csr_items.cuh")
stand_in.install(90)
import numpy as np
from exact import equal, product
from test_csr_vector import CSR, KERNEL, matrix, problem, vector

rng = np.random.default_rng(0)
x = matrix(rng, "csr", {{}}, "bfloat16", (200, 701))
x[199, -1] = 1
B = rng.integers(-3, 4, (701, 5)).astype(x.dtype)
wanted, a = (x.astype(np.float64) @ B.astype(np.float64)).astype(x.dtype), CSR.from_dense(x)
t = vector.tile(8, 8, problem(a, 5, "bfloat16", ({layout!r}, "col"), 90))
three_runs(lambda: equal(product(KERNEL, t, a, B, "bfloat16", ({layout!r}, "col"), 1), wanted), planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("layout", "old", "new"),
    [
        ("col", "  __syncthreads();\n", ""),
        ("row", "item + g + d >= row.begin && ", ""),
        ("row", " && item + g + d < row.end", ""),
        ("col", "if (at < row.end && !whole)", "if (false)"),
        ("col", "step < 1 << task.log", "step < SLOTS / 2"),
    ],
    ids=["panel not waited for", "items before the row", "items behind it", "last items", "lanes of a row"],
)
def test_a_planted_defect_is_found(layout: str, old: str, new: str) -> None:
    said = printed(PLANTED.format(layout=layout, old=old, new=new))
    assert re.search("DIFFERENT|outside", said), said


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize("layout", ["row", "col"])
def test_without_a_defect_all_is_equal(layout: str) -> None:
    assert printed(PLANTED.format(layout=layout, old="", new="")).split() == ["equal"] * 3


def test_names_of_tiles_are_distinct() -> None:
    names = [str(t) for t in KERNEL.options(layer(4096, 4096, 8))]
    assert len(names) == len(set(names)) == 4
    assert "8 columns, 512 threads, fill 16" in names
