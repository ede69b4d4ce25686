"""ELL buckets from CSR and back, and to dense, on a device against the numpy code, the reference: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import CASES, params_of, values

import spformat as sf
from spformat import CSR, ELLBuckets
from spformat.arrays.dtypes import VALUE_TYPES, bits
from spformat.arrays.library import power_of_two
from spformat.backends.cuda.ell_buckets import ell_buckets_edges
from spformat.backends.cuda.ell_buckets.ell_buckets_from_csr import COUNTS, TILES, cut, ell_buckets_from_csr
from spformat.backends.cuda.ell_buckets.ell_buckets_launch import Widths, tables
from spformat.backends.cuda.ell_buckets.ell_buckets_to_csr import ell_buckets_to_csr
from spformat.backends.cuda.ell_buckets.ell_buckets_to_dense import bytes_of_runs, ell_buckets_to_dense, lanes_of
from spformat.limits import using

DTYPES = ("float64", "float32", "float16", "bfloat16", "int8")
PARAMS: tuple[dict[str, Any], ...] = (
    *params_of("ell-buckets"), {"column_parts": 2, "max_width": 4}, {"column_parts": 1024, "max_width": 2},
    {"widths": (2, 3, 300)}, {"column_parts": 7, "max_width": 1}, {"widths": tuple(range(1, 65)), "column_parts": 3},
)  # fmt: skip


def drawn(shape: tuple[int, int], lengths: Any, dtype: str = "float16", seed: int = 0) -> CSR:
    """A CSR with so many items in each row, at random columns; one item in eight is a stored zero of either sign."""
    rng, (M, K) = np.random.default_rng(seed), shape
    lengths = np.broadcast_to(lengths, M)
    cols = [np.sort(rng.permutation(K)[:n]) for n in lengths]
    indices = np.concatenate(cols).astype(np.int32) if M else np.zeros(0, np.int32)
    data = values(rng, (indices.size,), dtype)
    zero = rng.random(indices.size) < 0.125
    word = bits(data)
    word[zero] = rng.choice(np.array([0, 1 << (8 * word.itemsize - 1)], word.dtype), int(zero.sum()))
    indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return CSR(shape=shape, indptr=indptr, indices=indices, data=data).validate()


def larger(dtype: str) -> Iterator[tuple[CSR, dict[str, Any]]]:
    """Long rows, rows that are much shorter than others, rows for many rounds of a warp, many parts."""
    rng = np.random.default_rng(1)
    skewed = np.minimum(rng.pareto(0.7, 3000).astype(int), 900)
    yield drawn((3000, 900), skewed, dtype), {}
    yield drawn((3000, 900), skewed, dtype), {"column_parts": 5, "max_width": 16}
    yield drawn((3000, 900), skewed, dtype), {"widths": (3, 50, 77)}
    yield drawn((41_000, 40), rng.integers(0, 4, 41_000), dtype), {"max_width": 2}
    yield drawn((41_000, 40), rng.integers(0, 4, 41_000), dtype), {"column_parts": 3}
    yield drawn((70, 40_000), rng.integers(0, 9000, 70), dtype), {}
    yield drawn((70, 40_000), rng.integers(0, 9000, 70), dtype), {"column_parts": 1000, "max_width": 8}
    yield drawn((3, 20_011), (20_011, 0, 5), dtype), {"max_width": 1}


# ------------------------------------------------------------------ without a GPU


@pytest.mark.parametrize("parts", [1, 3, 1024])
@pytest.mark.parametrize("levels", [1, 11, 64])
def test_tiles_cover_the_rows(parts: int, levels: int) -> None:
    for M in (1, 31, 33, 8192, 10_000_019, 2**33 + 1):
        tiles, rows = cut(M, parts, levels)
        assert (tiles - 1) * rows < M <= tiles * rows
        assert rows % 32 == 0
        assert tiles <= TILES
        assert tiles == 1 or 2 * levels * parts * tiles <= COUNTS


def test_a_warp_takes_all_runs_of_an_image_or_as_many_as_it_has_lanes() -> None:
    assert lanes_of(1, 2048, 4, 1, 8192) == 32
    assert lanes_of(1, 2048, 4, 4, 2048) == 16  # an image may reach into two parts
    assert lanes_of(1, 2048, 1, 1024, 8) == 1
    assert lanes_of(32, 10, 1, 1, 10) == 1
    for rows in (1, 2, 4, 32):
        for parts in (1, 3, 100):
            lanes = lanes_of(rows, 70, 1, parts, 1 + 70 // parts)
            assert lanes == power_of_two(lanes)
            assert 1 <= lanes <= 32


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_tables_say_where_buckets_start(params: dict[str, Any]) -> None:
    a = ELLBuckets.from_dense(CASES["prime"]("float32"), **params)
    far, few = tables(a)
    buckets = len(a.bucket_widths)
    assert (far is None) == (3 * (buckets + 1) <= 126)
    listed = np.frombuffer(few, np.int64)[: 3 * (buckets + 1)] if far is None else far
    rows, slots, widths = np.reshape(listed, (3, -1))
    assert rows[-1] == a.row_ids.size
    assert slots[-1] == a.data.size
    assert tuple(widths[:-1]) == a.bucket_widths
    assert (np.repeat(slots[:-1] - rows[:-1] * widths[:-1], np.diff(rows)) + np.arange(rows[-1]) * a.row_widths()
            == a.slot_starts()[:-1]).all()  # fmt: skip
    assert Widths.from_buffer_copy(Widths.of(a.widths)).width[: len(a.widths)] == list(a.widths)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (4, 7)])
def test_a_matrix_without_items(shape: tuple[int, int]) -> None:
    for params in PARAMS:
        a = CSR.from_dense(np.zeros(shape, np.float16))
        wanted = ELLBuckets.from_csr(a, **params)
        assert ell_buckets_edges.from_csr(a, wanted.params()) == wanted


def test_too_many_parts_of_rows_are_refused_like_the_general_code() -> None:
    a, params = drawn((4000, 50), 1), {"column_parts": 1024, "max_width": 2}
    seen = []
    for convert in (lambda: ELLBuckets._from_csr(a, **params), lambda: ell_buckets_edges.from_csr(a, params)):
        with using(memory=2**20), pytest.raises(sf.errors.LimitError) as e:
            convert()
        seen.append(str(e.value))
    assert seen[0] == seen[1]


def test_what_is_left_to_the_general_code() -> None:
    """A matrix that may be invalid; one for which the list of runs would be much larger than the dense matrix."""
    a = ELLBuckets.from_dense(CASES["prime"]("float32"))
    assert ell_buckets_edges.to_csr(a.with_arrays(), {}) is None
    wide = drawn((100_000, 2), 1)
    parts = ELLBuckets.from_csr(wide, column_parts=1024, max_width=1)
    assert bytes_of_runs(parts) == 1024 * 100_000 * 8
    assert ell_buckets_edges.to_dense(parts, {}) is None


# ------------------------------------------------------------------ on a GPU


@pytest.fixture
def only_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general code must not run."""
    for name in ("_from_csr", "_to_csr", "_to_dense"):
        monkeypatch.setattr(ELLBuckets, name, None)


def assert_round(csr: CSR, wanted: ELLBuckets, dense: Any) -> None:
    got = ELLBuckets.from_csr(csr.to("cuda"), **wanted.params())
    assert got.to("cpu") == wanted, (csr, wanted.params())
    assert got.to_csr().to("cpu") == csr, (csr, wanted.params())
    assert (bits(got.to_dense()).get() == bits(dense)).all(), (csr, wanted.params())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions_like_numpy(dtype: str, request: pytest.FixtureRequest) -> None:
    csrs = [CSR.from_dense(make(dtype)) for make in CASES.values()]
    csrs += [drawn((17, 70), n, dtype) for n in (0, 1, 3, 70)]
    pairs = [(a, params) for a in csrs for params in PARAMS] + list(larger(dtype))
    wanted = [(a, ELLBuckets.from_csr(a, **params), a.to_dense()) for a, params in pairs]
    request.getfixturevalue("only_edges")
    for case in wanted:
        assert_round(*case)


@pytest.mark.gpu
def test_wide_indices_on_a_gpu() -> None:
    """int64 indices, which only larger matrices have."""
    cupy = pytest.importorskip("cupy")
    for params in PARAMS:
        a = drawn((500, 600), np.random.default_rng(2).integers(0, 300, 500), "float32")
        wanted = ELLBuckets.from_csr(a, **params)
        indptr, indices = (cupy.asarray(x.astype(np.int64)) for x in (a.indptr, a.indices))
        placed = ell_buckets_from_csr(
            a.shape, indptr, indices, cupy.asarray(a.data), wanted.column_parts, wanted.widths
        )
        for name, x in (wanted.arrays() | wanted.tables()).items():
            got = getattr(placed, name)
            assert got == x if isinstance(x, tuple) else (got.get() == x).all() or got.get().tobytes() == x.tobytes(), (
                name
            )
        g = wanted.to("cuda")
        for name in ("row_ids", "indices", "source"):
            object.__setattr__(g, name, getattr(g, name).astype(np.int64))
        for got, x in zip(ell_buckets_to_csr(g), a.arrays().values(), strict=True):
            assert (bits(got) if got.dtype.kind == "f" else got).get().tobytes() == x.astype(got.dtype).tobytes()
        out = cupy.full(a.shape, np.nan, a.dtype)
        ell_buckets_to_dense(g, out)
        assert (bits(out).get() == bits(a.to_dense())).all()


@pytest.mark.gpu
def test_on_a_stream_of_its_own(only_edges: None) -> None:
    cupy = pytest.importorskip("cupy")
    a = drawn((300, 500), np.random.default_rng(3).integers(0, 200, 300))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(3):
            b = ELLBuckets.from_csr(a.to("cuda"), column_parts=2, max_width=32)
            back, dense = b.to_csr(), b.to_dense()
        stream.synchronize()
        assert back.to("cpu") == a
        assert (bits(dense).get() == bits(a.to_dense())).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_dense_and_back(dtype: str) -> None:
    cupy = pytest.importorskip("cupy")
    for make in CASES.values():
        x = make(dtype)
        on_device = cupy.asarray(x.view(VALUE_TYPES[dtype].bits)).view(x.dtype)
        for params in PARAMS:
            wanted = ELLBuckets.from_dense(x, **params)
            got = sf.convert(on_device, "ell-buckets", **params)
            assert got.to("cpu") == wanted
            assert (bits(got.to_dense()).get() == bits(wanted.to_dense())).all()
