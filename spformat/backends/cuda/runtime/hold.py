"""Keep a stream busy while the host gets ahead of the device, for measurements.  Kernel: hold.cu."""

from __future__ import annotations

import functools

from ....arrays.library import import_cupy
from . import jit
from .launch import Launch


def instances() -> tuple[str, ...]:
    """C++ names for the compile tests."""
    return ("hold",)


def hold(us: float) -> None:
    """Block the current stream for ``us`` microseconds: work queued after this call starts only then."""
    cupy = import_cupy()
    _launch(cupy.cuda.runtime.getDevice())((1, 1, 1), cupy.cuda.get_current_stream().ptr, int(1e3 * us))


@functools.cache
def _launch(device_id: int) -> Launch:
    device = import_cupy().cuda.Device(device_id)
    function = jit.load("runtime/hold.cu", "hold", jit.architecture(int(device.compute_capability), ()), device_id)
    return Launch(function, "q", (), 1)
