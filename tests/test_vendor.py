"""How the vendor's libraries are called, without them and without a GPU."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_world import World

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends import vendor
from spformat.backends.cuda.runtime import cublas, cublas_handle, scratch
from spformat.backends.cuda.runtime.launch import Operands
from spformat.backends.vendor import CublasGemm, CusparseCSR
from spformat.dispatch import select
from spformat.errors import DeviceError, DeviceFault
from spformat.products.problem import COL, Problem


class Called:
    """A cuBLAS that writes down its calls."""

    def __init__(self, world: World) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status: dict[str, int] = {}
        self.arguments: tuple[Any, ...] = ()
        self._world, self._numbers = world, itertools.count(77)

    def library(self) -> cublas_handle.Library:
        return cublas_handle.Library(self._create, self._said("mode"), self._said("stream"), self._multiply)

    def _create(self, out: Any) -> int:
        assert self._world.mode == scratch.RELAXED, "a thread that captures may not allocate"
        out._obj.value = next(self._numbers)
        return self._said("create")(out._obj.value)

    def _said(self, name: str) -> Callable[..., int]:
        def call(*given: Any) -> int:
            self.calls.append((name, *given))
            return self.status.get(name, 0)

        return call

    def _multiply(self, *arguments: Any) -> int:
        self.arguments = arguments
        return self._said("gemm")(arguments[0])

    def taken(self) -> list[tuple[Any, ...]]:
        taken, self.calls = self.calls, []
        return taken


@pytest.fixture
def called(world: World, monkeypatch: pytest.MonkeyPatch) -> Called:
    called = Called(world)
    monkeypatch.setattr(cublas_handle, "library", called.library)
    monkeypatch.setattr(cublas_handle, "HANDLES", cublas_handle.Handles())
    return called


def product(stream: int, dtype: str = "bfloat16", device: int = 0) -> cublas.GemmCall:
    p = problem("dense", b_layout=COL, device_id=device).changed(a_dtype=dtype, b_dtype=dtype, out_dtype=dtype)
    call = cublas.gemm(p)(1000, 3, Operands(1000, 2000, 2, 8, 8, stream))
    assert isinstance(call, cublas.GemmCall)
    return call


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
    dense: list[tuple[Any, ...]] = []
    library["createDnMat"] = lambda *given: dense.append(given) or 1
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
    rows_first, column_first = 2, 1
    assert [(*d[:3], d[-1]) for d in dense[-2:]] == [(3, 5, 5, rows_first), (4, 5, 5, rows_first)]
    plan.run(world.array(3, 1), world.array(4, 1))  # a contiguous vector, which cuSPARSE multiplies faster as a column
    assert [(*d[:3], d[-1]) for d in dense[-2:]] == [(3, 1, 3, column_first), (4, 1, 4, column_first)]


def test_cublas_gets_every_extent_and_the_stream_and_what_it_says_is_told(world: World, called: Called) -> None:
    a = sf.formats.dense.Dense.from_dense(np.eye(4, 3, dtype=np.float32))
    a = a.trusted(shape=a.shape, **{k: v.view(type(world.array(1))) for k, v in a.arrays().items()})
    plan = CublasGemm().plan(a, problem("dense", b_layout=COL))
    assert plan.prepare is not None
    (call,) = plan.prepare(Operands(1000, 2000, 2, 2**31, 2**32, 7))
    call()
    A = a.values.ctypes.data
    assert called.taken() == [("create", 77), ("mode", 77, 16), ("stream", 77, 7), ("gemm", 77)]
    (handle, *ops, one, b, b_type, ldb, x, x_type, lda, zero, c, c_type, ldc, compute, algorithm) = called.arguments
    assert (handle, ops) == (77, [1, 0, 2, 4, 3])  # C^T [2, 4] = B [3, 2]^T A^T, column-major
    assert (b, ldb, x, lda, c, ldc) == (1000, 2**31, A, 3, 2000, 2**32)
    assert (b_type, x_type, c_type, compute, algorithm) == (0, 0, 0, 68, -1)
    assert (ctypes.c_float.from_address(one).value, ctypes.c_float.from_address(zero).value) == (1, 0)
    called.status["gemm"] = 7
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
        cublas_handle.check(13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_product_again_is_one_call_of_cublas(called: Called, dtype: str) -> None:
    """Sums of 16-bit products stay float32: the mode of the handle is set once, before its first product."""
    call, other = product(7, dtype), product(8, dtype)
    call()
    assert called.taken() == [("create", 77), ("mode", 77, 16), ("stream", 77, 7), ("gemm", 77)]
    moved = call.moved()
    for again in (call, lambda: moved((0, 0, 0)), product(7, dtype)):
        again()
        assert called.taken() == [("gemm", 77)]
    for call_, stream in ((other, 8), (call, 7)):
        call_()
        assert called.taken() == [("stream", 77, stream), ("gemm", 77)]


def test_a_stream_that_could_not_be_set_is_set_again(called: Called) -> None:
    product(7)()
    called.status["stream"] = 1
    with pytest.raises(DeviceError, match="cuBLAS: status 1"):
        product(8)()
    called.status.clear()
    called.taken()
    product(7)()
    assert called.taken() == [("stream", 77, 7), ("gemm", 77)]


@pytest.mark.parametrize("step", ["create", "mode"])
def test_a_handle_that_could_not_be_made_is_not_used(called: Called, step: str) -> None:
    called.status[step] = 3
    with pytest.raises(DeviceError, match="cuBLAS: status 3"):
        product(7)()
    called.status.clear()
    called.taken()
    product(7)()
    assert called.taken() == [("create", 78), ("mode", 78, 16), ("stream", 78, 7), ("gemm", 78)]


def test_every_device_has_its_handle(called: Called) -> None:
    for device in (0, 1, 0, 1):
        product(7, device=device)()
    assert [c[1] for c in called.taken() if c[0] == "gemm"] == [77, 78, 77, 78]


def test_threads_never_share_a_handle_at_once_and_take_over_those_of_ended_ones(called: Called) -> None:
    call, at_once = product(7), threading.Barrier(4)

    def work() -> None:
        call()
        at_once.wait(60)

    for _ in range(3):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = called.taken()
        used = [c[1] for c in taken if c[0] == "gemm"]
        assert len(set(used)) == 4
        # The thread before may have left any stream, and a handle of the driver may mean another one in each thread.
        assert sorted(c[1] for c in taken if c[0] == "stream") == sorted(used)
    assert not [c for c in taken if c[0] in ("create", "mode")]


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


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"n": 43}, "N to be a multiple of 8, got 43"),
        ({"n": 48, "b_alignment": 4}, "lines of B and C that start on 16 bytes, got 4"),
        ({"n": 48, "out_alignment": 2}, "lines of B and C that start on 16 bytes, got 2"),
        ({"M": 3064}, "M is not"),
    ],
)
def test_cusparselt_refuses_what_the_library_does(
    changes: dict[str, Any], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "_has_nvmath", lambda: True)
    p = Problem.product("two-four", (), 3072, 768, 48, 3072 * 384, *["float16"] * 3, "row", "row", "cuda", 90)
    kernel = vendor.CusparseLt()
    assert not kernel.unsupported(p)
    assert part in " ".join(kernel.unsupported(p.changed(**changes)))


def test_cusparselt_is_chosen_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "_has_nvmath", lambda: True)
    monkeypatch.setattr(vendor.CusparseLt, "expected_us", lambda *_: 0.1)
    p = Problem.product("two-four", (), 3072, 768, 48, 3072 * 384, *["float16"] * 3, "row", "row", "cuda", 90)
    with select.of_any_machine():
        assert select.ask(p).chosen != "vendor.cusparselt"
        (said,) = (str(a) for a in select.ask(p).answers if a.kernel == "vendor.cusparselt")
        assert "two more copies of A" in said
        assert "backend='vendor.cusparselt'" in said
        assert select.ask(p, "vendor.cusparselt").chosen == "vendor.cusparselt"
