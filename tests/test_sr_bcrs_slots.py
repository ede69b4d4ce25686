"""Slots of an SR-BCRS: they hold all of the matrix, and products come from them alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_orders import assert_arrays_come_back, assert_products_come_from_order

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.dense.expand_then_dense import ExpandThenDense
from spformat.backends.cuda.sr_bcrs import mma_fragments
from spformat.backends.cuda.sr_bcrs.spmm_sr_bcrs import SpmmSRBCRS
from spformat.backends.cuda.sr_bcrs.spmm_sr_bcrs_sm90a import SpmmSRBCRSHopper
from spformat.backends.cuda.sr_bcrs.spmm_sr_bcrs_tc import SpmmSRBCRSTensor
from spformat.backends.cuda.sr_bcrs.spmm_sr_bcrs_vector import SpmmSRBCRSVector
from spformat.products.problem import Problem

KERNELS = (SpmmSRBCRS(), SpmmSRBCRSTensor(), SpmmSRBCRSHopper(), SpmmSRBCRSVector(), ExpandThenDense())
SHAPES = ((0, 0), (0, 70), (3, 0), (1, 1), (32, 128), (33, 129), (31, 300), (70, 40), (260, 150))
PARAMS = ((8, 16), (1, 1), (3, 5), (4, 16), (16, 4), (40, 7), (256, 2))


def drawn(seed: int, shape: tuple[int, int], density: float, dtype: str) -> np.ndarray[Any, Any]:
    """Values of random bits (NaN and infinities, too), in columns of eight rows; some rows without any."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 16, shape).astype(np.uint16)
    keep = np.repeat(rng.random((shape[0] // 8 + 1, shape[1])) < density, 8, axis=0)[: shape[0]]
    x[~keep | (rng.random(shape) < 0.2)] = 0
    x[rng.random(shape[0]) < 0.2] = 0
    x[x == 0x8000] = 0  # -0.0 is not a value
    return x.view(VALUE_TYPES[dtype].numpy)


def problem_of(a: Any, sm: int) -> Problem:
    params, size = tuple(a.params().items()), (a.shape[0], a.shape[1], 8, a.stored)
    return Problem.product("sr-bcrs", params, *size, *[a.dtype.name] * 3, "row", "row", "cuda", sm=sm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("length", "stride"), PARAMS)
def test_arrays_come_back(length: int, stride: int, dtype: str) -> None:
    """Bit by bit, for matrices that are ragged, empty, full, and of rows without values."""
    cp = pytest.importorskip("cupy")
    sm = int(cp.cuda.Device().compute_capability)
    for i, shape in enumerate(SHAPES):
        for density in (0, 0.1, 0.5, 1):
            x = drawn(i, shape, density, dtype)
            stored = sf.convert(x, "sr-bcrs", vector_length=length, stride=stride)
            a = stored.to("cuda")
            p = problem_of(a, sm)
            slots = mma_fragments.fragments_of(a, p)
            assert slots.pieces.shape[0] <= max(1, mma_fragments.pieces_at_most(p))
            assert_arrays_come_back(stored, slots.restore(), f"{shape} density {density}")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [8, 16, 64])
def test_slots_have_few_more_bytes_than_the_format(length: int) -> None:
    """16 of a slot of eight rows, where the format has 4 more for the column, and 32 for 16 columns of a panel."""
    cp = pytest.importorskip("cupy")
    sm, rng = int(cp.cuda.Device().compute_capability), np.random.default_rng(3)
    for density in (0.02, 0.1, 0.5, 1):
        x = np.repeat(rng.random((256 // length, 1500)) < density, length, axis=0).astype(np.float16)
        a = sf.convert(x, "sr-bcrs", vector_length=length).to("cuda")
        assert mma_fragments.fragments_of(a, problem_of(a, sm)).nbytes <= 1.1 * a.nbytes, f"density {density}"


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_products_come_from_slots_alone(kernel: Any) -> None:
    params = [dict(zip(("vector_length", "stride"), values, strict=True)) for values in PARAMS]
    assert_products_come_from_order(kernel, "sr-bcrs", lambda i: params[i % len(params)], problem_of)
