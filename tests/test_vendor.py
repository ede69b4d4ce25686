"""How the vendor's libraries are called, without them and without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_world import World

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime import cublas
from spformat.backends.cuda.runtime.launch import Operands
from spformat.backends.vendor import CublasGemm, CusparseCSR
from spformat.errors import DeviceError, DeviceFault
from spformat.products.problem import COL, Problem


def problem(fmt: str, **changed: Any) -> Problem:
    types = ("float32",) * 3
    return Problem.product(fmt, (), 4, 3, 8, 2, *types, device="cuda", sm=90).changed(**changed)


def test_streams_do_not_share_the_workspace_of_cusparse(world: World) -> None:
    """Two products of one plan may run at the same time."""
    used: dict[int, set[int]] = defaultdict(set)
    need, handle = 100, SimpleNamespace(stream=0)
    library: Any = defaultdict(int)
    names = ("createCsr", "createDnMat", "destroySpMat", "destroyDnMat")
    library |= {name: lambda *_: 1 for name in names}
    library |= {"CUSPARSE_OPERATION_NON_TRANSPOSE": 0, "CUSPARSE_MM_ALG_DEFAULT": 0, "CUSPARSE_INDEX_BASE_ZERO": 0}
    library["setStream"] = lambda _, stream: setattr(handle, "stream", stream)
    library["spMM_bufferSize"] = lambda *_: need
    library["spMM"] = lambda *given: used[handle.stream].add(given[-1])
    world.cupy.cuda.cusparse = SimpleNamespace(**library)
    world.cupy.cuda.device = SimpleNamespace(get_cusparse_handle=lambda: handle)
    a = sf.convert(np.eye(4, 3, dtype=np.float32), "csr")
    a = a.trusted(shape=a.shape, **{k: v.view(type(world.array(1))) for k, v in a.arrays().items()})
    plan, out = CusparseCSR().plan(a, problem("csr")), world.array(4, 5)
    B = world.array(3, 5)
    for _ in range(3):
        for world.stream in (7, 8):
            plan.run(B, out)
    assert [len(used[s]) for s in (7, 8)] == [1, 1]
    assert used[7] != used[8]
    need = 0
    plan.run(B, out)
    assert 0 in used[8]


def test_cublas_gets_every_extent_and_the_stream_and_what_it_says_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    status = 0

    def gemm(*arguments: Any) -> int:
        given.append(arguments)
        return status

    monkeypatch.setattr(cublas, "library", lambda: (lambda *a: given.append(a) or 0, gemm))
    world.cupy.cuda.device = SimpleNamespace(get_cublas_handle=lambda: 77)
    a = sf.formats.dense.Dense.from_dense(np.eye(4, 3, dtype=np.float32))
    a = a.trusted(shape=a.shape, **{k: v.view(type(world.array(1))) for k, v in a.arrays().items()})
    plan = CublasGemm().plan(a, problem("dense", b_layout=COL))
    assert plan.prepare is not None
    (call,) = plan.prepare(Operands(1000, 2000, 2, 2**31, 2**32, 7))
    call()
    A = a.values.ctypes.data
    (stream, (handle, *ops, one, b, b_type, ldb, x, x_type, lda, zero, c, c_type, ldc, compute, algorithm)) = given
    assert stream == (77, 7)
    assert (handle, ops) == (77, [1, 0, 2, 4, 3])  # C^T [2, 4] = B [3, 2]^T A^T, column-major
    assert (b, ldb, x, lda, c, ldc) == (1000, 2**31, A, 3, 2000, 2**32)
    assert (b_type, x_type, c_type, compute, algorithm) == (0, 0, 0, 68, -1)
    assert (ctypes.c_float.from_address(one).value, ctypes.c_float.from_address(zero).value) == (1, 0)
    status = 7
    with pytest.raises(DeviceError, match="cuBLAS: status 7"):
        call()


def test_a_library_call_that_fails_in_a_lost_context_reports_that(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = world.cupy.cuda.runtime
    lost = type("CUDARuntimeError", (runtime.CUDARuntimeError,), {"__module__": "cupy_backends", "status": 700})

    def wait() -> None:
        raise lost("illegal address")

    monkeypatch.setattr(runtime, "deviceSynchronize", wait)
    with pytest.raises(DeviceFault, match="cuBLAS: status 13: illegal address; CUDA context lost"):
        cublas.check(13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("status", [0, 7])
def test_partial_sums_of_16_bit_products_stay_float32_and_the_handle_is_as_before(
    world: World, monkeypatch: pytest.MonkeyPatch, dtype: str, status: int
) -> None:
    mode, during = [2], []

    def get_mode(handle: int, at: Any) -> int:
        at._obj.value = mode[-1]
        return 0

    def gemm(*_: Any) -> int:
        during.append(mode[-1])
        return status

    monkeypatch.setattr(cublas, "library", lambda: (lambda *_: 0, gemm))
    monkeypatch.setattr(cublas, "math_modes", lambda: (get_mode, lambda handle, value: mode.append(value) or 0))
    world.cupy.cuda.device = SimpleNamespace(get_cublas_handle=lambda: 77)
    p = problem("dense", b_layout=COL).changed(a_dtype=dtype, b_dtype=dtype, out_dtype=dtype)
    call = cublas.gemm(p)(1000, 3, Operands(1000, 2000, 2, 8, 8, 7))
    with pytest.raises(DeviceError) if status else contextlib.nullcontext():
        call()
    assert during == [2 if dtype == "float32" else 2 | 16]
    assert mode[-1] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_dense_products_are_float32_on_a_gpu(dtype: str) -> None:
    """Few results of many products each: where cuBLAS adds up partial sums. They are too large for 8 or 11 bits."""
    cp = pytest.importorskip("cupy")
    rng, kind = np.random.default_rng(3), VALUE_TYPES[dtype].numpy
    for M, K, widths in (
        (1536, 8960, (1, 2, 8, 10, 40)),
        (2560, 2560, (2, 182)),
        (3072, 768, (143,)),
        (768, 3072, (7,)),
    ):
        x, y = rng.integers(0, 3, (M, K)), rng.integers(0, 3, (K, max(widths)))
        for n in widths:
            B = cp.asarray(y[:, :n].astype(kind))
            wanted = (x.astype(np.float32) @ y[:, :n].astype(np.float32)).astype(kind)  # exact: below 2^24
            for fmt, backend in (("dense", "vendor.cublas_gemm"), ("bitmask", "cuda.expand_then_dense")):
                a = sf.convert(x.astype(kind), fmt).to("cuda")
                for b in (B, cp.asfortranarray(B)):
                    assert (sf.spmm(a, b, backend=backend).get() == wanted).all(), (fmt, M, K, n)
