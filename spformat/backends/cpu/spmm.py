"""SpMM on the host, one kernel per format: numba loops over the format's own arrays, numpy's BLAS for dense.

Up to 16 columns of B go through loops of their own where the format has them (see ``few``), and some more in panels of
16 columns (``times.IN_PANELS``).

Sums are float32 (float64 when an operand or ``out`` is float64; int32 for int8 with int8, wrapping as int32 does, but
float64 where K is 2^17 or more and ``out`` of a floating-point type)
and are rounded once to the dtype of ``out``. The terms of an element of C are added in a fixed order that depends
on the matrix and on N, never on the number of threads: |C - exact| <= k * 2^-24 * (|A| @ |B|) + half an ulp of
``out``, k the items of the row (2^-53 for float64).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ...arrays import threads
from ...arrays.dtypes import VALUE_TYPES
from ...arrays.library import Array, ceil_div, index_dtype
from ...arrays.segments import counts_of, offsets_from_counts
from ...formats.bitmask import Bitmask
from ...formats.bsr import BSR
from ...formats.csr import CSR
from ...formats.dbsr import DBSR
from ...formats.dense import Dense
from ...formats.ell_buckets import ELLBuckets
from ...formats.fast import compiled
from ...formats.meta_orders import meta_places
from ...formats.sr_bcrs import SRBCRS
from ...formats.two_four import TwoFour
from ...formats.vector_nm import VectorNM
from ...products.kernel import reasons, spmm_of
from ...products.plan import Plan
from ...products.problem import Problem
from ..host import check_operands
from . import few
from .blas import dense_product
from .operands import VECTOR, Work, coded, fixed, multiply, multiply_narrow, output_dtypes, sums_dtype
from .times import FEW, DenseTimes, FewTimes, has_few_columns

DECODED_COLUMNS = 2**31 - 1
"""Most columns for the formats whose columns are decoded from bits: decoded columns are int32."""


class HostKernel(FewTimes):
    """Shared by the host kernels: which problems they take, and a plan around ``work``."""

    most_columns: ClassVar[int] = 2**48

    def unsupported(self, p: Problem) -> list[str]:
        """Refused: operands on a device, a dtype that is not a value type, a dtype of ``out`` that sums cannot have."""
        outputs = output_dtypes(p)
        return reasons(
            (self.most_columns < p.K, f"K must be at most {self.most_columns}, got {p.K}"),
            (p.device != "cpu", f"operands are on {p.device}; move them with .to('cpu')"),
            (p.a_dtype not in VALUE_TYPES, f"a.dtype must be one of {', '.join(VALUE_TYPES)}, got {p.a_dtype}"),
            (p.b_dtype not in VALUE_TYPES, f"b.dtype must be one of {', '.join(VALUE_TYPES)}, got {p.b_dtype}"),
            (p.out_dtype not in outputs, f"out.dtype must be one of {', '.join(outputs)}, got {p.out_dtype}"),
        )

    def _plan(self, a: Any, p: Problem) -> Plan:
        """A plan that keeps the arrays of ``a``; the first run compiles the loop (seconds), once per process."""
        sums = sums_dtype(p)
        compiled.load_numba()
        work = self.work(a, sums)
        lanes = VECTOR // sums.itemsize
        loop_for_few = self.few(a, work, sums)

        def run(B: Array, out: Array) -> Array:
            out = check_operands(p, B, out)
            if out.size:
                if loop_for_few is not None and has_few_columns(p, out.shape[1]):
                    for first in range(0, out.shape[1], FEW):
                        panel = slice(first, first + FEW)
                        few.multiply(loop_for_few, B[:, panel], out[:, panel], sums)
                elif work.by_row and 2 * out.shape[1] <= lanes:
                    multiply_narrow(work, _target().Narrow, B, out, sums)
                else:
                    multiply(work, _target().Target, B, out, sums)
            return out

        kept = work.workspace + (loop_for_few.workspace if loop_for_few else 0)
        return Plan(self.name, p, run, f"{sums.name} sums", kept)

    def unit_rows(self, p: Problem) -> int:
        """Rows of A in a unit of the loop: ``Work.rows``, known before there is a matrix."""
        return 1

    def work(self, a: Any, sums: np.dtype[Any]) -> Work:
        """The loop of this format over the arrays of ``a``."""
        raise NotImplementedError

    def few(self, a: Any, work: Work, sums: np.dtype[Any]) -> few.Few | None:
        """The loop for few columns of B over the arrays of ``a``; None if there is none for them."""
        return None


def _target() -> Any:
    from . import targets

    return targets


class SpmmCSR(HostKernel):
    """CSR: a row of C at a time."""

    name, takes = "cpu.spmm_csr", spmm_of("csr")

    def work(self, a: CSR, sums: np.dtype[Any]) -> Work:
        from . import loops

        arrays = (*fixed(a.indptr, a.indices), *coded(a.data, sums))
        return Work(
            lambda lo, hi, to: loops.csr(lo, hi, to, loops.items(to), *arrays),
            a.shape[0],
            1,
            a.nnz,
            a.indptr,
            by_row=True,
        )

    def few(self, a: CSR, work: Work, sums: np.dtype[Any]) -> few.Few | None:
        return few.csr(a, work, sums)


class SpmmELLBuckets(HostKernel):
    """ELL buckets: each row of C gathers its ELL rows from all buckets, so split rows need no atomics."""

    name, takes = "cpu.spmm_ell_buckets", spmm_of("ell-buckets")

    def work(self, a: ELLBuckets, sums: np.dtype[Any]) -> Work:
        from . import loops

        M = a.shape[0]
        widths = a.row_widths()
        starts = offsets_from_counts(widths)
        order = np.argsort(a.row_ids, kind="stable").astype(index_dtype(a.row_ids.size))
        ell_ptr = offsets_from_counts(counts_of(a.row_ids, M))
        ends = offsets_from_counts(widths[order])[ell_ptr]
        live = compiled.ell_live(starts, a.source)
        arrays = (*fixed(ell_ptr, order, starts, live, a.indices), *coded(a.data, sums))
        extra = ell_ptr.nbytes + order.nbytes + starts.nbytes + ends.nbytes + live.nbytes
        return Work(
            lambda lo, hi, to: loops.ell_buckets(lo, hi, to, loops.items(to), *arrays),
            M,
            1,
            a.stored,
            ends,
            extra,
            by_row=True,
            arrays=arrays[:5],
        )

    def few(self, a: ELLBuckets, work: Work, sums: np.dtype[Any]) -> few.Few | None:
        return few.ell_buckets(a, work, sums)


class SpmmBSR(HostKernel):
    """BSR, and DBSR with its pointer spread over all block rows: up to 32 rows share each row of B."""

    name, takes = "cpu.spmm_bsr", spmm_of("bsr", "dbsr")

    def unit_rows(self, p: Problem) -> int:
        """Rows of a block."""
        return int(p.p["blocksize"][0])

    def work(self, a: BSR | DBSR, sums: np.dtype[Any]) -> Work:
        from . import loops

        (M, K), (Mb, _), R = a.shape, a.grid, a.blocksize[0]
        indptr, extra = a.indptr, 0
        if isinstance(a, DBSR):
            blocks = np.zeros(Mb, np.int64)
            blocks[a.row_ids] = np.diff(a.indptr)
            indptr = offsets_from_counts(blocks, a.indptr.dtype)
            extra = indptr.nbytes
        arrays = (M, K, *fixed(indptr, a.indices), *coded(a.data, sums))
        return Work(
            lambda lo, hi, to: loops.bsr(lo, hi, to, *arrays), Mb, R, a.stored, indptr, extra, every_tile=R >= 4
        )

    def few(self, a: BSR | DBSR, work: Work, sums: np.dtype[Any]) -> few.Few | None:
        return few.bsr(a, work.ends, sums)


class SpmmSRBCRS(HostKernel):
    """SR-BCRS: the rows of a tile share each row of B."""

    name, takes = "cpu.spmm_sr_bcrs", spmm_of("sr-bcrs")

    def unit_rows(self, p: Problem) -> int:
        """Rows that share their columns."""
        return int(p.p["vector_length"])

    def work(self, a: SRBCRS, sums: np.dtype[Any]) -> Work:
        from . import loops

        arrays = (a.shape[0], *fixed(a.indptr, a.indices), *coded(a.data, sums))
        loop = lambda lo, hi, to: loops.sr_bcrs(lo, hi, to, *arrays)  # noqa: E731
        return Work(loop, a.tiles, a.vector_length, a.stored, a.indptr, every_tile=a.vector_length >= 4)

    def few(self, a: SRBCRS, work: Work, sums: np.dtype[Any]) -> few.Few | None:
        return few.sr_bcrs(a, sums)


class SpmmVectorNM(HostKernel):
    """Vector n:m, plain or packed: a packed object is read through its ``indices`` too."""

    name, takes = "cpu.spmm_vector_nm", spmm_of("vector-nm")

    def unit_rows(self, p: Problem) -> int:
        """Rows that share their columns."""
        return int(p.p["vector_length"])

    def work(self, a: VectorNM, sums: np.dtype[Any]) -> Work:
        from . import loops

        (M, K), L = a.shape, a.vector_length
        arrays = (M, K, a.n, a.m, L, *fixed(a.indices), *coded(a.data, sums))
        loop = lambda lo, hi, to: loops.vector_nm(lo, hi, to, *arrays)  # noqa: E731
        return Work(loop, ceil_div(M, L), L, a.stored, every_tile=L >= 4)

    def few(self, a: VectorNM, work: Work, sums: np.dtype[Any]) -> few.Few | None:
        return few.vector_nm(a, sums)


class SpmmTwoFour(HostKernel):
    """2:4 in any meta_order: the words are read where they are stored."""

    name, takes = "cpu.spmm_two_four", spmm_of("two-four")
    most_columns = DECODED_COLUMNS

    def work(self, a: TwoFour, sums: np.dtype[Any]) -> Work:
        from . import loops

        M, K = a.shape
        row_offset, shift, outer, inner = meta_places(a.padded_shape, a.meta_order)
        values, table = coded(a.data, sums)
        arrays = (ceil_div(K, 16), values, *fixed(a.meta, row_offset), shift, outer, inner, table)
        loop = lambda lo, hi, to: loops.two_four(lo, hi, to, *arrays)  # noqa: E731
        return Work(loop, M, 1, a.stored, None, row_offset.nbytes, every_tile=True, by_row=True, decoding=4 * a.stored)

    def few(self, a: TwoFour, work: Work, sums: np.dtype[Any]) -> few.Few | None:
        return few.two_four(a, sums)


class SpmmBitmask(HostKernel):
    """Bitmask: set bits are turned into columns byte by byte."""

    name, takes = "cpu.spmm_bitmask", spmm_of("bitmask")
    most_columns = DECODED_COLUMNS

    def work(self, a: Bitmask, sums: np.dtype[Any]) -> Work:
        from . import loops

        (M, K), (indptr, mask), values = a.shape, fixed(a.indptr, a.bitmask), coded(a.data, sums)

        def with_columns() -> Work:
            columns, step = np.empty(a.nnz, np.int32), max(1, ceil_div(M, 4 * threads.cores()))
            threads.run(lambda i: loops.bitmask_columns(i * step, min(M, (i + 1) * step), indptr, mask, columns),
                        ceil_div(M, step))  # fmt: skip
            arrays = (indptr, *fixed(columns), *values)
            return Work(lambda lo, hi, to: loops.csr(lo, hi, to, loops.items(to), *arrays), M, 1, a.nnz, indptr)

        sparse = 8 * a.nnz <= M * K  # in a fuller matrix columns take more bytes than bits, which decode fast
        loop = lambda lo, hi, to: loops.bitmask(lo, hi, to, indptr, mask, *values)  # noqa: E731
        return Work(
            loop, M, 1, a.nnz, a.indptr, decoding=M * K, by_row=True, with_columns=with_columns if sparse else None
        )

    def few(self, a: Bitmask, work: Work, sums: np.dtype[Any]) -> few.Few | None:
        return few.bitmask(a, sums)


class SpmmDense(DenseTimes, HostKernel):
    """Dense A: numpy's BLAS on panels widened to the sums' type."""

    name, takes = "cpu.spmm_dense", spmm_of("dense")

    def _plan(self, a: Dense, p: Problem) -> Plan:
        return dense_plan(self.name, a.data, p)


def dense_plan(name: str, data: Array, p: Problem) -> Plan:
    """The plan of kernel ``name`` for data[rows, depth] @ B by BLAS."""
    sums = sums_dtype(p)

    def run(B: Array, out: Array) -> Array:
        out = check_operands(p, B, out)
        if out.size:
            with np.errstate(all="ignore"):  # inf - inf and overflow are results, not events
                dense_product(data, B, out, sums)
        return out

    return Plan(name, p, run, f"{sums.name} sums")


KERNELS: tuple[HostKernel, ...] = (
    SpmmDense(),
    SpmmCSR(),
    SpmmELLBuckets(),
    SpmmBSR(),
    SpmmSRBCRS(),
    SpmmVectorNM(),
    SpmmTwoFour(),
    SpmmBitmask(),
)
