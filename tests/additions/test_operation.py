"""An operation: one definition and one line (docs/adding-an-operation.md)."""

from __future__ import annotations

from collections.abc import Iterator

import laws
import numpy as np
import pytest
from cases import CASES, params_of

import spformat as sf
from additions.coordinates import Coordinates
from spformat.arrays.dtypes import nonzero_mask
from spformat.arrays.library import Array
from spformat.dispatch import api, select
from spformat.errors import NoKernelError, UsageError
from spformat.formats.base import Format
from spformat.products import operations
from spformat.products.operation import Items, Operation
from spformat.products.problem import Operand, Problem


def sddmm_problem(A: Format, X: Array, Y: Array, out: Array | None = None) -> Problem:
    """values of A times (X @ Y) at the places of A's nonzeros, row after row: [nnz]."""
    M, K = A.shape
    if X.ndim != 2 or Y.ndim != 2 or X.shape[0] != M or Y.shape != (X.shape[1], K):
        raise ValueError(f"X, Y: expected shapes ({M}, d) and (d, {K}), got {X.shape} and {Y.shape}")
    if out is not None and out.shape != (A.nnz,):
        raise ValueError(f"out: expected shape ({A.nnz},), got {out.shape}")
    dtype = "float32" if out is None else out.dtype.name
    result = Operand("dense", (A.nnz,), dtype, stored=A.nnz)
    return Problem("sddmm", (Operand.of(A), Operand.of(X), Operand.of(Y)), result)


def sddmm_reference(a: Items, X: Array, Y: Array) -> Array:
    """One dot product for each item."""
    return a.values * np.einsum("id,di->i", X[a.rows], Y[:, a.cols])


SDDMM = Operation("sddmm", sddmm_problem, sddmm_reference)


@pytest.fixture
def sddmm() -> Iterator[Operation]:
    yield operations.register(SDDMM)
    operations.unregister("sddmm")


def sampled(dtype: str = "float32") -> tuple[Array, Array, Array, Array]:
    """A matrix, two dense operands of whole numbers, and what the operation gives."""
    x = laws.integers(CASES["vectors"](dtype))
    rng = np.random.default_rng(4)
    X, Y = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((x.shape[0], 5), (5, x.shape[1])))
    whole = x.astype(np.float64) * (X.astype(np.float64) @ Y.astype(np.float64))
    return x, X, Y, whole[nonzero_mask(x)]


def halves(x: Array) -> list[Format]:
    """The upper and the lower half of a matrix, in two formats."""
    top = x * (np.arange(x.shape[0]) < x.shape[0] // 2)[:, None].astype(x.dtype)
    return [sf.convert(top, "csr"), sf.convert(x - top, "bitmask")]


def test_an_operation_runs_for_every_format(sddmm: Operation) -> None:
    x, X, Y, expected = sampled("float16")
    ran = set()
    for fmt, params in [(f, p) for f in (*sf.FORMATS, sf.Sum) for p in ([{}] if f is sf.Sum else params_of(f.name))]:
        try:
            a = sf.Sum.from_parts(halves(x)) if fmt is sf.Sum else fmt.from_dense(x, **params)
        except sf.errors.StructureError:
            continue
        ran.add(fmt.name)
        np.testing.assert_array_equal(api.run("sddmm", a, X, Y), expected.astype(np.float32), err_msg=fmt.name)
        out = np.full(expected.size, np.nan, np.float64)
        assert api.run("sddmm", a, X, Y, out=out) is out
        np.testing.assert_array_equal(out, expected)
    assert ran == {f.name for f in (*sf.FORMATS, sf.Sum)}


def test_an_operation_is_explained_and_refused(sddmm: Operation) -> None:
    x, X, Y, expected = sampled()
    a = sf.convert(x, "csr")
    answer = select.ask(sddmm.problem(a, X, Y))
    assert answer.chosen == "reference.sddmm"
    assert answer.expected_us is not None
    assert str(answer).startswith("sddmm of A 43x62 (float32, csr, cpu) and B 43x5 (float32, row) and 5x62")
    with pytest.raises(NoKernelError, match=r"reference.sddmm: out.dtype must be one of"):
        api.run("sddmm", a, X, Y, out=np.empty(expected.size, np.int32))
    with pytest.raises(ValueError, match=r"X, Y: expected shapes \(43, d\) and \(d, 62\), got"):
        api.run("sddmm", a, Y, X)
    with pytest.raises(ValueError, match="out overlaps the arrays of A"):
        api.run("sddmm", a, X, Y, out=a.data)
    with pytest.raises(UsageError, match="an operation called 'sddmm' is already registered"):
        operations.register(Operation("sddmm", sddmm_problem, sddmm_reference))


def test_an_operation_takes_a_new_format_too(sddmm: Operation, added: type[Coordinates]) -> None:
    x, X, Y, expected = sampled()
    np.testing.assert_array_equal(api.run("sddmm", added.from_dense(x), X, Y), expected)


def test_nothing_of_the_operation_is_left() -> None:
    assert {o.name for o in operations.registered()} == {"spmm", "spmm_transposed"}
    with pytest.raises(UsageError, match="unknown operation 'sddmm'"):
        api.run("sddmm", np.eye(2, dtype=np.float32), np.eye(2), np.eye(2))
