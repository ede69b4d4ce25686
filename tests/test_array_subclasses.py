"""Subclasses of numpy's arrays as operands: memory-mapped and other arrays are arrays, masked ones are refused everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.errors import UsageError
from spformat.preprocess import masks

W = np.random.default_rng(0).integers(-3, 4, (8, 12)).astype(np.float32)
X = np.random.default_rng(1).integers(-3, 4, (5, 12)).astype(np.float32)


class Tagged(np.ndarray[Any, Any]):
    """What libraries of units and the like derive."""


def mapped(folder: Path) -> np.ndarray[Any, Any]:
    X.tofile(folder / "x")
    return np.memmap(folder / "x", np.float32, "r", shape=X.shape)


@pytest.mark.parametrize("target", ["csr", "csc", "bsr:4x4", "bitmask", "ell-buckets", "dense", "two-four+csr"])
def test_subclasses_are_multiplied(target: str, tmp_path: Path) -> None:
    a: Any = sf.convert(W, target)
    bias = np.arange(8, dtype=np.float32)
    for x in (mapped(tmp_path), X.view(Tagged)):
        assert np.array_equal(sf.linear(x, a, bias=bias), X @ W.T + bias)
        assert np.array_equal(sf.linear(x, a, bias=bias.view(Tagged)), X @ W.T + bias)
        assert np.array_equal(x[:, :8] @ a, X[:, :8] @ W)
        assert np.array_equal(a @ x.T, W @ X.T)
        out = np.zeros((5, 8), np.float32).view(Tagged)
        assert sf.linear(X, a, out=out) is out
        assert np.array_equal(out, X @ W.T)


def test_masked_arrays_are_refused(tmp_path: Path) -> None:
    a: Any = sf.convert(W, "csr")
    w, x = np.ma.masked_greater(W, 1), np.ma.masked_greater(X, 1)
    calls = {
        "convert": lambda: sf.convert(w, "csr"),
        "dtype": lambda: sf.convert(w, "csr", dtype="float16"),
        "from_dense": lambda: sf.CSR.from_dense(w),
        "stack": lambda: sf.stack([w]),
        "save": lambda: sf.save(tmp_path / "w.safetensors", {"w": w}),
        "save_dense": lambda: sf.save_dense(tmp_path / "w.safetensors", {"w": w}),
        "refill": lambda: a.refill(np.ma.array(a.data)),
        "magnitude": lambda: masks.magnitude(w, 0.5),
        "magnitude_nm": lambda: masks.magnitude_nm(w, 2, 4),
        "apply": lambda: masks.apply(w, W > 0),
        "error": lambda: masks.error(W, w),
        "prune": lambda: masks.prune_two_four(w),
        "spmm": lambda: sf.spmm(a, x.T),
        "plan": lambda: sf.plan(a, n=5)(x.T),
        "linear": lambda: sf.linear(x, a),
        "out": lambda: sf.linear(X, a, out=np.ma.zeros((5, 8), np.float32)),
        "bias": lambda: sf.linear(X, a, bias=np.ma.zeros(8, np.float32)),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match="its mask would be lost"):
            call()
            pytest.fail(name)
    assert not list(tmp_path.iterdir())
