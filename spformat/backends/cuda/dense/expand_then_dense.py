"""Expand, then dense product: A is written as a dense matrix into a workspace, which cuBLAS multiplies.

It costs a pass over the dense matrix for each product, and is the fastest way where B is wide or few values are zero.
Its workspace is shared with the other plans of a stream, so that a model of many layers holds the largest one alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....formats.sum import Sum
from ....products.ideal import memory_us, stored_bytes
from ....products.problem import DENSE as DENSE_FORMAT
from ....products.problem import Operand, Problem, itemsize
from ....products.roofline import Device
from ..bitmask import expand_bitmask
from ..bsr import expand_bsr
from ..csr import expand_csr
from ..ell_buckets import expand_ell_buckets
from ..runtime.cublas import gemm, gemm_reasons
from ..runtime.expansion import Writer, leading_dimension
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Call, Operands
from ..runtime.scratch import Scratch
from ..sr_bcrs import expand_sr_bcrs
from ..sum import expand_sum
from ..two_four import two_four_pack
from ..vector_nm import vector_nm_convert
from .gemm_times import Gemm

EXPANDERS: dict[str, Callable[[Any, Problem], Writer]] = {
    "csr": expand_csr.expander,
    "ell-buckets": expand_ell_buckets.expander,
    "bsr": expand_bsr.expander,
    "dbsr": expand_bsr.expander,
    "sr-bcrs": expand_sr_bcrs.expander,
    "bitmask": expand_bitmask.expander,
    "two-four": two_four_pack.expander,
    "vector-nm": vector_nm_convert.expander,
}
"""Format id -> the function that prepares the launches that write a matrix of this format as a dense one."""
SINGLE = frozenset(EXPANDERS)
"""The formats that are written by one launch, so that the first part of a sum may be in any of them."""
EXPANDERS[Sum.name] = functools.partial(expand_sum.expander, EXPANDERS)
OPERATIONS = ("spmm", "spmm_transposed")
DENSE = Gemm()
"""The expected time of the dense product."""


class ExpandThenDense(CudaKernel):
    """cuBLAS on a dense copy of A, written anew for every product. Every format, any layout, every N.

    Of a sum, all parts but one must be in CSR or ELL buckets, whose nonzeros are written over the other part.
    """

    name = "cuda.expand_then_dense"
    multiplies_zeros = True
    takes = frozenset((operation, name) for operation in OPERATIONS for name in EXPANDERS)
    terms = ("launch", "memory")

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of the expansion: A as stored is read, and the dense matrix is written.

        Each further part of a sum is one more launch, and writes a sector of memory for each of its items.
        """
        launches, nbytes = 1, stored_bytes(p) + p.M * p.K * itemsize(p.a_dtype)
        if p.format == Sum.name:
            launches, nbytes = len(p.operands[0].parts), nbytes + expand_sum.scattered_bytes(p)
        return float(launches), memory_us(nbytes, device)

    def variant(self, p: Problem, tile: Any) -> tuple[str, ...]:
        """By format, and by bits of values: some are expanded by more launches than others, and most of those with 16
        bits from other arrays."""
        bits = 8 * itemsize(p.a_dtype)
        return f"{p.format}, {bits} bits", p.format

    def rest_us(self, p: Problem, tile: Any = None) -> float:
        """The product of the dense matrix."""
        return DENSE.expected_us(replace(p, operands=(_dense_operand(p.operands[0]), *p.operands[1:])))

    def unsupported(self, p: Problem) -> list[str]:
        """The types that cuBLAS takes, the same on both sides, as far as A can be expanded; sm_80 or newer."""
        return gemm_reasons(p, 80) + (expand_sum.refused_parts(p, SINGLE) if p.format == Sum.name else [])

    def workspace_bytes(self, p: Problem) -> int:
        """Bytes of the dense copy, rounded as they are allocated, and of the arrays that are derived from A once."""
        derived = sum(
            expand_ell_buckets.derived_bytes(p.M, part.stored)
            for part in p.operands[0].parts or p.operands[:1]
            if part.format == "ell-buckets"
        )
        return (1 << (_dense_bytes(p) - 1).bit_length()) + derived

    def prepared(self, a: Any, p: Problem) -> Prepared:
        import cupy

        with cupy.cuda.Device(p.device_id):
            write, multiply = EXPANDERS[p.format](a, p), gemm(p)
        memory, nbytes, ld = Scratch(shared="dense A"), _dense_bytes(p), _leading(p)

        def prepare(o: Operands) -> list[Call]:
            dense = memory.buffer(o.stream, nbytes)
            return [*write(dense, ld, o.stream), multiply(dense, ld, o)]

        return Prepared(prepare, "cuBLAS heuristic", self.workspace_bytes(p))


@functools.lru_cache(maxsize=256)
def _dense_operand(a: Operand) -> Operand:
    """The dense copy of A; the same for every N."""
    return Operand(DENSE_FORMAT, a.shape, a.dtype, stored=a.shape[0] * a.shape[1], device=a.device)


def _leading(p: Problem) -> int:
    return leading_dimension(p.K, VALUE_TYPES[p.a_dtype].numpy.itemsize)


def _dense_bytes(p: Problem) -> int:
    """Bytes of the dense copy: [M, K] with padded rows."""
    return max(1, p.M * _leading(p) * VALUE_TYPES[p.a_dtype].numpy.itemsize)
