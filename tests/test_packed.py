"""Checkpoints that compressed-tensors packed: the command reads them as the dense ones they stand for."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_checkpoint import spformat, tree

import spformat as sf
from spformat.checkpoint import convert_checkpoint, merge_parts, open_source
from spformat.checkpoint.check import validate_checkpoint
from spformat.checkpoint.diff import diff_checkpoints
from spformat.checkpoint.packed import config_when_dense
from spformat.interop import compressed_tensors as ct
from spformat.preprocess import masks

SPARSITY = {"format": "sparse-bitmask", "global_sparsity": 0.5}
QUANTIZED = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}, "format": "float-quantized"}


def weight(rows: int, cols: int, seed: int, dtype: Any = np.float16) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.integers(1, 60, (rows, cols)).astype(np.float32)
    return np.asarray(masks.apply(x, masks.magnitude_nm(x, 2, 4)).astype(dtype))


def entries(name: str, w: np.ndarray[Any, Any], layout: str = "bitmask") -> dict[str, np.ndarray[Any, Any]]:
    arrays = ct.encode(sf.convert(w, layout))  # type: ignore[arg-type]
    names = ct.entry_names(name, arrays)
    return {names[k]: x for k, x in arrays.items()}


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """A folder of two shards, a group of which lies in both, and the tensors it stands for."""
    dense = {
        "embed.weight": np.arange(12, dtype=np.float16).reshape(3, 4),
        "a.weight": weight(6, 20, 1),
        "b.weight": weight(16, 32, 2),
        "c.weight": weight(8, 8, 3, ml_dtypes.bfloat16),
        "norm.weight": np.ones(4, np.float16),
    }
    split = entries("b.weight", dense["b.weight"], "two-four")
    first, second = tmp_path / "in" / "model-1.safetensors", tmp_path / "in" / "model-2.safetensors"
    first.parent.mkdir()
    shards = {
        first: {"embed.weight": dense["embed.weight"]} | entries("a.weight", dense["a.weight"])
        | {k: x for k, x in split.items() if k.endswith("compressed")},
        second: {k: x for k, x in split.items() if not k.endswith("compressed")}
        | entries("c.weight", dense["c.weight"]) | {"norm.weight": dense["norm.weight"]},
    }  # fmt: skip
    for path, tensors in shards.items():
        sf.save_dense(path, tensors)
    weight_map = {name: path.name for path, tensors in shards.items() for name in tensors}
    (first.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"hidden": 7, "quantization_config": {"sparsity_config": SPARSITY, "quant_method": "compressed-tensors"}}
    (first.parent / "config.json").write_text(json.dumps(config))
    (first.parent / "tokenizer.json").write_text("{}")
    return first.parent, dense


def loaded(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    out = {}
    for path in folder.glob("*.safetensors"):
        with sf.safe_open(path) as f:
            out |= {name: x.to_dense() if isinstance(x, sf.Format) else x for name, x in f.items()}
    return out


def same(a: dict[str, np.ndarray[Any, Any]], b: dict[str, np.ndarray[Any, Any]]) -> None:
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert (x.dtype, x.shape, x.tobytes()) == (b[name].dtype, b[name].shape, b[name].tobytes()), name


@pytest.mark.parametrize("target", ["dense", "auto", "bitmask", "csr", "two-four", "keep"])
def test_every_target_gets_the_values(target: str, model: Any, tmp_path: Path) -> None:
    source, dense = model
    options = ["--misfit", "keep"] if target == "two-four" else []
    assert spformat("convert", source, tmp_path / "out", "--to", target, *options).returncode == 0
    same(loaded(tmp_path / "out"), dense)
    assert all(v.error is None for v in validate_checkpoint(tmp_path / "out"))
    assert [d for _, d in diff_checkpoints(source, tmp_path / "out") if d is not None] == []
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"hidden": 7}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    if target == "dense":
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(dense)


def test_what_the_command_shows(model: Any, tmp_path: Path) -> None:
    source, dense = model
    told = json.loads(spformat("inspect", source, "--json").stdout)
    assert {t["name"]: t["shape"] for t in told["tensors"]} == {n: list(x.shape) for n, x in dense.items()}
    assert spformat("validate", source, "--expect", "two-four", "--include", "[abc].weight").returncode == 0
    r = spformat("plan", source, "--to", "auto", "--json")
    assert [t["name"] for t in json.loads(r.stdout)["tensors"]] == list(open_source(source).records)


def test_parts_interruptions_and_processes_give_the_same_bytes(model: Any, tmp_path: Path) -> None:
    source, _ = model
    for target in ("bitmask", "dense"):
        whole = tmp_path / f"{target}-whole"
        convert_checkpoint(source, whole, target)
        assert convert_checkpoint(source, whole, target, resume=target != "dense", force=target == "dense").resumed == (
            0 if target == "dense" else 2
        )
        parts = tmp_path / f"{target}-parts"
        for i in range(1, 4):
            convert_checkpoint(source, parts, target, part=f"{i}/3")
        merge_parts(parts)
        assert tree(parts) == tree(whole)
        with ProcessPoolExecutor(2) as pool:
            convert_checkpoint(source, tmp_path / f"{target}-pool", target, executor=pool)
        assert tree(tmp_path / f"{target}-pool") == tree(whole)


def test_what_lies_in_two_shards_is_not_resumed(model: Any, tmp_path: Path) -> None:
    """The journal knows the hash of one."""
    source, _ = model
    redone: list[str] = []
    for i in range(1, 5):
        first = convert_checkpoint(source, tmp_path / "out", "bitmask", part=f"{i}/4")
        again = convert_checkpoint(source, tmp_path / "out", "bitmask", part=f"{i}/4", resume=True)
        assert again.resumed + len(again.redone) == len(first.shards) == len(again.shards)
        redone += again.redone
    assert len(redone) == 1
    assert redone[0].endswith("holds a tensor that is packed in model-2.safetensors, too")


def test_float8_that_the_file_calls_int8(tmp_path: Path) -> None:
    w = weight(8, 16, 4, ml_dtypes.float8_e4m3fn)
    folder = tmp_path / "in"
    folder.mkdir()
    packed = entries("up.weight", w)
    packed["up.compressed"] = packed["up.compressed"].view(np.int8)
    scale = np.full((8, 1), 0.5, np.float32)
    sf.save_dense(folder / "model.safetensors", packed | {"up.weight_scale": scale})
    config = {"quantization_config": {**QUANTIZED, "sparsity_config": SPARSITY}}
    (folder / "config.json").write_text(json.dumps(config))
    convert_checkpoint(folder, tmp_path / "out", "dense")
    same(loaded(tmp_path / "out"), {"up.weight": w, "up.weight_scale": scale})
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"quantization_config": QUANTIZED}
    (folder / "config.json").unlink()
    convert_checkpoint(folder / "model.safetensors", tmp_path / "plain.safetensors", "dense")
    with sf.safe_open(tmp_path / "plain.safetensors") as f:
        assert f.array("up.weight").dtype == np.int8


def test_biases_and_full_names_of_old_releases(tmp_path: Path) -> None:
    bias = np.array([0, 1, 0, 2, 3], np.float16)
    arrays = ct.encode(sf.convert(bias[None], "bitmask"))  # type: ignore[arg-type]
    arrays["shape"] = np.array([5], np.int64)
    sf.save_dense(tmp_path / "m.safetensors", {f"fc.bias.{k}": x for k, x in arrays.items()})
    convert_checkpoint(tmp_path / "m.safetensors", tmp_path / "out.safetensors", "dense")
    with sf.safe_open(tmp_path / "out.safetensors") as f:
        assert list(f) == ["fc.bias"]
        assert f.array("fc.bias").tolist() == bias.tolist()


def test_an_open_shard(model: Any, tmp_path: Path) -> None:
    source, dense = model
    opened = open_source(source)
    w = dense["b.weight"]
    with opened.open("model-1.safetensors") as f:
        room = np.empty((5, 32), np.float16)
        f.read_rows("b.weight", 7, room)
        assert (room == w[7:12]).all()
        assert [p.size for p in f.raw("b.weight", 1000)] == [1000, 24]
        assert b"".join(p.tobytes() for p in f.raw("b.weight", 1000)) == w.tobytes()
        assert (f.array("b.weight", slice(2, 4)) == w[2:4]).all()
        f.read_rows("embed.weight", 1, embed := np.empty((2, 4), np.float16))
        assert (embed == dense["embed.weight"][1:]).all()
        assert (f.array("embed.weight", slice(1, 2)) == dense["embed.weight"][1:2]).all()
        assert b"".join(p.tobytes() for p in f.raw("embed.weight")) == dense["embed.weight"].tobytes()
        assert len(f.ranges("b.weight")) == 1  # the others are in the other shard
        assert len(f.ranges("a.weight")) == 4
        assert len(f.ranges("embed.weight")) == 1
    arrays = ct.encode(sf.convert(np.ones((1, 3), np.float16), "bitmask"))  # type: ignore[arg-type]
    sf.save_dense(
        tmp_path / "m.safetensors", {f"b.bias.{k}": x for k, x in (arrays | {"shape": np.array([3])}).items()}
    )
    with open_source(tmp_path / "m.safetensors").open("m.safetensors") as f:
        assert f.read("b.bias").shape == (3,)


def test_what_is_damaged_or_hostile_is_refused(tmp_path: Path) -> None:
    good = entries("a.weight", weight(6, 20, 1))
    path = tmp_path / "m.safetensors"

    def refused(error: type[sf.errors.SpformatError], match: str, **changed: np.ndarray[Any, Any]) -> None:
        sf.save_dense(path, good | {f"a.{k}": x for k, x in changed.items()}, overwrite=True)
        with pytest.raises(error, match=match) as caught:
            convert_checkpoint(path, tmp_path / "never.safetensors", "dense")
        assert caught.value.fields["path"] == str(path)
        assert caught.value.fields["tensor"] == "a.weight"
        assert not (tmp_path / "never.safetensors").exists()

    huge = np.array([2**40, 2**40], np.int64)
    refused(sf.errors.FormatError, r"bitmask: expected .* bytes for a tensor of shape \(1099511627776", shape=huge)
    refused(sf.errors.FormatError, r"shape: expected one or two ints, got int64 of shape \(9,\)$", shape=np.arange(9))
    refused(sf.errors.FormatError, "shape: expected one or two ints .* got float32", shape=np.ones(2, np.float32))
    refused(sf.errors.FormatError, "bitmask: expected 18 bytes .* got int8", bitmask=good["a.bitmask"].view(np.int8))
    refused(
        sf.errors.FormatError,
        r"row_offsets\[2\]: expected",
        row_offsets=good["a.row_offsets"] - np.eye(6, dtype=int)[2],
    )
    refused(sf.errors.FormatError, "compressed: expected", compressed=good["a.compressed"][:-1])
    sf.save_dense(path, good | {"a.weight": np.ones(3, np.float16)}, overwrite=True)
    with pytest.raises(sf.errors.FormatError, match="there twice"):
        open_source(path)


def test_a_group_that_is_not_whole_stays_as_it_is(tmp_path: Path) -> None:
    good = entries("a.weight", weight(6, 20, 1))
    del good["a.shape"]
    sf.save_dense(tmp_path / "m.safetensors", good)
    convert_checkpoint(tmp_path / "m.safetensors", tmp_path / "out.safetensors", "keep")
    with sf.safe_open(tmp_path / "out.safetensors") as f:
        assert set(f) == set(good)


def test_a_group_that_is_not_whole_hides_no_other(tmp_path: Path) -> None:
    # A name that ends like one of compressed-tensors, or a shard without the rest of one of its groups.
    w, path = weight(6, 20, 1), tmp_path / "m.safetensors"
    alone = {"proj.compressed": np.ones(3, np.float32)}
    sf.save_dense(path, entries("a.weight", w) | alone)
    assert set(open_source(path).records) == {"a.weight", "proj.compressed"}
    convert_checkpoint(path, tmp_path / "out.safetensors", "dense")
    with sf.safe_open(tmp_path / "out.safetensors") as f:
        assert set(f) == {"a.weight", "proj.compressed"}
        assert (f["a.weight"].to_dense() == w).all()
        assert (f["proj.compressed"] == alone["proj.compressed"]).all()


def test_its_own_folder_is_not_the_target(model: Any) -> None:
    source, _ = model
    before = tree(source)
    with pytest.raises(sf.errors.OutputError, match="name another folder"):
        convert_checkpoint(source, source, "bitmask", force=True)
    assert tree(source) == before


def test_another_config_in_the_target_is_not_replaced_unasked(model: Any, tmp_path: Path) -> None:
    source, _ = model
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(source / "config.json", out)
    with pytest.raises(sf.errors.OutputError, match=r"another config\.json already"):
        convert_checkpoint(source, out, "bitmask")
    (out / "config.json").write_bytes(config_when_dense((source / "config.json").read_bytes()))
    convert_checkpoint(source, out, "bitmask")


def test_a_config_is_read_as_loosely_as_loaders_read_it() -> None:
    told = b'{"time_step_limit": [0.0, Infinity], "compression_config": {"sparsity_config": {}, "format": "dense"}}'
    assert json.loads(config_when_dense(told)) == {"time_step_limit": [0.0, float("inf")]}


def test_a_config_that_is_nested_too_deeply_stops_nothing(model: Any, tmp_path: Path) -> None:
    source, dense = model
    (source / "config.json").write_text("[" * 100_000)
    convert_checkpoint(source, tmp_path / "out", "dense")
    same(loaded(tmp_path / "out"), dense)
    assert (tmp_path / "out" / "config.json").read_text() == "[" * 100_000


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", '{"quantization_config": 3}', '{"a": 1}'])
def test_other_configs_are_copied_byte_by_byte(text: str) -> None:
    assert config_when_dense(text.encode()) == text.encode()


def test_open_reads_them_as_dense_matrices(model: tuple[Path, dict[str, np.ndarray[Any, Any]]]) -> None:
    path, dense = model
    with sf.open(path) as f:
        assert set(f) == set(dense)
        for name, x in f.items():
            assert isinstance(x, sf.Dense) == (dense[name].ndim == 2)
            data = x.data if isinstance(x, sf.Dense) else x
            assert data.tobytes() == dense[name].tobytes()
            assert not data.flags.writeable
    with pytest.raises(sf.errors.DescriptorError, match=r"spformat\.open\(path\)"):
        sf.load(path)
