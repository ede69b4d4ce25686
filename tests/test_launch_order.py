"""Kernels that may begin before the kernel before them is over use nothing too early, whatever stands before them.

The operand is written late, behind a kernel that keeps the device busy; a product that did not wait would take the numbers
that were there before, or be overwritten by what comes after. In a stream, and in a CUDA graph, where the launch before is
an edge of its own kind.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from early_starts import LAUNCHER, says_that_it_waits
from test_kernels import attempts, problem

from spformat.backends.cuda import KERNELS
from spformat.backends.cuda.runtime import jit, launch
from spformat.backends.cuda.runtime.copy_lines import CopyLines
from spformat.backends.cuda.runtime.hold import hold
from spformat.formats.base import Format

pytestmark = pytest.mark.gpu

WAITING = {path.stem for path in jit.HERE.glob("*/*.py") if path != LAUNCHER and says_that_it_waits(path)}
WAIT = [k for k in KERNELS if k.name.removeprefix("cuda.") in WAITING]
DEVICE_TO_DEVICE = 3
"""cudaMemcpyDeviceToDevice."""
HOLD_US = 200
"""Longer than the launches after it need to be queued, or than the product takes."""


@pytest.fixture(scope="module")
def cp() -> Any:
    return pytest.importorskip("cupy")


@functools.cache
def product_of(kernel: Any, sm: int) -> tuple[Format, np.ndarray[Any, Any], int, Any]:
    """(matrix, the same dense, N, problem) of the largest matrix of test_kernels.py that the kernel takes."""
    cases = [
        (f, x, n, p) for f, x in attempts(kernel, sm) for n in (136, 16, 6144, 6200)
        if not kernel.unsupported(p := problem(f, n, f.dtype.name, ("col", "col"), sm))
    ]  # fmt: skip
    if not cases:
        pytest.skip(f"{kernel.name} runs on none of the matrices of test_kernels.py here (architecture {sm})")
    return max(cases, key=lambda case: case[1].size)


def same_stream(cp: Any, before: Callable[[], None], stream: Any, other: Any) -> None:
    """What is before the product, on its stream."""
    before()


def fork_and_join(cp: Any, before: Callable[[], None], stream: Any, other: Any) -> None:
    """What is before the product, on another stream, while a short kernel runs on this one."""
    forked, joined = cp.cuda.Event(), cp.cuda.Event()
    forked.record(stream)
    other.wait_event(forked)
    with other:
        before()
        joined.record(other)
    hold(1)
    stream.wait_event(joined)


@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize(
    ("order", "writer"), [(same_stream, "kernel"), (same_stream, "memcpy"), (fork_and_join, "kernel")]
)
@pytest.mark.parametrize("kernel", WAIT, ids=lambda k: k.name)
def test_a_product_takes_what_is_written_late(
    kernel: Any, order: Any, writer: str, captured: bool, cp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = launch.Launch.bind
    monkeypatch.setattr(launch.Launch, "bind", lambda *arguments: bind(*arguments).early())  # the first launch, too
    f, x, n, p = product_of(kernel, int(cp.cuda.Device().compute_capability))
    g, rng = f.to("cuda"), np.random.default_rng(2)
    plan = kernel.plan(g, p)
    values = [cp.asarray(rng.integers(-2, 3, (n, x.shape[1])).astype(f.dtype)) for _ in range(3)]
    source, B = cp.zeros_like(values[0]), cp.zeros_like(values[0]).T
    C, result = cp.empty((n, x.shape[0]), f.dtype).T, cp.zeros((n, x.shape[0]), f.dtype)
    memset, memcpy = cp.cuda.runtime.memsetAsync, cp.cuda.runtime.memcpyAsync
    stream, other = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)

    def copy(to: Any, since: Any) -> None:
        memcpy(to.data.ptr, since.data.ptr, to.nbytes, DEVICE_TO_DEVICE, cp.cuda.get_current_stream().ptr)

    lines = CopyLines(f.dtype.itemsize, p)

    def write() -> None:
        hold(HOLD_US)
        if writer == "memcpy":
            return copy(B, source)
        now, K = cp.cuda.get_current_stream().ptr, x.shape[1]
        return lines.bind(now, source.data.ptr, B.data.ptr, n, K, K, K, K)()  # lets the product begin at once

    def work() -> None:
        hold(1)
        order(cp, write, stream, other)
        plan(B, out=C)
        copy(result, C)
        memset(C.data.ptr, 0xFF, C.nbytes, stream.ptr)  # NaN
        memset(B.data.ptr, 0xFF, B.nbytes, stream.ptr)
        hold(1)

    with stream:
        work()  # compiles
        stream.synchronize()
        if captured:
            stream.begin_capture()
            work()
            work = stream.end_capture().launch
        for y in values:
            copy(source, y)
            memset(B.data.ptr, 0xFF, B.nbytes, stream.ptr)
            work()
            stream.synchronize()
            wanted = (x.astype(np.float64) @ y.get().astype(np.float64).T).astype(f.dtype)
            assert (wanted == result.get().T).all()


def test_every_waiting_kernel_is_tried() -> None:
    names = {k.name.removeprefix("cuda.") for k in WAIT}
    assert names == {name for name in WAITING if re.match("spmm_", name)}, "the others copy operands"
    formats = {name for k in WAIT for operation, name in k.takes if operation == "spmm"}
    assert formats >= {"two-four", "vector-nm", "bitmask", "bsr", "dbsr", "csr"}
    assert len(names) >= 10
