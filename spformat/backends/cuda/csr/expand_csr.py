"""CSR as a dense matrix on the device, in one pass.  Kernel: expand_csr.cu."""

from __future__ import annotations

from typing import Any

from ....arrays.library import Array
from ....products.problem import Problem
from ..runtime import jit, row_images
from ..runtime.c_types import WORDS, index_type
from ..runtime.expansion import Target, Writer
from ..runtime.queue import Kernels
from . import expand_csr_records
from .csr_records import have_records, records

SOURCE = "csr/expand_csr.cu"
KERNELS = Kernels(SOURCE, row_images.WARPS * 32)


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(size, ptr, idx) for size, ptr, idx in (
        (1, "int", "int"), (2, "int", "int"), (4, "long long", "int"), (8, "long long", "long long"),
    ))  # fmt: skip


def expander(a: Any, p: Problem) -> Writer:
    """The launches that write the CSR ``a`` [M, K] as a dense matrix, from its records where it is kept in them."""
    target = Target.of(p)
    if have_records(p):
        return expand_csr_records.writer(records(a, p), target)
    return _writer(a.indptr, a.indices, a.data, target)


def csr_to_dense(indptr: Array, indices: Array, data: Array, out: Array) -> None:
    """Write out [M, K], all of it, from the arrays of a valid CSR, all CuPy. Does not wait for the device."""
    (M, K), itemsize = out.shape, out.itemsize
    if not out.size:
        return
    c = row_images.cut(M, K, itemsize)
    KERNELS.queue(
        _instance(itemsize, index_type(indptr), index_type(indices)), "PPP" + row_images.EXTENTS, c.blocks,
        indptr, indices, data, M, out, K, c.segments, c.width, c.rows,
    )  # fmt: skip


def _writer(indptr: Array, indices: Array, data: Array, target: Target) -> Writer:
    itemsize = data.dtype.itemsize
    function = jit.load(SOURCE, _instance(itemsize, index_type(indptr), index_type(indices)), *target)
    return row_images.writer(function, (indptr, indices, data), indptr.size - 1, itemsize)


def _instance(itemsize: int, ptr: str, idx: str) -> str:
    return f"expand_csr<{WORDS[itemsize]}, {ptr}, {idx}>"
