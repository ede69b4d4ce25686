"""A CuPy without a GPU whose arrays are no numpy arrays: code that mixes the two, or calls what CuPy lacks, fails here.

``stand_in_cupy`` has numpy's own arrays, for tests of copies; this one is for converters.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
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

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        self.host = host

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion to a numpy array is not allowed")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return _wrapped(getattr(ufunc, method)(*map(_plain, inputs), **{k: _plain(v) for k, v in options.items()}))

    def __getitem__(self, at: Any) -> Any:
        return _wrapped(self.host[_plain(at)])

    def __setitem__(self, at: Any, value: Any) -> None:
        self.host[_plain(at)] = _plain(value)

    def __int__(self) -> int:
        return int(self.host)

    def __bool__(self) -> bool:
        return bool(self.host)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.host, name)
        if not callable(found) or isinstance(found, np.dtype):
            return _wrapped(found)
        return lambda *args, **options: _wrapped(
            found(*map(_plain, args), **{k: _plain(v) for k, v in options.items()})
        )

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=0)

    @property
    def device(self) -> Any:
        return Device(0)

    def get(self) -> np.ndarray[Any, Any]:
        return self.host.copy()


class Device:
    """A device, or anything else that is entered."""

    def __init__(self, number: int) -> None:
        self.id = number

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def module() -> ModuleType:
    """To stand in ``sys.modules["cupy"]``."""
    cupy: Any = ModuleType("cupy")
    cupy.__version__, cupy.ndarray = "strict", Array
    cupy.asarray = lambda x, dtype=None: x if isinstance(x, Array) else Array(np.array(x, dtype))
    cupy.ascontiguousarray = lambda x: Array(np.ascontiguousarray(_plain(x)))
    for name in FUNCTIONS:
        setattr(cupy, name, _function(getattr(np, name)))
    cupy.add = SimpleNamespace(reduceat=_function(np.add.reduceat))
    error = SimpleNamespace(OutOfMemoryError=MemoryError)
    cupy.cuda = SimpleNamespace(
        Device=Device, memory=error, runtime=SimpleNamespace(CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}))
    )  # fmt: skip
    return cupy  # type: ignore[no-any-return]


def _function(function: Any) -> Any:
    return lambda *args, **options: _wrapped(function(*map(_plain, args), **{k: _plain(v) for k, v in options.items()}))


def _plain(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")  # CuPy's own words
    if isinstance(x, tuple | list):
        return type(x)(map(_plain, x))
    return x.host if isinstance(x, Array) else x


def _wrapped(x: Any) -> Any:
    if isinstance(x, tuple) and x and isinstance(x[0], np.ndarray):
        return tuple(map(_wrapped, x))
    return Array(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x
