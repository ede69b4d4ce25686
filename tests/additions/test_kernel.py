"""A kernel: one class and one line (docs/adding-a-kernel.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import laws
import numpy as np
import pytest
from cases import CASES

import spformat as sf
from spformat import backends
from spformat.arrays.library import Array
from spformat.errors import NoKernelError, UsageError
from spformat.products.kernel import Kernel, reasons, spmm_of
from spformat.products.plan import Plan
from spformat.products.problem import Problem


class SpmmCSRByRows(Kernel):
    """C = A @ B for CSR in float32: the rows of B that a row of A refers to, scaled and added up by numpy."""

    name = "mine.spmm_csr_by_rows"
    takes = spmm_of("csr")

    def unsupported(self, p: Problem) -> list[str]:
        return reasons(
            (p.device != "cpu", f"operands are on {p.device}; move them with .to('cpu')"),
            ({p.a_dtype, p.b_dtype, p.out_dtype} != {"float32"}, "A, B and C must be float32"),
            (p.n > 64, f"N must be at most 64, got {p.n}"),
        )

    def expected_us(self, p: Problem) -> float:
        return 0.01 + 1e-6 * p.nnz * p.n

    def _plan(self, a: Any, p: Problem) -> Plan:
        rows, cols, data, shape = a.rows(), a.indices, a.data, (p.rows,)

        def run(B: Array, out: Array | None) -> Array:
            C = np.empty((*shape, B.shape[1]), np.float32) if out is None else out
            C[...] = 0
            np.add.at(C, rows, data[:, None] * B[cols])
            return C

        return Plan(self.name, p, run, "row by row")


class Mine:
    """A backend of one kernel."""

    name = "mine"

    def missing(self) -> list[str]:
        return []

    def kernels(self) -> tuple[Kernel, ...]:
        return (SpmmCSRByRows(),)


@pytest.fixture
def mine() -> Iterator[Mine]:
    yield backends.register(Mine())  # type: ignore[misc]
    backends.unregister("mine")


def test_a_kernel_is_chosen_because_it_expects_the_least(mine: Mine, monkeypatch: pytest.MonkeyPatch) -> None:
    x = laws.integers(CASES["prime"]("float32"))
    a, B = sf.convert(x, "csr"), np.ones((x.shape[1], 3), np.float32)
    trace = sf.explain(a, B)
    assert trace.chosen == SpmmCSRByRows.name
    accepted = [answer for answer in trace.answers if answer]
    assert [k.expected_us for k in accepted] == sorted(k.expected_us for k in accepted)
    assert "mine.spmm_csr_by_rows: accepted, expects 0.0 us" in str(trace)
    assert sf.plan(a, 3).kernel == SpmmCSRByRows.name
    laws.check_spmm(a, x, "mine", 3, np.random.default_rng(0))
    wanted = 0.5 * (x @ B) + np.arange(x.shape[0], dtype=np.float32)[:, None]  # the epilogue is added to any kernel
    np.testing.assert_array_equal(sf.spmm(a, B, alpha=0.5, bias=np.arange(x.shape[0], dtype=np.float32)), wanted)
    monkeypatch.setattr(SpmmCSRByRows, "expected_us", lambda self, p: 1e9)
    slow = sf.explain(sf.convert(x, "csr"), B)
    assert slow.chosen is not None
    assert not slow.chosen.startswith("mine.")


def test_a_kernel_refuses_with_every_reason(mine: Mine) -> None:
    x = laws.integers(CASES["prime"]("float16"))
    a, B = sf.convert(x, "csr"), np.ones((x.shape[1], 65), np.float16)
    trace = sf.explain(a, B)
    assert "mine.spmm_csr_by_rows: A, B and C must be float32; N must be at most 64, got 65" in str(trace)
    np.testing.assert_array_equal(sf.spmm(a, B), x.astype(np.float32) @ B.astype(np.float32))
    with pytest.raises(NoKernelError, match="N must be at most 64, got 65"):
        sf.spmm(a, B, backend="mine")
    with pytest.raises(NoKernelError, match="does not take operation spmm_transposed"):
        sf.spmm(a.T, np.ones((x.shape[0], 2), np.float16), backend="mine.spmm_csr_by_rows")


def test_a_kernel_never_gets_a_matrix_that_was_not_validated(mine: Mine) -> None:
    good = sf.convert(np.eye(4, dtype=np.float32), "csr")
    bad = sf.CSR(shape=(4, 4), indptr=good.indptr, indices=np.array([0, 1, 9, 3], np.int32), data=good.data)
    kernel, problem = SpmmCSRByRows(), sf.plan(good, 2).problem
    with pytest.raises(UsageError, match=r"mine\.spmm_csr_by_rows: expected a validated matrix"):
        kernel.plan(bad, problem)
    for call in (lambda: sf.plan(bad, 2), lambda: sf.spmm(bad, np.ones((4, 2), np.float32), backend="mine")):
        with pytest.raises(sf.errors.IndexBoundsError, match="indices"):
            call()


def test_nothing_of_the_kernel_is_left() -> None:
    assert "mine" not in backends.names()
    with pytest.raises(UsageError, match="no backend called 'mine'"):
        backends.unregister("mine")
