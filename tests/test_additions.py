"""What an addition costs: a format with a compiled loop and an edge of a device, all of it in this file."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import laws
import numpy as np
import pytest
import stand_in_cupy
from cases import CASES
from catalogue import command

import spformat as sf
from spformat.arrays import scans
from spformat.arrays.dtypes import bits, nonzero_mask
from spformat.arrays.library import Array, index_dtype, namespace
from spformat.errors import OrderError, PatternError
from spformat.formats import edges, unregister
from spformat.formats.base import INDEX, VALUE, Format, array
from spformat.formats.edges import CHECK, DENSE, Edge
from spformat.preprocess.structure import analyse


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class COO(Format):
    """Coordinates: row, column and value of every nonzero, in row-major order."""

    name = "coo"

    rows: Array = array(INDEX, "nnz", bound="M-1", doc="row, not falling")
    cols: Array = array(INDEX, "nnz", bound="K-1", doc="column, strictly increasing in a row")
    data: Array = array(VALUE, "nnz", doc="value")

    def dims(self) -> dict[str, int]:
        return {"M-1": self.shape[0] - 1, "K-1": self.shape[1] - 1}

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        rows, cols = (index_dtype(n - 1) for n in shape)
        return {"rows": (rows, (nnz,)), "cols": (cols, (nnz,)), "data": (dtype, (nnz,))}

    def check_memory(self) -> None:
        scans.within(self, "rows", self.shape[0])
        scans.within(self, "cols", self.shape[1])

    def check_canonical(self) -> None:
        key = self.rows * np.int64(self.shape[1]) + self.cols
        scans.require_none(self, key[1:] <= key[:-1], "cols", "row-major order, no place twice", OrderError, 1)
        scans.require_none(self, ~nonzero_mask(self.data), "data", "no stored zero", PatternError)

    @classmethod
    def _from_csr(cls, a: sf.CSR, **params: Any) -> Self:
        a = a.without_zeros()
        rows = a.rows().astype(index_dtype(a.shape[0] - 1))
        return cls.trusted(shape=a.shape, rows=rows, cols=a.indices, data=a.data)

    def _to_csr(self) -> sf.CSR:
        return sf.CSR.from_coordinates(self.shape, self.rows, self.cols, self.data)


# ------------------------------------------------------------------ an edge of the host: one loop, one line


@functools.cache
def loop() -> Any:
    """The compiled loop; numba is imported when the first large array comes."""
    import numba

    @numba.njit(nogil=True)
    def items(x: Any, zero_mask: Any, rows: Any, cols: Any, data: Any) -> int:
        at = 0
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                if x[i, j] & zero_mask:
                    if at < rows.size:
                        rows[at], cols[at], data[at] = i, j, x[i, j]
                    at += 1
        return at

    return items


def coo_from_dense(x: Array, params: dict[str, Any]) -> COO:
    """Array [M, K] -> COO."""
    raw, (M, K) = bits(x), x.shape
    mask = raw.dtype.type(sf.formats.base.value_type(x.dtype).zero_mask)
    nothing = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, raw.dtype)
    nnz = loop()(raw, mask, *nothing)
    rows, cols = np.empty(nnz, index_dtype(M - 1)), np.empty(nnz, index_dtype(K - 1))
    data = np.empty(nnz, raw.dtype)
    loop()(raw, mask, rows, cols, data)
    return COO.trusted(shape=(M, K), rows=rows, cols=cols, data=data.view(x.dtype))


HOST = Edge(DENSE, "coo", "cpu", coo_from_dense, lambda x, elements: elements >= 64)


# ------------------------------------------------------------------ an edge of a device: one kernel, one line


SCATTER = r"""
extern "C" __global__ void scatter(const int* rows, const int* cols, const float* data, int nnz, long long K,
                                   float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < nnz) out[rows[i] * K + cols[i]] = data[i];
}
"""


def coo_to_dense_cuda(a: COO, params: dict[str, Any]) -> Array | None:
    """COO -> array [M, K]; float32 with 32-bit indices, the general code takes the rest."""
    import cupy

    if a.dtype != np.float32 or a.rows.dtype != np.int32 or a.cols.dtype != np.int32:
        return None
    out = a.empty_dense()
    if a.data.size:
        kernel = cupy.RawKernel(SCATTER, "scatter")
        nnz = a.data.size
        kernel((-(-nnz // 256),), (256,), (a.rows, a.cols, a.data, np.int32(nnz), np.int64(a.shape[1]), out))
    return out


DEVICE = Edge("coo", DENSE, "cuda", coo_to_dense_cuda)


@pytest.fixture
def coo(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[COO]]:
    """The format and its edges, registered for one test."""
    sf.register(COO)
    edges.register(HOST, DEVICE)
    yield COO
    edges.unregister(HOST, DEVICE)
    unregister("coo")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_the_laws_hold_for_the_format(coo: type[COO], case: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    x = CASES[case](dtype)
    a = laws.check_roundtrip(coo, {}, x)
    assert a is not None
    laws.check_edge(coo, {}, x)
    laws.check_container(a, tmp_path)
    whole = laws.integers(x)
    laws.check_spmm(coo.from_dense(whole), whole, "reference", 3, np.random.default_rng(0))
    assert a.T.to_csr() == sf.CSR.from_dense(np.ascontiguousarray(a.to_dense().T))


def test_the_loop_runs_where_it_is_worth_it(coo: type[COO], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    seen: list[tuple[int, ...]] = []
    original = loop()
    monkeypatch.setitem(globals(), "loop", lambda: lambda x, *rest: seen.append(x.shape) or original(x, *rest))
    sf.convert(np.eye(4, dtype=np.float32), "coo")
    assert seen == []
    a = sf.convert(np.eye(8, dtype=np.float32), "coo")
    assert seen == [(8, 8), (8, 8)]
    assert a.rows.tolist() == list(range(8))  # type: ignore[attr-defined]


def test_the_edge_of_the_device_runs_for_arrays_there(coo: type[COO], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the kernel is a stand-in that writes what it is asked to, the rest is as on a device."""
    cupy: Any = stand_in_cupy.module()
    launched: list[tuple[Any, ...]] = []

    def kernel(grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
        rows, cols, data, nnz, K, out = arguments
        launched.append((grid, block, int(nnz), int(K)))
        out[rows, cols] = data

    cupy.RawKernel = lambda source, name: kernel
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    x = np.array([[0, 1, 0], [2, 0, 3]], np.float32)
    a = sf.convert(x, "coo")
    np.testing.assert_array_equal(a.to_dense(), x)
    assert launched == []
    np.testing.assert_array_equal(a.to("cuda").to_dense(), x)
    assert launched == [((1,), (256,), 3, 3)]
    half = sf.convert(x.astype(np.float16), "coo").to("cuda")
    assert coo_to_dense_cuda(half, {}) is None  # type: ignore[arg-type] # the general code takes it
    assert len(launched) == 1


@pytest.mark.gpu
def test_the_edge_on_a_gpu(coo: type[COO]) -> None:
    for name, make in CASES.items():
        a = coo.from_dense(make("float32"))
        back = a.to("cuda").to_dense()
        assert namespace(back).__name__ == "cupy"
        assert laws.same(back.get(), a.to_dense()), name


def test_the_device_check_may_be_an_edge_too(coo: type[COO], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    scan = Edge("coo", CHECK, "cpu", lambda a, params: asked.append(a) or True)
    a = sf.convert(np.eye(4, dtype=np.float32), "coo")
    edges.register(scan)
    try:
        a.with_arrays().validate()
    finally:
        edges.unregister(scan)
    assert len(asked) == 1


def test_it_is_converted_inspected_and_chosen_from_by_name(coo: type[COO], tmp_path: Path) -> None:
    x = np.zeros((40, 60), np.float32)
    x[::7, ::11] = 1
    s = analyse(x)
    assert "coo" in s.candidates()
    assert s.sizes()["coo"] == sf.convert(x, "coo").nbytes
    sf.save_dense(tmp_path / "w.safetensors", {"w": x})
    (row,) = json.loads(command("inspect", tmp_path / "w.safetensors", "--json").out)["tensors"]
    assert row["sizes"]["coo"] == 36 * 12
    assert command("convert", tmp_path / "w.safetensors", tmp_path / "out", "--to", "coo").code == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert sf.load(file)["w"] == sf.convert(x, "coo")
    assert command("validate", tmp_path / "out").code == 0
    assert "coo" in command("formats").out
    one = np.zeros((1000, 1), np.float32)
    one[500] = 1
    assert analyse(one).smallest() == "coo"  # 12 bytes, where csr has a pointer of 4004


def test_it_may_be_a_part_of_a_sum(coo: type[COO], tmp_path: Path) -> None:
    x = np.eye(4, dtype=np.float32)
    a = sf.Sum.from_parts([sf.convert(x, "coo"), sf.convert(np.roll(x, 1, axis=1), "csr")])
    laws.check_container(a, tmp_path)
    np.testing.assert_array_equal(a.to_dense(), x + np.roll(x, 1, axis=1))


def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    with pytest.raises(sf.errors.UsageError, match="unknown format 'coo'"):
        sf.convert(np.eye(2, dtype=np.float32), "coo")
