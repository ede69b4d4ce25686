"""The pages that people follow from top to bottom: their commands are typed, in order, and what is shown is what comes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from terminals import screen
from test_cli import SMTX
from test_compressed_tensors import bitmask_group
from test_docs import DOCS
from test_first_hour import SBATCH, two_four

import spformat as sf
from spformat.preprocess import masks

COMMAND = f'#!/bin/sh\nexec "{sys.executable}" -c "from spformat_cli.main import main; main()" "$@"\n'
BLOCK = re.compile(r"^```(sh|python|text)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """(language, rest of the info string, text) of the fenced blocks of a page that is followed."""
    for m in BLOCK.finditer((DOCS / page).read_text()):
        yield m[1], m[2].strip(), m[3]


def follow(page: str, folder: Path, **env: str) -> list[str]:
    """Type every block of a page in ``folder``; the commands that were run.

    "sh" blocks run on a terminal of 80 columns, end with 0 or the code of "exit=N", and print what a "text" block right
    after them shows; "python page" blocks share one namespace. "sh install" needs a network, and is not run.
    """
    (folder / "bin").mkdir()
    for name, text in (("spformat", COMMAND), ("sbatch", SBATCH)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    names: dict[str, object] = {}
    typed, lines = [], None
    for language, info, text in blocks(page):
        if language == "python":
            assert info == "page"
            exec(compile(text, page, "exec"), names)
        elif language == "text":
            assert lines is not None, "a text block shows the output of the sh block before it"
            assert "\n".join(lines) + "\n" == text, "\n" + "\n".join(lines)
        elif info != "install":
            wanted = int(info.removeprefix("exit=") or 0)
            code, lines = screen(["bash", "-euo", "pipefail", "-c", text], cwd=folder, PATH=path, **env)
            assert code == wanted, (text, lines)
            typed += [line for line in text.splitlines() if "spformat " in line]
    return typed


def test_the_first_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    typed = follow("first-hour.md", tmp_path)
    assert {line.split()[1] for line in typed} == {
        "inspect", "plan", "convert", "validate", "diff", "explain", "bench",
    }  # fmt: skip
    assert "two-four" in capsys.readouterr().out
    assert not (tmp_path / "llama-24" / "spformat.json").exists(), "a refused conversion leaves no checkpoint"


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints of the ten tasks, under the names that the page uses."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)

    def dense(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    half = [masks.apply(w, masks.magnitude(w, 0.5)) for w in (dense(128, 128) for _ in range(2))]
    Path("llama-wanda50").mkdir()
    index = {"metadata": {"total_size": 0}, "weight_map": {}}
    for i, w in enumerate(half, 1):
        name = f"model-{i:05}-of-00002.safetensors"
        tensors = {f"model.layers.{i}.mlp.up_proj.weight": w, f"embed.{i}.weight": dense(64, 128)}
        save_file(tensors, Path("llama-wanda50") / name, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, name)
    (Path("llama-wanda50") / "model.safetensors.index.json").write_text(json.dumps(index))
    (Path("llama-wanda50") / "config.json").write_text("{}")

    Path("SparseLlama-BitM").mkdir()
    packed = {f"model.layers.0.mlp.up_proj.{k}": x for k, x in bitmask_group(two_four(32, 64)).items()}
    scale = {"model.layers.0.mlp.up_proj.weight_scale": np.ones((32, 1), np.float32)}
    save_file(packed | scale, "SparseLlama-BitM/model.safetensors", {"format": "pt"})
    sparsity = {"format": "sparse-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"], "ignore": []}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "sparsity_config": sparsity}}
    (Path("SparseLlama-BitM") / "config.json").write_text(json.dumps(config))

    Path("ckpt").mkdir()
    tensors = {
        f"model.layers.{i}.mlp.{n}_proj.weight": two_four(64, 64, seed=i) for i in (0, 1) for n in ("up", "down")
    }
    broken = tensors["model.layers.1.mlp.down_proj.weight"].copy()
    broken[5, 8:12] = 1
    tensors |= {"model.layers.1.mlp.down_proj.weight": broken, "lm_head.weight": dense(64, 64)}
    save_file(tensors, "ckpt/model.safetensors", {"format": "pt"})
    sf.save("w.safetensors", {"w": sf.convert(two_four(64, 64), "two-four")})
    Path("ffn.smtx").write_bytes(SMTX.read_bytes())
    return tmp_path


def test_ten_tasks(checkpoints: Path) -> None:
    env = {"SRC": str(checkpoints / "ckpt"), "DST": str(checkpoints / "of-parts")}
    typed = follow("tasks.md", checkpoints, **env)
    assert len(re.findall(r"^## ", (DOCS / "tasks.md").read_text(), re.MULTILINE)) == 10
    assert len(typed) >= 16
    assert "sparsity_config" not in (checkpoints / "out" / "config.json").read_text()
    with sf.safe_open(checkpoints / "out" / "model.safetensors") as f:
        assert np.array_equal(f.array("model.layers.0.mlp.up_proj.weight"), two_four(32, 64))
        assert f.array("model.layers.0.mlp.up_proj.weight_scale").shape == (32, 1)
    report = json.loads((checkpoints / "report.json").read_text())
    assert [t["name"] for t in report["tensors"] if not t["ok"]] == ["model.layers.1.mlp.down_proj.weight"]
    manifest = json.loads((checkpoints / "of-parts" / "spformat.json").read_text())["tensors"]
    assert manifest["lm_head.weight"]["format"] == "plain"
    assert manifest["model.layers.0.mlp.up_proj.weight"]["format"] == "two-four"
    with np.load(checkpoints / "ffn.npz") as z:
        assert z["data"].dtype == np.float32
    for first, second in (("llama-wanda50", "dense"), ("llama-wanda50-sp", "dense")):
        done = subprocess.run([checkpoints / "bin" / "spformat", "diff", first, second], cwd=checkpoints)
        assert done.returncode == 0
