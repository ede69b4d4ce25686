"""Requests that the command cannot carry out are refused, never ignored; graphs too large to be dense."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from spformat_cli import bench
from test_cli import DIGITS, SMTX, spformat

import spformat as sf
from spformat.checkpoint import Recipe, convert_checkpoint, open_source
from spformat.checkpoint.diff import diff_checkpoints
from spformat.checkpoint.foresee import foresee_checkpoint
from spformat.checkpoint.recipe import included

NODES = 200_000


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with g.npz and g.safetensors: an adjacency matrix of 160 GB if it were dense."""
    folder, rng = tmp_path_factory.mktemp("graph"), np.random.default_rng(0)
    rows, cols = rng.integers(0, NODES, (2, 1000))
    a = sp.csr_array((np.ones(1000, np.float32), (rows, cols)), shape=(NODES, NODES))
    a.sum_duplicates()
    sp.save_npz(folder / "g.npz", a)
    sf.save(folder / "g.safetensors", {"g": sf.convert(a, "csr")})
    return folder


@pytest.mark.parametrize(
    "flags",
    [
        ["--rule", "g=csr"], ["--include", "g"], ["--exclude", "x"], ["--prune", "magnitude"], ["--misfit", "keep"],
        ["--resume"], ["--in-place"], ["--device", "cuda"], ["--part", "1/2"], ["--executor", "threads"],
    ],
    ids=lambda flags: flags[0],
)  # fmt: skip
def test_flags_of_checkpoints_beside_a_matrix_file(tmp_path: Path, flags: list[str]) -> None:
    r = spformat("convert", SMTX, tmp_path / "a.safetensors", "--to", "csr", *flags)
    assert r.returncode == 2
    assert f"{flags[0]} is for checkpoints" in r.stderr
    assert SMTX.name in r.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["--values", "ones"], ["--seed", "1"], ["--dtype", "float16"]], ids=lambda f: f[0])
def test_flags_of_matrix_files_beside_a_checkpoint(tmp_path: Path, flags: list[str]) -> None:
    r = spformat("convert", DIGITS, tmp_path / "out", *flags)
    assert r.returncode == 2
    assert f"{flags[0]} is for .smtx, .mtx and .npz files" in r.stderr
    assert not any(tmp_path.iterdir())


def test_targets_of_a_matrix_file(tmp_path: Path, graph: Path) -> None:
    r = spformat("convert", graph / "g.npz", tmp_path / "folder", "--to", "csr")
    assert r.returncode == 2
    assert "one file: expected DST to end in .safetensors" in r.stderr
    kept, dense = tmp_path / "kept.safetensors", tmp_path / "dense.safetensors"
    assert spformat("convert", graph / "g.npz", kept, "--to", "keep").returncode == 0
    assert isinstance(sf.load(kept)["g"], sf.CSR)
    assert spformat("convert", SMTX, dense, "--to", "dense").returncode == 0
    with sf.safe_open(dense) as f:  # as other tools read it: no descriptor, the tensor under its own name
        assert not f.described
        assert f.keys() == [SMTX.stem]
    before = kept.read_bytes()
    r = spformat("convert", SMTX, kept, "--to", "csr")
    assert r.returncode == 73
    assert "--force" in r.stderr
    assert kept.read_bytes() == before
    assert spformat("convert", SMTX, kept, "--to", "csr", "--force").returncode == 0
    assert sf.load(kept).keys() == {SMTX.stem}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_sparsity_without_pruning(share: float) -> None:
    with pytest.raises(
        sf.errors.UsageError, match=r"sparsity: expected prune='magnitude' \(--prune magnitude\) with it"
    ):
        Recipe(sparsity=share)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["-n", "a"], "n: expected numbers of columns like 16,2048, got 'a'"),
        (["-n", "-4"], "got '-4'"),
        (["-n", "0"], "got '0'"),
        (["-n", "4", "--repeats", "0"], "--repeats"),
        (["-n", "4", "--limit", "0"], "--limit"),
        (["-n", "4", "--backend", "cudaa"], "unknown backend 'cudaa'"),
        (["-n", "4", "--include", "nothing*"], "--include 'nothing*' matches none of"),
    ],
)
def test_bench_refuses_what_it_cannot_time(args: list[str], text: str) -> None:
    r = spformat("bench", DIGITS, *args)
    assert r.returncode == 2, r.stderr
    assert text in r.stderr


def test_a_plot_that_cannot_be_drawn_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # not installed
    with pytest.raises(sf.errors.UsageError, match=r"--plot needs matplotlib: pip install 'spformat\[plot\]'"):
        bench.run(str(DIGITS), plot=str(tmp_path / "a.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", pytest)  # any module with a spec
    with pytest.raises(sf.errors.UsageError, match=r"--plot: expected a name in \.png, got 'a\.pdf'"):
        bench.run(str(DIGITS), plot="a.pdf")
    with pytest.raises(sf.errors.OutputError, match=r"nowhere/a\.png: --plot: cannot write into the folder"):
        bench.run(str(DIGITS), plot=str(tmp_path / "nowhere" / "a.png"))
    (tmp_path / "a.png").mkdir()
    with pytest.raises(sf.errors.OutputError, match=r"a\.png: target: expected a regular file, got a folder"):
        bench.run(str(DIGITS), plot=str(tmp_path / "a.png"))


@pytest.mark.parametrize("gpu", ["sm_99", "sm_80a", "130", "sm_90b", "sm_090"])
def test_a_gpu_that_nobody_builds(gpu: str) -> None:
    r = spformat("explain", DIGITS, "--gpu", gpu)
    assert r.returncode == 2
    said = " ".join(re.sub(r"[^\x21-\x7e]+", " ", r.stderr).split())
    assert "), or one of sm_70, sm_72, sm_75, sm_80, sm_86, sm_87, sm_88, sm_89, sm_90, sm_100" in said
    assert f"got '{gpu}'" in said


@pytest.mark.parametrize(
    ("gpu", "said"),
    [("sm_90a", "runs on cuda."), ("86", "runs on cuda."), ("sm_120", "runs on cuda."), ("sm_100a", "runs on cuda."),
     ("sm_75", "needs sm_80 or newer, got sm_75")],
)  # fmt: skip
def test_a_gpu_by_its_name_or_number(gpu: str, said: str, graph: Path) -> None:
    r = spformat("explain", graph / "g.safetensors", "--gpu", gpu)
    assert r.returncode == 0, r.stderr
    assert said in r.stdout


@pytest.mark.parametrize("verb", ["inspect", "explain", "validate"])
def test_an_include_that_matches_nothing(verb: str) -> None:
    r = spformat(verb, DIGITS, "--include", "re:weight", "--include", "nothing*")
    assert r.returncode == 2
    assert "--include 'nothing*' matches none of" in r.stderr


def test_explain_speaks_of_what_can_be_multiplied(tmp_path: Path) -> None:
    tensors = {"w": np.eye(4, dtype=np.float32), "ids": np.zeros((4, 4), np.int64), "bias": np.zeros(4, np.float32)}
    sf.save_dense(tmp_path / "a.safetensors", tensors)
    r = spformat("explain", tmp_path / "a.safetensors", "--json")
    assert r.returncode == 0, r.stderr
    assert [answer["tensor"] for answer in json.loads(r.stdout)] == ["w"]


def test_names_that_any_pattern_matches_are_included() -> None:
    names = ["a", "ab", "c", "d"]
    assert included(names, ["a", "re:^c"]) == ["a", "c"]
    assert included(names, ["*b", "a*"]) == ["a", "ab"]
    assert included(names, None) == included(names, []) == names


def test_an_empty_file_is_sound(tmp_path: Path) -> None:
    sf.save(tmp_path / "empty.safetensors", {})
    r = spformat("validate", tmp_path / "empty.safetensors")
    assert r.returncode == 0, r.stderr
    assert "0 checked, sound" in r.stdout


@pytest.mark.parametrize(
    "args",
    [
        ["inspect", DIGITS, "--bogus"],
        ["explain", DIGITS, "-n", "x"],
        ["explain", DIGITS, "--gpu", "h300"],
        ["convert", DIGITS],
        ["nonsense"],
    ],
    ids=str,
)
def test_a_misspelt_command_is_json_too(args: list[str]) -> None:
    r = spformat(*args, "--json")
    assert r.returncode == 2
    error = json.loads(r.stderr)
    assert (error["code"], error["exit_code"]) == ("UsageError", 2)
    assert r.stdout == ""


def test_json_keeps_exit_codes(tmp_path: Path, graph: Path) -> None:
    assert spformat("validate", DIGITS, "--expect", "two-four", "--json").returncode == 1
    assert spformat("diff", DIGITS, graph / "g.safetensors", "--json").returncode == 1
    assert spformat("inspect", DIGITS, "--json").returncode == 0


def test_a_graph_too_large_when_dense(graph: Path, tmp_path: Path) -> None:
    path, packed = graph / "g.safetensors", tmp_path / "ell.safetensors"
    (foreseen,) = foresee_checkpoint(path, Recipe(to="ell-buckets"))
    (made,) = convert_checkpoint(path, packed, "ell-buckets").outcomes
    assert (foreseen.bytes_out, foreseen.nnz, foreseen.target) == (made.bytes_out, made.nnz, made.target)
    assert [d for _, d in diff_checkpoints(path, packed)] == [None]
    a = sf.load(path)["g"]
    data, at = a.data.copy(), int(a.indptr.searchsorted(10, "right")) - 1
    data[10] = 7
    sf.save(tmp_path / "other.safetensors", {"g": a.with_arrays(data=data)})
    ((_, d),) = diff_checkpoints(packed, tmp_path / "other.safetensors")
    assert d is not None
    assert (d.count, d.index) == (1, (at, int(a.indices[10])))
    assert str(d).endswith("1.0 against 7.0")
    r = spformat("bench", path, "-n", "2", "--repeats", "1")
    assert r.returncode == 0, r.stderr
    assert "160,000,000,000 bytes requested" in r.stdout
    for args in (["inspect", path], ["plan", path], ["convert", path, tmp_path / "out"]):
        r = spformat(*args)
        assert r.returncode == 78
        assert "g.safetensors: tensor 'g'" in r.stderr
    r = spformat("inspect", graph / "g.npz")
    assert r.returncode == 78
    assert "g.npz: " in r.stderr


def test_what_is_stored_sparsely_is_foreseen_as_it_becomes(tmp_path: Path) -> None:
    half, full = np.tri(16, dtype=np.float32), np.ones((16, 16), np.float32)
    sf.save(tmp_path / "a.safetensors", {"half": sf.convert(half, "csr"), "full": sf.convert(full, "csr")})
    for to, larger in (("bitmask", {"half": False, "full": True}), ("dense", {"half": False, "full": False})):
        found = foresee_checkpoint(tmp_path / "a.safetensors", Recipe(to=to))
        assert {o.name: o.larger_than_dense for o in found} == larger
        assert [o.bytes_out for o in found] == [sf.convert(x, to).nbytes for x in (full, half)]
    pruned = Recipe(to="bitmask", prune="magnitude", sparsity=0.5)
    assert {o.name: o.nnz for o in foresee_checkpoint(tmp_path / "a.safetensors", pruned)} == {"full": 128, "half": 128}


def test_diff_of_stored_zeros_is_by_value(tmp_path: Path) -> None:
    x = np.diag([1, 2, 3]).astype(np.float32)
    a = sf.convert(x, "csr")
    zero = a.with_arrays(data=np.array([1, -0.0, 3], np.float32))
    gap = np.diag([1, 0, 3]).astype(np.float32)
    for name, m in (("a", a), ("zero", zero), ("gap", sf.convert(gap, "bitmask"))):
        sf.save(tmp_path / f"{name}.safetensors", {"w": m})
    paths = {name: tmp_path / f"{name}.safetensors" for name in ("a", "zero", "gap")}
    for one, other in (("zero", "gap"), ("gap", "zero")):
        assert [d for _, d in diff_checkpoints(paths[one], paths[other])] == [None]
    ((_, d),) = diff_checkpoints(paths["a"], paths["gap"])
    assert d is not None
    assert (d.count, d.index) == (1, (1, 1))


def test_diff_is_by_bits_and_names_the_place(tmp_path: Path) -> None:
    x = np.zeros((2, 7), np.float32)
    x[1, [2, 5]] = np.nan, 3
    sf.save(tmp_path / "a.safetensors", {"w": sf.convert(x, "csr")})
    sf.save(tmp_path / "b.safetensors", {"w": sf.convert(x, "bitmask")})
    assert [d for _, d in diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "b.safetensors")] == [None]
    x[1, 5] = 4
    sf.save(tmp_path / "c.safetensors", {"w": sf.convert(x, "csr")})
    ((_, d),) = diff_checkpoints(tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    assert (d and d.count, d and d.index) == (1, (1, 5))
    x[1, 2] = 1
    sf.save(tmp_path / "d.safetensors", {"w": sf.convert(x, "csr")})
    sf.save(tmp_path / "half.safetensors", {"w": sf.convert(x.astype(np.float16), "csr")})
    ((_, d),) = diff_checkpoints(tmp_path / "d.safetensors", tmp_path / "half.safetensors")
    assert "float32" in str(d)
    assert "float16" in str(d)


def test_diff_in_the_last_row_of_a_graph(graph: Path, tmp_path: Path) -> None:
    a = sf.load(graph / "g.safetensors")["g"]
    data = a.data.copy()
    data[-1] = 7
    sf.save(tmp_path / "other.safetensors", {"g": a.with_arrays(data=data)})
    ((_, d),) = diff_checkpoints(graph / "g.safetensors", tmp_path / "other.safetensors")
    row = int(a.indptr.searchsorted(a.data.size)) - 1
    assert row * NODES > 2**31
    assert (d and d.count, d and d.index) == (1, (row, int(a.indices[-1])))


def test_the_table_of_formats_has_lines_of_its_own() -> None:
    out = spformat("formats").stdout
    assert "\\n" not in out
    assert any(line.split() == ["indices", "[nnz]"] for line in out.splitlines())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a.pt", "a.pth"])
def test_a_folder_of_pickles_says_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(
        sf.errors.InputError, match=rf"no \.safetensors file in the folder; {name} is a PyTorch file"
    ) as e:
        open_source(tmp_path)
    assert e.value.exit_code == 66
    assert "weights_only=True" in e.value.message


def test_tensors_whose_names_meet(tmp_path: Path) -> None:
    sf.save_dense(tmp_path / "a.safetensors", {"w": np.eye(4), "w.data": np.ones(3)})
    r = spformat("convert", tmp_path / "a.safetensors", tmp_path / "out", "--to", "csr")
    assert r.returncode == 2
    assert "'w.data'" in r.stderr
    assert "--exclude" in r.stderr
    kept = spformat("convert", tmp_path / "a.safetensors", tmp_path / "out", "--to", "csr", "--exclude", "w")
    assert kept.returncode == 0, kept.stderr


def test_urls(tmp_path: Path) -> None:
    for verb, *more in (["inspect"], ["validate"], ["plan"], ["explain"], ["diff", DIGITS]):
        r = spformat(verb, f"file://{DIGITS}", *more)
        assert r.returncode == 0, r.stderr
    url = "nosuch://bucket/a.mtx"  # test_remote.py converts one that is there
    r = spformat("convert", url, tmp_path / "a.safetensors", "--to", "csr")
    assert r.returncode == 2
    assert f"{url}: " in r.stderr
    assert not any(tmp_path.iterdir())
    with pytest.raises(sf.errors.InputError, match="a URL"):
        sf.load("s3://bucket/a.safetensors")


def test_matrix_files_in_capitals(graph: Path, tmp_path: Path) -> None:
    upper = tmp_path / "G.NPZ"
    upper.write_bytes((graph / "g.npz").read_bytes())
    r = spformat("convert", upper, tmp_path / "g.safetensors", "--to", "csr")
    assert r.returncode == 0, r.stderr
    assert sf.load(tmp_path / "g.safetensors")["G"] == sf.load(graph / "g.safetensors")["g"]
    assert "--max-memory" in spformat("inspect", upper).stderr
    assert spformat("bench", upper, "-n", "1", "--repeats", "1").returncode == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["convert", "g.npz", "out.safetensors", "--seed", "1"], "--seed is for --values normal"),
        (["convert", "g.npz", "out.safetensors", "--values", "ones", "--seed", "1"], "--seed is for --values normal"),
        (["convert", "g.safetensors", "out", "--nonfinite", "keep"], "nonfinite: expected prune='magnitude'"),
        (["plan", "g.safetensors", "--nonfinite", "keep"], "nonfinite: expected prune='magnitude'"),
    ],
)
def test_options_that_another_option_needs(
    graph: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.chdir(graph)
    r = spformat(*words)
    assert (r.returncode, text in r.stderr) == (2, True), r.stderr
    assert not any(graph.glob("out*"))


def test_nothing_is_written_to_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sf.save_dense("w.safetensors", {"w": np.eye(64, dtype=np.float32)})
    for flags in ([], ["--json"], ["--dry-run"]):
        result = spformat("convert", "w.safetensors", "-", *flags)
        assert result.returncode == 2
        assert "nothing is written to a pipe" in " ".join(result.stderr.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.safetensors"]


@pytest.mark.parametrize("dtype", ["foo", "int32", "f4,f4", "float32[", "1" * 5000])
def test_a_dtype_that_is_no_value_type_is_a_wrong_option(tmp_path: Path, graph: Path, dtype: str) -> None:
    """2, and not 65, which says of the file that it is broken."""
    for words in (
        ("recommend", graph / "g.safetensors"), ("convert", graph / "g.npz", tmp_path / "out.safetensors"),
    ):  # fmt: skip
        r = spformat(*words, "--dtype", dtype)
        assert r.returncode == 2, r.stderr
        assert r.stderr.startswith("error: --dtype: expected a value type (float64, float32, ")
        assert f"got '{dtype[:37]}" in r.stderr
    assert not any(tmp_path.iterdir())


def test_short_names_of_dtypes(tmp_path: Path) -> None:
    r = spformat("convert", SMTX, tmp_path / "out.safetensors", "--to", "csr", "--dtype", "BF16")
    assert r.returncode == 0, r.stderr
    assert sf.load(tmp_path / "out.safetensors")[SMTX.stem].dtype.name == "bfloat16"


@pytest.mark.parametrize(
    ("words", "which"),
    [
        (["inspect", ""], "SRC"), (["validate", ""], "SRC"), (["convert", "", "out"], "SRC"), (["merge", ""], "DST"),
        (["convert", DIGITS, ""], "DST"), (["diff", "", DIGITS], "A"), (["diff", DIGITS, ""], "B"),
        (["explain", ""], "SRC"), (["recommend", ""], "SRC"), (["plan", ""], "SRC"),
    ],
)  # fmt: skip
def test_an_empty_path_is_a_wrong_argument(words: list[str], which: str) -> None:
    """As a shell makes of a variable that is not set; the message was about the current folder."""
    r = spformat(*words)
    text = f"error: {which} is empty: expected a file or folder; was it a variable of the shell that is not set?\n"
    assert (r.returncode, r.stderr) == (2, text)
    if words[0] == "inspect":
        error = json.loads(spformat(*words, "--json").stderr)
        assert (error["code"], error["exit_code"]) == ("UsageError", 2)


@pytest.mark.parametrize("verb", ["bench", "tune"])
def test_an_empty_path_where_none_may_be_given(verb: str) -> None:
    r = spformat(verb, "")
    assert (r.returncode, "expected SRC, a checkpoint or a matrix" in r.stderr) == (2, True)
