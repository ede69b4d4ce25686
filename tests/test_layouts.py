"""The layout of transformers: what `convert --layout transformers` adds to a packed folder. Needs no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command

import spformat as sf
from spformat.checkpoint import convert_checkpoint, merge_parts
from spformat.checkpoint.layouts import GUARD, PACKED_INDEX

CONFIG = {"model_type": "llama", "dtype": "float32", "rope": float("inf")}
METHOD = {"quantization_config": {"quant_method": "spformat"}, "transformers_weights": GUARD}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    shards = [
        {"a.weight": np.eye(8, dtype=np.float32)},
        {"b.weight": np.eye(16, dtype=np.float32), "b.bias": np.ones(16)},
    ]
    for i, tensors in enumerate(shards, 1):
        sf.save_dense(folder / f"model-0000{i}-of-00002.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def read(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return tree


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir() if not p.name.startswith(".")}


def test_the_layout_adds_an_index_and_the_method(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "neutral", "csr")
    convert_checkpoint(source, tmp_path / "packed", "csr", layout="transformers")
    assert read(tmp_path / "neutral") == CONFIG
    assert read(tmp_path / "packed") == CONFIG | METHOD
    assert names(tmp_path / "packed") - names(tmp_path / "neutral") == {PACKED_INDEX}
    shards = [f"spformat-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = json.loads((tmp_path / "packed" / PACKED_INDEX).read_text())
    assert index["weight_map"] == {"a.weight": shards[0], "b.weight": shards[1], "b.bias": shards[1]}
    for name in [*shards, "spformat.json", "tokenizer.json"]:
        assert (tmp_path / "packed" / name).read_bytes() == (tmp_path / "neutral" / name).read_bytes()


def test_the_way_back_removes_it(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "packed", "csr", layout="transformers")
    convert_checkpoint(tmp_path / "packed", tmp_path / "dense", "dense")
    convert_checkpoint(tmp_path / "packed", tmp_path / "neutral", "bitmask")
    convert_checkpoint(tmp_path / "packed", tmp_path / "other", "bitmask", layout="transformers")
    assert read(tmp_path / "dense") == read(tmp_path / "neutral") == CONFIG
    assert read(tmp_path / "other") == CONFIG | METHOD
    assert PACKED_INDEX not in names(tmp_path / "dense") | names(tmp_path / "neutral")


def test_a_checkpoint_that_replaces_it_leaves_no_index(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", "csr", layout="transformers")
    with pytest.raises(sf.errors.OutputError, match="--force"):
        convert_checkpoint(source, tmp_path / "out", "csr")
    convert_checkpoint(source, tmp_path / "out", "csr", force=True)
    assert PACKED_INDEX not in names(tmp_path / "out")
    assert read(tmp_path / "out") == CONFIG
    convert_checkpoint(source, tmp_path / "out", "csr", layout="transformers", force=True)
    convert_checkpoint(source, tmp_path / "out", "dense", force=True)
    assert names(tmp_path / "out") == names(source) | {"model.safetensors.index.json"}


def test_resume_finds_the_finished_layout(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", "csr", layout="transformers")
    assert convert_checkpoint(source, tmp_path / "out", "csr", layout="transformers", resume=True).resumed == 2
    with pytest.raises(sf.errors.OutputError, match=r"without this config\.json"):
        convert_checkpoint(source, tmp_path / "out", "csr", resume=True)


def test_a_part_says_which_command_writes_the_layout(source: Path, tmp_path: Path) -> None:
    asked = ["convert", source, tmp_path / "my parts", "--to", "csr", "--layout", "transformers", "--part"]
    said = [command(*asked, part).err for part in ("1/2", "2/2")]
    assert all(f"hint: spformat merge '{tmp_path}/my parts' --layout transformers\n" in err for err in said)
    assert command("merge", tmp_path / "my parts", "--layout", "transformers").code == 0
    assert read(tmp_path / "my parts") == CONFIG | METHOD


def test_parts_are_merged_into_the_layout(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "whole", "csr", layout="transformers")
    for part in ("1/2", "2/2"):
        convert_checkpoint(source, tmp_path / "parts", "csr", part=part)
    merge_parts(tmp_path / "parts", layout="transformers")
    assert names(tmp_path / "parts") == names(tmp_path / "whole")
    for name in names(tmp_path / "whole"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("config", "to", "layout", "error", "text"),
    [
        (None, "csr", "transformers", sf.errors.InputError, r"needs the config\.json"),
        ("[]", "csr", "transformers", sf.errors.InputError, "expected a JSON object"),
        ('{"quantization_config": {"quant_method": "gptq"}}', "csr", "transformers", sf.errors.UsageError, "'gptq'"),
        ("{}", "dense", "transformers", sf.errors.UsageError, "loads as it is"),
        ("{}", "csr", "vllm", sf.errors.UsageError, "'neutral' or 'transformers', got 'vllm'"),
    ],
)
def test_refusals(
    config: str | None, to: str, layout: str, error: type[Exception], text: str, source: Path, tmp_path: Path
) -> None:
    (source / "config.json").unlink()
    if config is not None:
        (source / "config.json").write_text(config)
    with pytest.raises(error, match=text):
        convert_checkpoint(source, tmp_path / "out", to, layout=layout)
    assert not list(tmp_path.glob("out/*.safetensors"))
    done, dry = (
        command("convert", source, tmp_path / "out", "--to", to, "--layout", layout, *flags)
        for flags in ([], ["--dry-run"])
    )
    assert (dry.code, dry.err) == (done.code, done.err)


def test_a_dry_run_refuses_stacks_as_the_conversion_does(source: Path, tmp_path: Path) -> None:
    sf.save_dense(source / "model-00001-of-00002.safetensors", {"a.0.w": np.ones((2, 8, 8))}, overwrite=True)
    asked = ["convert", source, tmp_path / "out", "--to", "csr", "--rule", "a.0.w=csr", "--layout", "transformers"]
    done, dry = command(*asked), command(*asked, "--dry-run")
    assert (dry.code, dry.err) == (done.code, done.err)
    assert "--exclude 'a.*.w'" in dry.err


def test_its_own_folder_is_not_the_target(source: Path, tmp_path: Path) -> None:
    with pytest.raises(sf.errors.OutputError, match="name another folder"):
        convert_checkpoint(source, source, "csr", layout="transformers", force=True)
    convert_checkpoint(source, tmp_path / "packed", "csr", layout="transformers")
    with pytest.raises(sf.errors.OutputError, match="name another folder"):
        convert_checkpoint(tmp_path / "packed", tmp_path / "packed", "dense", force=True)
    with pytest.raises(sf.errors.UsageError, match="one file"):
        convert_checkpoint(
            source / "model-00001-of-00002.safetensors", tmp_path / "x.safetensors", "csr", layout="transformers"
        )
