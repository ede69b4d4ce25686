"""Distinct keys are found by sorting: the hash table of numpy.unique takes minutes for the nonzeros of a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import spformat as sf
from spformat.arrays.segments import distinct
from spformat.checkpoint.diff import diff_checkpoints


def test_distinct_keys() -> None:
    rng = np.random.default_rng(0)
    for keys in (np.zeros(0, np.int64), np.array([5]), np.array([7, 7, 7]), rng.integers(-9, 9, 100)):
        before = keys.copy()
        assert distinct(keys).tolist() == sorted(set(keys.tolist()))
        assert np.array_equal(keys, before)


def test_graphs_are_counted_and_compared_without_a_hash_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = sp.random_array((20_000, 30_000), density=1e-5, rng=rng, dtype=np.float32, format="csr")
    y = x.copy()
    y.data[3] += 1
    for name, matrix, to in (("a", x, "csr"), ("b", x, "coo"), ("c", y, "csr")):
        sf.save(tmp_path / f"{name}.safetensors", {"w": sf.convert(matrix, to)})
    unique = np.unique

    def slow(*args: object, **options: object) -> object:
        if not options:  # with counts or an inverse it sorts
            pytest.fail("numpy.unique")
        return unique(*args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(np, "unique", slow)
    monkeypatch.setattr(np, "union1d", slow)
    assert sf.recommend(x, n=16)[0].format
    for other, count in (("b", 0), ("c", 1)):
        found = list(diff_checkpoints(tmp_path / "a.safetensors", tmp_path / f"{other}.safetensors"))
        assert sum(d.count for _, d in found if d is not None) == count
