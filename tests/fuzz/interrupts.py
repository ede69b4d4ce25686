"""Signals at random moments of a conversion with every executor and every kind of target, and a second run at once.

Each round converts a small sharded checkpoint over nothing or over an older conversion, in a process that gets SIGINT,
SIGTERM, SIGHUP or SIGKILL at a random moment; half of the local ones are joined by a second run at that moment. What
the target holds then is refused, or is the old or the new checkpoint as a whole; nobody writes after the runs have
ended; and resuming gives the bytes of an uninterrupted run.
``python -m fuzz interrupts --count 500``.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fuzz.scenarios import LEAK, checkpoint, tree
from fuzz.substitutions import MEMORY
from spformat.checkpoint import convert_checkpoint, open_workers
from spformat.checkpoint.diff import diff_checkpoints
from spformat.errors import SpformatError

EXECUTORS = ("", "threads", "processes", "dask")
TARGETS = ("local", "file", "store")
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -signal.SIGKILL}
ENDS = {0, 73, 75}
"""Exit codes of a run that was not interrupted: done, a target that exists, a target that is locked."""
SHARDS, COPIES = 4, 12


class Store(LocalFileSystem):  # type: ignore[misc]
    """An object store that outlives a process: its URLs are no file:// URLs, so they are uploaded to."""

    protocol = "kept"


fsspec.register_implementation("kept", Store, clobber=True)


def url(target: str, folder: Path) -> str:
    """The target as it is given to the command."""
    return {"local": str(folder), "file": f"file://{folder}", "store": f"kept://{folder}"}[target]


def act(here: Path, executor: str, target: str, forced: bool, resume: bool) -> None:
    """The conversion, with the executor that ends with it."""
    options = {"force": forced, "resume": resume}
    if not executor or target == "store":
        convert_checkpoint(here / "in", url(target, here / "out"), "csr", **options)
        return
    with open_workers(executor, 2) as workers:
        convert_checkpoint(here / "in", url(target, here / "out"), "csr", executor=workers, **options)


def child(here: Path, *what: object) -> int:
    """Fork a child that converts, with the signal handlers of the command; its pid, once it has the handlers."""
    ready, begun = os.pipe()
    pid = os.fork()
    if pid:
        os.close(begun)
        os.read(ready, 1)
        os.close(ready)
        return pid
    code = LEAK
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for number, end in SIGNALS.items():
            if number not in (signal.SIGINT, signal.SIGKILL):
                signal.signal(number, lambda *_, end=end: sys.exit(end))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(begun, b".")
        act(here, *what)  # type: ignore[arg-type]
        code = 0
    except SpformatError as e:
        code = e.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit as e:
        code = int(e.code or 0)
    except BaseException:
        (here / "leak").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """Exit code of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def opens_whole(here: Path, done: Path) -> None:
    """What the target holds is refused, or it is one of the two checkpoints."""
    if not (here / "out").is_dir():
        return
    try:
        for whole in (done / "old", done / "new"):
            if all(d is None for _, d in diff_checkpoints(here / "out", whole)):
                return
    except SpformatError:
        return
    raise AssertionError("what can be opened is neither the old nor the new checkpoint")


def settled(here: Path) -> dict[str, str]:
    """The files of the target, without hidden ones; AssertionError if somebody still writes."""
    seen = []
    for _ in range(2):
        seen.append({name: sha for name, sha in tree(here / "out").items() if "/." not in f"/{name}"})
        time.sleep(0.2)
    assert seen[0] == seen[1], f"somebody wrote after the run: {dict(seen[0].items() ^ seen[1].items())}"
    return seen[1]


def campaign(count: int, room: Path, seed: int = 0, executors: tuple[str, ...] = EXECUTORS) -> Counter[str]:
    """``count`` signals; how many, by kind. Raises at the first broken promise."""
    rng, seen = random.Random(seed), Counter[str]()
    start, done = room / "start", room / "done"
    checkpoint(start / "in", 10, SHARDS, COPIES)
    checkpoint(room / "before", 20, SHARDS, COPIES)
    convert_checkpoint(room / "before", done / "old", "bitmask")
    convert_checkpoint(start / "in", done / "new", "csr")
    expected, seconds = tree(done / "new"), dict.fromkeys(executors, 0.0)
    for i in range(count):
        executor = executors[i % len(executors)] if rng.random() < 0.5 else rng.choice(executors)
        target, forced = rng.choice(TARGETS), rng.random() < 0.5
        number, second = rng.choice(list(SIGNALS)), target != "store" and rng.random() < 0.5
        label = f"{executor or 'no executor'}, {target}, {number.name}{', forced' * forced}{', second run' * second}"
        here = room / "here"
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(start, here)
        if forced:
            shutil.copytree(done / "old", here / "out")
        if not seconds[executor]:
            begin = time.perf_counter()
            assert ended(child(here, executor, "local", forced, False)) == 0, label
            seconds[executor] = time.perf_counter() - begin
            shutil.rmtree(here / "out")
            if forced:
                shutil.copytree(done / "old", here / "out")
        pid = child(here, executor, target, forced, False)
        time.sleep(rng.random() * seconds[executor])
        os.kill(pid, number)
        other = child(here, executor, target, forced, True) if second else 0
        code = ended(pid)
        after = ended(other) if other else 0
        assert code in (0, SIGNALS[number]), (label, code, (here / "leak").exists() and (here / "leak").read_text())
        assert after in ENDS, (label, after, (here / "leak").exists() and (here / "leak").read_text())
        if (here / "out").is_dir() and (number != signal.SIGKILL or (other and after == 0)):
            settled(here)  # workers whose run was killed end a moment later, unless another run has come
        opens_whole(here, done)
        if not (here / "out").is_dir() or settled(here) != expected:
            resumed = ended(child(here, "", target, forced, True))
            assert resumed == 0, (label, "resumed", resumed)
        assert settled(here) == expected, f"{label}: resumed, but not the bytes of an uninterrupted run"
        seen[executor or "no executor"] += 1
        seen[target] += 1
        seen[number.name] += 1
        seen["ended before" if code == 0 else "interrupted"] += 1
        seen["second run"] += second
    return seen


def main(arguments: list[str]) -> int:
    """The command; a broken promise ends with a traceback."""
    parser = argparse.ArgumentParser("fuzz interrupts", description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--executors", nargs="*", default=list(EXECUTORS), choices=EXECUTORS)
    given = parser.parse_args(arguments)
    start = time.time()
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        seen = campaign(given.count, Path(folder), given.seed, tuple(given.executors))
    print(f"interrupts: seed {given.seed}, {time.time() - start:.0f} s: {dict(seen)}")
    return 0
