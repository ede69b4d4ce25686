"""Where the values of each slice of K start in a Bitmask: the one table its kernels need. Kernel: bitmask_slices.cu."""

from __future__ import annotations

from typing import Any

from ....products.problem import STRIDED, Problem, reasons
from ..runtime import jit
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

    before = cupy.empty((p.M, slices), "uint32")
    if p.M:
        count = jit.load("bitmask/bitmask_slices.cu", "bitmask_before", jit.architecture(p.sm or 80, ()), p.device_id)
        fixed = (a.bitmask, before, p.M, -(-p.K // 8), slice_columns(p.K, slices), slices)
        Launch(count, "PPqqqi", fixed, 256)((-(-p.M // 8), 1, 1), cupy.cuda.get_current_stream().ptr)
        finish_arrays()  # synchronize!
    return before


def refusals(p: Problem, types: tuple[str, ...], outs: tuple[str, ...]) -> list[str]:
    """Why no Bitmask kernel for values of ``types`` and results of ``outs`` takes ``p``."""
    return reasons(
        (p.format != "bitmask", f"takes bitmask, got {p.format}"),
        (p.device != "cuda", f"operands are on {p.device}; move them with .to('cuda')"),
        (p.a_dtype not in types, f"a.dtype must be one of {', '.join(types)}, got {p.a_dtype}"),
        (p.b_dtype != p.a_dtype, f"b.dtype must equal a.dtype ({p.a_dtype}), got {p.b_dtype}"),
        (p.out_dtype not in outs, f"out.dtype must be {' or '.join(dict.fromkeys(outs))}, got {p.out_dtype}"),
        (STRIDED in (p.b_layout, p.out_layout), "B and out must be row- or column-major; use ascontiguousarray"),
        (p.sm is None or p.sm < 80, f"needs sm_80 or newer, got {p.sm_name}"),
        (p.K >= 1 << 26, f"K must be below 2^26, got {p.K}"),
    )
