"""A driver without a GPU: it writes down what it is asked to launch, with the arguments as a kernel would get them."""

from __future__ import annotations

import ctypes
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_world import World

from spformat.backends import cuda
from spformat.backends.cuda.runtime import cublas_handle, epilogue, jit, launch, row_tiles, tensor_map
from spformat.backends.cuda.runtime.launch import Launch
from spformat.backends.cuda.vector_nm import vector_nm_convert

ATTRIBUTES = {
    "MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 227 << 10,
    "MaxSharedMemoryPerMultiprocessor": 228 << 10, "L2CacheSize": 50 << 20,
}  # fmt: skip
_BYTES = {"P": 8, "i": 4, "q": 8, "f": 4, "d": 8}
CACHES = (row_tiles.device_of.cache_clear, epilogue._launch.cache_clear, vector_nm_convert.KERNELS.launches.clear)
"""They clear what remembers compiled kernels and properties of the device."""


class Driver:
    """``launched``: (kernel, grid, block, shared memory, stream, bytes of every argument) of each launch, and
    ("gemm", stream, arguments) of each call of cuBLAS."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.launched = world, []
        self._names: dict[int, str] = {}
        self._kinds: dict[int, tuple[Any, ...]] = {}
        numbers = itertools.count(1)
        driver: Any = ModuleType("cupy_backends.cuda.api.driver")
        driver.launchKernel, driver.CUDADriverError = self._launch, type("CUDADriverError", (RuntimeError,), {})
        packages: list[Any] = [ModuleType(n) for n in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.api")]
        packages[-1].driver = driver
        for module in (*packages, driver):
            monkeypatch.setitem(sys.modules, module.__name__, module)

        def load(source: str, instance: str, *_: Any) -> Any:
            function = SimpleNamespace(ptr=next(numbers))
            self._names[function.ptr] = instance
            return function

        def construct(made: Launch, function: Any, signature: Any, *rest: Any, **options: Any) -> None:
            self._kinds[function.ptr] = tuple(signature)
            plain(made, function, signature, *rest, **options)

        plain, entered = Launch.__init__, world.cupy.cuda.Device

        def device(number: int) -> Any:
            found = entered(number)
            found.attributes = ATTRIBUTES
            return found

        address = launch._plain
        monkeypatch.setattr(launch, "_plain", lambda x: x.ctypes.data if isinstance(x, np.ndarray) else address(x))
        monkeypatch.setattr(Launch, "__init__", construct)
        monkeypatch.setattr(launch, "early_driver", lambda: driver)
        monkeypatch.setattr(jit, "load", load)
        monkeypatch.setattr(
            world.cupy, "zeros", lambda n, dtype="f8", order="C": world.array(*np.atleast_1d(n), dtype=dtype)
        )
        monkeypatch.setattr(world.cupy.cuda, "Device", device)
        stream = SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(
            world.cupy.cuda, "get_current_stream", lambda *_: SimpleNamespace(ptr=world.stream, **vars(stream))
        )
        monkeypatch.setattr(tensor_map, "_driver", lambda: (encode, replace))
        monkeypatch.setattr(tensor_map, "_forms", {})
        monkeypatch.setattr(cuda, "_missing", lambda: ())
        for name, module in list(sys.modules.items()):
            if name.startswith("spformat.") and hasattr(module, "max_clusters"):
                monkeypatch.setattr(module, "max_clusters", lambda *_: 66)
        self._streams: dict[int, int] = {}
        monkeypatch.setattr(cublas_handle, "HANDLES", cublas_handle.Handles())
        cublas = cublas_handle.Library(self._create, lambda *_: 0, self._set_stream, self._multiply)
        monkeypatch.setattr(cublas_handle, "library", lambda: cublas)

    def _create(self, out: Any) -> int:
        out._obj.value = 77 + len(self._streams)
        self._streams[out._obj.value] = 0
        return 0

    def _set_stream(self, handle: int, stream: int) -> int:
        self._streams[handle] = stream
        return 0

    def _multiply(self, handle: int, *arguments: Any) -> int:
        numbers = [int(x) for x in arguments]
        numbers[5] = numbers[12] = 0  # alpha and beta lie anywhere on the host
        self.launched.append(("gemm", self._streams[handle], numbers))
        return 0

    def _launch(self, function: int, *where: int) -> None:
        *where_, places, _ = where
        values = []
        for i, kind in enumerate(self._kinds[function]):
            place = ctypes.c_uint64.from_address(places + 8 * i).value
            size = _BYTES[kind] if isinstance(kind, str) else ctypes.sizeof(kind)
            values.append(ctypes.string_at(place, size))
        self.launched.append((self._names[function], tuple(where_), values))

    def taken(self) -> list[Any]:
        """What was launched since the last call."""
        taken, self.launched = self.launched, []
        return taken


def encode(place: int, kind: int, rank: int, pointer: int, extents: Any, strides: Any, box: Any, *rest: Any) -> int:
    """cuTensorMapEncodeTiled: a map is its address and the other arguments."""
    words = [pointer, kind, rank, *extents, *strides, *box]
    assert pointer % 16 == 0
    for i, word in enumerate([*words, *[0] * (16 - len(words))][:16]):
        ctypes.c_uint64.from_address(place + 8 * i).value = word
    return replace(place, pointer)


def replace(place: int, pointer: int) -> int:
    """cuTensorMapReplaceAddress."""
    assert place % 64 == 0
    ctypes.c_uint64.from_address(place).value = pointer
    return 1 if pointer % 16 else 0
