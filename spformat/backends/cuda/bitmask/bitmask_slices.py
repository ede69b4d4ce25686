"""Where the values of each slice of K start in a Bitmask: the one table its kernels need. Kernel: bitmask_slices.cu."""

from __future__ import annotations

from typing import Any

from ....arrays.library import ceil_div
from ....products.ideal import (
    arithmetic,
    b_alignment,
    cache_us,
    memory_us,
    operands_bytes,
    product_us,
    rounds,
    stored_bytes,
    written_us,
)
from ....products.kernel import reasons
from ....products.problem import Problem, itemsize
from ....products.roofline import Device
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
    """uint32[M, slices]: stored values of each row before each slice, counted on the device of ``a`` once."""
    return a.kernel_arrays(("values before each slice", slices), lambda: counted_before(a.bitmask, p, slices))


def counted_before(bitmask: Any, p: Problem, slices: int) -> Any:
    """``values_before`` of uint8[M, ceil(K/8)] bits, counted anew."""
    import cupy

    before = cupy.empty((p.M, slices), "uint32")
    if p.M:
        arch = jit.architecture(p.sm or 80, ())
        count = jit.load("bitmask/bitmask_slices.cu", "bitmask_before", arch, p.device_id)
        fixed = (bitmask, before, p.M, -(-p.K // 8), slice_columns(p.K, slices), slices)
        Launch(count, "PPqqqi", fixed, 256)((-(-p.M // 8), 1, 1), cupy.cuda.get_current_stream().ptr)
        finish_arrays()  # synchronize!
    return before


def bitmask_reasons(p: Problem, types: tuple[str, ...], outs: tuple[str, ...]) -> list[str]:
    """The reasons for which Bitmask kernels for values of ``types`` and results of ``outs`` refuse ``p``."""
    return refusals.every(p, 80, types, outs) + reasons(
        (p.K >= 1 << 26, f"K must be below 2^26, got {p.K}"),
    )


TERMS = ("launch", "memory of A", "memory of B and C", "decoding", "B by every block", "products", "column-major C")
"""The terms of the expected time of both kernels."""


def bitmask_variant(p: Problem) -> tuple[str, ...]:
    """By layout of B and whether its lines start on 16-byte boundaries."""
    return (f"{p.b_layout}-major B" + ("" if b_alignment(p) == 16 else ", unaligned"),)


def bitmask_quantities(p: Problem, height: int, width: int, device: Device) -> tuple[float, ...]:
    """Ideal microseconds of each of TERMS, for tiles of ``height`` x ``width`` elements of C.

    memory of A: from memory once. decoding: the dense elements of A, turned into values once for every ``width``
    columns of B, at the rate of loading them from L2, in whole rounds of tiles. B by every block: B from L2 once for
    each tile of rows. products: dense products of whole tiles.
    """
    size = itemsize(p.a_dtype)
    columns, rows = ceil_div(p.n, width), ceil_div(p.M, height)
    full = rounds(rows * columns, device.processors) * device.processors / (rows * columns)
    decoding = cache_us(columns * p.M * p.K * size, device) * full
    lines = cache_us(rows * columns * p.K * width * size, device) * full
    products = product_us(2.0 * rows * columns * height * width * p.K, arithmetic(p.a_dtype), device)
    weights, others = memory_us(stored_bytes(p), device), memory_us(operands_bytes(p), device)
    return 1.0, weights, others, decoding, lines, products, written_us(p, device)
