"""Bitmask from and to dense, CSR and 2:4 on a device against the numpy code, the reference: same bits, same refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import CASES, sparse

from spformat import CSR, Bitmask, TwoFour
from spformat.arrays.dtypes import bits, nonzero_mask
from spformat.arrays.library import index_dtype
from spformat.backends.cuda.bitmask import bitmask_from_csr, bitmask_pack, bitmask_two_four, bitmask_unpack
from spformat.backends.cuda.runtime import jit
from spformat.errors import LimitError, StructureError
from spformat.formats import edges
from spformat.formats.base import Format
from spformat.formats.convert import convert
from spformat.formats.meta_orders import META_ORDERS
from spformat.limits import using
from spformat.preprocess import masks

DTYPES = ("float64", "float32", "float16", "bfloat16", "int8")
SHAPES = [
    (1, 1), (3, 11), (1, 8), (8, 1), (5, 8), (7, 16), (33, 70), (64, 128), (19, 1000), (2, 4097), (1, 40000), (700, 3),
    (130, 65), (9, 2056), (2, 150_005), (1, 300_000), (20_011, 3), (1100, 1), (257, 8192), (0, 8), (8, 0),
]  # fmt: skip
"""Rows of whole bytes and others; rows longer than a tile and many in one; rows so long that bits are counted before."""
DENSITIES = (0.5, 0.02, 1.0, 0.0)


def matrices(dtype: str) -> Iterator[Any]:
    """Arrays with special values, and zeros of both signs."""
    rng = np.random.default_rng(5)
    for make in CASES.values():
        yield make(dtype)
    for i, shape in enumerate(SHAPES):
        x = sparse(rng, shape, dtype, DENSITIES[i % 4])
        if dtype != "int8":
            bits(x)[rng.random(shape) < 0.05] = 1 << (8 * x.itemsize - 1)  # -0.0
        yield x


def with_zeros(x: Any) -> CSR:
    """The CSR of the nonzeros of x and of some of its zeros, of both signs."""
    kept = nonzero_mask(x) | (np.random.default_rng(6).random(x.shape) < 0.1)
    rows, cols = np.nonzero(kept)
    return CSR.from_coordinates(x.shape, rows, cols, x[kept])


def fitting(x: Any) -> Any:
    """x with at most two nonzeros in every four columns."""
    y, K = x.copy(), x.shape[1]
    raw = bits(y)
    for first, others in ((0, (2, 3)), (1, (0, 2))):
        for k in others:
            raw[first::2, k:K:4] = 0
    return y


def to_device(x: Any) -> Any:
    """x on the device, its bits as they are."""
    cupy = pytest.importorskip("cupy")
    return cupy.asarray(np.ascontiguousarray(x).view(f"u{x.itemsize}")).view(x.dtype)


def on_device(f: Format) -> Any:
    """f on the device, its bits as they are."""
    arrays = {k: to_device(v) if isinstance(v, np.ndarray) else v for k, v in f.fields().items()}
    return type(f).trusted(**arrays)


def widened(f: Any) -> Any:
    """The same matrix with int64 indices, which only larger ones have."""
    for key in ("indptr", "indices"):
        if key in f.arrays():
            object.__setattr__(f, key, getattr(f, key).astype(np.int64))
    return f


# ------------------------------------------------------------------ without a GPU


def constants(source: str) -> dict[str, int]:
    """Name -> value of the integer constants in a source."""
    text = (jit.HERE / source).read_text()
    lines = re.findall(r"^constexpr int (.*?);", text, re.MULTILINE)
    return {name: int(value) for line in lines for name, value in re.findall(r"(\w+) = (\d+)", line)}


def test_launchers_and_kernels_agree_on_their_constants() -> None:
    tiles = constants("include/spformat/flat_tiles.cuh")
    assert (tiles["TILE_THREADS"], tiles["TILE_BYTES"]) == (bitmask_pack.THREADS, bitmask_pack.TILE)
    assert constants("include/spformat/bitmask_rank.cuh")["CHUNK"] == bitmask_unpack.CHUNK
    images = constants(bitmask_from_csr.SOURCE)
    assert (images["IMAGE_WARPS"], images["IMAGE"]) == (bitmask_from_csr.WARPS, bitmask_from_csr.IMAGE)


@pytest.mark.parametrize("K", [1, 7, 8, 9, 127, 128, 129, 2048, 2049, 4096, 4097, 8192, 100_000])
def test_warps_take_every_column_once_in_whole_bytes(K: int) -> None:
    segments, width, rows = bitmask_from_csr.cut(K)
    assert width % 8 == 0
    assert width * rows <= bitmask_from_csr.IMAGE
    assert 32 % rows == 0
    assert rows == 1 or (segments, width) == (1, 8 * -(-K // 8))
    assert (segments - 1) * width < K <= segments * width


class Answer:
    """What ``Counters`` give back."""

    def __init__(self, first: int) -> None:
        self._first = first

    def get(self) -> tuple[int, int]:
        return self._first, 0


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Numpy code in place of the kernels, and host arrays in place of a device's. Gives the names of the kernels that
    ran; the general code of Bitmask and the decoding of 2:4 must not."""
    ran: list[str] = []
    of_dense, of_csr, csr_of = Bitmask._from_dense, Bitmask._from_csr, Bitmask._to_csr

    def arrays(a: Bitmask) -> tuple[Any, Any, Any]:
        return a.indptr, a.bitmask, a.data

    def matrix(indptr: Any, bitmask: Any, data: Any, K: int) -> Bitmask:
        return Bitmask.trusted(shape=(len(bitmask), K), indptr=indptr, bitmask=bitmask, data=data)

    def from_dense(x: Any) -> Any:
        ran.append("from_dense")
        return arrays(of_dense(x))

    def to_dense(indptr: Any, bitmask: Any, data: Any, out: Any) -> None:
        ran.append("to_dense")
        stored = np.unpackbits(bitmask, axis=1, count=out.shape[1], bitorder="little").astype(bool)
        out[...] = 0
        out[stored] = data

    def columns(indptr: Any, bitmask: Any, K: int, nnz: int) -> Any:
        ran.append("columns")
        return csr_of(matrix(indptr, bitmask, np.zeros(nnz, np.int8), K)).indices

    def from_csr(shape: Any, indptr: Any, indices: Any, data: Any) -> Any:
        ran.append("from_csr")
        a = CSR.trusted(shape=shape, indptr=indptr, indices=indices, data=data)
        return of_csr(a).bitmask, Answer(a.stored_zeros)

    monkeypatch.setattr(bitmask_pack, "bitmask_from_dense", from_dense)
    monkeypatch.setattr(bitmask_unpack, "bitmask_to_dense", to_dense)
    monkeypatch.setattr(bitmask_unpack, "bitmask_columns", columns)
    monkeypatch.setattr(bitmask_from_csr, "bitmask_from_csr", from_csr)
    monkeypatch.setattr(edges, "is_cupy", lambda x: True)
    for name in ("_from_dense", "_from_csr", "_to_dense", "_to_csr"):
        monkeypatch.setattr(Bitmask, name, None)
    return ran


def test_edges_assemble_what_the_kernels_write(kernels: list[str]) -> None:
    x = np.array([[1, 0, -0.0, 2], [0, 0, 0, 0], [0, 3, 0, 0]], np.float32)
    a = Bitmask.from_dense(x)
    assert (a.indptr.tolist(), a.bitmask.tolist(), a.data.tolist()) == ([0, 2, 2, 3], [[9], [0], [2]], [1, 2, 3])
    np.testing.assert_array_equal(a.to_dense(), x)
    c = a.to_csr()
    assert (c.indices.tolist(), c.indices.dtype) == ([0, 3, 1], np.int32)
    assert c.data is a.data
    assert Bitmask.from_csr(c) == Bitmask.from_csr(with_zeros(x)) == a
    assert kernels == ["from_dense", "to_dense", "columns", "from_csr", "from_csr"]


def test_two_four_and_bitmask_are_converted_without_csr(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((33, 70), np.float16)
    x[:, ::4], x[3, 1::4] = 1, 2
    a, packed = Bitmask.from_dense(x), TwoFour.from_dense(x, meta_order="fragment")
    refusal = (0, 0, 0)

    def unpack(shape: Any, data: Any, meta: Any, steps: Any) -> Any:
        assert (shape, data is packed.data, meta is packed.meta) == (x.shape, True, True)
        return a.indptr, a.bitmask, a.data

    def pack(indptr: Any, bitmask: Any, values: Any, nibbles: int, steps: Any, data: Any, meta: Any) -> Any:
        assert values is a.data
        data[...], meta[...] = packed.data, packed.meta
        return refusal

    monkeypatch.setattr(edges, "is_cupy", lambda x: True)
    monkeypatch.setattr(bitmask_two_four, "bitmask_from_two_four", unpack)
    monkeypatch.setattr(bitmask_two_four, "bitmask_to_two_four", pack)
    monkeypatch.setattr(Bitmask, "to_csr", None)
    monkeypatch.setattr(TwoFour, "to_csr", None)
    assert convert(packed, "bitmask") == a
    assert convert(a, "two-four", meta_order="fragment") == packed
    refusal = (5, 3 * 32 + 2, 4)  # Kp = 128: 32 groups a row
    with pytest.raises(StructureError) as e:
        convert(a, "two-four")
    assert (e.value.count, e.value.first, e.value.found) == (5, (3, 2), 4)
    with using(memory=4000), pytest.raises(LimitError, match="two-four: arrays of a matrix of shape"):
        convert(a, "two-four")


# ------------------------------------------------------------------ on a GPU


@pytest.fixture
def only_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general code must not run."""
    for name in ("_from_dense", "_from_csr", "_to_csr"):
        monkeypatch.setattr(Bitmask, name, None)


@pytest.mark.gpu
@pytest.mark.parametrize("long_row", [bitmask_unpack.LONG_ROW, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_like_numpy(dtype: str, long_row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [(x, Bitmask.from_dense(x)) for x in matrices(dtype)]
    for x, a in wanted:
        y = a.to_dense()
        with monkeypatch.context() as m:
            m.setattr(bitmask_unpack, "LONG_ROW", long_row)
            if x.size:
                m.setattr(Bitmask, "_from_dense", None)
                m.setattr(Bitmask, "_to_dense", None)
            got = convert(to_device(x), "bitmask")
            assert got.to("cpu") == a, f"{x.shape} {dtype}"
            for f in (got, widened(on_device(a))):
                np.testing.assert_array_equal(bits(f.to_dense()).get(), bits(y), f"{x.shape} {dtype}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_csr_like_numpy(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for x in matrices(dtype):
        c = CSR.from_dense(x)
        a = Bitmask.from_dense(x)
        zeros = with_zeros(x)
        with monkeypatch.context() as m:
            if x.size:
                m.setattr(Bitmask, "_from_csr", None)
                m.setattr(Bitmask, "_to_csr", None)
            for source in (c, zeros):
                assert Bitmask.from_csr(on_device(source)).to("cpu") == a, f"{x.shape} {dtype}"
            assert on_device(a).to_csr().to("cpu") == c, f"{x.shape} {dtype}"
            wide = Bitmask.from_csr(widened(on_device(c)))
            assert wide.to("cpu") == a, f"{x.shape} {dtype}, int64 indices"
            assert wide.indptr.dtype == index_dtype(a.nnz)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("order", META_ORDERS)
def test_two_four_like_numpy(order: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for x in map(fitting, matrices(dtype)):
        t, a = TwoFour.from_dense(x, meta_order=order), Bitmask.from_dense(x)
        with monkeypatch.context() as m:
            if x.size:
                m.setattr(Bitmask, "to_csr", None)
                m.setattr(TwoFour, "to_csr", None)
            assert convert(on_device(t), "bitmask").to("cpu") == a, f"{x.shape} {dtype}"
            for f in (on_device(a), *([widened(on_device(a))] if x.size else [])):
                assert convert(f, "two-four", meta_order=order).to("cpu") == t, f"{x.shape} {dtype}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_two_four_refused_like_numpy(dtype: str) -> None:
    for shape in ((1, 3), (33, 70), (64, 128), (5, 4099), (300, 8192)):
        x = fitting(sparse(np.random.default_rng(2), shape, dtype, 0.9))
        x[shape[0] // 2, :3] = 1
        x[-1, -3:] = 1
        seen = []
        for a in (Bitmask.from_dense(x), on_device(Bitmask.from_dense(x))):
            with pytest.raises(StructureError) as e:
                convert(a, "two-four")
            seen.append((str(e.value), e.value.fields))
        assert seen[0] == seen[1], shape


@pytest.mark.gpu
@pytest.mark.usefixtures("only_kernels")
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_streams(dtype: str) -> None:
    """Matrices that start at every place between two 16-byte boundaries, one with a pitch, one on another stream."""
    cupy = pytest.importorskip("cupy")
    x = sparse(np.random.default_rng(8), (50, 264), dtype, 0.5)
    c = masks.apply(x, nonzero_mask(x))
    raw, word = bits(x), bits(x).dtype
    sources = []
    for shift in range(16 // x.itemsize):
        flat = cupy.zeros(x.size + shift, word)
        flat[shift:] = cupy.asarray(raw.reshape(-1))
        sources.append(flat[shift:].reshape(x.shape))
    wide = cupy.zeros((50, 300), word)
    wide[:, :264] = cupy.asarray(raw)
    sources.append(wide[:, :264])
    for source in sources:
        got = convert(source.view(x.dtype), "bitmask")
        np.testing.assert_array_equal(bits(got.to_dense()).get(), bits(c))
        np.testing.assert_array_equal(bits(got.data).get(), raw[nonzero_mask(x)])
    with cupy.cuda.Stream(non_blocking=True):
        got = convert(to_device(x), "bitmask")
        np.testing.assert_array_equal(bits(got.to_dense()).get(), bits(c))


@pytest.mark.gpu
@pytest.mark.device_memory
@pytest.mark.usefixtures("only_kernels")
@pytest.mark.parametrize("shape", [(3, 2**30), (2**30 + 5, 3)])
def test_more_elements_than_32_bits_count(shape: tuple[int, int]) -> None:
    """3 * 2^30 elements, of which few are not zero, among them the last one."""
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.Device().mem_info[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of device memory")
    M, K = shape
    at = np.unique(np.append(np.random.default_rng(1).integers(0, M * K, 5000), M * K - 1))
    x = cupy.zeros(M * K, cupy.int8)
    x[cupy.asarray(at)] = cupy.asarray(at % 100 + 1).astype(cupy.int8)
    with using(memory=2**40):
        a = convert(x.reshape(shape), "bitmask")
        assert (a.nnz, a.indptr.dtype) == (len(at), np.int32)
        np.testing.assert_array_equal(a.data.get(), at % 100 + 1)
        np.testing.assert_array_equal(
            a.indptr[:: max(1, M // 3)].get(), np.searchsorted(at, np.arange(0, M + 1, max(1, M // 3)) * K)
        )
        assert bool((a.to_dense().reshape(-1) == x).all())
        c = a.to_csr()
        np.testing.assert_array_equal(c.indices.get(), at % K)
        assert bool((Bitmask.from_csr(c).bitmask == a.bitmask).all())
