"""Plans without a GPU: a current device, a current stream and CUDA graphs that a test sets, and what a plan called."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_in_cupy

from spformat.backends.cuda.runtime import scratch
from spformat.backends.cuda.runtime.device_plan import device_plan
from spformat.backends.cuda.runtime.launch import Operands
from spformat.products.plan import Plan, nothing
from spformat.products.problem import ROW, Problem


class Step:
    """A launch as ``LaunchSequence`` uses it; it is recorded in ``world.calls`` when it is queued."""

    def __init__(self, world: World, what: Any, stream: int) -> None:
        self.world, self.what, self.stream = world, what, stream

    def __call__(self) -> None:
        graph = self.world.graphs.get(self.stream)
        self.world.devices.append(self.world.device)
        time.sleep(0)  # gives another thread the chance to run in between
        (self.world.calls if graph is None else graph).append(self.what)


class World:
    """The stand-in for CuPy. ``calls``: the calls, in order. ``prepared``: the operands for which plans
    prepared launches. ``devices``: the device that was current at each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.stream = 0, 7
        self.calls: list[Any] = []
        self.prepared: list[Operands] = []
        self.devices: list[int] = []
        self.cupy: Any = stand_in_cupy.module()
        self.cupy.cuda.runtime.getDevice = lambda: self.device
        self.cupy.cuda.runtime.getDeviceCount = lambda: 2
        self.cupy.cuda.get_current_stream = lambda: SimpleNamespace(ptr=self.stream)
        self.cupy.cuda.Device = self._enter
        self.cupy.empty = lambda shape, dtype, order="C": self.array(*np.atleast_1d(shape), dtype=dtype, order=order)
        self.mode = 0  # what the driver forbids this thread while a stream is captured
        monkeypatch.setattr(scratch, "_exchange_mode", lambda: self._exchange)
        # Calls on a captured stream are recorded in its graph.
        self.graphs: dict[int, list[Any]] = {}
        self.cupy.cuda.runtime.streamIsCapturing = lambda stream: stream in self.graphs
        monkeypatch.setitem(sys.modules, "cupy", self.cupy)
        monkeypatch.setitem(sys.modules, "cupy.cuda", self.cupy.cuda)

    def _exchange(self, pointer: Any) -> int:
        mode = pointer._obj
        self.mode, mode.value = mode.value, self.mode
        return 0

    def _enter(self, device: int) -> Any:
        world, before = self, self.device

        class Entered:
            compute_capability = "90"

            def __enter__(self) -> None:
                world.device = device

            def __exit__(self, *_: object) -> None:
                world.device = before

        return Entered()

    def array(self, *shape: int, dtype: str = "float32", order: str = "C", device: int = 0) -> Any:
        class OnDevice(stand_in_cupy.Array):
            @property
            def data(self) -> Any:  # type: ignore[override]
                return SimpleNamespace(ptr=self.ctypes.data, device_id=device)

        return np.zeros(shape, dtype, order).view(OnDevice)  # type: ignore[call-overload]

    def plan(self, calls: int = 1, reads: Any = nothing, **changed: Any) -> Plan:
        fields = {"device": "cuda", "sm": 90, "b_layout": ROW, "out_layout": ROW} | changed
        p = Problem.product("csr", (), 4, 3, 5, 2, "float32", "float32", "float32", **fields)

        def prepare(o: Operands) -> Any:
            self.prepared.append(o)
            return [Step(self, (o, i), o.stream) for i in range(calls)]

        return device_plan("cuda.test", p, prepare, reads=reads)
