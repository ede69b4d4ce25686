"""Records of a CSR: they hold all of the matrix, and products come from them alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_orders import assert_products_come_from_order

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.arrays.library import ceil_div
from spformat.backends.cuda.csr import csr_records
from spformat.backends.cuda.csr.spmm_csr_expanding_sm90a import SpmmCSRExpanding
from spformat.backends.cuda.dense.expand_then_dense import ExpandThenDense
from spformat.formats import CSR
from spformat.products.problem import Problem

KERNELS = (SpmmCSRExpanding(), ExpandThenDense())
SHAPES = ((0, 0), (0, 70), (3, 0), (1, 1), (16, 64), (17, 63), (15, 65), (33, 128), (40, 200), (131, 321))


def drawn(seed: int, shape: tuple[int, int], density: float, dtype: str) -> CSR:
    """Values of random bits (NaN, infinities and zeros, too), some rows without any."""
    rng = np.random.default_rng(seed)
    kept = rng.random(shape) < density
    kept[rng.random(shape[0]) < 0.2] = False
    a = CSR.from_dense(kept.astype(np.uint8).view(np.int8))
    values = rng.integers(0, 1 << 16, a.nnz).astype(np.uint16)
    values[rng.random(a.nnz) < 0.1] = 0
    return CSR(shape=shape, indptr=a.indptr, indices=a.indices, data=values.view(VALUE_TYPES[dtype].numpy))


def problem_of(a: Any, sm: int) -> Problem:
    size = (a.shape[0], a.shape[1], 8, a.nnz)
    return Problem.product("csr", (), *size, *[a.dtype.name] * 3, "row", "row", "cuda", sm=sm)


@pytest.mark.gpu
def test_records_have_fewer_bytes_than_the_format() -> None:
    """4 bytes for an item where the format has 6; beside them 4 of a record's start and 6 of padding."""
    cp = pytest.importorskip("cupy")
    sm, rng = int(cp.cuda.Device().compute_capability), np.random.default_rng(1)
    for density, most in ((0.5, 0.68), (0.1, 0.69), (0.05, 0.71), (0.03, 0.73)):
        a = sf.convert((rng.random((256, 2048)) < density).astype(np.float16), "csr").to("cuda")
        assert csr_records.records(a, problem_of(a, sm)).nbytes <= most * a.nbytes, f"density {density}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_arrays_come_back(dtype: str) -> None:
    """Bit by bit, for matrices that are ragged, empty, full, and of rows without values; stored zeros, too."""
    cp = pytest.importorskip("cupy")
    sm = int(cp.cuda.Device().compute_capability)
    for i, shape in enumerate(SHAPES):
        for density in (0, 0.02, 0.1, 0.5, 1):
            stored = drawn(i, shape, density, dtype)
            a = stored.to("cuda")
            p = problem_of(a, sm)
            records = csr_records.records(a, p)
            assert records.data.nbytes <= 16 * max(1, csr_records.pieces_at_most(p))
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
    assert_products_come_from_order(kernel, "csr", lambda i: {}, problem_of)
