"""``dtype=``, ``astype`` and numbers times a matrix: values in another type are rounded, and refused where they are lost."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp

import spformat as sf
from spformat.errors import OrderError, StructureError, UsageError

X = np.array([[3, 0, -4], [0, 100, 0]], np.int8)
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


@pytest.mark.parametrize("dtype", [*NARROW, "float32", "float64"])
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr", "dia", "lil", "dok"])
@pytest.mark.parametrize("kind", ["int64", "bool", "float64", "uint8"])
def test_a_matrix_of_scipy_in_a_type_that_scipy_may_not_have(layout: str, dtype: str, kind: str) -> None:
    x = np.diag([1, 0, 7, 8])[:3].astype(kind)
    a = sf.convert(sp.csr_array(x).asformat(layout), "bitmask", dtype=dtype)
    assert a.dtype.name == dtype
    assert np.array_equal(a.to_dense().astype(np.float64), x.astype(np.float64))


def test_rounding_sums_no_element_that_scipy_stores_twice() -> None:
    twice = sp.coo_array((np.array([100, 100]), ([0, 0], [1, 1])), shape=(2, 2))
    for dtype in ("int8", "float32"):
        with pytest.raises(OrderError, match="more than once"):
            sf.convert(twice, "csr", dtype=dtype)
    assert twice.nnz == 2  # the argument is as it was


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        ([1.0, 300.0, 400.0], "int8", r"2 values do not fit int8, the first is 300\.0"),
        ([1.0, 2.5], "int8", r"1 values do not fit int8, the first is 2\.5"),
        ([1.0, np.nan], "int8", "1 values do not fit int8, the first is nan"),
        ([1.0, 1e6, np.inf], "float16", r"1 values do not fit float16, the first is 1000000\.0"),
        ([1.0, 1000.0], "float8_e4m3fn", r"1 values do not fit float8_e4m3fn, the first is 1000\.0"),
        ([1e300], "float32", "1 values do not fit float32"),
        ([1 + 2j], "float32", "complex values do not fit float32"),
    ],
)
def test_values_that_a_type_cannot_hold(values: list[Any], dtype: str, message: str) -> None:
    x = np.array([values])
    given: list[Any] = [x, np.asfortranarray(x), x.tolist(), sp.csr_array(x)]
    for matrix in given:
        with pytest.raises(UsageError, match=message):
            sf.convert(matrix, "csr", dtype=dtype)
    if x.dtype.kind != "c":
        for name in ("csr", "dense", "bitmask"):
            with pytest.raises(UsageError, match=message):
                sf.convert(x, name).astype(dtype)
    assert np.array_equal(x, np.array([values]), equal_nan=True)


@pytest.mark.parametrize("dtype", [None, *NARROW, "float32", "float64"])
@pytest.mark.parametrize("x", [
    np.array([["NaT", "2020-01-01"]], "M8[D]"), np.array([["NaT", 3]], "m8[D]"), np.array([["NaT"]], "m8[s]"),
    np.array([[None, 1.0]], object), np.array([[1.0]], object), np.array([[10**400]], object),
    np.array([[1j]], object), np.zeros((1, 2), [("a", "f4")]), np.zeros((1, 2), [("a", "f4"), ("b", "f4")]),
    np.array([["1", "2"]]), np.array([["x"]]), np.array([[b""]]), np.zeros((1, 2), "V4"),
], ids=lambda x: str(x.dtype))  # fmt: skip
def test_what_is_no_number_is_refused_with_and_without_a_type(x: np.ndarray[Any, Any], dtype: str | None) -> None:
    """A43: NaT became -9.2e18, None NaN and "1" 1.0; others left numpy's own errors."""
    for target in ("csr", "dense"):
        with pytest.raises(StructureError, match="are not representable") as refused:
            sf.convert(x, target, dtype=dtype)
        assert (refused.value.unit, refused.value.found) == ("dtype", str(x.dtype))
        assert str(x.dtype) in str(refused.value)
        assert "convert(" not in str(refused.value)  # dtype= is no way out
    with pytest.raises(StructureError, match="are not representable"):
        sf.stack([x], "csr", dtype=dtype)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3", "int4"])
def test_numbers_of_ml_dtypes_are_rounded(name: str) -> None:
    x = np.array([[1, 2, 4]], getattr(ml_dtypes, name))
    assert sf.convert(x, "csr", dtype="float32").to_dense().tolist() == [[1, 2, 4]]
    assert sf.convert(x, "dense", dtype="int8").to_dense().tolist() == [[1, 2, 4]]


def test_infinities_nan_and_tiny_values_are_rounded() -> None:
    x = np.array([[np.inf, -np.inf, np.nan, 1e-30, 1 / 3]])
    a = sf.convert(x, "csr", dtype="float16")
    assert np.array_equal(a.to_dense(), x.astype(np.float16), equal_nan=True)
    assert sf.convert(np.broadcast_to(np.float64(0.1), (700, 2000)), "csr", dtype="bfloat16").nnz == 1_400_000


@pytest.mark.parametrize("target", ["csr", "dense", "bitmask", "bsr:2x2", "coo"])
def test_int8_with_a_fraction_is_float64_as_in_numpy(target: str) -> None:
    a: Any = sf.convert(X, target)
    for got, want in (
        (a * 0.5, X * 0.5),
        (2.7 * a, X * 2.7),
        (a * np.float64(1e3), X * 1e3),
        (a * Fraction(1, 4), X * 0.25),
        (a / 0.5, X / 0.5),
        (a / 2, X / 2),
        (a / 1000, X / 1000),
        (a * 1, X),
        (a * np.int8(-1), -X),
    ):
        assert got.dtype == want.dtype
        assert type(got) is type(a)
        assert np.array_equal(got.to_dense(), want)


@pytest.mark.parametrize(("dtype", "number"), [
    ("int8", 300), ("int8", -129), ("int8", 10**400), ("float16", 1e6), ("float16", 70000), ("float8_e4m3fn", 1000),
    ("float8_e5m2", 1e5), ("bfloat16", 10**400), ("float32", 1e300), ("float64", 10**400),
])  # fmt: skip
def test_numbers_beyond_the_type_are_refused(dtype: str, number: Any) -> None:
    a: Any = sf.convert(X[:, :1], "csr", dtype=dtype)
    with pytest.raises(UsageError, match=f"in the range of {dtype}"):
        a * number
    if dtype != "int8":
        with pytest.raises(UsageError, match=f"in the range of {dtype}"):
            a / number
        assert np.isnan((a * float("nan")).to_csr().data.astype(np.float64)).all()
