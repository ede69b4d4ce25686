"""Records of a Bitmask: they hold all of the matrix, and products come from them alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.arrays.library import ceil_div
from spformat.backends.cuda.bitmask import bitmask_records
from spformat.backends.cuda.bitmask.spmm_bitmask_expanding_sm90a import SpmmBitmaskExpanding
from spformat.backends.cuda.bitmask.spmm_bitmask_tc import SpmmBitmaskTensor
from spformat.backends.cuda.dense.expand_then_dense import ExpandThenDense
from spformat.products.problem import Problem

KERNELS = (SpmmBitmaskTensor(), SpmmBitmaskExpanding(), ExpandThenDense())
SHAPES = ((0, 0), (0, 70), (3, 0), (1, 1), (16, 64), (17, 63), (15, 65), (33, 128), (40, 200), (131, 321))


def drawn(seed: int, shape: tuple[int, int], density: float, dtype: str) -> np.ndarray[Any, Any]:
    """Values of random bits (NaN and infinities, too), some rows without any."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 16, shape).astype(np.uint16)
    x[rng.random(shape) >= density] = 0
    x[rng.random(shape[0]) < 0.2] = 0
    x[x == 0x8000] = 0  # -0.0 is not a value
    return x.view(VALUE_TYPES[dtype].numpy)


def problem_of(a: Any, sm: int) -> Problem:
    size = (a.shape[0], a.shape[1], 8, a.nnz)
    return Problem.product("bitmask", (), *size, *[a.dtype.name] * 3, "row", "row", "cuda", sm=sm)


@pytest.mark.gpu
def test_records_have_few_more_bytes_than_the_format() -> None:
    """A record has 16 bytes, 4 of its start and half a piece of padding beside the bits and values."""
    cp = pytest.importorskip("cupy")
    sm, rng = int(cp.cuda.Device().compute_capability), np.random.default_rng(1)
    for density, most in ((0.5, 1.03), (0.3, 1.04), (0.2, 1.06), (0.1, 1.09)):
        x = (rng.random((250, 2048)) < density).astype(np.float16)
        a = sf.convert(x, "bitmask").to("cuda")
        assert bitmask_records.records(a, problem_of(a, sm)).nbytes <= most * a.nbytes, f"density {density}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_arrays_come_back(dtype: str) -> None:
    """Bit by bit, for matrices that are ragged, empty, full, and of rows without values."""
    cp = pytest.importorskip("cupy")
    sm = int(cp.cuda.Device().compute_capability)
    for i, shape in enumerate(SHAPES):
        for density in (0, 0.1, 0.5, 1):
            stored = sf.convert(drawn(i, shape, density, dtype), "bitmask")
            a = stored.to("cuda")
            p = problem_of(a, sm)
            records = bitmask_records.records(a, p)
            assert records.nbytes <= 16 * (bitmask_records.pieces_at_most(p) + 1) + 4 * (records.count + 1)
            assert records.count == ceil_div(shape[0], 16) * ceil_div(shape[1], 64)
            back = records.restore()
            for name, array in stored.arrays().items():
                got = back[name]
                where = f"{shape} density {density}: {name}"
                assert (got.dtype, got.shape) == (array.dtype, array.shape), where
                assert got.get().tobytes() == array.tobytes(), where


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_products_come_from_records_alone(kernel: Any) -> None:
    """Also where B is not finite: a NaN or infinity meets stored values only. The arrays are not kept beside them."""
    cp = pytest.importorskip("cupy")
    sm, rng = int(cp.cuda.Device().compute_capability), np.random.default_rng(5)
    for (M, K), density in itertools.product(((1, 1), (40, 200), (131, 321)), (0.05, 0.5, 1)):
        x = rng.choice([-3, -2, -1, 1, 2, 3], (M, K)) * (rng.random((M, K)) < density)
        stored = sf.convert(x.astype(np.float16), "bitmask")
        for n, layout in ((1, "row"), (17, "col"), (40, "row")):
            a = stored.to("cuda")
            p = problem_of(a, sm).changed(n=n, b_layout=layout, out_layout=layout)
            if kernel.unsupported(p):
                pytest.skip(f"{kernel.name}: {kernel.unsupported(p)[0]}")
            B = rng.integers(-2, 3, (K, n)).astype(np.float64)
            for value in () if kernel.multiplies_zeros else (np.inf, -np.inf, np.nan):
                B[rng.integers(K), rng.integers(n)] = value
            with np.errstate(invalid="ignore"):
                wanted = np.where(x[:, :, None] != 0, x[:, :, None] * B[None], 0).sum(axis=1).astype(np.float16)
            plan = kernel.plan(a, p)
            assert a.in_kernel_order, f"{a!r} keeps its arrays beside the records"
            order = "F" if layout == "col" else "C"
            out = cp.empty((M, n), np.float16, order)
            plan(cp.asarray(np.asarray(B.astype(np.float16), order=order), order=order), out=out)
            where = f"{kernel.name} {M}x{K} density {density} n={n} {layout}"
            np.testing.assert_array_equal(out.get(), wanted, err_msg=where)
            assert a == stored, where
            assert a.nbytes == stored.nbytes, where
