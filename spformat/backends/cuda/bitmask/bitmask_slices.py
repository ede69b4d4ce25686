"""Where the values of each slice of K start in a Bitmask: the one table its kernels need. Kernel: bitmask_slices.cu."""

from __future__ import annotations

from typing import Any

from ....products.kernel import reasons
from ....products.problem import Problem
from ..runtime import jit, refusals
from ..runtime.launch import Launch, finish_arrays

STEP = 64  # columns of A a warp takes at a time


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return ("bitmask_before",)


def slice_columns(K: int, slices: int) -> int:
    """Columns of a slice when K is cut into ``slices``: whole steps."""
    return STEP * -(-K // (STEP * slices))


def values_before(a: Any, p: Problem, slices: int) -> Any:
    """uint32[M, slices]: stored values of each row before each slice, counted on the device of ``a``."""
    import cupy

    def build() -> Any:
        before = cupy.empty((p.M, slices), "uint32")
        if p.M:
            arch = jit.architecture(p.sm or 80, ())
            count = jit.load("bitmask/bitmask_slices.cu", "bitmask_before", arch, p.device_id)
            fixed = (a.bitmask, before, p.M, -(-p.K // 8), slice_columns(p.K, slices), slices)
            Launch(count, "PPqqqi", fixed, 256)((-(-p.M // 8), 1, 1), cupy.cuda.get_current_stream().ptr)
            finish_arrays()  # synchronize!
        return before

    return a.kernel_arrays(("values before each slice", slices), build)


def bitmask_reasons(p: Problem, types: tuple[str, ...], outs: tuple[str, ...]) -> list[str]:
    """Why no Bitmask kernel for values of ``types`` and results of ``outs`` takes ``p``."""
    return refusals.every(p, 80, types, outs) + reasons(
        (p.K >= 1 << 26, f"K must be below 2^26, got {p.K}"),
    )
