"""C = A^T @ B of every format on the host, and *expand, then dense product*, against float64; C starts out as NaN."""

from __future__ import annotations

import tracemalloc
from typing import Any

import cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu import MIXED, SAME, SPECS, K, M, layouts, matrix, numpy_type, operand, pattern, same, takes, wide

from spformat.arrays import threads
from spformat.backends import reference
from spformat.backends.cpu import expand, operands, same_arrays, scatter, spmm, transposed
from spformat.errors import UsageError
from spformat.formats import FORMATS, Format
from spformat.formats.convert import convert
from spformat.products.plan import Plan
from spformat.products.problem import COL, ROW, STRIDED, Problem, result_dtype

pytest.importorskip("numba")

SPARSE = tuple(s for s in SPECS if s != "dense")
WAYS = ("transposed", "expand-transposed", "expand")
"""The kernels under test: the loops for A^T @ B; panels for A^T @ B; panels for A @ B."""
NS = (0, 1, 7, 17, 64, 130)


def of_way(way: str) -> tuple[str, ...]:
    return SPECS if way == "transposed" else SPARSE


WAY_SPECS = [pytest.param(way, spec, id=f"{way}-{spec}") for way in WAYS for spec in of_way(way)]


def operation(way: str) -> str:
    return "spmm" if way == "expand" else "spmm_transposed"


def layout(x: np.ndarray) -> str:
    return ROW if x.flags.c_contiguous else COL if x.flags.f_contiguous else STRIDED


def problem(way: str, a: Format, B: np.ndarray, out: np.ndarray) -> Problem:
    return Problem.product(
        a.name, tuple(a.params().items()), *a.shape, B.shape[1], a.stored, a.dtype.name, B.dtype.name, out.dtype.name,
        layout(B), layout(out), operation=operation(way),
    )  # fmt: skip


def plan(way: str, a: Format, B: np.ndarray, out: np.ndarray) -> Plan:
    p = problem(way, a, B, out)
    kernels = [*transposed.KERNELS, *same_arrays.KERNELS] if way == "transposed" else [*expand.KERNELS]
    (kernel,) = [k for k in kernels if (p.operation, p.format) in k.takes]
    assert kernel.unsupported(p) == []
    return kernel.plan(a.ensure_valid(), p)


def fresh(way: str, a: Format, n: int, dtype: str) -> np.ndarray:
    return np.empty((a.shape[0] if way == "expand" else a.shape[1], n), numpy_type(dtype))


def run(way: str, a: Format, B: np.ndarray, out: np.ndarray | None = None, out_dtype: str = "") -> np.ndarray:
    """C, written over NaN (or a number no sum here reaches)."""
    if out is None:
        out = fresh(way, a, B.shape[1], out_dtype or result_dtype(a.dtype.name, B.dtype.name))
    out[...] = -(2**30) if out.dtype == np.int32 else np.nan
    assert plan(way, a, B, out)(B, out) is out
    return out


def inner(way: str, shape: tuple[int, int]) -> int:
    return shape[1] if way == "expand" else shape[0]


def left(way: str, a: Format) -> np.ndarray:
    """The left factor in float64."""
    return wide(a.to_dense()) if way == "expand" else wide(a.to_dense()).T


# ------------------------------------------------------------------ values


# Compiled code depends only on the types of A and of the sums, and both kernels that expand A use the same code.
@pytest.mark.parametrize("types", SAME + MIXED, ids="-".join)
@pytest.mark.parametrize(("way", "spec"), WAY_SPECS)
def test_integers_are_exact(way: str, spec: str, types: tuple[str, str]) -> None:
    if not takes(spec, types[0]):
        pytest.skip("the format does not hold this type")
    if types in MIXED and spec not in ("dense", "csr", "bsr:blocksize=40x16"):
        pytest.skip("operands of two types are widened alike for every format")
    a = matrix(spec, types[0])
    B = operand(types[1], (inner(way, (M, K)), 40))
    got = run(way, a, B)
    assert got.dtype == numpy_type(result_dtype(*types))
    same(got, (left(way, a) @ wide(B)).astype(got.dtype))


@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize(("way", "spec"), WAY_SPECS)
def test_every_width(way: str, spec: str, n: int) -> None:
    a = matrix(spec, "bfloat16")
    B = operand("bfloat16", (inner(way, (M, K)), n))
    same(run(way, a, B, out_dtype="float32"), left(way, a) @ wide(B))


@pytest.mark.parametrize("types", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"),
                                   ("float64", "float64"), ("float8_e4m3fn", "float16")], ids="-".join)  # fmt: skip
@pytest.mark.parametrize(("way", "spec"), WAY_SPECS)
def test_rounding_stays_within_the_bound(way: str, spec: str, types: tuple[str, str]) -> None:
    """The bound grows with the terms of each sum: those that are not zero, and for a dense product all of them."""
    if not takes(spec, types[0]):
        pytest.skip("the format does not hold this type")
    shape = (70, 1500) if way == "expand" else (1500, 70)
    a = matrix(spec, types[0], shape, integers=False)
    B = operand(types[1], (1500, 33), integers=False)
    out_dtype = result_dtype(*types)
    got = run(way, a, B)
    A = left(way, a)
    exact = A.astype(np.longdouble) @ wide(B).astype(np.longdouble)
    unit = 2.0**-53 if out_dtype == "float64" else 2.0**-24
    last = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(out_dtype, unit)
    items = 1500 if way != "transposed" or spec == "dense" else np.count_nonzero(A, axis=1)[:, None]
    limit = items * unit * (np.abs(A) @ np.abs(wide(B))) + last * np.abs(exact)
    assert np.all(np.abs(got.astype(np.longdouble) - exact) <= limit)
    assert np.count_nonzero(got) > got.size // 2


@pytest.mark.parametrize("out_dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("types", [("bfloat16", "bfloat16"), ("int8", "int8"), ("float32", "float64")], ids="-".join)
@pytest.mark.parametrize("way", WAYS)
def test_out_may_be_any_float(way: str, types: tuple[str, str], out_dtype: str) -> None:
    for spec in of_way(way)[:2]:
        a, B = matrix(spec, types[0]), operand(types[1], (inner(way, (M, K)), 33))
        same(run(way, a, B, out_dtype=out_dtype), (left(way, a) @ wide(B)).astype(numpy_type(out_dtype)))


@pytest.mark.parametrize(("way", "spec"), [(w, s) for w in WAYS for s in ("csr", "dense", "bitmask") if s in of_way(w)])
def test_int8_reaches_the_ends_of_its_range(way: str, spec: str) -> None:
    A = np.full((2500, 3), -128, np.int8)
    A[:, 1] = 127
    a = convert(np.ascontiguousarray(A.T) if way == "expand" else A, spec)
    B = np.full((2500, 20), -128, np.int8)
    got = run(way, a, B)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, A.T.astype(np.int64) @ B.astype(np.int64))


# ------------------------------------------------------------------ every matrix and parameter set of cases.py


@pytest.mark.parametrize("case", sorted(cases.CASES.keys() - {"even", "all_dense", "negative_zeros"}))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fmt", [f.name for f in FORMATS])
def test_every_parameter_set_on_every_shape(fmt: str, way: str, case: str) -> None:
    """Small integers in the places of the case, as far as the format has room for them."""
    if fmt == "dense" and way != "transposed":
        pytest.skip("a dense matrix is expanded already")
    held = cases.CASES[case]("float16").view(np.uint16) & 0x7FFF != 0
    rng = np.random.default_rng(1)
    x = np.where(held, rng.integers(1, 4, held.shape) * rng.choice([-1, 1], held.shape), 0).astype(np.float16)
    for params in cases.params_of(fmt):
        if fmt in ("two-four", "vector-nm") and held.size:
            n, m, L = params.get("n", 2), params.get("m", 4), params.get("vector_length", 1)
            x = np.where(cases.nm_places(held.shape, n, m, L, 2) & held, x, 0).astype(np.float16)
        a = next(f for f in FORMATS if f.name == fmt).from_dense(x, **params)
        B = operand("float16", (inner(way, x.shape), 33))
        same(run(way, a, B, out_dtype="float32"), left(way, a) @ wide(B))


@pytest.mark.parametrize("spec", SPECS)
def test_the_reference_agrees(spec: str) -> None:
    dtype = "bfloat16"
    a, B = matrix(spec, dtype), operand(dtype, (M, 9))
    out = fresh("transposed", a, 9, "float32")
    (kernel,) = [k for k in reference.BACKEND.kernels() if ("spmm_transposed", a.name) in k.takes]
    assert kernel.name == "reference.spmm_transposed"
    out[...] = np.nan
    kernel.plan(a, problem("transposed", a, B, out))(B, out)
    same(out, left("transposed", a) @ wide(B))
    same(run("transposed", a, B, out_dtype="float32"), out)


@settings(max_examples=60)  # three kernels of every format in few seconds
@given(st.data())
def test_drawn_shapes(data: st.DataObject) -> None:
    spec, n = data.draw(st.sampled_from(SPECS)), data.draw(st.integers(0, 70))
    shape = data.draw(st.tuples(st.integers(1, 90), st.integers(1, 90)))
    way = data.draw(st.sampled_from([w for w in WAYS if spec in of_way(w)]))
    a = matrix(spec, "float16", shape, data.draw(st.integers(0, 99)))
    B = operand("float16", (inner(way, shape), n))
    same(run(way, a, B, out_dtype="float32"), left(way, a) @ wide(B))


# ------------------------------------------------------------------ what must not be read


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("spec", SPARSE)
def test_rows_of_b_that_nothing_uses_do_not_matter(spec: str, poison: float) -> None:
    if spec.startswith("vector-nm"):
        pytest.skip("every row stores its fillers")
    held = pattern(spec, (M, K), np.random.default_rng(5))
    held[:64] = False
    a = convert(np.where(held, 2, 0).astype(np.float16), spec)
    B = operand("float16", (M, 96))
    clean = left("transposed", a) @ wide(B)
    unused = ~held.any(axis=1)
    unused[40:] &= a.name not in ("bsr", "dbsr", "sr-bcrs")  # rows of a block or vector that is stored are multiplied
    B[unused] = poison
    same(run("transposed", a, B, out_dtype="float32"), clean)


# ------------------------------------------------------------------ operands


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("n", [5, 64])
@pytest.mark.parametrize("way", WAYS)
def test_any_layout_of_b(way: str, n: int, dtype: str) -> None:
    for spec in ("csr", "bsr:blocksize=5x7", *(["dense"] if way == "transposed" else [])):
        a = matrix(spec, dtype, (K, M) if way != "expand" else (M, K))
        for name, B in layouts(dtype, n).items():
            B.flags.writeable = False
            got = run(way, a, B, out_dtype="float32")
            np.testing.assert_array_equal(got, left(way, a) @ wide(B), err_msg=f"{spec} {name}")


@pytest.mark.parametrize("n", [1, 17, 64])
@pytest.mark.parametrize(("way", "spec"), [(w, s) for w in WAYS for s in ("csr", "vector-nm:n=2,m=8,vector_length=5",
                                                                         "dense") if s in of_way(w)])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_layout_of_out(way: str, spec: str, n: int, dtype: str) -> None:
    a, B = matrix(spec, "float32"), operand("float32", (inner(way, (M, K)), n))
    rows = M if way == "expand" else K
    wanted = left(way, a) @ wide(B)
    around = np.zeros((rows + 4, n + 6), dtype)
    for out in (np.empty((rows, n), dtype), np.empty((rows, n), dtype, order="F"), around[2:-2, 3:-3],
                np.empty((rows, 2 * n), dtype)[:, ::2], np.empty((rows, n), dtype)[::-1, ::-1]):  # fmt: skip
        same(run(way, a, B, out=out), wanted)
    around[2:-2, 3:-3] = 0
    assert not around.any()  # nothing outside was touched


@pytest.mark.parametrize("way", WAYS)
def test_out_is_allocated_and_operands_are_checked(way: str) -> None:
    a, B = matrix("csr", "float32"), operand("float32", (inner(way, (M, K)), 9))
    p = plan(way, a, B, fresh(way, a, 9, "float32"))
    same(p(B), left(way, a) @ wide(B))
    with pytest.raises(ValueError, match=rf"B: expected shape \({len(B)}, N\)"):
        p(B[1:])
    with pytest.raises(ValueError, match="out: expected shape"):
        p(B, np.empty((len(B), 9), np.float32))


@pytest.mark.parametrize("way", WAYS)
def test_a_matrix_without_the_validated_mark_is_refused(way: str) -> None:
    a = matrix("csr", "float32")
    a = type(a)(shape=a.shape, **a.arrays())
    p = problem(way, a, np.empty((inner(way, (M, K)), 3), np.float32), fresh(way, a, 3, "float32"))
    (kernel,) = [k for k in (transposed if way == "transposed" else expand).KERNELS if (p.operation, "csr") in k.takes]
    with pytest.raises(UsageError, match="validate"):
        kernel.plan(a, p)


def test_every_format_is_taken() -> None:
    names = {f.name for f in FORMATS}
    kernels = (*transposed.KERNELS, *same_arrays.KERNELS)
    assert {f for k in kernels for o, f in k.takes if o == "spmm_transposed"} >= names
    assert expand.KERNELS[0].takes == {(o, f) for o in ("spmm", "spmm_transposed") for f in names - {"dense"}}
    assert {k.name for k in transposed.KERNELS} == {k.name.replace("spmm", "spmm_transposed") for k in spmm.KERNELS}


@pytest.mark.parametrize("kernel", [*transposed.KERNELS, *expand.KERNELS], ids=lambda k: k.name)
def test_reasons(kernel: object) -> None:
    def reasons(**changes: object) -> str:
        given = {"a_dtype": "bfloat16", "b_dtype": "bfloat16", "out_dtype": "bfloat16"} | changes
        fmt = min(f for _, f in kernel.takes)
        return "; ".join(kernel.unsupported(Problem.product(fmt, (), 4, 4, 8, 4, operation="spmm_transposed", **given)))

    assert reasons() == ""
    assert "move them with .to('cpu')" in reasons(device="cuda")
    assert "out.dtype must be one of" in reasons(out_dtype="int32")


# ------------------------------------------------------------------ how the work is cut


@pytest.mark.parametrize("spec", SPECS)
def test_the_number_of_threads_does_not_change_a_bit(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tiles, whose rows of A are cut into ranges, and many; bands of B of one unit and of many."""
    a = matrix(spec, "bfloat16", (400, 300), integers=False)
    monkeypatch.setattr(operands, "SMALL", 0)
    monkeypatch.setattr(scatter, "RANGE_ITEMS", 1)
    for n, pieces in ((16, 1), (16, 7), (166, 1), (166, 20)):
        B = operand("bfloat16", (400, n), integers=False)
        monkeypatch.setattr(scatter, "PIECES", pieces)
        results = []
        for together, band in ((1, 1), (2, 1 << 17)):
            monkeypatch.setattr(operands, "cache_bytes", lambda together=together: 300 * 128 * together)
            monkeypatch.setattr(scatter, "BAND", band)
            for count in (1, 2, 4, 7):
                monkeypatch.setattr(threads, "cores", lambda count=count: count)
                results.append(run("transposed", a, B, out_dtype="float32"))
        for again in results[1:]:
            np.testing.assert_array_equal(again.view(np.uint32), results[0].view(np.uint32))
        whole = np.rint(wide(B)).astype(B.dtype)
        a_whole = matrix(spec, "bfloat16", (400, 300))
        same(run("transposed", a_whole, whole, out_dtype="float32"), left("transposed", a_whole) @ wide(whole))


def test_few_tiles_are_summed_over_ranges_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = np.dtype(np.float32)
    assert scatter._cut(10**8, 1000, 16, sums) == (1, 16, 1, scatter.PIECES)
    assert scatter._cut(10**8, 1000, 10**4, sums)[3] == 1  # tiles enough
    assert scatter._cut(10**5, 1000, 256, sums)[3] == 1  # too few items to pay for more sums
    assert scatter._cut(10**9, 2 * 10**6, 16, sums)[3] == 1  # too many rows of C to hold twice
    monkeypatch.setattr(operands, "SMALL", 10**12)
    assert scatter._cut(10**8, 1000, 16, sums)[3] == 1


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(("way", "spec"), [w for w in WAY_SPECS if w.values[0] != "transposed"])
def test_panels_are_cut_anywhere(way: str, spec: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expand, "ROWS", 13)
    monkeypatch.setattr(expand, "PIECE", 1)
    monkeypatch.setattr(threads, "cores", lambda: pieces)
    a, B = matrix(spec, "bfloat16"), operand("bfloat16", (inner(way, (M, K)), 20))
    same(run(way, a, B, out_dtype="float32"), left(way, a) @ wide(B))


def peak_of(run: Any, *arguments: Any) -> int:
    """The most bytes that numpy had allocated at a time during a call."""
    tracemalloc.start()
    try:
        run(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("types", [("float32", "float32", "float32"), ("float32", "bfloat16", "bfloat16"),
                                   ("float16", "float8_e5m2", "float16"), ("float64", "float32", "float64"),
                                   ("int8", "int8", "int32"), ("int8", "int8", "float32")], ids="-".join)  # fmt: skip
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("way", [w for w in WAYS if w != "transposed"])
def test_the_workspace_that_is_stated_is_not_exceeded(way: str, strided: bool, types: tuple[str, str, str]) -> None:
    """With ``out`` given; A has several panels."""
    for spec in ("csr", "bsr:blocksize=40x16", "sr-bcrs:vector_length=6,stride=5"):
        a = matrix(spec, types[0], (1100, 300))
        B = operand(types[1], (inner(way, a.shape), 96))
        out = fresh(way, a, 96, types[2])
        if strided:
            B, out = np.repeat(B, 2, axis=1)[:, ::2], np.repeat(out, 2, axis=1)[:, ::2]
        p = problem(way, a, B, out)
        made = expand.KERNELS[0].plan(a.ensure_valid(), p)
        made(B, out)  # compiles
        stated = expand.KERNELS[0].workspace_bytes(p)
        assert made.workspace >= stated
        peak = peak_of(made, B, out)
        assert 0.5 * stated <= peak <= stated + 200_000, (spec, peak, stated)


@pytest.mark.parametrize("n", [16, 256])
@pytest.mark.parametrize("spec", ["csr", "bsr:blocksize=40x16", "two-four:meta_order=ldmatrix"])
def test_tiles_of_the_transposed_product_stay_within_the_workspace(
    spec: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scatter, "RANGE_ITEMS", 1)
    monkeypatch.setattr(operands, "SMALL", 0)
    a = matrix(spec, "bfloat16", (1500, 600))
    B, out = operand("bfloat16", (1500, n)), np.empty((600, n), np.float32)
    made = plan("transposed", a, B, out)
    made(B, out)
    peak = peak_of(made, B, out)
    assert peak <= made.workspace + 200_000


def test_no_dense_copy_of_a_is_kept() -> None:
    a, B = matrix("csr", "float32", (3000, 800)), operand("float32", (800, 8))
    tracemalloc.start()
    try:
        made = plan("expand", a, B, fresh("expand", a, 8, "float32"))
        made(B)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 3000 * 800
    same(made(B), left("expand", a) @ wide(B))
