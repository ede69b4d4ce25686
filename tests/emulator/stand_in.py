"""A CuPy on the CPU whose launches run in the emulator: launchers and edges of the project run as they are.

``install()`` puts it in the place of CuPy for the rest of the process, which should be one of its own. Arrays are those of
``strict_cupy``: they do not mix with numpy's. New ones end before a page that cannot be touched, and are filled with 0xFF.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import strict_cupy
from strict_cupy import Array, Device, function, plain

from .build import EmulatorError
from .kernel import SHARED, STATIC_SHARED, Kernel
from .memory import Room
from .streams import Stream, capturing, launch_graph, queue

LAUNCHES: Counter[str] = Counter()
"""Launches of this process, by instance."""
OPTIONS: dict[str, Any] = {}
"""What every launch gets beside its arguments: shuffle_blocks, shuffle_threads, seed, timeout."""


class Function:
    """A compiled kernel as CuPy shows it."""

    of_handle: dict[int, Function] = {}  # noqa: RUF012

    def __init__(self, kernel: Kernel) -> None:
        self.emulated = kernel
        self.ptr = 4096 + len(self.of_handle)
        self.of_handle[self.ptr] = self
        self.shared_size_bytes, self.max_dynamic_shared_size_bytes = kernel.static_shared, 0
        self.num_regs = self.local_size_bytes = 0
        self.max_threads_per_block = 1024


class RawModule:
    """Source text; its kernels are compiled when they are asked for."""

    def __init__(self, code: str, options: tuple[str, ...] = (), name_expressions: Any = ()) -> None:
        self.code, self.folders = code, [Path(o[2:]) for o in options if o.startswith("-I")]
        self.sm = next((int(o[9:].rstrip("a")) for o in options if o.startswith("-arch=sm_")), 90)

    def get_function(self, instance: str) -> Function:
        from spformat.backends.cuda.runtime import jit

        # The name of the file and the numbers of its lines belong into messages.
        text = self.code.partition("\n")[2] if self.code.startswith("// headers ") else self.code
        name = next((p.name for p in jit.HERE.glob("*/*.cu") if p.read_text() == text), "kernel.cu")
        return Function(Kernel(name, instance, self.folders, text, self.sm))


class RawKernel:
    """One kernel with C linkage of a source text. Its arguments are arrays, and numbers of numpy's types."""

    def __init__(self, code: str, name: str) -> None:
        self.emulated = RawModule(code).get_function(name).emulated

    def __call__(self, grid: Any, block: Any, arguments: tuple[Any, ...], shared_mem: int = 0) -> None:
        values = [np.uint64(x.data.ptr) if isinstance(x, Array) else x for x in arguments]
        slots = [ctypes.create_string_buffer(x.tobytes(), 16) for x in values]
        pointers = (ctypes.c_void_p * len(slots))(*map(ctypes.addressof, slots))
        extents = [(*extent, 1, 1)[:3] for extent in (grid, block)]
        self.emulated.launch(*extents, shared_mem, ctypes.addressof(pointers), **OPTIONS)


def launch_kernel(
    handle: int,
    gx: int,
    gy: int,
    gz: int,
    bx: int,
    by: int,
    bz: int,
    smem: int,
    stream: int,
    arguments: int,
    extra: int,
) -> None:
    """``cuLaunchKernel``."""
    f = Function.of_handle[handle]
    kernel, most = f.emulated, f.max_dynamic_shared_size_bytes
    LAUNCHES[kernel.instance] += 1
    if smem > max(STATIC_SHARED - kernel.static_shared, most):
        raise EmulatorError(
            f"{kernel.instance}: {smem} bytes of dynamic shared memory, but the limit of the function is {most}"
        )
    if not capturing(stream):
        return kernel.launch((gx, gy, gz), (bx, by, bz), smem, arguments, **OPTIONS)
    slots = kernel.copied_arguments(arguments)
    queue(stream, lambda: kernel.launch((gx, gy, gz), (bx, by, bz), smem, ctypes.addressof(slots[0]), **OPTIONS))


def guarded(shape: Any, dtype: Any, fill: int) -> Array:
    """A new array before a page that cannot be touched, every byte ``fill``."""
    kind = np.dtype(dtype)
    if kind.name.startswith("float8"):
        raise ValueError(f"Unsupported dtype {kind}")  # CuPy's own words
    extents = tuple(int(n) for n in shape) if isinstance(shape, tuple | list) else (int(shape),)
    if any(n < 0 for n in extents):
        raise ValueError("negative dimensions are not allowed")
    size = int(np.prod(extents, dtype=object)) * kind.itemsize
    if not size:
        return Array(np.empty(extents, kind))
    room = Room(size, fill=fill)
    block = (ctypes.c_ubyte * size).from_address(room.start)
    block.room = room  # lives as long as an array on it
    return Array(np.frombuffer(block, np.uint8).view(kind).reshape(extents))


def ordered(shape: Any, dtype: Any, fill: int, order: str) -> Array:
    """``guarded``, with the first dimension innermost for the order "F"."""
    extents = shape if isinstance(shape, tuple | list) else (shape,)
    out = guarded(extents[::-1] if order == "F" else extents, dtype, fill)
    return Array(out.host.T) if order == "F" else out


def copied(x: np.ndarray[Any, Any], order: str = "C") -> Array:
    """A copy on the device."""
    out = ordered(x.shape, x.dtype, 0xFF, order)
    out.host[...] = x
    return out


def _asarray(x: Any, dtype: Any = None, order: Any = None, **_: Any) -> Array:
    if isinstance(x, Array):
        return x if dtype is None or x.dtype == dtype else copied(x.host.astype(dtype))
    return copied(np.asarray(x, dtype), order or "C")


def _pinned(size: int) -> Any:
    """A page-locked buffer: of bytes, with its address."""
    kind = type("Pinned", (ctypes.Array,), {
        "_type_": ctypes.c_ubyte, "_length_": size, "ptr": property(lambda s: ctypes.addressof(s)),
    })  # fmt: skip
    return kind()


class UnownedMemory:
    """Memory that somebody else allocated."""

    def __init__(self, at: int, size: int, owner: Any, device_id: int = 0) -> None:
        self.buffer = (ctypes.c_ubyte * size).from_address(at)


class MemoryPointer:
    """The bytes of a memory from ``offset`` on."""

    def __init__(self, memory: Any, offset: int) -> None:
        self.buffer = memoryview(memory.buffer).cast("B")[offset:]


def _pieces(nbytes: tuple[int, ...]) -> tuple[Any, list[int]]:
    """What ``Workspace`` takes, with a page behind each piece that cannot be touched."""
    pieces = [guarded(n, np.uint8, 0xFF) for n in nbytes]
    return pieces, [p.data.ptr for p in pieces]


def _module(name: str, **entries: Any) -> ModuleType:
    m = ModuleType(name)
    m.__dict__.update(entries)
    sys.modules[name] = m
    return m


def _errors(*names: str) -> dict[str, Any]:
    return {name: type(name, (RuntimeError,), {"status": 1}) for name in names}


def install(sm: int = 90) -> None:
    """From now on, in this process, ``import cupy`` gives the stand-in, and the CUDA backend is available, on an ``sm``."""
    if "cupy" in sys.modules:
        raise RuntimeError("cupy has been imported already: the emulator needs a process of its own")
    shared = SHARED.get(sm, SHARED[90])
    Device.compute_capability = str(sm)
    Device.attributes = MappingProxyType(Device.attributes | {"MaxSharedMemoryPerBlockOptin": shared})
    properties = {
        "name": b"emulator", "multiProcessorCount": 132, "sharedMemPerBlockOptin": shared, "major": sm // 10, "minor": sm % 10,
        "totalGlobalMem": 1 << 37,
    }  # fmt: skip
    runtime = _module(
        "cupy.cuda.runtime", **_errors("CUDARuntimeError"),
        getDevice=lambda: 0, getDeviceCount=lambda: 1, setDevice=lambda _: None, deviceSynchronize=lambda *_: None,
        getDeviceProperties=lambda _: properties, runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13000,
        streamIsCapturing=capturing, streamCaptureModeGlobal=0, streamCaptureModeRelaxed=2, graphLaunch=launch_graph,
        memsetAsync=lambda to, value, n, stream: queue(stream, lambda: ctypes.memset(to, value, n)),
        memcpyAsync=lambda to, since, n, kind, stream: queue(stream, lambda: ctypes.memmove(to, since, n)),
    )  # fmt: skip
    cuda = _module(
        "cupy.cuda", runtime=runtime, Device=Device, Stream=Stream, Event=Stream,
        get_current_stream=lambda *_: Stream.current.entered[-1],
        memory=_module("cupy.cuda.memory", OutOfMemoryError=MemoryError),
        compiler=_module("cupy.cuda.compiler", **_errors("CompileException")),
        alloc_pinned_memory=_pinned, UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer, get_elapsed_time=lambda since, until: 1.0,
    )  # fmt: skip
    driver = _module(
        "cupy_backends.cuda.api.driver",
        launchKernel=launch_kernel,
        ctxGetCurrent=lambda: 1,
        **_errors("CUDADriverError"),
    )
    api = _module("cupy_backends.cuda.api", driver=driver)
    _module("cupy_backends", cuda=_module("cupy_backends.cuda", api=api))
    cupy: Any = strict_cupy.module()
    cupy.__version__, cupy.__path__, cupy.cuda = "emulated", [], cuda
    cupy.RawModule, cupy.RawKernel = RawModule, RawKernel
    cupy.empty = lambda shape, dtype=float, order="C": ordered(shape, dtype, 0xFF, order)
    cupy.zeros = lambda shape, dtype=float, order="C": ordered(shape, dtype, 0, order)
    cupy.empty_like = lambda a, dtype=None: guarded(a.shape, dtype or a.dtype, 0xFF)
    cupy.zeros_like = lambda a, dtype=None: guarded(a.shape, dtype or a.dtype, 0)
    cupy.asarray = cupy.array = _asarray
    cupy.ascontiguousarray = lambda x, dtype=None: (
        x if isinstance(x, Array) and x.flags.c_contiguous else copied(plain(x))
    )
    cupy.asfortranarray = lambda x: copied(x.host, "F")
    cupy.asnumpy = lambda x: x.get()
    cupy.__getattr__ = _of_numpy
    sys.modules["cupy"] = cupy

    from spformat.backends.cuda.runtime import launch, scratch

    from . import cublas, tensor_maps

    cublas.install()
    tensor_maps.install()
    vars(launch)["early_driver"] = lambda: None  # launches run one after another
    vars(scratch)["_exchange_mode"] = lambda: lambda _: 0  # a function of the driver's library
    scratch.Workspace._allocated = staticmethod(_pieces)  # type: ignore[method-assign]
    vars(scratch)["_carved"] = lambda specs: [cupy.empty(*spec) for spec in specs]  # a page behind each


def _of_numpy(name: str) -> Any:
    """What tests call beside the functions of ``strict_cupy``."""
    value = getattr(np, name)
    return function(value) if callable(value) and not isinstance(value, type) else value
