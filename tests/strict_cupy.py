"""A CuPy without a GPU whose arrays are no numpy arrays: code that mixes the two, or calls what CuPy lacks, fails here.

``stand_in_cupy`` has numpy's own arrays, for tests of copies; this one is for converters. ``emulator.stand_in`` adds launches.
"""

from __future__ import annotations

from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

FUNCTIONS = frozenset(
    "abs arange argsort bincount concatenate cumsum empty empty_like flatnonzero full left_shift lexsort minimum nonzero "
    "ones packbits repeat searchsorted stack unique where zeros".split()
)
"""The functions that a converter may call: those that numpy and CuPy share."""


class Array(NDArrayOperatorsMixin):
    """An array "on the device"."""

    def __init__(self, host: Any, dtype: Any = None, memory: Any = None, strides: Any = None) -> None:
        """``host``: the array; with ``memory``, an object with a ``buffer``, the shape of one on it."""
        self.host = host if memory is None else np.ndarray(host, dtype, memory.buffer, 0, strides)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion to a numpy array is not allowed")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return wrapped(getattr(ufunc, method)(*map(plain, inputs), **{k: plain(v) for k, v in options.items()}))

    def __getitem__(self, at: Any) -> Any:
        return wrapped(self.host[plain(at)])

    def __setitem__(self, at: Any, value: Any) -> None:
        self.host[plain(at)] = plain(value)

    def __int__(self) -> int:
        return int(self.host)

    def __bool__(self) -> bool:
        return bool(self.host)

    def __float__(self) -> float:
        return float(self.host)

    def __index__(self) -> int:
        return self.host.__index__()

    def __repr__(self) -> str:
        return repr(self.host)

    def __str__(self) -> str:
        return str(self.host)

    def __len__(self) -> int:
        return len(self.host)

    def __iter__(self) -> Any:
        return map(wrapped, self.host)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.host, name)
        if not callable(found) or isinstance(found, np.dtype):
            return wrapped(found)
        return lambda *args, **options: wrapped(found(*map(plain, args), **{k: plain(v) for k, v in options.items()}))

    @property
    def data(self) -> Any:
        return Memory(self.host)

    @property
    def device(self) -> Any:
        return Device(0)

    def get(self) -> np.ndarray[Any, Any]:
        return self.host.copy()


class Memory:
    """Where an array lies: its ``data``, and the ``data.mem`` that other arrays can be made on."""

    device_id = 0

    def __init__(self, host: Any) -> None:
        self.ptr, self._host = host.ctypes.data, host

    @property
    def mem(self) -> Memory:
        return self

    @property
    def buffer(self) -> Any:
        """The bytes of a contiguous array."""
        return self._host.reshape(-1).view(np.uint8)


class Device:
    """A device, or anything else that is entered. Its numbers are those of an H200."""

    compute_capability = "90"
    attributes = MappingProxyType(
        {
            "MultiProcessorCount": 132,
            "MaxSharedMemoryPerBlockOptin": 232448,
            "MaxSharedMemoryPerMultiprocessor": 228 << 10,
            "L2CacheSize": 60 << 20,
        }
    )
    mem_info = (1 << 36, 1 << 37)

    def __init__(self, number: int | None = 0) -> None:
        self.id = number or 0

    def __int__(self) -> int:
        return self.id

    def synchronize(self) -> None:
        pass

    def use(self) -> None:
        pass

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def module() -> ModuleType:
    """To stand in ``sys.modules["cupy"]``."""
    cupy: Any = ModuleType("cupy")
    cupy.__version__, cupy.ndarray = "strict", Array
    cupy.asarray = lambda x, dtype=None: x if isinstance(x, Array) else Array(np.array(x, dtype))
    cupy.ascontiguousarray = lambda x: Array(np.ascontiguousarray(plain(x)))
    for name in FUNCTIONS:
        setattr(cupy, name, function(getattr(np, name)))
    cupy.add = SimpleNamespace(reduceat=function(np.add.reduceat))
    error = SimpleNamespace(OutOfMemoryError=MemoryError)
    cupy.cuda = SimpleNamespace(
        Device=Device, memory=error, runtime=SimpleNamespace(getDevice=lambda: 0, CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}))
    )  # fmt: skip
    return cupy  # type: ignore[no-any-return]


def function(function: Any) -> Any:
    return lambda *args, **options: wrapped(function(*map(plain, args), **{k: plain(v) for k, v in options.items()}))


def plain(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")  # CuPy's own words
    if isinstance(x, tuple | list):
        return type(x)(map(plain, x))
    return x.host if isinstance(x, Array) else x


def wrapped(x: Any) -> Any:
    if isinstance(x, tuple) and x and isinstance(x[0], np.ndarray):
        return tuple(map(wrapped, x))
    return Array(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x
