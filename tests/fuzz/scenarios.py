"""Commands that write, and what must hold of their files after a fault: the scenarios of the campaigns.

Every final name holds all of its old bytes or all of its new ones; inputs are untouched; what can be opened is all old
or all new; temporary files are gone (but of a killed child); and the same command run again ends with the bytes of an
uninterrupted run.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spformat.checkpoint import Recipe, convert_checkpoint
from spformat.checkpoint.diff import diff_checkpoints
from spformat.errors import SpformatError
from spformat.formats.csr import CSR
from spformat.storage.container import save, save_dense

TYPED = {0, 65, 66, 73, 74, 75}
"""Exit codes of success and of spformat's own errors."""
LEAK = 99
"""Exit code of a child in which another exception was raised."""


def tensors(seed: int, copies: int = 1) -> dict[str, Any]:
    """The tensors of one shard: three for each copy."""
    rng = np.random.default_rng(seed)
    shard = {}
    for i in range(copies):
        w = rng.integers(1, 9, (24, 40)).astype(np.float16)
        w[rng.random(w.shape) < 0.8] = 0
        shard |= {f"{seed % 10}.{i}.w": w, f"{seed % 10}.{i}.v": w[:8].astype(np.float32), f"{seed % 10}.{i}.b": w[0]}
    return shard


def checkpoint(folder: Path, seed: int, shards: int = 2, copies: int = 1) -> None:
    """A small sharded checkpoint with files beside the shards."""
    folder.mkdir(parents=True)
    for i in range(shards):
        save_dense(folder / f"model-{i + 1:05}-of-{shards:05}.safetensors", tensors(seed + i, copies))
    (folder / "config.json").write_text(f'{{"seed": {seed}}}')


@dataclass(frozen=True)
class Scenario:
    """``prepare`` writes input and old output into a folder; ``act`` is run under faults, ``again`` afterwards."""

    prepare: Callable[[Path], None]
    act: Callable[[Path], Any]
    again: Callable[[Path], Any]
    out: str = "out"
    opens: bool = True


def _old_save(folder: Path) -> None:
    (folder / "out").mkdir()
    save(folder / "out" / "x", {"w": CSR.from_dense(tensors(5)["5.0.w"]), "b": np.arange(3)})


def _new_save(folder: Path) -> None:
    save(folder / "out" / "x", {"w": CSR.from_dense(tensors(6)["6.0.w"]), "b": np.arange(9)}, overwrite=True)


def _no_file(folder: Path) -> None:
    (folder / "out").mkdir()


def _first_save(folder: Path) -> None:
    save(folder / "out" / "x", {"w": CSR.from_dense(tensors(6)["6.0.w"]), "b": np.arange(9)})


def _old_file(folder: Path) -> None:
    checkpoint(folder / "in", 10, 1)
    checkpoint(folder / "before", 20, 1)
    (folder / "out").mkdir()
    _file(folder, "before")


def _file(folder: Path, source: str = "in") -> None:
    shard = folder / source / "model-00001-of-00001.safetensors"
    convert_checkpoint(shard, folder / "out" / "x.safetensors", Recipe(to="auto"), force=True)


def _new_folder(folder: Path) -> None:
    checkpoint(folder / "in", 10)


def _old_folder(folder: Path) -> None:
    checkpoint(folder / "in", 10)
    checkpoint(folder / "before", 20)
    convert_checkpoint(folder / "before", folder / "out", "bitmask")


def _old(to: str, shards: int) -> Callable[[Path], None]:
    """Input is packed, the target holds another checkpoint: dense, or packed in another number of shards."""

    def prepare(folder: Path) -> None:
        checkpoint(folder / "dense", 10)
        convert_checkpoint(folder / "dense", folder / "in", "csr")
        checkpoint(folder / "before", 20, shards)
        convert_checkpoint(folder / "before", folder / "out", to)

    return prepare


def _folder(to: str, **options: bool) -> Callable[[Path], Any]:
    return lambda folder: convert_checkpoint(folder / "in", folder / "out", to, **options)


SCENARIOS = {
    "save": Scenario(_old_save, _new_save, _new_save, opens=False),
    "new save": Scenario(_no_file, _first_save, _new_save, opens=False),
    "file": Scenario(_old_file, _file, _file),
    "folder": Scenario(_new_folder, _folder("auto"), _folder("auto", resume=True)),
    "folder, forced": Scenario(_old_folder, _folder("csr", force=True), _folder("csr", force=True, resume=True)),
    "dense, forced": Scenario(
        _old("dense", 2), _folder("dense", force=True), _folder("dense", force=True, resume=True)
    ),
    "dense over packed": Scenario(
        _old("csr", 3), _folder("dense", force=True), _folder("dense", force=True, resume=True)
    ),
}


def tree(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


class Stage:
    """A scenario set up once; each fault starts from a copy of the same state."""

    def __init__(self, name: str, room: Path, scenario: Scenario | None = None) -> None:
        self.name, self.scenario, self.room = name, scenario or SCENARIOS[name], room
        self.start, self.done, self.here = room / "start", room / "done", room / "here"
        for folder in (self.start, self.done, self.here):
            shutil.rmtree(folder, ignore_errors=True)
        self.start.mkdir(parents=True)
        self.scenario.prepare(self.start)
        shutil.copytree(self.start, self.done)
        begin = time.perf_counter()
        self.scenario.act(self.done)
        self.seconds = time.perf_counter() - begin
        self.old, self.new = tree(self.start), tree(self.done)

    def reset(self) -> None:
        """Back to the state before the command."""
        shutil.rmtree(self.here, ignore_errors=True)
        shutil.copytree(self.start, self.here)

    def child(self, gate: int = -1, before: Callable[[], None] | None = None) -> int:
        """Fork a child that runs the command, once ``gate`` can be read; its pid."""
        pid = os.fork()
        if pid:
            return pid
        code = LEAK
        try:
            if gate >= 0:
                select.select([gate], [], [])
            if before:
                before()
            self.scenario.act(self.here)
            code = 0
        except SpformatError as e:
            code = e.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def whole(self) -> bool:
        """Whether everything is as after an uninterrupted run."""
        now = tree(self.here)
        now.pop("out/.spformat.lock", None)  # locked by nobody, it stops nobody
        return now == self.new

    def state(self, killed: bool) -> dict[str, str]:
        """The files there are now; AssertionError if a name is neither old nor new, or something was left behind."""
        now = tree(self.here)
        for name in self.old.keys() | self.new.keys():
            if not name.startswith("out/"):
                assert now[name] == self.old[name], f"the input {name} was changed"
            elif now.get(name) not in (self.old.get(name), self.new.get(name)):
                raise AssertionError(f"{name} is neither old nor new")
        extra = now.keys() - self.old.keys() - self.new.keys()
        left = {name for name in extra if re.fullmatch(r"out/\.spformat-[0-9a-f]{16}\.tmp", name)}
        own = {"out/spformat.partial.json", "out/.spformat.lock"}
        assert extra <= left | own, f"left behind: {extra}"
        assert killed or not left, f"left behind: {left}"
        return now

    def judge(self, code: int, fault: str, call: str) -> None:
        """AssertionError for a broken promise in the state a fault left, or after running again."""
        assert code == -9 or code in TYPED, f"exit code {code}"
        self.state(killed=code == -9 or call in ("unlink", "unlinkat"))
        if code == 0 and not fault.startswith("error=E"):
            assert self.whole(), "success, but not all is new"
        self.opens_whole()
        if not self.whole():
            self.scenario.again(self.here)
        assert self.whole(), "running again does not end with the bytes of an uninterrupted run"

    def opens_whole(self) -> None:
        """What can be opened holds the old tensors or the new ones, never some of each."""
        out = self.here / "out"
        if not self.scenario.opens or not out.is_dir():
            return
        target = out / "x.safetensors" if self.name == "file" else out
        try:
            for whole in (self.start, self.done):
                pairs = diff_checkpoints(target, whole / "out" / target.relative_to(out))
                if (whole / "out").is_dir() and all(d is None for _, d in pairs):
                    return
        except SpformatError:
            return  # refused: an unfinished conversion
        raise AssertionError("some tensors are old, others new")
