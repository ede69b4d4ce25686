"""C[K,N] = A^T @ B[M,N] on the host, A stored as [M,K]: the loops of the forward product with a different target.

No transpose is stored: every item a[i, k] adds a[i, k] * B[i] to row k of C. Sums, their types and their single
rounding are those of the forward product (see ``spmm``): |C - exact| <= k * 2^-24 * (|A^T| @ |B|) + half an ulp of
``out``, k the items of the column of A (2^-53 for float64), in an order that depends on the matrix and on N alone.
Zeros that are stored, in a block or a vector, may meet their row of B; a row of A without items reads none.
"""

from __future__ import annotations

from typing import Any

from ...arrays.library import Array
from ...formats.base import Format
from ...formats.dense import Dense
from ...formats.fast import compiled
from ...products.kernel import Kernel, spmm_of
from ...products.plan import Plan
from ...products.problem import Problem
from ...products.roofline import Device
from ..host import check_operands
from . import spmm
from .operands import sums_dtype
from .scatter import multiply_transposed, scratch_bytes
from .times import DenseTimes, LoopTimes

OPERATION = "spmm_transposed"

FACTOR = 1.5
"""How much longer a loop takes that adds to rows of C than the forward loop of the same format; an assumption."""


class SpmmTransposed(LoopTimes):
    """The transposed product of the formats of a forward kernel, by its loop."""

    def __init__(self, forward: spmm.HostKernel) -> None:
        self.forward = forward
        self.name = forward.name.replace("spmm", OPERATION)
        self.takes = frozenset((OPERATION, name) for name in forward.formats)
        self.constants_of = forward.name

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """Those of the forward product, times FACTOR."""
        return tuple(FACTOR * q for q in super().quantities(p, tile, device))

    def unsupported(self, p: Problem) -> list[str]:
        """The reasons of the forward kernel."""
        return self.forward.unsupported(p)

    def _plan(self, a: Format, p: Problem) -> Plan:
        """A plan that keeps the arrays of ``a``; the first run compiles the loop (seconds), once per process.

        ``workspace``: what the plan keeps beside these arrays, and the tiles of B and C that a run with the N of ``p``
        holds while it lasts.
        """
        sums = sums_dtype(p)
        compiled.load_numba()
        work = self.forward.work(a, sums)

        def run(B: Array, out: Array) -> Array:
            from .targets import Scatter

            out = check_operands(p, B, out)
            if out.size:
                multiply_transposed(work, Scatter, B, out, sums)
            return out

        workspace = work.workspace + scratch_bytes(work, p.K, p.n, sums)
        return Plan(self.name, p, run, f"{sums.name} sums", workspace)


class SpmmTransposedDense(DenseTimes):
    """Dense A: numpy's BLAS on panels of columns of A, widened to the sums' type."""

    constants_of = "cpu.spmm_dense"
    name, takes = "cpu.spmm_transposed_dense", spmm_of("dense", operation=OPERATION)

    def unsupported(self, p: Problem) -> list[str]:
        """The reasons of every kernel on the host."""
        return spmm.HostKernel().unsupported(p)

    def _plan(self, a: Dense, p: Problem) -> Plan:
        """A plan that keeps the array of ``a``."""
        return spmm.dense_plan(self.name, a.data.T, p)


def _kernels() -> tuple[Kernel, ...]:
    return (SpmmTransposedDense(), *(SpmmTransposed(k) for k in spmm.KERNELS if "dense" not in k.formats))


KERNELS: tuple[Kernel, ...] = _kernels()
