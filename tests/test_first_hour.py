"""What people type in their first hour: each test runs the commands as they were typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from test_checkpoint import tree
from test_cli import DIGITS, SHARDED, spformat

import spformat as sf


def two_four(rows: int, cols: int, dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> np.ndarray[Any, Any]:
    """A random matrix with at most two nonzeros in every group of four columns."""
    x = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    order = np.argsort(np.random.default_rng(seed + 1).random((rows, cols // 4, 4)), axis=-1)
    return (x * (order < 2).reshape(rows, cols)).astype(dtype)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as the hub has them: two shards, an index, a config."""
    shutil.copytree(SHARDED, tmp_path / "model")
    return tmp_path / "model"


# --- SRC and DST in one another


@pytest.mark.parametrize("flags", [[], ["--force"], ["--part", "1/2"]], ids=str)
@pytest.mark.parametrize("dst", ["model", "model/.", "model/sub", "."])
def test_an_output_beside_or_inside_its_input_is_refused(model: Path, dst: str, flags: list[str]) -> None:
    before = tree(model.parent)
    r = spformat("convert", "model", dst, "--to", "csr", *flags, cwd=model.parent)
    assert (r.returncode, "name another folder" in r.stderr) == (73, True), r.stderr
    assert tree(model.parent) == before


def test_a_file_inside_the_folder_that_is_converted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(DIGITS, tmp_path / "model")
    before = tree(tmp_path)
    r = spformat("convert", "model", "model/new.safetensors", cwd=tmp_path)
    assert (r.returncode, "name another folder" in r.stderr) == (73, True), r.stderr
    assert tree(tmp_path) == before
    assert spformat("convert", "model/model.safetensors", "model/new.safetensors", cwd=tmp_path).returncode == 0


# --- what a file says of itself


def test_metadata_of_files_goes_to_packed_to_dense_and_back(tmp_path: Path) -> None:
    for i, note in enumerate(("first shard", "second shard"), 1):
        path = tmp_path / "model" / f"model-{i:05}-of-00002.safetensors"
        path.parent.mkdir(exist_ok=True)
        tensors = {f"w{i}": two_four(16, 16, seed=i), f"b{i}": np.ones(3, np.float32)}
        save_file(tensors, path, {"format": "pt", "license": "apache-2.0", "note": note})

    def run(*args: str, code: int = 0) -> str:
        r = spformat(*args, cwd=tmp_path)
        assert r.returncode == code, r.stdout + r.stderr
        return r.stdout

    run("convert", "model", "packed", "--to", "auto")
    for i in (1, 2, 3):
        run("convert", "model", "in-parts", "--to", "auto", "--part", f"{i}/3")
    run("merge", "in-parts")
    assert tree(tmp_path / "packed") == tree(tmp_path / "in-parts")
    run("convert", "packed", "dense", "--to", "dense")
    run("convert", "model/model-00001-of-00002.safetensors", "one.safetensors", "--to", "bitmask")
    for folder, name in (("packed", "spformat"), ("dense", "model")):
        for i, note in enumerate(("first shard", "second shard"), 1):
            with safe_open(tmp_path / folder / f"{name}-{i:05}-of-00002.safetensors", "np") as f:
                own = {k: v for k, v in f.metadata().items() if k != "spformat"}
            assert own == {"format": "pt", "license": "apache-2.0", "note": note}
    with sf.safe_open(tmp_path / "one.safetensors") as f:
        assert f.metadata["note"] == "first shard"
    run("diff", "model", "packed")
    run("diff", "model", "dense")
    save_file(
        {"w1": two_four(16, 16, seed=1), "b1": np.ones(3, np.float32)}, tmp_path / "two.safetensors", {"note": "2"}
    )
    out = run("diff", "one.safetensors", "two.safetensors", code=1)
    assert "2 of 2 tensors hold the same values" in out
    assert "__metadata__: 'license': 'apache-2.0' against nothing" in out
    assert "__metadata__: 'note': 'first shard' against '2'" in out
    assert "'format'" not in out, "every dense checkpoint that is written has one"
    tree_ = json.loads(run("diff", "one.safetensors", "two.safetensors", "--json", code=1))
    assert (tree_["equal"], tree_["compared"], len(tree_["differences"])) == (False, 2, 2)
