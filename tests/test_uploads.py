"""Targets behind URLs have the rules of local ones: nothing foreign is replaced, and no upload is taken for whole."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from fuzz.scenarios import checkpoint
from test_parts import SHARDED, SINGLE, tree
from test_remote import local, put, stored

import spformat as sf
from spformat.checkpoint import convert_checkpoint
from spformat.checkpoint.diff import diff_checkpoints

fsspec = pytest.importorskip("fsspec", reason="fsspec is missing: pip install 'spformat[remote]'")

CHANGES = ("put_file", "pipe_file", "rm_file", "mv")
"""The calls that change a file system."""


# ------------------------------------------------------------------------------------------------------- file:// URLs


def test_a_file_url_that_is_the_source_is_refused(tmp_path: Path) -> None:
    """Before, --force uploaded the converted file over its own input."""
    source = tmp_path / "model.safetensors"
    source.write_bytes(SINGLE.read_bytes())
    before = tree(tmp_path)
    with pytest.raises(sf.errors.OutputError, match="input and output are the same file"):
        convert_checkpoint(source, f"file://{source}", "csr", force=True)
    with pytest.raises(sf.errors.OutputError, match="input and output are the same file"):
        convert_checkpoint(f"FILE://{source}", source, "csr", force=True)
    assert tree(tmp_path) == before


def test_a_file_url_does_not_replace_foreign_files(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside.json"
    out.mkdir()
    (out / "config.json").write_text("of another model")
    with pytest.raises(sf.errors.OutputError, match=r"holds another config\.json"):
        convert_checkpoint(SHARDED, f"file://{out}", "csr")
    outside.write_text("outside of the target")
    (out / "config.json").unlink()
    (out / "config.json").symlink_to(outside)
    for force in (False, True):
        with pytest.raises(sf.errors.OutputError, match=r"config\.json"):
            convert_checkpoint(SHARDED, f"file://{out}", "csr", force=force)
    assert outside.read_text() == "outside of the target"


# ------------------------------------------------------------------------------------------------------- object stores


def test_the_source_is_no_target(memory: Any) -> None:
    put(memory, SHARDED, "/bucket/model")
    before = stored(memory, "/bucket/model")
    for target in ("memory://bucket/model", "memory:///bucket/model/"):
        with pytest.raises(sf.errors.OutputError, match="input and output are the same place"):
            convert_checkpoint("memory://bucket/model", target, "dense", force=True)
    one = "memory://bucket/model/model-00001-of-00002.safetensors"
    with pytest.raises(sf.errors.OutputError, match="input and output are the same place"):
        convert_checkpoint(one, one, "csr", force=True)
    assert stored(memory, "/bucket/model") == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_foreign_files_are_not_replaced_unasked(memory: Any, name: str) -> None:
    mine = (SHARDED / name).read_bytes()
    for other in (b"of another model", bytes(len(mine))):
        memory.pipe_file(f"/bucket/out/{name}", other)
        with pytest.raises(sf.errors.OutputError, match=rf"holds another {name} already; use --force"):
            convert_checkpoint(SHARDED, "memory://bucket/out", "csr")
        assert stored(memory, "/bucket/out") == {name: other}
    memory.pipe_file(f"/bucket/out/{name}", mine)
    convert_checkpoint(SHARDED, "memory://bucket/out", "csr")
    memory.store.clear()
    memory.pipe_file(f"/bucket/out/{name}/below", b"")
    with pytest.raises(sf.errors.OutputError, match=f"expected a file named {name}, or nothing, got a directory"):
        convert_checkpoint(SHARDED, "memory://bucket/out", "csr", force=True)


def fetched(memory: Any, root: str, folder: Path) -> Path:
    """What a reader of the store sees, as local files; hidden ones are skipped by every reader."""
    folder.mkdir()
    if memory.exists(root):
        for name, data in stored(memory, root).items():
            (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("before", ["nothing", "packed", "dense"])
@pytest.mark.parametrize("to", ["csr", "dense"])
def test_an_upload_interrupted_at_any_call_is_never_taken_for_whole(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, before: str, to: str
) -> None:
    checkpoint(tmp_path / "in", 10)
    checkpoint(tmp_path / "old", 20)
    convert_checkpoint(tmp_path / "in", tmp_path / "new", to)
    old = {}
    if before != "nothing":
        convert_checkpoint(tmp_path / "old", tmp_path / "earlier", "bitmask" if before == "packed" else "dense")
        old = local(tmp_path / "earlier")
    whole, calls = local(tmp_path / "new"), 0
    # Beside a manifest, dense shards are left alone, in a local folder as well.
    kept = {n: d for n, d in old.items() if (before, to) == ("dense", "csr") and n.startswith("model-")}
    for stop in itertools.count(1):
        memory.store.clear()
        for name, data in old.items():
            memory.pipe_file(f"/b/out/{name}", data)
        left = [stop]
        with monkeypatch.context() as patch:
            for call in CHANGES:
                real = getattr(type(memory), call)

                def counted(
                    self: Any, *args: Any, _real: Any = real, _call: str = call, _left: Any = left, **options: Any
                ) -> Any:
                    _left[0] -= 1
                    if _left[0]:
                        return _real(self, *args, **options)
                    if _call in ("put_file", "pipe_file"):  # a torn file
                        name = args[1] if _call == "put_file" else args[0]
                        self.store.pop(self._strip_protocol(name), None)
                        with self.open(name, "wb") as f:
                            f.write(b"torn")
                    raise KeyboardInterrupt

                patch.setattr(type(memory), call, counted)
            try:
                convert_checkpoint(tmp_path / "in", "memory://b/out", to, force=bool(old))
                break
            except KeyboardInterrupt:
                calls += 1
        here = fetched(memory, "/b/out", tmp_path / f"seen{stop}")
        try:
            sound = [
                other for other in ("earlier", "new") if (tmp_path / other).exists()
                and all(d is None for _, d in diff_checkpoints(here, tmp_path / other))
            ]  # fmt: skip
            assert sound, f"call {stop}: a mixture was read"
        except sf.errors.SpformatError:
            pass  # refused: unfinished
        convert_checkpoint(tmp_path / "in", "memory://b/out", to, force=True)
        assert stored(memory, "/b/out") == kept | whole, stop
    assert stored(memory, "/b/out") == kept | whole
    assert calls > 8


@pytest.mark.parametrize("resume", [False, True])
def test_temporary_files_of_an_interrupted_upload_are_no_checkpoint(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    checkpoint(tmp_path / "in", 10)
    convert_checkpoint(tmp_path / "in", tmp_path / "new", "csr")

    def stop(self: Any, *args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "pipe_file", stop)  # everything is uploaded, nothing has its name
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(tmp_path / "in", "memory://b/out", "csr")
    memory.pipe_file("/b/out/.spformat-upload-spformat-00007-of-00007.safetensors", b"of an earlier run")
    convert_checkpoint(tmp_path / "in", "memory://b/out", "csr", resume=resume)
    assert stored(memory, "/b/out") == local(tmp_path / "new")


def test_an_interrupted_upload_is_resumed(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "in", 10)
    convert_checkpoint(tmp_path / "in", tmp_path / "new", "csr")
    move, moved = type(memory).mv, itertools.count()

    def stop(self: Any, *args: Any, **options: Any) -> None:
        if next(moved) == 1:
            raise KeyboardInterrupt
        move(self, *args, **options)

    monkeypatch.setattr(type(memory), "mv", stop)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(tmp_path / "in", "memory://b/out", "csr")
    with pytest.raises(sf.errors.OutputError, match="already; use --force"):
        convert_checkpoint(tmp_path / "in", "memory://b/out", "csr")
    convert_checkpoint(tmp_path / "in", "memory://b/out", "csr", resume=True)
    assert stored(memory, "/b/out") == local(tmp_path / "new")


def test_a_single_file_gets_its_name_when_it_is_complete(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/b/out/x.safetensors", b"old")
    real = type(memory).put_file

    def torn(self: Any, local: str, remote: str, **options: Any) -> None:
        real(self, local, remote, **options)
        self.store[self._strip_protocol(remote)].truncate(5)

    monkeypatch.setattr(type(memory), "put_file", torn)
    with pytest.raises(sf.errors.WriteError, match=r"x\.safetensors: expected [\d,]+ bytes there, got 5"):
        convert_checkpoint(SINGLE, "memory://b/out/x.safetensors", "csr", force=True)
    assert memory.cat_file("/b/out/x.safetensors") == b"old"
    monkeypatch.undo()
    convert_checkpoint(SINGLE, "memory://b/out/x.safetensors", "csr", force=True)
    convert_checkpoint(SINGLE, tmp_path / "x.safetensors", "csr")
    assert stored(memory, "/b/out") == {"x.safetensors": (tmp_path / "x.safetensors").read_bytes()}
