"""Files with very many tensors: the header is parsed once for a file, not once for a tensor. Counted, not timed."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command

import spformat as sf
from spformat import limits
from spformat.preprocess.structure import analyse
from spformat.storage import stheader

N = 300


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards whose tensors alternate in the order of their names."""
    (tmp_path / "m").mkdir()
    for shard in (0, 1):
        tensors = {f"w{i:04}": np.full((2, 2), i, np.float32) for i in range(shard, N, 2)}
        sf.save_dense(tmp_path / "m" / f"{shard}.safetensors", tensors)
    return tmp_path / "m"


@pytest.mark.parametrize("verb", ["validate", "inspect", "plan", "diff"])
def test_a_header_is_parsed_once_for_all_tensors(model: Path, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = [], stheader.parse
    monkeypatch.setattr(stheader, "parse", lambda raw, n: (parsed.append(len(raw)), parse(raw, n))[1])
    arguments = [verb, model, *([model] if verb == "diff" else ()), "--json"]
    answer = command(*arguments)
    assert answer.code == 0, answer
    assert len(parsed) <= 8  # for each shard: to list its tensors, and to read them; twice for diff


def test_a_name_that_is_not_there_is_compared_with_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros(1, np.uint8)
    sf.save_dense(tmp_path / "a", {f"layer.{i:05}": x for i in range(5000)} | {"x" * 1000: x})
    compared, close = [], difflib.get_close_matches

    def counted(word: str, near: Any, n: int) -> Any:
        compared.append((len(word), len(near), max(map(len, near), default=0)))
        return close(word, near, n)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    with sf.safe_open(tmp_path / "a") as f:
        for name in ("layer.0001", "x" * 100_000):
            with pytest.raises(sf.errors.UsageError, match="no tensor"):
                f[name]
        with pytest.raises(sf.errors.UsageError, match=r"did you mean 'layer\.0"):
            f["layer.0o012"]
    assert all(word <= 200 and many <= 500 and longest <= 200 for word, many, longest in compared)
    assert len(compared) == 3


def test_the_metadata_of_a_file_count_as_no_tensor(tmp_path: Path) -> None:
    tensors = {f"w{i}": np.zeros(1, np.uint8) for i in range(10)}
    with limits.using(tensors=10):
        sf.save_dense(tmp_path / "a", tensors)
        assert command("validate", tmp_path / "a").code == 0
    with limits.using(tensors=9), pytest.raises(sf.errors.LimitError, match="at most 9, got 10"):
        sf.safe_open(tmp_path / "a")


def test_tiny_matrices_of_one_pattern_share_their_counts() -> None:
    x = np.array([[0, -0.0, 2], [3, 0, np.nan]], np.float32)
    s = analyse(x)
    assert (s.nnz, s.negative_zeros, s.row_lengths.tolist()) == (3, 1, [1, 2])
    assert analyse(np.where(x != 0, x * 7, x).astype(np.float32)) is s
    assert analyse(np.abs(x)).negative_zeros == 0
    assert analyse(x.astype(np.float64)).dtype == "float64"


def test_long_tables_and_documents_are_written_without_layout(tmp_path: Path) -> None:
    sf.save_dense(tmp_path / "a", {f"w\n{i}": np.full((1, 1), i, np.float32) for i in range(1001)})
    table = command("inspect", tmp_path / "a").out.splitlines()
    assert len(table) == 1003
    assert table[0].split()[:3] == ["tensor", "shape", "dtype"]
    assert "w\\n5 " in "\n".join(table)
    tree = json.loads(command("inspect", tmp_path / "a", "--json").out)
    assert len(tree["tensors"]) == 1001
    answer = command("convert", tmp_path / "a", tmp_path / "packed", "--to", "keep", "--quiet")
    assert (answer.code, answer.out) == (0, "")
