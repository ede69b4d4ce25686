"""Arrays on a device start where kernels load 16 bytes at a time, wherever they come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import CASES
from laws import integers
from stand_in_world import World
from test_kernels import problem

import spformat as sf
from spformat.arrays.library import on_boundary
from spformat.backends.cuda import KERNELS
from spformat.formats import by_name, registered
from spformat.preprocess import masks


def test_an_array_on_a_device_starts_on_a_boundary(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that does not start there is copied; dense ones, and arrays on the host, are used as they are."""
    room = np.zeros(64, np.float32)
    start = -room.ctypes.data % 16 // 4
    at, off = room[start : start + 8], room[start + 1 : start + 9]
    assert off.ctypes.data % 16
    assert on_boundary(off) is off
    there, away = at.view(world.cupy.ndarray), off.view(world.cupy.ndarray)
    assert on_boundary(there) is there
    entered: list[Any] = []
    with monkeypatch.context() as watched:
        watched.setattr(world.cupy.cuda.runtime, "getDevice", lambda: away.device.id + 1)
        watched.setattr(type(away.device), "__enter__", lambda scope: entered.append(scope))
        copied = on_boundary(away)
    assert len(entered) == 1, "copied to the device that is current, not to its own"
    assert copied.data.ptr % 16 == 0
    assert copied.data.ptr != away.data.ptr
    values = {"indptr": np.array([0, 8], np.int32), "indices": np.arange(8, dtype=np.int32)}
    rest = {k: v.view(world.cupy.ndarray) for k, v in values.items()}
    assert sf.CSR(shape=(1, 8), data=away, **rest).data is not away
    assert sf.CSR(shape=(1, 8), data=there, **rest).data is there
    assert sf.CSR(shape=(1, 8), data=off, **values).data is off
    assert sf.Dense(shape=(1, 8), data=away.reshape(1, 8)).data.data.ptr == away.data.ptr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("fmt", sorted(f.name for f in registered() if f.aligned))
def test_arrays_that_start_anywhere(fmt: str, dtype: str) -> None:
    """Slices of larger arrays, an item behind a boundary: checked, multiplied by every kernel, unpacked, converted."""
    cp = pytest.importorskip("cupy")
    params = {"bsr": {"blocksize": (16, 16)}, "dbsr": {"blocksize": (16, 16)}}.get(fmt, {})
    x = integers(CASES["even"](dtype))
    if dtype not in by_name(fmt).value_dtypes:
        pytest.skip(f"{fmt} holds no {dtype}")
    if fmt in ("two-four", "vector-nm"):
        a = (masks.prune_two_four(x) if fmt == "two-four" else masks.prune_vector_nm(x, 2, 4, 32)).to("cuda")
        x = a.to_dense().get()
    else:
        a = sf.convert(x, fmt, **params).to("cuda")

    def shifted(v: Any) -> Any:
        room = cp.zeros(v.size + 1, v.dtype)
        room[1:] = v.ravel()
        return room[1:].reshape(v.shape)

    moved = a.with_arrays(**{name: shifted(v) for name, v in a.arrays().items()})
    assert all(v.data.ptr % 16 == 0 for v in moved.arrays().values() if v.size)
    moved.validate()
    assert (moved.to_dense().get() == x).all()
    B = cp.asarray(np.random.default_rng(1).integers(-2, 3, (x.shape[1], 136)).astype(dtype))
    wanted = x.astype(np.float64) @ B.get().astype(np.float64)
    for kernel in KERNELS:
        p = problem(moved, 136, dtype, ("row", "row"), int(cp.cuda.Device().compute_capability))
        if fmt in kernel.formats and not kernel.unsupported(p):
            assert (sf.spmm(moved, B, backend=kernel.name).get() == wanted).all(), kernel.name
    dense = shifted(cp.asarray(x))
    assert dense.data.ptr % 16
    assert sf.convert(dense, fmt, **a.params()).to("cpu") == a.to("cpu")
