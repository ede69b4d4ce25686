"""What people type in their first hour: each test runs the commands as they were typed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_checkpoint import tree
from test_cli import DIGITS, SHARDED, spformat


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
