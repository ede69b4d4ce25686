"""CSR on a device, from a dense array, back, and transposed, against the numpy code, the reference: the same bits."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
import pytest
from cases import CASES, sparse, values

from spformat.arrays.dtypes import VALUE_TYPES, bits
from spformat.arrays.segments import offsets_from_counts, pointer
from spformat.backends.cuda.csr import csr_from_dense, csr_transpose_tiles
from spformat.backends.cuda.runtime import jit, offsets
from spformat.formats import edges
from spformat.formats.csc import CSC
from spformat.formats.csr import CSR
from spformat.preprocess.structure import count_nonzeros

DTYPES = [name for name in VALUE_TYPES if not name.startswith("float8")]  # CuPy has no eight-bit floats
SHAPES = [(1, 1), (3, 5), (1, 4099), (4099, 1), (700, 3), (33, 70), (5, 4099), (2, 2048), (3, 2047), (2, 2049),
          (300, 8), (9, 1000), (1, 70_001), (40, 511), (40, 513), (1031, 2053)]  # fmt: skip
GIB = 1 << 30


def to_device(x: np.ndarray[Any, Any], shift: int = 0) -> Any:
    """A CuPy array with the bits of x that starts ``shift`` elements behind a boundary."""
    cupy = pytest.importorskip("cupy")
    raw = cupy.empty(x.size + shift, bits(x).dtype)
    raw[shift:] = cupy.asarray(bits(x).reshape(-1))
    return raw[shift:].reshape(x.shape).view(x.dtype)


def matrices(dtype: str) -> list[np.ndarray[Any, Any]]:
    """The named cases, and shapes whose rows are shorter, as long and longer than a piece; zeros of both signs."""
    rng = np.random.default_rng(1)
    out = [make(dtype) for make in CASES.values()]
    for shape in SHAPES:
        for density in (0.5, 0.05):
            x = sparse(rng, shape, dtype, density)
            raw = bits(x)
            raw[rng.random(shape) < 0.05] = 1 << (8 * x.itemsize - 1)  # -0, or a value of int8
            out.append(x)
    return [*out, values(rng, (70, 300), dtype)]


def assert_same(got: CSR, wanted: CSR) -> None:
    assert got.device.startswith("cuda")
    assert got.to("cpu") == wanted
    got.with_arrays().validate()


# ------------------------------------------------------------------ without a GPU


@pytest.mark.parametrize(
    "module", ["csr.csr_from_dense", "csr.csr_transpose", "csr.csr_transpose_tiles", "sr_bcrs.sr_bcrs_pieces"]
)
def test_launchers_know_the_constants_of_their_kernels(module: str) -> None:
    launcher = importlib.import_module(f"spformat.backends.cuda.{module}")
    text = (jit.HERE / launcher.SOURCE).read_text()
    found = dict(re.findall(r"(\w+) = (\d+)[,;]", "".join(re.findall(r"constexpr int .*", text))))
    shared = [name for name in found if hasattr(launcher, name)]
    assert len(shared) >= 1
    for name in shared:
        assert int(found[name]) == getattr(launcher, name), name
    if module == "csr.csr_transpose_tiles":
        stage, least = re.findall(r"CAPACITY = (\d+) / \(sizeof\(T\) > 2 \? sizeof\(T\) : (\d+)\)", text)[0]
        assert all(launcher._capacity(size) == int(stage) // max(int(least), size) for size in (1, 2, 4, 8))
    if "TILE" in vars(launcher):
        assert int(found["THREADS"]) * int(found["EACH"]) == launcher.TILE


def test_the_launcher_of_offsets_knows_the_constants_of_its_header() -> None:
    text = (jit.INCLUDE / "spformat/look_back.cuh").read_text()
    found = {name: int(number) for name, number in re.findall(r"(OFFSETS_\w+) = (\d+)", text)}
    assert found["OFFSETS_THREADS"] == offsets.THREADS
    assert found["OFFSETS_THREADS"] * found["OFFSETS_EACH"] == offsets.TILE


def test_the_transpose_asks_for_an_edge_first() -> None:
    a = CSR.from_dense(np.array([[0, 2, 0], [1, 0, 3]], np.float32))
    wanted, asked = a.transposed(), []

    def answered(x: CSR, params: dict[str, Any]) -> CSR | None:
        asked.append(x)
        return wanted if len(asked) == 1 else None

    edge = edges.Edge("csr", edges.TRANSPOSED, "cpu", answered)
    edges.register(edge)
    try:
        assert a.T.to_csr() is wanted
        assert CSC.from_csr(a).transposed_csr() == wanted  # an edge that refuses leaves it to the general code
    finally:
        edges.unregister(edge)
    assert [x is a for x in asked] == [True, True]


def test_tiles_are_for_matrices_with_items_in_many_columns() -> None:
    assert csr_transpose_tiles.fits((128, 257), 128 * 257 // 32)
    for shape, items in (((127, 257), 127 * 257), ((128, 256), 128 * 256), ((128, 257), 128 * 257 // 32 - 1)):
        assert not csr_transpose_tiles.fits(shape, items)


# ------------------------------------------------------------------ with one


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_to_csr_and_back(dtype: str) -> None:
    for x in matrices(dtype):
        wanted = CSR._from_dense(x)
        for shift in (0, 1, 16 // x.itemsize - 1):
            on_device = to_device(x, shift)
            got = CSR.from_dense(on_device)
            assert_same(got, wanted)
            assert got.to_dense().get().tobytes() == wanted._to_dense().tobytes()
            assert count_nonzeros(on_device) == count_nonzeros(x)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_matrices(shape: tuple[int, int]) -> None:
    x = np.zeros(shape, np.float32)
    got = CSR.from_dense(to_device(x))
    assert_same(got, CSR.from_dense(x))
    assert got.to_dense().shape == shape
    assert_same(got.T.to_csr(), CSR.from_dense(x.T))
    assert count_nonzeros(to_device(x)) == (0, 0)


@pytest.mark.gpu
def test_stored_zeros_are_written_with_their_bits() -> None:
    a = CSR(shape=(2, 3), indptr=np.array([0, 1, 2], np.int32), indices=np.array([2, 0], np.int32),
            data=np.array([-0.0, 5], np.float32))  # fmt: skip
    assert a.to("cuda").to_dense().get().tobytes() == a.to_dense().tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed(dtype: str) -> None:
    for x in matrices(dtype):
        a = CSR.from_dense(x)
        there = a.to("cuda")
        assert_same(there.T.to_csr(), a.transposed())
        csc = CSC.from_csr(there)
        assert csc.to("cpu") == CSC.from_csr(a)
        assert_same(csc.to_csr(), a)
        assert csc.to_dense().get().tobytes() == a.to_dense().tobytes()


@pytest.mark.gpu
def test_transposed_with_more_columns_than_one_pass_sorts() -> None:
    rng = np.random.default_rng(2)
    for M, K, n in ((50_000, 1 << 24, 3000), (3, 70_001, 5000), (200_000, 70_001, 100_000), (1 << 20, 5, 40_000)):
        key = np.unique(rng.integers(0, M * K, n))
        a = CSR.from_coordinates((M, K), key // K, key % K, values(rng, key.shape, "float16"))
        assert_same(a.to("cuda").transposed(), a.transposed())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_by_tiles(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items spread evenly, in few rows or few columns, full tiles that a block stages in parts; both widths of indices."""
    rng = np.random.default_rng(4)
    for shape in ((128, 257), (129, 600), (300, 1111), (257, 4100)):
        x = values(rng, shape, dtype)
        rows, columns = np.ogrid[: shape[0], : shape[1]]
        nowhere, full = np.zeros(shape, bool), np.ones(shape, bool)
        for keep in (
            rng.random(shape) < 0.04, rng.random(shape) < 0.5, full, nowhere | (rows % 9 == 8), nowhere | (columns % 11 == 3),
            (rows < 128) & (columns < 550), (columns + rows) % 2 == 0,
        ):  # fmt: skip
            bits(x)[:] = np.where(keep, bits(values(rng, shape, dtype)), 0)
            a = CSR.from_dense(x)
            if not csr_transpose_tiles.fits(shape, a.nnz):
                continue
            there = a.to("cuda")
            monkeypatch.undo()
            assert_same(there.transposed(), a.transposed())
            monkeypatch.setattr(csr_transpose_tiles, "LEAST_TILES", 1)  # tiles as wide as a block takes
            wide = there.indptr.astype("int64"), there.indices.astype("int64"), there.data
            indptr, indices, data = csr_transpose_tiles.transposed(shape, *wide)
            assert_same(CSR(shape=shape[::-1], indptr=indptr, indices=indices, data=data), a.transposed())


@pytest.mark.gpu
def test_offsets() -> None:
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(3)
    sizes = (0, 1, 31, 4095, 4096, 4097, 70_000, 3_000_017)
    for n, dtype, bound in ((n, t, b) for n in sizes for t in ("uint32", "uint64") for b in (2**31 - 1, 2**40)):
        counts = rng.integers(0, 600, n).astype(dtype)
        wanted = offsets_from_counts(counts)
        for _ in range(2):  # the scratch memory is left as it was
            there = cupy.asarray(counts)
            got = offsets.Offsets(there, bound)
            assert got.total() == int(wanted[-1])
            assert got.starts.dtype == (np.int32 if bound < 2**31 else np.int64)
            np.testing.assert_array_equal(got.starts.get(), wanted)
            indptr, total = got.indptr()
            assert (indptr.dtype, total) == (pointer(counts, total).dtype, int(wanted[-1]))
            np.testing.assert_array_equal(offsets.starts_of(there, bound).get(), wanted)


@pytest.mark.gpu
@pytest.mark.device_memory
def test_more_columns_than_int32_counts() -> None:
    """One row of 2^31 + 4099 elements, eleven of them nonzero: int64 columns."""
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.Device().mem_info[0] < 12 * GIB:
        pytest.skip("needs 12 GiB of device memory")
    K = 2**31 + 4099
    at = np.array([0, 1, 2047, 2048, 2**20, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 2048, K - 2, K - 1])
    x = cupy.zeros((1, K), np.int8)
    x[0, cupy.asarray(at)] = cupy.arange(1, 12, dtype=np.int8)
    a = CSR.from_dense(x)
    assert (a.indptr.dtype, a.indices.dtype) == (np.int32, np.int64)
    assert a.indptr.tolist() == [0, 11]
    assert a.indices.tolist() == at.tolist()
    assert a.data.tolist() == list(range(1, 12))
    assert count_nonzeros(x) == (11, 0)
    assert bool((a.to_dense() == x).all())


@pytest.mark.gpu
@pytest.mark.device_memory
def test_more_nonzeros_than_int32_counts() -> None:
    """Two full rows of 2^30 + 3 elements: an int64 indptr."""
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.Device().mem_info[0] < 40 * GIB:
        pytest.skip("needs 40 GiB of device memory")
    K = 2**30 + 3
    a = CSR.from_dense(cupy.ones((2, K), np.int8))
    assert (a.indptr.dtype, a.indices.dtype) == (np.int64, np.int32)
    assert a.indptr.tolist() == [0, K, 2 * K]
    assert int(a.indices[0]) == 0
    assert int(a.indices[K - 1]) == K - 1
    assert int(a.indices[K]) == 0
    assert int(a.indices[-1]) == K - 1
    assert bool((a.indices[1:K] - a.indices[: K - 1] == 1).all())
    assert bool((a.indices[K + 1 :] - a.indices[K:-1] == 1).all())
    assert bool((a.data == 1).all())


@pytest.mark.gpu
def test_pieces_start_at_the_boundary_before_the_array() -> None:
    x = to_device(np.ones((1, 2048), np.float16), shift=7)
    assert csr_from_dense.pieces_of(x) == (2048, 2)
    assert csr_from_dense.pieces_of(x[:, 1:]) == (2048, 1)
