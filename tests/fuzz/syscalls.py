"""A fault at every system call of the write path: ENOSPC, EIO, EINTR, a short write, SIGKILL (T11, F14-F18).

One process imports everything once. For each point it forks a child, lets ``strace`` take hold of it, and injects one
fault at the k-th call of a name. Then: every final name holds all of its old bytes or all of its new ones, inputs are
untouched, what can be opened is all old or all new, temporary files are gone (but of a killed child), and the same
command run again ends with the bytes of an uninterrupted run. ``python -m fuzz syscalls`` runs every point,
``--every 10`` each tenth. Short writes come from a shim (gcc, LD_PRELOAD), because strace cannot shorten a call.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.substitutions import MEMORY
from spformat.checkpoint import Recipe, convert_checkpoint
from spformat.checkpoint.diff import diff_checkpoints
from spformat.errors import SpformatError
from spformat.formats.csr import CSR
from spformat.storage.container import save, save_dense

FAULTS = ("error=ENOSPC", "error=EIO", "error=EINTR", "signal=KILL")
ZERO_BYTES = "retval=0"
WRITES = ("write", "pwrite64")
# Memory, threads and time: only killed at, since no error of theirs says anything about files.
NOT_FILES = frozenset(
    "mmap munmap mremap mprotect madvise brk futex clone clone3 exit rt_sigprocmask rt_sigaction rt_sigreturn "
    "set_robust_list rseq gettid getpid sched_getaffinity sched_yield clock_nanosleep getrandom sysinfo prlimit64 "
    "membarrier getrusage uname".split()
)
TYPED = {0, 65, 66, 73, 74, 75}
LEAK = 99


def tensors(seed: int, copies: int = 1) -> dict[str, Any]:
    """Three tensors of one shard, or so many times three."""
    rng = np.random.default_rng(seed)
    found = {}
    for i in range(copies):
        w = rng.integers(1, 9, (24, 40)).astype(np.float16)
        w[rng.random(w.shape) < 0.8] = 0
        found |= {f"{seed % 10}.{i}.w": w, f"{seed % 10}.{i}.v": w[:8].astype(np.float32), f"{seed % 10}.{i}.b": w[0]}
    return found


def checkpoint(folder: Path, seed: int, shards: int = 2, copies: int = 1) -> None:
    """A small sharded checkpoint with files beside the shards."""
    folder.mkdir(parents=True)
    for i in range(shards):
        save_dense(folder / f"model-{i + 1:05}-of-{shards:05}.safetensors", tensors(seed + i, copies))
    (folder / "config.json").write_text(f'{{"seed": {seed}}}')


@dataclass(frozen=True)
class Scenario:
    """``prepare`` makes input and old output in a folder, ``act`` is what fails, ``again`` what is run afterwards."""

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
    found = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


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
        found = tree(self.here)
        found.pop("out/.spformat.lock", None)  # held by nobody, it stops nobody
        return found == self.new

    def state(self, killed: bool) -> dict[str, str]:
        """The files there are now; AssertionError if a name is neither old nor new, or something was left behind."""
        found = tree(self.here)
        for name in self.old.keys() | self.new.keys():
            if not name.startswith("out/"):
                assert found[name] == self.old[name], f"the input {name} was changed"
            elif found.get(name) not in (self.old.get(name), self.new.get(name)):
                raise AssertionError(f"{name} is neither old nor new")
        extra = found.keys() - self.old.keys() - self.new.keys()
        left = {name for name in extra if re.fullmatch(r"out/\.spformat-[0-9a-f]{16}\.tmp", name)}
        own = {"out/spformat.partial.json", "out/.spformat.lock"}
        assert extra <= left | own, f"left behind: {extra}"
        assert killed or not left, f"left behind: {left}"
        return found

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


def traced(stage: Stage, flags: list[str]) -> tuple[int, str]:
    """(exit status, strace's log) of one run of the command under ``flags``."""
    for left in (2, 1, 0):
        with suppress(OSError) if left else nullcontext():  # strace may lose a child that others stop and continue
            return _traced(stage, flags)
    raise AssertionError("unreachable")


def _traced(stage: Stage, flags: list[str]) -> tuple[int, str]:
    stage.reset()
    gate, go = os.pipe()
    pid = stage.child(gate)
    log = stage.room / "log"
    log.unlink(missing_ok=True)
    strace = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", log, *flags, "-p", str(pid)], stderr=subprocess.PIPE, text=True
    )
    assert strace.stderr is not None
    try:
        while not (log.exists() and _held(pid)):
            if strace.poll() is not None:
                os.kill(pid, signal.SIGKILL)  # before it runs without a fault
                raise OSError(f"strace ended with {strace.returncode}: {strace.stderr.read().strip()}")
            time.sleep(0.0005)
        os.write(go, b"g")
    finally:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        strace.wait()
        strace.stderr.close()
        os.close(gate)
        os.close(go)
    return code, log.read_text(errors="replace")


def _held(pid: int) -> bool:
    return "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()


def usable() -> str:
    """Why strace cannot be used here; "" if it can."""
    if not shutil.which("strace"):
        return "strace is not installed (apt-get install strace)"
    done = subprocess.run(["strace", "-qq", "-e", "inject=close:error=EIO:when=9999", "true"], capture_output=True)
    return "" if done.returncode == 0 else f"strace cannot trace here: {done.stderr.decode().strip()[:200]}"


def points(stage: Stage) -> list[tuple[str, int]]:
    """(name, k) of every system call of an undisturbed run; k counts per thread, as strace does."""
    code, log = traced(stage, ["-e", "trace=all"])
    assert code == 0, f"{stage.name}: exit code {code} without a fault"
    calls, most = Counter[tuple[str, str]](), dict[str, int]()
    for line in log.splitlines():
        found = re.match(r"(\d+) +(\w+)\(", line)
        if found:
            calls[found[1], found[2]] += 1
            most[found[2]] = max(most.get(found[2], 0), calls[found[1], found[2]])
    for name in ("exit_group", "select", "pselect6"):  # the end, and the gate
        most.pop(name, None)
    return [(name, k) for name, n in sorted(most.items()) for k in range(1, n + 1)]


def faults(stage: Stage, every: int, start: int = 0) -> Iterator[tuple[str, int, str]]:
    """(name, k, fault) of each point to try."""
    chosen = [
        (name, k, fault)
        for name, k in points(stage)
        for fault in (*FAULTS, ZERO_BYTES)
        if fault == "signal=KILL" or (name not in NOT_FILES and (fault != ZERO_BYTES or name in WRITES))
    ]
    return iter(chosen[start % every :: every])


def campaign(name: str, room: Path, every: int = 1) -> tuple[Counter[str], list[str]]:
    """(outcomes counted by "fault: exit code", broken promises) of one scenario."""
    stage, outcomes, broken = Stage(name, room), Counter[str](), []
    for call, k, fault in faults(stage, every):
        code, log = traced(stage, ["-e", f"trace={call}", "-e", f"inject={call}:{fault}:when={k}"])
        hit = "(INJECTED)" in log or "killed by SIGKILL" in log
        outcomes[f"{fault}: {code if hit else 'not reached'}"] += 1
        try:
            stage.judge(code, fault, call)
        except Exception as e:
            broken.append(f"{name}: {call} #{k}, {fault}, exit {code}: {type(e).__name__}: {e}")
    return outcomes, broken


# --- short writes

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>
static long at = 0, most = 0;                      /* every call if at is 0 and most is not */
void shorten(long call, long bytes) { at = call; most = bytes; }
static size_t cut(size_t n) {
    if (!most || (at && --at)) return n;
    size_t kept = n > (size_t)most ? (size_t)most : n;
    if (at == 0 && most == 1) most = 0;            /* the one call is over */
    return kept;
}
ssize_t pwrite64(int fd, const void *p, size_t n, off_t o) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    return real(fd, p, cut(n), o);
}
ssize_t write(int fd, const void *p, size_t n) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    return real(fd, p, cut(n));
}
"""
SHORT = "SPFORMAT_FUZZ_SHORT"


def shortened(name: str, room: Path) -> tuple[int, list[str]]:
    """(runs, broken promises): each write of a scenario alone cut to one byte, then every write cut to 7 bytes."""
    library = room / "short.so"
    library.with_suffix(".c").write_text(SHIM)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, library.with_suffix(".c"), "-ldl"], check=True)
    settings = {"LD_PRELOAD": str(library), SHORT: str(room), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "fuzz", "syscalls", "--only", name]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return 0, [f"{name}: short writes: {done.stderr[-500:]}"]
    return int(lines[0]), lines[1:]


def _shorten_here(name: str, room: Path) -> None:
    """What ``shortened`` runs with the shim loaded: prints the number of runs, then broken promises."""
    shim = ctypes.CDLL(None)
    stage, runs, broken = Stage(name, room / "stage"), 0, []
    count = _writes(stage)
    for k, most in [(k, 1) for k in range(1, count + 1)] + [(0, 7)]:
        stage.reset()
        gate, go = os.pipe()
        os.write(go, b"g")
        pid = stage.child(gate, lambda k=k, most=most: shim.shorten(ctypes.c_long(k), ctypes.c_long(most)))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(gate)
        os.close(go)
        runs += 1
        try:
            assert code == 0, f"exit code {code}"
            stage.judge(code, "short", "pwrite64")
        except Exception as e:
            broken.append(f"{name}: write #{k} cut to {most} bytes: {e}")
    print(runs, *broken, sep="\n")


def _writes(stage: Stage) -> int:
    return sum(1 for name, _ in points(stage) if name in WRITES) if not usable() else 40


def main(arguments: list[str]) -> int:
    """The command; 1 if a promise was broken."""
    parser = argparse.ArgumentParser("fuzz syscalls", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="try each n-th point only")
    parser.add_argument("--only", choices=SCENARIOS, help="one scenario")
    given = parser.parse_args(arguments)
    if SHORT in os.environ:
        _shorten_here(given.only, Path(os.environ[SHORT]))
        return 0
    if why := usable():
        print(f"syscalls: not run: {why}", file=sys.stderr)
        return 69
    broken: list[str] = []
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        for name in [given.only] if given.only else SCENARIOS:
            start = time.time()
            outcomes, wrong = campaign(name, Path(folder, "traced"), given.every)
            runs, also = shortened(name, Path(folder)) if shutil.which("gcc") else (0, [])
            broken += wrong + also
            text = ", ".join(f"{k} x{n}" for k, n in sorted(outcomes.items()))
            print(
                f"syscalls: {name}: {outcomes.total()} faults, {runs} short writes, {len(wrong + also)} broken promises"
                f" in {time.time() - start:.0f} s: {text}", *(wrong + also), sep="\n", flush=True,
            )  # fmt: skip
    return int(bool(broken))
