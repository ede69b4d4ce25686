"""alpha, beta and bias after a kernel that only multiplies: one more pass over C.  Kernel: epilogue.cu."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, round_up
from ....products.plan import Plan, nothing
from ....products.problem import COL, Problem
from ...host import numpy_dtype
from . import jit
from .device_plan import device_plan
from .launch import Call, Launch, Operands
from .scratch import Scratch

SOURCE = "runtime/epilogue.cu"
THREADS, EIGHT, MAX_BLOCKS = 256, 8, 1 << 20
PAIRS = (
    ("float32", "float16"), ("float32", "bfloat16"), ("float32", "float32"), ("float64", "float64"),
    ("float16", "float16"), ("bfloat16", "bfloat16"),
)  # fmt: skip
"""(dtype of the product, dtype of C). Where the kernel can write float32 the product is float32: C is rounded once."""


def instances() -> tuple[str, ...]:
    """C++ names that the compile tests build."""
    return tuple(_instance(*pair, i % 2 == 0, i % 3 == 0) for i, pair in enumerate(PAIRS))


def with_epilogue(plan: Plan, p: Problem, purpose: str = "product") -> Plan:
    """A plan for ``p`` from one for the product alone. The product is written to memory that plans share for
    ``purpose``."""
    out_col, product_dtype = p.out_layout == COL, plan.problem.out_dtype
    size, product_size = numpy_dtype(p.out_dtype).itemsize, numpy_dtype(product_dtype).itemsize
    product, memory = launches_of(plan), Scratch(shared=purpose)

    def prepare(o: Operands) -> Sequence[Call]:
        vector = o.n == o.ldc == 1  # contiguous in both layouts: one line, without gaps between its elements
        by_columns = out_col or vector
        lines, along = (o.n, p.rows) if by_columns else (p.rows, o.n)
        pitch = round_up(along, EIGHT)
        at = memory.buffer(o.stream, lines * pitch * product_size)
        aligned = o.c % 16 == 0 and (vector or o.ldc * size % 16 == 0)
        last = _launch(_instance(product_dtype, p.out_dtype, by_columns, aligned), p.sm or 80, p.device_id)
        grid = (min(MAX_BLOCKS, ceil_div(lines * ceil_div(along, EIGHT), THREADS)), 1, 1)
        tail = at, pitch, o.c, o.ldc, lines, along, o.bias, o.alpha, o.beta
        ldc = pitch if out_col or not vector else 1
        return [*product(Operands(o.b, at, o.n, o.ldb, ldc, o.stream)), last.bind(grid, o.stream, *tail)]

    tile = f"{plan.tile}, epilogue in a pass of its own".lstrip(", ")
    return device_plan(plan.kernel, p, prepare, tile, plan.workspace, plan.reads or nothing)


def launches_of(plan: Plan) -> Callable[[Operands], Sequence[Call]]:
    """The calls that a plan runs for operands, in order; a single call for a plan that takes only arrays."""
    return plan.prepare or _by_arrays(plan)


def _by_arrays(plan: Plan) -> Any:
    """The ``prepare`` of a plan that takes only arrays, as a plug-in's does: one call with arrays over the pointers."""
    import cupy

    p = plan.problem

    def array(at: int, lead: int, rows: int, cols: int, dtype: str, col: bool) -> Any:
        kind = numpy_dtype(dtype)
        strides = (kind.itemsize, lead * kind.itemsize)
        room = cupy.cuda.UnownedMemory(at, lead * (cols if col else rows) * kind.itemsize, None, p.device_id)
        memory = cupy.cuda.MemoryPointer(room, 0)
        return cupy.ndarray((rows, cols), kind, memory, strides if col else strides[::-1])

    def prepare(o: Operands) -> tuple[Call]:
        B = array(o.b, o.ldb, p.inner, o.n, p.b_dtype, p.b_layout == COL)
        C = array(o.c, o.ldc, p.rows, o.n, p.out_dtype, p.out_layout == COL)
        if not p.epilogue:
            return (functools.partial(plan.run, B, C),)
        bias = array(o.bias, p.rows, p.rows, 1, p.out_dtype, True)[:, 0] if o.bias else None
        return (functools.partial(plan.run, B, C, o.alpha, o.beta, bias),)

    return prepare


def _instance(product: str, out: str, bias_along: bool, aligned: bool) -> str:
    flags = ", ".join(str(f).lower() for f in (bias_along, aligned))
    return f"epilogue<{VALUE_TYPES[product].cuda}, {VALUE_TYPES[out].cuda}, {flags}>"


@functools.cache
def _launch(instance: str, sm: int, device_id: int) -> Launch:
    return Launch(jit.load(SOURCE, instance, jit.architecture(sm, ()), device_id), "PqPqqqPdd", (), THREADS)
