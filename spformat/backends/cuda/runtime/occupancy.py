"""How many thread block clusters of a kernel a device runs at once: cuOccupancyMaxActiveClusters through ctypes.

A persistent kernel must not start more: the rest would run as a second wave. The number is less than
multiprocessors / cluster if the size of a group of multiprocessors is not a multiple of the cluster.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ....errors import DeviceError
from .launch_config import CLUSTER_DIMENSION, Attribute, Config


@functools.lru_cache(maxsize=1)
def _query() -> Any:
    entry = ctypes.PyDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
    entry.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_void_p, ctypes.POINTER(Config)]
    entry.restype = ctypes.c_int
    return entry


def max_clusters(function: Any, cluster: int, threads: int, smem: int) -> int:
    """Clusters of ``cluster`` blocks that run at once on the current device. DeviceError if the driver refuses."""
    attribute = Attribute(id=CLUSTER_DIMENSION, value=(cluster, 1, 1))
    config = Config((cluster, 1, 1), (threads, 1, 1), smem, None, ctypes.addressof(attribute), 1)
    clusters = ctypes.c_int()
    kernel = getattr(function, "kernel", function)
    status = _query()(ctypes.byref(clusters), kernel.ptr, ctypes.byref(config))
    if status or clusters.value < 1:
        raise DeviceError(
            f"cuOccupancyMaxActiveClusters: expected room for clusters of {cluster} blocks of {threads} threads and "
            f"{smem} B, got CUresult {status}, {clusters.value} clusters"
        )
    return clusters.value
