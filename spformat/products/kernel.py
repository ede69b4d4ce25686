"""What a kernel is: which problems it takes, how long it expects to take, and a plan for one matrix.

A third-party backend derives its kernels from ``Kernel`` (or has the same attributes) and needs nothing else of
spformat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import UsageError
from . import roofline
from .plan import Plan
from .problem import Problem


class Kernel:
    """One way to compute an operation for some formats. Subclasses give ``name``, ``takes`` and ``_plan``."""

    name: str
    """``backend.kernel``, for instance ``cuda.spmm_bsr``."""
    takes: frozenset[tuple[str, str]] = frozenset()
    """(operation, format id) pairs."""
    epilogue: ClassVar[bool] = False
    """Whether its plans apply alpha, beta and bias themselves; else one more pass over C does."""
    tiles: ClassVar[Sequence[Any]] = ()
    """The ways to cut a problem that the kernel chooses among; their texts name them in tables and in ``explain``."""
    multiplies_zeros: ClassVar[bool] = False
    """Whether every zero of A meets its row of B, as in a dense product: infinities of B then give NaN."""
    product_error: ClassVar[float] = 0.0
    """Relative error of one float32 product, where products are not exact (three TF32 products)."""

    def unsupported(self, p: Problem) -> list[str]:
        """Every reason why ``p`` is refused; empty = accepted. Reads ``p`` only and touches no GPU."""
        return []

    def workspace_bytes(self, p: Problem) -> int:
        """Bytes that a plan needs beside A, B and C and that grow with the problem; the caller may limit them."""
        return 0

    def expected_us(self, p: Problem) -> float:
        """Microseconds that the kernel expects to take, from event to event with cold caches."""
        return roofline.plain_us(p)

    def plan(self, a: Any, p: Problem) -> Plan:
        """A plan for matrix ``a``, whose contents were validated: its indices are addresses.

        Called only where ``unsupported`` names no reason. UsageError for a matrix without the validated mark.
        """
        if not a.is_validated:
            raise UsageError(f"{self.name}: expected a validated matrix, got {a!r:.120}; call a.validate() first")
        return self._plan(a, p)

    def _plan(self, a: Any, p: Problem) -> Plan:
        raise NotImplementedError(f"{type(self).__name__} does not implement _plan")

    @property
    def formats(self) -> frozenset[str]:
        """Ids of the formats it takes, for any operation."""
        return frozenset(name for _, name in self.takes)


def spmm_of(*formats: str, operation: str = "spmm") -> frozenset[tuple[str, str]]:
    """The ``takes`` of a kernel of one operation."""
    return frozenset((operation, name) for name in formats)


def reasons(*pairs: tuple[Any, str]) -> list[str]:
    """The texts whose condition holds."""
    return [text for refused, text in pairs if refused]


@dataclass(frozen=True)
class Accepted:
    """A kernel takes the problem."""

    kernel: str
    expected_us: float = float("nan")
    """Microseconds it expects to take."""

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        expected = "" if self.expected_us != self.expected_us else f", expects {self.expected_us:,.1f} us"
        return f"{self.kernel}: accepted{expected}"


@dataclass(frozen=True)
class Rejected:
    """A kernel does not take the problem, and every reason why."""

    kernel: str
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.kernel}: " + "; ".join(self.reasons)
