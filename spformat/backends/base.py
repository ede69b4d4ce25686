"""The two protocols a backend fulfils. A third-party backend needs nothing else from spformat."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..errors import UsageError
from ..products.problem import Plan, Problem


@runtime_checkable
class Kernel(Protocol):
    """One way to compute C = A @ B for some formats."""

    name: str
    """``backend.kernel``, for instance ``cuda.spmm_bsr``."""
    formats: frozenset[str]

    # Optional: epilogue = True where plan() takes problems with an epilogue, whose plans run (B, out, alpha, beta,
    # bias); the products of the others are finished by a pass of their own. rank(p) -> int orders kernels of one
    # backend for a problem, lower first; product_error: relative error of one float32 product, where products are not
    # exact (three TF32 products); blocking(p) -> Blocking says how an accepted problem is cut and how fast that was
    # measured to be, for spformat.cost; tiles, a sequence whose texts name what ``spformat bench --tune`` tries.

    def unsupported(self, p: Problem) -> list[str]:
        """Every reason why ``p`` is refused; empty = accepted. Pure: reads ``p`` only, touches no GPU."""
        ...

    def plan(self, a: Any, p: Problem) -> Plan:
        """A plan for matrix ``a`` (validated, of a format in ``formats``). Called only when accepted."""
        ...


K = TypeVar("K", bound=Kernel)


def marked_only(*kernels: K) -> tuple[K, ...]:
    """The kernels, whose ``plan`` from now on refuses a matrix without the validated mark: its indices are addresses.

    The dispatcher validates first (``plan(a, unsafe=True)``: marks a copy unseen), so this is for other callers.
    """
    for cls in {type(k) for k in kernels}:
        setattr(cls, "plan", _refusing(cls.plan))  # noqa: B010 - a method, which mypy lets nobody assign
    return kernels


def _refusing(plan: Any) -> Any:
    @functools.wraps(plan)
    def marked_plan(self: Kernel, a: Any, p: Problem) -> Plan:
        if not a.is_validated:
            raise UsageError(f"{self.name}: expected a validated matrix, got {a!r:.120}; call a.validate() first")
        made: Plan = plan(self, a, p)
        return made

    return marked_plan


@runtime_checkable
class Backend(Protocol):
    """A named, ordered set of kernels."""

    name: str

    def missing(self) -> list[str]:
        """What keeps this backend from running here (a package, a device), with the fix; empty = usable."""
        ...

    def kernels(self) -> Sequence[Kernel]:
        """Kernels, best first."""
        ...

    # Optional: preferred(p) -> str is the name of the kernel that was measured to be fastest for a problem, "" where
    # nothing was measured; it is asked before the others. Pure, as ``unsupported``.
