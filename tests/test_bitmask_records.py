"""Records of a Bitmask: they hold all of the matrix, and products come from them alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_orders import assert_arrays_come_back, assert_products_come_from_order

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
            assert_arrays_come_back(stored, records.restore(), f"{shape} density {density}")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_products_come_from_records_alone(kernel: Any) -> None:
    assert_products_come_from_order(kernel, "bitmask", lambda i: {}, problem_of)
