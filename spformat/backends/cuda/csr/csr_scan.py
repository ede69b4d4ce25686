"""Whether a CSR on the device is valid, in one launch: ``scan_launch``.  Kernel: csr_scan.cu."""

from __future__ import annotations

from ....arrays.library import Array
from ..runtime.c_types import INDEX, index_type
from ..runtime.scan_launch import Pass, finds_nothing

SOURCE = "csr/csr_scan.cu"


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(column, pointer) for column in INDEX.values() for pointer in INDEX.values())


def csr_sound(shape: tuple[int, int], indptr: Array, indices: Array) -> bool:
    """Whether indptr [M+1] and indices [nnz], CuPy, are those of a valid matrix; waits for the device."""
    instance = _instance(index_type(indices), index_type(indptr))
    args = (indptr, indices, *shape, indices.size)
    return finds_nothing(SOURCE, Pass(instance, "PPqqq", args, max(indptr.size, indices.size)))


def _instance(column: str, pointer: str) -> str:
    return f"spformat::csr_scan<{column}, {pointer}>"
