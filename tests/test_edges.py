"""The table of edges: who is asked, in which order, and when the code of those who provide some is imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import stand_in_cupy

import spformat as sf
from spformat.backends.cuda.edges import EDGES
from spformat.formats import edges, registered
from spformat.formats.edges import Edge


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
    edges.register(*(watch(*p) for p in pairs))
    a = sf.BSR.from_dense(X, blocksize=(1, 1))
    sf.BSR.from_csr(a.to_csr(), blocksize=(1, 1))
    np.testing.assert_array_equal(a.to_dense(), X)
    a.validate()
    assert seen == [("dense", "bsr"), ("bsr", "csr"), ("csr", "bsr"), ("bsr", "dense"), ("bsr", "check")]


@pytest.mark.parametrize("edge", EDGES, ids=lambda e: f"{e.source}-{e.target}")
def test_an_edge_of_cuda_starts_and_ends_at_a_format(edge: Edge) -> None:
    names = {f.name for f in registered()}
    ends = {edge.source, edge.target} - {edges.DENSE, edges.CHECK}
    assert {e.partition(":")[0] for e in ends} <= names
    assert edge.device == "cuda"


def test_small_conversions_import_no_code_of_a_device_and_no_numba() -> None:
    code = (
        "import sys, numpy as np, spformat as sf\n"
        "sf.convert(np.eye(4, dtype=np.float32), 'csr').validate().to_dense()\n"
        "assert 'numba' not in sys.modules and 'spformat.backends.cuda' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
