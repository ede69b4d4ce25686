"""Kernels and tiles chosen by measurements: the tables, the rule between them, and what decides without one. No GPU."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.backends.cuda import BACKEND, KERNELS
from spformat.backends.cuda.runtime import measured
from spformat.backends.cuda.runtime.measured import Row
from spformat.errors import UsageError
from spformat.measure import tune as tuning
from spformat.measure.bench import Result
from spformat.products.problem import Problem

MMA, TOKENS = "cuda.spmm_two_four", "cuda.spmm_two_four_tokens"
P = Problem("two-four", (), 4096, 4096, 256, 8 << 20, "bfloat16", "bfloat16", "bfloat16", device="cuda", sm=90)
ABOUT = {"device": "here", "date": "2026-11-21", "command": "by hand"}


def row(M: int = 4096, n: int = 256, K: int = 4096, kernel: str = MMA, tile: str = "t", **changes: Any) -> Row:
    return Row("two-four", 90, M, n, K, kernel, tile, 10.0)._replace(**changes)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(the shipped, the user's), both absent."""
    monkeypatch.setattr(measured, "SHIPPED", tmp_path / "shipped.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SPFORMAT_MEASURED", raising=False)
    return measured.SHIPPED, tmp_path / "cache" / "spformat" / "measured.json"


def test_nothing_is_preferred_without_tables(tables: Any) -> None:
    assert measured.nearest(P) is None
    assert BACKEND.preferred(P) == ""
    assert measured.tile(MMA, P, ("t",)) is None


def test_the_nearest_row_answers(tables: tuple[Path, Path]) -> None:
    measured.write(
        tables[0], [row(tile="a"), row(M=8192, tile="b"), row(n=128, tile="c"), row(K=1024, tile="d")], ABOUT
    )
    for problem, tile in (
        (P, "a"),
        (replace(P, M=7000), "b"),
        (replace(P, n=128), "c"),
        (replace(P, K=1500), "d"),
        (replace(P, M=5000, n=128), "c"),
    ):
        assert measured.tile(MMA, problem, "abcd") == tile
    for far in (replace(P, M=20000), replace(P, K=400), replace(P, n=32), replace(P, sm=80), replace(P, format="csr")):
        assert measured.nearest(far) is None
    for empty in (replace(P, M=0), replace(P, n=0), replace(P, K=0), replace(P, sm=None, device="cpu")):
        assert measured.nearest(empty) is None


def test_a_factor_of_two_in_every_extent_is_near_enough(tables: tuple[Path, Path]) -> None:
    measured.write(tables[0], [row()], ABOUT)
    assert measured.nearest(replace(P, M=8192, n=512, K=2048)) is not None
    assert measured.nearest(replace(P, M=8193)) is None


def test_the_users_table_wins_where_it_is_as_near(tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    measured.write(tables[0], [row(tile="ours"), row(n=512, tile="near")], ABOUT)
    measured.write(tables[1], [row(tile="theirs")], ABOUT)
    assert measured.user_path() == tables[1]
    assert measured.tile(MMA, P, ("ours", "theirs")) == "theirs"
    assert measured.tile(MMA, replace(P, n=512), ("near", "theirs")) == "near"
    monkeypatch.setenv("SPFORMAT_MEASURED", "shipped")
    assert measured.tile(MMA, P, ("ours", "theirs")) == "ours"
    monkeypatch.setenv("SPFORMAT_MEASURED", "off")
    assert measured.nearest(P) is None
    monkeypatch.setenv("SPFORMAT_MEASURED", "none")
    with pytest.raises(UsageError, match="SPFORMAT_MEASURED"):
        measured.nearest(P)


def test_rows_are_merged(tables: tuple[Path, Path]) -> None:
    path = tables[1]
    measured.write(path, [row(tile="old"), row(n=16, tile="kept")], ABOUT)
    measured.write(path, [row(tile="new")], ABOUT | {"command": "again"})
    assert {(r.n, r.tile) for r in measured.read(path)} == {(256, "new"), (16, "kept")}
    assert json.loads(path.read_text())["command"] == "again"
    assert [p.name for p in path.parent.iterdir()] == ["measured.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"fields": [], "rows": []}',
     json.dumps({"fields": Row._fields, "rows": [["two-four", 90, 0, 8, 8, "k", "t", 1]]}),
     json.dumps({"fields": Row._fields, "rows": [["two-four", 90, "8", 8, 8, "k", "t", 1]]}),
     json.dumps({"fields": Row._fields, "rows": [["two-four", 90]]})],
)  # fmt: skip
def test_a_damaged_table_is_left_out_and_said(
    text: str, tables: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    measured.write(tables[0], [row()], ABOUT)
    tables[1].parent.mkdir(parents=True)
    tables[1].write_text(text)
    measured._parsed.cache_clear()
    with caplog.at_level(logging.WARNING, "spformat"):
        assert measured.nearest(P) == row()
    assert str(tables[1]) in caplog.text


def test_the_kernel_measured_fastest_is_asked_first(tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(P, n=16)
    before = sf.explain(few, backend="cuda")
    assert before.chosen == TOKENS
    measured.write(tables[1], [row(n=16)], ABOUT)
    after = sf.explain(few, backend="cuda")
    assert after.chosen == MMA
    assert sorted(map(str, after.answers)) == sorted(map(str, before.answers))
    measured.write(tables[1], [row(n=16, kernel="cuda.gone")], ABOUT)
    assert sf.explain(few, backend="cuda").answers == before.answers
    monkeypatch.setenv("SPFORMAT_MEASURED", "off")
    assert sf.explain(few, backend="cuda").answers == before.answers


def test_a_kernel_that_refuses_is_passed_over(tables: tuple[Path, Path]) -> None:
    measured.write(tables[1], [row(kernel=TOKENS)], ABOUT)
    assert sf.explain(P, backend="cuda").chosen != TOKENS


def test_a_tile_that_is_gone_leaves_the_choice_to_the_rule(tables: tuple[Path, Path]) -> None:
    measured.write(tables[0], [row(tile="of an older version")], ABOUT)
    assert measured.kernel(P) == MMA
    assert measured.tile(MMA, P, ("t",)) is None


def test_a_tile_is_forced_for_one_kernel(tables: tuple[Path, Path]) -> None:
    measured.write(tables[1], [row(tile="a")], ABOUT)
    with measured.forced(TOKENS, "b"):
        assert measured.tile(TOKENS, P, "ab") == "b"
        assert measured.tile(MMA, P, "ab") is None
    assert measured.tile(MMA, P, "ab") == "a"
    assert measured.tile(TOKENS, P, "ab") is None


def test_texts_of_tiles_name_one_each() -> None:
    for kernel in KERNELS:
        texts = [str(t) for t in getattr(kernel, "tiles", ())]
        assert len(set(texts)) == len(texts), kernel.name


def test_the_shipped_table_names_kernels_and_tiles_that_exist() -> None:
    rows = measured.read(measured.SHIPPED)
    assert {(r.M, r.n, r.K) for r in rows} >= {(M, n, 4096) for M in (4096, 11008, 14336) for n in (16, 256, 4096)}
    kernels = {k.name: k for k in KERNELS}
    for r in rows:
        tiles = getattr(kernels[r.kernel], "tiles", None)
        assert r.format in kernels[r.kernel].formats
        assert r.tile in {str(t) for t in tiles or ("",)}, r


def test_tuning_keeps_the_fastest_that_is_right(tables: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, with times made up: the kernels here are the reference under two names."""
    a = sf.convert(np.eye(64, dtype=np.float16), "two-four")
    nan = float("nan")
    times = ((f"{MMA}|y", 2.0, 1.5), (f"{TOKENS}|", 2.5, 0.1), (f"{MMA}|x", 3.0, 0.1), ("failed", nan, 0.0))
    results = [Result("", name, False, us, nan, nan, error, 0, 0, 0) for name, us, error in times]
    monkeypatch.setattr(tuning, "contenders", lambda a, B: iter(()))
    monkeypatch.setattr(tuning.bench, "compare", lambda *_, **__: results)
    with pytest.raises(UsageError, match=r"use \.to\('cuda'\)"):
        tuning.tune(a, (8,))
    monkeypatch.setattr(type(a), "device", "cuda:0")
    monkeypatch.setattr(tuning, "operand", lambda a, n: np.zeros((64, n), np.float16))
    monkeypatch.setattr(tuning, "describe", lambda a, B, out: replace(P, M=64, K=64, n=B.shape[1]))
    ((found, _),) = tuning.tune(a, (16,))
    assert found == Row("two-four", 90, 64, 16, 64, TOKENS, "", 2.5)
    path = tuning.save([found], np.zeros(1), "test")
    assert path == tables[1]
    assert measured.nearest(replace(P, M=64, K=64, n=16)) == found
    results[:] = [r for r in results if r.error > 1]
    with pytest.raises(UsageError, match="no kernel"):
        tuning.tune(a, (16,))


@pytest.mark.gpu
def test_every_tile_of_a_row_runs(tables: tuple[Path, Path]) -> None:
    """Measured here, and looked up again: the plan has the tile, and computes."""
    cupy = pytest.importorskip("cupy")
    a = sf.convert(cupy.eye(256, dtype=np.float16), "two-four")
    for found, results in tuning.tune(a, (16, 128), repeats=2, seconds=0.02):
        assert len(results) > 3
        assert all(r.error <= 1 for r in results)
        tuning.save([found], a.data, "test")
        p = sf.plan(a, n=found.n)
        assert p.kernel == found.kernel
        assert found.tile in p.tile
        B = cupy.ones((256, found.n), np.float16)
        assert (p(B) == 1).all()
