"""SR-BCRS from and to dense arrays and CSR on a device against the numpy code, the reference; and how work is divided."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import CASES, codes

from spformat import CSR, SRBCRS
from spformat.arrays.dtypes import bits
from spformat.backends.cuda import edges as cuda_edges
from spformat.backends.cuda.sr_bcrs import sr_bcrs_edges, sr_bcrs_from_csr, sr_bcrs_from_dense, sr_bcrs_to_csr
from spformat.errors import LimitError
from spformat.limits import using

DTYPES = ("bfloat16", "float16", "float32", "float64", "int8")
PARAMS = [
    {"vector_length": t, "stride": g}
    for t, g in ((8, 16), (1, 1), (3, 5), (1, 32), (16, 8), (64, 1), (5, 255), (256, 256), (256, 3), (2, 17))
]
SHAPES = ((9, 31), (64, 256), (30, 1025), (3, 4003), (2011, 3))
LARGE = ((300, 1025), (31, 40000), (3, 200003), (20011, 3), (1024, 1024))


def places(shape: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """Where values are: some rows and columns are empty, others full."""
    rng = np.random.default_rng(seed)
    held = rng.random(shape) < (0.1, 0.002, 0.5, 0.02)[seed % 4]
    held[rng.random(shape[0]) < 0.2] = False
    held[:, rng.random(shape[1]) < 0.2] = False
    held[rng.random(shape[0]) < 1 / 64] = True
    return held


def with_stored_zeros(x: np.ndarray[Any, Any], seed: int) -> CSR:
    """CSR with every nonzero of x, and stored zeros of both signs beside them."""
    rng = np.random.default_rng(seed)
    stored = (CSR.from_dense(x).rows(), CSR.from_dense(x).indices)
    at = rng.random(x.shape) < 0.02
    at[stored] = True
    rows, cols = np.nonzero(at)
    return CSR.from_coordinates(x.shape, rows, cols, bits(x)[at].view(x.dtype)).validate()


# ------------------------------------------------------------------ without a GPU


def test_blocks_of_the_last_pass_cover_all_rows_of_all_groups_and_fit() -> None:
    for G, t, g, itemsize in itertools.product((1, 5000, 10**7), (1, 3, 8, 255, 256), (1, 16, 255, 256), (1, 2, 4, 8)):
        groups, rows, row_parts = sr_bcrs_from_dense.cut(G, t, g, itemsize)
        assert groups * rows * g * itemsize <= sr_bcrs_from_dense.IMAGE
        assert (row_parts - 1) * rows < t <= row_parts * rows
        assert groups >= 1
        assert groups == 1 or (rows, row_parts) == (t, 1)


def test_parts_of_a_row_tile_cover_its_columns() -> None:
    for M, K, nnz, t in itertools.product((1, 100, 10**6), (1, 8192, 10**6, 2**32 - 1), (1, 10**5, 10**8), (1, 8, 256)):
        parts = sr_bcrs_from_csr.parts(M, K, nnz, t)
        width = -(-K // parts)
        assert (parts - 1) * width < K <= parts * width
        assert parts == 1 or width >= sr_bcrs_from_csr.NARROWEST


def test_a_row_is_shared_only_if_there_are_few() -> None:
    assert sr_bcrs_to_csr.parts(8192, (300_000, 8, 16)) == 1
    assert sr_bcrs_to_csr.parts(8, (60_000, 8, 16)) == 937
    assert sr_bcrs_to_csr.parts(8, (3, 8, 16)) == 1


def test_all_four_edges_are_in_the_table() -> None:
    ours = {(e.source, e.target) for e in cuda_edges.EDGES if e.function.__module__ == sr_bcrs_edges.__name__}
    assert ours == {("dense", "sr-bcrs"), ("sr-bcrs", "dense"), ("csr", "sr-bcrs"), ("sr-bcrs", "csr")}


def test_edges_check_the_budget_of_the_general_code() -> None:
    x = codes("float32", places((64, 300), 2), 2)
    a = CSR.from_dense(x)
    groups = SRBCRS.from_csr(a).groups
    needed = 4 * 8 * 16 * groups
    with using(memory=needed - 1):
        with pytest.raises(LimitError) as general:
            SRBCRS.from_csr(a)
        with pytest.raises(LimitError) as checked:
            SRBCRS.check_groups(groups, needed, a.nbytes)
    assert general.value.message == checked.value.message


# ------------------------------------------------------------------ on a GPU


@pytest.fixture
def cp() -> Any:
    return pytest.importorskip("cupy")


def samples(dtype: str) -> Iterator[tuple[np.ndarray[Any, Any], dict[str, int], int]]:
    seeds = itertools.count()
    for params in PARAMS:
        for make in CASES.values():
            yield make(dtype), params, next(seeds)
        for shape in SHAPES:
            seed = next(seeds)
            yield codes(dtype, places(shape, seed), seed), params, seed
    for params, shape in itertools.product(PARAMS[:3], LARGE if dtype in ("bfloat16", "int8") else ()):
        seed = next(seeds)
        yield codes(dtype, places(shape, seed), seed), params, seed


def on_device(cp: Any, x: np.ndarray[Any, Any], offset: int = 0) -> Any:
    """A copy on the device, that many elements behind a boundary."""
    word = bits(x).dtype
    room = cp.empty(x.size + offset, word)
    out = room[offset:].reshape(x.shape)
    out[...] = cp.asarray(bits(x))
    return out.view(x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_host_code(cp: Any, dtype: str) -> None:
    for x, params, seed in samples(dtype):
        said = f"{params} {x.shape} {seed}"
        wanted, csr = SRBCRS.from_dense(x, **params), CSR.from_dense(x)
        assert SRBCRS.from_dense(on_device(cp, x, seed % 2), **params).to("cpu") == wanted, said
        for a in (csr, with_stored_zeros(x, seed)):
            assert SRBCRS.from_csr(a.to("cuda"), **params).to("cpu") == wanted, said
        device = wanted.to("cuda")
        assert device.to_csr().to("cpu") == csr, said
        assert (bits(device.to_dense()).get() == bits(wanted.to_dense())).all(), said


@pytest.mark.gpu
def test_the_kernels_run(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the general code."""
    x = codes("bfloat16", places((300, 1025), 0), 0)
    wanted = SRBCRS.from_dense(x)
    csr = wanted.to_csr()
    for name in ("_from_dense", "_from_csr", "_to_csr", "_to_dense"):
        monkeypatch.setattr(SRBCRS, name, None)
    assert SRBCRS.from_dense(on_device(cp, x)).to("cpu") == wanted
    assert SRBCRS.from_csr(csr.to("cuda")).to("cpu") == wanted
    assert wanted.to("cuda").to_csr().to("cpu") == csr
    wanted.to("cuda").to_dense()


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 7])
def test_shared_tiles_and_rows(cp: Any, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """Several blocks of a tile and warps of a row; windows of columns, and parts that are sorted."""
    monkeypatch.setattr(sr_bcrs_from_csr, "parts", lambda M, K, nnz, t: -(-K // -(-K // parts)))
    monkeypatch.setattr(sr_bcrs_to_csr, "parts", lambda M, stored: parts)
    for seed, (shape, params) in enumerate(itertools.product(((9, 200_000), (30, 70_001), (257, 999)), PARAMS)):
        x = codes("float16", places(shape, seed), seed)
        a, wanted = with_stored_zeros(x, seed), SRBCRS.from_dense(x, **params)
        assert SRBCRS.from_csr(a.to("cuda"), **params).to("cpu") == wanted, f"{params} {shape}"
        assert wanted.to("cuda").to_csr().to("cpu") == CSR.from_dense(x), f"{params} {shape}"


@pytest.mark.gpu
def test_refusals_of_the_host_code(cp: Any) -> None:
    x = codes("float32", places((64, 300), 2), 2)
    device, csr = cp.asarray(x), CSR.from_dense(x).to("cuda")
    needed = 4 * 8 * 16 * SRBCRS.from_dense(x).groups
    with using(memory=needed - 1):
        for convert in (lambda: SRBCRS.from_dense(device), lambda: SRBCRS.from_csr(csr)):
            with pytest.raises(LimitError, match=r"sr-bcrs: [\d,]+ groups"):
                convert()


@pytest.mark.gpu
@pytest.mark.device_memory
def test_more_than_2_to_the_31_elements(cp: Any) -> None:
    M, K = 40_000, 56_000
    x = cp.zeros((M, K), "int8")
    rng = np.random.default_rng(0)
    rows, cols = rng.integers(0, M, 100_000), rng.integers(0, K, 100_000)
    x[cp.asarray(rows), cp.asarray(cols)] = 5
    x[M - 1, K - 1] = x[0, 0] = 7
    a = SRBCRS.from_dense(x)
    a.with_arrays().validate()
    assert (a.to_dense() == x).all()
    csr = a.to_csr()
    assert csr.nnz == int((x != 0).sum())
    assert SRBCRS.from_csr(csr).to("cpu") == a.to("cpu")
