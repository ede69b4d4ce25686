"""Launches that may begin before the launch before them on the stream is over: cuLaunchKernelEx through ctypes.

Two kernels in a row cost about 3 us more than one: the second begins when the first has ended, and then sets up its
barriers, reads its tables and waits for its first loads. A kernel that waits itself (launch_order.cuh) sets itself up
meanwhile, and asks for its first weights, which depend on no launch.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .launch_config import EARLY, Attribute, Config


class EarlyDriver:
    """What a launch needs of CuPy's driver interface, for early launches. ``launch``: cuLaunchKernelEx."""

    def __init__(self, launch: Any, error: type[Exception]) -> None:
        self._launch, self.CUDADriverError = launch, error
        self._attribute = Attribute(id=EARLY, value=(1, 0, 0))
        self._config = functools.lru_cache(maxsize=4096)(self._config_of)

    def _config_of(self, *where: int) -> tuple[int, Config]:
        """A config and its address; grid, block, bytes of shared memory and stream are often the same."""
        triple = ctypes.c_uint * 3
        config = Config(
            triple(*where[:3]), triple(*where[3:6]), where[6], where[7], ctypes.addressof(self._attribute), 1
        )
        return ctypes.addressof(config), config

    def launchKernel(self, function: int, *where: int) -> None:  # noqa: N802  # CuPy's name
        """grid x, y, z, block x, y, z, shared memory, stream, addresses of the arguments, 0."""
        if status := self._launch(self._config(*where[:8])[0], function, where[8], None):
            raise self.CUDADriverError(status)


EARLY_SM = 90
"""The first architecture that has such launches."""


def early_driver() -> EarlyDriver | None:
    """None where the current device has no such launches, or the driver has none (before CUDA 12) or is not there."""
    import cupy

    return _driver() if int(cupy.cuda.Device().compute_capability) >= EARLY_SM else None


@functools.lru_cache(maxsize=1)
def _driver() -> EarlyDriver | None:
    from cupy_backends.cuda.api import driver

    try:
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    launch.argtypes, launch.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return EarlyDriver(launch, driver.CUDADriverError)
