"""A format and its edges: one file, one line each (docs/adding-a-format.md, docs/adding-an-edge.md)."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import laws
import numpy as np
import pytest
import stand_in_cupy
from cases import CASES
from catalogue import command

import spformat as sf
from additions import coordinates
from additions.coordinates import Coordinates, coordinates_to_dense_cuda, loop
from spformat import backends
from spformat.arrays.library import namespace
from spformat.formats import composed, edges, registered, unregister
from spformat.formats.base import Format
from spformat.formats.composed import Composed
from spformat.formats.declare import part
from spformat.formats.edges import CHECK, Edge
from spformat.preprocess.structure import analyse


def test_a_format_is_listed_while_it_is_registered() -> None:
    """The lists are remembered; so are the formats that the reference and a stored transpose take."""

    def names() -> list[set[str]]:
        reference = next(k for k in backends.get("reference").kernels() if k.name == "reference.spmm")
        copy = next(k for k in backends.get("composed").kernels() if k.name == "composed.transposed_copy")
        return [{f.name for f in registered()}, {f for _, f in reference.takes}, {f for _, f in copy.takes}]

    before = names()
    sf.register(Coordinates)
    try:
        assert names() == [known | {"coordinates"} for known in before]
    finally:
        unregister("coordinates")
    assert names() == before


def test_a_composed_format_is_listed_while_it_is_registered() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
    class Pair(Composed):
        name = "pair"
        parts: tuple[Format, ...] = part(many=True)

    listed, others = composed(), registered()
    sf.register(Pair)
    try:
        assert composed() == (*listed, Pair)
        assert registered() == others
    finally:
        unregister("pair")
    assert composed() == listed


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_the_laws_hold_for_the_format(added: type[Coordinates], case: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    x = CASES[case](dtype)
    a = laws.check_roundtrip(added, {}, x)
    assert a is not None
    laws.check_edge(added, {}, x)
    laws.check_container(a, tmp_path)
    whole = laws.integers(x)
    laws.check_spmm(added.from_dense(whole), whole, "reference", 3, np.random.default_rng(0))
    assert a.T.to_csr() == sf.CSR.from_dense(np.ascontiguousarray(a.to_dense().T))


def test_the_loop_runs_where_it_is_worth_it(added: type[Coordinates], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    seen: list[tuple[int, ...]] = []
    original = loop()
    monkeypatch.setattr(coordinates, "loop", lambda: lambda x, *rest: seen.append(x.shape) or original(x, *rest))
    sf.convert(np.eye(4, dtype=np.float32), "coordinates")
    assert seen == []
    a = sf.convert(np.eye(8, dtype=np.float32), "coordinates")
    assert seen == [(8, 8), (8, 8)]
    assert a.rows.tolist() == list(range(8))  # type: ignore[attr-defined]


def test_the_edge_of_the_device_runs_for_arrays_there(
    added: type[Coordinates], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    a = sf.convert(x, "coordinates")
    np.testing.assert_array_equal(a.to_dense(), x)
    assert launched == []
    np.testing.assert_array_equal(a.to("cuda").to_dense(), x)
    assert launched == [((1,), (256,), 3, 3)]
    half = sf.convert(x.astype(np.float16), "coordinates").to("cuda")
    assert coordinates_to_dense_cuda(half, {}) is None  # type: ignore[arg-type] # the general code takes it
    assert len(launched) == 1


@pytest.mark.gpu
def test_the_edge_on_a_gpu(added: type[Coordinates]) -> None:
    for name, make in CASES.items():
        a = added.from_dense(make("float32"))
        back = a.to("cuda").to_dense()
        assert namespace(back).__name__ == "cupy"
        assert laws.same(back.get(), a.to_dense()), name


def test_the_device_check_may_be_an_edge_too(added: type[Coordinates], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    scan = Edge("coordinates", CHECK, "cpu", lambda a, params: asked.append(a) or True)
    a = sf.convert(np.eye(4, dtype=np.float32), "coordinates")
    edges.register(scan)
    try:
        a.with_arrays().validate()
    finally:
        edges.unregister(scan)
    assert len(asked) == 1


def test_it_is_converted_inspected_and_chosen_from_by_name(added: type[Coordinates], tmp_path: Path) -> None:
    x = np.zeros((40, 60), np.float32)
    x[::7, ::11] = 1
    s = analyse(x)
    assert "coordinates" in s.candidates()
    assert s.sizes()["coordinates"] == sf.convert(x, "coordinates").nbytes
    sf.save_dense(tmp_path / "w.safetensors", {"w": x})
    (row,) = json.loads(command("inspect", tmp_path / "w.safetensors", "--json").out)["tensors"]
    assert row["sizes"]["coordinates"] == 36 * 12
    assert command("convert", tmp_path / "w.safetensors", tmp_path / "out", "--to", "coordinates").code == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert sf.load(file)["w"] == sf.convert(x, "coordinates")
    assert command("validate", tmp_path / "out").code == 0
    assert "coordinates" in command("formats").out
    one = np.zeros((1000, 1), np.float32)
    one[500] = 1
    assert analyse(one).smallest() == "coordinates"  # 12 bytes, where csr has a pointer of 4004


def test_it_may_be_a_part_of_a_sum(added: type[Coordinates], tmp_path: Path) -> None:
    x = np.eye(4, dtype=np.float32)
    a = sf.Sum.from_parts([sf.convert(x, "coordinates"), sf.convert(np.roll(x, 1, axis=1), "csr")])
    laws.check_container(a, tmp_path)
    np.testing.assert_array_equal(a.to_dense(), x + np.roll(x, 1, axis=1))


def test_nothing_of_it_is_left(tmp_path: Path) -> None:
    with pytest.raises(sf.errors.UsageError, match="unknown format 'coordinates'"):
        sf.convert(np.eye(2, dtype=np.float32), "coordinates")
