"""A source shard that is replaced by rename between planning and reading, or while it is read: refused, never mixed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.checkpoint import convert_checkpoint, open_source, parts, start

OTHER = {
    "another dtype": np.ones((8, 8), np.float16),
    "another shape": np.ones((4, 16), np.float32),
    "other values": np.full((8, 8), 2, np.float32),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for i in (1, 2):
        sf.save_dense(tmp_path / "in" / f"model-{i:05}-of-00002.safetensors", {f"w{i}": np.eye(8, dtype=np.float32)})
    return tmp_path / "in"


def replace_second(model: Path, x: np.ndarray[Any, Any]) -> None:
    sf.save_dense(model.parent / "other", {"w2": x})
    os.replace(model.parent / "other", model / "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("x", OTHER.values(), ids=OTHER.keys())
@pytest.mark.parametrize("to", ["csr", "dense", "keep"])
def test_after_planning(model: Path, x: Any, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = start.plan_tensors

    def planned(*given: Any) -> Any:
        plans = plan(*given)
        replace_second(model, x)
        return plans

    monkeypatch.setattr(start, "plan_tensors", planned)
    with pytest.raises(sf.errors.IntegrityError, match="replaced or changed after its header was read") as e:
        convert_checkpoint(model, model.parent / "out", to)
    assert e.value.path == str(model / "model-00002-of-00002.safetensors")
    monkeypatch.undo()
    convert_checkpoint(model, model.parent / "out", to, resume=True)
    convert_checkpoint(model, model.parent / "fresh", to)
    for path in (model.parent / "fresh").iterdir():
        assert (model.parent / "out" / path.name).read_bytes() == path.read_bytes()


def test_while_it_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest would have the hash of a file that was not converted."""
    write = parts.write_shard

    def written(source: Any, shard: str, *given: Any, **named: Any) -> Any:
        outcomes = write(source, shard, *given, **named)
        if shard.startswith("model-00002"):
            replace_second(model, OTHER["other values"])
        return outcomes

    monkeypatch.setattr(parts, "write_shard", written)
    with pytest.raises(sf.errors.IntegrityError, match="replaced or changed"):
        convert_checkpoint(model, model.parent / "out", "csr")
    assert not (model.parent / "out" / "spformat.json").exists()


def test_a_file_of_the_same_bytes_is_another_file(model: Path) -> None:
    source, shard = open_source(model), "model-00002-of-00002.safetensors"
    shutil.copy2(model / shard, model.parent / "copy")
    os.replace(model.parent / "copy", model / shard)
    with pytest.raises(sf.errors.IntegrityError):
        source.open(shard)
