"""Checkpoints behind URLs: downloaded, converted, uploaded, the manifest last; incomplete ones are never accepted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command
from test_parts import SHARDED, SINGLE, tree, whole

import spformat as sf
from spformat.checkpoint import convert_checkpoint, remote, transfers
from spformat.interop.matrix_output import write_matrix

fsspec = pytest.importorskip("fsspec", reason="fsspec is missing: pip install 'spformat[remote]'")


def put(fs: Any, folder: Path, root: str) -> None:
    for path in folder.iterdir():
        fs.pipe_file(f"{root}/{path.name}", path.read_bytes())


def stored(fs: Any, root: str) -> dict[str, bytes]:
    return {name.rpartition("/")[2]: fs.cat_file(name) for name in fs.ls(root, detail=False)}


def local(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_there_and_back_through_an_object_store(tmp_path: Path, memory: Any) -> None:
    put(memory, SHARDED, "/bucket/model")
    memory.pipe_file("/bucket/model/below/deep.safetensors", b"not looked at")
    expected = whole(tmp_path)
    report = convert_checkpoint("memory://bucket/model", "memory://bucket/packed")
    assert report.path == "memory://bucket/packed"
    assert set(stored(memory, "/bucket/packed")) == set(expected)
    assert stored(memory, "/bucket/packed") == local(tmp_path / "whole")
    convert_checkpoint("memory://bucket/packed", tmp_path / "dense", "dense")
    convert_checkpoint(tmp_path / "whole", tmp_path / "expected", "dense")
    assert tree(tmp_path / "dense") == tree(tmp_path / "expected")


def test_what_no_conversion_copies_is_not_downloaded(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository of the hub may hold the weights three times."""
    put(memory, SHARDED, "/bucket/model")
    left = ["1_Pooling", "adapter_model.safetensors", "huge.json", "pytorch_model.bin"]
    monkeypatch.setattr("spformat.checkpoint.source.SIDE_FILE", 5000)
    (extra := tmp_path / "adapter_model.safetensors").write_bytes(b"")
    sf.save_dense(extra, {"lora": np.ones((2, 2), np.float32)}, overwrite=True)
    memory.pipe({
        "/bucket/model/adapter_model.safetensors": extra.read_bytes(), "/bucket/model/1_Pooling/config.json": b"{}",
        "/bucket/model/huge.json": bytes(5001), "/bucket/model/pytorch_model.bin": b"weights",
        "/bucket/model/tokenizer.model": b"vocabulary",
    })  # fmt: skip
    report = convert_checkpoint("memory://bucket/model", tmp_path / "packed", staging=tmp_path / "staging")
    assert report.left_behind == tuple(left)
    there = {p.name for p in (tmp_path / "staging" / "source").iterdir()}
    assert there & {*left} == {"adapter_model.safetensors"}  # the index says that it is not a shard
    assert (tmp_path / "packed" / "tokenizer.model").read_bytes() == b"vocabulary"
    memory.pipe_file("/bucket/pickled/pytorch_model.bin", b"weights")
    with pytest.raises(sf.errors.InputError, match=r"pytorch_model\.bin is a PyTorch file"):
        convert_checkpoint("memory://bucket/pickled", tmp_path / "never")


def test_files_and_file_urls(tmp_path: Path) -> None:
    convert_checkpoint(f"file://{SINGLE}", f"file://{tmp_path}/out.safetensors", "csr")
    convert_checkpoint(SINGLE, tmp_path / "expected.safetensors", "csr")
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()


def test_the_manifest_is_uploaded_last(tmp_path: Path, memory: Any) -> None:
    moved: list[str] = []
    with remote.staged(SHARDED, "memory://bucket/out", moved=lambda name, _: moved.append(name)) as here:
        convert_checkpoint(here.source, here.target)
    assert moved[-1] == "spformat.json"
    assert len(moved) == len(stored(memory, "/bucket/out"))
    moved.clear()
    with remote.staged(here.source, "memory://bucket/dense", moved=lambda name, _: moved.append(name)) as here:
        convert_checkpoint(SHARDED, here.target, "dense")
    assert moved[-1] == "model.safetensors.index.json"


def test_a_failed_conversion_uploads_nothing_and_a_target_is_not_replaced_unasked(tmp_path: Path, memory: Any) -> None:
    with pytest.raises(sf.errors.StructureError):
        convert_checkpoint(SHARDED, "memory://bucket/out", "two-four")
    assert not memory.exists("/bucket/out")
    convert_checkpoint(SHARDED, "memory://bucket/out")
    before = stored(memory, "/bucket/out")
    with pytest.raises(sf.errors.OutputError, match=r"memory://bucket/out: the target holds .* already; use --force"):
        convert_checkpoint(SHARDED, "memory://bucket/out", "csr")
    assert stored(memory, "/bucket/out") == before
    convert_checkpoint(SHARDED, "memory://bucket/out", "csr", force=True)
    assert stored(memory, "/bucket/out") != before


def test_downloads_of_another_size_are_refused_and_a_staging_folder_goes_on(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, SHARDED, "/bucket/model")
    real = type(memory).get_file

    def cut(self: Any, name: str, path: str, *_: Any, **__: Any) -> None:
        real(self, name, path)
        if name.endswith("00002-of-00002.safetensors"):
            Path(path).write_bytes(Path(path).read_bytes()[:-1])

    monkeypatch.setattr(type(memory), "get_file", cut)
    staging = tmp_path / "staging"
    with pytest.raises(sf.errors.InputError, match=r"model-00002-of-00002.safetensors: expected [\d,]+ bytes, got"):
        convert_checkpoint("memory://bucket/model", tmp_path / "out", staging=staging)
    assert not (staging / "source" / "model-00002-of-00002.safetensors").exists()
    monkeypatch.setattr(type(memory), "get_file", real)
    expected = whole(tmp_path)
    calls: list[str] = []
    monkeypatch.setattr(
        type(memory), "get_file", lambda self, name, path, **_: (calls.append(name), real(self, name, path))
    )
    convert_checkpoint("memory://bucket/model", tmp_path / "out", staging=staging)
    names = {Path(c).name for c in calls}
    assert "model-00002-of-00002.safetensors" in names
    assert "model-00001-of-00002.safetensors" not in names
    assert tree(tmp_path / "out") == expected


def test_a_staging_folder_with_files_of_another_model_is_refused(tmp_path: Path, memory: Any) -> None:
    put(memory, SHARDED, "/bucket/model")
    convert_checkpoint("memory://bucket/model", tmp_path / "out", staging=tmp_path / "staging")
    memory.pipe_file("/bucket/other/model.safetensors", SINGLE.read_bytes())
    with pytest.raises(
        sf.errors.InputError, match=r"staging folder contains config\.json, which is no file of memory:"
    ):
        convert_checkpoint("memory://bucket/other", tmp_path / "other", staging=tmp_path / "staging")
    assert not (tmp_path / "other").exists()


def test_errors_of_other_packages_have_an_exit_code(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore's and httpx' errors are no OSError."""

    class ClientError(Exception):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise ClientError("denied")

    monkeypatch.setattr(type(memory), "put_file", fail)
    with pytest.raises(sf.errors.WriteError, match=r"cannot upload .*: ClientError: denied"):
        convert_checkpoint(SHARDED, "memory://bucket/out")


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("memory://bucket/nothing", sf.errors.InputError, "nothing is there"),
        ("nonsense://x/y", sf.errors.UsageError, "not a URL that fsspec knows"),
    ],
)
def test_what_is_not_there(tmp_path: Path, memory: Any, url: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        convert_checkpoint(url, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sf.errors.UsageError, match="parts are converted between folders that all machines see"):
        convert_checkpoint("memory://bucket/model", tmp_path / "out", part="1/2")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(sf.errors.UsageError, match=r"pip install 'spformat\[remote\]'"):
        convert_checkpoint("memory://bucket/model", tmp_path / "out")
    assert not transfers.is_remote(tmp_path)
    assert not transfers.is_remote("C:/x")


def test_the_command_converts_a_matrix_file_behind_a_url(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    w = np.eye(8, dtype=np.float32)
    write_matrix("w.npz", w)
    memory.pipe_file("/bucket/w.npz", Path("w.npz").read_bytes())
    memory.pipe_file("/bucket/broken.npz", b"PK")
    for source in ("memory://bucket/w.npz", f"file://{tmp_path}/w.npz"):
        for target in ("w.safetensors", "other.npz"):
            done = command("convert", source, target, "--to", "csr", "--force")
            assert done.code == 0, done.err
            ((name, x),) = sf.load(target).items()
            assert name == ("other" if target == "other.npz" else "w")
            np.testing.assert_array_equal(x.to_dense(), w)
    broken = command("convert", "memory://bucket/broken.npz", "x.safetensors")
    assert (broken.code, broken.err.startswith("error: memory://bucket/broken.npz: ")) == (65, True), broken.err
    same = command("convert", f"file://{tmp_path}/w.npz", "w.npz", "--force")
    assert (same.code, "input and output are the same file" in same.err) == (73, True)
    there = command("convert", "w.npz", "memory://bucket/x.npz")
    assert (there.code, memory.exists("/bucket/x.npz")) == (2, False)


def test_a_dry_run_refuses_a_url_as_the_run_does_and_uploads_nothing(tmp_path: Path, memory: Any) -> None:
    put(memory, SHARDED, "/bucket/packed")
    (tmp_path / "here").mkdir()
    for target, flags, code in (
        ("memory://bucket/packed", (), 73), ("nosuch://x/y", (), 2), ("memory://bucket/new", ("--part", "1/2"), 2),
        ("memory://bucket/new", ("--in-place",), 2), (f"file://{tmp_path}", (), 0),
    ):  # fmt: skip
        words = ("convert", SHARDED, target, "--to", "csr", *flags)
        dry = command(*words, "--dry-run")
        assert dry.code == code, dry.err
        if code:
            assert dry == command(*words)
    assert command("convert", SHARDED, "memory://bucket/new", "--dry-run").code == 0
    assert not memory.exists("/bucket/new")
    assert command("convert", "memory://bucket/packed", tmp_path / "a" / "b", "--dry-run").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here"]
