"""alpha, beta and bias after a kernel that only multiplies: one more pass over C, counted.  Kernel: epilogue.cu."""

from __future__ import annotations

import functools
from typing import Any

from ...arrays import ceil_div, round_up
from ...dtypes import VALUE_TYPES
from ...problem import COL, Plan, Problem
from ..host import numpy_dtype
from . import jit
from .launch import Launch, bias_pointer, leading

SOURCE = "epilogue.cu"
THREADS, EIGHT, MAX_BLOCKS = 256, 8, 1 << 20
PAIRS = (
    ("float32", "float16"), ("float32", "bfloat16"), ("float32", "float32"), ("float64", "float64"),
    ("float16", "float16"), ("bfloat16", "bfloat16"),
)  # fmt: skip
"""(dtype of the product, dtype of C): products come in float32 where the kernel writes that, so C is rounded once."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(*pair, i % 2 == 0, i % 3 == 0) for i, pair in enumerate(PAIRS))


def with_epilogue(made: Plan, p: Problem) -> Plan:
    """A plan for ``p`` out of one for the product alone, which goes to memory allocated for the call."""
    import cupy

    out_col, out_dtype, product_dtype = p.out_layout == COL, numpy_dtype(p.out_dtype), made.problem.out_dtype
    size = out_dtype.itemsize

    def run(B: Any, out: Any, alpha: float, beta: float, bias: Any) -> Any:
        with cupy.cuda.Device(p.device_id):
            bias_at = bias_pointer(p, bias, beta, out)
            if B.ndim != 2:
                raise ValueError(f"B: expected shape ({p.K}, N), got {B.shape}")
            shape = p.M, B.shape[1]
            if out is None:
                out = cupy.empty(shape, out_dtype, "F" if out_col else "C")
            if out.shape != shape:
                raise ValueError(f"out: expected shape {shape}, got {out.shape}")
            if out.dtype != out_dtype:
                raise TypeError(f"out: this plan writes {out_dtype}, got {out.dtype}")
            ldc = leading("out", shape, out.strides, out.data, size, out_col, p.device_id)
            lines, along = shape[::-1] if out_col else shape
            pitch = round_up(along, EIGHT)
            product = cupy.empty((lines, pitch), numpy_dtype(product_dtype))[:, :along]
            made.run(B, product.T if out_col else product)
            aligned = out.data.ptr % 16 == 0 and ldc * size % 16 == 0
            launch = _launch(_instance(product_dtype, p.out_dtype, out_col, aligned), p.sm or 80, p.device_id)
            grid = (min(MAX_BLOCKS, ceil_div(lines * ceil_div(along, EIGHT), THREADS)), 1, 1)
            stream = cupy.cuda.get_current_stream().ptr
            launch(grid, stream, product.data.ptr, pitch, out.data.ptr, ldc, lines, along, bias_at, alpha, beta)
        return out

    return Plan(made.kernel, p, run, f"{made.tile}, epilogue in a pass of its own".lstrip(", "), made.workspace)


def _instance(product: str, out: str, bias_along: bool, aligned: bool) -> str:
    flags = ", ".join(str(f).lower() for f in (bias_along, aligned))
    return f"epilogue<{VALUE_TYPES[product].cuda}, {VALUE_TYPES[out].cuda}, {flags}>"


@functools.cache
def _launch(instance: str, sm: int, device_id: int) -> Launch:
    return Launch(jit.load(SOURCE, instance, jit.architecture(sm, ()), device_id), "PqPqqqPdd", (), THREADS)
