"""The vendor's own libraries: cuBLAS for Dense, cuSPARSE for CSR (through CuPy), cuSPARSELt for 2:4 (through nvmath).

They are the baselines of every benchmark, and also candidates for every product.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from ..arrays.library import ceil_div, library_error
from ..errors import DeviceError
from ..products import ideal
from ..products.kernel import Kernel, reasons, spmm_of
from ..products.plan import Plan
from ..products.problem import COL, LINE, Problem, itemsize
from ..products.roofline import TENSOR_16, Device, epilogue_us
from .cuda.csr.csr_records import instead_of_arrays
from .cuda.dense.gemm_times import Gemm
from .cuda.runtime.cublas import CUDA_TYPE, gemm, gemm_reasons, library_reasons
from .cuda.runtime.epilogue import with_epilogue
from .cuda.runtime.kernel import CudaKernel, Prepared
from .cuda.runtime.launch import Call, Library, Operands, finish_arrays, restored
from .cuda.runtime.scratch import Scratch

_SEARCH_WORKSPACE = 256 << 20
"""Bytes for cuSPARSELt's search: an algorithm that adds up parts of K needs a matrix of sums for each."""

_INT_MAX = 2**31 - 1


class CublasGemm(Gemm, CudaKernel):
    """cublasGemmEx with float32 sums (float64 for float64)."""

    name = "vendor.cublas_gemm"
    takes = spmm_of("dense") | spmm_of("dense", operation="spmm_transposed")

    def unsupported(self, p: Problem) -> list[str]:
        """Same types on both sides; any layout."""
        return gemm_reasons(p)

    def prepared(self, a: Any, p: Problem) -> Prepared:
        data, multiply, lda = a.values, gemm(p), max(1, p.K)

        def prepare(o: Operands, keep: Any = data) -> tuple[Call]:
            return (multiply(data.data.ptr, lda, o),)

        return Prepared(prepare, "cuBLAS heuristic")


class CusparseCSR(CudaKernel):
    """cusparseSpMM on CSR, float32 sums.

    It adds partial sums up in C itself. A 16-bit C would round each of them, so that it gets a float32 C of its own,
    which a second pass rounds once.
    """

    name = "vendor.cusparse_csr"
    takes = spmm_of("csr")
    terms = ("launch", "memory", "rows of B", "rows past L2", "sectors", "items", "rows of A")

    def variant(self, p: Problem, tile: Any) -> tuple[str, ...]:
        """By value type, layout, and whether B is a vector or has an odd number of columns."""
        kind = "16-bit" if itemsize(p.a_dtype) == 2 else p.a_dtype
        if p.n == 1:
            return f"{kind}, a vector", "a vector"
        columns = "odd N" if p.n % 2 else "even N"
        return f"{kind}, {p.b_layout}-major, {columns}", f"{kind}, {p.b_layout}-major", f"{p.b_layout}-major"

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        rows of B: N values from L2 for each item. sectors: 32 bytes for each item and column. items: values and indices
        for every 32 columns. rows of A: 1 ns each for every 32 columns, over all multiprocessors.
        """
        size, groups = itemsize(p.a_dtype), ceil_div(p.n, 32)
        rows, past = p.nnz * p.n * size, max(0.0, 1 - ideal.L2 / max(1, p.K * p.n * size))
        items = ideal.cache_us(p.nnz * groups * (size + ideal.INDEX), device)
        return (
            1.0, ideal.traffic_us(p, device), ideal.cache_us(rows, device), ideal.memory_us(rows, device) * past,
            ideal.cache_us(p.nnz * p.n * ideal.SECTOR, device), items, p.M * groups * 1e-3 / device.processors,
        )  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        """float16 and bfloat16 with float32 sums where the installed cuSPARSE has them; int32 indices alike."""
        wide = {p.a_dtype} | ({"float32"} if itemsize(p.a_dtype) == 2 else set())
        return library_reasons(p, ("float64", "float32", "float16", "bfloat16")) + reasons(
            (p.out_dtype not in wide, f"out.dtype must be one of {', '.join(sorted(wide))}, got {p.out_dtype}"),
            (p.nnz > _INT_MAX or p.K > 2**31, "indices past int32 are not passed on to cuSPARSE"),
            (p.nnz == 0, "a matrix without items is not passed on to cuSPARSE"),
            (
                p.b_layout != p.out_layout,
                f"B is {p.b_layout}-major and out {p.out_layout}-major: cuSPARSE leaves "
                "parts of out unwritten when they differ",
            ),
        )

    def only_by_name(self, p: Problem) -> str:
        return instead_of_arrays(p)

    def rest_us(self, p: Problem, tile: Any = None) -> float:
        """The pass that rounds a 16-bit C."""
        return epilogue_us(p) if itemsize(p.out_dtype) == 2 else 0.0

    def _plan(self, a: Any, p: Problem) -> Plan:
        if itemsize(p.out_dtype) != 2:
            return super()._plan(a, p)
        return with_epilogue(super()._plan(a, p.changed(out_dtype="float32")), p, f"float32 C of {self.name}")

    def prepared(self, a: Any, p: Problem) -> Prepared:
        """Descriptors are created in every call, because they contain the pointers of B and C."""
        from cupy.cuda import cusparse, device

        stored = restored(a)
        arrays = (stored.indptr, stored.indices, stored.values)
        nnz, value, out = int(a.values.size), CUDA_TYPE[p.a_dtype], CUDA_TYPE[p.out_dtype]
        one, zero = _scalars(p.a_dtype == "float64")
        compute = CUDA_TYPE["float64" if p.a_dtype == "float64" else "float32"]
        no, algorithm, index = cusparse.CUSPARSE_OPERATION_NON_TRANSPOSE, cusparse.CUSPARSE_MM_ALG_DEFAULT, 2  # 32I
        order = {True: 1, False: 2}  # CUSPARSE_ORDER_COL, CUSPARSE_ORDER_ROW
        by_columns = p.b_layout == COL
        memory = Scratch()

        def launch(o: Operands) -> None:
            # One contiguous column is both; told that it is row-major, cuSPARSE takes up to ten times as long.
            vector = o.n == o.ldb == o.ldc == 1
            layout, ldb, ldc = order[by_columns or vector], p.K if vector else o.ldb, p.M if vector else o.ldc
            handle = device.get_cusparse_handle()
            cusparse.setStream(handle, o.stream)
            A = cusparse.createCsr(
                p.M, p.K, nnz, *(x.data.ptr for x in arrays), index, index, cusparse.CUSPARSE_INDEX_BASE_ZERO, value
            )
            B = cusparse.createDnMat(p.K, o.n, ldb, o.b, value, layout)
            C = cusparse.createDnMat(p.M, o.n, ldc, o.c, out, layout)
            try:
                args = (handle, no, no, one.data, A, B, zero.data, C, compute, algorithm)
                need = cusparse.spMM_bufferSize(*args)
                cusparse.spMM(*args, memory.buffer(o.stream, need) if need else 0)
            finally:
                cusparse.destroySpMat(A)
                cusparse.destroyDnMat(B)
                cusparse.destroyDnMat(C)

        return Prepared(_once(launch, arrays, one, zero), "cuSPARSE default")


@functools.cache
def _has_nvmath() -> bool:
    """Whether the package with cuSPARSELt's bindings is installed: looked up once, as every choice asks."""
    return importlib.util.find_spec("nvmath") is not None


class CusparseLt(CudaKernel):
    """cusparseLtMatmul on 2:4. The weights are compressed to the library's own order when the plan is built.

    search: the first product of a shape tries all of the library's algorithms on the operands; the fastest is used.
    """

    name = "vendor.cusparselt"
    takes = spmm_of("two-four")
    terms = ("launch", "memory", "tiles", "products", "depth", "slower of memory and tiles")

    def variant(self, p: Problem, tile: Any) -> tuple[str, ...]:
        """By layout of B."""
        return (f"{p.b_layout}-major B",)

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """As for cuBLAS, at half the time of a product; the library's default tile is 128 x 128 or 256 x 128."""
        unit = 1e6 * device.processors / device.peak[TENSOR_16]
        turns = ideal.rounds(ceil_div(p.M, 128) * ceil_div(p.n, 128), device.processors)
        tiles, memory = turns * p.K * 128 * 128 * unit, ideal.traffic_us(p, device)
        products = p.M * p.K * p.n * unit / device.processors
        return 1.0, memory, tiles, products, p.K / 64 * 0.02, max(memory, tiles)

    def __init__(self, search: bool = False) -> None:
        self.search = search

    def unsupported(self, p: Problem) -> list[str]:
        """Extents and lines that are no multiples of 16 bytes, as the library demands of 16-bit types."""
        odd = [name for name, size in (("M", p.M), ("K", p.K)) if size % 16]
        lines = min(ideal.b_alignment(p), ideal.out_alignment(p))
        return reasons(
            (not _has_nvmath(),
             "nvmath-python is not installed: pip install 'spformat[cusparselt13]' (or cusparselt12)"),
            (bool(odd), f"cuSPARSELt needs M and K to be multiples of 16, {' and '.join(odd)} is not"),
            (p.n % 8, f"cuSPARSELt needs N to be a multiple of 8, got {p.n}"),
            (lines < LINE, f"cuSPARSELt needs lines of B and C that start on {LINE} bytes, got {lines}"),
            (p.out_dtype != p.a_dtype, f"out.dtype must equal a.dtype ({p.a_dtype}), got {p.out_dtype}"),
        ) + library_reasons(p, ("float16", "bfloat16"), 80)  # fmt: skip

    def only_by_name(self, p: Problem) -> str:
        """Its plans keep A as a dense matrix and in the library's own order, and run other numbers of columns only if
        these are multiples of 8."""
        return "it would keep two more copies of A, one of them dense"

    def prepared(self, a: Any, p: Problem) -> Prepared:
        """Decodes A once and compresses it. One plan of the library is kept for each N and leading dimension."""
        import cupy

        from ..errors import UsageError

        def build() -> Any:
            dense = a.to_dense()
            finish_arrays()  # synchronize!
            return dense

        dense = a.kernel_arrays("dense", build)
        ready: dict[tuple[int, int, int], Any] = {}

        def launch(o: Operands) -> None:
            if o.n % 8 or o.b % 16 or o.c % 16:
                raise UsageError(
                    f"{self.name}: cuSPARSELt needs N to be a multiple of 8 and aligned operands, N = {o.n}"
                )
            key = (o.n, o.ldb, o.ldc)
            if key not in ready:
                ready[key] = _LtMatmul(cupy, dense, p, o, self.search)
            ready[key](o)

        tile = "cuSPARSELt searched" if self.search else "cuSPARSELt default"
        return Prepared(_once(launch), tile, int(dense.nbytes))


class _LtMatmul:
    """One cuSPARSELt plan for one N: descriptors, the compressed weight, workspace."""

    def __init__(self, cupy: Any, dense: Any, p: Problem, o: Operands, search: bool) -> None:
        import nvmath.bindings.cusparseLt  # not `as lt`: ruff's N813 refuses that for a name in mixed case

        lt = nvmath.bindings.cusparseLt
        self.lt, self.handle = lt, lt.init()
        value, row, col = CUDA_TYPE[p.a_dtype], 2, 1
        b_order, c_order = (col if p.b_layout == COL else row), (col if p.out_layout == COL else row)
        A = lt.structured_descriptor_init(self.handle, p.M, p.K, p.K, 16, value, row, lt.Sparsity.SPARSITY_50_PERCENT)
        B = lt.dense_descriptor_init(self.handle, p.K, o.n, o.ldb, 16, value, b_order)
        C = lt.dense_descriptor_init(self.handle, p.M, o.n, o.ldc, 16, value, c_order)
        matmul = lt.matmul_descriptor_init(self.handle, 0, 0, A, B, C, C, lt.ComputeType.COMPUTE_32F)
        choice = lt.matmul_alg_selection_init(self.handle, matmul, lt.MatmulAlg.DEFAULT)
        self.plan = lt.matmul_plan_init(self.handle, matmul, choice)
        size, scratch = lt.sp_mma_compressed_size(self.handle, self.plan)
        self.weight, buffer = cupy.empty(size, cupy.uint8), cupy.empty(max(1, scratch), cupy.uint8)
        lt.sp_mma_compress(self.handle, self.plan, dense.data.ptr, self.weight.data.ptr, buffer.data.ptr, o.stream)
        cupy.cuda.get_current_stream().synchronize()  # synchronize! the scratch buffer goes away
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)
        if search:
            workspace = cupy.empty(_SEARCH_WORKSPACE, cupy.uint8)
            self._run(lt.matmul_search, o, workspace.data.ptr)
        self.need, self.memory = lt.matmul_get_workspace(self.handle, self.plan), Scratch()

    def __call__(self, o: Operands) -> None:
        self._run(self.lt.matmul, o, self.memory.buffer(o.stream, self.need))

    def _run(self, entry: Any, o: Operands, workspace: int) -> None:
        stream = ctypes.c_void_p(o.stream)
        entry(
            self.handle, self.plan, ctypes.addressof(self.one), self.weight.data.ptr, o.b, ctypes.addressof(self.zero),
            o.c, o.c, workspace, ctypes.addressof(stream), 1,
        )  # fmt: skip


def _scalars(double: bool) -> tuple[Any, Any]:
    """Host 1 and 0 in the type of the sums, as numpy's ctypes view (whose ``data`` is an address)."""
    import numpy as np

    dtype = np.float64 if double else np.float32
    return np.array(1, dtype).ctypes, np.array(0, dtype).ctypes


def _once(launch: Callable[[Operands], None], *keep: Any) -> Library:
    """A ``Library`` with ``launch`` as its only call; ``keep``: arrays of which ``launch`` uses the addresses."""

    def call(o: Operands, keep: Any = keep) -> None:
        try:
            launch(o)
        except NotImplementedError as e:  # CuPy's calls of libraries, while a stream is captured
            raise DeviceError(f"{e}; a graph captures backend 'cuda', and dense products") from e
        except RuntimeError as e:
            if type(e).__name__ != "CuSparseError":
                raise
            raise library_error(f"cuSPARSE: {e}") from e

    def prepare(o: Operands) -> tuple[Call]:
        return (functools.partial(call, o),)

    return prepare


class VendorBackend:
    """Operands on an NVIDIA GPU."""

    name = "vendor"

    def missing(self) -> list[str]:
        """What is missing: CuPy or a device."""
        from .cuda import BACKEND as CUDA

        return CUDA.missing()

    def kernels(self) -> tuple[Kernel, ...]:
        """cuBLAS, cuSPARSE, cuSPARSELt."""
        return KERNELS


KERNELS: tuple[Kernel, ...] = (CublasGemm(), CusparseCSR(), CusparseLt())
BACKEND = VendorBackend()
