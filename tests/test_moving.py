"""Launches of a product at other addresses are those that would be prepared for them. Without a GPU."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import struct
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from stand_in_driver import Driver

import spformat as sf
from spformat.backends import vendor
from spformat.backends.cuda import KERNELS
from spformat.backends.cuda.runtime import jit, scratch, tensor_map
from spformat.backends.cuda.runtime.device_plan import device_plan
from spformat.backends.cuda.runtime.kernel import FITTED, CudaKernel, Prepared
from spformat.backends.cuda.runtime.launch import Launch, Operands
from spformat.backends.cuda.runtime.moving import Moving, moving
from spformat.backends.cuda.runtime.scratch import Scratch
from spformat.dispatch import copied_operands, plans
from spformat.errors import DeviceError
from spformat.products.problem import COL, ROW, Operand, Problem

MATRICES: dict[str, dict[str, Any]] = {
    "csr": {}, "ell-buckets": {"max_width": 8}, "bsr": {"blocksize": (64, 64)}, "sr-bcrs": {}, "bitmask": {},
    "two-four": {"meta_order": "logical"}, "vector-nm": {"n": 2, "m": 4, "vector_length": 128}, "dense": {},
    "sum": {"rules": ("bsr:blocksize=64x64,density>=0.9", "csr")},
}  # fmt: skip
TRIED = [*KERNELS, vendor.CublasGemm(), copied_operands.KERNEL]
CASES = list(itertools.product((1, 5, 16, 64), ((ROW, ROW), (COL, COL), (ROW, COL)), (False, True)))
STARTS = ((0, 0, 0), (16, 0, 0), (8, 24, 2), (128, 16, 4))
"""Bytes by which B, C and the bias lie off their boundaries."""


@functools.cache
def matrix(fmt: str, dtype: str) -> Any:
    x = np.arange(1, 256 * 256 + 1, dtype=np.float32).reshape(256, 256) % 7 + 1
    x[:, 2::4] = x[:, 3::4] = 0
    return sf.by_name(fmt).from_dense(x.astype(sf.arrays.dtypes.value_type(dtype).numpy), **MATRICES[fmt]).validate()


def seen_on_device(a: Any, driver: Driver) -> Any:
    alias = copy.copy(a).alias()
    for name, array in a.arrays().items():
        object.__setattr__(alias, name, array.view(driver.world.cupy.ndarray))
    if hasattr(a, "parts"):
        object.__setattr__(alias, "parts", tuple(seen_on_device(part, driver) for part in a.parts))
    return alias


def plan_of(kernel: Any, fmt: str, dtype: str, n: int, layouts: tuple[str, str], epilogue: bool, driver: Driver) -> Any:
    if dtype not in sf.by_name(fmt).value_dtypes or (fmt, dtype) == ("two-four", "float32"):
        return None
    a = matrix(fmt, dtype)
    p = Problem.product(
        fmt, tuple(a.params().items()), 256, 256, n, a.stored, dtype, dtype, dtype, device="cuda", sm=90,
        b_layout=layouts[0], out_layout=layouts[1], epilogue=epilogue, parts=Operand.of(a, "cuda").parts,
    )  # fmt: skip
    own = plans.without_epilogue(kernel, p)
    if [r for r in kernel.unsupported(own) if "dtype" in r or "row-major" in r or "major" in r]:
        return None
    on_device, csr = seen_on_device(a, driver), a.to_csr()
    with pytest.MonkeyPatch.context() as m:
        if fmt == "ell-buckets":  # whose conversion runs kernels
            m.setattr(type(on_device), "to_csr", lambda self: seen_on_device(csr, driver))
        plan = plans.plan_with(kernel, on_device, p)
    driver.taken()
    return plan


def name_of(kernel: Any) -> str:
    return str(kernel.name)


def operands(n: int, layouts: tuple[str, str], starts: tuple[int, int, int], base: int, bias: bool) -> Operands:
    b, c, at = (base * (i + 1) + start for i, start in enumerate(starts))
    ldb, ldc = (256 if layout == COL else n for layout in layouts)
    return Operands(b, c, n, ldb, ldc, 7, at if bias else 0)


@pytest.mark.parametrize("kernel", TRIED, ids=name_of)
def test_moved_launches_are_those_of_the_addresses(kernel: Any, driver: Driver) -> None:
    tried = 0
    for fmt, dtype in itertools.product(MATRICES, ("bfloat16", "float32", "float64")):
        if ("spmm", fmt) not in kernel.takes:
            continue
        for n, layouts, epilogue in CASES:
            plan = plan_of(kernel, fmt, dtype, n, layouts, epilogue, driver)
            for starts in STARTS if plan else ():
                here, there = (operands(n, layouts, starts, base, epilogue) for base in (1 << 20, 1 << 33))
                plan.prepare(here)  # a variant of the kernel may be built for the first of its alignment
                driver.taken()
                calls, moved = moving(plan.prepare, here, threading.RLock())
                assert isinstance(moved, Moving), (plan, starts)
                for o in (there, here, there):
                    for call in plan.prepare(o):
                        call()
                    wanted = driver.taken()
                    moved((o.b, o.c, o.bias))
                    assert driver.taken() == wanted
                    assert wanted
                for call in calls:
                    call()
                assert driver.taken() != wanted
                tried += 1
    assert tried


# ------------------------------------------------------------------ what may be moved


def launch_of(driver: Driver, signature: Any) -> Launch:
    return Launch(jit.load("", "test"), signature, (), 32)


def moved_of(driver: Driver, prepare: Any, b: int = 4096, c: int = 8192) -> Any:
    return moving(prepare, Operands(b, c, 3, 5, 6, 7, 12288), threading.RLock())[1]


def test_addresses_inside_operands_keep_their_distance(driver: Driver) -> None:
    launch = launch_of(driver, "iPqPPP")
    moved = moved_of(
        driver, lambda o: [launch.bind((1, 1, 1), o.stream, 3, o.b + 64, 9, 8 + o.c, o.bias, o.c + 16 + 16)]
    )
    for b, c, bias in ((1 << 20, 1 << 21, 1 << 22), (1 << 40, 1 << 41, 1 << 42)):
        moved((b, c, bias))
        ((_, _, values),) = driver.taken()
        assert [int.from_bytes(v, "little") for v in values] == [3, b + 64, 9, c + 8, bias, c + 32]


USES: dict[str, Any] = {
    "half": lambda o: o.b // 2, "difference": lambda o: o.c - o.b, "sum": lambda o: o.b + o.c,
    "page": lambda o: o.b % 4096, "high bits": lambda o: o.b & ~255, "shifted": lambda o: o.b >> 8,
    "plain": lambda o: int(o.b), "compared": lambda o: 1 if o.b < o.c else 2, "equal": lambda o: o.b == o.c,
    "as a key": lambda o: {o.b: 1}[o.b], "of numpy": lambda o: np.int64(8) + o.b, "with numpy": lambda o: o.b + np.int64(8),
    "of numpy, odd": lambda o: o.b % np.int64(24),
    "negative": lambda o: -o.b, "joined": lambda o: o.b | 1, "odd": lambda o: o.b % 24,
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_what_depends_on_more_of_an_address_is_not_moved(driver: Driver, use: str) -> None:
    launch = launch_of(driver, "Pq")
    assert moved_of(driver, lambda o: [launch.bind((1, 1, 1), 7, o.b, int(USES[use](o)))]) is None


@pytest.mark.parametrize("use", [lambda o: o.b % 16, lambda o: o.c & 15, lambda o: o.b % 256, lambda o: bool(o.bias)])
def test_alignment_may_be_asked_for(driver: Driver, use: Any) -> None:
    launch = launch_of(driver, "Pq")
    assert moved_of(driver, lambda o: [launch.bind((1, 1, 1), 7, o.b, int(use(o)))]) is not None


def test_launches_whose_addresses_are_unknown_are_not_moved(driver: Driver) -> None:
    number, mapped = launch_of(driver, "q"), launch_of(driver, (tensor_map.TensorMap,))
    assert moved_of(driver, lambda o: [number.bind((1, 1, 1), 7, o.b)]) is None
    assert moved_of(driver, lambda o: [mapped.bind((1, 1, 1), 7, bytes([1]) * 128)]) is None
    assert moved_of(driver, lambda o: [mapped.bind((1, 1, 1), 7, tensor_map.UNMAPPED)]) is not None
    assert moved_of(driver, lambda o: [lambda: None]) is None
    assert moved_of(driver, lambda o: [number.bind((1, 1, 1), 7, 5), functools.partial(int)]) is None
    empty = moved_of(driver, lambda o: [number.bind((1, 0, 1), 7, 5)])
    assert empty((1, 2, 3)) is None
    assert driver.taken() == []
    for b, c in ((0, 4096), (4096, 0)):
        assert moved_of(driver, lambda o: [number.bind((1, 1, 1), 7, 5)], b, c) is None


def test_a_map_that_the_driver_refuses_is_not_launched(driver: Driver) -> None:
    launch = launch_of(driver, (tensor_map.TensorMap,))
    moved = moved_of(
        driver,
        lambda o: [launch.bind((1, 1, 1), 7, tensor_map.tiled(o.b, "float16", (64, 8), (64,), (8, 8), 0))],
    )
    moved((8192, 0, 0))
    assert driver.taken()[0][2][0][:8] == (8192).to_bytes(8, "little")
    with pytest.raises(DeviceError, match=r"cuTensorMapReplaceAddress: .* CUresult 1 for extents .* pointer 0x2001"):
        moved((8193, 0, 0))
    assert driver.taken() == []


def test_threads_do_not_mix_their_addresses(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads the arguments at the end of the call, when other threads have had time to write theirs."""
    record = sys.modules["cupy_backends.cuda.api.driver"].launchKernel
    monkeypatch.setattr(
        sys.modules["cupy_backends.cuda.api.driver"], "launchKernel", lambda *a: (time.sleep(0.001), record(*a))
    )
    launch = launch_of(driver, "PP")
    for several in (1, 2):
        moved = moved_of(driver, lambda o, k=several: [launch.bind((1, 1, 1), o.stream, o.b, o.c)] * k)
        threads = [threading.Thread(target=moved, args=((4096 * i, 8192 * i, 0),)) for i in range(1, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [tuple(int.from_bytes(v, "little") for v in values) for _, _, values in driver.taken()]
        assert sorted(found) == sorted([(4096 * i, 8192 * i) for i in range(1, 12)] * several)
        assert all(len(set(found[i : i + several])) == 1 for i in range(0, len(found), several))


# ------------------------------------------------------------------ several launches


def several(driver: Driver, prepared: list[Operands] | None = None) -> Any:
    """Two launches that pass numbers on through memory that plans share."""
    first, second, memory = launch_of(driver, "PP"), launch_of(driver, "PP"), Scratch(shared="test")

    def prepare(o: Operands) -> Any:
        if prepared is not None:
            prepared.append(o)
        at = memory.buffer(o.stream, 1000)
        return [
            first.bind((1, 1, 1), o.stream, o.b, at),
            second.bind((2, 1, 1), o.stream, at, o.c),
        ]

    return prepare


def numbers(driver: Driver) -> list[int]:
    return [int.from_bytes(v, "little") for _, _, values in driver.taken() for v in values]


def test_several_launches_move_together(driver: Driver) -> None:
    world, prepared = driver.world, []  # type: ignore[var-annotated]
    moved = moved_of(driver, several(driver, prepared))
    world.stream = 0  # CuPy's current stream is not the one of the operands
    for i in (*range(1, 9), *[1] * 9):  # operands that come again are launched one by one, too
        moved((4096 * i, 8192 * i, 0))
        b, at, same, c = numbers(driver)
        assert (b, c) == (4096 * i, 8192 * i)
        assert at == same
    assert len(prepared) == 1


def test_a_captured_stream_gets_launches_with_memory_of_their_own(driver: Driver) -> None:
    """The graph may be replayed on any stream, while the memory that plans share is in use on this one."""
    world, moved = driver.world, moved_of(driver, several(driver))
    moved((4096, 8192, 0))
    _, shared, *_ = numbers(driver)
    for addresses in ((4096, 8192, 0), (12288, 16384, 0)):
        world.graphs[7] = []
        moved(addresses)
        b, at, same, c = numbers(driver)
        del world.graphs[7]
        assert (b, c) == addresses[:2]
        assert at == same != shared
        moved(addresses)
        assert numbers(driver) == [b, shared, shared, c]


def test_a_product_that_moves_keeps_nothing_of_the_plan_in_a_circle(driver: Driver) -> None:
    """The memory of a matrix is free as soon as nobody refers to it, without the garbage collector."""
    prepare = several(driver)
    moved, alive = moved_of(driver, prepare), weakref.ref(prepare)
    for _ in range(5):
        moved((4096, 8192, 0))
    gc.disable()
    try:
        del moved, prepare
        assert alive() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------ plans


def counting(driver: Driver, **changed: Any) -> tuple[Any, list[Operands]]:
    """A plan of one launch (its B, C, bias, N and beta), and the operands that it prepared launches for."""
    p, launch, prepared = driver.world.plan(**changed).problem, launch_of(driver, "PPPqd"), []

    def prepare(o: Operands) -> Any:
        prepared.append(o)
        return [launch.bind((1, 1, 1), o.stream, o.b, o.c, o.bias, o.n, o.beta)]

    return device_plan("cuda.test", p, prepare), prepared


def placed(world: Any, rows: int, cols: int, shift: int = 0) -> Any:
    flat = world.array(rows * cols + 128)
    start = -flat.ctypes.data // 4 % 64 + shift
    return flat[start : start + rows * cols].reshape(rows, cols)


def test_a_plan_prepares_once_for_each_form_of_its_operands(driver: Driver) -> None:
    world = driver.world
    plan, prepared = counting(driver)
    kept = []
    for n, shift, stream, count in (
        (5, 0, 7, 1), (5, 0, 7, 1), (5, 1, 7, 2), (5, 1, 7, 2), (6, 0, 7, 3), (5, 0, 8, 4), (5, 0, 7, 4), (6, 0, 7, 4),
    ):  # fmt: skip
        world.stream = stream
        B, out = placed(world, 3, n), placed(world, 4, n, shift)
        kept.append((B, out))
        for _ in range(2):
            assert plan.run(B, out) is out
            ((_, where, values),) = driver.taken()
            found = [int.from_bytes(v, "little") for v in values]
            assert found[:4] == [B.ctypes.data, out.ctypes.data, 0, n]
            assert where[-1] == stream
        assert len(prepared) == count
    wide = placed(world, 3, 10)
    plan.run(wide[:, :5], placed(world, 4, 5))  # another distance between rows
    assert len(prepared) == 5
    room = placed(world, 4, 64)
    for n in (7, 5, 7):  # the same distances, other columns
        plan.run(placed(world, 3, 64)[:, :n], room[:, :n])
        assert int.from_bytes(driver.taken()[-1][2][3], "little") == n
    assert len(prepared) == 7
    for shift in (2, 3, 2):
        plan.run(placed(world, 3, 5, 1), placed(world, 4, 5, shift))
    assert len(prepared) == 9


def test_the_epilogue_is_part_of_the_form(driver: Driver) -> None:
    world = driver.world
    plan, prepared = counting(driver, epilogue=True)
    bias = placed(world, 1, 4)[0]
    for count, (alpha, beta, b) in enumerate(
        ((1.0, 0.0, None), (1.0, 0.0, bias), (1.0, 2.0, bias), (2.0, 2.0, bias), (0.0, 2.0, bias)), 1
    ):
        for _ in range(2):
            plan.run(placed(world, 3, 5), placed(world, 4, 5), alpha, beta, b)
            ((_, _, values),) = driver.taken()
            assert int.from_bytes(values[2], "little") == (0 if b is None else b.ctypes.data)
            assert struct.unpack("d", values[4]) == (beta,)
        assert len(prepared) == count + (count == 5)  # 0.0 and -0.0 are one key, so alpha = 0 is prepared each time


# ------------------------------------------------------------------ memory between launches


class Halves(CudaKernel):
    """Two launches that pass numbers on through memory of their own, for each number of columns another one."""

    name = "test.halves"

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def prepared(self, a: Any, p: Problem) -> Prepared:
        first, second, memory = launch_of(self.driver, "PP"), launch_of(self.driver, "PP"), Scratch()

        def prepare(o: Operands) -> Any:
            at = memory.buffer(o.stream, 1000)
            return [first.bind((1, 1, 1), o.stream, o.b, at + 16), second.bind((2, 1, 1), o.stream, at + 16, o.c)]

        return Prepared(prepare)


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the buffers that were given back."""
    gone: list[int] = []
    monkeypatch.setattr(scratch.Buffer, "__del__", lambda b: gone.append(b.array.ctypes.data), raising=False)
    return gone


def test_memory_of_launches_that_are_kept_outlives_the_plan_s_own_cache(driver: Driver, freed: list[int]) -> None:
    """A plan keeps launches of a few numbers of columns, a caller those that it was given."""
    plan = Halves(driver)._plan(matrix("csr", "float32"), driver.world.plan().problem)
    _, moved = moving(plan.prepare, Operands(4096, 8192, 8, 8, 8, 7), threading.RLock())
    for n in range(16, 16 + 8 * (FITTED + 2), 8):
        for call in plan.prepare(Operands(4096, 8192, n, n, n, 7)):
            call()
    driver.taken()
    gc.collect()
    moved((12288, 16384, 0))
    _, at, same, _ = numbers(driver)
    assert at == same
    assert len(freed) >= 1
    assert at - 16 not in freed
    del moved
    gc.collect()
    assert at - 16 in freed


def test_memory_of_a_graph_lives_as_long_as_the_plan(driver: Driver, freed: list[int]) -> None:
    plan = Halves(driver)._plan(matrix("csr", "float32"), driver.world.plan().problem)
    driver.world.graphs[7] = []
    for call in plan.prepare(Operands(4096, 8192, 8, 8, 8, 7)):
        call()
    del call
    del driver.world.graphs[7]
    _, at, _, _ = numbers(driver)
    for n in range(16, 16 + 8 * (FITTED + 2), 8):
        plan.prepare(Operands(4096, 8192, n, n, n, 7))
    gc.collect()
    assert at - 16 not in freed
    del plan
    gc.collect()
    assert at - 16 in freed
