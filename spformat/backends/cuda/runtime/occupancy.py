"""How many thread block clusters of a kernel a device runs at once: cuOccupancyMaxActiveClusters through ctypes.

A persistent kernel must not start more: the rest would run as a second wave. The number is less than
multiprocessors / cluster if the size of a group of multiprocessors is not a multiple of the cluster.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ....errors import DeviceError

_CLUSTER_DIMENSION = 4


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a 64-byte union, here the three cluster dimensions."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("size", ctypes.c_uint * 3), ("rest", ctypes.c_char * 52)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


@functools.lru_cache(maxsize=1)
def _query() -> Any:
    entry = ctypes.PyDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
    entry.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_void_p, ctypes.POINTER(_Config)]
    entry.restype = ctypes.c_int
    return entry


def max_clusters(function: Any, cluster: int, threads: int, smem: int) -> int:
    """Clusters of ``cluster`` blocks that run at once on the current device. DeviceError if the driver refuses."""
    attribute = _Attribute(_CLUSTER_DIMENSION, 0, (cluster, 1, 1))
    config = _Config((cluster, 1, 1), (threads, 1, 1), smem, None, ctypes.addressof(attribute), 1)
    clusters = ctypes.c_int()
    kernel = getattr(function, "kernel", function)
    status = _query()(ctypes.byref(clusters), kernel.ptr, ctypes.byref(config))
    if status or clusters.value < 1:
        raise DeviceError(
            f"cuOccupancyMaxActiveClusters: expected room for clusters of {cluster} blocks of {threads} threads and "
            f"{smem} B, got CUresult {status}, {clusters.value} clusters"
        )
    return clusters.value
