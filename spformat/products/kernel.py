"""The base class of kernels."""

from __future__ import annotations

from typing import Any

from .problem import Plan, Problem


class Kernel:
    """One way to compute an operation for some formats."""

    name: str
    """``backend.kernel``, for instance ``cuda.spmm_bsr``."""
    takes: frozenset[tuple[str, str]] = frozenset()
    """(operation, format id) of what it computes."""
    epilogue: bool = False
    """``plan`` takes problems with an epilogue."""

    def unsupported(self, p: Problem) -> list[str]:
        """Every reason why ``p`` is refused; empty = accepted. Pure: reads ``p`` only, touches no GPU."""
        return []

    def workspace_bytes(self, p: Problem) -> int:
        """Bytes that a plan needs beside the arrays of A."""
        return 0

    def plan(self, a: Any, p: Problem) -> Plan:
        """A plan for matrix ``a``, validated, of a format that it takes. Called only when accepted."""
        raise NotImplementedError(f"{self.name} does not implement plan")
