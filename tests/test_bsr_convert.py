"""BSR and DBSR from and to dense and CSR on the device, and their transposes, against the host code, the reference; and
parts that need no device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import codes

import spformat as sf
from spformat.arrays.dtypes import bits
from spformat.arrays.library import ceil_div
from spformat.backends.cuda.bsr import block_map, bsr_edges, bsr_from_csr, bsr_from_dense, bsr_to_csr, bsr_transpose
from spformat.backends.cuda.runtime import jit
from spformat.errors import LimitError
from spformat.formats.base import Format
from spformat.limits import using

SIZES = [
    (1, 1),
    (2, 3),
    (5, 7),
    (1, 16),
    (16, 1),
    (8, 8),
    (32, 32),
    (16, 64),
    (33, 31),
    (100, 40),
    (256, 128),
    (1024, 7),
]
SHAPES = [(331, 523), (331, 528), (1, 1), (1, 4099), (4099, 1), (2000, 40), (65, 2049)]
EXTENTS = [1, 2, 3, 31, 32, 33, 100, 512, 1023, 1024]


@pytest.mark.parametrize("module", [bsr_from_dense, bsr_from_csr, bsr_to_csr, bsr_transpose, block_map])
def test_constants_are_those_of_the_kernels(module: Any) -> None:
    text = (jit.HERE / module.SOURCE).read_text()
    declared = dict(
        re.findall(r"(\w+) = ([^,;]+)[,;]", " ".join(re.findall(r"^constexpr int .+$", text, re.MULTILINE)))
    )
    shared = [name for name in declared if hasattr(module, name)]
    assert shared
    assert {n: eval(declared[n], {"SIDE": 32}) for n in shared} == {n: getattr(module, n) for n in shared}


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("R", EXTENTS)
def test_every_element_is_marked_by_one_lane(R: int, itemsize: int) -> None:
    """The kernel's sums, repeated: each row and each unit of columns is in exactly one share."""
    for M, K in ((1, 1), (40, 300), (1500, 9), (700, 2000)):
        how = bsr_from_dense.marking((M, K), itemsize, R)
        assert how.across in (1, 2, 4, 8, 16, 32)
        assert how.together == 1 or (how.together * how.across == 32 and how.strips == 1)
        rows = np.zeros(M, int)
        for above in range(how.tasks // how.segments):
            for group in range(32 // how.across):
                b = above // how.strips * how.together + (group if how.together > 1 else 0)
                start = b * R + above % how.strips * how.height
                end = min((b + 1) * R, M, start + how.height)
                step = 1 if how.together > 1 else 32 // how.across
                rows[start + (0 if how.together > 1 else group) : max(0, end) : step] += 1
        assert (rows == 1).all()
        assert how.segments * how.across * bsr_from_dense.UNIT >= K * itemsize


@pytest.mark.parametrize("itemsize", [1, 8])
@pytest.mark.parametrize("R", EXTENTS)
@pytest.mark.parametrize("C", EXTENTS)
def test_shares_fit_the_kernels(R: int, C: int, itemsize: int) -> None:
    for grid in ((1, 1), (3, 31), (9, 100_000)):
        how = bsr_from_dense.copying(grid, (R, C), itemsize)
        assert 1 <= how.span <= bsr_from_dense.MOST
        assert how.strips * how.height >= R > (how.strips - 1) * how.height
        assert how.span * 32 * how.height * C + 4 * block_map.THREADS < 2**31  # counted in 32 bits
    together, down, across = bsr_transpose.tiles(R, C)
    side = bsr_transpose.SIDE
    assert 1 <= together <= bsr_transpose.MOST
    assert together * min(R, side) * (min(C, side) + 1) <= bsr_transpose.ROOM
    assert (down, across) == ((ceil_div(R, side), ceil_div(C, side)) if max(R, C) > side else (1, 1))


def test_maps_stay_as_small_as_the_matrix() -> None:
    """A bit for each block of the grid, or for 32 of them where they are few; the general code sorts if there are too
    many even so."""
    assert bsr_from_csr.fits((2048, 2048), 1)
    assert bsr_from_csr.fits((1 << 18, 1 << 12), 1 << 24)
    assert not bsr_from_csr.fits((130_000, 130_000), 10_000_000)
    assert bsr_from_csr.worth((130_000, 130_000), 10_000_000)
    assert not bsr_from_csr.worth((1 << 20, 1 << 20), 10_000_000)
    assert bsr_transpose.worth((1 << 16, 1 << 16), 1 << 31)
    assert not bsr_transpose.worth((1 << 20, 1 << 20), 1 << 31)


# ------------------------------------------------------------------ on a device


@pytest.fixture(scope="module")
def cp() -> Any:
    return pytest.importorskip("cupy")


def places(shape: tuple[int, int], blocksize: tuple[int, int], seed: int) -> Iterator[np.ndarray]:
    """Where values are: in whole blocks, scattered, in one row and the last corner, everywhere, nowhere."""
    rng, (R, C) = np.random.default_rng(seed), blocksize
    stored = rng.random((ceil_div(shape[0], R), ceil_div(shape[1], C))) < 0.2
    yield np.repeat(np.repeat(stored, R, 0), C, 1)[: shape[0], : shape[1]] & (rng.random(shape) < 0.8)
    yield rng.random(shape) < 0.01
    row = np.zeros(shape, bool)
    row[shape[0] // 2] = row[-1, -1] = True
    yield row
    yield np.ones(shape, bool)
    yield np.zeros(shape, bool)


def cases(dtype: str) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
    """(array with zeros of both signs and special values, blocksize)"""
    for seed, blocksize in enumerate(SIZES):
        for shape in SHAPES:
            for held in places(shape, blocksize, seed):
                yield codes(dtype, held, seed), blocksize


@pytest.fixture
def edges_only(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The general code of conversions is not there, so that nothing passes because of it."""
    for cls in (sf.BSR, sf.DBSR):
        for name in ("_from_dense", "_from_csr", "_to_csr", "_to_dense"):
            general = getattr(cls, name)

            def only_if_empty(*args: Any, general: Any = general, name: str = name, **kwargs: Any) -> Any:
                values = args[0] if name == "_from_dense" else args[0].data
                assert not (isinstance(values, cp.ndarray) and values.size), f"the general code ran: {name}"
                return general(*args, **kwargs)

            static = name.startswith("_from")
            monkeypatch.setattr(cls, name, staticmethod(only_if_empty) if static else only_if_empty)


def same(device: Format, host: Format, what: str) -> None:
    assert device.to("cpu") == host, what


@pytest.mark.gpu
@pytest.mark.usefixtures("edges_only")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int8"])
@pytest.mark.parametrize("cls", [sf.BSR, sf.DBSR], ids=lambda c: c.name)
def test_bits_of_the_host_code(cp: Any, cls: type[Any], dtype: str) -> None:
    for x, blocksize in cases(dtype):
        what = f"{x.shape} {blocksize}"
        host = cls.from_dense(x, blocksize=blocksize)
        same(cls.from_dense(cp.asarray(x), blocksize=blocksize), host, what)
        behind = cp.empty(x.size + 1, x.dtype)[1:].reshape(x.shape)  # starts on no boundary
        behind[...] = cp.asarray(x)
        same(cls.from_dense(behind, blocksize=blocksize), host, what)
        g = host.to("cuda")
        assert (bits(g.to_dense()).get() == bits(host.to_dense())).all(), what
        same(g.to_csr(), host.to_csr(), what)
        same(cls.from_csr(g.to_csr(), blocksize=blocksize), host, what)
        same(g.T.materialize(), host.T.materialize(), what)


@pytest.mark.gpu
@pytest.mark.usefixtures("edges_only")
@pytest.mark.parametrize("cls", [sf.BSR, sf.DBSR], ids=lambda c: c.name)
def test_stored_zeros_are_dropped(cp: Any, cls: type[Any]) -> None:
    for seed, blocksize in enumerate(SIZES):
        rng = np.random.default_rng(seed)
        rows, columns = np.nonzero(rng.random((300, 400)) < 0.1)
        x = codes("float32", rng.random((300, 400)) < 0.03, seed)
        a = sf.CSR.from_coordinates(x.shape, rows, columns, x[rows, columns])
        assert a.stored_zeros > 1000
        same(cls.from_csr(a.to("cuda"), blocksize=blocksize), cls.from_csr(a, blocksize=blocksize), str(blocksize))
    zeros = a.with_arrays(data=np.zeros(a.nnz, np.float32)).validate()
    same(cls.from_csr(zeros.to("cuda"), blocksize=(3, 4)), cls.from_csr(zeros, blocksize=(3, 4)), "zeros only")


@pytest.mark.gpu
def test_wide_indices(cp: Any) -> None:
    """int64 indices, which only larger matrices have."""
    for x, blocksize in list(cases("float16"))[::7]:
        for cls in (sf.BSR, sf.DBSR):
            host = cls.from_dense(x, blocksize=blocksize)
            g, a = host.to("cuda"), host.to_csr().to("cuda")
            for f in (g, a):
                for key, array in f.arrays().items():
                    if array.dtype == np.int32:
                        object.__setattr__(f, key, array.astype(np.int64))
            what = f"{host!r}"
            if host.nnzb:
                same(bsr_edges.blocks_to_csr(g, {}), host.to_csr(), what)  # type: ignore[arg-type]
                same(bsr_edges.blocks_transposed(g, {}), host.T.materialize(), what)  # type: ignore[arg-type]
                assert (bits(bsr_edges.blocks_to_dense(g, {})).get() == bits(host.to_dense())).all(), what
                edge = bsr_edges.bsr_of_csr if cls is sf.BSR else bsr_edges.dbsr_of_csr
                same(edge(a, {"blocksize": blocksize}), host, what)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_the_memory_budget_refuses_as_on_the_host(cp: Any) -> None:
    rng = np.random.default_rng(1)
    rows, columns = np.nonzero(rng.random((2000, 3000)) < 0.01)
    x = codes("float32", rng.random((2000, 3000)) < 0.005, 1)
    a = sf.CSR.from_coordinates(x.shape, rows, columns, x[rows, columns])
    seen = []
    for f in (a, a.to("cuda")):
        with using(memory=1 << 20), pytest.raises(LimitError) as e:
            sf.BSR.from_csr(f, blocksize=(64, 64))
        seen.append((e.value.message, e.value.fields))
    assert seen[0] == seen[1]


@pytest.mark.gpu
@pytest.mark.usefixtures("edges_only")
def test_a_map_of_the_words_of_a_large_grid(cp: Any) -> None:
    rng, n = np.random.default_rng(3), 300_000
    key = np.unique(np.concatenate([at := rng.integers(0, n * n - 100, 100_000), at + 1, at + 40]))
    a = sf.CSR.from_coordinates((n, n), key // n, key % n, rng.integers(0, 4, key.size).astype(np.float32))
    for cls, blocksize in ((sf.BSR, (16, 16)), (sf.DBSR, (16, 16)), (sf.DBSR, (40, 5))):
        grid = ceil_div(n, blocksize[0]), ceil_div(n, blocksize[1])
        assert not bsr_from_csr.fits(grid, a.nnz)
        assert bsr_from_csr.worth(grid, a.nnz)
        host = cls.from_csr(a, blocksize=blocksize)
        same(cls.from_csr(a.to("cuda"), blocksize=blocksize), host, str(blocksize))


@pytest.mark.gpu
def test_a_grid_too_large_for_a_map_takes_the_general_code(cp: Any) -> None:
    rng = np.random.default_rng(2)
    M, K = 5_000_000, 4_000_000
    rows, columns = np.unique(rng.integers(0, M, 5000)), rng.integers(0, K, 5000)
    a = sf.CSR.from_coordinates((M, K), rows, columns[: rows.size], np.ones(rows.size, np.float32))
    g = a.to("cuda")
    assert bsr_edges.bsr_of_csr(g, {"blocksize": (2, 2)}) is None
    b = sf.BSR.from_csr(a, blocksize=(2, 2))
    same(sf.BSR.from_csr(g, blocksize=(2, 2)), b, "sorted")
    same(b.to("cuda").to_csr(), a, "back")
    assert bsr_edges.blocks_transposed(b.to("cuda"), {}) is None
    same(b.to("cuda").T.materialize(), b.T.materialize(), "transposed")


@pytest.mark.gpu
@pytest.mark.device_memory
def test_sizes_beyond_32_bits(cp: Any) -> None:
    """Positions above 2^31 elements: a matrix of 66,000 x 66,000 int8 with values in its corners."""
    n = 66_000
    x = cp.zeros((n, n), np.int8)
    x[0, 0], x[0, -1], x[-1, 0], x[-1, -1], x[n // 2, n // 2] = 1, 2, 3, 4, 5
    with using(memory=1 << 40):
        b = sf.BSR.from_dense(x, blocksize=(32, 32))
        assert b.nnzb == 5
        assert b.to_csr().to("cpu").indices.tolist() == [0, n - 1, n // 2, 0, n - 1]
        assert b.to_csr().to("cpu").data.tolist() == [1, 2, 5, 3, 4]
        assert bool((b.to_dense() == x).all())
        same(sf.BSR.from_csr(b.to_csr(), blocksize=(32, 32)), b.to("cpu"), "from csr")
