"""Launches without a GPU: what is passed to the driver."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.backends.cuda.runtime.addresses import Address
from spformat.backends.cuda.runtime.launch import Launch, Operands, over_tiles
from spformat.errors import DeviceError


class Map(ctypes.Structure):
    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


class Odd(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int32), ("b", ctypes.c_int32), ("c", ctypes.c_int32)]


CTYPES = {"P": ctypes.c_uint64, "i": ctypes.c_int32, "q": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the driver would have been asked to launch: (function, extents .., stream, places, extra)."""
    taken: list[tuple[Any, ...]] = []
    driver = ModuleType("cupy_backends.cuda.api.driver")
    driver.launchKernel = lambda *arguments: taken.append(arguments)  # type: ignore[attr-defined]
    driver.CUDADriverError = RuntimeError  # type: ignore[attr-defined]
    for name in ("cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    api = ModuleType("cupy_backends.cuda.api")
    api.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, api.__name__, api)
    monkeypatch.setitem(sys.modules, driver.__name__, driver)
    return taken


def arguments_at(places: int, signature: tuple[Any, ...]) -> list[Any]:
    """The arguments as the driver finds them: an array of addresses, one for each parameter of the kernel."""
    found = []
    for i, kind in enumerate(signature):
        place = ctypes.c_uint64.from_address(places + 8 * i).value
        form = CTYPES.get(kind, kind)
        assert place % ctypes.alignment(form) == 0
        value = form.from_address(place)
        found.append(bytes(value) if isinstance(value, ctypes.Structure) else value.value)
    return found


SIGNATURES = [
    (*"Piq", Map, *"Pif", Odd, *"iqPd"),
    (Odd, *"q"),
    (*"iPiPiiqfdf",),
    (Map, Odd, "i", Map),
]


@pytest.mark.parametrize("signature", SIGNATURES)
def test_the_driver_finds_every_argument_at_every_cut(launched: list[Any], signature: tuple[Any, ...]) -> None:
    def value(kind: Any, i: int) -> Any:
        if not isinstance(kind, str):
            return kind.from_buffer_copy(bytes(range(i, i + ctypes.sizeof(kind))))
        return -1.5 - i if kind in "fd" else (1 << 40) + i if kind in "qP" else -7 - i

    values = [value(kind, i) for i, kind in enumerate(signature)]
    wanted = [bytes(v) if isinstance(v, ctypes.Structure) else v for v in values]
    for cut in range(len(signature) + 1):
        once = Launch(SimpleNamespace(ptr=77), signature, values[:cut], 96, 5000)
        call = once.bind((3, 2, 1), 99, *wanted[cut:])
        # from shared memory, twice from its own, and at once
        for make in (call, call, call, functools.partial(once, (3, 2, 1), 99, *values[cut:])):
            make()
            *head, places, extra = launched.pop()
            assert head == [77, 3, 2, 1, 96, 1, 1, 5000, 99]
            assert (arguments_at(places, signature), extra) == (wanted, 0)


def test_bound_calls_keep_their_own_arguments(launched: list[Any]) -> None:
    launch = Launch(SimpleNamespace(ptr=1), "Pq", (4096,), 32)
    first, second, empty = launch.bind((1, 1, 1), 0, 5), launch.bind((1, 1, 1), 0, 6), launch.bind((1, 0, 1), 0, 7)
    found = []
    for call in (first, second, empty, first, second, first):
        call()
        found += [arguments_at(x[-2], ("P", "q"))[1] for x in launched]
        launched.clear()
    assert found == [5, 6, 5, 6, 5]


def test_threads_that_launch_at_once_do_not_mix_their_arguments(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver reads the arguments at the end of the call, when other threads have had time to pack theirs."""
    found: list[tuple[int, int]] = []

    def slow(*arguments: int) -> None:
        time.sleep(0.001)
        found.append((arguments[8], arguments_at(arguments[-2], ("q",))[0]))

    monkeypatch.setattr(sys.modules["cupy_backends.cuda.api.driver"], "launchKernel", slow)
    launch = Launch(SimpleNamespace(ptr=1), "q", (), 32)
    threads = [threading.Thread(target=launch, args=((1, 1, 1), i, 1000 + i)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(i, 1000 + i) for i in range(16)]


def test_wrong_numbers_of_arguments_are_refused(launched: list[Any]) -> None:
    launch = Launch(SimpleNamespace(ptr=1), "Pqi", (4096,), 32)
    for tail in ((), (1,), (1, 2, 3)):
        with pytest.raises(Exception, match="expected"):
            launch((1, 1, 1), 0, *tail)
    assert not launched


def test_columns_beyond_the_largest_grid_are_walked() -> None:
    launch: Any = SimpleNamespace(bind=lambda grid, stream, *tail: (grid, tail))
    for n, tiles in ((1, 1), (8, 1), (9, 2), (8 * 65535, 65535), (8 * 65535 + 1, 65535)):
        for out_col, steps in ((False, (70, 1)), (True, (1, 70))):
            (call,) = over_tiles(launch, 3, 8, out_col)(Operands(4096, 8192, n, 60, 70, 7))
            assert call == ((3, tiles, 1), (4096, 8192, n, 60, *steps))


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("has_context", [False, True])
def test_a_thread_without_a_context_gets_one(
    launched: list[Any], has_context: bool, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver refuses a launch in a thread in which nobody has used the runtime; torch's threads may be such."""
    current, set_devices = [0x5 if has_context else 0], []

    class Refused(RuntimeError):
        status = 201

    def launch(*arguments: Any) -> None:
        if has_context or not current[0]:
            raise Refused("CUDA_ERROR_INVALID_CONTEXT")
        launched.append(arguments)

    def set_device(device: int) -> None:
        set_devices.append(device)
        current[0] = 0x5

    driver: Any = sys.modules["cupy_backends.cuda.api.driver"]
    driver.launchKernel, driver.CUDADriverError, driver.ctxGetCurrent = launch, Refused, lambda: current[0]
    runtime = SimpleNamespace(setDevice=set_device, getDevice=lambda: 3)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    bound = Launch(SimpleNamespace(ptr=77), "P", (), 32).bind((1, 1, 1), 0, Address.of(4096, 0, 0, []))
    call: Any = functools.partial(bound.moved(), (8192, 0, 0)) if moves else bound  # type: ignore[arg-type]
    if has_context:  # then the error means something else
        with pytest.raises(DeviceError, match=r"^kernel launch: .*INVALID_CONTEXT"):
            call()
        assert set_devices == []
        return
    call(), call()
    assert set_devices == [3]
    assert len(launched) == 2


@pytest.mark.gpu
def test_a_plan_may_be_collected_while_a_stream_is_captured() -> None:
    cp = pytest.importorskip("cupy")
    rng = np.random.default_rng(3)
    x, B = rng.integers(-2, 3, (96, 128)).astype(np.float16), cp.asarray(rng.integers(-2, 3, (128, 24)).astype("f2"))
    kept, lost = sf.convert(x, "csr").to("cuda"), sf.convert(x, "bitmask").to("cuda")
    out, other = cp.empty((96, 24), "f2"), cp.empty((96, 24), "f2")
    plan, going = (sf.plan(a, B=B, out=c, backend="cuda.expand_then_dense") for a, c in ((kept, out), (lost, other)))
    spmm = sf.plan(lost.T, B=cp.asarray(rng.integers(-2, 3, (96, 24)).astype("f2")), epilogue=True)
    C = cp.empty((96, 24), "f2")
    for _ in range(9):
        spmm(C, alpha=2.0)
        going(B, out=other)
        plan(B, out=out)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        plan(B, out=out)
        stream.synchronize()
        stream.begin_capture(cp.cuda.runtime.streamCaptureModeGlobal)
        del going, spmm
        gc.collect()
        plan(B, out=out)
        graph = stream.end_capture()
        out.fill(float("nan"))
        graph.launch(stream)
        stream.synchronize()
    assert (out.get() == x.astype(np.float64) @ B.get()).all()
