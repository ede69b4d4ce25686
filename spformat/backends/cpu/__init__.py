"""The CPU backend: every format multiplied in its own layout. Needs numba, imported when a plan is made."""

from __future__ import annotations

import importlib.util

from .spmm import KERNELS, HostKernel


class CPUBackend:
    """Host kernels; every format has one."""

    name = "cpu"

    def missing(self) -> list[str]:
        """numba, unless it is installed."""
        return [] if importlib.util.find_spec("numba") else ["numba is not installed: pip install 'spformat[cpu]'"]

    def kernels(self) -> tuple[HostKernel, ...]:
        """One kernel per format (BSR's takes DBSR too)."""
        return KERNELS


BACKEND = CPUBackend()
