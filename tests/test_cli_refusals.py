"""What commands refuse: the message names file and tensor, and what it advises works when it is typed."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse as sp
from catalogue import command

import spformat as sf
from spformat.checkpoint import Recipe, Rule, convert_checkpoint, open_source, plan_tensors
from spformat.checkpoint.entry_names import entries_of
from spformat.checkpoint.foresee import foresee_checkpoint


def test_a_refusal_to_prune_names_file_and_tensor(tmp_path: Path) -> None:
    x = np.ones((64, 64), np.float32)
    x[0, 1] = np.nan
    sf.save_dense(tmp_path / "m.safetensors", {"w": x})
    for to in ("two-four", "auto", "dense"):
        for verb in (["plan"], ["convert", tmp_path / "out"]):
            flags = ("--to", to, "--prune", "magnitude", "--sparsity", "0.5", "--json")
            r = command(verb[0], tmp_path / "m.safetensors", *verb[1:], *flags)
            error = json.loads(r.err)
            assert (r.code, error["path"], error["tensor"]) == (3, str(tmp_path / "m.safetensors"), "w"), (to, verb)


def hint_of(err: str) -> list[str]:
    """The words after "spformat" of the command that a message advises."""
    (line,) = [line for line in err.split("\n") if line.startswith("hint: ")]
    return shlex.split(line)[2:]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a matrix that does not fit 2:4 in m.npz and in m.safetensors."""
    x = np.zeros((64, 64), np.float32)
    x[:, :3] = 1
    sp.save_npz(tmp_path / "m.npz", sp.csr_array(x))
    sf.save_dense(tmp_path / "m.safetensors", {"w": x})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("typed", ["m.safetensors m.smtx", "m.npz m2.smtx", "m.npz m2.npz --to bsr:48x48"])
def test_a_dry_run_refuses_what_a_matrix_file_cannot_hold(here: Path, typed: str) -> None:
    sf.save_dense(here / "m.safetensors", {"w": np.full((64, 64), 2, np.float32)}, overwrite=True)
    sp.save_npz(here / "m.npz", 2 * sp.eye_array(64, format="csr"))
    dry, done = (command("convert", *typed.split(), *flags) for flags in (["--dry-run"], []))
    assert dry == done
    assert done.code == 2


@pytest.fixture
def folders(here: Path) -> Path:
    """A folder model of two shards, its conversion done, and the file taken, beside the files of ``here``."""
    for i in (1, 2):
        x = np.eye(32, dtype=np.float32) * i
        Path("model").mkdir(exist_ok=True)
        sf.save_dense(f"model/model-0000{i}-of-00002.safetensors", {f"layer.{i}": x})
    assert command("convert", "model", "done", "--quiet").code == 0
    Path("taken").write_text("theirs")
    return here


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ("model model", 73), ("model model/inside", 73), ("model .", 73), ("model done", 73), ("model taken", 73),
        ("model done --resume --to csr", 73), ("model one.safetensors", 73), ("m.safetensors m.safetensors", 73),
        ("m.safetensors nowhere/out.safetensors", 73), ("m.npz m.npz", 73), ("m.npz m.safetensors", 73),
        ("model out --part 3/2", 2), ("model out --part 1", 2), ("model out --executor cluster", 2),
        ("model out --workers 2", 2), ("model out --executor threads --scheduler tcp://x:1", 2),
        ("model out --executor threads --device cuda:0,cuda:1", 2), ("m.safetensors out.safetensors --part 1/2", 2),
        ("model out --device cuda:64", 69), ("model model --in-place", 2), ("model out --in-place", 2),
    ],
)  # fmt: skip
def test_a_dry_run_refuses_what_the_run_refuses(folders: Path, typed: str, code: int) -> None:
    """As names lead into another folder and options contradict one another, without a tensor being read."""
    dry, done = (command("convert", *typed.split(), *flags) for flags in (["--dry-run"], []))
    assert dry == done
    assert done.code == code, done.err
    assert not Path("out").exists()


def test_a_dry_run_of_a_part_has_the_tensors_of_that_part(folders: Path) -> None:
    words = ("convert", "model", "out", "--part", "2/2", "--json")
    dry, done = (json.loads(command(*words, *flags).out)["tensors"] for flags in (["--dry-run"], []))
    assert [t["name"] for t in dry] == [t["name"] for t in done] == ["layer.2"]


@pytest.mark.parametrize(
    "typed",
    [
        "inspect m.npz --include m", "plan m.npz --include=m --to bitmask", "plan m.npz --rule *=csr",
        "plan m.npz --to two-four --misfit bitmask", "plan m.npz --rule *=fastest -n 4",
    ],
)  # fmt: skip
def test_the_conversion_after_a_look_at_a_matrix_file_works(here: Path, typed: str) -> None:
    planned = command(*typed.split())
    answer = command(*hint_of(planned.err), "--json")
    assert answer.code == 0, answer.err
    if typed.startswith("plan"):
        (row,) = json.loads(command(*typed.split(), "--json").out)["tensors"]
        assert json.loads(answer.out)["target"] == row["target"]


def test_the_plan_after_recommend_works_where_no_kernel_multiplies_a_tensor(here: Path) -> None:
    x = np.eye(64, dtype=np.float32)
    sf.save_dense("mixed.safetensors", {"w": x, "small": x.astype(ml_dtypes.float8_e4m3fn)})
    words = hint_of(command("recommend", "mixed.safetensors", "-n", "4").err)
    planned = command(*words, "--json")
    assert planned.code == 0, planned.err
    assert [t["target"] == "keep" for t in json.loads(planned.out)["tensors"]] == [False, True]


def test_no_conversion_is_advised_that_would_prune_a_matrix_file(here: Path) -> None:
    planned = command("plan", "m.npz", "--to", "two-four", "--prune", "magnitude")
    assert (planned.code, "hint: " in planned.err) == (0, False), planned.err


@pytest.mark.parametrize(
    ("typed", "path", "tensor"),
    [
        ("convert m.npz out.safetensors --to two-four", "m.npz", "m"),
        ("convert m.npz out.safetensors --to=two-four", "m.npz", "m"),
        ("convert m.safetensors out --to two-four", "m.safetensors", "w"),
        ("bench m.safetensors --to two-four -n 1 --repeats 1 --device cpu", "m.safetensors", "w"),
    ],
)
def test_a_matrix_that_does_not_fit_is_named_and_the_hint_works(here: Path, typed: str, path: str, tensor: str) -> None:
    words = typed.split()
    r = command(*words)
    error = json.loads(command(*words, "--json").err.strip().split("\n")[-1])
    assert r.code == error["exit_code"] == 3
    assert (os.path.basename(error["path"]), error["tensor"]) == (path, tensor)
    assert f"{path}: tensor '{tensor}': " in r.err
    done = command(*hint_of(r.err))
    assert done.code == 0, done.err


def test_a_hint_is_no_option_that_was_given_already(here: Path) -> None:
    planned = command("plan", "m.safetensors", "--to", "two-four", "--misfit", "error")
    assert (planned.code, "hint: " in planned.err) == (3, False)
    assert hint_of(command("plan", "m.npz", "--to", "two-four").err)[-2:] == ["--misfit", "keep"]
    x = np.ones((64, 64), np.float32)
    x[0, 0] = np.inf
    sf.save_dense("inf.safetensors", {"w": x})
    r = command("convert", "inf.safetensors", "pruned", "--to", "two-four", "--prune", "magnitude")
    assert r.code == 3
    assert command(*hint_of(r.err)).code == 0


@pytest.fixture
def beyond(here: Path) -> np.ndarray:
    """The values of large.safetensors, 2.8 MB of them, of which the group at row 1500 alone does not fit 2:4."""
    x = np.zeros((2000, 700), np.float16)
    x[:, ::2] = 1
    x[1500, :3] = 1
    sf.save_dense("large.safetensors", {"w": x})
    return x


def test_a_matrix_beyond_the_budget_that_does_not_fit_ends_as_any_other(beyond: np.ndarray) -> None:
    words = ("convert", "large.safetensors", "out", "--to", "two-four")
    whole = json.loads(command(*words, "--json").err)
    assert (whole["exit_code"], whole["first"], "rows" in whole) == (3, [1500, 0], False)
    r = command(*words, "--max-memory", "2MB")
    error = json.loads(command(*words, "--max-memory", "2MB", "--json").err)
    assert r.code == error["exit_code"] == 3
    assert (os.path.basename(error["path"]), error["tensor"], error["count"]) == ("large.safetensors", "w", 1)
    begin, end = error["rows"]
    assert begin + error["first"][0] == 1500 < end
    assert f"large.safetensors: tensor 'w': in rows {begin}..{end - 1}, numbered from 0 here" in r.err
    assert "hint: " not in r.err  # --misfit keep would be refused
    assert command(*words, "--max-memory", "2MB", "--exclude", "w").code == 0


@pytest.mark.parametrize("to", ["keep", "dense", "csr", "bitmask"])
def test_what_is_not_read_as_a_whole_may_be_beyond_the_budget(beyond: np.ndarray, to: str) -> None:
    done = command("convert", "large.safetensors", "out.safetensors", "--to", to, "--max-memory", "2MB")
    assert done.code == 0, done.err
    with sf.safe_open("out.safetensors") as f:
        x = f.read("w")
    np.testing.assert_array_equal(x if isinstance(x, np.ndarray) else x.to_dense(), beyond)


@pytest.mark.parametrize("to", ["coo", "csc", "dbsr", "ell-buckets"])
def test_what_is_read_as_a_whole_is_refused_with_the_name_of_the_file(beyond: np.ndarray, to: str) -> None:
    r = command("convert", "large.safetensors", "out", "--to", to, "--max-memory", "2MB")
    assert r.code == 78
    assert f"large.safetensors: w: {to} is converted as a whole, not in row chunks" in r.err


@pytest.mark.parametrize("shape", [(512, 512), (2, 512, 512)])
def test_a_type_that_the_target_does_not_take_is_named_whatever_the_budget(here: Path, shape: tuple[int, ...]) -> None:
    sf.save_dense(here / "wide.safetensors", {"w": np.zeros(shape)})
    for flags in ([], ["--max-memory", "1MB"]):
        r = command("convert", "wide.safetensors", "out", "--to", "keep", "--rule", "w=two-four", *flags)
        assert r.code == 3, r.err
        assert re.search(r"wide\.safetensors: tensor 'w(\.0)?': two-four: values of dtype float64", r.err)
        assert ("hint: " in r.err) == (not flags)  # --misfit keep would read the matrix, which is beyond the budget


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "auto"], "--prune magnitude to auto needs --sparsity"),
        (["--to", "fastest", "-n", "16"], "--prune magnitude to fastest needs --sparsity"),
        (["--to", "keep", "--rule", "w=auto"], "--prune magnitude to auto needs --sparsity"),
        (["--to", "bsr:32x32+csr"], "--prune magnitude to bsr:32x32+csr needs --sparsity"),
        (["--to", "keep"], "every tensor is kept, and so none is pruned"),
        (["--to", "keep", "--sparsity", "0.5"], "every tensor is kept, and so none is pruned"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_pruning_that_would_prune_nothing_is_refused(here: Path, flags: list[str], message: str) -> None:
    for verb in (["plan", "m.safetensors"], ["convert", "m.safetensors", "out"]):
        r = command(*verb, "--prune", "magnitude", *flags)
        assert r.code == 2, r.out
        assert message in r.err
    assert not Path("out").exists()


def test_pruning_beside_targets_that_hold_everything(here: Path) -> None:
    for flags in (["--to", "auto", "--rule", "w=two-four"], ["--to", "auto", "--sparsity", "0.99"]):
        r = command("convert", "m.safetensors", "out", "--force", "--prune", "magnitude", "--json", *flags)
        assert r.code == 0, r.err
        assert json.loads(r.out)["pruned"] > 0


X = np.eye(64, dtype=np.float32)
TAKEN = {
    "arrays": {"w": X, "w.data": X[0], "w.indptr": X[0]},
    "stack": {"w": np.stack([X] * 3), "w.0": X[0]},
    "arrays of a stack": {"w": np.stack([X] * 3), "w.1.indices": X[0]},
}


@pytest.mark.parametrize("case", TAKEN)
def test_plan_refuses_the_names_that_convert_refuses(here: Path, case: str) -> None:
    sf.save_dense("names.safetensors", TAKEN[case])
    planned = command("plan", "names.safetensors", "--to", "csr")
    tried = command("convert", "names.safetensors", "out", "--to", "csr", "--dry-run")
    refused = command("convert", "names.safetensors", "out", "--to", "csr")
    assert (planned.code, tried.code, refused.code) == (2, 2, 2)
    assert planned.err == tried.err == refused.err
    assert "names.safetensors: " in refused.err
    for flags in (["--to", "dense"], ["--to", "csr", "--exclude", "w"]):
        assert command("plan", "names.safetensors", *flags).code == 0
        done = command("convert", "names.safetensors", "fine", "--force", *flags)
        assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("tensors", "flags", "message"),
    [
        ({"x" * 1020: X}, [], "expected at most 1,024, got 1,0"),
        ({"é" * 510: X}, [], "expected at most 1,024, got 1,0"),
        ({"v": X, "w": X}, ["--max-tensors", "5"], "number of tensors: expected at most 5, got 6"),
    ],
    ids=["a long name", "a long name in another script", "many"],
)
def test_plan_refuses_arrays_that_are_beyond_the_limits(
    here: Path, tensors: dict[str, Any], flags: list[str], message: str
) -> None:
    sf.save_dense("names.safetensors", tensors)
    for words in (["plan"], ["convert", "out", "--dry-run"], ["convert", "out"]):
        verb, *more = words
        r = command(verb, "names.safetensors", *more, "--to", "csr", *flags)
        assert (r.code, message in r.err, "names.safetensors: " in r.err) == (78, True, True), r.err
    assert command("plan", "names.safetensors", "--to", "dense", *flags).code == 0


@pytest.mark.parametrize("text", ["csr", "bitmask", "sr-bcrs", "bsr", "dbsr", "ell-buckets", "csc", "coo", "two-four",
                                  "vector-nm:n=1,m=4,vector_length=4", "bsr:32x32,density>=0.5+csr", "two-four+csr:column_degree>=9+bitmask", "dense"])  # fmt: skip
def test_the_names_that_are_checked_are_those_in_the_file(here: Path, text: str) -> None:
    x = np.zeros((64, 64), np.float16)
    x[::4, ::8] = 1
    sf.save_dense("in.safetensors", {"s": np.stack([x] * 2), "w": x, "bias": x[0]})
    recipe = Recipe("keep", (Rule("w", text), *([] if "+" in text else [Rule("s", text)])))
    plans = {plan.name: plan for plan in plan_tensors(open_source("in.safetensors"), recipe)}
    foreseen = foresee_checkpoint("in.safetensors", recipe)
    convert_checkpoint("in.safetensors", "out.safetensors", recipe)
    raw = (here / "out.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert {name for o in foreseen for name in entries_of(plans[o.name], o)} == header.keys() - {"__metadata__"}
