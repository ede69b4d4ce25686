"""The two protocols a backend fulfils. A third-party backend needs nothing else from spformat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ..problem import Plan, Problem


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
