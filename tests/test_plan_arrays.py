"""Arrays that a plan derives from A are complete when the plan is returned, for calls on any stream. No GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_in_world import World

import spformat as sf
from spformat.backends.cuda import KERNELS
from spformat.backends.cuda.runtime import jit, tensor_map
from spformat.backends.cuda.runtime.launch import Launch
from spformat.products.problem import Operand, Problem

ATTRIBUTES = {
    "MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 227 << 10,
    "MaxSharedMemoryPerMultiprocessor": 228 << 10, "L2CacheSize": 50 << 20,
}  # fmt: skip
MATRICES: dict[str, dict[str, Any]] = {
    "csr": {}, "ell-buckets": {"max_width": 8}, "bsr": {"blocksize": (64, 64)}, "sr-bcrs": {}, "bitmask": {},
    "two-four": {"meta_order": "logical"}, "vector-nm": {"n": 2, "m": 4, "vector_length": 128},
    "sum": {"rules": ("bsr:blocksize=64x64,density>=0.4", "csr")},
}  # fmt: skip
READ_AS_THEY_ARE = {
    "cuda.spmm_bsr", "cuda.spmm_bsr_tokens", "cuda.spmm_csr_panel", "cuda.spmm_vector_nm_tokens", "cuda.expand_then_dense",
}  # fmt: skip
END_IN_A_COPY = {"cuda.spmm_csr", "cuda.spmm_csr_vector", "cuda.spmm_ell_buckets"}
"""A copy to the host waits for all work before it."""
CHECKED = [k for k in KERNELS if k.name not in READ_AS_THEY_ARE | END_IN_A_COPY]


@pytest.mark.parametrize("kernel", CHECKED, ids=lambda k: str(k.name))
def test_a_plan_waits_for_the_arrays_it_has_made(kernel: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    stream = SimpleNamespace(ptr=7, synchronize=lambda: events.append("wait"))
    entered = world.cupy.cuda.Device
    real = dict(vars(world.cupy))

    def device(number: int) -> Any:
        found = entered(number)
        found.attributes = ATTRIBUTES
        return found

    def asked(name: str) -> Any:
        """A caller that looks up a function of the library is about to queue work."""
        events.append(name)
        return getattr(np, name)

    monkeypatch.setattr(world.cupy.cuda, "get_current_stream", lambda *_: stream)
    monkeypatch.setattr(world.cupy.cuda.runtime, "deviceSynchronize", lambda: events.append("wait"), raising=False)
    monkeypatch.setattr(world.cupy.cuda, "Device", device)
    monkeypatch.setattr(world.cupy, "empty", lambda shape, dtype: np.zeros(shape, dtype).view(real["ndarray"]))
    monkeypatch.setattr(world.cupy, "__getattr__", asked)
    monkeypatch.setattr(jit, "load", lambda *_: SimpleNamespace(ptr=1))
    monkeypatch.setattr(Launch, "__init__", lambda self, *_, **__: None)
    monkeypatch.setattr(Launch, "__call__", lambda self, *_: events.append("launch"))
    monkeypatch.setattr(tensor_map, "tiled", lambda *_: tensor_map.UNMAPPED)
    module = sys.modules[type(kernel).__module__]
    if hasattr(module, "max_clusters"):
        monkeypatch.setattr(module, "max_clusters", lambda *_: 66)

    fmt = next(f for f in MATRICES if f in kernel.formats)
    x = np.arange(1, 256 * 256 + 1, dtype=np.float32).reshape(256, 256) % 7 + 1
    x[:, 2::4] = x[:, 3::4] = 0
    a: Any = None
    for dtype in ("bfloat16", "float32"):
        a = sf.by_name(fmt).from_dense(x.astype(sf.arrays.dtypes.value_type(dtype).numpy), **MATRICES[fmt])
        a.ensure_valid()
        p = Problem.product(
            fmt, tuple(a.params().items()), 256, 256, 64, a.stored, dtype, dtype, dtype, device="cuda", sm=90,
            parts=Operand.of(a, "cuda").parts,
        )  # fmt: skip
        if not [r for r in kernel.unsupported(p) if "dtype" in r]:
            break
    for part in (a, *getattr(a, "parts", ())):
        for name, array in part.arrays().items():
            object.__setattr__(part, name, array.view(real["ndarray"]))
    events.clear()
    made = kernel.plan(a, p.changed(device_id=0))
    assert made.kernel == kernel.name
    assert events
    assert events[-1] == "wait", events
