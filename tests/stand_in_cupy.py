"""A CuPy without a GPU: numpy arrays under its names, and copies that are made only when their event is waited for.

What reads a buffer before the event of its copy, or fills one that is still being sent, gets wrong bytes here.
"""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class Array(np.ndarray[Any, Any]):
    """An array "on the device"."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:  # type: ignore[override]
        return Scope()

    def get(self) -> np.ndarray[Any, Any]:
        return np.array(self.view(np.ndarray))


class Scope:
    """A context manager that does nothing: a device, a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.pending: list[Any] = []
        self.ptr = self
        self.id = 0
        self.mem_info = (1 << 20, 1 << 30)

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        while self.pending:
            self.pending.pop(0)()


Scope.null = Scope()  # type: ignore[attr-defined]


class Event:
    def __init__(self, **_: Any) -> None:
        self.mark: list[Any] = []
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.mark, self.stream = list(stream.pending), stream

    def synchronize(self) -> None:
        for copy in self.mark:
            if copy in self.stream.pending:
                self.stream.pending.remove(copy)
                copy()
        self.mark = []


class Copy:
    """A copy that has been asked for: it reads its source when it runs, not before."""

    def __init__(self, *arguments: int) -> None:
        self.arguments = arguments

    def __call__(self) -> None:
        ctypes.memmove(*self.arguments)


def module() -> ModuleType:
    """To stand in ``sys.modules["cupy"]``."""
    cupy: Any = ModuleType("cupy")
    host = Scope.null  # type: ignore[attr-defined]
    cupy.__version__, cupy.ndarray = "stand-in", Array
    cupy.empty = _filled
    cupy.asarray = lambda x: np.array(x).view(Array)
    cupy.__getattr__ = lambda name: getattr(np, name)
    cupy.cuda = SimpleNamespace(
        Device=Scope, Stream=Scope, Event=Event, get_current_stream=lambda: host, alloc_pinned_memory=bytearray,
        memory=SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (MemoryError,), {})),
        runtime=SimpleNamespace(getDevice=lambda: 0, 
            CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
            deviceSynchronize=lambda: None,
            memcpyAsync=lambda to, since, n, kind, stream: stream.pending.append(Copy(to, since, n)),
        ),
    )  # fmt: skip
    return cupy  # type: ignore[no-any-return]


def _filled(shape: tuple[int, ...], dtype: Any) -> Array:
    """Uninitialised memory is filled with ones, so that a missing copy is noticed."""
    out = np.empty(shape, dtype)
    out.reshape(-1).view(np.uint8)[...] = 255
    return out.view(Array)
