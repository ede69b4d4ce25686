"""Stacks of matrices: what holds for them, and every way of a tensor [E, M, K] into a packed checkpoint and out of it."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import laws
import numpy as np
import pytest
import scipy.sparse as sp
import stand_in_cupy
from cases import CASES
from catalogue import command
from test_parts import tree

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.checkpoint import Recipe, Rule, convert_checkpoint, merge_parts
from spformat.checkpoint.check import validate_checkpoint
from spformat.checkpoint.diff import diff_checkpoints
from spformat.checkpoint.foresee import foresee_checkpoint
from spformat.errors import UsageError
from spformat.preprocess import masks
from spformat.storage import tensorfile

SHARD = "spformat-00001-of-00001.safetensors"
GATE, CONV = "layers.0.experts.gate_up_proj", "layers.0.conv.weight"


def two_four(*shape: int, seed: int = 0, dtype: str = "float16") -> np.ndarray[Any, Any]:
    x = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    flat = x.reshape(-1, shape[-1])
    return masks.apply(flat, masks.magnitude_nm(flat, 2, 4)).reshape(shape)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with fused experts, in two files."""
    (tmp_path / "moe").mkdir()
    first = {
        GATE: two_four(5, 70, 64),
        CONV: two_four(64, 1, 4, seed=2),
        "layers.0.q.weight": two_four(64, 64, seed=3),
        "layers.0.norm.weight": np.ones(64, np.float16),
    }
    sf.save_dense(tmp_path / "moe" / "a.safetensors", first)
    sf.save_dense(tmp_path / "moe" / "b.safetensors", {"layers.1.experts.down_proj": two_four(3, 64, 48, seed=4)})
    return tmp_path / "moe"


def only(folder: Path, name: str) -> Any:
    with sf.open(folder) as checkpoint:
        return checkpoint[name]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_laws(case: str, dtype: str, tmp_path: Path) -> None:
    """Decoded it is the array, bit for bit; files, pickles and copies agree."""
    x = CASES[case](dtype)
    a = sf.stack([sf.convert(x, "csr"), sf.convert(x, "bitmask"), sf.convert(x, "bsr:blocksize=4x8")])
    assert (a.shape, a.ndim, len(a), a.dtype, a.is_validated) == ((3, *x.shape), 3, 3, x.dtype, True)
    assert all(laws.same(m, laws.without_negative_zeros(x)) for m in a.to_dense())
    assert a.nbytes == sum(p.nbytes for p in a) == sum(v.nbytes for v in a.all_arrays().values())
    assert a.nnz == sum(p.nnz for p in a)
    laws.check_container(a, tmp_path)
    assert pickle.loads(pickle.dumps(a)) == a == a.copy()
    assert a[1:] == sf.Stack(parts=a.parts[1:]) != a
    assert sf.stack(a, "csr")[2] == a[0]


def test_methods_and_refusals() -> None:
    x = two_four(2, 8, 16)
    a = sf.stack(x, "two-four")
    assert a.density == np.count_nonzero(x) / x.size
    np.testing.assert_array_equal((a * 2).to_dense(), x * 2)
    np.testing.assert_array_equal(a.astype("float32").to_dense(), x.astype("float32"))
    assert a.sum() == pytest.approx(float(x.astype("float64").sum()))
    assert sf.stack(list(x), "csr") == sf.stack(x, "csr")
    assert a[np.int64(1)] is a[-1] is a.parts[1]
    assert sf.stack(np.ones((2, 3, 4), np.int64), "csr", dtype="float32").dtype == np.float32
    B = np.ones((16, 3), np.float16)
    for text, call in {
        r"multiply them one by one, as in spmm\(w\[0\], B\)": lambda: a @ B,
        r"one by one, as in spmm\(w\[0\]": lambda: sf.linear(B.T, a),
        r"got a stack of 2": lambda: sf.plan(a, 3),
        r"as in w\[0\]\.T": lambda: a.T,
        r"take one of them, as in w\[0\]\.to_csr": lambda: sf.convert(a, "csr"),
        r"take one of them, as in w\[0\]\.smallest\(\), or stack\(w, 'auto'\)": lambda: a.smallest(),
        r"stack\(w, 'auto'\) to convert each": lambda: sf.convert(a, "auto"),
        r"or stack\(w, 'auto'\) to convert": lambda: sf.convert(a, "auto", dtype="float32"),
        r"name the format of its matrices": lambda: sf.convert(x[0], "stack"),
        r"spformat\.stack takes \[E, M, K\]": lambda: sf.convert(x, "csr"),
        r"expected an array \[E, M, K\], got shape \(8, 16\)": lambda: sf.stack(x[0], "csr"),
        r"got one \(two-four\); use stack": lambda: sf.stack(a[0]),
        r"expected one matrix or more, got none": lambda: sf.stack([], "csr"),
        r"expected one matrix or more, got ndarray": lambda: sf.Stack(parts=np.zeros((2, 3, 3))),
        r"expected no axis": lambda: a.sum(axis=0),
        r"expected the number of a matrix in -2 \.\. 1, or a slice, got 2": lambda: a[2],
        r"or a slice, got -3": lambda: a[-3],
        r"or a slice, got \(0, 1\)": lambda: a[0, 1],
        r"or a slice, got True": lambda: a[True],
        r"or a slice, got array": lambda: a[np.array([0, 1])],
        r"or a slice, got slice\('x', None": lambda: a["x":],  # type: ignore[misc]
    }.items():
        with pytest.raises(sf.errors.UsageError, match=text):
            call()
    with pytest.raises(sf.errors.ArrayError, match=r"part 1: expected shape \(8, 16\), got \(4, 16\)"):
        sf.stack([x[0], x[1, :4]], "csr")
    with pytest.raises(sf.errors.ArrayError, match="expected 3 parts"):
        sf.Stack(shape=(3, 8, 16), parts=a.parts)
    with pytest.raises(sf.errors.ArrayError, match="part 1: expected dtype float16"):
        sf.stack([a[0], sf.convert(x[1], "csr", dtype="float32")])


def test_moves_to_a_device_and_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a = sf.stack(two_four(2, 8, 16), "csr")
    sf.save(tmp_path / "w.safetensors", {"w": a})
    cupy = stand_in_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(tensorfile, "SCAN_ON_DEVICE", 2**40)
    there = a.to("cuda")
    assert all(isinstance(v, cupy.ndarray) for v in there.all_arrays().values())
    assert (there.device, there.is_validated, there.to("cpu") == a) == ("cuda:0", True, True)
    assert sf.load(tmp_path / "w.safetensors", device="cuda")["w"] == a


# ------------------------------------------------------------------ checkpoints

TARGETS = ["two-four", "csr", "bitmask", "bsr:blocksize=16x16", "vector-nm:n=2,m=4,vector_length=1", "sr-bcrs",
           "ell-buckets", "auto", "keep", "dense"]  # fmt: skip


@pytest.mark.parametrize("to", TARGETS)
def test_there_and_back(model: Path, to: str, tmp_path: Path) -> None:
    """Every target; the outcomes are those that were foreseen, the values are the same, and dense is the input again."""
    there, back = tmp_path / "there", tmp_path / "back"
    report = convert_checkpoint(model, there, to)
    foreseen = {o.name: o for o in foresee_checkpoint(model, Recipe(to=to))}
    for o in report.outcomes:
        if to != "dense":  # there it says "dense" of what is kept, too
            assert o.target.partition(":")[0] == foreseen[o.name].target.partition(":")[0]
        assert o.shape == foreseen[o.name].shape
        assert o.bytes_out == foreseen[o.name].bytes_out
    assert [d for _, d in diff_checkpoints(model, there)] == [None] * 5
    convert_checkpoint(there, back, "dense")
    for shard in ("a", "b"):
        original = {k: np.asarray(v.data if isinstance(v, sf.Dense) else v) for k, v in
                    sf.safe_open(model / f"{shard}.safetensors").items()}  # fmt: skip
        for name, x in original.items():
            y = only(back, name)
            assert laws.same(np.asarray(y.data if isinstance(y, sf.Dense) else y), laws.without_negative_zeros(x))
    x = only(there, GATE)
    assert isinstance(x, np.ndarray if to in ("keep", "dense") else sf.Stack)
    if isinstance(x, sf.Stack):
        assert len({p.name for p in x}) == 1
        assert sum(p.nbytes for p in x) == next(o.bytes_out for o in report.outcomes if o.name == GATE)
        assert command("validate", there).code == 0
        for other in ("csr", "keep", "auto"):
            convert_checkpoint(there, tmp_path / "again", other, force=True)
            assert [d for _, d in diff_checkpoints(model, tmp_path / "again")] == [None] * 5


def test_auto_is_the_smallest_for_the_whole_stack(model: Path, tmp_path: Path) -> None:
    rows = json.loads(command("inspect", model, "--json").out)["tensors"]
    sizes = next(r for r in rows if r["name"] == GATE)["sizes"]
    convert_checkpoint(model, tmp_path / "auto", "auto")
    assert only(tmp_path / "auto", GATE).nbytes == min(sizes.values())
    for text, nbytes in sizes.items():
        if text != "dense":
            assert sf.stack(two_four(5, 70, 64), text).nbytes == nbytes, text


def test_inspect_counts_the_empty_blocks_of_every_matrix(tmp_path: Path) -> None:
    """Each of the 16 matrices has a row of ten blocks. The rows of all of them are 15 rows of blocks, if joined."""
    x = np.zeros((16, 15, 160), np.float32)
    x.reshape(16, 15, 5, 32)[..., :16] = 1
    sf.save(tmp_path / "w.safetensors", {"all": sf.stack(x, "csr"), "one": sf.convert(x[0], "csr")})
    rows = json.loads(command("inspect", tmp_path / "w.safetensors", "--json").out)["tensors"]
    assert all("16x16 blocks, 50 % empty" in r["patterns"] for r in rows), [r["patterns"] for r in rows]


def test_a_matrix_that_does_not_fit_decides_for_its_stack(model: Path, tmp_path: Path) -> None:
    x = two_four(4, 64, 64)
    x[2, 0, :4] = 1
    sf.save_dense(tmp_path / "w.safetensors", {"w": x, "v": two_four(2, 64, 64)})
    with pytest.raises(sf.errors.StructureError) as e:
        convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "out", "two-four")
    assert e.value.fields["tensor"] == "w.2"
    foreseen = {o.name: o for o in foresee_checkpoint(tmp_path / "w.safetensors", Recipe(to="two-four"))}
    assert foreseen["w"].error.startswith("matrix 2: ")
    for misfit, kind in (("keep", np.ndarray), ("bitmask", sf.Stack), ("auto", sf.Stack)):
        recipe = Recipe(to="two-four", misfit=misfit)
        report = convert_checkpoint(tmp_path / "w.safetensors", tmp_path / misfit, recipe)
        foreseen = {o.name: o for o in foresee_checkpoint(tmp_path / "w.safetensors", recipe)}
        assert {o.name: (o.target, o.bytes_out, o.why) for o in report.outcomes} == {
            n: (o.target, o.bytes_out, o.why) for n, o in foreseen.items()
        }
        w = only(tmp_path / misfit, "w")
        assert isinstance(w, kind)
        assert isinstance(w, np.ndarray) or {p.name for p in w} == {"bitmask"}
        assert {p.name for p in only(tmp_path / misfit, "v")} == {"two-four"}
        assert [d for _, d in diff_checkpoints(tmp_path / "w.safetensors", tmp_path / misfit)] == [None, None]
    r = command("validate", tmp_path / "w.safetensors", "--expect", "two-four")
    assert r.code == 1
    assert "matrix 2" in " ".join(r.out.split())


def test_prunes_each_matrix_by_itself(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((3, 40, 64)).astype(np.float32)
    x[1] *= 100
    sf.save_dense(tmp_path / "w.safetensors", {"w": x})
    expected = np.stack([masks.apply(m, masks.magnitude(m, 0.75)) for m in x])
    for to in ("csr", "dense"):
        recipe = Recipe(to=to, prune="magnitude", sparsity=0.75)
        (o,) = convert_checkpoint(tmp_path / "w.safetensors", tmp_path / to, recipe).outcomes
        w = only(tmp_path / to, "w")
        np.testing.assert_array_equal(w if to == "dense" else w.to_dense(), expected)
        assert (o.pruned, o.nnz) == (x.size - x.size // 4, x.size // 4)
        assert o.norm == pytest.approx(float(np.linalg.norm(x)))
        assert o.lost_norm == pytest.approx(float(np.linalg.norm(x - expected)))
        assert o.lost_sum == pytest.approx(float(np.abs(x - expected).sum(dtype=np.float64)))


def test_auto_prunes_values_of_a_stack_as_of_a_matrix(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    blocks = np.zeros(64)
    blocks[rng.permutation(64)[:36]] = 1
    some = np.kron(blocks.reshape(8, 8), np.ones((64, 64))) * (rng.random((512, 512)) < 0.95)
    w = (some * rng.normal(size=(512, 512))).astype(np.float16)
    sf.save_dense(tmp_path / "m.safetensors", {"experts": np.stack([w, w]), "one": w})
    halved = Recipe(to="auto", prune="magnitude", sparsity=0.5)  # bsr: half of the blocks are empty before the pruning
    beside = Recipe(to="auto", rules=(Rule("one", "two-four"),), prune="magnitude")
    for recipe, pruned in ((halved, w.size // 2 - int((w == 0).sum())), (beside, 0)):
        outcomes = convert_checkpoint(tmp_path / "m.safetensors", tmp_path / "out", recipe, force=True).outcomes
        stacked, single = (next(o for o in outcomes if o.name == name) for name in ("experts", "one"))
        assert (stacked.target, stacked.pruned) == ("bsr:blocksize=64x64", 2 * pruned)
        assert single.pruned == pruned or recipe is beside
        assert stacked in foresee_checkpoint(tmp_path / "m.safetensors", recipe)
        matrices = only(tmp_path / "out", "experts")
        assert [m.nnz for m in matrices] == [int((w != 0).sum()) - pruned] * 2


def test_which_tensors_are_stacks(model: Path, tmp_path: Path) -> None:
    """Kernels of convolutions and position embeddings are kept, unless a rule names them."""
    plan = command("plan", model, "--to", "two-four", "--json")
    targets = {t["name"]: (t["target"].partition(":")[0], t.get("why", "")) for t in json.loads(plan.out)["tensors"]}
    assert targets[GATE][0] == "two-four"
    assert targets[CONV] == ("keep", "3-D: a --rule that names it converts its matrices")
    convert_checkpoint(model, tmp_path / "out", Recipe(to="keep", rules=(Rule.parse(f"{CONV}=csr"),)))
    assert only(tmp_path / "out", CONV).shape == (64, 1, 4)
    sf.save_dense(tmp_path / "vit.safetensors", {"pos_embed": np.ones((1, 197, 768), np.float32)})
    convert_checkpoint(tmp_path / "vit.safetensors", tmp_path / "vit", "csr")
    assert isinstance(only(tmp_path / "vit", "pos_embed"), np.ndarray)


@pytest.mark.parametrize("to", ["two-four", "auto", "dense"])
def test_parts_give_the_bytes_of_one_run(model: Path, to: str, tmp_path: Path) -> None:
    convert_checkpoint(model, tmp_path / "whole", to)
    for i in (1, 2, 3):
        convert_checkpoint(model, tmp_path / "parts", to, part=f"{i}/3")
    merge_parts(tmp_path / "parts")
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")


def test_one_matrix_is_read_alone(model: Path, tmp_path: Path) -> None:
    convert_checkpoint(model, tmp_path / "out", "csr")
    (path,) = (p for p in (tmp_path / "out").glob("*.safetensors") if GATE in sf.safe_open(p))
    raw = bytearray(path.read_bytes())
    with sf.safe_open(path) as f:
        assert f.read(f"{GATE}.3") == sf.convert(two_four(5, 70, 64)[3], "csr")
        assert f.info(f"{GATE}.3").shape == (70, 64)
        assert f"{GATE}.3" not in f
        begin = f.ranges(f"{GATE}.1")[-1][0]
    raw[begin] ^= 1
    path.write_bytes(raw)
    with sf.safe_open(path) as f:
        f.read(f"{GATE}.3")
        with pytest.raises(sf.errors.IntegrityError):
            f.read(GATE)


def test_a_damaged_tensor_of_a_packed_file_is_found(tmp_path: Path) -> None:
    """A kept tensor has one checksum for all of its matrices."""
    sf.save(tmp_path / "w.safetensors", {"w": two_four(3, 64, 64)})
    with sf.safe_open(tmp_path / "w.safetensors") as f:
        ((_, end),) = f.ranges("w")
    raw = bytearray((tmp_path / "w.safetensors").read_bytes())
    convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "good", "csr")
    raw[end - 1] ^= 1
    (tmp_path / "w.safetensors").write_bytes(raw)
    for to in ("csr", "two-four", "auto"):
        with pytest.raises(sf.errors.IntegrityError):
            convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "out", to)


def test_refusals(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        sf.errors.UsageError, match=r"keep them dense with --exclude 'layers\.\*\.experts\.gate_up_proj'"
    ):
        (model / "config.json").write_text("{}")
        convert_checkpoint(model, tmp_path / "hf", "two-four", layout="transformers")
    recipe = Recipe(to="two-four", exclude=("*experts*",))
    convert_checkpoint(model, tmp_path / "hf", recipe, layout="transformers")
    sf.save_dense(tmp_path / "w.safetensors", {"w": two_four(2, 64, 64), "w.1": two_four(64, 64)})
    with pytest.raises(sf.errors.UsageError, match=r"would be called w\.1 .* --exclude"):
        convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "out", "csr")


def test_the_verbs(model: Path, tmp_path: Path) -> None:
    assert command("convert", model, tmp_path / "out", "--to", "two-four").code == 0
    for verb in ("inspect", "validate", "plan", "explain"):
        assert command(verb, tmp_path / "out").code == 0
    assert command("validate", tmp_path / "out", "--expect", "csr").code == 1  # the convolution is not checked
    assert command("validate", tmp_path / "out", "--expect", "two-four", "--include", "re:experts").code == 0
    assert f"{GATE}.0-4 x 5" in command("explain", tmp_path / "out").out
    assert command("diff", model, tmp_path / "out").code == 0
    x = only(model, GATE).copy()
    x[3, 1, np.flatnonzero(x[3, 1])[0]] = 9
    sf.save_dense(tmp_path / "changed.safetensors", {GATE: x})
    convert_checkpoint(tmp_path / "changed.safetensors", tmp_path / "changed", "csr")
    (d,) = (d for name, d in diff_checkpoints(tmp_path / "out", tmp_path / "changed") if name == GATE)
    assert d is not None
    assert d.count == 1
    assert d.index[:2] == (3, 1)
    assert "first in matrix 3" in d.what
    r = command("bench", tmp_path / "out", "-n", "4", "--device", "cpu", "--limit", "1", "--repeats", "1", "--json",
                "--include", "re:gate")  # fmt: skip
    assert json.loads(r.out)["results"][0]["tensor"] == f"{GATE}.0"


def test_memory_is_bounded_by_a_matrix(tmp_path: Path) -> None:
    """A stack of 64 MB passes through 24 MB, there and back."""
    x = np.zeros((32, 512, 2048), np.float16)
    x[:, ::2, ::4] = 1
    sf.save_dense(tmp_path / "w.safetensors", {"w": x})
    with sf.limits.using(memory=24 << 20):
        convert_checkpoint(tmp_path / "w.safetensors", tmp_path / "there", "two-four")
        convert_checkpoint(tmp_path / "there", tmp_path / "back", "dense")
    np.testing.assert_array_equal(only(tmp_path / "back", "w"), x)


def test_what_a_stack_is_made_of() -> None:
    x = np.diag([1, 0, 7, 8]).astype(np.float32)
    both = sf.stack(np.stack([x, x]), "csr")
    assert sf.stack((m for m in (x, x)), "csr") == both
    kept = sf.stack([sp.csc_array(x), sp.csc_array(x)])  # nobody asked to make them dense
    assert [p.name for p in kept] == ["csc", "csc"]
    assert [p.name for p in sf.stack(m for m in (x, x))] == ["dense", "dense"]
    assert [p.dtype.name for p in sf.stack([sp.coo_array(x)], dtype="float16")] == ["float16"]
    for nothing in (None, 5):
        with pytest.raises(UsageError, match="several matrices"):
            sf.stack(nothing)  # type: ignore[arg-type]


def test_the_manifest_of_a_stack_whose_matrices_differ_in_params_is_sound(tmp_path: Path) -> None:
    x = np.zeros((3, 40, 40), np.float32)
    for i in range(3):
        x[i, : 5 + 10 * i, : 3 + 9 * i] = 1
    sf.save_dense(tmp_path / "in.safetensors", {"w": x})
    convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", "ell-buckets")
    with sf.safe_open(tmp_path / "out" / "spformat-00001-of-00001.safetensors") as f:
        assert len({tuple(m.params().items()) for m in f.read("w")}) > 1
    assert [v.error for v in validate_checkpoint(tmp_path / "out")] == [None]
