"""Rows F01 .. F13, F25 .. F29: names, links, targets. Every refusal leaves inputs and earlier outputs as they were."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command, refused, unharmed, unprivileged, weights

import spformat as sf
from spformat.checkpoint import convert_checkpoint, open_source
from spformat.interop.matrix_output import write_matrix
from spformat.storage import files, locks

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def model(folder: Path) -> Path:
    """A sharded checkpoint with an index and a side file."""
    where = folder / "model"
    where.mkdir()
    for i, name in enumerate(SHARDS):
        sf.save_dense(where / name, {f"layer.{i}.{k}": x for k, x in weights(i).items()})
    weight_map = {f"layer.{i}.{k}": name for i, name in enumerate(SHARDS) for k in ("w", "b")}
    (where / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (where / "config.json").write_text('{"a": 1}')
    return where


def edit_index(model: Path, **changes: Any) -> None:
    index = json.loads((model / INDEX).read_text())
    (model / INDEX).write_text(json.dumps(index | changes))


def refused_model(model: Path, error: type[sf.errors.SpformatError], *parts: str, flags: tuple[str, ...] = ()) -> None:
    """open_source, inspect and convert give the same answer, and nothing is written."""
    with refused(model.parent, error, *parts) as caught:
        open_source(model)
    for args in (["inspect", model], ["convert", model, model.parent / "out"]):
        with unharmed(model.parent):
            answer = command(*args, *flags, "--json")
        told = json.loads(answer.err.splitlines()[-1])
        assert (answer.code, told["code"]) == (caught.value.exit_code, error.__name__), answer
    assert not (model.parent / "out").exists()


HOSTILE = [
    "../x.safetensors", "../../../etc/passwd", "/etc/passwd", "/etc/x.safetensors", "~/x.safetensors", "~",
    "a/../../b.safetensors", "a/b.safetensors", "..\\x.safetensors", "C:\\x.safetensors", "\\\\host\\x.safetensors",
    "x\0.safetensors", "", ".", "..", "https://host/x.safetensors", "file:///x.safetensors", "x.safetensors/",
    "x\n.safetensors", "x.bin", ".safetensors", "é.safetensors", "x" * 300 + ".safetensors", "a b.safetensors",
    "\u202ex.safetensors", "x.safetensors\0", "CON:.safetensors", "%2e%2e%2fx.safetensors", "./x.safetensors", "//x",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_F01_hostile_weight_maps(model: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sentinel = model.parent / "x.safetensors"
    sf.save_dense(sentinel, weights())
    index = json.loads((model / INDEX).read_text())
    edit_index(model, weight_map=index["weight_map"] | {"layer.0.w": name})
    opened: list[Any] = []
    real = files.open_regular
    monkeypatch.setattr(files, "open_regular", lambda p: (opened.append(os.fspath(p)), real(p))[1])
    stated = (
        f"{INDEX}: file name: expected a file name of letters, digits.*; a shard lies beside the file that lists it"
    )
    refused_model(model, sf.errors.PathError, stated)
    assert {os.path.dirname(p) for p in opened} <= {str(model)}  # nothing outside is even opened


def test_F01_hostile_names_in_a_manifest(model: Path) -> None:
    """The message names the manifest, and no fix that would not help."""
    packed = model.parent / "packed"
    convert_checkpoint(model, packed, "csr")
    manifest = packed / "spformat.json"
    tree = json.loads(manifest.read_text())
    first = min(tree["files"])
    entry = tree["files"].pop(first)
    manifest.write_text(json.dumps(tree | {"files": tree["files"] | {f"../{first}": entry}}))
    refused_model(
        packed, sf.errors.PathError, r"packed/spformat\.json: file name: .*; a shard lies beside the file that"
    )
    manifest.write_text(json.dumps(tree | {"files": tree["files"] | {first: entry | {"source": f"../in/{SHARDS[0]}"}}}))
    with unharmed(model.parent):
        answer = command("diff", model, packed, "--provenance", "--json")
    error = json.loads(answer.err)
    assert (answer.code, error["path"]) == (77, str(manifest))
    assert f"got '../in/{SHARDS[0]}'; it should be the name of an input file" in error["message"]


def test_F02_links_out_of_the_folder_need_their_root_named(model: Path) -> None:
    blobs = model.parent / "blobs"
    blobs.mkdir()
    for name in (SHARDS[0], "config.json", INDEX):
        shutil.move(model / name, blobs / name)
        (model / name).symlink_to(f"../blobs/{name}")
        refused_model(model, sf.errors.PathError, "symlink leads to .*blobs", "--follow-symlinks")
        with unharmed(model.parent, but="out"):
            args = ["convert", model, model.parent / "out", "--to", "csr", "--force"]
            assert command(*args, "--follow-symlinks", model).code == 77
            assert command(*args, "--follow-symlinks", blobs).code == 0
        (model / name).unlink()
        shutil.move(blobs / name, model / name)
        shutil.rmtree(model.parent / "out")


def test_F03_index_and_shards_that_disagree(model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    good = index["weight_map"]
    for weight_map, error, message in (
        (good | {"ghost": SHARDS[0]}, sf.errors.ContainerError, "tensor 'ghost'.*no shard holds it"),
        ({k: v for k, v in good.items() if k != "layer.1.w"}, sf.errors.ContainerError, "'layer.1.w'.*index does not list"),
        (good | {"layer.0.w": SHARDS[1]}, sf.errors.ContainerError, f"'layer.0.w'.*it is in {SHARDS[0]}"),
        (good | {"x": "missing.safetensors"}, sf.errors.InputError, "missing.safetensors: cannot open the file: No such file"),
    ):  # fmt: skip
        edit_index(model, weight_map=weight_map)
        refused_model(model, error, message)
    edit_index(model, weight_map=good)
    sf.save_dense(model / SHARDS[1], {"layer.0.w": weights()["w"]}, overwrite=True)
    refused_model(model, sf.errors.ContainerError, "'layer.0.w': expected each tensor once, got it in .* and ")


def test_F04_index_files_that_are_none(model: Path) -> None:
    for text, message in (
        ("{", "not valid JSON"), ("[]", "expected a JSON object, got a list"), ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"), ("{}", "weight_map"), ('{"a": NaN}', "NaN"), ("\ufeff{}", "JSON"),
        ('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}', "duplicate key 'a'"),
        ('{"weight_map": {}, "weight_map": {}}', "duplicate key 'weight_map'"), ("[" * 100_000, "nested too deeply"),
        ('{"weight_map": {"a": ' + "9" * 5000 + "}}", "JSON"), ('{"metadata": 1, "weight_map": {}}', "'metadata'"),
    ):  # fmt: skip
        (model / INDEX).write_text(text)
        refused_model(model, sf.errors.ContainerError, f"{INDEX}: index: ", message)
    (model / INDEX).write_bytes(b'{"a": "\xff"}')
    refused_model(model, sf.errors.ContainerError, "expected UTF-8")
    entries = ",".join(f'"{i}":"a.safetensors"' for i in range(2_000_000))
    (model / INDEX).write_text('{"weight_map":{' + entries + "}}")
    refused_model(
        model, sf.errors.LimitError, "entries of the index: expected at most 100,000, got 2,000,000", "--max-tensors"
    )


def test_F05_names_that_differ_in_case_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "Config.json").write_text('{"b": 2}')
    out = model.parent / "out"
    monkeypatch.setattr("spformat.checkpoint.folder.ignores_case", lambda _: True)  # as macOS and Windows do
    with refused(
        model.parent, sf.errors.OutputError, "Config.json and config.json are one file in a folder that ignores case"
    ):
        convert_checkpoint(model, out, "csr")
    monkeypatch.undo()
    convert_checkpoint(model, out, "csr")  # this folder tells them apart
    assert {"Config.json", "config.json"} <= {p.name for p in out.iterdir()}
    with locks.folder_lock(out):
        assert not locks.ignores_case(out)
        (out / locks.LOCK.upper()).touch()
        assert locks.ignores_case(out)


def test_F06_a_shard_with_the_name_of_an_output(model: Path) -> None:
    ours = "spformat-00001-of-00001.safetensors"
    shutil.move(model / SHARDS[0], model / ours)
    index = json.loads((model / INDEX).read_text())
    edit_index(model, weight_map={k: ours if v == SHARDS[0] else v for k, v in index["weight_map"].items()})
    refused_model(model, sf.errors.PathError, f"the shard name {ours} is one this package gives to its own output")


@pytest.mark.parametrize("road", ["same", "dot", "hard", "soft"])
def test_F07_output_is_the_input(folder: Path, road: str) -> None:
    source = folder / "in.safetensors"
    sf.save_dense(source, weights())
    os.link(source, folder / "hard.safetensors")
    (folder / "soft.safetensors").symlink_to("in.safetensors")
    target = {"same": source, "dot": f"{folder}/./in.safetensors", "hard": folder / "hard.safetensors",
              "soft": folder / "soft.safetensors"}[road]  # fmt: skip
    for flags in ([], ["--force"]):
        with unharmed(folder):
            answer = command("convert", source, target, "--to", "csr", *flags)
        assert (answer.code, "input and output are the same file; --in-place" in answer.err) == (73, True), answer
    with refused(folder, sf.errors.OutputError, "same file"):
        convert_checkpoint(source, target, "csr", force=True)
    inode = source.stat().st_ino
    answer = command("convert", source, target, "--to", "csr", "--in-place")
    if road == "soft":  # a link is never replaced, and never written through
        assert (answer.code, os.path.islink(target), source.stat().st_ino) == (73, True, inode)
        return
    assert answer.code == 0, answer
    assert os.stat(target).st_ino != inode  # by way of a temporary file
    assert np.array_equal(sf.load(target)["w"].to_dense(), weights()["w"])
    assert sf.safe_open(folder / "hard.safetensors").described == (road == "hard")


ONTO_ITSELF = [(f"in.{kind}", road) for kind in ("npz", "mtx", "smtx") for road in ("same", "dot", "hard", "soft")]


@pytest.mark.parametrize(("kind", "road"), [*ONTO_ITSELF, ("in.safetensors", "hard"), ("in.safetensors", "soft")])
def test_F07_a_matrix_file_is_not_replaced_by_itself(folder: Path, kind: str, road: str) -> None:
    """With --force, too, which is for results: what --values and --dtype take would be gone."""
    source, end = folder / kind, ".npz" if kind == "in.safetensors" else os.path.splitext(kind)[1]
    if kind == "in.safetensors":
        sf.save_dense(source, {"w": np.eye(4, 8, dtype=np.float32)})
    else:
        write_matrix(source, np.eye(4, 8, dtype=np.float32))
    os.link(source, folder / f"hard{end}")
    (folder / f"soft{end}").symlink_to(kind)
    roads = {"same": source, "dot": f"{folder}/./{kind}", "hard": folder / f"hard{end}", "soft": folder / f"soft{end}"}
    losses: dict[str, list[list[str]]] = {".npz": [["--values", "ones"], ["--dtype", "float16"]]}
    some = [["--force", *f] for f in losses.get(os.path.splitext(kind)[1], [])]
    for flags in ([], ["--force"], ["--dry-run"], *some):
        with unharmed(folder):
            answer = command("convert", source, roads[road], *flags)
        assert (answer.code, "input and output are the same file; give DST another name" in answer.err) == (73, True)
    assert command("convert", source, folder / f"other{end}").code == 0


def test_F08_output_folder_is_the_input_folder(model: Path) -> None:
    with unharmed(model.parent):
        for flags in (["--to", "csr"], ["--to", "dense", "--force"]):
            answer = command("convert", model, model, *flags)
            assert (answer.code, "name another folder" in answer.err) == (73, True), answer


def test_F09_an_existing_output_needs_force(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model.parent
    one = folder / "in.safetensors"
    sf.save_dense(one, weights())
    for name in ("spformat-00002-of-00002.safetensors", "spformat.json", "spformat.partial.json", "config.json"):
        out = folder / f"out-{name}"
        out.mkdir()
        (out / name).write_text("theirs")
        with unharmed(folder):
            answer = command("convert", model, out, "--to", "csr")
        assert (answer.code, name in answer.err) == (73, True), answer
        assert "--force" in answer.err or "--resume" in answer.err
        with unharmed(folder, but=out.name):
            assert command("convert", model, out, "--to", "csr", "--force").code == 0
    dense = folder / "dense"
    dense.mkdir()
    (dense / INDEX).write_text("theirs")
    with unharmed(folder):
        assert command("convert", model, dense, "--to", "dense").code == 73
    (dense / INDEX).unlink()
    shutil.copy(model / "config.json", dense / "config.json")  # an identical file is no conflict
    assert command("convert", model, dense, "--to", "dense").code == 0
    target = folder / "out.safetensors"
    target.write_bytes(b"theirs")
    with unharmed(folder):
        assert command("convert", one, target, "--to", "csr").code == 73
    seen = []
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda *a, **k: (seen.append(target.read_bytes()), real(*a, **k))[1])
    assert command("convert", one, target, "--to", "csr", "--force").code == 0
    assert seen == [b"theirs"]  # until the rename


def test_F10_F11_links_folders_fifos_and_devices_are_never_replaced(folder: Path) -> None:
    source = folder / "in.safetensors"
    sf.save_dense(source, weights())
    (folder / "target").write_bytes(b"t")
    (folder / "link.safetensors").symlink_to("target")
    (folder / "dangling.safetensors").symlink_to("nothing")
    os.mkfifo(folder / "fifo.safetensors")
    if os.geteuid() == 0:
        os.mknod(folder / "null.safetensors", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    for path in sorted(folder.glob("*.safetensors")):
        if path.name in ("in.safetensors", "earlier.safetensors"):
            continue
        for flags in ([], ["--force"]):
            with unharmed(folder):
                answer = command("convert", source, path, "--to", "csr", *flags)
            assert (answer.code, "expected a regular file, got a" in answer.err) == (73, True), answer
        with refused(folder, sf.errors.OutputError, "expected a regular file"):
            sf.save(path, weights(), overwrite=True)
    (folder / "folder").mkdir()
    for path in (folder / "folder", Path("/dev/null"), Path("/dev/full")):
        with refused(folder, sf.errors.OutputError, "expected a regular file, got a (folder|device)"):
            sf.save(path, weights(), overwrite=True)


def test_F12_a_missing_parent(folder: Path) -> None:
    sf.save_dense(folder / "in.safetensors", weights())
    with unharmed(folder):
        answer = command("convert", folder / "in.safetensors", folder / "no" / "x.safetensors", "--to", "csr")
    assert (answer.code, "target folder: No such file" in answer.err) == (73, True)
    with refused(folder, sf.errors.OutputError, "target folder"):
        sf.save(folder / "no" / "x.safetensors", weights())
    with refused(folder, sf.errors.OutputError, "create the folder"):
        convert_checkpoint(folder / "in.safetensors", folder / "earlier.safetensors" / "out", "csr")
    with refused(folder, sf.errors.OutputError, "create the folder|target folder"):
        convert_checkpoint(folder / "in.safetensors", folder / "a\0b", "csr")


def test_F13_a_folder_without_permission_before_any_weights_are_read() -> None:
    with tempfile.TemporaryDirectory() as name:  # where others may go, too
        folder = Path(name)
        sf.save_dense(folder / "in.safetensors", weights())
        (folder / "in.safetensors").chmod(0o644)
        (folder / "shut").mkdir()
        (folder / "shut").chmod(0o555)
        folder.chmod(0o755)
        for target in ("shut/x.safetensors", "shut", "shut/sub"):
            with unharmed(folder), unprivileged(folder), pytest.MonkeyPatch.context() as patch:
                patch.setattr("spformat.storage.stfile.Reader._owned", lambda *_: pytest.fail("weights were read"))
                for flags in ([], ["--dry-run"]):
                    answer = command("convert", "in.safetensors", target, "--to", "csr", *flags)
                    assert (answer.code, "Permission denied" in answer.err) == (73, True), answer
