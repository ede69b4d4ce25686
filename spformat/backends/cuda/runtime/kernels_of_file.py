"""Kernels of one ``.cu`` file that are launched once per call: conversions and masks, which keep no plan."""

from __future__ import annotations

import functools
from typing import Any

from ....arrays.library import Array
from . import jit
from .launch import Launch

WORDS = {1: "spformat::u8", 2: "spformat::u16", 4: "spformat::u32", 8: "spformat::u64"}
"""Bytes of a value -> C++ name of the unsigned word that its bits are moved in."""
INDEX = {4: "int", 8: "spformat::i64"}
"""Bytes of an index -> its C++ type."""


class KernelsOfFile:
    """The kernels of one ``.cu`` file; each is compiled when it is first launched on a kind of device."""

    def __init__(self, source: str, threads: int) -> None:
        self.source, self.threads = source, threads

    def queue(
        self, name: str, signature: tuple[Any, ...] | str, blocks: int, like: Array, *args: Any, smem: int = 0
    ) -> None:
        """Queue ``blocks`` blocks of kernel ``name`` on the current stream of the device of ``like``.

        signature: as for ``Launch``, one entry per argument. args: CuPy arrays stand for their addresses. smem: bytes
        of dynamic shared memory.
        """
        arch, device_id = _target(like.device.id)
        launch = _launch(self.source, name, tuple(signature), self.threads, smem, arch, device_id)
        launch((blocks, 1, 1), _stream(), *(_address(a) for a in args))


def value_word(a: Array) -> str:
    """C++ name of the word that holds one value of ``a``."""
    return WORDS[a.dtype.itemsize]


def index_type(a: Array) -> str:
    """C++ type of the indices in ``a``."""
    return INDEX[a.dtype.itemsize]


def starts_on(a: Array, boundary: int) -> bool:
    """Whether the first byte of ``a`` lies on a multiple of ``boundary`` bytes."""
    return int(a.data.ptr) % boundary == 0


def _address(a: Any) -> Any:
    return getattr(getattr(a, "data", None), "ptr", a)


def _stream() -> int:
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)


@functools.cache
def _target(device_id: int) -> tuple[str, int]:
    import cupy

    return jit.architecture(int(cupy.cuda.Device(device_id).compute_capability), ()), device_id


@functools.cache
def _launch(
    source: str, name: str, signature: tuple[Any, ...], threads: int, smem: int, arch: str, device_id: int
) -> Launch:
    return Launch(jit.load(source, name, arch, device_id, smem), signature, (), threads, smem)
