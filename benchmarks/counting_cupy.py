"""A stand-in for CuPy whose calls cost next to nothing and are counted: what ``convert_host.py`` measures Python with.

A conversion first runs on the emulated GPU of tests/emulator, and the words that the host waits for are written down;
then it runs again with launches that do nothing, and is given these words.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]
from emulator import stand_in  # noqa: E402

from spformat.backends.cuda.runtime import scratch  # noqa: E402
from spformat.backends.cuda.runtime.scratch import Counters, Workspace  # noqa: E402


class Memory:
    """Where an array is: every one at the same place, as nothing is read or written."""

    ptr = 1 << 20


class Scope:
    """The device, the stream, and what else is entered."""

    id, ptr = 0, 0
    compute_capability = "90"

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FastArray(stand_in.Array):
    """An array of which only the form is known. What needs contents gets zeros."""

    __slots__ = ("data", "device", "dtype", "flags", "itemsize", "nbytes", "ndim", "shape", "size", "strides")

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.shape = shape if type(shape) is tuple else tuple(shape) if isinstance(shape, list) else (int(shape),)
        self.dtype = np.dtype(dtype)
        self.data, self.device, self.flags, self.ndim = MEMORY, SCOPE, FLAGS, len(self.shape)
        size = 1
        for extent in self.shape:
            size *= extent
        self.size, self.itemsize = size, self.dtype.itemsize
        self.nbytes = size * self.itemsize

    @property
    def host(self) -> np.ndarray[Any, Any]:  # type: ignore[override]
        """Its contents."""
        return np.zeros(self.shape, self.dtype)

    def view(self, dtype: Any) -> FastArray:
        """The same memory as another type of the same width."""
        return FastArray(self.shape, dtype)

    def reshape(self, *shape: Any) -> FastArray:
        """The same memory in another shape."""
        return FastArray(self.host.reshape(*shape).shape, self.dtype)

    def astype(self, dtype: Any, copy: bool = True) -> FastArray:
        """A copy, unless ``dtype`` is the own type and no copy is asked for."""
        if not copy and self.dtype == dtype:
            return self
        COUNTS["array ops"] += 1
        return FastArray(self.shape, dtype)

    def __getitem__(self, at: Any) -> FastArray:
        return FastArray(self.host[at].shape, self.dtype)

    def copy(self) -> FastArray:
        COUNTS["array ops"] += 1
        return FastArray(self.shape, self.dtype)

    def fill(self, _: Any) -> None:
        COUNTS["memsets"] += 1

    def get(self) -> np.ndarray[Any, Any]:
        """Its contents on the host."""
        return PINNED.get(self)


MEMORY, SCOPE, FLAGS = Memory(), Scope(), np.empty((1, 1)).flags
COUNTS: Counter[str] = Counter()


class Pinned:
    """Pinned memory, and what the kernels of a call had written there whenever the host had waited for them.

    What a call allocates is the same memory in every call, as CuPy's pool would give it.
    """

    def __init__(self) -> None:
        self.known: list[Any] = []
        self.own: list[Any] = []
        self.log: list[Any] = []
        self.recording, self.allocated, self.waits = True, 0, 0

    def record(self) -> None:
        """The next call runs in the emulator."""
        self.recording, self.own, self.log = True, [], []
        self.known = [w for w in self.known if w() is not None]

    def start(self) -> None:
        """A call begins in which launches do nothing."""
        self.recording, self.allocated, self.waits = False, 0, 0

    def alloc(self, size: int) -> Any:
        """``cupy.cuda.alloc_pinned_memory``"""
        COUNTS["pinned"] += 1
        if not self.recording:
            self.allocated += 1
            return self.own[self.allocated - 1]
        buffer = stand_in._pinned(size)
        self.own.append(buffer)
        self.known.append(weakref.ref(buffer))
        return buffer

    def wait(self) -> None:
        """The device is done."""
        if self.recording:
            live = [b for w in self.known if (b := w()) is not None]
            self.log.append([(ctypes.addressof(b), bytes(b)) for b in live])
            return
        COUNTS["waits"] += 1
        for address, words in self.log[self.waits]:
            ctypes.memmove(address, words, len(words))
        self.waits += 1

    def get(self, a: Any) -> np.ndarray[Any, Any]:
        """The host copies an array."""
        if self.recording:
            self.log.append(a.host.copy())
            return self.log[-1]  # type: ignore[no-any-return]
        COUNTS["waits"] += 1
        COUNTS["copies"] += 1
        self.waits += 1
        return self.log[self.waits - 1]  # type: ignore[no-any-return]


PINNED = Pinned()


class Stream:
    """The current stream."""

    ptr = 0

    def synchronize(self) -> None:
        """Wait for the device."""
        PINNED.wait()


def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, counted as ``name``."""

    def counted(*args: Any, **options: Any) -> Any:
        COUNTS[name] += 1
        return function(*args, **options)

    return counted


def launch(*_: Any) -> None:
    """``cuLaunchKernel`` of a kernel that does nothing."""
    COUNTS["launches"] += 1


def empty(shape: Any, dtype: Any = float, order: str = "C") -> FastArray:
    """``cupy.empty``"""
    COUNTS["memory"] += 1
    return FastArray(shape, dtype)


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> FastArray:
    """``cupy.zeros``"""
    COUNTS["memory"] += 1
    COUNTS["memsets"] += 1
    return FastArray(shape, dtype)


def asarray(x: Any, dtype: Any = None) -> FastArray:
    """``cupy.asarray``"""
    if isinstance(x, FastArray):
        return x
    COUNTS["memory"] += 1
    COUNTS["copies"] += 1
    return FastArray(np.shape(x), dtype or x.dtype)


class Machine:
    """Two states of the stand-in for CuPy: it computes, or it only counts."""

    def __init__(self) -> None:
        stand_in.install()
        import cupy

        cupy.__spec__ = ModuleSpec("cupy", None)
        cupy.__spec__._initializing = False  # as of a real module: "import cupy" takes 0.8 us longer without it
        from cupy.cuda import runtime
        from cupy_backends.cuda.api import driver

        cupy.cuda.alloc = alloc
        stream = Stream()
        cupy.cuda.get_current_stream = lambda: stream
        cupy.cuda.alloc_pinned_memory = PINNED.alloc
        stand_in.Array.get = lambda a: PINNED.get(a)  # type: ignore[method-assign]
        fast = {
            "ndarray": FastArray,
            "empty": empty,
            "zeros": zeros,
            "asarray": asarray,
            "ascontiguousarray": lambda x: x,
        }
        others = stand_in.strict_cupy.FUNCTIONS - fast.keys()
        fast |= {name: counting("array ops", getattr(cupy, name)) for name in others}
        self.places = [(cupy, name, getattr(cupy, name), f) for name, f in fast.items()]
        self.places.append((driver, "launchKernel", driver.launchKernel, launch))
        self.places.append((runtime, "memsetAsync", runtime.memsetAsync, memset))
        self.places.append((Workspace, "_allocated", Workspace._allocated, staticmethod(allocated)))
        self.places.append((scratch, "_carved", vars(scratch)["_carved"], carved))
        Counters.POLLS = 0  # the words that a kernel stores are there after a wait

    def computes(self) -> None:
        """Kernels run in the emulator."""
        for module, name, real, _ in self.places:
            setattr(module, name, staticmethod(real) if module is Workspace else real)
        PINNED.record()

    def counts(self) -> None:
        """Kernels do nothing."""
        for module, name, _, fast in self.places:
            setattr(module, name, fast)


def memset(*_: Any) -> None:
    """``memsetAsync``"""
    COUNTS["memsets"] += 1


CUT = Workspace.__dict__["_allocated"].__func__
"""How a workspace is cut, before the stand-in gives each piece pages of its own."""


def alloc(nbytes: int) -> Memory:
    """``cupy.cuda.alloc``"""
    COUNTS["memory"] += 1
    return MEMORY


def allocated(nbytes: tuple[int, ...]) -> Any:
    """The pieces of a workspace, cut as on a device."""
    return CUT(nbytes)


def carved(specs: tuple[Any, ...]) -> list[FastArray]:
    """New arrays; small ones, as here, in one allocation."""
    COUNTS["memory"] += 1
    return [FastArray(*spec) for spec in specs]
