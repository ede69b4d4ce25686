"""The laws of every product: each format, both operations, and all ways to ask for them, on integers that are exact."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import laws
import numpy as np
import pytest
from cases import CASES, params_of

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, bits
from spformat.backends import get
from spformat.formats import Format, registered
from spformat.products.problem import result_dtype

Array = np.ndarray[Any, Any]

FORMATS = [(f, params) for f in registered() for params in params_of(f.name)]
FORMAT_IDS = pytest.mark.parametrize(
    ("fmt", "params"), FORMATS, ids=lambda v: v.name if isinstance(v, type) else ",".join(map(str, v.values())) or "-"
)
OPERATIONS = ("spmm", "spmm_transposed")
BACKENDS = ("reference", "cpu")
PAIRS = pytest.mark.parametrize(("operation", "backend"), list(itertools.product(OPERATIONS, BACKENDS)))


@pytest.fixture(autouse=True)
def usable(request: pytest.FixtureRequest) -> None:
    """Skips a backend that cannot run on this machine."""
    if "backend" in request.fixturenames:
        missing = get(request.getfixturevalue("backend")).missing()
        if missing:
            pytest.skip("; ".join(missing))


def left(a: Any, operation: str) -> Any:
    """The left factor of the product: A, or A.T."""
    return a.T if operation == "spmm_transposed" else a


def integers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Small whole numbers of a value type; sums of their products are exact in float32."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(VALUE_TYPES[dtype].numpy)


def wide(x: Array) -> Array:
    return x.astype(np.float64)


def whole(x: Array, operation: str) -> Array:
    """The matrix on the left in float64."""
    return wide(x.T if operation == "spmm_transposed" else x)


def natural(fmt: type[Format]) -> str:
    """float32 where the format stores it, else float16."""
    return "float32" if "float32" in fmt.value_dtypes else "float16"


def fitting(fmt: type[Format], params: dict[str, Any], x: Array) -> Format:
    """``x`` in a format; skips what the format cannot hold without losing values."""
    try:
        return fmt.from_dense(x, **params)
    except sf.errors.StructureError as e:
        pytest.skip(str(e))


@PAIRS
@FORMAT_IDS
def test_all_of_c_is_written(fmt: type[Format], params: dict[str, Any], operation: str, backend: str) -> None:
    """Every case; row- and column-major operands; C is full of NaN before, and exact after."""
    tried, dtype = 0, natural(fmt)
    for case, make in CASES.items():
        x = laws.integers(make(dtype))
        try:
            A = left(fmt.from_dense(x, **params), operation)
        except sf.errors.StructureError:  # the format cannot hold this one without losing values
            continue
        tried += 1
        matrix = whole(x, operation)
        rows, inner = matrix.shape
        for n, b, c in ((0, "C", "C"), (1, "C", "C"), (17, "C", "F"), (17, "F", "C")):
            B = np.asarray(integers((inner, n), dtype, n), order=b)  # type: ignore[call-overload]
            out = np.full((rows, n), np.nan, np.float32, order=c)  # type: ignore[call-overload]
            assert sf.spmm(A, B, out=out, backend=backend) is out
            np.testing.assert_array_equal(wide(out), matrix @ wide(B), err_msg=f"{case} n={n} B {b} C {c}")
    assert tried >= 8


@PAIRS
@FORMAT_IDS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8"])
def test_every_value_type(fmt: type[Format], params: dict[str, Any], dtype: str, operation: str, backend: str) -> None:
    if dtype not in fmt.value_dtypes:
        pytest.skip(f"{fmt.name} does not store {dtype}")
    x = laws.integers(CASES["vectors"](dtype))
    A, matrix = left(fitting(fmt, params, x), operation), whole(x, operation)
    B = integers((matrix.shape[1], 5), dtype)
    C = sf.spmm(A, B, backend=backend)
    assert C.dtype.name == result_dtype(dtype, dtype)
    np.testing.assert_array_equal(wide(C), matrix @ wide(B))


@PAIRS
@FORMAT_IDS
def test_every_way_to_ask_agrees(fmt: type[Format], params: dict[str, Any], operation: str, backend: str) -> None:
    """``spmm``, ``@``, a vector, ``linear``, ``alpha``, ``beta`` and ``bias``, ``plan``."""
    x = laws.integers(CASES["vectors"](dtype := natural(fmt)))
    A, matrix = left(fitting(fmt, params, x), operation), whole(x, operation)
    rows, inner = matrix.shape
    B = integers((inner, 7), dtype)
    expected = matrix @ wide(B)
    with sf.use_backend(backend):
        np.testing.assert_array_equal(wide(A @ B), expected)
        np.testing.assert_array_equal(wide(A @ B[:, 2]), expected[:, 2])
        y = np.full(rows, np.nan, VALUE_TYPES[dtype].numpy)
        sf.spmm(A, B[:, 3], out=y)
        np.testing.assert_array_equal(wide(y), expected[:, 3])

        C, bias = integers((rows, 7), dtype, 1), integers((rows,), dtype, 2)
        wanted = 0.5 * expected + 2 * wide(C) + wide(bias)[:, None]
        np.testing.assert_array_equal(wide(sf.spmm(A, B, out=C.copy(), alpha=0.5, beta=2, bias=bias)), wanted)
        planned = sf.plan(A, 7, epilogue=True)
        np.testing.assert_array_equal(wide(planned(B, C.copy(), alpha=0.5, beta=2, bias=bias)), wanted)
        unread = np.full((rows, 7), np.nan, VALUE_TYPES[dtype].numpy)  # beta is 0: C is not read
        np.testing.assert_array_equal(wide(sf.spmm(A, B, out=unread, alpha=0.5)), 0.5 * expected)

        rows_of_x = np.ascontiguousarray(B.T)
        np.testing.assert_array_equal(wide(sf.linear(rows_of_x, A, bias)), expected.T + wide(bias))
        batch = rows_of_x[None].repeat(2, axis=0)
        np.testing.assert_array_equal(wide(sf.linear(batch, A)), np.stack([expected.T] * 2))


@PAIRS
@FORMAT_IDS
def test_a_plan_runs_for_any_number_of_columns(
    fmt: type[Format], params: dict[str, Any], operation: str, backend: str
) -> None:
    x = laws.integers(CASES["vectors"](dtype := natural(fmt)))
    A, matrix = left(fitting(fmt, params, x), operation), whole(x, operation)
    plan = sf.plan(A, 4, backend=backend)
    for n in (1, 4, 31, 100, 0):
        B = integers((matrix.shape[1], n), dtype, n)
        np.testing.assert_array_equal(wide(plan(B)), matrix @ wide(B))


def test_a_plan_cannot_be_changed() -> None:
    plan = sf.plan(sf.convert(np.eye(4, dtype=np.float32), "csr"), 4)
    for f in dataclasses.fields(plan):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, f.name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.problem.sm = 90  # type: ignore[misc]
    assert hash(plan.problem) == hash(dataclasses.replace(plan.problem))


# ------------------------------------------------------------------ sums


def cut(x: Array, n: int) -> list[Array]:
    """n matrices among which the elements of x are divided."""
    owner = np.random.default_rng(n).integers(0, n, x.shape)
    return [np.where(owner == i, bits(x), 0).astype(bits(x).dtype).view(x.dtype) for i in range(n)]


TARGETS = ("bsr:blocksize=4x8", "csr", "bitmask")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["composed", "reference", None])
@pytest.mark.parametrize(("case", "parts"), [("prime", 2), ("two_four", 3), ("no_rows", 2), ("no_columns", 3),
                                             ("one", 2), ("all_zero", 2), ("wide", 3), ("corner", 2)])  # fmt: skip
def test_a_sum_is_multiplied_like_any_matrix(case: str, parts: int, name: str | None, operation: str) -> None:
    x = laws.integers(CASES[case]("float32"))
    a = sf.Sum.from_parts(sf.convert(p, t) for p, t in zip(cut(x, parts), TARGETS, strict=False))
    A, matrix = left(a, operation), whole(x, operation)
    rows, inner = matrix.shape
    B = integers((inner, 5), "float32")
    expected = matrix @ wide(B)
    out = np.full((rows, 5), np.nan, np.float32, order="F")
    np.testing.assert_array_equal(wide(sf.spmm(A, B, out=out, backend=name)), expected)
    C, bias = integers((rows, 5), "float32", 1), integers((rows,), "float32", 2)
    wanted = 0.5 * expected + 2 * wide(C) + wide(bias)[:, None]
    C = sf.spmm(A, B, out=C, alpha=0.5, beta=2, bias=bias, backend=name)
    np.testing.assert_array_equal(wide(C), wanted)
    np.testing.assert_array_equal(wide(sf.spmm(A, B[:, 0], backend=name)), expected[:, 0])
    plan = sf.plan(A, 2, backend=name)
    np.testing.assert_array_equal(wide(plan(B)), expected)
    rows_of_x = np.ascontiguousarray(B.T)
    np.testing.assert_array_equal(wide(sf.linear(rows_of_x, A, bias, backend=name)), expected.T + wide(bias))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_sum_is_rounded_once(operation: str) -> None:
    """2048 + 1 + 1 is 2050 in float16; rounded after each part it would stay 2048."""
    row = np.array([[2048, 1, 1]], np.float16)
    parts = [np.where(np.arange(3) == i, row, 0).astype(np.float16) for i in range(3)]
    if operation == "spmm_transposed":
        parts = [np.ascontiguousarray(p.T) for p in parts]
    after_each = np.float16(0)
    for value in row[0]:
        after_each = np.float16(after_each + value)
    assert after_each == 2048
    a = sf.Sum.from_parts(sf.convert(p, "csr") for p in parts)
    C = sf.spmm(left(a, operation), np.ones((3, 2), np.float16))
    assert C.dtype == np.float16
    assert C.tolist() == [[2050, 2050]]


# ------------------------------------------------------------------ workspace


@FORMAT_IDS
def test_no_workspace_refuses_what_needs_some(fmt: type[Format], params: dict[str, Any]) -> None:
    """A dense copy and a stored transpose need one, and say how many bytes; the others are chosen as before."""
    x = laws.integers(CASES["vectors"](dtype := natural(fmt)))
    a = fitting(fmt, params, x)
    for operation in OPERATIONS:
        for b in ("row", "col"):
            plan = sf.plan(left(a, operation), 8, b_layout=b, workspace=0)
            assert not {"expand_then_dense", "transposed_copy"} & {plan.kernel.partition(".")[2]}, plan.kernel
    if fmt is sf.Dense:
        return
    for name in ("composed.transposed_copy", "cpu.expand_then_dense"):
        if get(name.partition(".")[0]).missing():
            continue
        B = integers((x.shape[0], 3), dtype)
        plan = sf.plan(a.T, 3, backend=name)
        assert plan.kernel == name
        assert plan.workspace > 0
        np.testing.assert_array_equal(wide(plan(B)), whole(x, "spmm_transposed") @ wide(B))
        with pytest.raises(sf.errors.NoKernelError, match=r"needs a workspace of [\d,]+ bytes, the call allows 0"):
            sf.plan(a.T, 3, backend=name, workspace=0)
