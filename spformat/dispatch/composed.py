"""Products composed of other products: a sum of parts, a product with the CSR that has the same arrays, and a
transposed product through a stored transpose.

They are kernels like any other, with an expected time that follows from those of the kernels they are composed of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..backends import register
from ..errors import NoKernelError
from ..formats import registered
from ..formats.base import Format
from ..formats.dense import Dense
from ..formats.sum import Sum
from ..products import same_arrays
from ..products.kernel import Kernel, spmm_of
from ..products.plan import Plan
from ..products.problem import Operand, Problem, itemsize
from ..products.roofline import epilogue_us, moved_us
from . import copied_operands
from .plans import plan_with
from .select import ask, choose


def _expected(p: Problem) -> float:
    expected = ask(p).expected_us
    return float("inf") if expected is None else expected


def _why_not(what: str, p: Problem) -> list[str]:
    """The reason if no kernel takes ``p``, one of the problems that a product is composed of."""
    trace = ask(p)
    return [] if trace.chosen else [f"no kernel takes {what} ({p.operands[0].format})"]


class SumOfParts(Kernel):
    """The products with the parts of a sum, one after the other; every part but the first adds to C.

    A 16-bit C is summed in a float32 workspace and rounded once.
    """

    name = "composed.sum_of_parts"
    epilogue = False

    takes = spmm_of(Sum.name) | spmm_of(Sum.name, operation="spmm_transposed")

    def problems(self, p: Problem) -> list[Problem]:
        """The problems of the parts: the first writes the sums, the others add to them."""
        wide = "float32" if p.out_dtype in ("float16", "bfloat16") else p.out_dtype
        parts = p.operands[0].parts
        alone = [replace(p, operands=(part, *p.operands[1:])).changed(out_dtype=wide) for part in parts]
        return [alone[0], *(replace(q, epilogue=True) for q in alone[1:])] if alone else []

    def unsupported(self, p: Problem) -> list[str]:
        """What the kernels of the parts refuse."""
        refused = [text for i, q in enumerate(self.problems(p)) for text in _why_not(f"part {i}", q)]
        return refused or ([] if p.operands[0].parts else ["the problem names no parts"])

    def workspace_bytes(self, p: Problem) -> int:
        """The float32 sums of a 16-bit C."""
        return 4 * p.rows * p.n if p.out_dtype in ("float16", "bfloat16") else 0

    def expected_us(self, p: Problem) -> float:
        """The sum of the expected times of the parts, and what these leave out: every part but the first reads C
        before it adds to it, and a 16-bit C is rounded in a pass of its own."""
        problems = self.problems(p)
        parts = sum(_expected(q) + (moved_us(q, q.rows * q.n * itemsize(q.out_dtype)) if q.epilogue else 0.0)
                    for q in problems)  # fmt: skip
        return parts + (epilogue_us(p) if problems and problems[0].out_dtype != p.out_dtype else 0.0)

    def _plan(self, a: Any, p: Problem) -> Plan:
        plans = [
            plan_with(choose(q), part.ensure_valid(), q)
            for part, q in zip(a.parts_by_name().values(), self.problems(p), strict=True)
        ]
        if p.device == "cpu":
            from ..backends.host import sum_of_plans
        else:
            from ..backends.cuda.runtime.compose import sum_of_plans
        return sum_of_plans(self.name, plans, p)


class SameArrays(Kernel):
    """C = A @ B and C = A^T @ B for COO and CSC, as the product with the CSR that has the same indices and values.

    For COO that is the CSR of A, whose row pointer is counted once; for CSC it is the CSR of A^T, so that the product
    with A is one with a transpose. The plan keeps the CSR; no index and no value is copied.
    """

    name = "composed.same_arrays"
    epilogue = True
    takes = spmm_of(*same_arrays.FORMATS) | spmm_of(*same_arrays.FORMATS, operation="spmm_transposed")

    def problem(self, p: Problem) -> Problem:
        """The product with the CSR."""
        return same_arrays.problem_of_csr(p)

    def unsupported(self, p: Problem) -> list[str]:
        """What every kernel for the CSR refuses."""
        return _why_not("the CSR of the same arrays", self.problem(p))

    def expected_us(self, p: Problem) -> float:
        """The expected time of the product with the CSR."""
        return _expected(self.problem(p))

    def _plan(self, a: Any, p: Problem) -> Plan:
        return _plan_of(self, same_arrays.csr_of(a), p, "CSR", same_arrays.own_bytes(a))


class TransposedCopy(Kernel):
    """C = A^T @ B as a product with a transposed copy of A, which the plan keeps."""

    name = "composed.transposed_copy"
    epilogue = True

    @property
    def takes(self) -> frozenset[tuple[str, str]]:  # type: ignore[override]
        """Every format but dense and sums. Dense products need no copy, and sums are multiplied part by part."""
        return spmm_of(*(f.name for f in registered() if f is not Dense), operation="spmm_transposed")

    def problem(self, p: Problem) -> Problem:
        """The product with the copy: CSR, or blocks where A stores blocks."""
        a = p.operands[0]
        params = dict(a.params)
        if "blocksize" in params:
            params = {"blocksize": params["blocksize"][::-1]}
        name = a.format if "blocksize" in params else "csr"
        copy = Operand("bsr" if name == "dbsr" else name, a.shape[::-1], a.dtype,
                       tuple(params.items()) if "blocksize" in params else (), a.stored, device=a.device)  # fmt: skip
        return replace(p, operation="spmm", operands=(copy, *p.operands[1:]))

    def unsupported(self, p: Problem) -> list[str]:
        """What every kernel for the copy refuses."""
        return _why_not("the transposed copy", self.problem(p))

    def workspace_bytes(self, p: Problem) -> int:
        """The copy: values, an index for each (fewer for blocks) and pointers."""
        return p.nnz * (itemsize(p.a_dtype) + 4) + 4 * (p.K + 1)

    def expected_us(self, p: Problem) -> float:
        """The expected time of the product with the copy. The copy is built only once and not counted."""
        return _expected(self.problem(p))

    def _plan(self, a: Any, p: Problem) -> Plan:
        copy = a.kernel_arrays("transposed copy", lambda: a.T.materialize().ensure_valid())
        return _plan_of(self, copy, p, "transposed copy", int(copy.nbytes))


def _plan_of(kernel: SameArrays | TransposedCopy, other: Format, p: Problem, what: str, owned: int) -> Plan:
    """The plan of the product with ``other``, a matrix made from A that has ``owned`` bytes of its own."""
    described = replace(kernel.problem(p), operands=(Operand.of(other), *p.operands[1:]))
    try:
        plan = plan_with(choose(described), other, described)
    except NoKernelError as e:
        e.message = f"{what} of {p.format}: {e.message}"
        raise
    text = f"{plan.kernel} {plan.tile}".strip()
    return Plan(kernel.name, p, plan.run, text, owned + plan.workspace, prepare=plan.prepare, ready=plan.ready)


class ComposedBackend:
    """Always available; its kernels use those of other backends."""

    name = "composed"

    def missing(self) -> list[str]:
        """Nothing of its own."""
        return []

    def kernels(self) -> tuple[Kernel, ...]:
        """A sum of parts, products with the CSR of the same arrays or with a transposed copy of A, and products with
        copies of B and C."""
        return KERNELS


KERNELS: tuple[Kernel, ...] = (SumOfParts(), SameArrays(), TransposedCopy(), copied_operands.KERNEL)
BACKEND = register(ComposedBackend())
