"""Every operation on every format, in numpy with float64 sums: the oracle of the tests, and the slowest kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.dtypes import VALUE_TYPES, bits, nonzero_mask
from ..arrays.library import Array
from ..arrays.rounding import rounded_once
from ..formats import composed, registered
from ..formats.base import Format
from ..products import operations
from ..products.ideal import index_bytes
from ..products.kernel import Kernel, reasons, spmm_of
from ..products.operation import Items
from ..products.plan import Plan
from ..products.problem import Problem
from ..products.roofline import HOST_BYTES, plain_us
from .host import check_bias, check_operands, numpy_dtype

PANEL = 1 << 22
"""Elements that are computed at a time: bounds the memory for a wide B."""
SLOWER = 50
"""How many times longer than a plain loop the reference expects to take, so that any other kernel is preferred."""
_FLOATS = tuple(name for name in VALUE_TYPES if name != "int8")


class Reference(Kernel):
    """An operation as its definition computes it, item by item in float64 (int64 for int8), rounded once at the end.

    Zeros stored in A are skipped. Products are computed for some columns of B at a time.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.name = f"reference.{operation}"

    epilogue = True

    @property
    def takes(self) -> frozenset[tuple[str, str]]:  # type: ignore[override]
        """Every registered format: they all have ``to_csr``."""
        return spmm_of(*(f.name for f in (*registered(), *composed())), operation=self.operation)

    def unsupported(self, p: Problem) -> list[str]:
        """Takes everything on the host. ``out`` may be of integers only if A and B are int8."""
        integers = {o.dtype for o in p.operands} == {"int8"}
        outputs = [*_FLOATS, *(("int32", "int64") if integers else ())]
        return reasons(
            (p.device != "cpu", f"operands are on {p.device}; move them with .to('cpu')"),
            (p.out.dtype not in outputs, f"out.dtype must be one of {', '.join(outputs)}, got {p.out.dtype}"),
        )

    def expected_us(self, p: Problem) -> float:
        """``SLOWER`` times the time of a plain loop that also reads all of A's indices."""
        return SLOWER * (plain_us(p) + 1e6 * index_bytes(p) / HOST_BYTES)

    def _plan(self, a: Format, p: Problem) -> Plan:
        items = items_of(a, p.out.dtype in ("int32", "int64"))
        reference = operations.operation(p.operation).reference
        workspace = sum(int(x.nbytes) for x in items[1:])
        if len(p.operands) != 2:
            run_all = lambda *operands: _run_all(reference, items, p, operands)  # noqa: E731
            return Plan(self.name, p, run_all, "float64 sums", workspace)

        def run(B: Array, out: Array, alpha: float = 1.0, beta: float = 0.0, bias: Any = None) -> Array:
            check_bias(p, bias, beta, out)
            out = check_operands(p, B, out)
            step = max(1, PANEL // max(1, items.values.size))
            with np.errstate(all="ignore"):  # infinities and NaN are values here
                for j in range(0, B.shape[1], step):
                    sums = reference(items, B[:, j : j + step].astype(items.values.dtype))
                    if p.epilogue:
                        sums = (alpha * sums if alpha != 0 else np.zeros_like(sums)) + (
                            beta * out[:, j : j + step].astype(sums.dtype) if beta != 0 else 0
                        )
                        sums = sums if bias is None else sums + bias.astype(sums.dtype)[:, None]
                    out[:, j : j + step] = rounded_once(sums, numpy_dtype(p.out_dtype))
            return out

        return Plan(self.name, p, run, "float64 sums", workspace)


def _run_all(reference: Any, items: Items, p: Problem, operands: tuple[Any, ...]) -> Array:
    """An operation of several dense operands in one step; the last of ``operands`` is ``out`` or None."""
    *dense, out = operands
    with np.errstate(all="ignore"):  # infinities and NaN are values here
        sums = reference(items, *(x.astype(items.values.dtype) for x in dense))
        result = rounded_once(sums, numpy_dtype(p.out.dtype))
    if out is None:
        return result
    out[...] = result
    return out


def items_of(a: Format, integers: bool = False) -> Items:
    """The nonzeros of a host matrix in float64, or in int64."""
    csr = a.to_csr()
    keep = nonzero_mask(csr.data)
    values = bits(csr.data)[keep].view(csr.dtype).astype(np.int64 if integers else np.float64)
    return Items(a.shape, csr.rows()[keep].astype(np.int64), csr.indices[keep].astype(np.int64), values)


class ReferenceBackend:
    """Always there."""

    name = "reference"

    def missing(self) -> list[str]:
        """Nothing: numpy is a dependency."""
        return []

    def kernels(self) -> tuple[Reference, ...]:
        """One kernel for each operation."""
        return tuple(Reference(o.name) for o in operations.registered())


BACKEND = ReferenceBackend()
