"""COO and CSC on the host, by the loops of the CSR that has the same indices and values (``products.same_arrays``)."""

from __future__ import annotations

from dataclasses import replace

from ...formats.base import Format
from ...products.kernel import Kernel
from ...products.plan import Plan
from ...products.problem import Problem
from ...products.same_arrays import FORMATS, TRANSPOSED, csr_of, own_bytes, problem_of_csr
from . import spmm, transposed


class SameArrays(Kernel):
    """One product of a COO or CSC, by the kernel of the CSR's product."""

    def __init__(self, operation: str, name: str, kernel: Kernel) -> None:
        self.name = f"cpu.{operation}_{name}"
        self.takes = frozenset({(operation, name)})
        self.kernel = kernel

    def unsupported(self, p: Problem) -> list[str]:
        """The reasons of the CSR's kernel."""
        return self.kernel.unsupported(problem_of_csr(p))

    def expected_us(self, p: Problem) -> float:
        """The time of the CSR's kernel."""
        return self.kernel.expected_us(problem_of_csr(p))

    def _plan(self, a: Format, p: Problem) -> Plan:
        plan = self.kernel.plan(csr_of(a), problem_of_csr(p))
        return replace(plan, kernel=self.name, problem=p, workspace=plan.workspace + own_bytes(a))


def _kernels() -> tuple[Kernel, ...]:
    every = (*spmm.KERNELS, *transposed.KERNELS)
    of_csr = {operation: next(k for k in every if (operation, "csr") in k.takes) for operation in TRANSPOSED}
    return tuple(
        SameArrays(operation, name, of_csr[TRANSPOSED[operation] if name == "csc" else operation])
        for name in FORMATS
        for operation in TRANSPOSED
    )


KERNELS: tuple[Kernel, ...] = _kernels()
