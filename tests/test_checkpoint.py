"""Whole checkpoints: there and back, rules, refusals, resume, manifests; nothing harmed on the way."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from test_cli import spformat

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.checkpoint import Recipe, Rule, convert_checkpoint, open_source, plan_tensors
from spformat.checkpoint.check import Checks, validate_checkpoint
from spformat.checkpoint.diff import diff_checkpoints
from spformat.checkpoint.foresee import foresee_checkpoint
from spformat.formats import registered

FIXTURES = Path(__file__).parent.parent / "fixtures" / "checkpoint"
SOURCES = [FIXTURES / "digits" / "model.safetensors", FIXTURES / "sharded"]
TARGETS = ["auto", *(f.name for f in registered() if f.name != "vector-nm")]
TARGETS += ["vector-nm:n=16,m=32", "bsr:blocksize=16x16"]


def tree(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file."""
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def same_values(a: Path, b: Path) -> None:
    differing = [d for _, d in diff_checkpoints(a, b) if d is not None]
    assert not differing, differing[0]


def test_the_name_of_a_model_on_the_hub_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        sf.errors.InputError, match=r"convert_checkpoint takes a model of the Hugging Face hub as hf://org/Llama-3\.1$"
    ):
        open_source("org/Llama-3.1")
    for path in ("org/w.safetensors", "/org/name", "./org/name", "../name", "a/b/c", "name"):
        with pytest.raises(sf.errors.InputError) as caught:
            open_source(path)
        assert "hf://" not in str(caught.value)


def test_what_is_not_copied_is_told(tmp_path: Path) -> None:
    # A repository of the hub often holds the weights three times; copied as side files they would undo the packing.
    source = shutil.copytree(SOURCES[1], tmp_path / "model")
    sf.save_dense(source / "adapter_model.safetensors", {"lora": np.ones((2, 2), np.float32)})
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.H5", "optimizer.pt"):
        (source / name).write_bytes(b"other weights")
    with (source / "huge.json").open("wb") as f:
        f.truncate((1 << 30) + 1)
    (source / "1_Pooling").mkdir()
    (source / "tokenizer.model").write_bytes(b"vocabulary")
    left = ("1_Pooling", "adapter_model.safetensors", "huge.json", "optimizer.pt", "pytorch_model.bin",
            "pytorch_model.bin.index.json", "tf_model.H5")  # fmt: skip
    report = convert_checkpoint(source, tmp_path / "packed", "bitmask")
    assert report.left_behind == left
    assert {*left} & {p.name for p in (tmp_path / "packed").iterdir()} == set()
    assert (tmp_path / "packed" / "tokenizer.model").read_bytes() == b"vocabulary"
    r = spformat("convert", source, tmp_path / "again", "--to", "bitmask")
    assert f"not copied: {', '.join(left)}; folders, weights" in r.stderr
    r = spformat("convert", source, tmp_path / "json", "--to", "bitmask", "--json")
    assert json.loads(r.stdout)["not_copied"] == list(left)
    r = spformat("convert", SOURCES[1], tmp_path / "plain", "--to", "bitmask")
    assert "not copied" not in r.stderr


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_there_and_back(source: Path, target: str, tmp_path: Path) -> None:
    before = tree(source)
    recipe = Recipe(to=target, misfit="keep")
    report = convert_checkpoint(source, tmp_path / "packed", recipe)
    same_values(source, tmp_path / "packed")
    convert_checkpoint(tmp_path / "packed", tmp_path / "dense", "dense")
    same_values(source, tmp_path / "dense")
    for path in (tmp_path / "dense").glob("*.safetensors"):
        with safetensors.safe_open(path, "np") as f:
            assert f.metadata() == {"format": "pt"}
    assert tree(source) == before
    foreseen = foresee_checkpoint(source, recipe)
    if target != "dense":
        assert [(o.name, o.target, o.bytes_out) for o in foreseen] == [
            (o.name, o.target, o.bytes_out) for o in report.outcomes
        ]
        assert all(v.error is None for v in validate_checkpoint(tmp_path / "packed", Checks(checksums=True)))


def test_a_dense_checkpoint_has_nothing_sparse_and_plan_says_so(tmp_path: Path) -> None:
    w = np.eye(32, 48, dtype=np.float32)
    sf.save(tmp_path / "in.safetensors", {"a": sf.convert(w, "csr"), "s": sf.stack([w, w], "bitmask"), "v": w[0]})
    recipe = Recipe(to="dense", exclude=("a", "s"))
    report = convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out", recipe)
    for outcomes in (report.outcomes, foresee_checkpoint(tmp_path / "in.safetensors", recipe)):
        sizes = {o.name: (o.target, o.bytes_out) for o in outcomes if o.name != "v"}
        assert sizes == {"a": ("dense", w.nbytes), "s": ("dense", 2 * w.nbytes)}
    with sf.open(tmp_path / "out") as checkpoint:
        np.testing.assert_array_equal(checkpoint["s"], np.stack([w, w]))


def test_a_dense_checkpoint_has_the_names_and_the_index_loaders_want(tmp_path: Path) -> None:
    source = FIXTURES / "sharded"
    convert_checkpoint(source, tmp_path / "packed", "auto")
    convert_checkpoint(tmp_path / "packed", tmp_path / "dense", "dense")
    names = {p.name for p in (tmp_path / "dense").iterdir()}
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert shards | {"model.safetensors.index.json"} <= names
    assert {"config.json", "tokenizer.json"} <= names
    for side in ("config.json", "tokenizer.json"):
        assert (tmp_path / "dense" / side).read_bytes() == (source / side).read_bytes()
        assert (tmp_path / "packed" / side).read_bytes() == (source / side).read_bytes()
    index = json.loads((tmp_path / "dense" / "model.safetensors.index.json").read_text())
    theirs = json.loads((source / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == theirs["weight_map"]
    assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]


def test_manifest(tmp_path: Path) -> None:
    convert_checkpoint(FIXTURES / "sharded", tmp_path / "out", "bitmask")
    manifest = json.loads((tmp_path / "out" / "spformat.json").read_text())
    for name, entry in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["size"] == len(data)
    for name, entry in manifest["tensors"].items():
        with sf.safe_open(tmp_path / "out" / entry["file"]) as f:
            x = f[name]
        if entry["format"] == "plain":
            continue
        assert isinstance(x, sf.Format)
        assert (x.name, list(x.shape), x.dtype.name) == (entry["format"], entry["shape"], entry["dtype"])
        assert entry["bytes_out"] == x.nbytes
        assert entry["nnz"] == x.nnz
        assert entry["density"] == pytest.approx(x.density, abs=1e-6)
    assert not list((tmp_path / "out").glob("*.partial*"))
    assert not list((tmp_path / "out").glob(".spformat-*"))


def test_bytes_are_reproducible(tmp_path: Path) -> None:
    for name in ("a", "b"):
        convert_checkpoint(FIXTURES / "sharded", tmp_path / name, "auto")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_rules_last_match_wins(tmp_path: Path) -> None:
    source = open_source(FIXTURES / "sharded")
    recipe = Recipe(
        to="bitmask",
        rules=tuple(map(Rule.parse, ("re:mlp=csr", "*.gate_proj.weight=bsr:blocksize=16x16", "lm_head*=keep"))),
        exclude=("re:embed",),
    )
    jobs = {j.name: j for j in plan_tensors(source, recipe)}
    assert jobs["model.layers.0.mlp.down_proj.weight"].target == "csr"
    assert jobs["model.layers.0.mlp.gate_proj.weight"].target == "bsr:blocksize=16x16"
    assert jobs["lm_head.weight"].target == "keep"
    assert jobs["model.embed_tokens.weight"].target == "keep"
    assert jobs["model.layers.0.self_attn.q_proj.weight"].target == "bitmask"
    assert jobs["model.norm.weight"].target == "keep"
    assert "1-D" in jobs["model.norm.weight"].why


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "bsrr"}, "did you mean 'bsr'"),
        ({"to": "bsr:blocksize=0x4"}, "blocksize: expected two ints in 1 .. 1024"),
        ({"to": "vector-nm:n=5,m=4"}, "n: expected at most m = 4"),
        ({"include": ("re:(",)}, "pattern 're:\\('"),
        ({"prune": "random"}, "prune: expected 'magnitude'"),
        ({"sparsity": 1.5}, "sparsity: expected a share"),
        ({"misfit": "drop"}, "misfit: expected 'error', 'keep' or a format"),
    ],
)
def test_recipes_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sf.errors.UsageError, match=message):
        Recipe(**options)


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    for option in ({"include": ("re:nothing",)}, {"exclude": ("x*",)}, {"rules": (Rule("re:nothing", "csr"),)}):
        with pytest.raises(sf.errors.UsageError, match="matches none of"):
            plan_tensors(open_source(FIXTURES / "sharded"), Recipe(**option))  # type: ignore[arg-type]


def test_misfits_are_refused_before_anything_has_its_name(tmp_path: Path) -> None:
    with pytest.raises(sf.errors.StructureError, match=r"tensor 'hidden2.weight': two-four: \d+ group") as e:
        convert_checkpoint(SOURCES[0], tmp_path / "out", "two-four")
    assert (e.value.unit, e.value.limit) == ("group", 2)
    assert not (tmp_path / "out").exists(), "not even an empty folder is left"


def test_pruning_is_explicit_and_makes_it_fit(tmp_path: Path) -> None:
    convert_checkpoint(SOURCES[0], tmp_path / "out", Recipe(to="two-four", prune="magnitude"))
    with sf.safe_open(tmp_path / "out" / "spformat-00001-of-00001.safetensors") as f:
        w = f["hidden2.weight"]
        assert isinstance(w, sf.TwoFour)
    original = safetensors.numpy.load_file(SOURCES[0])["hidden2.weight"]
    from spformat.preprocess import masks

    wanted = masks.apply(original, masks.magnitude_nm(original, 2, 4))
    np.testing.assert_array_equal(w.to_dense(), wanted)
    with pytest.raises(sf.errors.UsageError, match="needs --sparsity"):
        convert_checkpoint(SOURCES[0], tmp_path / "no", Recipe(to="csr", prune="magnitude"))


def test_existing_targets_are_refused_unless_forced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_checkpoint(FIXTURES / "sharded", out, "bitmask")
    before = tree(out)
    with pytest.raises(sf.errors.OutputError, match="--force"):
        convert_checkpoint(FIXTURES / "sharded", out, "csr")
    assert tree(out) == before
    convert_checkpoint(FIXTURES / "sharded", out, "csr", force=True)
    assert tree(out) != before
    same_values(FIXTURES / "sharded", out)


def test_input_and_output_are_never_the_same_file(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    shutil.copy(SOURCES[0], source)
    before = tree(tmp_path)
    for target in (source, tmp_path / "." / "model.safetensors"):
        with pytest.raises(sf.errors.OutputError, match="same file"):
            convert_checkpoint(source, target, "bitmask", force=True)
    assert tree(tmp_path) == before


def test_one_file_to_one_file(tmp_path: Path) -> None:
    convert_checkpoint(SOURCES[0], tmp_path / "out.safetensors", Recipe(to="csr"))
    assert isinstance(sf.load(tmp_path / "out.safetensors")["hidden1.weight"], sf.CSR)
    same_values(SOURCES[0], tmp_path / "out.safetensors")
    with pytest.raises(sf.errors.OutputError, match="2 shards go into a folder"):
        convert_checkpoint(FIXTURES / "sharded", tmp_path / "two.safetensors", "csr")


class Interrupted(Exception):
    pass


def test_an_interrupted_run_is_resumed_and_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    convert_checkpoint(FIXTURES / "sharded", whole, "auto")
    seen: list[str] = []

    def stop_in_the_second_shard(outcome: Any) -> None:
        seen.append(outcome.name)
        if "layers.1" in outcome.name:
            raise Interrupted

    with pytest.raises(Interrupted):
        convert_checkpoint(FIXTURES / "sharded", cut, "auto", progress=stop_in_the_second_shard)
    assert (cut / "spformat.partial.json").exists()
    assert not (cut / "spformat.json").exists()
    with pytest.raises(sf.errors.ContainerError, match="unfinished conversion"):
        open_source(cut)
    with pytest.raises(sf.errors.OutputError, match="--resume"):
        convert_checkpoint(FIXTURES / "sharded", cut, "auto")
    first = (cut / "spformat-00001-of-00002.safetensors").stat().st_mtime_ns
    report = convert_checkpoint(FIXTURES / "sharded", cut, "auto", resume=True)
    assert report.resumed == 1
    assert (cut / "spformat-00001-of-00002.safetensors").stat().st_mtime_ns == first
    assert tree(cut) == tree(whole)


def test_resume_trusts_hashes_not_names(tmp_path: Path) -> None:
    cut = tmp_path / "cut"

    def stop(outcome: Any) -> None:
        if "layers.1" in outcome.name:
            raise Interrupted

    with pytest.raises(Interrupted):
        convert_checkpoint(FIXTURES / "sharded", cut, "auto", progress=stop)
    done = cut / "spformat-00001-of-00002.safetensors"
    data = bytearray(done.read_bytes())
    data[-1] ^= 1
    done.write_bytes(data)
    assert convert_checkpoint(FIXTURES / "sharded", cut, "auto", resume=True).resumed == 0
    same_values(FIXTURES / "sharded", cut)


def test_index_and_shards_that_disagree(tmp_path: Path) -> None:
    def copy(name: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path / name
        shutil.copytree(FIXTURES / "sharded", folder)
        return folder, json.loads((folder / "model.safetensors.index.json").read_text())

    def put(folder: Path, index: dict[str, Any]) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    folder, index = copy("absent")
    index["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    put(folder, index)
    with pytest.raises(sf.errors.ContainerError, match="no shard holds it"):
        open_source(folder)
    folder, index = copy("unlisted")
    del index["weight_map"]["lm_head.weight"]
    put(folder, index)
    with pytest.raises(sf.errors.ContainerError, match="does not list"):
        open_source(folder)
    folder, index = copy("nothing")
    put(folder, index | {"weight_map": {}})
    for act in (open_source, lambda folder: convert_checkpoint(folder, tmp_path / "out", "auto")):
        with pytest.raises(sf.errors.ContainerError, match=r"index\.json: index: it lists no file"):
            act(folder)
    (folder / "model.safetensors.index.json").unlink()
    convert_checkpoint(folder, tmp_path / "packed", "auto")
    manifest = json.loads((tmp_path / "packed" / "spformat.json").read_text())
    (tmp_path / "packed" / "spformat.json").write_text(json.dumps(manifest | {"files": {}, "tensors": {}}))
    with pytest.raises(sf.errors.ContainerError, match=r"spformat\.json: manifest: it lists no file"):
        convert_checkpoint(tmp_path / "packed", tmp_path / "again", "dense")
    folder, index = copy("missing")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(sf.errors.InputError):
        open_source(folder)
    for hostile in (
        "../x.safetensors",
        "/etc/passwd",
        "~",
        "a/../../b.safetensors",
        "a\\b.safetensors",
        "",
        ".",
        "http://x/y",
    ):
        folder, index = copy(hashlib.sha256(hostile.encode()).hexdigest()[:8])
        index["weight_map"]["lm_head.weight"] = hostile
        put(folder, index)
        with pytest.raises(sf.errors.PathError) as e:
            open_source(folder)
        assert e.value.exit_code == 77
    with pytest.raises(sf.errors.InputError, match=r"no \.safetensors file"):
        (tmp_path / "empty").mkdir()
        open_source(tmp_path / "empty")


def test_values_numpy_lacks_pass_through_unchanged(tmp_path: Path) -> None:
    raw = np.arange(64, dtype=np.uint8)
    header = {"w": {"dtype": "F4", "shape": [8, 16], "data_offsets": [0, 64]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    source = tmp_path / "model.safetensors"
    source.write_bytes(len(text).to_bytes(8, "little") + text + raw.tobytes())
    convert_checkpoint(source, tmp_path / "packed", "auto")
    convert_checkpoint(tmp_path / "packed", tmp_path / "dense", "dense")
    assert (tmp_path / "dense" / "model.safetensors").read_bytes()[-64:] == raw.tobytes()


@pytest.mark.parametrize("dtype", list(VALUE_TYPES))
def test_every_value_type_there_and_back(dtype: str, tmp_path: Path) -> None:
    from cases import sparse

    x = sparse(np.random.default_rng(4), (65, 130), dtype, 0.3)
    sf.save_dense(tmp_path / "in.safetensors", {"w": x, "b": x[0]})
    convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "packed", "bitmask")
    convert_checkpoint(tmp_path / "packed", tmp_path / "dense", "dense")
    same_values(tmp_path / "in.safetensors", tmp_path / "dense")


def test_validate_finds_a_flipped_byte(tmp_path: Path) -> None:
    convert_checkpoint(SOURCES[0], tmp_path / "out", Recipe(to="csr"))
    path = tmp_path / "out" / "spformat-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    verdicts = list(validate_checkpoint(tmp_path / "out", Checks(checksums=True)))
    bad = [v for v in verdicts if v.error]
    assert {type(v.error) for v in bad} == {sf.errors.IntegrityError}
    assert {v.format for v in bad} >= {"file"}


@pytest.mark.parametrize(("key", "value"), [("format", "bitmask"), ("shape", [1, 1]), ("dtype", "int8"), ("format", 3)])
def test_validate_finds_a_manifest_that_says_otherwise_than_the_shard(tmp_path: Path, key: str, value: Any) -> None:
    convert_checkpoint(SOURCES[0], tmp_path / "out", Recipe(to="csr"))
    assert all(v.error is None for v in validate_checkpoint(tmp_path / "out"))
    path = tmp_path / "out" / "spformat.json"
    tree = json.loads(path.read_text())
    name = next(n for n, t in tree["tensors"].items() if t["format"] == "csr")
    tree["tensors"][name][key] = value
    path.write_text(json.dumps(tree))
    ((bad, error),) = [(v.name, v.error) for v in validate_checkpoint(tmp_path / "out") if v.error]
    assert (bad, error.exit_code, f"expected {key} " in str(error)) == (name, 65, True)
