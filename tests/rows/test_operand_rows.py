"""Rows A17, A51 .. A53, G07, G08: operands that do not fit, and sizes at the edge. What needs a GPU is marked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import PARAMS, made, operand, small, small_file, unharmed
from hostile import change, rewrite

import spformat as sf
from spformat.formats import FORMATS


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_A51_operands_that_do_not_fit(fmt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if fmt is not sf.CSR:  # the compiled loops of one format, to save the time of compiling all
        monkeypatch.setenv("SPFORMAT_BACKEND", "reference")
    a, B = made(fmt), operand()
    plan = sf.plan(a, B=B)
    for bad, error in ((B[:5], ValueError), (np.float32(B), TypeError), (B[:, None], ValueError)):
        with pytest.raises(error, match=r"B: (expected|this plan takes)"):
            plan(bad)
    with pytest.raises(ValueError, match="B: expected 12 rows"):
        sf.spmm(a, B[:5])
    with pytest.raises((TypeError, sf.errors.SpformatError)):
        sf.spmm(a, np.zeros((12, 3), "M8[s]"))
    got = sf.spmm(a, np.asfortranarray(B)), sf.spmm(a, B[:, ::-1])
    assert np.array_equal(got[0], sf.spmm(a, B))
    assert np.array_equal(got[1], sf.spmm(a, B)[:, ::-1])


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_A51_operands_on_a_device_that_do_not_fit(cp: Any, fmt: Any) -> None:
    a, B = made(fmt).to("cuda"), cp.asarray(operand())
    plan = sf.plan(a, B=B)
    raw = cp.zeros(B.nbytes + 2, cp.uint8)
    unaligned = cp.ndarray(B.shape, B.dtype, cp.cuda.MemoryPointer(raw.data.mem, 1))
    for bad in (B[:5], B.astype(np.float32), B[::2], unaligned, B.T):
        with pytest.raises((ValueError, TypeError)):
            plan(bad)
    for bad in (B.get(), operand()):
        with pytest.raises(sf.errors.UsageError, match="nothing is copied"):
            sf.spmm(a, bad)


def test_A52_what_was_checked_is_what_is_uploaded(folder: Path) -> None:
    for fmt in FORMATS:
        f: Any = sf.load(small_file(folder, fmt.name))["w"]
        for name, a in f.arrays().items():
            with pytest.raises(ValueError, match="read-only"):
                a.reshape(-1)[:1] = 0
            assert not f.with_arrays(**{name: a.copy()}).is_validated
    with pytest.raises((AttributeError, TypeError)):
        f.data = None


def test_A53_validation_is_of_an_object_not_of_the_process(folder: Path) -> None:
    path = small_file(folder, "csr")
    bad = folder / "bad.safetensors"
    bad.write_bytes(path.read_bytes())
    rewrite(bad, change("indices", lambda a: a + np.int32(100)))
    good = made(sf.CSR)
    hostile = good.with_arrays(indices=good.indices + np.int32(100))
    wanted = sf.spmm(good, operand())

    def one(i: int) -> bool:
        try:
            if i % 4 == 0:
                sf.load(bad)
            elif i % 4 == 1:
                hostile.to_dense()
            elif i % 4 == 2:
                return np.array_equal(sf.spmm(good, operand()), wanted)
            else:
                return bool(sf.load(path)["w"] == good)
        except sf.errors.IndexBoundsError:
            return i % 4 < 2
        return False

    with unharmed(folder), ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(200)))


@pytest.mark.gpu
def test_A53_one_matrix_on_two_streams(cp: Any) -> None:
    for fmt in FORMATS:
        a, B = made(fmt).to("cuda"), cp.asarray(operand())
        wanted = sf.spmm(a, B).get()
        streams = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]

        def one(i: int, a: Any = a, B: Any = B, streams: Any = streams) -> Any:
            with streams[i % 4]:
                out = sf.spmm(a, B)
                streams[i % 4].synchronize()
                return out.get()

        with ThreadPoolExecutor(4) as pool:
            assert all(np.array_equal(got, wanted) for got in pool.map(one, range(40)))


@pytest.mark.gpu
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_A17_more_elements_than_int32_counts(cp: Any, extra: int) -> None:
    # B and C have 2^31 - 1, 2^31 and 2^31 + 1 elements in reach: the last rows lie behind what 32 bits address.
    N = 1 << 15
    K = M = (1 << 16) + extra
    rows = np.array([0, 1, M - 2, M - 1])
    cols = np.array([K - 1, 3, 0, K - 1])
    a = sf.CSR.from_coordinates((M, K), rows, cols, np.array([1, 2, 3, 4], np.float16))
    B = cp.zeros((K, N), cp.float16)
    B[0], B[3], B[K - 1] = 1, 5, 7
    wanted = {0: 7, 1: 10, 2: 0, M // 2: 0, M - 2: 3, M - 1: 28}
    for name in ("csr", "ell-buckets", "bsr:blocksize=32x32", "dbsr:blocksize=32x32", "sr-bcrs"):
        f = sf.convert(a, name).to("cuda")
        C = sf.spmm(f, B)
        for i, value in wanted.items():
            assert bool((C[i] == value).all()), (name, i)
        del C


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_G07_columns_of_every_number_and_guard_bands(cp: Any, fmt: Any) -> None:
    a = made(fmt).to("cuda")
    dense = small().astype(np.float32)
    for n in (0, 1, 7, 2**20):
        B = np.random.default_rng(0).integers(-3, 4, (12, min(n, 64))).astype(np.float16)
        B = B[:, np.arange(n) % 64] if n else B
        for pad in (0, 5) if n < 2**20 else (0,):
            wide = cp.full((12, n + pad), 9, cp.float16)
            wide[:, :n] = cp.asarray(B)
            guarded = cp.full((10 + 4, n + pad), 77, cp.float16)
            out = guarded[2:12, :n]
            out[...] = cp.nan
            sf.spmm(a, wide[:, :n], out=out)
            assert bool((out == cp.asarray((dense @ B.astype(np.float32)).astype(np.float16))).all())
            assert bool((guarded[:2] == 77).all())
            assert bool((guarded[12:] == 77).all())
            assert bool((guarded[:, n:] == 77).all())


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_G08_out_that_overlaps_an_operand(fmt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if fmt is not sf.CSR:
        monkeypatch.setenv("SPFORMAT_BACKEND", "reference")
    check_aliases(fmt, np)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_G08_out_on_a_device_that_overlaps_an_operand(cp: Any, fmt: Any) -> None:
    check_aliases(fmt, cp)


def check_aliases(fmt: Any, xp: Any) -> None:
    x = np.zeros((16, 16), np.float16)
    x[:, ::4] = np.arange(64).reshape(16, 4)
    room = xp.zeros(4096, xp.float16)
    a = fmt.from_dense(x, **PARAMS.get(fmt.name, {}))
    a = a if xp is np else a.to("cuda")
    flat = a.values.reshape(-1)
    room[: flat.size] = flat
    a = a.with_arrays(
        **{next(k for k, v in a.arrays().items() if v is a.values): room[: flat.size].reshape(a.values.shape)}
    )
    B = xp.ones((16, 16), xp.float16)
    for out, message in ((B, "overlaps B"), (room[:256].reshape(16, 16), "overlaps the arrays of A")):
        before = room.copy()
        if out is not B and a.in_kernel_order:  # nothing of it is left there
            sf.spmm(a, B, out=out)
            assert bool((out == xp.asarray(x.sum(1, keepdims=True))).all())
            continue
        with pytest.raises(ValueError, match=message):
            sf.spmm(a, B, out=out)
        with pytest.raises(ValueError, match=message):
            sf.plan(a, B=B, out=out)(B, out=out)
        assert bool((room == before).all())
        assert bool((B == 1).all())
    sf.spmm(a, B, out=room[2048 : 2048 + 256].reshape(16, 16))
