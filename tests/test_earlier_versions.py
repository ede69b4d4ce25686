"""Files that version 0.1.0 wrote are read by this version, and written again they have the same bytes."""

from __future__ import annotations

from pathlib import Path

import laws
import ml_dtypes
import numpy as np
import pytest

import spformat as sf
from spformat.checkpoint import convert_checkpoint
from spformat.checkpoint.check import Checks, validate_checkpoint
from spformat.storage.stfile import Reader

WRITTEN = Path(__file__).parent.parent / "fixtures" / "version-0.1.0"

W = np.zeros((16, 32), np.float16)
W[:, ::4] = np.arange(1, 129).reshape(16, 8)
BIAS = np.arange(16, dtype=np.float32)

TARGETS = (
    "dense",
    "csr",
    "ell-buckets:column_parts=2",
    "bsr:blocksize=4x8",
    "dbsr:blocksize=4x8",
    "sr-bcrs:vector_length=8,stride=4",
    "vector-nm:n=1,m=4,vector_length=16",
    "two-four:meta_order=ldmatrix",
    "bitmask",
)
"""``save("every-format.safetensors", {target: convert(W, target), .., "bias": BIAS})``, by version 0.1.0."""


def test_all_nine_formats_of_that_version_are_there() -> None:
    assert {t.partition(":")[0] for t in TARGETS} == {f.name for f in sf.FORMATS} - {"csc", "coo"}


@pytest.mark.parametrize("target", TARGETS)
def test_a_matrix_is_read(target: str) -> None:
    a = sf.load(WRITTEN / "every-format.safetensors")[target]
    assert a == sf.convert(W, target)
    assert laws.same(a.to_dense(), W)


def test_the_file_is_written_again_with_the_same_bytes(tmp_path: Path) -> None:
    loaded = sf.load(WRITTEN / "every-format.safetensors")
    assert loaded["bias"].tolist() == BIAS.tolist()
    sf.save(tmp_path / "again.safetensors", loaded)
    assert (tmp_path / "again.safetensors").read_bytes() == (WRITTEN / "every-format.safetensors").read_bytes()


def test_a_checkpoint_is_validated_and_decoded(tmp_path: Path) -> None:
    """Packed by 0.1.0 with two-four for up.weight (W) and bsr:blocksize=8x4 for down.weight (W.T in bfloat16)."""
    verdicts = list(validate_checkpoint(WRITTEN / "packed", Checks(checksums=True)))
    assert [v.error for v in verdicts] == [None] * 4  # one file, three tensors
    convert_checkpoint(WRITTEN / "packed", tmp_path / "dense", "dense")
    with Reader(tmp_path / "dense" / "model.safetensors") as f:
        dense = {name: f.read(name) for name in f.entries}
    assert laws.same(dense["up.weight"], W)
    assert laws.same(dense["down.weight"], np.ascontiguousarray(W.T).astype(ml_dtypes.bfloat16))
    assert laws.same(dense["up.bias"], BIAS)
