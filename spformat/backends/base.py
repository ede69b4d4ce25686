"""What a backend is. A third-party backend needs this, ``products.kernel.Kernel`` and nothing else of spformat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ..products.kernel import Kernel

__all__ = ["Backend", "Kernel"]


@runtime_checkable
class Backend(Protocol):
    """A named set of kernels."""

    name: str

    def missing(self) -> list[str]:
        """What keeps this backend from running here (a package, a device), with the fix; empty = usable."""
        ...

    def kernels(self) -> Sequence[Kernel]:
        """All kernels. Their answers need no GPU. Of kernels that expect the same time, the first is chosen."""
        ...
