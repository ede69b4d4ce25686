"""Kernels that are launched once per call: conversions and masks, which keep no plan."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from sys import modules
from typing import Any

from ....arrays.library import Array
from . import jit
from .expansion import Target
from .launch import Launch


class Kernels:
    """The kernels of one ``.cu`` file; each is compiled when it is first launched on a device."""

    __slots__ = ("launches", "source", "threads")

    def __init__(self, source: str, threads: int) -> None:
        """threads: those of a block."""
        self.source, self.threads = source, threads
        self.launches: dict[tuple[str, int, int], Launch] = {}
        """(C++ name, device, bytes of dynamic shared memory) -> the launch, without arguments of its own."""

    def queue(self, name: str, signature: Sequence[Any], blocks: int, *args: Any, smem: int = 0) -> None:
        """Queue ``blocks`` blocks of kernel ``name`` on the current stream of the current device.

        signature: as for ``Launch``, one entry per argument, always the same for a name. args: CuPy arrays stand for
        their addresses, None for a null pointer. smem: bytes of dynamic shared memory.
        """
        cupy = modules["cupy"]  # an import statement takes longer
        cuda, kind = cupy.cuda, cupy.ndarray
        device = cuda.runtime.getDevice()
        launch = self.launches.get((name, device, smem)) or self.launch(name, signature, _target(device), smem)
        # Most are ints or arrays; to find that out here saves a call for each.
        plain = [a if type(a) is int else a.data.ptr if type(a) is kind else _plain(a) for a in args]
        launch.now(blocks, cuda.get_current_stream().ptr, plain)

    def launch(self, name: str, signature: Sequence[Any], target: Target, smem: int = 0) -> Launch:
        """The launch that ``queue`` uses. It serves all matrices: to build another one costs as much as a kernel."""
        key = name, target.device_id, smem
        launch = self.launches.get(key)
        if launch is None:
            function = jit.load(self.source, name, *target, smem)
            launch = self.launches[key] = Launch(function, signature, (), self.threads, smem)
        return launch


def starts_on(a: Array, boundary: int) -> bool:
    """Whether the first byte of ``a`` lies on a multiple of ``boundary`` bytes."""
    return int(a.data.ptr) % boundary == 0


def _plain(a: Any) -> Any:
    """An argument as ``Launch`` takes it."""
    if isinstance(a, int):
        return a
    if a is None:
        return 0
    return bytes(a) if isinstance(a, (bytes, ctypes.Structure)) else a.data.ptr


@functools.cache
def _target(device_id: int) -> Target:
    import cupy

    return Target(jit.architecture(int(cupy.cuda.Device(device_id).compute_capability), ()), device_id)
