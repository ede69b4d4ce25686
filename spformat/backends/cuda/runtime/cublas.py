"""Dense products by cuBLAS, queued on a stream: C = op(A) @ B.

The library is called directly, with 64-bit extents. CuPy's own calls refuse a stream that is captured and extents past
int32; the library does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....products.kernel import reasons
from ....products.problem import COL, STRIDED, Problem
from . import cublas_handle
from .addresses import Address, Addresses
from .launch import Call, Moved, Operands

CUDA_TYPE = {"float64": 1, "float32": 0, "float16": 2, "bfloat16": 14}
"""cudaDataType_t of the value types that the vendor's libraries take."""
COMPUTE_32F, COMPUTE_64F = 68, 70
"""cublasComputeType_t: sums in float32, without TF32, and in float64."""
NO, YES = 0, 1
"""cublasOperation_t: a column-major operand as it is, and transposed."""
DEFAULT_ALGORITHM = -1

Gemm = Callable[[int, int, Operands], Call]
"""(address of A, elements between its rows, operands) -> the call that queues the product."""


def library_reasons(p: Problem, dtypes: tuple[str, ...], sm: int = 0) -> list[str]:
    """Reasons why a library of the vendor does not take ``p``, whose A and B are of one of ``dtypes``.

    ``sm``: the oldest architecture that the library takes; bfloat16 needs sm_80 everywhere.
    """
    sm = 80 if p.a_dtype == "bfloat16" else sm
    return reasons(
        (p.device != "cuda", f"operands are on {p.device}; move them with .to('cuda')"),
        (p.sm is not None and p.sm < sm, f"needs sm_{sm} or newer for {p.a_dtype}, got {p.sm_name}"),
        (p.a_dtype not in dtypes, f"a.dtype must be one of {', '.join(dtypes)}, got {p.a_dtype}"),
        (p.b_dtype != p.a_dtype, f"b.dtype must equal a.dtype ({p.a_dtype}), got {p.b_dtype}"),
        (STRIDED in (p.b_layout, p.out_layout), "B and out must be row- or column-major; use ascontiguousarray"),
    )


def gemm_reasons(p: Problem, sm: int = 0) -> list[str]:
    """Reasons why ``gemm`` does not compute ``p``: it takes the same types on both sides, and any layout.

    sm: the oldest architecture that the caller takes.
    """
    wide = {p.a_dtype} | ({"float32"} if p.a_dtype in ("float16", "bfloat16") else set())
    return library_reasons(p, tuple(CUDA_TYPE), sm) + reasons(
        (p.out_dtype not in wide, f"out.dtype must be one of {', '.join(sorted(wide))}, got {p.out_dtype}"),
    )


def gemm(p: Problem, alpha: float = 1.0, beta: float = 0.0) -> Gemm:
    """C = alpha * op(A) @ B + beta * C for the types, layouts and operation of ``p``; A is row-major [M, K].

    op(A) is A for "spmm" and its transpose for "spmm_transposed". Sums are float32, float64 for float64.
    """
    # BLAS is column-major: A's memory is A^T to it. A column-major C is computed as it is, a row-major one as
    # C^T = B^T op(A)^T.
    double = p.a_dtype == "float64"
    scalar = np.float64 if double else np.float32
    factors = np.array([alpha, beta], scalar)
    one = factors.ctypes.data
    zero = one + factors.itemsize
    compute = COMPUTE_64F if double else COMPUTE_32F
    value, out = CUDA_TYPE[p.a_dtype], CUDA_TYPE[p.out_dtype]
    transposed, b_col, c_col = p.operation == "spmm_transposed", p.b_layout == COL, p.out_layout == COL
    rows, inner = p.rows, p.inner
    if c_col:
        ops = NO if transposed else YES, NO if b_col else YES
    else:
        ops = YES if b_col else NO, YES if transposed else NO

    def prepare(a: int, lda: int, o: Operands) -> Call:
        a_args, b_args = (a, value, lda), (o.b, value, o.ldb)
        sizes, first, second = ((rows, o.n), a_args, b_args) if c_col else ((o.n, rows), b_args, a_args)
        rest = (*ops, *sizes, inner, one, *first, *second, zero, o.c, out, o.ldc, compute, DEFAULT_ALGORITHM)
        return GemmCall(p.device_id, o.stream, rest, factors)

    return prepare


class GemmCall:
    """One product of the library with all arguments. Any thread may run it, any number of times.

    keep: what the arguments point to.
    """

    __slots__ = ("_arguments", "_device", "_keep", "_stream")

    def __init__(self, device: int, stream: int, arguments: tuple[int, ...], keep: Any) -> None:
        """device: which is current when the call runs; arguments: those of cublasGemmEx behind the handle."""
        self._device, self._arguments, self._stream, self._keep = device, arguments, stream, keep

    def __call__(self) -> None:
        self._run(self._arguments)

    def _run(self, arguments: Sequence[Any]) -> None:
        handle = cublas_handle.HANDLES.of_thread(self._device)
        if handle.stream != self._stream:
            handle.use(self._stream)
        cublas_handle.check(handle.multiply(handle.address, *arguments))

    def moved(self) -> Moved:
        """The same product for operands at other addresses."""
        arguments: list[Any] = list(self._arguments)
        places = [(i, x.operand, x.shift) for i, x in enumerate(arguments) if isinstance(x, Address)]

        def call(addresses: Addresses) -> None:
            for i, operand, shift in places:
                arguments[i] = addresses[operand] + shift
            self._run(arguments)

        return call
