"""How a kernel is loaded, tested without a GPU: shared memory beyond 48 KB, a full folder of compiled kernels."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_world import World

from spformat.backends.cuda.runtime import jit


class Function:
    """``declared`` bytes of shared memory in the kernel; without the attribute the driver allows a block 48 KB in all."""

    def __init__(self, declared: int) -> None:
        self.shared_size_bytes = declared
        self.asked = 0

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return max(self.asked, 48 * 1024 - self.shared_size_bytes)

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes: int) -> None:
        self.asked = nbytes

    def launches(self, nbytes: int) -> bool:
        return nbytes <= self.max_dynamic_shared_size_bytes


@pytest.fixture
def modules(world: World, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a RawModule does, one after the other: a function that it has, or what it raises."""
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY")  # and whatever a test leaves there
    found: list[Any] = []

    def get_function(name: str) -> Any:
        first = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(first, Exception):
            raise first
        return first

    world.cupy.RawModule = lambda **_: SimpleNamespace(get_function=get_function)
    world.cupy.cuda.compiler = SimpleNamespace(CompileException=type("CompileException", (Exception,), {}))
    return found


@pytest.mark.parametrize("declared", [0, 4096, 8200])
def test_what_a_kernel_declares_counts_among_its_48_kilobytes(modules: list[Any], declared: int) -> None:
    for sizes in (
        (0,),
        (40 << 10,),
        (45 << 10,),
        (46 << 10, 45 << 10),
        (48 << 10,),
        (50 << 10, 49 << 10),
        (200 << 10,),
    ):
        modules[:] = [Function(declared)]
        for smem in sizes:
            function = jit.load.__wrapped__("runtime/hold.cu", "hold", "sm_90", 0, smem)
        assert all(function.launches(smem) for smem in sizes)


def test_a_full_folder_of_compiled_kernels_stops_nobody(modules: list[Any]) -> None:
    modules[:] = [OSError(errno.ENOSPC, "No space left on device"), Function(0)]
    assert isinstance(jit.load.__wrapped__("runtime/hold.cu", "hold", "sm_90", 0, 0), Function)
    assert os.environ.pop("CUPY_CACHE_IN_MEMORY") == "1"
    modules[:] = [OSError(errno.ENOENT, "no such library")]
    with pytest.raises(OSError, match="no such library"):
        jit.load.__wrapped__("runtime/hold.cu", "hold", "sm_90", 0, 0)
