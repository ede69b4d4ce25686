"""Files with one matrix (.npz, .mtx, .smtx), files of others, and pipes: what people type, and what they get."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from safetensors.numpy import save_file
from scipy.io import mmread, mmwrite
from test_checkpoint import tree
from test_cli import SHARDED, spformat
from test_first_hour import two_four

import spformat as sf
from spformat.errors import UsageError
from spformat.interop.matrices import read_matrix
from spformat.interop.smtx import read_smtx, write_smtx

# --- files with one matrix


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A file with one matrix and a bias."""
    w = two_four(32, 64)
    save_file({"layer.weight": w, "layer.bias": np.ones(32, np.float32)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize(
    ("name", "to"),
    [("back.npz", "csr"), ("back.npz", "bsr:blocksize=16x16"), ("back.mtx", "auto"), ("back.mtx", "dense")],
)
def test_one_matrix_goes_into_a_matrix_file_and_back(one: Path, name: str, to: str) -> None:
    with sf.safe_open(one) as f:
        w = f.array("layer.weight").astype(np.float64)
    r = spformat("convert", one.name, name, "--to", to, cwd=one.parent)
    assert r.returncode == 0, r.stderr
    assert "bfloat16 became float32, which holds the same values" in r.stderr
    assert (one.parent / name).is_file()
    read = sp.load_npz(one.parent / name).toarray() if name.endswith(".npz") else mmread(one.parent / name)
    np.testing.assert_array_equal(read if isinstance(read, np.ndarray) else read.toarray(), w)
    r = spformat("convert", name, "again.safetensors", "--to", "csr", "--dtype", "bfloat16", cwd=one.parent)
    assert r.returncode == 0, r.stderr
    np.testing.assert_array_equal(sf.load(one.parent / "again.safetensors")["back"].to_dense().astype(np.float64), w)
    assert spformat("convert", one.name, name, "--to", to, cwd=one.parent).returncode == 73
    assert spformat("convert", one.name, name, "--to", to, "--force", cwd=one.parent).returncode == 0


def test_zeros_that_lose_their_bits_are_counted(tmp_path: Path) -> None:
    a = sp.csr_array(np.float32([[1, 0, 2, 3], [0, 4, 5, 0]]))
    a.data[[0, 3]] = 0  # stored zeros
    sp.save_npz(tmp_path / "a.npz", a)
    save_file({"w": np.float32([[1, -0.0], [-0.0, 2], [0.0, -0.0]])}, tmp_path / "b.safetensors")
    for src, dst, to, text, counts in (
        ("a.npz", "a.safetensors", "bitmask", "2 stored zeros dropped", {"dropped_zeros": 2}),
        ("a.npz", "a.safetensors", "csr", "", {}),
        ("b.safetensors", "b.npz", "csr", "3 -0.0 become +0.0", {"negative_zeros": 3}),
        ("b.safetensors", "b.mtx", "dense", "", {}),
    ):
        args = ("convert", src, dst, "--to", to, "--force")
        r = spformat(*args, cwd=tmp_path)
        assert (r.returncode, r.stdout.strip().partition(f" in {dst}")[2]) == (0, f"; {text}" if text else "")
        tree_of = json.loads(spformat(*args, "--json", cwd=tmp_path).stdout)
        assert {k: v for k, v in tree_of.items() if k.endswith("_zeros")} == counts


def test_a_pattern_file_is_asked_for(one: Path) -> None:
    r = spformat("convert", one, one.parent / "p.smtx")
    assert (r.returncode, "--values ones" in r.stderr) == (2, True), r.stderr
    assert spformat("convert", one, one.parent / "p.smtx", "--values", "ones").returncode == 0
    with sf.safe_open(one) as f:
        pattern = f.array("layer.weight") != 0
    assert (read_smtx(one.parent / "p.smtx").to_dense() != 0).tolist() == pattern.tolist()


def test_what_a_matrix_file_cannot_hold_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = Path(shutil.copytree(SHARDED, tmp_path / "model"))
    save_file({"experts": np.ones((2, 32, 32), np.float32)}, tmp_path / "stack.safetensors")
    before = tree(model.parent)
    for args, text in (
        (["model", "back.npz", "--to", "csr"], "holds one matrix, got 16"),
        (["model", "back.npz", "--include", "*.q_proj.weight"], "choose one with --include NAME"),
        (
            ["model", "back.npz", "--include", "model.layers.0.self_attn.q_proj.weight", "--to", "two-four"],
            "holds csr, csc, coo or bsr",
        ),
        (["stack.safetensors", "back.npz"], "holds one matrix, got a stack of them (experts)"),
        (["model", "back.mtx", "--part", "1/2"], "--part is for checkpoints, and back.mtx is a matrix file"),
    ):
        r = spformat("convert", *args, cwd=model.parent)
        assert (r.returncode, text in r.stderr) == (2, True), r.stderr
    assert tree(model.parent) == before
    name = "model.layers.0.self_attn.q_proj.weight"
    assert spformat("convert", "model", "q.npz", "--include", name, cwd=model.parent).returncode == 0


def test_every_verb_takes_a_matrix_file(one: Path) -> None:
    assert spformat("convert", "m.safetensors", "m.npz", "--to", "csr", cwd=one.parent).returncode == 0

    def run(*args: str, code: int = 0) -> str:
        r = spformat(*args, cwd=one.parent)
        assert r.returncode == code, r.stdout + r.stderr
        return r.stdout

    assert json.loads(run("plan", "m.npz", "--to", "bitmask", "--json"))["tensors"][0]["target"] == "bitmask"
    assert "1 checked, sound" in run("validate", "m.npz")
    assert "1 checked against bitmask, sound" in run("validate", "m.npz", "--expect", "bitmask")
    assert "cpu." in run("explain", "m.npz", "-n", "16")
    assert json.loads(run("inspect", "m.npz", "--json"))["tensors"][0]["name"] == "m"
    run("convert", "m.npz", "w.safetensors", "--to", "bitmask")
    assert "1 of 1 tensors hold the same values" in run("diff", "m.npz", "w.safetensors")
    assert "32 of 2048" not in run("diff", "w.safetensors", "m.npz")
    run("validate", "nothing.npz", code=66)


# --- foreign files and pipes


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "old.ckpt"])
def test_a_pytorch_file_leads_with_the_lines_that_convert_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    old = name == "old.ckpt"  # before torch 1.6 the pickle was not in a zip archive
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00." + bytes(40) if old else b"PK\x03\x04" + bytes(range(60)))
    for src in (tmp_path / name, tmp_path):
        r = spformat("inspect", src)
        assert r.returncode == (65 if src != tmp_path else 66)
        first, *lines = r.stderr.rstrip().splitlines()
        assert "a PyTorch file, which spformat never reads" in first
        assert "header length" not in r.stderr
        assert len(lines) == 3
        # the lines do what they say, with a stand-in for torch
        seen.clear()
        torch = SimpleNamespace(load=lambda path, **options: seen.update(path=path, **options) or {"w": np.eye(4)})
        safetensors = SimpleNamespace(torch=SimpleNamespace(save_file=save_file))
        with monkeypatch.context() as patch:
            names = {"torch": torch, "safetensors": safetensors, "safetensors.torch": safetensors.torch}
            for module, stand_in in names.items():
                patch.setitem(sys.modules, module, stand_in)
            exec("\n".join(line.strip() for line in lines), {})
        assert seen == {"path": str(tmp_path / name), "map_location": "cpu", "weights_only": True}
        (written,) = tmp_path.glob("*.safetensors")
        assert spformat("inspect", written).returncode == 0
        written.unlink()


def piped(verb: str, *args: Any, data: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "from spformat_cli.main import main; main()", verb, *map(str, args)]
    return subprocess.run(command, input=data, capture_output=True, timeout=100)


def test_a_pipe_is_read_as_a_file(one: Path, tmp_path: Path) -> None:
    assert spformat("convert", one, tmp_path / "m.mtx").returncode == 0
    for path in (one, tmp_path / "m.mtx"):
        r = piped("inspect", "-", "--json", data=path.read_bytes())
        assert r.returncode == 0, r.stderr
        (row,) = (t for t in json.loads(r.stdout)["tensors"] if len(t["shape"]) == 2)
        assert row["nnz"] == 1024
    r = piped("convert", "-", tmp_path / "out.safetensors", "--to", "csr", data=(tmp_path / "m.mtx").read_bytes())
    assert r.returncode == 0, r.stderr
    r = piped("diff", one, "-", data=one.read_bytes())
    assert r.returncode == 0, r.stderr
    r = piped("inspect", "-", "--max-file-bytes", "100", data=one.read_bytes())
    assert (r.returncode, b"standard input: expected at most 100 bytes" in r.stderr) == (78, True), r.stderr
    assert piped("diff", "-", "-", data=b"").returncode == 2
    fifo = tmp_path / "fifo.mtx"
    os.mkfifo(fifo)
    r = spformat("inspect", fifo)
    assert (r.returncode, "spformat inspect - < PIPE" in r.stderr) == (66, True), r.stderr


@pytest.mark.parametrize("name", ["csr.npz", "csc.npz", "coo.npz", "coo.mtx"])
def test_a_file_with_repeated_entries_is_refused_with_the_way_to_sum_them(tmp_path: Path, name: str) -> None:
    """As scipy saves a matrix that was assembled from parts; in memory, too, the refusal says so."""
    a = sp.coo_array((np.ones(3), ([0, 0, 1], [3, 3, 1])), shape=(2, 8)).asformat("coo")
    parts = {"csr": ([3, 3, 1], [0, 2, 3], (2, 8)), "csc": ([0, 0, 1], [0, 2, 3], (2, 2))}
    kind, _, end = name.partition(".")
    if kind in parts:
        indices, indptr, shape = parts[kind]
        a = getattr(sp, f"{kind}_array")((np.ones(3), indices, indptr), shape=shape)
    (sp.save_npz if end == "npz" else mmwrite)(tmp_path / name, a)
    with pytest.raises(sf.errors.OrderError, match=r"repeats it.*a\.sum_duplicates\(\) of scipy does") as e:
        read_matrix(tmp_path / name)
    assert e.value.path == str(tmp_path / name)


@pytest.mark.parametrize("target", ["bsr", "csc", "bitmask", ""])
def test_the_pattern_of_another_format_is_not_written_as_rows(target: str, tmp_path: Path) -> None:
    """The pointer of a BSR was written as that of rows: a file of another matrix, or one that nothing reads."""
    x = np.eye(64, 128, dtype=np.float32)
    a = sf.convert(x, target) if target else x
    with pytest.raises(UsageError, match=rf"smtx: expected a CSR, got {type(a).__name__}; use convert\(x, 'csr'\)"):
        write_smtx(tmp_path / "a.smtx", a)
    assert not (tmp_path / "a.smtx").exists()
