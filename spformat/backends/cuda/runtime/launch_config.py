"""The structures of the driver's cuLaunchKernelEx and of its occupancy calls, for ctypes."""

from __future__ import annotations

import ctypes

CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: ``value`` is the extents of a cluster, in blocks."""
EARLY = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the first of ``value`` is 1."""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes, of which these attributes use up to three ints."""

    _fields_ = (
        ("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 3), ("rest", ctypes.c_char * 52),
    )  # fmt: skip


class Config(ctypes.Structure):
    """CUlaunchConfig. ``attributes``: the address of the first of ``number`` attributes."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("number", ctypes.c_uint),
    )  # fmt: skip
