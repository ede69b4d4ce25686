"""Runs with workers that are interrupted or killed: no worker writes after its run, and every resume ends the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import command
from fuzz.scenarios import checkpoint
from test_parts import tree

import spformat as sf
from spformat.checkpoint import Workers, convert_checkpoint, executors, open_source
from spformat.storage import locks
from spformat.storage.output import Output, publish

JOURNAL = "spformat.partial.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "in", 10, shards=6)
    convert_checkpoint(tmp_path / "in", tmp_path / "whole", "csr")
    return tmp_path / "in"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("again", [1, 3], ids=["once", "three times"])
def test_an_interrupt_waits_for_the_files_that_are_being_written(
    model: Path, monkeypatch: pytest.MonkeyPatch, number: int, again: int
) -> None:
    """Before, the journal was closed and the lock released while the threads were still writing."""
    out, commit, busy = model.parent / "out", Output.commit, threading.Event()

    def slow(self: Output) -> None:
        if self.path.endswith(".safetensors"):
            busy.set()
            time.sleep(0.4)
        commit(self)

    def interrupt() -> None:
        busy.wait()
        for _ in range(again):
            os.kill(os.getpid(), number)
            time.sleep(0.05)

    def raising(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Output, "commit", slow)
    before = signal.signal(number, raising)
    threading.Thread(target=interrupt, daemon=True).start()
    pool = ThreadPoolExecutor(3)
    try:
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(model, out, "csr", executor=Workers(pool, 3))
        left = tree(out)
        pool.shutdown()
        assert tree(out) == left  # nobody wrote after the run
    finally:
        signal.signal(number, before)
    shards = {name for name in left if name.endswith(".safetensors")}
    assert 1 <= len(shards) < 6
    assert set(json.loads((out / JOURNAL).read_text())["shards"]) == shards
    assert not (out / locks.LOCK).exists()
    assert command("validate", out).code == 65
    assert convert_checkpoint(model, out, "csr", resume=True).resumed == len(shards)
    assert tree(out) == tree(model.parent / "whole")


def test_an_interrupt_before_the_run_waits_for_its_first_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal may arrive while the thread that records the outcomes is being started."""
    commit, out = Output.commit, model.parent / "out"

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            future = super().submit(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGINT)
            return future

    def slow(self: Output) -> None:
        time.sleep(0.2)
        commit(self)

    monkeypatch.setattr(executors, "ThreadPoolExecutor", Interrupted)
    monkeypatch.setattr(Output, "commit", slow)
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        convert_checkpoint(model, out, "csr", executor=Workers(pool, 1))
    assert len([name for name in tree(out) if name.endswith(".safetensors")]) <= 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_journal_waits_for_the_workers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk may stop the run at its journal while workers are writing their files."""
    from spformat.checkpoint.journals import Journal

    out, commit = model.parent / "out", Output.commit

    def slow(self: Output) -> None:
        if "00001-of" not in self.path and self.path.endswith(".safetensors"):
            time.sleep(0.4)
        commit(self)

    def full(*_: Any) -> None:
        raise sf.errors.WriteError("disk full")

    monkeypatch.setattr(Output, "commit", slow)
    monkeypatch.setattr(Journal, "add", full)
    pool = ThreadPoolExecutor(2)
    with pytest.raises(sf.errors.WriteError, match="disk full"):
        convert_checkpoint(model, out, "csr", executor=Workers(pool, 2))
    left = tree(out)
    pool.shutdown()
    assert tree(out) == left


@pytest.mark.parametrize("name", ["spformat-{}-of-00003.safetensors", "model-{}-of-00003.safetensors"])
def test_shards_of_which_some_are_missing_are_not_sound(tmp_path: Path, name: str) -> None:
    """What an interrupted run of an earlier release left: shards, and neither a journal nor a manifest."""
    for i in (1, 3):
        sf.save_dense(tmp_path / name.format(f"{i:05}"), {f"w{i}": np.ones((2, 2), np.float32)})
    for verb in ("validate", "inspect"):
        answer = command(verb, tmp_path)
        assert answer.code == 65, answer
        assert name.format("00002") in answer.err
    with pytest.raises(sf.errors.ContainerError, match=r"1 of 3 shards is missing"):
        open_source(tmp_path)
    assert command("validate", tmp_path / name.format("00001")).code == 0  # a shard by its name can be looked at


# --------------------------------------------------------------------------------------------------- tokens, orphans


def test_a_worker_of_an_earlier_run_publishes_nothing(tmp_path: Path) -> None:
    """The folder is locked by another run before the worker comes to its rename."""
    for lock in (locks.LOCK, ".spformat-part-1-of-2.lock"):
        with locks.worker_token(tmp_path, lock) as token:
            with locks.acting_for(token):
                publish(tmp_path / "a", b"while the run lives", overwrite=True)
            with locks.folder_lock(tmp_path), locks.acting_for(token):
                with pytest.raises(sf.errors.LockedError, match="the run that started this worker has ended"):
                    publish(tmp_path / "b", b"")
                with (
                    locks.worker_token(tmp_path, lock),
                    pytest.raises(sf.errors.LockedError, match="has ended"),
                ):
                    publish(tmp_path / "b", b"")
        with locks.acting_for(token), pytest.raises(sf.errors.LockedError):
            publish(tmp_path / "b", b"")
    assert {p.name for p in tmp_path.iterdir()} == {"a"}


def test_parts_leave_each_others_workers_alone(tmp_path: Path) -> None:
    one, two = ".spformat-part-1-of-2.lock", ".spformat-part-2-of-2.lock"
    with (
        locks.folder_lock(tmp_path, shared=True),
        locks.folder_lock(tmp_path, one),
        locks.worker_token(tmp_path, one) as token,
        locks.folder_lock(tmp_path, shared=True),
        locks.folder_lock(tmp_path, two),
        locks.acting_for(token),
    ):
        publish(tmp_path / "a", b"")
    with (
        locks.worker_token(tmp_path) as token,
        locks.folder_lock(tmp_path, shared=True),
        locks.acting_for(token),
        pytest.raises(sf.errors.LockedError),
    ):
        publish(tmp_path / "b", b"")


def test_a_lock_waits_for_a_worker_that_is_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    take, renaming = Output._take_name, threading.Event()

    def slow(self: Output) -> None:
        renaming.set()
        time.sleep(0.3)
        take(self)
        order.append("renamed")

    monkeypatch.setattr(Output, "_take_name", slow)
    with locks.worker_token(tmp_path) as token:

        def work() -> None:
            with locks.acting_for(token):
                publish(tmp_path / "a", b"")

        worker = threading.Thread(target=work)
        worker.start()
        renaming.wait()
        with locks.folder_lock(tmp_path):
            order.append("locked")
        worker.join()
    assert order == ["renamed", "locked"]


SLOW = """
import os, sys, time
from spformat.storage.output import Output
commit = Output.commit
def slow(self):
    if self.path.endswith(".safetensors"):
        open(os.path.join(sys.argv[3], str(os.getpid())), "w").close()
        time.sleep(1.5)
    commit(self)
Output.commit = slow
if __name__ == "__main__":
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context
    from spformat.checkpoint import Workers, convert_checkpoint, open_workers
    if sys.argv[4] == "own":
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            convert_checkpoint(*sys.argv[1:3], "ell-buckets", force=True, executor=Workers(pool, 2))
    else:
        with open_workers("processes", 2) as workers:
            convert_checkpoint(*sys.argv[1:3], "ell-buckets", force=True, executor=workers)
"""


def killed_while_writing(model: Path, pool: str) -> list[int]:
    """SIGKILL of a run whose two worker processes have written their files and not yet published them; the workers."""
    marks = model.parent / "marks"
    marks.mkdir()
    script = model.parent / "slow.py"
    script.write_text(SLOW)
    run = subprocess.Popen([sys.executable, script, model, model.parent / "out", marks, pool])
    while not (workers := [int(p.name) for p in marks.iterdir()]):
        assert run.poll() is None
        time.sleep(0.02)
    run.kill()
    run.wait()
    return workers


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_workers_end_with_the_process_that_started_them(model: Path) -> None:
    workers = killed_while_writing(model, "ours")
    time.sleep(1.0)  # less than a worker needs to come to its rename
    assert not any(map(alive, workers))
    assert not any(name.endswith(".safetensors") for name in tree(model.parent / "out"))


def test_workers_that_live_on_cannot_change_a_later_run(model: Path) -> None:
    """A pool that is not ours: its processes do not learn that their parent has died."""
    workers = killed_while_writing(model, "own")
    try:
        convert_checkpoint(model, model.parent / "out", "csr", force=True)
        assert any(map(alive, workers))
        time.sleep(2.0)  # now they have come to their renames
        assert tree(model.parent / "out") == tree(model.parent / "whole")
    finally:
        for pid in workers:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_four_processes_share_a_lock_without_being_refused(tmp_path: Path) -> None:
    """The last one to leave takes the lock alone for a moment, to remove its file."""
    code = (
        "import sys\nfrom spformat.storage.locks import folder_lock\n"
        "for _ in range(1000):\n    with folder_lock(sys.argv[1], shared=True): pass\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code, tmp_path], stderr=subprocess.PIPE) for _ in range(4)]
    errors = [run.communicate()[1].decode() for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, errors
