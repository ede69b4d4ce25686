"""Shared by backends for host arrays: the check of a call's operands, the epilogue after a product, sums of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.dtypes import VALUE_TYPES
from ..arrays.library import unmasked
from ..limits import check_bytes, product
from ..products.plan import Plan
from ..products.problem import COL, Problem


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy dtype of a value type's name, or of any other numpy name (int32)."""
    return VALUE_TYPES[name].numpy if name in VALUE_TYPES else np.dtype(name)


def check_operands(p: Problem, B: Any, out: Any) -> np.ndarray[Any, Any]:
    """The array to write: ``out`` checked, or a fresh one in the layout of ``p``.

    ValueError for a wrong shape or an ``out`` that overlaps B or itself, TypeError for a wrong dtype or array type,
    UsageError for a masked array.
    """
    if not isinstance(B, np.ndarray):
        raise TypeError(f"B: expected a numpy array, got {type(B).__name__}; spmm() and linear() take others")
    unmasked(B)
    if B.ndim != 2 or B.shape[0] != p.inner:
        raise ValueError(f"B: expected shape ({p.inner}, N), got {B.shape}")
    if B.dtype != numpy_dtype(p.b_dtype):
        raise TypeError(f"B: this plan takes {p.b_dtype}, got {B.dtype}; give B.astype({p.b_dtype!r})")
    shape, dtype = (p.rows, B.shape[1]), numpy_dtype(p.out_dtype)
    if out is None:
        input_bytes = B.nbytes + p.nnz * numpy_dtype(p.a_dtype).itemsize
        check_bytes(product(*shape, dtype.itemsize), f"{p.operation}: product of shape {shape}", input_bytes)
        return np.empty(shape, dtype, order="F" if p.out_layout == COL else "C")
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out: expected a numpy array, got {type(out).__name__}")
    unmasked(out)
    if out.shape != shape:
        raise ValueError(f"out: expected shape {shape}, got {out.shape}")
    if out.dtype != dtype:
        raise TypeError(f"out: this plan writes {p.out_dtype}, got {out.dtype}")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    if _overlaps_itself(out):
        layout = f"shape {out.shape}, strides {out.strides} bytes"
        fix = f"give one with memory for each, as by np.empty({out.shape}, {out.dtype.name!r})"
        raise ValueError(f"out: two elements share memory ({layout}), and one would overwrite the other; {fix}")
    if np.may_share_memory(B, out) and np.shares_memory(B, out):
        raise ValueError("out overlaps B; the product would read what it writes")
    return out


def _overlaps_itself(x: np.ndarray[Any, Any]) -> bool:
    """Whether two elements of a matrix share memory, as those of a view with a stride of 0 do."""
    if x.flags.forc or not x.size:
        return False
    sizes = zip(map(abs, x.strides), x.shape, strict=True)
    (short, m), (long, n) = sorted(sizes) if min(x.shape) > 1 else (max(sizes, key=lambda axis: axis[1]), (0, 1))
    if short < x.itemsize:
        return True
    if n == 1 or long >= (m - 1) * short + x.itemsize:
        return False
    # Lines lie inside each other: where another line begins, only the steps before and after it can meet it.
    behind = np.arange(1, n) * long
    steps, rest = np.divmod(behind, short)
    return bool(((rest < x.itemsize) & (steps < m) | (short - rest < x.itemsize) & (steps + 1 < m)).any())


def check_bias(p: Problem, bias: Any, beta: float, out: Any) -> None:
    """ValueError or TypeError for a bias that is not [rows of C] in the dtype of C, or that shares memory with C;
    ValueError for a beta without C."""
    if beta != 0 and out is None:
        raise ValueError(f"beta = {beta} adds to C: expected out, got none")
    if bias is None:
        return
    if p.device == "cpu" and not isinstance(bias, np.ndarray):
        raise TypeError(f"bias: expected a numpy array, got {type(bias).__name__}")
    if bias.shape != (p.rows,):
        raise ValueError(f"bias: expected shape ({p.rows},), one value for each row of C, got {bias.shape}")
    if bias.dtype != numpy_dtype(p.out_dtype):
        raise TypeError(f"bias: this plan takes {p.out_dtype}, the dtype of C, got {bias.dtype}")
    on_host = isinstance(bias, np.ndarray) and isinstance(out, np.ndarray)
    if on_host and np.may_share_memory(bias, out) and np.shares_memory(bias, out):
        raise ValueError("out overlaps the bias; the product would overwrite what it adds")


def with_epilogue(plan: Plan, p: Problem) -> Plan:
    """A plan for ``p`` from one for the product alone: alpha, beta and bias are applied in one more pass over C."""
    wide = np.dtype(np.float64 if "float64" in (p.out_dtype, plan.problem.out_dtype) else np.float32)

    def run(B: Any, out: Any, alpha: float, beta: float, bias: Any) -> Any:
        check_bias(p, bias, beta, out)
        out = check_operands(p, B, out)
        with np.errstate(all="ignore"):  # overflow and inf - inf are results, not events
            # Sums in the dtype of C are written to their place at once, unless C is still to be read.
            place = out if beta == 0 and out.dtype == wide == numpy_dtype(plan.problem.out_dtype) else None
            total = _scaled(plan, p, B, alpha, wide, place)
            if beta != 0:
                total += wide.type(beta) * out.astype(wide)
            if bias is not None:
                total += bias.astype(wide)[:, None]
            if total is not out:
                out[...] = total
        return out

    return Plan(plan.kernel, p, run, f"{plan.tile}, epilogue in a pass of its own".lstrip(", "), plan.workspace)


def _scaled(plan: Plan, p: Problem, B: Any, alpha: float, wide: np.dtype[Any], place: Any) -> Any:
    """alpha * (A @ B), in ``place`` or a new array. As in BLAS, A and B are not read if alpha is 0. Where A @ B
    overflows and alpha makes it finite again, B is scaled first, if its type has the exponents for it."""
    if alpha == 0:
        return np.zeros((p.rows, B.shape[1]), wide)
    total = plan.run(B, place).astype(wide, copy=False)
    overflowed = ~np.isfinite(total) if abs(alpha) < 1 and p.b_dtype in _WIDE_EXPONENTS else np.False_
    if alpha != 1:
        total *= wide.type(alpha)
    # Scaled by little, small values of B stay exact. Scaled by much, no sum overflows, and they vanish in its rounding.
    for exponent in _WIDE_EXPONENTS[p.b_dtype] if overflowed.any() else ():
        scaled = np.ldexp(B.astype(wide), -exponent).astype(B.dtype)
        small = plan.run(scaled, None).astype(np.longdouble) * np.longdouble(alpha) * np.longdouble(2) ** exponent
        better = overflowed & np.isfinite(small)
        total[better] = small[better].astype(wide)
        overflowed &= ~better
    return total


_WIDE_EXPONENTS = {"bfloat16": (64, 150), "float32": (64, 150), "float64": (512, 1100)}
"""Types of B in which values times a power of two stay exact, and the powers to try where a product overflows: half of
the range of exponents, and so much that no sum overflows."""


def sum_of_plans(name: str, plans: Sequence[Plan], p: Problem) -> Plan:
    """A plan for ``p`` that adds up the results of several plans. All but the first have an epilogue and add to C.

    If their results are wider than C, they are summed in a separate array and rounded once.
    """
    wide = numpy_dtype(plans[0].problem.out_dtype)

    def run(B: Any, out: Any) -> Any:
        out = check_operands(p, B, out)
        total = out if out.dtype == wide else np.empty(out.shape, wide, order="F" if p.out_layout == COL else "C")
        plans[0].run(B, total)
        for plan in plans[1:]:
            plan.run(B, total, 1.0, 1.0, None)
        if total is not out:
            with np.errstate(over="ignore", invalid="ignore"):  # overflow gives infinities
                out[...] = total
        return out

    texts = " + ".join(f"{plan.kernel} {plan.tile}".strip() for plan in plans)
    return Plan(name, p, run, texts, sum(plan.workspace for plan in plans))
