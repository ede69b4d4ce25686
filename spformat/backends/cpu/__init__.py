"""The CPU backend: every format multiplied in its own layout. Needs numba, imported when the first plan is built."""

from __future__ import annotations

import functools
import importlib.util

from ...products.kernel import Kernel
from . import expand, expand_torch, same_arrays, spmm, transposed

KERNELS: tuple[Kernel, ...] = (
    *spmm.KERNELS,
    *transposed.KERNELS,
    *same_arrays.KERNELS,
    *expand.KERNELS,
    *expand_torch.KERNELS,
)
"""The products of every format, those with its transpose, and the way by a dense copy."""


@functools.cache
def _has_numba() -> bool:
    """Whether numba is installed: looked up once (it takes 80 us), as every choice asks."""
    return bool(importlib.util.find_spec("numba"))


class CPUBackend:
    """Host kernels; every format has one."""

    name = "cpu"

    def missing(self) -> list[str]:
        """numba, unless it is installed."""
        return [] if _has_numba() else ["numba is not installed: pip install 'spformat[cpu]'"]

    def kernels(self) -> tuple[Kernel, ...]:
        """All kernels; each operation of each format has one of its own."""
        return KERNELS


BACKEND = CPUBackend()
