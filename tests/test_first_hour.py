"""What people type in their first hour: each test runs the commands as they were typed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors import safe_open
from safetensors.numpy import save_file
from test_checkpoint import tree
from test_cli import DIGITS, SHARDED, spformat
from test_docs import DOCS

import spformat as sf
from spformat.arrays.dtypes import value_type


def two_four(rows: int, cols: int, dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> np.ndarray[Any, Any]:
    """A random matrix with at most two nonzeros in every group of four columns."""
    x = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    order = np.argsort(np.random.default_rng(seed + 1).random((rows, cols // 4, 4)), axis=-1)
    return (x * (order < 2).reshape(rows, cols)).astype(dtype)


def unfolded(text: str) -> str:
    """What was printed, without the line breaks of a narrow terminal."""
    return " ".join(text.split())


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


# --- names


def test_a_tensor_without_a_name_goes_through_every_verb(tmp_path: Path) -> None:
    w = two_four(32, 64)
    save_file({"": w, "b": np.ones(3, np.float32)}, tmp_path / "m.safetensors")

    def run(*args: str) -> str:
        r = spformat(*args, cwd=tmp_path)
        assert r.returncode == 0, r.stdout + r.stderr
        return r.stdout

    run("inspect", "m.safetensors")
    run("plan", "m.safetensors")
    run("convert", "m.safetensors", "packed", "--to", "two-four")
    run("validate", "packed")
    run("convert", "m.safetensors", "again", "--to", "csr", "--part", "1/2")
    run("convert", "m.safetensors", "again", "--to", "csr", "--part", "2/2")
    run("merge", "again")
    run("convert", "packed", "dense", "--to", "dense")
    assert "2 of 2 tensors" in run("diff", "m.safetensors", "dense")
    assert "2 of 2 tensors" in run("diff", "again", "dense")
    with safe_open(tmp_path / "dense" / "model.safetensors", "np") as f:
        assert set(f.keys()) == {"", "b"}
    with sf.safe_open(tmp_path / "packed" / "spformat-00001-of-00001.safetensors") as f:
        assert isinstance(f[""], sf.TwoFour)


# --- job arrays

SBATCH = """#!/bin/bash
# A batch system of one machine: runs --wrap at once, for each number of --array.
first=1; last=1
for arg in "$@"; do
  case "$arg" in --array=*) range="${arg#--array=}"; first="${range%-*}"; last="${range#*-}";; esac
done
for i in $(seq "$first" "$last"); do SLURM_ARRAY_TASK_ID="$i" bash -c "${@: -1}" >&2 || exit 1; done
echo 1234
"""
COMMAND = f'#!/bin/sh\nexec "{sys.executable}" -c "from spformat_cli.main import main; main()" "$@"\n'


def llama(folder: Path) -> Path:
    """A pruned model as people have them: 2:4 projections, an embedding and a head that were not pruned."""
    folder.mkdir()
    dense = np.random.default_rng(0).standard_normal((64, 32)).astype(ml_dtypes.bfloat16)
    for i in (1, 2):
        tensors = {f"model.layers.{i}.self_attn.{p}_proj.weight": two_four(64, 64, seed=i) for p in "qkvo"}
        tensors |= {f"model.layers.{i}.input_layernorm.weight": np.ones(32, ml_dtypes.bfloat16)}
        tensors |= {"model.embed_tokens.weight": dense} if i == 1 else {"lm_head.weight": dense}
        save_file(tensors, folder / f"model-{i:05}-of-00002.safetensors", {"format": "pt"})
    return folder


def test_the_job_array_of_the_page_runs_as_written(tmp_path: Path) -> None:
    src = llama(tmp_path / "model")
    for name, text in (("sbatch", SBATCH), ("spformat", COMMAND)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SRC": str(src), "DST": str(tmp_path / "out")}
    page = (DOCS / "large-checkpoints.md").read_text()
    script = page.partition("## Job arrays")[2].partition("```sh\n")[2].partition("```")[0].replace("64", "3")
    r = subprocess.run(["bash", "-ec", script], env=env, capture_output=True, text=True, timeout=200)
    assert r.returncode == 0, r.stderr
    manifest = json.loads((tmp_path / "out" / "spformat.json").read_text())
    formats = {name: t["format"] for name, t in manifest["tensors"].items()}
    assert formats["model.layers.2.self_attn.q_proj.weight"] == "two-four"
    assert formats["model.embed_tokens.weight"] == formats["lm_head.weight"] == "plain"
    assert spformat("diff", src, tmp_path / "out").returncode == 0


def test_parts_without_the_flag_name_it_and_with_it_go_on(tmp_path: Path) -> None:
    src = llama(tmp_path / "model")
    # as typed in the story: stops at the embedding, and says what to type
    r = spformat("convert", src, tmp_path / "out", "--to", "two-four", "--part", "1/2", "--resume")
    assert (r.returncode, "embed_tokens" in r.stderr, "--misfit keep" in r.stderr) == (3, True, True), r.stderr
    flags = ["--to", "two-four", "--misfit", "bitmask", "--resume"]
    assert spformat("convert", src, tmp_path / "out", *flags, "--part", "1/2").returncode == 0
    # another part with other options is refused at once, not at the merge
    r = spformat("convert", src, tmp_path / "out", "--to", "two-four", "--misfit", "keep", "--part", "2/2", "--resume")
    assert r.returncode == 73, r.stderr
    assert "part 1/2 in this folder has other options (misfit: 'keep' here, 'bitmask' there)" in r.stderr
    assert not (tmp_path / "out" / "spformat.partial-2-of-2.json").exists()
    # and any machine finishes the rest
    r = spformat("convert", src, tmp_path / "out", *flags)
    assert r.returncode == 0, r.stderr
    assert spformat("convert", src, tmp_path / "once", *flags).returncode == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "once")
    manifest = json.loads((tmp_path / "out" / "spformat.json").read_text())
    assert manifest["tensors"]["model.embed_tokens.weight"]["format"] == "bitmask"
    planned = json.loads(spformat("plan", src, "--to", "two-four", "--misfit", "bitmask", "--json").stdout)
    assert {t["name"]: t.get("bytes_out") for t in planned["tensors"]} == {
        name: t["bytes_out"] for name, t in manifest["tensors"].items()
    }


@pytest.mark.parametrize(
    ("value", "text"), [("drop", "expected 'error', 'keep' or a format"), ("bsr:x=1", "'bsr:x=1'")]
)
def test_a_misfit_that_is_no_format(value: str, text: str) -> None:
    r = spformat("plan", DIGITS, "--misfit", value)
    assert (r.returncode, text in r.stderr) == (2, True), r.stderr


# --- is it faster?


def test_bench_of_a_dense_checkpoint_measures_what_auto_would_make(tmp_path: Path) -> None:
    src = llama(tmp_path / "model")
    flags = ["-n", "4", "--repeats", "1", "--limit", "2", "--device", "cpu"]
    r = spformat("bench", src, "--include", "re:[qk]_proj", *flags)
    assert r.returncode == 0, r.stderr
    assert "q_proj.weight: measured as two-four (what `convert --to auto` makes of it)" in r.stderr
    assert "q_proj.weight" in r.stdout
    assert not any(line.startswith("error:") for line in r.stdout.splitlines())
    r = spformat("bench", src, "--include", "lm_head.weight", "--to", "dense", "--json", *flags)
    assert {row["format"] for row in json.loads(r.stdout)["results"]} == {"dense"}


def test_bench_with_a_backend_that_cannot_run_fails_at_once(tmp_path: Path) -> None:
    src = llama(tmp_path / "model")
    r = spformat("bench", src, "-n", "1,16,256,4096", "--backend", "cuda,vendor", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (r.returncode, r.stdout) == (69, ""), r.stdout
    assert r.stderr.startswith("error: --backend cuda: ")
    assert "measured" not in r.stderr


# --- how sparse, how large?


def test_inspect_tells_the_sparsity(tmp_path: Path) -> None:
    src = llama(tmp_path / "model")
    rows = json.loads(spformat("inspect", src, "--json").stdout)["tensors"]
    # jq '.tensors[] | select(.sparsity > .4) | .name'
    sparse = {row["name"] for row in rows if (row.get("sparsity") or 0) > 0.4}
    assert sparse == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (1, 2) for p in "qkvo"}
    assert {row["sparsity"] for row in rows if row["name"] in sparse} == {0.5}


def test_plan_says_what_csr_and_dense_would_weigh(tmp_path: Path) -> None:
    src = llama(tmp_path / "model")
    tree_ = json.loads(spformat("plan", src, "--to", "auto", "--json").stdout)
    assert tree_["bytes_dense"] == tree_["bytes_in"]
    assert spformat("convert", src, tmp_path / "csr", "--to", "csr").returncode == 0
    packed = json.loads((tmp_path / "csr" / "spformat.json").read_text())
    assert tree_["bytes_csr"] == sum(t["bytes_out"] for t in packed["tensors"].values())
    last = spformat("plan", src, "--to", "auto").stdout.splitlines()[-1]
    size = tree_["bytes_csr"] / 1024
    assert f"; csr would be {size:.2f} KiB, dense {tree_['bytes_dense'] / 1024:.2f} KiB" in last
    again = json.loads(spformat("plan", tmp_path / "csr", "--to", "bitmask", "--json").stdout)
    assert (again["bytes_csr"], again["bytes_dense"]) == (tree_["bytes_csr"], tree_["bytes_dense"])
    # What a conversion would leave as it is counts as it is, in both tables.
    flags = ("--to", "two-four", "--misfit", "keep", "--json")
    kept, done = (json.loads(spformat(*v, *flags).stdout) for v in (("plan", src), ("convert", src, tmp_path / "two")))
    assert any(t["why"].startswith("kept: two-four") for t in kept["tensors"])
    assert (kept["bytes_csr"], kept["bytes_dense"]) == (done["bytes_csr"], done["bytes_dense"])


# --- 2:4 weights of other than 16 bits


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_weights_of_other_than_16_bits_that_are_two_four_are_stored_so(tmp_path: Path, dtype: str) -> None:
    kind = value_type(dtype).numpy
    w = (16 * two_four(96, 128, np.float32)).astype(kind)
    sf.save_dense(tmp_path / "m.safetensors", {"w": w, "scale": np.ones(96, np.float32)})
    (row,) = (
        r
        for r in json.loads(spformat("inspect", tmp_path / "m.safetensors", "--json").stdout)["tensors"]
        if r["name"] == "w"
    )
    assert "2:4" in row["patterns"]
    assert row["smallest"] == "two-four"
    assert row["sizes"]["two-four"] / row["bytes"] == 0.5 + 1 / (8 * kind.itemsize)
    for to in ("auto", "two-four"):
        assert spformat("convert", tmp_path / "m.safetensors", tmp_path / to, "--to", to).returncode == 0
    assert (
        tree(tmp_path / "auto")["spformat-00001-of-00001.safetensors"]
        == tree(tmp_path / "two-four")["spformat-00001-of-00001.safetensors"]
    )
    assert spformat("validate", tmp_path / "auto", "--checksums").returncode == 0
    assert spformat("diff", tmp_path / "m.safetensors", tmp_path / "auto").returncode == 0
    assert spformat("convert", tmp_path / "auto", tmp_path / "dense", "--to", "dense").returncode == 0
    with sf.safe_open(tmp_path / "dense" / "model.safetensors") as f:
        assert np.array_equal(f.array("w").astype(np.float32), w.astype(np.float32))
    a = sf.load(tmp_path / "auto" / "spformat-00001-of-00001.safetensors")["w"]
    assert isinstance(a, sf.TwoFour)
    x = np.ones((128, 3), np.float32)
    np.testing.assert_allclose(sf.spmm(a, x), w.astype(np.float32) @ x, rtol=1e-5, atol=1e-3)
    # who multiplies it is explain's to say
    out = spformat("explain", tmp_path / "auto", "--gpu", "sm_90").stdout
    assert "cuda.spmm_two_four" in out
    assert f"got {dtype}" in out
    if dtype == "float32":  # by way of a dense copy
        assert "runs on cuda.expand_then_dense" in out
    else:
        assert re.search(rf"cuda.expand_then_dense: .*a.dtype must be one of .*float16.*, got {dtype}", out), out
    broken = w.copy()
    broken[3, 4:8] = 1
    with pytest.raises(sf.errors.StructureError, match="row 3, group 1"):
        sf.convert(broken, "two-four")


# --- stacks of matrices: the weights of fused experts


def test_what_is_not_checked_is_not_sound(tmp_path: Path) -> None:
    experts = np.random.default_rng(0).standard_normal((4, 64, 64)).astype(np.float16)
    save_file({"model.layers.0.mlp.experts.gate_up_proj": experts}, tmp_path / "dense.safetensors")
    r = spformat("validate", tmp_path / "dense.safetensors", "--expect", "two-four")
    assert r.returncode == 1, r.stdout
    assert "1 of them not as expected" in r.stdout
    assert "matrix 0" in unfolded(r.stdout)
    # no stack of weights by its shape: the kernel of a convolution, or four dimensions
    save_file({"model.layers.0.conv.gate_up_proj": experts[:, :, :3].copy()}, tmp_path / "moe.safetensors")
    r = spformat("validate", tmp_path / "moe.safetensors", "--expect", "two-four")
    assert r.returncode == 1, r.stdout
    assert "sound" not in r.stdout.replace("not sound", "")
    assert "1 not checked against two-four" in r.stdout
    assert "gate_up_proj" in r.stdout
    tree_ = json.loads(spformat("validate", tmp_path / "moe.safetensors", "--expect", "two-four", "--json").stdout)
    assert (tree_["ok"], tree_["checked"], tree_["tensors"][0]["ok"]) == (False, 0, False)
    assert "not checked" in tree_["tensors"][0]["error"]["message"]
    # without --expect the file is sound, and a norm or bias beside matrices is no gap
    assert spformat("validate", tmp_path / "moe.safetensors").returncode == 0
    save_file({"w": two_four(64, 64), "b": np.ones(64, np.float32)}, tmp_path / "ok.safetensors")
    r = spformat("validate", tmp_path / "ok.safetensors", "--expect", "two-four")
    assert (r.returncode, "1 checked against two-four, sound" in r.stdout) == (0, True), r.stdout
    # nothing that could be checked at all
    save_file({"b": np.ones(64, np.float32)}, tmp_path / "none.safetensors")
    r = spformat("validate", tmp_path / "none.safetensors", "--expect", "two-four")
    assert (r.returncode, "0 checked against two-four" in r.stdout) == (1, True), r.stdout


# --- a second opinion


def test_validate_official_opens_every_file_with_the_safetensors_package(model: Path) -> None:
    for folder, src in (("packed", "model"), ("dense", "packed")):
        to = "dense" if folder == "dense" else "bitmask"
        assert spformat("convert", src, folder, "--to", to, cwd=model.parent).returncode == 0
    for folder in ("model", "packed", "dense"):
        names = sorted(p.name for p in (model.parent / folder).glob("*.safetensors"))
        r = spformat("validate", folder, "--official", cwd=model.parent)
        assert r.returncode == 0, r.stdout + r.stderr
        assert f"2 files opened with safetensors {safetensors.__version__}: {', '.join(names)}" in unfolded(r.stdout)
        assert "sound" in r.stdout
        tree_ = json.loads(spformat("validate", folder, "--official", "--json", cwd=model.parent).stdout)
        assert [t["name"] for t in tree_["tensors"] if "opened_by" in t] == names
        assert tree_["checked"] == len(tree_["tensors"]) - 2
    assert "opened with" not in spformat("validate", "model", cwd=model.parent).stdout


def test_validate_official_reports_what_only_we_read(tmp_path: Path) -> None:
    """A dtype of the future: its bytes are copied by our reader, and refused by a package that does not know it."""
    path = tmp_path / "m.safetensors"
    header = json.dumps({"w": {"dtype": "F5_E9", "shape": [8], "data_offsets": [0, 5]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"12345")
    r = spformat("validate", path, "--official")
    assert r.returncode == 65, r.stdout + r.stderr
    said = f"safetensors {safetensors.__version__} does not open the file"
    assert said in unfolded(r.stdout)
    assert "0 files opened with" in r.stdout
    tree_ = json.loads(spformat("validate", path, "--official", "--json").stdout)
    assert said in tree_["tensors"][0]["error"]["message"]


def test_validate_official_of_a_matrix_file(tmp_path: Path) -> None:
    (tmp_path / "a.mtx").write_text("%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 3.5\n")
    r = spformat("validate", tmp_path / "a.mtx", "--official")
    assert (r.returncode, "no safetensors file" in r.stderr) == (2, True), r.stderr
