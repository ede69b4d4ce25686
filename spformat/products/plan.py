"""A plan: one operation on one matrix, ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from .problem import Problem, scalar

Reads = Callable[[], tuple[tuple[int, int], ...]]
"""Says (first address, address after the last) of all memory that a product reads beside B. It is asked for new
operands: a matrix may have dropped its arrays for the order of a kernel (``Format.kernel_order``)."""
OVERWRITES = "out overlaps the arrays of A; the product would overwrite what it reads"


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Plan:
    """One product, ready to run: ``plan(B)`` or ``plan(B, out=C)``, for any number of columns.

    A plan keeps the arrays of A, never the Format object, so that the cache of plans, which lies on the matrix, can
    be emptied. ``run(B, out)`` gets operands that match ``problem`` in everything but the number of columns; the plan
    fits its launch to theirs. ``out`` is None where the plan allocates it. Where ``problem`` has an epilogue, it is
    ``run(B, out, alpha, beta, bias)``.
    """

    kernel: str
    problem: Problem
    run: Callable[..., Any] = field(repr=False)
    tile: str = ""
    workspace: int = 0
    """Bytes the plan uses beside A, B and C, as far as they are known when it is built: copies, which
    ``plan(.., workspace=)`` limits, and what else its kernel keeps."""
    reads: Reads | None = field(default=None, repr=False)
    """Where A is, which ``run`` refuses as ``out``. None if ``run`` does not check this: the dispatcher then checks it
    before every run."""
    prepare: Callable[..., Any] | None = field(default=None, repr=False)
    """Operands -> the calls of a product, for a backend that composes a larger plan from this one."""
    ready: Callable[..., Any] | None = field(default=None, repr=False)
    """Operands -> (the call that runs the product for them, whether it may be kept and run again, and what runs it for
    operands of the same form at other addresses, or None), for a caller that has checked the addresses himself. None if
    ``run`` is the only way."""

    def __repr__(self) -> str:
        p = self.problem
        a, b = p.operands[0], p.operands[1]
        tile = f" {self.tile}" if self.tile else ""
        what = f"{p.operation} of {a.format} {a.dtype}{list(a.shape)} with {b.dtype}{list(b.shape)} on {p.device}"
        return f"Plan({self.kernel}{tile}: {what}, workspace={self.workspace})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A plan is pickled and copied without its matrix: as its problem, which can be read and explained."""
        return _unpickled, (self.kernel, self.problem, self.tile, self.workspace)

    def __call__(self, B: Any, out: Any = None, *, alpha: float = 1.0, beta: float = 0.0, bias: Any = None) -> Any:
        """A @ B, written to ``out`` if given; alpha, beta and bias only where the plan has an epilogue."""
        if self.problem.epilogue:
            return self.run(B, out, scalar("alpha", alpha), scalar("beta", beta), bias)
        if bias is None and alpha == 1 and beta == 0:
            return self.run(B, out)
        raise UsageError("this plan computes A @ B alone; alpha, beta and bias need plan(.., epilogue=True)")


def nothing() -> tuple[tuple[int, int], ...]:
    """The ``Reads`` of a plan that reads no memory but that of B."""
    return ()


class MemoryOf:
    """The ``Reads`` of a matrix: where the memory of its arrays lies.

    It keeps the matrix, so that freed memory cannot be given as ``out``. Where the matrix keeps the plan, pass its
    ``alias()``: otherwise each would keep the other.
    """

    __slots__ = ("_matrix", "_seen")

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix
        self._seen: tuple[Any, tuple[tuple[int, int], ...]] = matrix.order_now(), matrix.spans()

    def __call__(self) -> tuple[tuple[int, int], ...]:
        order, spans = self._seen
        now = self._matrix.order_now()
        if now is not order:
            spans = self._matrix.spans()
            self._seen = now, spans
        return spans


def _unpickled(kernel: str, problem: Problem, tile: str, workspace: int) -> Plan:
    return Plan(kernel, problem, _without_matrix, tile, workspace, reads=nothing)


def _without_matrix(*operands: Any) -> Any:
    raise UsageError(
        "a plan that was pickled or copied has no matrix: make it again where the matrix is, with plan(A, ..)"
    )
