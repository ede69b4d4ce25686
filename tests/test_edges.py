"""The table of edges: which are asked, in which order, and when the code of their providers is imported."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_in_cupy
from cases import params_of

import spformat as sf
from spformat import backends
from spformat.backends.cuda import edges as cuda_edges
from spformat.backends.cuda.edges import EDGES
from spformat.backends.cuda.two_four import two_four_pack
from spformat.backends.cuda.vector_nm import vector_nm_convert
from spformat.formats import edges, registered
from spformat.formats.edges import Edge
from spformat.formats.fast import compiled
from spformat.formats.meta_orders import meta_places
from spformat.formats.two_four import NIBBLES
from spformat.preprocess import masks


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of our own, empty."""
    monkeypatch.setattr(edges, "_table", {})
    monkeypatch.setattr(edges, "_waiting", {"cpu": [], "cuda": []})


X = np.array([[1, 0], [0, 2]], np.float32)


@pytest.mark.usefixtures("table")
def test_the_last_registered_is_asked_first_and_none_passes_on() -> None:
    asked: list[str] = []

    def edge(name: str, answer: Any) -> Edge:
        return Edge("dense", "csr", "cpu", lambda x, params: asked.append(name) or answer)

    first, second, third = edge("first", "one"), edge("second", None), edge("third", None)
    edges.register(first, second)
    edges.register(third)
    assert edges.take("dense", "csr", X, {}, X) == "one"
    assert asked == ["third", "second", "first"]
    edges.unregister(third, first)
    asked.clear()
    assert edges.take("dense", "csr", X, {}, X) is None
    assert asked == ["second"]
    assert edges.take("csr", "dense", X, {}, X) is None


@pytest.mark.usefixtures("table")
def test_an_edge_says_which_sizes_it_is_worth() -> None:
    sizes = []
    edges.register(Edge("csr", "dense", "cpu", lambda x, _: x, lambda x, n: sizes.append(n) or n > 100))
    assert edges.find("csr", "dense", X) == ()
    assert len(edges.find("csr", "dense", X, 101)) == 1
    assert sizes == [4, 101]


@pytest.mark.usefixtures("table")
def test_providers_are_asked_once_at_the_first_array_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    own, given = (Edge("dense", "csr", "cuda", lambda x, _, who=who: who) for who in ("own", "given"))
    edges.provide("cuda", lambda: calls.append("cuda") or (given,))
    edges.register(own)
    edges.find("dense", "csr", X)
    assert calls == []
    cupy = stand_in_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    x = cupy.asarray(X)
    assert edges.find("dense", "csr", x) == edges.find("dense", "csr", x) == (own, given)
    assert calls == ["cuda"]


@pytest.mark.usefixtures("table")
def test_a_provider_that_fails_is_asked_again() -> None:
    answers = [ImportError("not today"), (Edge("dense", "csr", "cpu", lambda x, _: "edge"),)]

    def provider() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, ImportError):
            raise answer
        return answer

    edges.provide("cpu", provider)
    with pytest.raises(ImportError, match="not today"):
        edges.find("dense", "csr", X)
    assert edges.take("dense", "csr", X, {}, X) == "edge"


def test_conversions_checks_and_decoding_go_through_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "_table", dict(edges._table))
    seen: list[tuple[str, str]] = []

    def watch(source: str, target: str) -> Edge:
        return Edge(source, target, "cpu", lambda given, params: seen.append((source, target)))

    pairs = [("dense", "bsr"), ("csr", "bsr"), ("bsr", "csr"), ("bsr", "dense"), ("bsr", "check")]
    pairs.append(("bsr", "transposed"))
    edges.register(*(watch(*p) for p in pairs))
    a = sf.BSR.from_dense(X, blocksize=(1, 1))
    sf.BSR.from_csr(a.to_csr(), blocksize=(1, 1))
    np.testing.assert_array_equal(a.to_dense(), X)
    a.validate()
    assert (a.T.materialize().to_dense() == X.T).all()
    wanted = [("dense", "bsr"), ("bsr", "csr"), ("csr", "bsr"), ("bsr", "dense"), ("bsr", "check")]
    assert seen == [*wanted, ("bsr", "transposed"), ("bsr", "dense")]


def test_convert_asks_for_an_edge_between_two_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a valid matrix and the parameters of the target; without an answer the way leads through CSR."""
    monkeypatch.setattr(edges, "_table", dict(edges._table))
    a, answers = sf.BSR.from_dense(X, blocksize=(1, 1)), [None, "edge"]
    seen: list[Any] = []
    edges.register(Edge("bsr", "two-four:32-bit", "cpu", lambda f, params: seen.append((f, params)) or answers.pop(0)))
    assert sf.convert(a, "two-four", meta_order="logical") == sf.TwoFour.from_dense(X, meta_order="logical")
    assert sf.convert(a, "two-four") == "edge"
    assert seen == [(a, {"meta_order": "logical"}), (a, {"meta_order": "ldmatrix"})]
    outside = a.with_arrays(indices=a.indices + np.int32(7))
    with pytest.raises(sf.errors.IndexBoundsError):
        sf.convert(outside, "two-four")
    with pytest.raises(sf.errors.UsageError, match="meta_order"):
        sf.convert(a, "two-four", meta_order="random")
    assert len(seen) == 2


@pytest.mark.parametrize("edge", EDGES, ids=lambda e: f"{e.source}-{e.target}")
def test_an_edge_of_cuda_starts_and_ends_at_a_format(edge: Edge) -> None:
    names = {f.name for f in registered()}
    ends = {edge.source, edge.target} - {
        edges.DENSE,
        edges.CHECK,
        edges.TRANSPOSED,
        "counts",
        "census",
    }  # the last two: no matrix comes out
    assert {e.partition(":")[0] for e in ends} <= names
    assert edge.device == "cuda"


def test_small_conversions_import_no_code_of_a_device_and_no_numba() -> None:
    code = (
        "import sys, numpy as np, spformat as sf\n"
        "sf.convert(np.eye(4, dtype=np.float32), 'csr').validate().to_dense()\n"
        "assert {'numba', 'numpy.ma', 'spformat.backends.cuda'}.isdisjoint(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Counters:
    """What a kernel of vector n:m reports, as the launchers give it back."""

    def __init__(self, refused: tuple[int, int, int]) -> None:
        count, first, found = refused
        self._words = count, 2**64 - 1 - (first << 9 | found)

    def get(self) -> tuple[int, int]:
        return self._words


FITTING = [("two-four", {"meta_order": o}) for o in ("logical", "cutlass-sm80")] + [
    ("vector-nm", {"n": 2, "m": 4, "vector_length": 1}),
    ("vector-nm", {"n": 2, "m": 4, "vector_length": 1, "tile_rows": 16, "tile_cols": 8}),
]


@pytest.mark.parametrize(("name", "params"), FITTING, ids=str)
def test_edges_of_cuda_do_around_a_kernel_what_is_to_be_done(
    name: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops of the host stand in for the kernels: same arguments, same arrays. The general code is the reference."""
    pytest.importorskip("numba")
    fmt, x = sf.by_name(name), np.zeros((37, 70), np.float16)
    x[:, ::4], x[3, 1::4] = 1, 2
    full = x.copy()
    full[5, :4] = 7
    wanted = fmt._from_dense(x, **fmt.resolve_params(params))
    with pytest.raises(sf.errors.StructureError) as law:
        fmt._from_dense(full, **fmt.resolve_params(params))

    def encode(x: Any, n: int, m: int, length: int, indices: Any, data: Any) -> Counters:
        indices[...], data[...] = 0, 0
        return Counters(compiled.vector_nm_encode(x, n, m, length, indices, data))

    def pack(x: Any, order: str, data: Any, meta: Any, prune: bool = False, counted: bool = True) -> Any:
        data[...], meta[...] = 0, 0x4444
        places = meta_places((data.shape[0], 2 * data.shape[1]), order)
        if prune:
            return compiled.two_four_prune(x, 0x7C00, places, data, meta), 0, 0
        return compiled.two_four_encode(x, NIBBLES, places, data, meta)

    def unpack(data: Any, meta: Any, order: str, out: Any) -> None:
        compiled.two_four_decode(data, meta, meta_places((data.shape[0], 2 * data.shape[1]), order), out)

    def scatter(indices: Any, data: Any, n: int, m: int, length: int, out: Any) -> None:
        out[...] = 0
        compiled.vector_nm_to_dense(indices, data, n, m, length, out)

    def pack_tiles(indices: Any, n: int, m: int, col_info: Any, ranks: Any) -> None:
        assert (col_info.shape, ranks.shape) == (wanted.col_info.shape, wanted.ranks.shape)
        col_info[...], ranks[...] = wanted.col_info, wanted.ranks

    monkeypatch.setattr(vector_nm_convert, "vector_nm_encode", encode)
    monkeypatch.setattr(vector_nm_convert, "vector_nm_to_dense", scatter)
    monkeypatch.setattr(vector_nm_convert, "vector_nm_pack", pack_tiles)
    monkeypatch.setattr(two_four_pack, "two_four_pack", pack)
    monkeypatch.setattr(two_four_pack, "two_four_unpack", unpack)
    monkeypatch.setattr(edges, "is_cupy", lambda x: True)
    monkeypatch.setattr(fmt, "_from_dense", None)
    monkeypatch.setattr(fmt, "_to_dense", None)
    a = fmt.from_dense(x, **params)
    assert a == wanted
    np.testing.assert_array_equal(a.to_dense(), x)
    with pytest.raises(sf.errors.StructureError) as told:
        fmt.from_dense(full, **params)
    assert (str(told.value), told.value.fields) == (str(law.value), law.value.fields)
    if name == "two-four":
        assert masks.prune_two_four(x, **params) == wanted


SCANS = {
    "csr": "csr_scan.csr_sound", "bitmask": "bitmask_scan.bitmask_sound", "bsr": "bsr_scan.bsr_sound",
    "dbsr": "bsr_scan.bsr_sound", "sr-bcrs": "sr_bcrs_scan.sr_bcrs_sound",
    "ell-buckets": "ell_buckets_scan.ell_buckets_sound", "two-four": "two_four_scan.two_four_sound",
    "vector-nm": "vector_nm_scan.vector_nm_sound",
}  # fmt: skip


@pytest.mark.parametrize("name", SCANS)
def test_a_check_of_cuda_hands_its_scan_what_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function = SCANS[name].split(".")
    home = getattr(cuda_edges, module)
    parameters, answers, seen = inspect.signature(getattr(home, function)), [True, False], []

    def scan(*args: Any) -> bool:
        seen.append(parameters.bind(*args).arguments)
        return answers.pop(0)

    x = np.zeros((64, 64), np.float16)
    x[:, ::4] = 1
    a = sf.convert(x, name, **params_of(name)[0])
    monkeypatch.setattr(home, function, scan)
    monkeypatch.setattr(edges, "is_cupy", lambda x: True)
    assert a.quick_check()
    assert not a.quick_check()
    for key, value in seen[0].items():
        if key in a.arrays():
            assert value is getattr(a, key)
        elif key in a.params() or key == "shape":
            assert value == getattr(a, key)
    assert len(answers) == 0


def test_an_installed_package_may_bring_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of the group is looked up when the first array is converted, and asked before the built-in edges."""
    cpu, cuda = (Edge("dense", "csr", device, lambda x, _: "theirs") for device in ("cpu", "cuda"))
    groups: list[str] = []
    installed = [SimpleNamespace(load=lambda: (cpu, cuda))]
    monkeypatch.setattr(backends, "_entry_points", lambda group: groups.append(group) or installed)
    monkeypatch.setattr(edges, "_table", {})
    monkeypatch.setattr(edges, "_waiting", {"cpu": [], "cuda": []})
    edges.provide("cpu", functools.partial(backends._installed_edges, "cpu"))
    edges.provide("cpu", lambda: (Edge("dense", "csr", "cpu", lambda x, _: "ours"),))
    assert groups == []
    assert edges.take("dense", "csr", X, {}, X) == "theirs"
    assert groups == ["spformat.edges"]
    assert [e.device for found in edges._table.values() for e in found] == ["cpu", "cpu"]


GROUP = "spformat.edges"


def only_the_standard_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package importlib_metadata, which others import, takes its place and removes its method."""
    finder = staticmethod(metadata.MetadataPathFinder.find_distributions)
    monkeypatch.setattr(PathFinder, "find_distributions", finder, raising=False)
    monkeypatch.setattr(sys, "meta_path", [PathFinder])


@pytest.mark.parametrize(
    ("file", "text", "installed"),
    [
        ("a-1.0.dist-info/entry_points.txt", f"[console_scripts]\na = a:b\n[{GROUP}]\na = a:EDGES\n", True),
        ("A.egg-info/entry_points.txt", f"[{GROUP}]\na = a:EDGES\n", True),
        ("EGG-INFO/entry_points.txt", f"[{GROUP}]\na = a:EDGES\n", True),
        ("a-1.0.dist-info/entry_points.txt", "[console_scripts]\na = a:b\n", False),
        ("a-1.0.dist-info/METADATA", f"[{GROUP}]\na = a:EDGES\n", False),
        ("a/entry_points.txt", f"[{GROUP}]\na = a:EDGES\n", False),
    ],
)
def test_whether_a_plug_in_may_be_installed(
    file: str, text: str, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip and setuptools lay packages out; ``importlib.metadata`` must not know one that was passed over."""
    root = tmp_path / ("a.egg" if file.startswith("EGG") else "site-packages")
    (root / file).parent.mkdir(parents=True)
    for about in ("METADATA", "PKG-INFO"):
        (root / file).with_name(about).write_text("Metadata-Version: 2.1\nName: a\nVersion: 1.0\n")
    (root / file).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "missing"), str(root)])
    only_the_standard_finder(monkeypatch)
    assert backends._may_be_installed(GROUP) is installed
    assert bool(metadata.entry_points(group=GROUP)) is installed
    assert bool(backends._entry_points(GROUP)) is installed


def test_packages_in_zip_files_and_behind_other_importers_are_left_to_importlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    only_the_standard_finder(monkeypatch)
    assert not backends._may_be_installed(GROUP)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: a\nVersion: 1.0\n")
        archive.writestr("a-1.0.dist-info/entry_points.txt", f"[{GROUP}]\na = a:EDGES\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a.zip")])
    assert [e.name for e in backends._entry_points(GROUP)] == ["a"]
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [PathFinder, SimpleNamespace(find_distributions=lambda context: ())])
    assert backends._may_be_installed(GROUP)
