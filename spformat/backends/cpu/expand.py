"""Expand, then dense product, for every sparse format: rows of A become a dense panel, which numpy's BLAS multiplies.

It pays if A is so full, or the sparse loop of its format so slow, that multiplying the zeros costs less than skipping
them. A panel exists only during a call: no dense copy of A is kept. BLAS chooses the order of the sums. Zeros of A must
not meet infinities and NaN of B, which would give NaN: a B that holds any goes through the loop of the format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...arrays import threads
from ...arrays.library import Array
from ...formats.base import Format
from ...formats.fast import compiled
from ...products.ideal import memory_us
from ...products.kernel import Kernel
from ...products.plan import Plan
from ...products.problem import STRIDED, Problem
from ...products.roofline import Device
from ...products.same_arrays import FORMATS, TRANSPOSED, csr_of, own_bytes, problem_of_csr
from ..host import check_operands, numpy_dtype
from . import spmm
from .blas import EXACT, in_type
from .operands import Work, multiply, store, sums_dtype
from .scatter import multiply_transposed
from .times import DenseTimes, sums_size

ROWS = 512
"""Rows of A expanded together; more where one unit of the format, say a block, has more."""
PIECE = 1 << 18
"""Elements of a panel that are worth a thread."""

_FORWARD = {name: k for k in spmm.KERNELS for name in k.formats if name != "dense"}

DENSE = DenseTimes()
"""The expected time of the dense product."""


class ExpandThenDense(Kernel):
    """C = A @ B and C = A^T @ B of every sparse format; sums and rounding are those of a dense product."""

    name = "cpu.expand_then_dense"
    takes = frozenset((operation, name) for operation in TRANSPOSED for name in (*_FORWARD, *FORMATS))
    terms = ("memory",)

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """Ideal microseconds to write the panels of A and to read them."""
        return (memory_us(2 * p.M * p.K * sums_size(p), device),)

    def rest_us(self, p: Problem, tile: Any = None) -> float:
        """The loop of the format with one tile of columns, and the product of the panels by BLAS."""
        p = problem_of_csr(p)
        wide = "float64" if sums_size(p) == 8 else "float32"
        dense = p.changed(format="dense", params=(), nnz=p.M * p.K, a_dtype=wide, parts=())
        loop = _FORWARD[p.format].tiled.expected_us(p.changed(operation="spmm", n=1))
        return loop + DENSE.expected_us(dense)

    def unsupported(self, p: Problem) -> list[str]:
        """The reasons of the format's own kernel, whose loop expands A."""
        p = problem_of_csr(p)
        return _FORWARD[p.format].unsupported(p)

    def workspace_bytes(self, p: Problem) -> int:
        """Upper bound of the bytes of a panel and of the copies of B and of the product, for the N of ``p``.

        The arrays that the loop of the format keeps beside A are counted by its own kernel (``Plan.workspace``).
        """
        p = problem_of_csr(p)
        sums, floats, transposed = sums_dtype(p), _floats(p), p.operation == "spmm_transposed"
        rows = min(max(p.M, 1), panel_rows(_FORWARD[p.format].unit_rows(p)))
        panel = rows * p.K * floats.itemsize
        b = numpy_dtype(p.b_dtype)
        copies = 1 + (b.itemsize == 1) if b != floats or p.b_layout == STRIDED else 0  # 8-bit types: looked up, copied
        wide_b = copies * p.inner * p.n * floats.itemsize
        # The product of a panel if it cannot be written to out directly (three arrays for int32). In the transposed
        # product, which adds up the products of panels, also the sums if out cannot store them.
        apart = numpy_dtype(p.out_dtype) != sums or p.out_layout == STRIDED
        products = (3 if sums.kind == "i" else 1 if transposed else int(apart)) + int(apart and transposed)
        return panel + wide_b + products * (p.K if transposed else rows) * p.n * floats.itemsize

    def _plan(self, a: Format, p: Problem) -> Plan:
        """A plan that keeps the arrays of ``a``; the first run compiles the loop (seconds), once per process."""
        sums, floats, own, a = sums_dtype(p), _floats(p), own_bytes(a), csr_of(a)
        compiled.load_numba()
        work = _FORWARD[a.name].work(a, floats)
        (M, K), transposed = a.shape, problem_of_csr(p).operation == "spmm_transposed"

        def run(B: Array, out: Array) -> Array:
            out = check_operands(p, B, out)
            if out.size:
                with np.errstate(all="ignore"):  # inf - inf and overflow are results, not events
                    wide_b = _for_blas(B, floats)
                    if sums.kind == "i" or _finite(wide_b):
                        (_transposed if transposed else _forward)(work, M, K, wide_b, out, sums)
                    else:
                        _by_items(work, transposed, B, out, sums)
            return out

        return Plan(self.name, p, run, f"{sums.name} sums", own + work.workspace + self.workspace_bytes(p))


def _finite(B: Array) -> bool:
    """Whether all values are numbers: ``max`` and ``min`` pass NaN on."""
    return not B.size or bool(np.isfinite(B.max()) and np.isfinite(B.min()))


def _by_items(work: Work, transposed: bool, B: Array, out: Array, sums: np.dtype[Any]) -> None:
    """The product by the format's own loop, for a B with infinities or NaN: zeros of A must not meet them."""
    from .targets import Scatter, Target

    if transposed:
        multiply_transposed(work, Scatter, B, out, sums)
    else:
        multiply(work, Target, B, out, sums)


def panel_rows(unit: int) -> int:
    """Rows of a panel: whole units of ``unit`` rows."""
    return max(1, ROWS // unit) * unit


def _floats(p: Problem) -> np.dtype[Any]:
    """The dtype that BLAS multiplies in: that of the sums, but float32 for int32."""
    sums = sums_dtype(p)
    return np.dtype(np.float32) if sums.kind == "i" else sums


def _for_blas(B: Array, floats: np.dtype[Any]) -> Array:
    """B in ``floats`` with unit stride along one axis: numpy multiplies other arrays in a slow loop."""
    if B.dtype != floats:
        return in_type(B, floats)
    rows, cols = B.strides
    size = B.itemsize
    # BLAS does not take strides of 0 or less, or lines that overlap.
    in_lines = (cols == size and rows >= B.shape[1] * size) or (rows == size and cols >= B.shape[0] * size)
    return B if in_lines else np.ascontiguousarray(B)


def _panels(work: Work, M: int, K: int, floats: np.dtype[Any]) -> Iterator[tuple[int, Array]]:
    """(first row, rows of A as a dense array [<= panel_rows, K]): one array, written again for every panel."""
    from .targets import Panel

    rows = panel_rows(work.rows)
    flat, units = np.empty(min(M, rows) * K, floats), rows // work.rows
    for first in range(0, work.units, units):
        last, r0 = min(work.units, first + units), first * work.rows
        count = max(1, min(threads.cores(), (last - first) * work.rows * K // PIECE, last - first))
        bounds = [first + (last - first) * i // count for i in range(count + 1)]

        def piece(i: int, bounds: list[int] = bounds, r0: int = r0) -> None:
            lo, hi = bounds[i], bounds[i + 1]
            flat[(lo * work.rows - r0) * K : (min(M, hi * work.rows) - r0) * K] = 0
            work.loop(lo, hi, Panel(flat, -r0 * K, K))

        threads.run(piece, count)
        height = min(M, last * work.rows) - r0
        yield r0, flat[: height * K].reshape(height, K)


def _forward(work: Work, M: int, K: int, B: Array, out: Array, sums: np.dtype[Any]) -> None:
    for r0, panel in _panels(work, M, K, B.dtype):
        _product(panel, B, out[r0 : r0 + panel.shape[0]], sums)


def _product(A: Array, B: Array, out: Array, sums: np.dtype[Any]) -> None:
    """out = A @ B, rounded once to its dtype; A and B float32 or float64."""
    if sums.kind == "i":
        store(_int32_product(A, B), out)
    elif out.dtype == sums:
        np.matmul(A, B, out=out)
    else:
        store(np.matmul(A, B), out)


def _int32_product(A: Array, B: Array) -> Array:
    """int32 sums through float32 products of at most EXACT terms, each of them exact."""
    total = np.zeros((A.shape[0], B.shape[1]), np.int32)
    for k in range(0, A.shape[1], EXACT):
        total += np.matmul(A[:, k : k + EXACT], B[k : k + EXACT]).astype(np.int32)
    return total


def _transposed(work: Work, M: int, K: int, B: Array, out: Array, sums: np.dtype[Any]) -> None:
    """The products of all panels are added up in the type of the sums: in ``out`` itself, if it is of that type."""
    total = out if out.dtype == sums else np.empty(out.shape, sums)
    if work.units == 0:
        total[...] = 0
    for r0, panel in _panels(work, M, K, B.dtype):
        part = B[r0 : r0 + panel.shape[0]]
        if r0 == 0:
            _product(panel.T, part, total, sums)
        elif sums.kind == "i":
            total += _int32_product(panel.T, part)
        else:
            total += np.matmul(panel.T, part)
    if total is not out:
        store(total, out)


KERNELS: tuple[Kernel, ...] = (ExpandThenDense(),)
