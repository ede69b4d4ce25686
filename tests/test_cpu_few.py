"""Products with few columns of B on the CPU: the loops that read the arrays of a format once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from test_cpu import (
    assert_unused_rows_do_not_matter,
    exact,
    layouts,
    matrix,
    numpy_type,
    operand,
    product,
    same,
    takes,
)

import spformat as sf
from spformat.arrays import threads
from spformat.backends.cpu import few, operands, spmm, times
from spformat.formats import Format
from spformat.formats.convert import convert
from spformat.products.problem import result_dtype

pytest.importorskip("numba")
from spformat.formats.fast.simd import WIDE  # needs numba

SPECS = (
    "bsr:blocksize=5x16",
    "bsr:blocksize=32x8",
    "dbsr:blocksize=16x16",
    "sr-bcrs:vector_length=6,stride=4",
    "sr-bcrs:vector_length=8,stride=16",
    "vector-nm:n=2,m=8,vector_length=48",
    "vector-nm:n=3,m=7,vector_length=4",
    "vector-nm:n=4,m=8,vector_length=32,tile_rows=64,tile_cols=16",
    "two-four:meta_order=logical",
    "two-four:meta_order=ldmatrix",
    "two-four:meta_order=fragment",
    "two-four:meta_order=cutlass-sm80",
    "bitmask",
    "csr",
    "ell-buckets:column_parts=3,max_width=8",
)
K = 203
"""A multiple of no size into which the formats divide a matrix; 26 bytes of bits, the last one not full."""


def loop_of(a: Format, sums: str = "float32") -> few.Few | None:
    """The loop for few columns that a plan would use."""
    (kernel,) = (k for k in spmm.KERNELS if a.name in k.formats)
    dtype = np.dtype(sums)
    return kernel.few(a, kernel.work(a, dtype), dtype)


TYPES = [("float64", "float64"), ("float16", "float16"), ("int8", "int8"), ("bfloat16", "float64"), ("int8", "float32")]
"""Beside float32 and bfloat16, which the other tests use; every pair compiles each loop once more."""
ONE_OF_EACH = [s for s in SPECS if s.startswith(("bsr:blocksize=5", "sr-bcrs:vector_length=8", "vector-nm:n=2", "bitmask",
                                                 "two-four:meta_order=ldmatrix", "csr"))]  # fmt: skip


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("spec", ONE_OF_EACH)
def test_integers_are_exact(spec: str, types: tuple[str, str]) -> None:
    if not takes(spec, types[0]):
        pytest.skip("the format does not hold this type")
    a = matrix(spec, types[0], (75, K))
    B = operand(types[1], (K, 7))  # 4 + 2 + 1 columns
    same(product(a, B), exact(a, B, numpy_type(result_dtype(*types))))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_width(spec: str, dtype: str) -> None:
    """Rows that are no multiple of those computed together, empty ones among them, and widths of every kind."""
    if not takes(spec, dtype):
        pytest.skip("the format does not hold this type")
    for rows, cols in ((75, K), (1, 3), (41, 1000)):
        a = matrix(spec, dtype, (rows, cols))
        for n in (*range(1, times.FEW + 2), 2 * times.FEW, 2 * times.FEW + 5):
            B = operand(dtype, (cols, n), seed=n)
            same(product(a, B, out_dtype="float32"), exact(a, B, np.dtype(np.float32)))


@pytest.mark.parametrize("spec", SPECS)
def test_more_columns_go_in_panels_up_to_a_limit(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each column of C is in one panel; above the limit, which is lower for small matrices, the loop for any number of
    columns is used, and right, too."""
    a = matrix(spec, "bfloat16", (41, K))
    if loop_of(a) is None:
        pytest.skip("no loop for few columns of this matrix")
    (kernel,) = (k for k in spmm.KERNELS if a.name in k.formats)
    limit, panels, real = times.IN_PANELS[a.name], list[int](), few.multiply
    small = min(limit, times.MOST_OF_SMALL)

    def counted(loop: Any, B: Any, out: Any, sums: Any) -> None:
        panels.append(out.shape[1])
        real(loop, B, out, sums)

    monkeypatch.setattr(few, "multiply", counted)
    for least, n, wanted in (
        (0, 17, [16, 1]), (0, limit - 1, [16] * (limit // 16 - 1) + [15]), (0, limit, [16] * (limit // 16)),
        (0, limit + 1, []), (1 << 30, small, [16] * (small // 16)), (1 << 30, small + 1, []),
    ):  # fmt: skip
        monkeypatch.setattr(times, "SMALL_MATRIX", least)
        for order in "CF":
            panels.clear()
            B = np.asarray(operand("bfloat16", (K, n), seed=n), order=order)
            got = np.full((41, n), np.nan, np.float32, order)
            sf.plan(a, B=B, out=got, backend=kernel.name)(B, got)
            same(got, exact(a, B, np.dtype(np.float32)))
            assert panels == wanted, n


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("n", [1, 6, 16, 21])
@pytest.mark.parametrize("spec", SPECS)
def test_rows_of_b_that_nothing_uses_do_not_matter(spec: str, n: int, poison: float) -> None:
    assert_unused_rows_do_not_matter(spec, (75, K), n, poison)


def test_fillers_of_a_group_are_not_multiplied() -> None:
    x = np.zeros((9, 70), np.float16)
    x[:, 5::8] = 1.5
    for n in (1, 2, 5, 16):
        B = np.full((70, n), np.inf, np.float16)
        B[5::8] = 2
        same(product(convert(x, "two-four"), B), np.full((9, n), 3.0 * len(range(5, 70, 8))))


def test_infinities_and_nan_of_a_are_not_lost() -> None:
    x = np.zeros((8, 64), np.float32)
    x[1, 3], x[2, 40], x[3, 0] = np.inf, np.nan, 2
    B = np.ones((64, 3), np.float32)
    for spec in ("bsr:blocksize=8x16", "sr-bcrs:vector_length=8", "bitmask", "csr"):
        got = product(convert(x, spec), B)
        assert np.all(got[1] == np.inf), spec
        assert np.all(np.isnan(got[2])), spec
        assert np.all(got[3] == 2), spec


@pytest.mark.parametrize("n", [1, 3, 16])
@pytest.mark.parametrize(
    "spec",
    ["bsr:blocksize=32x8", "bitmask", "csr", "vector-nm:n=2,m=8,vector_length=48", "sr-bcrs:vector_length=8,stride=16"],
)
def test_any_layout_of_b_and_out(spec: str, n: int) -> None:
    a = matrix(spec, "float32", (75, K))
    wanted = exact(a, operand("float32", (K, n)), np.dtype(np.float32))
    for name, B in layouts("float32", n).items():
        B.flags.writeable = False
        np.testing.assert_array_equal(product(a, B), exact(a, B, np.dtype(np.float32)), err_msg=name)
    around = np.zeros((79, n + 6), np.float32)
    for out in (
        np.empty((75, n), np.float32, order="F"),
        around[2:-2, 3:-3],
        np.empty((75, 2 * n), np.float32)[:, ::2],
    ):
        same(product(a, operand("float32", (K, n)), out=out), wanted)
    around[2:-2, 3:-3] = 0
    assert not around.any()  # nothing outside was written


@pytest.mark.parametrize("spec", SPECS)
def test_the_number_of_threads_does_not_change_a_bit(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = matrix(spec, "bfloat16", (300, 400), integers=False)
    B = operand("bfloat16", (400, 7), integers=False)
    monkeypatch.setattr(operands, "SMALL", 0)
    monkeypatch.setattr(few, "FEW_SMALL", 0)
    results = []
    for count in (1, 2, 5):
        monkeypatch.setattr(threads, "cores", lambda count=count: count)
        results.append(product(a, B, out_dtype="float32"))
    for again in results[1:]:
        np.testing.assert_array_equal(again.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("spec", [s for s in SPECS if s.partition(":")[0] not in ("csr", "ell-buckets")])
def test_matrices_that_divide_into_vectors_have_a_loop(spec: str) -> None:
    if spec.startswith(("bitmask", "two-four")) and 4 not in WIDE:
        pytest.skip("this machine does not spread lanes")
    assert loop_of(matrix(spec, "bfloat16", (75, K))) is not None


@pytest.mark.parametrize(
    "spec", ["bsr:blocksize=5x7", "bsr:blocksize=1x16", "sr-bcrs:vector_length=8,stride=5",
             "sr-bcrs:vector_length=2,stride=16", "vector-nm:n=2,m=8,vector_length=5"],
)  # fmt: skip
def test_other_matrices_use_the_loop_for_any_number_of_columns(spec: str) -> None:
    a = matrix(spec, "float32", (75, K))
    assert loop_of(a) is None
    for n in (1, 3, 16):
        B = operand("float32", (K, n))
        same(product(a, B), exact(a, B, np.dtype(np.float32)))


@pytest.mark.parametrize("spec", ["two-four:meta_order=ldmatrix", "bitmask"])
def test_machines_that_do_not_spread_lanes_use_the_loop_for_any_number_of_columns(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spformat.formats.fast import simd

    a, B = matrix(spec, "bfloat16", (75, K)), operand("bfloat16", (K, 3))
    monkeypatch.setattr(simd, "WIDE", frozenset())
    assert loop_of(a) is None
    same(product(a, B, out_dtype="float32"), exact(a, B, np.dtype(np.float32)))


def test_few_columns_are_never_expected_to_take_longer_than_the_loop_for_any_number() -> None:
    from spformat.products.problem import Problem

    for kernel, n, nnz in itertools.product(spmm.KERNELS[1:], (1, 5, 16, 17, 32), (1000, 100_000, 1 << 20)):
        fmt = min(kernel.formats)
        params = {"bsr": (("blocksize", (16, 16)),), "sr-bcrs": (("vector_length", 8), ("stride", 16)),
                  "vector-nm": (("n", 2), ("m", 8), ("vector_length", 32))}.get(fmt, ())  # fmt: skip
        p = Problem.product(fmt, params, 2048, 2048, n, nnz, "bfloat16", "bfloat16", "bfloat16")
        assert kernel.expected_us(p) <= kernel.tiled.expected_us(p)
