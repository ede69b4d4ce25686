"""The records of a 16-bit Bitmask as a dense matrix on the device, in one pass.  Kernel: expand_bitmask_records.cu."""

from __future__ import annotations

from ..runtime import record_runs
from ..runtime.expansion import Target, Writer
from .bitmask_records import Records

SOURCE = "bitmask/expand_bitmask_records.cu"
WARPS = record_runs.EACH
"""Warps of a block, one for each of its records; must match the kernel."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(aligned) for aligned in (True, False))


def writer(records: Records, target: Target) -> Writer:
    """The launches that write the matrix of ``records`` as a dense one."""
    return record_runs.writer(records, SOURCE, _instance, WARPS, target)


def _instance(aligned: bool) -> str:
    return f"expand_bitmask_records<{str(aligned).lower()}>"
