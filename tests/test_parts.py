"""Conversions cut into parts and spread over executors: the bytes of one run, whatever stops in between."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import sparse

import spformat as sf
from spformat import output
from spformat.checkpoint import (
    Part,
    Recipe,
    Workers,
    convert_checkpoint,
    executors,
    merge_parts,
    open_source,
    parts,
    plan_jobs,
)
from spformat.checkpoint.folder import Conversion
from spformat.locks import folder_lock

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


def units(source: Path, n: int) -> tuple[tuple[parts.Unit, ...], ...]:
    opened, recipe = open_source(source), Recipe()
    return Conversion(opened, plan_jobs(opened, recipe), recipe, "out").parts(n)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("source", [SHARDED, SINGLE], ids=["two shards", "one"])
def test_every_tensor_is_in_one_part_and_parts_are_equal_to_an_item(source: Path, n: int) -> None:
    cut = units(source, n)
    assert len(cut) == n
    assert cut == units(source, n)
    jobs = [j for part in cut for u in part for j in u.jobs]
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
    with pytest.raises(sf.UsageError, match="part: expected i/n"):
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


def test_merge_names_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(sf.InputError, match="expected the folder"):
        merge_parts(out)
    convert_checkpoint(SHARDED, out, "csr", part="2/5")
    with pytest.raises(sf.InputError, match=r"4 of 5 parts have not finished \(1, 3, 4, 5\): run each with --part i/5"):
        merge_parts(out)
    with pytest.raises(sf.ContainerError, match="unfinished conversion"):
        open_source(out)
    for i in (1, 3, 4, 5):
        convert_checkpoint(SHARDED, out, "csr", part=f"{i}/5")
    piece = next((out / parts.PIECES).iterdir())
    data = piece.read_bytes()
    piece.unlink()
    with pytest.raises(sf.InputError, match=f"{piece.name} is missing or has changed: run part ./5 again"):
        merge_parts(out)
    piece.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(sf.InputError, match=f"{piece.name} is missing or has changed"):
        merge_parts(out, checksums=True)
    with pytest.raises(sf.IntegrityError, match="the file is damaged"):  # its CRC, even if nobody asks for hashes
        merge_parts(out)
    piece.write_bytes(data)
    merge_parts(out)
    with pytest.raises(sf.InputError, match="nothing is left to merge"):
        merge_parts(out)


def test_parts_of_different_conversions_do_not_mix(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_checkpoint(SHARDED, out, "csr", part="1/2")
    convert_checkpoint(SHARDED, out, "bitmask", part="2/2")
    with pytest.raises(sf.ContainerError, match="parts of different conversions"):
        merge_parts(out)
    with pytest.raises(sf.OutputError, match=r"spformat.partial-1-of-2.json already; use --resume"):
        convert_checkpoint(SHARDED, out, "csr", part="1/2")
    with pytest.raises(sf.OutputError, match="--resume"):  # a run without parts, over parts
        convert_checkpoint(SHARDED, out, "csr")
    source = tmp_path / "copy"
    shutil.copytree(SHARDED, source)
    other = tmp_path / "other"
    for i in (1, 2):
        convert_checkpoint(source, other, "csr", part=Part(i, 2))
    (source / "model.safetensors.index.json").unlink()
    (source / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(sf.ContainerError, match="another source"):
        merge_parts(other)
    assert merge_parts(other, SHARDED).path == str(other)


def test_parts_run_beside_each_other_but_not_twice_nor_beside_a_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with folder_lock(out, shared=True), folder_lock(out, ".spformat-part-1-of-2.lock"):  # part 1 runs
        convert_checkpoint(SHARDED, out, "csr", part="2/2")
        for again in ({"part": "1/2"}, {}):
            with pytest.raises(sf.LockedError):
                convert_checkpoint(SHARDED, out, "csr", **again)  # type: ignore[arg-type]
        with pytest.raises(sf.LockedError):
            merge_parts(out)


# ------------------------------------------------------------------ executors


class Interrupted(Exception):
    pass


def test_single_files_take_no_parts(tmp_path: Path) -> None:
    with pytest.raises(sf.UsageError, match="write into a folder"):
        convert_checkpoint(SINGLE, tmp_path / "x.safetensors", part="1/2")


@pytest.mark.parametrize("source", [SHARDED, SINGLE], ids=["two shards", "one"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_threads_give_the_bytes_of_one(tmp_path: Path, source: Path, count: int) -> None:
    expected, seen = whole(tmp_path, source), []
    with ThreadPoolExecutor(count) as pool:
        report = convert_checkpoint(source, tmp_path / "out", executor=Workers(pool, count), progress=seen.append)
    assert tree(tmp_path / "out") == expected
    assert {o.name for o in seen} == {o.name for o in report.outcomes}
    # One thread, that of the test, converts an array job's part; several convert it side by side.
    for i in (1, 2):
        with ThreadPoolExecutor(count) as pool:
            convert_checkpoint(source, tmp_path / "parts", part=Part(i, 2), executor=pool)
    merge_parts(tmp_path / "parts")
    assert tree(tmp_path / "parts") == expected


def test_processes_give_the_bytes_of_one_and_typed_errors(tmp_path: Path) -> None:
    import multiprocessing

    expected = whole(tmp_path)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        convert_checkpoint(SHARDED, tmp_path / "out", executor=pool)
        assert tree(tmp_path / "out") == expected
        with pytest.raises(sf.StructureError, match=r"tensor '.*': two-four") as e:
            convert_checkpoint(SHARDED, tmp_path / "no", "two-four", executor=pool)
        assert (e.value.unit, e.value.limit) == ("group", 2)
    assert tree(tmp_path / "no") == {}


class Inline(Executor):
    """Runs a task when it is submitted; fails the first tries, and tells how much was under way at once."""

    def __init__(self, failures: Iterator[Exception] | None = None) -> None:
        self.failures = failures or iter(())
        self.tries: list[str] = []

    def submit(self, work: Any, /, task: Any, *_: Any, **__: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.tries.append(task.unit.name)
        error = next(self.failures, None)
        try:
            if error is not None:
                raise error
            future.set_result(work(task))
        except Exception as e:
            future.set_exception(e)
        return future


def test_what_may_pass_is_tried_again(tmp_path: Path) -> None:
    expected = whole(tmp_path)
    pool = Inline(iter((ConnectionError("worker lost"), sf.WriteError("no space left"))))
    convert_checkpoint(SHARDED, tmp_path / "out", executor=Workers(pool, 2))
    assert tree(tmp_path / "out") == expected
    assert len(pool.tries) == 4

    pool = Inline(iter([ConnectionError("worker lost")] * 6))
    with pytest.raises(sf.WriteError, match=r"failed 3 time\(s\).*ConnectionError: worker lost; .*--resume"):
        convert_checkpoint(SHARDED, tmp_path / "no", executor=Workers(pool, 2))
    for error in (BrokenProcessPool("killed"), sf.IntegrityError("damaged")):
        pool = Inline(iter([error]))
        with pytest.raises((sf.WriteError, sf.IntegrityError), match=r"killed|damaged"):
            convert_checkpoint(SHARDED, tmp_path / f"no-{type(error).__name__}", executor=Workers(pool, 1))
        assert len(set(pool.tries)) == len(pool.tries)


class Slow(Executor):
    """Finishes a task only when nothing more is submitted; counts what is under way."""

    def __init__(self) -> None:
        self.pool, self.now, self.most = ThreadPoolExecutor(8), 0, 0

    def submit(self, work: Any, /, task: Any, *_: Any, **__: Any) -> Future[Any]:
        self.now += 1
        self.most = max(self.most, self.now)

        def run() -> Any:
            import time

            time.sleep(0.02)
            done = work(task)
            self.now -= 1
            return done

        return self.pool.submit(run)


def test_bytes_in_flight_are_bounded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"w{i}": sparse(rng, (64, 64), "float32", 0.3) for i in range(16)}
    sf.save_dense(tmp_path / "in.safetensors", tensors)
    (one,) = {2 * x.nbytes for x in tensors.values()}
    for room, most in ((1, 1), (3 * (one + executors._BESIDE), 3)):
        pool = Slow()
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / f"out{most}", executor=Workers(pool, 8, room))
        assert pool.most == most
        assert tree(tmp_path / f"out{most}") == tree(tmp_path / "out1")


# ------------------------------------------------------------------ interrupted and resumed


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
    with pytest.raises(sf.InputError, match=r"2 of 3 parts have not finished \(2, 3\)"):
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
from spformat.output import Output

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
