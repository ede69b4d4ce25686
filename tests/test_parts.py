"""Conversions cut into parts: the bytes of one run, whatever stops in between."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spformat as sf
from spformat.checkpoint import Part, Recipe, Workers, convert_checkpoint, merge_parts, open_source, parts, plan_tensors
from spformat.checkpoint.conversion import Conversion
from spformat.storage import output
from spformat.storage.files import sha256_of
from spformat.storage.locks import folder_lock

FIXTURES = Path(__file__).parent.parent / "fixtures" / "checkpoint"
SHARDED, SINGLE = FIXTURES / "sharded", FIXTURES / "digits" / "model.safetensors"


def tree(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def whole(tmp_path: Path, source: Path = SHARDED, recipe: Recipe | str = "auto") -> dict[str, str]:
    """What one run in one process writes."""
    convert_checkpoint(source, tmp_path / "whole", recipe)
    return tree(tmp_path / "whole")


# ------------------------------------------------------------------ how the work is cut


def units(source: Path, n: int) -> tuple[tuple[parts.FilePlan, ...], ...]:
    opened, recipe = open_source(source), Recipe()
    return Conversion(opened, plan_tensors(opened, recipe), recipe, "out").parts(n)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("source", [SHARDED, SINGLE], ids=["two shards", "one"])
def test_every_tensor_is_in_one_part_and_parts_are_equal_to_an_item(source: Path, n: int) -> None:
    cut = units(source, n)
    assert len(cut) == n
    assert cut == units(source, n)
    jobs = [j for part in cut for u in part for j in u.plans]
    opened = open_source(source)
    assert [j.name for j in jobs] == list(opened.records)
    names = [u.name for part in cut for u in part]
    assert len(set(names)) == len(names)
    shards = {s: sum(j.bytes_in for j in jobs if j.shard == s) for s in opened.shards}
    item = max(shards.values()) if n <= len(shards) else max(j.bytes_in for j in jobs)
    share = sum(shards.values()) / n
    assert all(abs(sum(u.nbytes for u in part) - share) <= item for part in cut)
    if n <= len(shards):
        assert all(u.whole for part in cut for u in part)


BAD_PARTS = ("0/3", "4/3", "1", "-1/2", "1/2/3", "a/b", "1/100001")


@pytest.mark.parametrize(("text", "ok"), [("1/1", True), ("3/16", True), *((t, False) for t in BAD_PARTS)])
def test_part_texts(text: str, ok: bool) -> None:
    if ok:
        assert str(Part.parse(text)) == text
        return
    with pytest.raises(sf.errors.UsageError, match="part: expected i/n"):
        Part.parse(text)


# ------------------------------------------------------------------ parts and merge


@pytest.mark.parametrize("recipe", ["auto", "bitmask", "dense", Recipe(to="csr", misfit="keep")], ids=str)
@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_merged_parts_are_the_single_run(tmp_path: Path, n: int, recipe: Recipe | str) -> None:
    source = SHARDED
    if recipe == "dense":
        convert_checkpoint(SHARDED, tmp_path / "packed", "auto")
        source = tmp_path / "packed"
    expected = whole(tmp_path, source, recipe)
    out = tmp_path / "out"
    for i in reversed(range(1, n + 1)):
        before = tree(out) if out.exists() else {}
        convert_checkpoint(source, out, recipe, part=f"{i}/{n}")
        assert before.items() <= tree(out).items()
    report = merge_parts(out)
    assert tree(out) == expected
    assert sum(o.bytes_in for o in report.outcomes) == sum(size for _, _, size in open_source(source).records.values())


def test_values_numpy_lacks_and_shards_without_tensors(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    header = {"w": {"dtype": "F4", "shape": [8, 16], "data_offsets": [0, 64]}}
    header["v"] = {"dtype": "U8", "shape": [3], "data_offsets": [64, 67]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (source / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(67)))
    sf.save_dense(source / "b.safetensors", {})
    expected = whole(tmp_path, source)
    for i in (1, 2, 3):
        convert_checkpoint(source, tmp_path / "out", part=Part(i, 3))
    merge_parts(tmp_path / "out", checksums=True)
    assert tree(tmp_path / "out") == expected


def test_merged_parts_of_matrices_without_a_nonzero_are_the_single_run(tmp_path: Path) -> None:
    tensors = {f"w{i}": np.zeros(shape, np.float32) for i, shape in enumerate([(8, 8), (0, 4), (4, 0), (1, 1)])}
    source = tmp_path / "model.safetensors"
    sf.save_dense(source, tensors)
    expected = whole(tmp_path, source, "bitmask")
    for i in (1, 2):
        convert_checkpoint(source, tmp_path / "out", "bitmask", part=f"{i}/2")
    merge_parts(tmp_path / "out")
    assert tree(tmp_path / "out") == expected
    manifest = json.loads((tmp_path / "out" / "spformat.json").read_text())
    assert [t["nnz"] for t in manifest["tensors"].values()] == [0] * 4


def test_what_stays_behind_is_told_by_the_merge_and_by_no_part(tmp_path: Path) -> None:
    shutil.copytree(SHARDED, tmp_path / "in")
    (tmp_path / "in" / "model.gguf").write_bytes(b"GGUF")
    for i in (1, 2):
        assert convert_checkpoint(tmp_path / "in", tmp_path / "out", part=Part(i, 2)).left_behind == ()
    assert merge_parts(tmp_path / "out").left_behind == ("model.gguf",)


def test_merge_names_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(sf.errors.InputError, match="expected the folder"):
        merge_parts(out)
    convert_checkpoint(SHARDED, out, "csr", part="2/5")
    with pytest.raises(
        sf.errors.InputError, match=r"4 of 5 parts have not finished \(1, 3, 4, 5\): run each with --part i/5"
    ):
        merge_parts(out)
    with pytest.raises(sf.errors.ContainerError, match="unfinished conversion"):
        open_source(out)
    for i in (1, 3, 4, 5):
        convert_checkpoint(SHARDED, out, "csr", part=f"{i}/5")
    piece = next((out / parts.PIECES).iterdir())
    data = piece.read_bytes()
    piece.unlink()
    with pytest.raises(sf.errors.InputError, match=f"{piece.name} is missing or has changed: run part ./5 again"):
        merge_parts(out)
    piece.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(sf.errors.InputError, match=f"{piece.name} is missing or has changed"):
        merge_parts(out, checksums=True)
    with pytest.raises(
        sf.errors.IntegrityError, match="the file is damaged"
    ):  # its CRC, even if nobody asks for hashes
        merge_parts(out)
    piece.write_bytes(data)
    merge_parts(out)
    with pytest.raises(sf.errors.InputError, match="nothing is left to merge"):
        merge_parts(out)


def test_parts_of_different_conversions_do_not_mix(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_checkpoint(SHARDED, out, "csr", part="1/2")
    with pytest.raises(sf.errors.OutputError, match=r"part 1/2 .* other options \(to: 'bitmask' here, 'csr' there\)"):
        convert_checkpoint(SHARDED, out, "bitmask", part="2/2")
    with pytest.raises(sf.errors.OutputError, match="part 1/2 in this folder is one of 2, and 2/3 is not"):
        convert_checkpoint(SHARDED, out, "csr", part="2/3")
    with pytest.raises(sf.errors.OutputError, match=r"spformat.partial-1-of-2.json already; use --resume"):
        convert_checkpoint(SHARDED, out, "csr", part="1/2")
    convert_checkpoint(SHARDED, out, "bitmask", part="2/2", force=True)
    with pytest.raises(sf.errors.ContainerError, match="parts of different conversions"):
        merge_parts(out)
    with pytest.raises(sf.errors.OutputError, match="--resume"):  # a run without parts, over parts
        convert_checkpoint(SHARDED, out, "csr")
    thirds, journal = tmp_path / "thirds", "spformat.partial-2-of-3.json"
    convert_checkpoint(SHARDED, thirds, "csr", part="2/3")
    (out / "spformat.partial-2-of-2.json").unlink()
    shutil.copy(thirds / journal, out)
    with pytest.raises(
        sf.errors.ContainerError, match=rf"{journal} and .*-1-of-2\.json are parts of different conversions"
    ):
        merge_parts(out)
    source = tmp_path / "copy"
    shutil.copytree(SHARDED, source)
    other = tmp_path / "other"
    for i in (1, 2):
        convert_checkpoint(source, other, "csr", part=Part(i, 2))
    (source / "model.safetensors.index.json").unlink()
    (source / "model-00002-of-00002.safetensors").unlink()
    (source / "model-00001-of-00002.safetensors").rename(source / "model.safetensors")
    with pytest.raises(sf.errors.ContainerError, match="another source"):
        merge_parts(other)
    assert merge_parts(other, SHARDED).path == str(other)


def test_parts_run_beside_each_other_but_not_twice_nor_beside_a_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with folder_lock(out, shared=True), folder_lock(out, ".spformat-part-1-of-2.lock"):  # part 1 runs
        convert_checkpoint(SHARDED, out, "csr", part="2/2")
        for again in ({"part": "1/2"}, {}):
            with pytest.raises(sf.errors.LockedError):
                convert_checkpoint(SHARDED, out, "csr", **again)  # type: ignore[arg-type]
        with pytest.raises(sf.errors.LockedError):
            merge_parts(out)


def test_single_files_take_no_parts(tmp_path: Path) -> None:
    with pytest.raises(sf.errors.UsageError, match="write into a folder"):
        convert_checkpoint(SINGLE, tmp_path / "x.safetensors", part="1/2")


# ------------------------------------------------------------------ interrupted and resumed


class Interrupted(Exception):
    pass


def stop_at(name: str) -> Any:
    def stop(outcome: Any) -> None:
        if name in outcome.name:
            raise Interrupted

    return stop


@pytest.mark.parametrize("executor", [False, True], ids=["here", "executor"])
def test_a_part_that_stopped_is_resumed(tmp_path: Path, executor: bool) -> None:
    expected, out = whole(tmp_path), tmp_path / "out"
    options: dict[str, Any] = {"executor": Workers(ThreadPoolExecutor(1), 1)} if executor else {}
    convert_checkpoint(SHARDED, out, part="1/3")
    with pytest.raises(Interrupted):
        convert_checkpoint(SHARDED, out, part="2/3", progress=stop_at("layers.1"), **options)
    with pytest.raises(sf.errors.InputError, match=r"2 of 3 parts have not finished \(2, 3\)"):
        merge_parts(out)
    report = convert_checkpoint(SHARDED, out, part="2/3", resume=True, **options)
    assert report.resumed == (0 if executor and len(report.shards) == 1 else len(report.shards) - 1)
    convert_checkpoint(SHARDED, out, part="3/3", resume=True, **options)
    assert convert_checkpoint(SHARDED, out, part="3/3", resume=True).resumed >= 1
    merge_parts(out)
    assert tree(out) == expected


def test_a_run_without_parts_finishes_what_parts_began(tmp_path: Path) -> None:
    expected, out = whole(tmp_path), tmp_path / "out"
    convert_checkpoint(SHARDED, out, part="1/5")
    convert_checkpoint(SHARDED, out, part="4/5")
    with pytest.raises(Interrupted):
        convert_checkpoint(SHARDED, out, part="3/5", progress=stop_at("weight"))
    report = convert_checkpoint(SHARDED, out, resume=True)
    assert report.resumed >= 2
    assert tree(out) == expected


@pytest.mark.parametrize("source", [SHARDED, SINGLE], ids=["two shards", "one"])
def test_a_run_on_an_executor_is_resumed_there_or_here(tmp_path: Path, source: Path) -> None:
    expected, last = whole(tmp_path, source), list(open_source(source).records)[-1]
    for name, again in (("here", None), ("there", Workers(ThreadPoolExecutor(2), 2))):
        out = tmp_path / name
        with pytest.raises(Interrupted):
            convert_checkpoint(source, out, executor=Workers(ThreadPoolExecutor(1), 4), progress=stop_at(last))
        convert_checkpoint(source, out, resume=True, executor=again)
        assert tree(out) == expected


def test_a_merge_that_was_cut_off_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, out = whole(tmp_path), tmp_path / "out"
    for i in (1, 2, 3):
        convert_checkpoint(SHARDED, out, part=Part(i, 3))
    with monkeypatch.context() as m:
        m.setattr("spformat.checkpoint.folder._copy_side_files", stop_at(""))
        with pytest.raises((Interrupted, AttributeError)):
            merge_parts(out)
    assert (out / "spformat-00001-of-00002.safetensors").exists()
    merge_parts(out)
    assert tree(out) == expected


KILLED = """
import itertools, os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from spformat.checkpoint import Workers, convert_checkpoint
from spformat.storage.output import Output

_, source, out, part, threads, when, at = sys.argv
commit, numbers = Output.commit, itertools.count(1)

def counted(self):
    last = next(numbers) == int(at)
    if last and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    commit(self)
    if last:
        os.kill(os.getpid(), signal.SIGKILL)

Output.commit = counted
executor = Workers(ThreadPoolExecutor(int(threads)), int(threads)) if threads != "0" else None
convert_checkpoint(source, out, part=part or None, executor=executor)
"""
"""Dies before or after its n-th file (a journal, a shard, a piece, the manifest) gets its name."""


@pytest.mark.parametrize(
    ("part", "threads", "moments"), [("2/3", 0, (1, 2, 4)), ("", 3, (1, 4, 7, 8))], ids=["part", "executor"]
)
def test_killed_before_or_after_a_file_has_its_name_and_resumed(
    tmp_path: Path, part: str, threads: int, moments: tuple[int, ...]
) -> None:
    expected = whole(tmp_path)
    for at in moments:
        when = ("before", "after")[at % 2]
        out = tmp_path / f"{at}"
        code = [sys.executable, "-c", KILLED, str(SHARDED), str(out), part, str(threads), when, str(at)]
        assert subprocess.run(code, check=False).returncode == -signal.SIGKILL
        for other in ("1/3", "3/3") if part else ():
            convert_checkpoint(SHARDED, out, part=other)
        convert_checkpoint(SHARDED, out, part=part or None, resume=True)
        if part:
            merge_parts(out)
        assert tree(out) == expected, (when, at)


def test_temporary_files_of_other_machines_are_left_to_the_merge(tmp_path: Path) -> None:
    """Their locks may not be seen here, so a part cannot tell whether they are in use."""
    expected, out = whole(tmp_path), tmp_path / "out"
    convert_checkpoint(SHARDED, out, part="1/2")
    dead, other = (out / f".spformat-{machine}00000000.tmp" for machine in (output._machine(), "0" * 8))
    for path in (dead, other):
        path.write_bytes(b"half a shard")
    convert_checkpoint(SHARDED, out, part="2/2")
    assert other.exists()
    assert not dead.exists()
    merge_parts(out)
    assert tree(out) == expected


def test_files_are_hashed_while_the_next_ones_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of the first file waits here until the second one is written."""
    second, seen, write = threading.Event(), list[bool](), parts.write_shard

    def written(*args: Any, **options: Any) -> Any:
        result = write(*args, **options)
        if args[1] == open_source(SHARDED).shards[1]:
            second.set()
        return result

    def hashed(path: Any, *args: Any) -> str:
        if "spformat-00001" in os.fspath(path):
            seen.append(second.wait(20))
        return sha256_of(path, *args)

    monkeypatch.setattr(parts, "cores", lambda: 3)
    monkeypatch.setattr(parts, "write_shard", written)
    monkeypatch.setattr(parts, "sha256_of", hashed)
    convert_checkpoint(SHARDED, tmp_path / "a", "csr")
    assert seen == [True]
    monkeypatch.undo()
    convert_checkpoint(SHARDED, tmp_path / "b", "csr")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_files_that_were_written_before_an_error_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their hashes may still be missing when the next file fails."""
    write, converted = parts.write_shard, list[str]()

    def fails_at_the_second(*args: Any, **options: Any) -> Any:
        if converted:
            raise OSError(errno.EIO, "no more")
        converted.append(args[1])
        return write(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no more"):
        patch.setattr(parts, "cores", lambda: 3)
        patch.setattr(parts, "write_shard", fails_at_the_second)
        convert_checkpoint(SHARDED, tmp_path / "a", "csr")
    report = convert_checkpoint(SHARDED, tmp_path / "a", "csr", resume=True)
    assert (report.resumed, len(converted)) == (1, 1)
