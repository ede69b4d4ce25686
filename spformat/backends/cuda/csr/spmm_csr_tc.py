"""TCA-SpMM: CSR on tensor cores, driven by ``preprocess.schedule``: the schedule that is attached to
the matrix, else one that is computed.  Kernel: spmm_csr_tc.cu.

Only one product in eight is used; what the schedule brings is balance, in fragments of 64 items. float32 is three TF32
products, which keep about 22 bits; infinities then give NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div
from ....errors import LimitError
from ....preprocess.schedule import WARPS, TCASchedule
from ....products.ideal import cache_us, memory_us, operands_bytes, stored_bytes
from ....products.kernel import spmm_of
from ....products.problem import Problem, itemsize
from ....products.roofline import Device
from ..runtime import jit
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands, finish_arrays, restored
from ..runtime.row_tiles import vector_width
from ..runtime.row_work import gathered_rows, row_gather_reasons, transposed_copies
from ..runtime.transpose import row_major
from .csr_records import instead_of_arrays

ARCHS = ("sm_80",)
TYPES = ("float16", "bfloat16", "float32")
BY_LANES, SHARED = "16x8x8", "16x8x8, sums in shared memory"
"""How the diagonals of the products are added: between lanes, or as the paper has it."""


class SpmmCSRTensor(CudaKernel):
    """C = A @ B for CSR on tensor cores by the schedule of TCA-SpMM; float32 sums in a fixed order.

    A column-major B or C goes through a transposed copy.
    """

    name = "cuda.spmm_csr_tc"
    takes = spmm_of("csr")
    archs = ARCHS
    product_error = 2.0**-21  # float32 as three TF32 products: the product of the two low parts is left out
    terms = ("launch", "memory", "rows of B", "rows past L2", "items", "columns", "copies", "second launches")

    def unsupported(self, p: Problem) -> list[str]:
        return row_gather_reasons(p, TYPES)

    def only_by_name(self, p: Problem) -> str:
        return instead_of_arrays(p)

    def options(self, p: Problem) -> tuple[str, str]:
        """Both ways to add; where no measurement tells them apart, the first."""
        return BY_LANES, SHARED

    def variant(self, p: Problem, tile: Any) -> tuple[str, ...]:
        """By how many values of B a lane loads at a time, which the alignment of N decides."""
        size = itemsize(p.a_dtype)
        vec = 16 // size
        while vec > 1 and p.n % vec:
            vec //= 2
        return (f"loads of {size * vec} bytes",)

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``: as on the CUDA cores, and columns: 8 at a time for each item, three
        times for float32."""
        size = itemsize(p.a_dtype)
        products = 3 if size == 4 else 1
        memory = memory_us(stored_bytes(p) + operands_bytes(p), device)
        items, columns = (
            cache_us(p.nnz * (4 + size), device),
            cache_us(p.nnz * ceil_div(p.n, 8) * 16 * products, device),
        )
        return 1.0, memory, *gathered_rows(p, device), items, columns, *transposed_copies(p, device)

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests."""
        return (
            "spmm_csr_tc<__half, __half, int, int, int, 8, false>",
            "spmm_csr_tc<__nv_bfloat16, float, int, int, int, 4, true>",
            "spmm_csr_tc<__nv_bfloat16, __nv_bfloat16, long long, long long, long long, 1, false>",
            "spmm_csr_tc<float, float, int, int, int, 4, false>",
            "spmm_csr_tc<float, float, int, int, int, 4, true>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        import cupy

        stored = restored(a)
        indptr, indices, data = stored.indptr, stored.indices, stored.data

        def build() -> tuple[Any, Any, Any, int]:
            with cupy.cuda.Device(p.device_id):
                schedule = TCASchedule.of(a)
                zeros = cupy.flatnonzero(schedule.num_warps_per_row == 0).astype(np.int64)  # synchronize!
                stored = schedule.row_id_for_each_warp, schedule.warpid_within_row
                row_id, warpid = (x.astype(np.result_type(*stored), copy=False) for x in stored)
                finish_arrays()  # synchronize!
            return row_id, warpid, zeros, schedule.blocks

        row_id, warpid, zeros, blocks = a.kernel_arrays("tca for the kernel", build)
        total = blocks + ceil_div(zeros.size, WARPS)
        if total >= 2**31:
            raise LimitError(f"csr: {total} thread blocks exceed one launch; use the CUDA-core kernel")
        value, out = VALUE_TYPES[p.a_dtype], VALUE_TYPES[p.out_dtype]
        size, out_size = value.numpy.itemsize, out.numpy.itemsize
        pointer, index, ident = ("long long" if x.dtype.itemsize == 8 else "int" for x in (indptr, indices, row_id))

        tile = str(self.best(p).tile)
        shared = str(tile == SHARED).lower()

        @functools.cache
        def kernel(vec: int) -> Launch:
            instance = f"spmm_csr_tc<{value.cuda}, {out.cuda}, {pointer}, {index}, {ident}, {vec}, {shared}>"
            function = jit.load("csr/spmm_csr_tc.cu", instance, jit.architecture(p.sm or 0, ARCHS), p.device_id)
            fixed = (row_id, warpid, blocks, indptr, indices, data, zeros, zeros.size)
            return Launch(
                function, ("P", "P", "i", "P", "P", "P", "P", "q", "P", "P", "i", "q", "q"), fixed, WARPS * 32
            )

        def prepare(o: Operands) -> tuple[Bound]:
            vec = vector_width(size, out_size, o.n, o.b, o.c, o.ldb, o.ldc)
            return (kernel(vec).bind((total, 1, 1), o.stream, o.b, o.c, o.n, o.ldb * size, o.ldc),)

        kernel(16 // size)
        workspace = int(row_id.nbytes + warpid.nbytes + zeros.nbytes)
        return Prepared(row_major(p, prepare), tile=tile, workspace=workspace)
