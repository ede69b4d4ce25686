"""Kernels are compiled before the plans that need them run; and a calibration on a GPU, or the emulated one."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from exact import hopper

from spformat.backends import vendor
from spformat.backends.cuda.runtime import compile_ahead, jit
from spformat.backends.cuda.runtime.compile_ahead import CompileAhead
from spformat.errors import DeviceFault
from spformat.measure import bench, calibrate, calibration_cases, calibration_fit
from spformat.measure.calibration_points import kernels_by_name
from spformat.products.problem import ROW

SOURCE = "csr/spmm_csr.cu"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names in the order in which they are compiled, each by a compiler that does nothing."""
    names: list[str] = []

    def compile_(cupy: Any, text: str, flags: tuple[str, ...], instance: str) -> Any:
        names.append(instance)
        if "broken" in instance:
            raise RuntimeError("does not compile")
        return type("Function", (), {"shared_size_bytes": 0, "max_dynamic_shared_size_bytes": 0})()

    cupy = type("CuPy", (), {})()
    cupy.cuda = type("Cuda", (), {})()
    cupy.cuda.Device = lambda _: calibrate.tiles.contextlib.nullcontext()
    cupy.cuda.compiler = type("Compiler", (), {"CompileException": KeyError})
    monkeypatch.setattr(jit, "import_cupy", lambda: cupy)
    monkeypatch.setattr(jit, "_compiled", compile_)
    jit.load.cache_clear()
    yield names
    jit.load.cache_clear()


def load(*names: str) -> None:
    for name in names:
        jit.load(SOURCE, name, "sm_90")


def test_every_kernel_is_compiled_once_and_before_any_attempt_ends(compiled: list[str]) -> None:
    """In rounds: what the attempts need first, then what they need after that."""
    ended = []

    def attempt(*names: str) -> Any:
        def run() -> None:
            load(*names)
            ended.append((names, tuple(compiled)))

        return run

    with CompileAhead(1) as ahead:
        assert ahead.compile_for([attempt("x", "y"), attempt("x"), attempt("z", "y")]) == 3
        assert compiled == ["x", "z", "y"]
        assert ended == [(("x",), ("x", "z")), (("x", "y"), ("x", "z", "y")), (("z", "y"), ("x", "z", "y"))]
        assert ahead.compile_for([attempt("x", "y", "z")]) == 0
        assert ahead.compile_for([attempt("w")], enough=lambda: True) == 0
    assert compiled == ["x", "z", "y"]


def test_nothing_is_noted_outside_the_block(compiled: list[str]) -> None:
    with jit.noting(()) as noted:
        for _ in range(2):
            with pytest.raises(jit.NotCompiled, match="x is not compiled yet"):
                load("x")
    assert list(noted) == [(SOURCE, "x", "sm_90")]
    assert compiled == []
    load("x")
    with jit.noting(()):
        load("x")  # loaded is loaded
    assert compiled == ["x"]


def test_what_does_not_compile_is_left_to_the_plan(compiled: list[str], caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("a plan that fails anyway")

    with caplog.at_level(logging.WARNING, "spformat"):
        assert CompileAhead(1).compile_for([lambda: load("broken"), fails, lambda: load("x")]) == 2
    assert "broken: not compiled ahead: does not compile" in caplog.text
    assert compiled == ["broken", "x", "broken"]  # the attempt, which compiled it itself, failed
    with pytest.raises(RuntimeError, match="does not compile"):
        load("broken")


def test_a_fault_ends_all(compiled: list[str]) -> None:
    def faults() -> None:
        raise DeviceFault("illegal address")

    with pytest.raises(DeviceFault):
        CompileAhead(1).compile_for([faults])


def test_several_are_compiled_by_other_processes(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, where there is no GPU, their answer is why not; the attempts then load the kernels themselves."""
    seen: list[Any] = []
    monkeypatch.setattr(compile_ahead.log, "warning", lambda *a: seen.append(a))
    with CompileAhead(2) as ahead:
        assert ahead._pool is None
        ahead.compile_for([lambda: load("nowhere_one"), lambda: load("nowhere_two")])
        assert ahead._pool is not None
    assert [text.partition(":")[0] for _, text in seen] == ["nowhere_one", "nowhere_two"]
    assert compiled == ["nowhere_one", "nowhere_two"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["cuda.spmm_csr", "cuda.spmm_vector_nm_expanding_sm90a", "cuda.spmm_bitmask_expanding_sm90a"]
)
def test_a_calibration_of_one_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the kernel, rivals and dense are measured, all agree, and everything was compiled before."""
    cp, build, operand = hopper(), calibration_cases.build, calibration_cases.operand

    def there(xp: Any, rows: int, cols: int, layout: str, dtype: str) -> Any:
        x = operand(np, rows, cols, layout, dtype)
        return cp.asarray(x) if layout == ROW else cp.asarray(np.ascontiguousarray(x.T)).T

    # The emulated CuPy draws no numbers and has no cuSPARSE.
    monkeypatch.setattr(vendor.CusparseCSR, "unsupported", lambda self, p: ["left out here"])
    monkeypatch.setattr(
        calibration_cases, "build", lambda spec, xp, seed: build(spec, np, seed).to("cuda").ensure_valid()
    )
    monkeypatch.setattr(calibration_cases, "operand", there)
    monkeypatch.setattr(calibration_cases, "LAYERS", ((192, 128),))
    monkeypatch.setattr(bench, "FLUSH", 1 << 12)
    kernel, loads = kernels_by_name("cuda")[name], list[Any]()
    real = jit._compiled

    def counted(*arguments: Any) -> Any:
        loads.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(jit, "_compiled", counted)
    scope = calibrate.Scope(3, "cuda", 200, (name,), columns=(1, 40), widths=2, tiles=3, products=2)
    with CompileAhead(1) as ahead:
        points = list(calibrate.measure(scope, ahead))
        assert {x.case for x in points} == {1, 2}
        for case in (1, 2):
            own = [x for x in points if x.case == case]
            names = {x.kernel.name for x in own}
            assert {"dense", name} < names
            tiles = [x.tile for x in own if x.kernel.name == name]
            assert len(tiles) == min(3, len(list(kernel.options(own[0].problem))))
            assert len({(x.kernel.name, str(x.tile)) for x in own}) == len(own)
        late = {i for i in loads if "hold" not in i} - {i for _, i, _ in ahead.ready}  # the clock's own kernel is none
        assert late == set()
    assert all(x.expected > 0 for x in calibration_fit.priced(points) if x.kernel.name != "dense")
