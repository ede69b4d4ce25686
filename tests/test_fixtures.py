"""A fixture that is missing, altered or unlisted fails here; only `make fixtures` writes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from golden_vectors import NAME, golden_file, golden_objects

from spformat.formats.base import Format
from spformat.formats.convert import convert
from spformat.storage import container
from spformat.storage.stfile import Reader

FIXTURES = Path(__file__).parent.parent / "fixtures"
MANIFEST = json.loads((FIXTURES / "MANIFEST.json").read_text())["files"]


@pytest.mark.parametrize("name", sorted(MANIFEST))
def test_file_is_the_one_in_the_manifest(name: str) -> None:
    content = (FIXTURES / name).read_bytes()
    assert len(content) == MANIFEST[name]["size"]
    assert hashlib.sha256(content).hexdigest() == MANIFEST[name]["sha256"]


def test_every_file_is_listed_with_its_provenance() -> None:
    listed = {FIXTURES / name for name in MANIFEST} | {FIXTURES / "MANIFEST.json"}
    present = {p for p in FIXTURES.rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"}}
    assert present == listed
    assert all(len(row["provenance"]) > 20 for row in MANIFEST.values())


def test_fixtures_stay_small() -> None:
    assert max(row["size"] for row in MANIFEST.values()) <= 500_000  # the large-file hook of pre-commit
    assert sum(row["size"] for row in MANIFEST.values()) < 4_000_000


@pytest.mark.parametrize(("name", "case", "expected"), [pytest.param(*o, id="-".join(o[:2])) for o in golden_objects()])
def test_golden_file_holds_exactly_the_golden_arrays(name: str, case: str, expected: Format) -> None:
    (loaded,) = container.load(golden_file(name, case)).values()
    assert loaded == expected  # class, shape, params, tables, dtypes and the bytes of every array
    assert list(container.load(golden_file(name, case))) == [NAME]


def tensors(path: Path) -> dict[str, np.ndarray]:
    with Reader(path) as f:
        return {name: f.read(name) for name in f.entries}


def test_digits_checkpoint_is_as_accurate_and_as_sparse_as_it_says() -> None:
    folder = FIXTURES / "checkpoint" / "digits"
    config = json.loads((folder / "config.json").read_text())
    weights = {k: a.astype(np.float32) for k, a in tensors(folder / "model.safetensors").items()}
    test = tensors(folder.parent / "digits_test_set.safetensors")
    x = test["images"].astype(np.float32) / 16
    for i, layer in enumerate(config["layers"]):
        assert weights[f"{layer}.weight"].shape == (config["sizes"][i + 1], config["sizes"][i])
        y = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        x = np.maximum(y, 0)
    right = int((y.argmax(1) == test["labels"]).sum())
    # One image may lie so close to a boundary that another BLAS decides otherwise.
    assert abs(right - config["accuracy"]["stored"] * len(y)) <= 1
    assert config["accuracy"]["stored"] >= 0.95
    for name, rule in config["pruning"].items():
        assert round(float((weights[name] == 0).mean()), 4) == rule["sparsity"]


def test_digits_layers_fit_the_formats_they_were_pruned_for() -> None:
    folder = FIXTURES / "checkpoint" / "digits"
    config = json.loads((folder / "config.json").read_text())
    weights = tensors(folder / "model.safetensors")
    for name, rule in config["pruning"].items():
        packed = convert(weights[name], rule["format"]).validate()
        assert packed.nbytes < weights[name].nbytes, name
        assert packed.to_dense().view(np.uint16).tolist() == np.where(
            weights[name] == 0, 0, weights[name].view(np.uint16)
        ).tolist()  # fmt: skip


def test_sharded_checkpoint_agrees_with_its_index() -> None:
    folder = FIXTURES / "checkpoint" / "sharded"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found, size = {}, 0
    for shard in sorted(set(index["weight_map"].values())):
        held = tensors(folder / shard)
        found |= dict.fromkeys(held, shard)
        size += sum(a.nbytes for a in held.values())
    assert found == index["weight_map"]
    assert size == index["metadata"]["total_size"]
    assert sum(p.stat().st_size for p in folder.iterdir()) < 300_000


@pytest.mark.parametrize(
    ("name", "target", "sparsity"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "two-four", 0.5),
        ("model.layers.0.mlp.up_proj.weight", "two-four", 0.5),
        ("model.layers.0.mlp.down_proj.weight", "bitmask", 0.5),
        ("model.layers.1.self_attn.o_proj.weight", "vector-nm:n=8,m=16,vector_length=16", 0.5),
        ("model.layers.1.mlp.gate_proj.weight", "bsr:blocksize=16x16", 0.5),
        ("model.layers.1.mlp.up_proj.weight", "bsr:blocksize=16x16", 0.75),
        ("model.layers.1.mlp.down_proj.weight", "csr", 0.95),
        ("model.layers.1.self_attn.q_proj.weight", "dense", 0.0),
    ],
)
def test_sharded_checkpoint_holds_every_kind_of_sparsity(name: str, target: str, sparsity: float) -> None:
    folder = FIXTURES / "checkpoint" / "sharded"
    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    with Reader(folder / shard) as f:
        w = f.read(name)
    assert float((w == 0).mean()) == pytest.approx(sparsity, abs=1e-3)
    packed = convert(w, target)
    assert sparsity == 0 or packed.nbytes < w.nbytes
