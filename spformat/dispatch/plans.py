"""Build a plan from a kernel and a matrix; add the epilogue if the kernel has none, and protect the arrays of A."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from ..arrays.library import current_device, is_array, span
from ..formats.base import Format
from ..products.kernel import Kernel
from ..products.plan import OVERWRITES, MemoryOf, Plan, Reads
from ..products.problem import Problem
from .select import without_epilogue

_DEPTH: ContextVar[int] = ContextVar("spformat_plan_depth", default=0)
"""In how many other plans the plan that is built now will run."""


def depth() -> int:
    """How many plans the one that is built now will run inside of."""
    return _DEPTH.get()


def plan_with(kernel: Kernel, A: Format, problem: Problem) -> Plan:
    """The plan of a kernel for a validated matrix, with the epilogue of ``problem`` and a guard of A's arrays.

    An epilogue in a pass of its own reads the product from memory that plans share. While a plan runs inside another
    (a part of a sum, a transposed copy), that memory of the outer one may be in use: each depth has memory of its own.
    """
    own = without_epilogue(kernel, problem)
    level = depth()
    inside = _DEPTH.set(level + 1)
    try:
        with current_device(A.resident()):
            plan = kernel.plan(A, own)
            if own is not problem:
                plan = _with_epilogue(plan, problem, f"product at depth {level}")
    finally:
        _DEPTH.reset(inside)
    if plan.reads is not None:
        return plan
    # The arrays are kept as well: otherwise their memory could be freed, allocated again, and be given as ``out``.
    # A plan that runs this one inside takes its launches, not its ``run``, and refuses the same memory itself.
    reads = MemoryOf(A.alias())
    return replace(plan, run=_guarded(plan.run, reads, len(problem.operands) - 1), reads=reads)


def _with_epilogue(plan: Plan, problem: Problem, purpose: str) -> Plan:
    if problem.device == "cpu":
        from ..backends.host import with_epilogue

        return with_epilogue(plan, problem)
    from ..backends.cuda.runtime import epilogue

    return epilogue.with_epilogue(plan, problem, purpose)


def _guarded(run: Any, reads: Reads, dense: int) -> Any:
    """``run`` that first refuses an ``out`` which overlaps the arrays of the matrix.

    ``out`` is the argument after the ``dense`` dense operands.
    """

    def guarded(*operands: Any) -> Any:
        out = operands[dense]
        if is_array(out) and out.size:  # what is no array is refused by ``run``, which knows what it takes
            lo, hi = span(out)
            if any(lo < end and start < hi for start, end in reads()):
                raise ValueError(OVERWRITES)
        return run(*operands)

    return guarded
