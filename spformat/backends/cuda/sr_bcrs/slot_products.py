"""SR-BCRS in slots with CUDA cores, for ``spmm_sr_bcrs`` with 16-bit values.  Kernel: slot_products.cu."""

from __future__ import annotations

from ....products.problem import Problem
from ..runtime import jit
from ..runtime.launch import Launch
from .mma_fragments import Fragments, types

SOURCE = "sr_bcrs/slot_products.cu"


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return (
        "slot_products<__half, float, 2, 8, 8>",
        "slot_products<__nv_bfloat16, __nv_bfloat16, 1, 8, 2>",
        "slot_products<__nv_bfloat16, __nv_bfloat16, 4, 8, 1>",
    )


def launch_of(slots: Fragments, p: Problem, cols: int, warps: int, split: int) -> Launch:
    """The launch for ``cols`` columns of a lane, blocks of ``warps`` warps, ``split`` of which share eight rows."""
    instance = f"slot_products<{types(p)}, {cols}, {warps}, {split}>"
    function = jit.load(SOURCE, instance, jit.architecture(p.sm or 80, ()), p.device_id)
    return Launch(function, "PPqqPPqqqqq", (slots.first, slots.pieces, p.M, p.K), 32 * warps)
