"""numpy, any format through its CSR, float64 sums: the oracle of every test and the last resort."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays.dtypes import VALUE_TYPES, bits, nonzero_mask
from ..arrays.library import Array
from ..formats.base import Format
from ..products.problem import Plan, Problem, reasons
from .host import check_bias, check_operands, numpy_dtype

PANEL = 1 << 22
"""Products held at once: bounds the memory of a wide B."""
_FLOATS = tuple(name for name in VALUE_TYPES if name != "int8")


class SpmmReference:
    """C = A @ B item by item in float64 (int64 for int8), rounded once at the end; zeros stored in A are skipped."""

    name = "reference.spmm"
    epilogue = True

    @property
    def formats(self) -> frozenset[str]:
        """Every registered format: they all have ``to_csr``."""
        from ..formats import composed, registered

        return frozenset(f.name for f in (*registered(), *composed()))

    def unsupported(self, p: Problem) -> list[str]:
        """Takes everything on the host that C can hold: integers would cut fractions off."""
        outputs = [*_FLOATS, *(("int32", "int64") if p.a_dtype == p.b_dtype == "int8" else ())]
        return reasons(
            (p.device != "cpu", f"operands are on {p.device}; move them with .to('cpu')"),
            (p.out_dtype not in outputs, f"out.dtype must be one of {', '.join(outputs)}, got {p.out_dtype}"),
        )

    def plan(self, a: Format, p: Problem) -> Plan:
        """Keeps the CSR arrays; ``run`` multiplies panels of columns."""
        csr = a.to_csr()
        keep = nonzero_mask(csr.data)
        rows, cols = csr.rows()[keep], csr.indices[keep]
        values = bits(csr.data)[keep].view(csr.dtype)
        integer = p.out_dtype in ("int32", "int64")
        wide = values.astype(np.int64 if integer else np.float64)
        starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]]) if rows.size else np.zeros(0, np.int64)

        def run(B: Array, out: Array, alpha: float = 1.0, beta: float = 0.0, bias: Any = None) -> Array:
            check_bias(p, bias, beta, out)
            out = check_operands(p, B, out)
            step = max(1, PANEL // max(1, wide.size))
            for j in range(0, B.shape[1], step):
                sums = np.zeros((p.M, B[:, j : j + step].shape[1]), wide.dtype)
                if wide.size:
                    products = wide[:, None] * B[:, j : j + step].astype(wide.dtype)[cols]
                    sums[rows[starts]] = np.add.reduceat(products, starts, axis=0)
                if p.epilogue:
                    sums = alpha * sums + (beta * out[:, j : j + step].astype(wide.dtype) if beta != 0 else 0)
                    sums = sums if bias is None else sums + bias.astype(wide.dtype)[:, None]
                out[:, j : j + step] = sums.astype(numpy_dtype(p.out_dtype))
            return out

        return Plan(self.name, p, run, "float64 sums", int(wide.nbytes + rows.nbytes + cols.nbytes))


class ReferenceBackend:
    """Always there."""

    name = "reference"

    def missing(self) -> list[str]:
        """Nothing: numpy is a dependency."""
        return []

    def kernels(self) -> tuple[SpmmReference, ...]:
        """One kernel for everything."""
        return (SpmmReference(),)


BACKEND = ReferenceBackend()
