"""The nonzeros of a CSR, or of ELL buckets, written over a dense matrix on the device.  Kernel: overlay_csr.cu."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ....arrays.dtypes import value_type
from ....arrays.library import Array, ceil_div
from ....products.problem import Problem
from ..ell_buckets.expand_ell_buckets import kept_slots
from ..runtime import jit
from ..runtime.c_types import WORDS, index_type
from ..runtime.expansion import Target, Writer
from ..runtime.launch import Bound, Launch

SOURCE = "csr/overlay_csr.cu"
THREADS, ITEMS = 256, 1024
"""The same as in the kernel: threads of a block, items that it writes."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(size, types) for size, types in (
        (1, ("int", "int", "int")), (2, ("int", "int", "int")), (4, ("long long", "int", "int")),
        (8, ("long long", "long long", "long long")),
    ))  # fmt: skip


def of_csr(a: Any, p: Problem) -> Writer:
    """The launches that write the nonzeros of the CSR ``a`` [M, K] over a dense matrix, and leave all else as it is."""
    return _writer(a.indptr, None, a.indices, a.data, Target.of(p))


def of_ell_buckets(a: Any, p: Problem) -> Writer:
    """The same for ELL buckets."""
    indptr, slots = kept_slots(a)
    return _writer(indptr, slots, a.indices, a.data, Target.of(p))


OVERLAYS: dict[str, Callable[[Any, Problem], Writer]] = {"csr": of_csr, "ell-buckets": of_ell_buckets}
"""Format id -> the function that prepares the launches that write the nonzeros over a dense matrix."""


def _writer(indptr: Array, slots: Array | None, indices: Array, data: Array, target: Target) -> Writer:
    rows, items = indptr.size - 1, int((data if slots is None else slots).size)
    if not items:
        return lambda x, ld, stream: []
    types = index_type(indptr), "int" if slots is None else index_type(slots), index_type(indices)
    function = jit.load(SOURCE, _instance(data.dtype.itemsize, types), *target)
    fixed = (indptr, 0 if slots is None else slots, indices, data, rows, items, value_type(data.dtype).zero_mask)
    launch, grid = Launch(function, "PPPPqqqPq", fixed, THREADS), (ceil_div(items, ITEMS), 1, 1)

    def launches(x: int, ld: int, stream: int) -> list[Bound]:
        return [launch.bind(grid, stream, x, ld)]

    return launches


@functools.cache
def _instance(itemsize: int, types: tuple[str, str, str]) -> str:
    return f"overlay_csr<{WORDS[itemsize]}, {', '.join(types)}>"
