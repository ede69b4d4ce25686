"""A target folder with an earlier conversion: it is finished already, or another checkpoint that is replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_checkpoint import FIXTURES, same_values, tree
from test_cli import spformat

import spformat as sf
from spformat.checkpoint import (
    Recipe,
    convert_checkpoint,
    folder,
    journals,
    merge_parts,
    open_source,
    packing,
    remote,
    run,
)
from spformat.checkpoint import (
    existing_target as earlier,
)

DIGITS, SHARDED = FIXTURES / "digits", FIXTURES / "sharded"
PACKED, DENSE = "spformat-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CONFIG = "without this config.json"


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def told(o: Any) -> tuple[Any, ...]:
    """An outcome without what the manifest does not keep; it writes params out that a run left to the default."""
    return (o.name, o.target.partition(":")[0], o.why, o.shape, o.dtype, o.bytes_in, o.bytes_out, o.nnz)


# --- a finished conversion, resumed


@pytest.mark.parametrize("part", ["", "2/3"])
def test_resuming_what_is_finished_is_no_error_and_writes_nothing(tmp_path: Path, part: str) -> None:
    first = convert_checkpoint(SHARDED, tmp_path / "out", "auto")
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "out").iterdir()}
    again = convert_checkpoint(SHARDED, tmp_path / "out", "auto", resume=True, part=part or None)
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "out").iterdir()} == before
    assert again.resumed == len(again.shards) >= 1
    assert again.redone == ()
    for a, b in zip(again.shards, first.shards, strict=not part):
        assert replace(a, outcomes=()) == replace(b, outcomes=())
        assert [told(o) for o in a.outcomes] == [told(o) for o in b.outcomes]
        if part:
            return


def test_the_manifest_says_the_format_of_packed_tensors_that_are_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    w = [(rng.random((64, 64)) * (rng.random((64, 64)) < 0.2)).astype(np.float32) for _ in range(3)]
    mixed = sf.Stack(parts=(sf.convert(w[0], "csr"), sf.convert(w[1], "bitmask")))
    packed = {"w": sf.convert(w[0], "bsr", blocksize=16), "even": sf.stack(w, "csr"), "mixed": mixed, "b": w[0][0]}
    sf.save(tmp_path / "in.safetensors", packed)
    for recipe in (Recipe(to="keep"), Recipe(to="two-four", misfit="keep")):
        out = tmp_path / recipe.to
        first = convert_checkpoint(tmp_path / "in.safetensors", out, recipe)
        tensors = json.loads((out / "spformat.json").read_text())["tensors"]
        formats = {name: (entry["format"], entry["params"]) for name, entry in tensors.items()}
        blocks = ("bsr", {"blocksize": [16, 16]})
        assert formats == {"w": blocks, "even": ("csr", {}), "mixed": ("stack", {}), "b": ("plain", {})}
        again = convert_checkpoint(tmp_path / "in.safetensors", out, recipe, resume=True)
        assert [o.target for o in again.outcomes] == [o.target for o in first.outcomes] == ["keep"] * 4


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Path, Path], None]:
    def rewrite(source: Path, out: Path) -> None:
        tree = json.loads((out / "spformat.json").read_text())
        change(tree)
        (out / "spformat.json").write_text(json.dumps(tree))

    return rewrite


CHANGES: dict[str, tuple[Callable[[Path, Path], object], type[sf.errors.SpformatError], str]] = {
    "a flipped bit": (lambda s, o: flip(o / PACKED), sf.errors.OutputError, f"whose {PACKED} is not what its manifest says"),
    "a cut file": (lambda s, o: (o / PACKED).write_bytes(b"x"), sf.errors.OutputError, f"whose {PACKED} is not what"),
    "a lost file": (lambda s, o: (o / PACKED).unlink(), sf.errors.OutputError, f"whose {PACKED} is not what"),
    "another source": (lambda s, o: flip(s / DENSE), sf.errors.OutputError, f"of another {DENSE}"),
    "another side file": (lambda s, o: (s / "config.json").write_text("{}"), sf.errors.OutputError, CONFIG),
    "a lost side file": (lambda s, o: (o / "config.json").unlink(), sf.errors.OutputError, CONFIG),
    "other options": (manifest(lambda t: t["recipe"].update(to="csr")), sf.errors.OutputError, "with other options"),
    "no options": (manifest(lambda t: t.pop("recipe")), sf.errors.OutputError, "with other options"),
    "other shards": (manifest(lambda t: t["files"].pop(PACKED)), sf.errors.OutputError, "of other shards"),
    "no size": (manifest(lambda t: t["files"][PACKED].pop("size")), sf.errors.ContainerError, "expected size and sha256"),
    "no sha256": (manifest(lambda t: t["files"][PACKED].update(sha256=1)), sf.errors.ContainerError, "expected size and"),
    "a tensor not told": (manifest(lambda t: t["tensors"].popitem()), sf.errors.ContainerError, "description of every tensor"),
    "an unknown format": (
        manifest(lambda t: [e.update(format="x") for e in t["tensors"].values()]), sf.errors.ContainerError, "unknown format",
    ),
    "text for a count": (
        manifest(lambda t: [e.update(bytes_out="1") for e in t["tensors"].values()]), sf.errors.ContainerError, "integers",
    ),
    "params in a list": (
        manifest(lambda t: [e.update(params=[1]) for e in t["tensors"].values()]), sf.errors.ContainerError, "an object",
    ),
    "no JSON": (lambda s, o: (o / "spformat.json").write_text("{"), sf.errors.ContainerError, "not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_finished_but_not_this_conversion_is_refused_and_stays(tmp_path: Path, change: str) -> None:
    act, kind, message = CHANGES[change]
    source, out = copied(SHARDED, tmp_path / "in"), tmp_path / "out"
    convert_checkpoint(source, out, "auto")
    act(source, out)
    before = tree(tmp_path)
    with pytest.raises(kind, match=message) as caught:
        convert_checkpoint(source, out, "auto", resume=True)
    assert caught.value.exit_code == (73 if kind is sf.errors.OutputError else 65)
    assert tree(tmp_path) == before
    convert_checkpoint(source, out, "auto", force=True)
    same_values(source, out)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"container": 1, "container": 1}', "duplicate key 'container'"),
        (b'{"container": NaN}', "expected finite numbers, got NaN"),
        (b"[]", "expected a JSON object, got a list"),
        (b"\xff", "expected UTF-8, got another byte at 0"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"container": ' + b"9" * 5000 + b"}", "number out of range"),
    ],
)
@pytest.mark.parametrize("name", ["spformat.json", "spformat.partial.json"])
def test_json_of_strangers_is_read_strictly(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(sf.errors.ContainerError, match=message) as caught:
        open_source(tmp_path)
    assert caught.value.path == str(tmp_path / name)


def test_a_manifest_is_parsed_within_the_budget(tmp_path: Path) -> None:
    convert_checkpoint(DIGITS, tmp_path / "out", "csr")
    manifest = tmp_path / "out" / "spformat.json"
    manifest.write_text(manifest.read_text() + " " * 100_000)
    with sf.limits.using(memory=32 * manifest.stat().st_size):
        open_source(tmp_path / "out")
    with (
        sf.limits.using(memory=32 * manifest.stat().st_size - 1),
        pytest.raises(sf.errors.LimitError, match=r"spformat.json: the file, parsed: .* bytes"),
    ):
        open_source(tmp_path / "out")


def test_a_dense_checkpoint_keeps_no_hashes(tmp_path: Path) -> None:
    convert_checkpoint(DIGITS, tmp_path / "out", "dense")
    with pytest.raises(sf.errors.OutputError, match=r"holds model.safetensors already; use --force"):
        convert_checkpoint(DIGITS, tmp_path / "out", "dense", resume=True)


# --- another checkpoint in the target

KINDS = {"packed": (DIGITS, "csr"), "packed shards": (SHARDED, "csr"), "dense": (DIGITS, "dense"),
         "dense shards": (SHARDED, "dense")}  # fmt: skip


@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("old", KINDS)
def test_with_force_the_new_checkpoint_is_all_there_is(tmp_path: Path, old: str, new: str) -> None:
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    convert_checkpoint(*(KINDS[old][0], out, KINDS[old][1]))
    (out / "mine.safetensors.txt").write_text("nobody's business")
    side_by_side = "dense" in old and "packed" in new  # a loader of dense models never looks at ours
    before = tree(out)
    if not side_by_side:
        with pytest.raises(sf.errors.OutputError, match="--force"):
            convert_checkpoint(KINDS[new][0], out, KINDS[new][1])
        assert tree(out) == before
    convert_checkpoint(KINDS[new][0], out, KINDS[new][1], force=True)
    convert_checkpoint(KINDS[new][0], fresh, KINDS[new][1])
    sides = {"tokenizer.json", "config.json", "mine.safetensors.txt"}  # they belong to no checkpoint
    kept = {n for n in before if n.startswith("model")} if side_by_side else set()
    assert set(tree(out)) - sides == (set(tree(fresh)) | kept) - sides
    assert {n: h for n, h in tree(out).items() if n in tree(fresh)} == tree(fresh)
    same_values(KINDS[new][0], out)


def test_inputs_that_are_linked_into_the_target_stay(tmp_path: Path) -> None:
    convert_checkpoint(DIGITS, tmp_path / "in", "csr")
    convert_checkpoint(SHARDED, tmp_path / "out", "csr")
    linked = tmp_path / "out" / "spformat-00001-of-00009.safetensors"
    linked.hardlink_to(tmp_path / "in" / "spformat-00001-of-00001.safetensors")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", "dense", force=True)
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == ["model.safetensors", linked.name]


def test_one_that_is_stopped_while_it_removes_the_old_one_is_refused_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert_checkpoint(SHARDED, out, "csr")
    removed: list[str] = []

    def stop(path: Any) -> None:
        removed.append(Path(path).name)
        Path(path).unlink()
        if len(removed) == stops:
            raise KeyboardInterrupt

    for stops in (1, 2, 3):
        removed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(earlier, "remove", stop)
            with pytest.raises(KeyboardInterrupt):
                convert_checkpoint(DIGITS, out, "dense", force=True)
        assert len(removed) == stops
        with pytest.raises(sf.errors.ContainerError, match="unfinished conversion"):
            open_source(out)
        convert_checkpoint(DIGITS, out, "dense", resume=True)
        same_values(DIGITS, out)
        convert_checkpoint(SHARDED, out, "csr", force=True)
        (out / "model.safetensors").unlink()


def test_a_run_that_stops_before_it_notes_the_first_file_leaves_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has its name already: without the journal the folder would look like the old one, or like a new one."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    convert_checkpoint(SHARDED, out, "csr")
    before = tree(out)
    for method, left in (("begin", False), ("add", True)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            if method == "add":
                patch.setattr(journals.Journal, "add", stop)
            else:
                patch.setattr(run, "convert_in_turn", stop)
            convert_checkpoint(SHARDED, out, "bitmask", force=True)
        assert (out / "spformat.partial.json").exists() is left
        assert (tree(out) == before) is not left
    with pytest.raises(sf.errors.ContainerError, match="--resume"):
        open_source(out)
    convert_checkpoint(SHARDED, out, "bitmask", force=True, resume=True)
    convert_checkpoint(SHARDED, tmp_path / "new", "bitmask")
    assert tree(out) == tree(tmp_path / "new")


def test_a_save_that_is_stopped_between_two_shards_is_refused_until_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old and new shards have the same names and tensors, so that a reader would take them for one checkpoint."""

    def tensors(value: int) -> dict[str, Any]:
        return {name: np.full(8, value, np.float32) for name in ("a", "b")}

    def write(value: int, stops: int) -> None:
        saved: list[str] = []

        def stop(path: Any, *args: Any, **options: Any) -> None:
            if len(saved) == stops:
                raise KeyboardInterrupt
            sf.save(path, *args, **options)
            saved.append(path)

        with monkeypatch.context() as patch:
            patch.setattr(packing, "save", stop)
            packing.write_packed(out, tensors(value), 32, True, "spformat.safetensors.index.json")

    out = tmp_path / "out"
    out.mkdir()
    write(1, 2)
    before = tree(out)
    with pytest.raises(KeyboardInterrupt):
        write(2, 0)
    assert tree(out) == before
    with pytest.raises(KeyboardInterrupt):
        write(2, 1)
    with pytest.raises(sf.errors.ContainerError, match="save the model again"):
        open_source(out)
    write(2, 2)
    assert tree(out).keys() == before.keys()
    assert all((x == 2).all() for x in sf.load(out).values())


def test_the_removal_is_on_disk_before_the_journal_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, seen = tmp_path / "out", list[bool]()
    convert_checkpoint(SHARDED, out, "csr")
    flush = earlier.flush_folder

    def flushed(where: Any) -> None:
        seen.append((out / "spformat.partial.json").exists() and not (out / "spformat.json").exists())
        flush(where)

    monkeypatch.setattr(earlier, "flush_folder", flushed)
    convert_checkpoint(DIGITS, out, Recipe(to="dense"), force=True)
    assert seen == [True]


def test_the_name_of_a_new_folder_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(folder, "flush_folder", flushed.append)
    convert_checkpoint(DIGITS, tmp_path / "a" / "b", "csr")
    assert flushed == [str(tmp_path / "a"), str(tmp_path)]
    convert_checkpoint(DIGITS, tmp_path / "a" / "b", "csr", force=True)
    assert len(flushed) == 2
    with pytest.raises(sf.errors.OutputError, match="embedded null byte"):
        convert_checkpoint(DIGITS, str(tmp_path / "x\0y"), "csr")


def test_a_forced_upload_replaces_all_of_a_checkpoint(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is missing: pip install 'spformat[remote]'")
    fs = fsspec.filesystem("memory")
    url = "memory://replacing/out"
    convert_checkpoint(SHARDED, url, "csr")
    fs.pipe_file("/replacing/out/mine.txt", b"")
    convert_checkpoint(DIGITS, url, "dense", force=True)
    there = {n.rpartition("/")[2] for n in fs.ls("/replacing/out", detail=False)}
    assert {n for n in there if n.endswith(".safetensors") or n == "spformat.json"} == {"model.safetensors"}
    assert "mine.txt" in there
    with remote.staged(url, tmp_path / "here") as here:
        same_values(DIGITS, Path(here.source))
    fs.rm("/replacing", recursive=True)


def test_a_dense_checkpoint_stays_beside_a_packed_one_and_is_named(tmp_path: Path) -> None:
    """It has no manifest, so it may be the only copy of somebody's weights. Other loaders read it, not the new one."""
    out = tmp_path / "out"
    assert convert_checkpoint(SHARDED, out, "dense").dense_beside == ()
    stays = {p.name: p.read_bytes() for p in out.glob("model*")}
    assert len(stays) == 3  # two shards and an index
    report = convert_checkpoint(SHARDED, out, "csr", force=True)
    assert report.dense_beside == tuple(sorted(stays))
    assert convert_checkpoint(SHARDED, out, "csr", resume=True).dense_beside == report.dense_beside
    assert {p.name: p.read_bytes() for p in out.glob("model*")} == stays
    same_values(SHARDED, out)
    r = spformat("convert", SHARDED, out, "--to", "csr", "--force")
    text = f"{out} also holds a dense checkpoint, which stays: {', '.join(sorted(stays))}; other loaders than spformat read"
    assert (r.returncode, text in r.stderr) == (0, True), r.stderr
    r = spformat("convert", SHARDED, out, "--to", "csr", "--force", "--json")
    assert json.loads(r.stdout)["dense_beside"] == sorted(stays)
    assert "also holds" not in r.stderr
    for i in (1, 2):
        assert convert_checkpoint(SHARDED, out, "csr", force=True, part=f"{i}/2").dense_beside == ()
    assert merge_parts(out).dense_beside == report.dense_beside
    for name in stays:
        (out / name).unlink()
    r = spformat("convert", SHARDED, out, "--to", "csr", "--force")
    assert (r.returncode, "also holds" in r.stderr) == (0, False)
    assert convert_checkpoint(SHARDED, out, "dense", force=True).dense_beside == ()
    assert {p.name for p in out.glob("*.safetensors")} == {n for n in stays if n.endswith(".safetensors")}
