"""CSR with columns of B in shared memory and any number of them: what the kernel takes, its tiles, exact products."""

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
from spformat.backends.cuda.csr import spmm_csr_panel as panel
from spformat.backends.cuda.csr.csr_records import records
from spformat.formats import CSR
from spformat.products.problem import Problem
from spformat.products.roofline import shared_limit

KERNEL = panel.SpmmCSRPanel()


def layer(M: int, K: int, n: int, dtype: str = "bfloat16", **changes: Any) -> Problem:
    """2 % of the values of a linear layer, torch's layouts."""
    p = Problem.product("csr", (), M, K, n, M * K // 50, dtype, dtype, dtype, "col", "col", device="cuda", sm=90)
    return p.changed(**changes)


# ------------------------------------------------------------------ without a GPU


def test_what_it_takes() -> None:
    assert KERNEL.unsupported(layer(4096, 4096, 4000)) == KERNEL.unsupported(layer(8, 13900, 1)) == []
    (refusal,) = KERNEL.unsupported(layer(64, 14800, 1))
    expected = r"keeps columns of B in shared memory: K must be at most 13,\d{3}, got 14,800"
    assert re.fullmatch(expected, refusal), refusal
    (refusal,) = KERNEL.unsupported(layer(9000, 9000, 1).changed(nnz=2**31))
    assert refusal == "numbers items with 31 bits: nnz must be below 2**31, got 2147483648"
    assert KERNEL.unsupported(layer(2**31 - 33, 64, 1, nnz=2**20)) == []
    for M in (2**31 - 32, 2**31, 2**32 - 1):  # the kernel rounds M up to whole groups, in an int
        (refusal,) = KERNEL.unsupported(layer(M, 64, 1, nnz=2**20))
        assert refusal == f"counts rows with 31 bits: M must be below 2147483616, got {M}"
    assert "needs sm_80" in "".join(KERNEL.unsupported(layer(8, 8, 1, sm=75)))


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_the_largest_k_that_is_named_is_taken(sm: int) -> None:
    for dtype in ("bfloat16", "float32", "float64"):
        p = layer(64, 60000, 8, dtype, sm=sm)
        (refusal,) = KERNEL.unsupported(p)
        most = int(re.findall(r"at most ([\d,]+)", refusal)[0].replace(",", ""))
        assert KERNEL.unsupported(p.changed(K=most)) == []
        assert KERNEL.unsupported(p.changed(K=most + 1)) != []


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_tiles_fit(dtype: str) -> None:
    size, limit = VALUE_TYPES[dtype].numpy.itemsize, shared_limit(90)
    for K in (1, 300, 3500, 4096, 13000):
        for n in (1, 7, 33, 500, 4096):
            tiles = KERNEL.options(layer(512, K, n, dtype))
            assert tiles
            for t in tiles:
                least = (K + 1) * t.columns * size + t.tasks * t.columns * (t.group + 1) * max(4, size)
                assert t.resident * (least + 1024) <= limit + 1024
                assert t.resident * t.threads == 1024
                assert t.lanes * 16 == t.columns * size


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_is_chosen_in_torchs_layout(dtype: str) -> None:
    for n in (133, 209):
        assert sf.explain(layer(768, 768, n, dtype), backend="cuda").chosen == KERNEL.name


def test_rows_of_very_different_lengths_are_expected_to_take_longer() -> None:
    even = layer(4096, 4096, 100)
    assert KERNEL.expected_us(even.changed(row_length=2000)) > 2 * KERNEL.expected_us(even)


@pytest.mark.gpu
def test_a_matrix_on_a_device_knows_how_different_its_rows_are() -> None:
    """Also when records have replaced its arrays, if it was asked before; the host and an empty matrix say 0."""
    hopper()
    x = np.zeros((100, 300), np.float32)
    x[:, :10], x[7] = 1, 2
    a = CSR.from_dense(x.astype(VALUE_TYPES["bfloat16"].numpy))
    length = round((99 * 10**2 + 300**2) / (99 * 10 + 300))
    assert (a.row_length(), a.to("cuda").row_length()) == (0, length)
    assert CSR.from_dense(np.zeros((3, 4), np.float32)).to("cuda").row_length() == 0
    asked, not_asked = a.validate().to("cuda"), a.to("cuda")
    asked.row_length()
    for g in (asked, not_asked):
        records(g, problem(a, 8, "bfloat16", ("col", "col"), 90))
        assert g.in_kernel_order
    assert (asked.row_length(), not_asked.row_length()) == (length, 0)


# ------------------------------------------------------------------ exact products

CASES = [
    # columns, slots' logarithm, rows of a group, M, K, N, layouts, gap, types
    (8, 1, 16, 331, 523, 8, ("col", "col"), 0, "bfloat16", "bfloat16"),
    (8, 2, 8, 60, 4031, 7, ("row", "col"), 1, "float16", "float16"),
    (8, 3, 16, 300, 1523, 95, ("col", "row"), 8, "bfloat16", "float32"),
    (16, 1, 8, 331, 2600, 333, ("col", "col"), 3, "bfloat16", "bfloat16"),
    (16, 2, 16, 205, 777, 45, ("row", "row"), 5, "float16", "float16"),
    (16, 3, 8, 19, 130, 16, ("row", "col"), 0, "bfloat16", "bfloat16"),
    (8, 2, 16, 1000, 131, 1100, ("col", "col"), 0, "bfloat16", "bfloat16"),  # a warp takes several groups
    (4, 1, 16, 300, 523, 4, ("row", "row"), 0, "float32", "float32"),
    (4, 3, 8, 300, 523, 1, ("col", "col"), 5, "float32", "float32"),
    (8, 2, 16, 205, 1031, 130, ("row", "col"), 1, "float32", "float32"),
    (8, 3, 8, 260, 777, 64, ("col", "col"), 8, "float32", "float32"),
    (2, 2, 8, 260, 777, 3, ("col", "col"), 0, "float64", "float64"),
    (4, 1, 16, 260, 777, 15, ("col", "row"), 0, "float64", "float64"),
]


def named(columns: int, log: int, group: int, p: Problem) -> Any:
    """The tile of these extents."""
    t = panel.tile(columns, log, group, p)
    assert t is not None
    return t


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} columns {c[1]} {c[5]} {c[6]} {c[8]}")
def test_integers_are_exact(case: tuple[Any, ...]) -> None:
    columns, log, group, M, K, N, layouts, gap, dtype, out = case
    rng = np.random.default_rng(N)
    x, B = matrix(rng, "csr", {}, dtype, (M, K)), rng.integers(-3, 4, (K, N)).astype(VALUE_TYPES[dtype].numpy)
    a = CSR.from_dense(x)
    t = named(columns, log, group, problem(a, N, out, layouts, 90))
    assert_exact(product(KERNEL, t, a, B, out, layouts, gap), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_rows_start_and_end_at_any_item(dtype: str) -> None:
    """Rows of 0 to 40 items, so that every distance from a boundary of items and every last load occur."""
    rng = np.random.default_rng(7)
    lengths = np.concatenate((np.arange(41), rng.permutation(41), np.full(30, 3), [0, 0, 300, 1]))
    x = rows_of_lengths(lengths, 300, dtype)
    B = rng.integers(-3, 4, (300, 11)).astype(x.dtype)
    a, columns = CSR.from_dense(x), 16 // x.dtype.itemsize
    for log, group in ((1, 16), (2, 8), (3, 16)):
        t = named(columns, log, group, problem(a, 11, dtype, ("col", "col"), 90))
        assert_exact(product(KERNEL, t, a, B, dtype, ("col", "col"), 0), x, B)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
def test_an_epilogue_reads_c_where_it_lies(layout: str) -> None:
    cp, rng = hopper(), np.random.default_rng(2)
    x = matrix(rng, "csr", {}, "float32", (70, 503))
    B = rng.integers(-3, 4, (503, 21)).astype(np.float32)
    bias, before = rng.integers(-9, 9, 70).astype(np.float32), rng.integers(-9, 9, (70, 21)).astype(np.float32)
    a = CSR.from_dense(x).validate().to("cuda")
    p = problem(a, 21, "float32", (layout, layout), 90).changed(epilogue=True)
    plan, there = KERNEL.plan(a, p), on_device(cp, B, layout, 3)
    for alpha, beta in ((2.0, -1.0), (0.0, 1.0), (1.0, 0.0)):
        out = cp.asarray(np.ascontiguousarray(before.T)).T if layout == "col" else cp.asarray(before)
        plan(there, out=out, alpha=alpha, beta=beta, bias=cp.asarray(bias))
        wanted = alpha * (x.astype(np.float64) @ B) + beta * before + bias[:, None]
        np.testing.assert_array_equal(out.get(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["row", "col"])
def test_columns_without_nonzeros_meet_no_infinity(layout: str) -> None:
    """Nor do items of the rows beside it, which are loaded with those of a row, if they are infinite."""
    rng = np.random.default_rng(3)
    x = matrix(rng, "csr", {}, "bfloat16", (136, 1036))
    B, wanted = (every[:, 3:11] for every in infinite(rng, x, 60))
    a = CSR.from_dense(x)
    t = named(8, 2, 8, problem(a, 8, "bfloat16", (layout, layout), 90))
    assert equal(product(KERNEL, t, a, B, "bfloat16", (layout, layout), 0), wanted)
    x[::2] = np.where(x[::2] != 0, np.inf, 0)
    x[:, 5] = 1
    B = np.abs(B) + 1
    B = np.where(np.isfinite(B), B, 1).astype(x.dtype)
    result = product(KERNEL, t, CSR.from_dense(x), B, "bfloat16", (layout, layout), 0)
    assert np.isfinite(result[1::2].astype(np.float32)).all()


PLANTED = """
from emulator import stand_in
from emulator.planted import plant, three_runs

planted = plant({old!r}, {new!r}, source="csr/spmm_csr_panel.cu")
stand_in.install(90)
import numpy as np
from exact import equal, product
from test_csr_panel import CSR, KERNEL, matrix, named, problem

rng = np.random.default_rng(0)
x = matrix(rng, "csr", {{}}, "bfloat16", (200, 701))
x[199, -1] = 1
B = rng.integers(-3, 4, (701, 13)).astype(x.dtype)
a = CSR.from_dense(x)
t = named(8, 2, 16, problem(a, 13, "bfloat16", ("col", "col"), 90))
wanted = x.astype(np.float64) @ B.astype(np.float64)
three_runs(lambda: equal(product(KERNEL, t, a, B, "bfloat16", ({layout!r}, "col"), 1), wanted.astype(x.dtype)), planted)
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize(
    ("layout", "old", "new"),
    [
        ("col", "  __syncthreads();\n", ""),
        ("row", "item + e >= row.begin && ", ""),
        ("row", " && item + e < row.end", ""),
        ("col", "panel[K * LANES + threadIdx.x] =", "panel[(K - 1) * LANES + threadIdx.x] ="),
        ("col", "level < LOG", "level < LOG - 1"),
        ("col", "if (top + r < M) ", ""),
    ],
    ids=["panel not waited for", "items before the row", "items behind it", "no row of zeros", "slots of a row",
         "rows past the last"],
)  # fmt: skip
def test_a_planted_defect_is_found(layout: str, old: str, new: str) -> None:
    said = printed(PLANTED.format(layout=layout, old=old, new=new))
    assert re.search("DIFFERENT|outside", said), said


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
@pytest.mark.parametrize("layout", ["row", "col"])
def test_without_a_defect_all_is_equal(layout: str) -> None:
    assert printed(PLANTED.format(layout=layout, old="", new="")).split() == ["equal"] * 3


NAMED = """
from emulator import stand_in

stand_in.install(90)
import numpy as np

import spformat as sf
from spformat.backends.cuda.csr.csr_records import records
from spformat.backends.cuda.runtime import launch
from test_csr_panel import CSR, matrix, problem

a = CSR.from_dense(matrix(np.random.default_rng(0), "csr", {}, "bfloat16", (100, 300))).validate().to("cuda")
records(a, problem(a, 8, "bfloat16", ("col", "col"), 90))
assert a.in_kernel_order
times = []
launch.finish_arrays = lambda: times.append(1)
for name in ("spmm_csr", "spmm_csr_vector", "spmm_csr_panel"):
    sf.plan(a, n=8, backend=f"cuda.{name}")
    print(name, len(times))
    times.clear()
"""


@pytest.mark.skipif(bool(emulator.missing()), reason=f"no emulator: {emulator.missing()}")
def test_a_plan_by_name_waits_for_arrays_that_records_give_back() -> None:
    """Its calls may come on another stream than the one on which it was made."""
    assert printed(NAMED).split("\n")[:3] == ["spmm_csr 1", "spmm_csr_vector 1", "spmm_csr_panel 1"]


def test_names_of_tiles_are_distinct() -> None:
    names = [str(t) for t in KERNEL.options(layer(4096, 1024, 80))]
    assert len(names) == len(set(names)) == 11
    assert "8 columns, 256 threads, 4 slots, 8 rows" in names
