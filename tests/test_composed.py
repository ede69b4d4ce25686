"""Products composed of others on a device: sums of parts, and transposed products with and without a stored transpose."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from graphs import assert_captured

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES

pytestmark = pytest.mark.gpu

COMPOSED = "composed.sum_of_parts"
LAYOUTS = (("row", "row"), ("col", "row"), ("row", "col"), ("col", "col"))
SUMS = {
    "blocks and rest": ("bsr:blocksize=16x16", "csr"),
    "2:4 and outliers": ("two-four", "csr"),
    "three": ("dbsr:blocksize=16x16", "bitmask", "ell-buckets:max_width=4"),
}


@pytest.fixture(scope="module")
def cp() -> Any:
    return pytest.importorskip("cupy")


def parts(name: str, dtype: str, shape: tuple[int, int] = (83, 109)) -> tuple[sf.Sum, np.ndarray[Any, Any]]:
    """A sum of disjoint matrices of small integers, and the matrix itself."""
    rng = np.random.default_rng(3)
    x = rng.choice([-3, -2, -1, 1, 2, 3], shape).astype(VALUE_TYPES[dtype].numpy)
    owner = np.kron(rng.integers(0, 4, (7, 8)), np.ones((16, 16), int))[: shape[0], : shape[1]]
    matrices = []
    for i, spec in enumerate(SUMS[name]):
        keep = owner == i
        if spec == "two-four":
            keep &= np.arange(shape[1]) % 4 < 2
        elif i:
            keep &= rng.random(shape) < 0.3
        matrices.append(np.where(keep, x, np.zeros((), x.dtype)))
    total = np.sum([m.astype(np.float64) for m in matrices], axis=0)
    pieces = [sf.convert(m, s) for m, s in zip(matrices, SUMS[name], strict=True)]
    return sf.Sum(parts=tuple(pieces)).validate(), total


def place(cp: Any, x: np.ndarray[Any, Any], layout: str) -> Any:
    return cp.asarray(x) if layout == "row" else cp.asarray(np.ascontiguousarray(x.T)).T


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_parts_are_exact(cp: Any, name: str, dtype: str, transposed: bool) -> None:
    if dtype == "float32" and "two-four" in SUMS[name]:
        pytest.skip("no kernel of a GPU takes float32 in two-four")
    host, total = parts(name, dtype)
    A, x = host.to("cuda"), total.T if transposed else total
    rng = np.random.default_rng(5)
    for i, n in enumerate((1, 17, 64, 136)):
        b_layout, c_layout = LAYOUTS[i]
        B = rng.integers(-2, 3, (x.shape[1], n)).astype(VALUE_TYPES[dtype].numpy)
        wanted = (x @ B.astype(np.float64)).astype(B.dtype).astype(np.float64)
        dev = place(cp, B, b_layout)
        out = cp.full((x.shape[0], n), float("nan"), B.dtype, order="C" if c_layout == "row" else "F")
        for backend in (COMPOSED, COMPOSED, COMPOSED, None):
            sf.spmm(A.T if transposed else A, dev, out=out, backend=backend)
            assert (out.get().astype(np.float64) == wanted).all(), (name, n, b_layout, c_layout)
            out.fill(float("nan"))
        bias = cp.asarray(rng.integers(-2, 3, x.shape[0]).astype(B.dtype))
        out.fill(1)
        sf.spmm(A.T if transposed else A, dev, out=out, backend=COMPOSED, alpha=2.0, beta=1.0, bias=bias)
        exact = (2 * (x @ B.astype(np.float64)) + 1 + bias.get().astype(np.float64)[:, None]).astype(B.dtype)
        assert (out.get().astype(np.float64) == exact.astype(np.float64)).all(), (name, n)


def test_a_sum_is_captured(cp: Any) -> None:
    host, total = parts("blocks and rest", "bfloat16")
    A = host.to("cuda")
    B = np.random.default_rng(1).integers(-2, 3, (total.shape[1], 24)).astype(VALUE_TYPES["bfloat16"].numpy)
    dev, out = cp.asarray(B), cp.empty((total.shape[0], 24), B.dtype)
    assert_captured(cp, functools.partial(sf.spmm, A, backend=COMPOSED), dev, out, total @ B.astype(np.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "spec", ["csr", "ell-buckets", "bsr:blocksize=16x16", "dbsr:blocksize=16x16", "sr-bcrs", "bitmask"]
)
def test_transposed_products_by_every_way(cp: Any, spec: str, dtype: str) -> None:
    _, total = parts("blocks and rest", dtype)
    x = total.astype(VALUE_TYPES[dtype].numpy)
    A = sf.convert(x, spec).to("cuda")
    rng = np.random.default_rng(6)
    for i, n in enumerate((1, 9, 64, 200)):
        B = rng.integers(-2, 3, (x.shape[0], n)).astype(x.dtype)
        wanted = total.T @ B.astype(np.float64)
        dev = place(cp, B, LAYOUTS[i][0])
        for backend in ("composed.transposed_copy", "cuda.expand_then_dense", None):
            out = cp.full((x.shape[1], n), float("nan"), x.dtype, order="C" if LAYOUTS[i][1] == "row" else "F")
            sf.spmm(A.T, dev, out=out, backend=backend)
            exact = wanted.astype(x.dtype).astype(np.float64)
            assert (out.get().astype(np.float64) == exact).all(), (spec, n, backend)


@pytest.mark.parametrize(
    ("specs", "transposed", "backend"),
    [
        (("csr", "coo"), False, COMPOSED),
        (("csc", "csr"), True, COMPOSED),
        (("coo",), False, "composed.copied_operands"),
        (("csr",), True, "composed.copied_operands"),
    ],
)
def test_out_is_not_the_memory_of_a_matrix_inside(
    cp: Any, specs: tuple[str, ...], transposed: bool, backend: str
) -> None:
    """The plan of a sum or of a copied operand asks the plans inside of it where their matrices lie."""
    x = np.arange(1, 64 * 64 + 1, dtype=np.float32).reshape(64, 64)
    pieces = [sf.convert(m, s) for m, s in zip((np.triu(x), np.tril(x, -1)), specs, strict=False)]
    A = (sf.Sum(parts=tuple(pieces)).validate() if len(pieces) > 1 else pieces[0]).to("cuda")
    B = cp.ones((64, 13), np.float32)
    plan = sf.plan(A.T if transposed else A, B=B, backend=backend)
    for matrix in A.parts_by_name().values() or [A]:
        values = matrix.arrays()["data"]
        before = values.get()
        with pytest.raises(ValueError, match="out overlaps the arrays of A"):
            plan(B, out=values[: 64 * 13].reshape(64, 13))
        assert (values.get() == before).all()
