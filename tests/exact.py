"""Products of one tile of a kernel on Hopper, on a GPU or the emulated one, and what they must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_kernels import Guarded, on_device, problem

from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime.kernel import CudaKernel
from spformat.formats.base import Format

Array = np.ndarray[Any, Any]


def hopper() -> Any:
    """CuPy, if its device is one of sm_90; the test is skipped elsewhere."""
    cp = pytest.importorskip("cupy")
    if int(cp.cuda.Device().compute_capability) != 90:
        pytest.skip("needs sm_90a")
    return cp


def product(
    kernel: CudaKernel, tile: Any, a: Format, B: Array, out: str, layouts: tuple[str, str], pad: int, runs: int = 2
) -> Array:
    """C of a host matrix ``a`` and B: the same bits in every run, NaN in C before, and nothing written around it.

    pad: elements between the lines of B and of C.
    """
    cp = hopper()
    p = problem(a, B.shape[1], out, layouts, 90)
    assert not kernel.unsupported(p)
    plan, there = kernel.plan_with(a.to("cuda"), p, tile), on_device(cp, B, layouts[0], pad)
    results = []
    for _ in range(runs):
        guarded = Guarded(cp, (a.shape[0], B.shape[1]), VALUE_TYPES[out].numpy, layouts[1], pad)
        plan(there, out=guarded.out)
        results.append(guarded.out.get())
        assert guarded.intact(), "wrote outside C"
        assert results[0].tobytes() == results[-1].tobytes()
    return results[0]


def assert_exact(got: Array, x: Array, B: Array) -> None:
    """``got`` is x @ B of small integers, rounded once."""
    wanted = (x.astype(np.float64) @ B.astype(np.float64)).astype(got.dtype)
    assert (got.astype(np.float64) == wanted.astype(np.float64)).all(), f"{(got != wanted).sum()} of {got.size} wrong"


def infinite(rng: np.random.Generator, x: Array, columns: int) -> tuple[Array, Array]:
    """B [K, columns] with infinities and NaN in some of 131 or more rows, and C as over the nonzeros of x alone."""
    B = rng.integers(-3, 4, (x.shape[1], columns)).astype(x.dtype)
    B[5, 3:40], B[70, 7], B[71, 8], B[130, 50] = np.inf, -np.inf, np.nan, np.inf
    with np.errstate(invalid="ignore"):
        every = x.astype(np.float32)[:, :, None] * B.astype(np.float32)[None]
        wanted = np.where((x != 0)[:, :, None], every, 0).sum(axis=1).astype(x.dtype)
    assert 0 < np.isfinite(wanted.astype(np.float32)).sum() < wanted.size
    return B, wanted


def equal(got: Array, wanted: Array) -> bool:
    """The same values; NaN equals NaN."""
    return np.array_equal(got.astype(np.float32), wanted.astype(np.float32), equal_nan=True)


# ------------------------------------------------------------------ kernels that expand A, for several formats


def matrix(rng: np.random.Generator, M: int, K: int, share: float, dtype: str) -> Array:
    """Small integers at random places."""
    return ((rng.random((M, K)) < share) * rng.integers(-3, 4, (M, K))).astype(VALUE_TYPES[dtype].numpy)


def assert_takes_16_bits_on_hopper(kernel: CudaKernel, fmt: type[Format]) -> None:
    def refused(dtype: str = "bfloat16", **more: Any) -> str:
        a = fmt.from_dense(np.zeros((16, 128), VALUE_TYPES[dtype].numpy))
        p = problem(a, 40, a.dtype.name, ("col", "col"), 90).changed(**more)
        return "\n".join(kernel.unsupported(p))

    assert refused() == ""
    assert "needs sm_90a (wgmma), got sm_80" in refused(sm=80)
    assert "A must not be empty" in refused(M=0)
    assert "float32" in refused(dtype="float32")


def assert_integers_exact(
    kernel: CudaKernel, fmt: type[Format], tile: Any, share: float, M: int, K: int, N: int, layouts: tuple[str, str],
    pad: int, dtype: str, out: str, **params: int,
) -> None:  # fmt: skip
    """share: of the elements that are stored. pad: as for ``product``. params: of the format."""
    rng = np.random.default_rng(N)
    x = matrix(rng, M, K, share, dtype)
    B = rng.integers(-3, 4, (K, N)).astype(x.dtype)
    assert_exact(product(kernel, tile, fmt.from_dense(x, **params), B, out, layouts, pad), x, B)


def assert_zeros_meet_no_infinity(kernel: CudaKernel, fmt: type[Format], tile: Any, layout: str) -> None:
    """B is infinite or NaN in rows where half of A is zero."""
    hopper()
    rng = np.random.default_rng(3)
    x = matrix(rng, 136, 136, 0.5, "bfloat16")
    B, wanted = infinite(rng, x, 72)
    assert equal(product(kernel, tile, fmt.from_dense(x), B, "bfloat16", (layout, layout), 0), wanted)


# ------------------------------------------------------------------ tiles of the kernels that decode records


def tile_in(tiles: tuple[Any, ...], warpgroups: int, cols: int, resident: int, parts: int) -> Any:
    """The one of these warpgroups and columns, blocks on a multiprocessor and parts of K."""
    wanted = warpgroups, cols, resident, parts
    return next(t for t in tiles if (t.warpgroups, t.cols, t.resident, t.parts) == wanted)


def assert_stages_fit(tile: Any, room: int, resident: int) -> None:
    """Shared memory of a multiprocessor has room for ``resident`` blocks, with records of ``room`` bytes."""
    assert tile.stages(room) >= 2
    assert resident * (tile.smem(room) + 1024) <= 228 << 10
    assert tile.barriers(room) % 16 == 0
    assert tile.stages_end(room) >= tile.staged(tile.stages(room), room)


def rows_of_lengths(lengths: Array, K: int, dtype: str) -> Array:
    """A matrix [len(lengths), K] with so many small integers in each row, at random places."""
    rng, x = np.random.default_rng(7), np.zeros((len(lengths), K))
    for row, length in enumerate(lengths):
        x[row, rng.permutation(K)[:length]] = rng.choice([-2, -1, 1, 2, 3], length)
    return x.astype(VALUE_TYPES[dtype].numpy)
