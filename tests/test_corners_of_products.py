"""Corners in which a product was once wrong: scaled overflows, memory in common, rounding, nothing to multiply."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import spformat as sf
from spformat.arrays.rounding import rounded_once
from spformat.dispatch import cost
from spformat.errors import UsageError
from spformat.preprocess import structure

BACKENDS = ("cpu", "reference")
INF = float("inf")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        pytest.importorskip("numba", reason="numba is missing: pip install 'spformat[cpu]'")
    return str(request.param)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "bfloat16", "float64"])
@pytest.mark.parametrize("alpha", [0.25, -1e-9])
def test_alpha_and_infinities(alpha: float, dtype: str, backend: str) -> None:
    a = sf.convert(np.array([[INF, 0], [1, 1]], np.float32), "csr")
    with np.errstate(all="ignore"):
        C = sf.spmm(a, np.ones((2, 1), dtype), alpha=alpha, backend=backend)
    assert C[0, 0] == np.sign(alpha) * INF
    assert float(C[1, 0]) == pytest.approx(2 * alpha, rel=2**-8)


@pytest.mark.parametrize(
    ("A", "B", "alpha"),
    [
        ([[3e38]], [[3.0]], 0.25),
        ([[3e38, 3e38]], [[3.0], [1.0]], 0.125),
        ([[3e38, -3e38, 3e38]], [[2.0], [2.0], [1.0]], 0.5),  # inf - inf on the way
        ([[1e38, 1e-5]], [[1e38], [1.0]], 1e-40),  # beyond half of the exponents
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alpha_makes_an_overflow_finite_again(A: Any, B: Any, alpha: float, dtype: str, backend: str) -> None:
    a, b = sf.convert(np.array(A, np.float32), "csr"), np.array(B).astype(dtype)
    exact = alpha * (np.array(A, np.float32).astype(np.float64) @ b.astype(np.float64))
    with np.errstate(all="ignore"):
        C = sf.spmm(a, b, alpha=alpha, out=np.zeros((1, 1), np.float32), backend=backend)
    np.testing.assert_allclose(C, exact, rtol=1e-6)


def test_a_bias_in_the_memory_of_c_is_refused(backend: str) -> None:
    a, y = sf.convert(2 * np.eye(4, dtype=np.float32), "csr"), np.array([[1, 2, 3, 4]], np.float32)
    with pytest.raises(ValueError, match="out overlaps the bias"), sf.use_backend(backend):
        sf.linear(np.ones((1, 4), np.float32), a, y[0], out=y)
    with sf.use_backend(backend):
        assert sf.linear(np.ones((1, 4), np.float32), a, y[0].copy(), out=y).tolist() == [[3, 4, 5, 6]]


# (shape, strides in elements, whether two elements share memory)
VIEWS = [
    ((4, 3), (0, 1), True),  # a row that stands for all, as by torch's expand
    ((4, 3), (1, 0), True),
    ((4, 1), (0, 1), True),
    ((4, 3), (1, 1), True),  # windows
    ((4, 3), (2, 1), True),
    ((4, 3), (-2, 3), True),  # row 3 of column 2 is row 0 of column 0
    ((4, 3), (3, 1), False),
    ((4, 3), (-7, 2), False),
    ((4, 3), (2, 5), False),  # lines inside each other, without a common element
]


@pytest.mark.parametrize(("shape", "steps", "shared"), VIEWS)
@pytest.mark.parametrize("alpha", [1, 2])
def test_an_out_whose_elements_share_memory_is_refused(
    shape: tuple[int, int], steps: tuple[int, int], shared: bool, alpha: int, backend: str
) -> None:
    w, x = np.diag(np.arange(1, 5)).astype(np.float32), np.ones((4, shape[1]), np.float32)
    strides = (4 * steps[0], 4 * steps[1])
    out: Any = np.ndarray(shape, np.float32, np.zeros(99, np.float32), 4 * 40, strides)
    a = sf.convert(w, "csr")
    if shared:
        with pytest.raises(ValueError, match="out: two elements share memory"):
            sf.spmm(a, x, out, backend, alpha=alpha)
        with pytest.raises(ValueError, match="out: two elements share memory"):
            sf.linear(x.T.copy(), a, out=out.T, backend=backend, alpha=alpha)
    else:
        assert (sf.spmm(a, x, out, backend, alpha=alpha) == alpha * (w @ x)).all()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_float64_is_rounded_once(name: str) -> None:
    """Against the nearest of all values of the type, around the middles between two of them."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    codes = np.arange(1 << 8 * dtype.itemsize, dtype=np.uint32).astype(f"u{dtype.itemsize}")
    with np.errstate(all="ignore"):
        values = np.unique(codes.view(dtype).astype(np.float64))
    values = values[np.isfinite(values)]
    middles = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(middles, s * INF) for s in (-1, 1)] + [middles * (1 + s * 2**-30) for s in (-1, 1)]
    for x in near:
        got, at = rounded_once(x, dtype).astype(np.float64), np.searchsorted(values, x)
        least = np.minimum(abs(x - values[at - 1]), abs(values[np.minimum(at, values.size - 1)] - x))
        np.testing.assert_array_equal(abs(got - x), least)
    even = codes.view(dtype)[::2]  # where two are as near, the one whose last bit is 0
    with np.errstate(all="ignore"):
        ties = rounded_once(middles, dtype)
        assert set(ties[np.isfinite(ties.astype(np.float64))].view(codes.dtype).tolist()) <= set(
            even.view(codes.dtype).tolist()
        )
    with np.errstate(all="ignore"):
        assert np.isnan(rounded_once(np.array([np.nan]), dtype).astype(np.float64)).all()
    assert np.signbit(rounded_once(np.array([-0.0]), dtype).astype(np.float64)).all()
    assert rounded_once(np.array([2**24 + 2**16 + 1]), np.dtype(ml_dtypes.bfloat16)) == 2**24 + 2**17


def test_conversions_and_products_round_once(backend: str) -> None:
    x = np.array([[1 + 2**-8 + 2**-30]])
    assert sf.convert(x, "csr", dtype="bfloat16").data[0] == 1 + 2**-7
    out = sf.spmm(sf.convert(x, "csr"), np.ones((1, 1)), out=np.zeros((1, 1), ml_dtypes.bfloat16), backend=backend)
    assert out[0, 0] == 1 + 2**-7


def test_infinity_is_no_value_of_a_type_without_one() -> None:
    x = np.array([[INF, 1]], np.float32)
    with pytest.raises(UsageError, match="1 values do not fit float8_e4m3fn, the first is inf"):
        sf.convert(x, "csr", dtype="float8_e4m3fn")
    assert sf.convert(x, "csr", dtype="float8_e5m2").data[0] == INF


def test_the_smallest_format_of_a_very_sparse_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted by its coordinates: a dense array of it would not fit into memory."""
    sparse = pytest.importorskip("scipy.sparse")
    a = sparse.random_array((200_000, 200_000), density=1e-7, rng=np.random.default_rng(0), dtype=np.float32)
    small = sf.convert(a, "auto")
    assert small.nbytes <= sf.convert(a, "csr").nbytes
    for density in (0.001, 0.1):
        x = (np.random.default_rng(1).random((300, 400)) < density).astype(np.float32)
        assert sf.convert(x, "csr").smallest() == structure.analyse(x).smallest()


@pytest.mark.parametrize("columns", [256, 600])
@pytest.mark.parametrize("shape", [(0, 16384), (16384, 0)])
@pytest.mark.parametrize("fmt", ["bitmask", "csr"])
def test_a_transpose_without_rows(fmt: str, shape: tuple[int, int], columns: int, backend: str) -> None:
    a = sf.convert(np.zeros(shape, np.float32), fmt)
    C = sf.spmm(a.T, np.ones((shape[0], columns), np.float32), backend=backend)
    assert C.shape == (shape[1], columns)
    assert not C.any()


def test_the_cost_of_a_transpose_and_of_an_array() -> None:
    x = np.eye(256, 1024, dtype=np.float16)
    a = sf.convert(x, "csr")
    assert cost.estimate(a.T, 64).bytes == a.nbytes + (256 + 1024) * 64 * 2
    assert cost.estimate(x, 64).bytes == x.nbytes + (256 + 1024) * 64 * 2
    with pytest.raises(UsageError, match="device: expected one of H200, H100, A100"):
        cost.estimate(a, 64, device=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 40])
@pytest.mark.parametrize("fmt", ["csr", "bsr:blocksize=1x64", "bitmask", "dense"])
def test_sums_of_int8_beyond_int32(fmt: str, n: int, dtype: str, backend: str) -> None:
    """A C of a floating-point type holds them; they were added up in int32 and wrapped."""
    K = 2**17
    A, B = sf.convert(np.full((1, K), -128, np.int8), fmt), np.full((K, n), -128, np.int8)
    C = np.empty((1, n), dtype)
    assert (sf.spmm(A, B, C, backend) == 2.0**31).all()
    assert (sf.spmm(A, B, C, backend, alpha=0.5) == 2.0**30).all()
    tall = sf.convert(np.full((K, 1), -128, np.int8), fmt)
    assert (sf.spmm(tall.T, B, C, backend) == 2.0**31).all()
    assert (sf.spmm(A, B, backend=backend) == -(2**31)).all()  # int32, which wraps
