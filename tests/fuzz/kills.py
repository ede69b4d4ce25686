"""SIGKILL at random moments of a conversion of several shards, resumed until it is done (T12, F18, F22).

Each round converts into a fresh folder, or with ``force`` over an old conversion of other values, is killed one to
three times at random moments, resumed each time, and then left to finish. After every kill each final name must hold
nothing, its old or its new bytes, and the folder must be refused or be whole; in the end all is as after an
uninterrupted run.
``python -m fuzz kills --count 200``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz.scenarios import Scenario, Stage, checkpoint
from fuzz.substitutions import MEMORY
from spformat.checkpoint import convert_checkpoint

SHARDS = 5
COPIES = 40
"""Tensors of a shard: enough for a run of some tenths of a second."""


def _fresh(folder: Path) -> None:
    checkpoint(folder / "in", 10, SHARDS, COPIES)


def _forced(folder: Path) -> None:
    _fresh(folder)
    checkpoint(folder / "before", 20, SHARDS, COPIES)
    convert_checkpoint(folder / "before", folder / "out", "bitmask")


def scenario(forced: bool) -> Scenario:
    """Conversion into an empty folder, or over an old one."""

    def run(folder: Path) -> None:
        convert_checkpoint(folder / "in", folder / "out", "csr", force=forced, resume=True)

    return Scenario(_forced if forced else _fresh, run, run)


def campaign(count: int, room: Path, seed: int = 0) -> Counter[str]:
    """Kill ``count`` running conversions; how many rounds and kills, by shards that were finished. Raises at the first
    broken promise."""
    rng, seen = random.Random(seed), Counter[str]()
    stages = [Stage("folder", room / str(forced), scenario(forced)) for forced in (False, True)]
    while seen["kills"] < count:
        stage = stages[seen["rounds"] % 2]
        seen["rounds"] += 1
        stage.reset()
        for _ in range(rng.randrange(1, 4)):
            begin = time.perf_counter()
            pid = stage.child()
            time.sleep(rng.random() * stage.seconds)
            os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code != -signal.SIGKILL:  # it ended before the kill
                assert code == 0, code
                stage.seconds = min(stage.seconds, time.perf_counter() - begin)
                break
            seen["kills"] += 1
            found = stage.state(killed=True)
            made = sum(found.get(n) == sha for n, sha in stage.new.items() if n.endswith(".safetensors") and "out" in n)
            seen[f"{made} shards finished"] += 1
            stage.opens_whole()
            if seen["kills"] == count:
                break
        if not stage.whole():
            stage.scenario.again(stage.here)
        assert stage.whole(), "resumed, but not the bytes of an uninterrupted run"
    return seen


def main(arguments: list[str]) -> int:
    """The command; a broken promise ends with a traceback."""
    parser = argparse.ArgumentParser("fuzz kills", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args(arguments)
    start = time.time()
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        seen = campaign(given.count, Path(folder), given.seed)
    print(f"kills: seed {given.seed}, {time.time() - start:.0f} s, all equal to an uninterrupted run: {dict(seen)}")
    return 0
