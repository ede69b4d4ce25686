"""The records of a 16-bit CSR as a dense matrix on the device, in one pass.  Kernel: expand_csr_records.cu."""

from __future__ import annotations

from ..runtime import record_runs
from ..runtime.expansion import Target, Writer
from .csr_records import PARTS, Records

SOURCE = "csr/expand_csr_records.cu"
WARPS = PARTS * record_runs.EACH
"""Warps of a block, one for each part of its records; must match the kernel."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(aligned) for aligned in (True, False))


def writer(records: Records, target: Target) -> Writer:
    """The launches that write the matrix of ``records`` as a dense one."""
    return record_runs.writer(records, SOURCE, _instance, WARPS, target)


def _instance(aligned: bool) -> str:
    return f"expand_csr_records<{str(aligned).lower()}>"
