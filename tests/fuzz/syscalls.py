"""A fault at every system call of the write path: ENOSPC, EIO, EINTR, a short write, SIGKILL (T11, F14-F18).

One process imports everything once. For each point it forks a child, attaches ``strace`` to it, and injects one fault
at the k-th call of a name. Then it checks what ``scenarios`` promises. ``python -m fuzz syscalls`` runs every
point, ``--every 10`` each tenth. Short writes come from a shim (gcc, LD_PRELOAD), because strace cannot shorten a call.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from fuzz.scenarios import SCENARIOS, Stage
from fuzz.substitutions import MEMORY

FAULTS = ("error=ENOSPC", "error=EIO", "error=EINTR", "signal=KILL")
ZERO_BYTES = "retval=0"
WRITES = ("write", "pwrite64")
# Memory, threads and time: the only fault here is a kill, because their errors have nothing to do with files.
NOT_FILES = frozenset(
    "mmap munmap mremap mprotect madvise brk futex clone clone3 exit rt_sigprocmask rt_sigaction rt_sigreturn "
    "set_robust_list rseq gettid getpid sched_getaffinity sched_yield clock_nanosleep getrandom sysinfo prlimit64 "
    "membarrier getrusage uname".split()
)


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
                os.kill(pid, signal.SIGKILL)  # otherwise it would run without a fault
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
