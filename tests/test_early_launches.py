"""Launches that may begin before the one before them is over: how the driver is asked, and which kernels wait themselves."""

from __future__ import annotations

import ctypes
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from early_starts import says_that_it_waits, waiting_kernels

from spformat.backends.cuda.runtime import early, jit, launch, launch_config

SOURCES = sorted(jit.HERE.glob("*/*.cu"))


class Asked:
    """Stands for cuLaunchKernelEx."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.calls = status, list[tuple[Any, ...]]()

    def __call__(self, config: int, function: int, arguments: int, extra: None) -> int:
        self.calls.append((launch_config.Config.from_address(config), function, arguments, extra))
        return self.status


def test_the_driver_gets_the_launch_and_one_attribute() -> None:
    assert (ctypes.sizeof(launch_config.Attribute), launch_config.Attribute.value.offset) == (72, 8), (
        "CUlaunchAttribute"
    )
    assert (ctypes.sizeof(launch_config.Config), launch_config.Config.attributes.offset) == (56, 40), "CUlaunchConfig"
    asked = Asked()
    driver = early.EarlyDriver(asked, ValueError)
    for _ in range(2):
        driver.launchKernel(1234, 5, 6, 7, 128, 1, 1, 4096, 99, 5678, 0)
    (config, function, arguments, extra), (again, *_) = asked.calls
    assert ctypes.addressof(config) == ctypes.addressof(again), "equal launches share a config"
    assert (function, arguments, extra) == (1234, 5678, None)
    assert (*config.grid, *config.block, config.smem, config.stream) == (5, 6, 7, 128, 1, 1, 4096, 99)
    attribute = launch_config.Attribute.from_address(config.attributes)
    assert (config.number, attribute.id, [*attribute.value]) == (1, launch_config.EARLY, [1, 0, 0])


def test_a_refused_launch_is_an_error_of_the_driver() -> None:
    with pytest.raises(ValueError, match="700"):
        early.EarlyDriver(Asked(700), ValueError).launchKernel(1, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)


class Function:
    """Stands for a compiled function."""

    ptr = 77


def world(monkeypatch: pytest.MonkeyPatch, capability: str) -> tuple[list[int], Asked]:
    """A CuPy whose current device has ``capability``: what its own launches get, and what early ones get."""
    usual, asked = list[int](), Asked()
    api = SimpleNamespace(driver=Driver(usual))
    for name, module in (("cupy_backends", None), ("cupy_backends.cuda", None), ("cupy_backends.cuda.api", api)):
        monkeypatch.setitem(sys.modules, name, module or ModuleType(name))
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device)))
    monkeypatch.setattr(early, "_driver", lambda: early.EarlyDriver(asked, RuntimeError))
    return usual, asked


@pytest.mark.parametrize("capability", ["80", "89", "90", "100", "120"])
@pytest.mark.parametrize("waits", [True, False])
def test_all_but_the_first_launch_are_early_if_their_kernels_wait(
    waits: bool, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, asked = world(monkeypatch, capability)
    each = launch.Launch(Function(), "i", (), 32, waits=waits)
    for call in launch.one_after_another([each.bind((grid, 1, 1), 0, grid) for grid in (1, 2, 3)]) * 3:
        call()
    early_grids = [config.grid[0] for config, *_ in asked.calls]
    has_them = waits and int(capability) >= 90
    assert (usual, early_grids) == (([1] * 3, [2, 3] * 3) if has_them else ([1, 2, 3] * 3, []))


class Driver:
    """Stands for CuPy's driver; notes the first extent of each grid."""

    CUDADriverError = RuntimeError

    def __init__(self, grids: list[int]) -> None:
        self.grids = grids

    def launchKernel(self, function: int, grid: int, *rest: int) -> None:  # noqa: N802  # CuPy's name
        self.grids.append(grid)


def test_a_call_that_is_no_launch_stays_as_it_is() -> None:
    calls = [lambda: None, lambda: None]
    assert launch.one_after_another(calls) == calls


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_whoever_may_begin_early_waits(source: Any) -> None:
    """A launcher says ``waits`` if and only if its kernels wait before they touch what other launches write."""
    kernels = len(re.findall(r"^__global__ ", source.read_text(), re.M))
    waiting = waiting_kernels(source)
    assert says_that_it_waits(source.with_suffix(".py")) == bool(waiting)
    assert waiting in (0, kernels), "some kernels of the source wait, others do not"
