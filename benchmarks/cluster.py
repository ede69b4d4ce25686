"""A checkpoint converted in every way that spreads or interrupts the work, and back: python benchmarks/cluster.py

A generated bf16 checkpoint in shards of about 1 GB is converted in one run; in two parts that are merged; by a
command that is killed (SIGKILL) when half of the shards are there, and resumed; by two worker processes of a dask
LocalCluster, one of which is killed half-way. Each output is compared with the first by SHA-256 of every file. The
first is then converted back to dense, and every tensor compared with the input, byte for byte.

Seconds are wall time, the last fsync included. The peak is the largest resident memory of any one process (VmHWM,
read twenty times a second), beside the bound: twice the largest tensor and 300 MB. "others" is the number of cores that
the rest of the machine used meanwhile. The disk needs room for the input and two outputs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from convert import BOUND, CLI, RUN, Times, compare, generate, settle, size_of

from spformat.checkpoint import convert_checkpoint, open_workers


class Peak:
    """The largest resident memory that any process given to ``watch`` ever had, in bytes."""

    def __init__(self) -> None:
        self.bytes, self._pids = 0, set[int]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def watch(self, pid: int) -> None:
        self._pids.add(pid)

    def _look(self) -> None:
        while not self._over.wait(0.05):
            for pid in list(self._pids):
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    status = ""
                if "VmHWM:" in status:
                    self.bytes = max(self.bytes, int(status.split("VmHWM:", 1)[1].split()[0]) * 1024)
                else:  # gone, or not yet waited for
                    self._pids.discard(pid)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def hashes(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as f:
            out[str(path.relative_to(folder))] = hashlib.file_digest(f, "sha256").hexdigest()
    return out


def command(peak: Peak, *arguments: object) -> subprocess.Popen[bytes]:
    """The command line in a process of its own."""
    started = subprocess.Popen(
        [sys.executable, "-c", CLI + RUN, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peak.watch(started.pid)
    return started


def done(process: subprocess.Popen[bytes]) -> None:
    """Wait for it; a failure ends the benchmark."""
    errors = process.communicate()[1]
    if process.returncode:
        raise SystemExit(errors.decode()[-2000:])


def finished(out: Path) -> int:
    """Number of shards that are named in the journals of a folder."""
    journals = [json.loads(p.read_text()) for p in out.glob("spformat.partial*.json")]
    return sum(len(tree["shards"]) for tree in journals)


def when_half(out: Path, shards: int, act: Callable[[], None]) -> threading.Thread:
    """Does ``act`` once half of the shards are there."""

    def watch() -> None:
        while finished(out) < max(1, shards // 2):
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def one_run(source: Path, out: Path, to: str, shards: int, peak: Peak) -> None:
    """The run that the others are compared with."""
    done(command(peak, "convert", source, out, "--to", to))


def two_parts(source: Path, out: Path, to: str, shards: int, peak: Peak) -> None:
    """Two parts side by side, then merge."""
    running = [command(peak, "convert", source, out, "--to", to, "--part", f"{i}/2") for i in (1, 2)]
    for process in running:
        done(process)
    done(command(peak, "merge", out))


def killed_and_resumed(source: Path, out: Path, to: str, shards: int, peak: Peak) -> None:
    """SIGKILL half-way, then --resume."""
    process = command(peak, "convert", source, out, "--to", to)
    watch = when_half(out, shards, process.kill)
    process.communicate()
    watch.join()
    assert process.returncode == -signal.SIGKILL
    done(command(peak, "convert", source, out, "--to", to, "--resume"))


def dask_worker_killed(source: Path, out: Path, to: str, shards: int, peak: Peak) -> None:
    """Two worker processes, one killed half-way."""
    import distributed

    with open_workers("dask", 2, paths=[source]) as workers:
        pids = list(distributed.get_client().run(os.getpid).values())
        for pid in pids:
            peak.watch(pid)
        watch = when_half(out, shards, lambda: os.kill(pids[0], signal.SIGKILL))
        convert_checkpoint(source, out, to, executor=workers)
        watch.join()


WAYS = (one_run, two_parts, killed_and_resumed, dask_worker_killed)


def measured(folder: Path, source: Path, to: str, size: int) -> list[dict[str, object]]:
    """One row a way, the way back last."""
    shards, expected, rows = len(list(source.glob("*.safetensors"))), {}, []
    first = folder / one_run.__name__

    def row(way: str, work: Callable[[Peak], None], result: Callable[[], str]) -> None:
        times = Times([], 0.0)
        settle()
        with Peak() as peak, times.timed():
            work(peak)
        (seconds,) = times.seconds
        rows.append(
            {"to": to, "way": way, "seconds": seconds, "peak_bytes": peak.bytes, "within_bound": peak.bytes <= BOUND,
             "others": times.others, "result": result()}
        )  # fmt: skip
        print(f"{to:12s} {way:20s} {seconds:6.1f} s  {size / seconds / 1e9:.2f} GB/s  peak {peak.bytes / 1e6:.0f} MB"
              f"{'' if peak.bytes <= BOUND else ' (OVER THE BOUND)'}  others {times.others:.1f}  {rows[-1]['result']}",
              flush=True)  # fmt: skip

    def compared(out: Path) -> str:
        nonlocal expected
        actual = hashes(out)
        expected = expected or actual
        return "same bytes" if actual == expected else "OTHER BYTES"

    for way in WAYS:
        out = folder / way.__name__
        row(way.__name__, lambda peak, w=way, o=out: w(source, o, to, shards, peak), lambda o=out: compared(o))
        if out != first:
            shutil.rmtree(out)
    rows[0]["bytes_out"] = size_of(first)

    def back(peak: Peak) -> None:
        done(command(peak, "convert", first, folder / "back", "--to", "dense"))

    def restored() -> str:
        compare(source, folder / "back")
        return "same tensors"

    row("back to dense", back, restored)
    for out in (first, folder / "back"):
        shutil.rmtree(out)
    return rows


def main() -> None:
    """One line a way, a JSON document last; exit code 1 if anything came out different or over the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--to", nargs="+", default=["two-four"])
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source = Path(name) / "dense"
        size = generate(source, options.gb)
        print(f"{size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards; memory bound "
              f"{BOUND / 1e6:.0f} MB a process; load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
        rows = [row for to in options.to for row in measured(Path(name), source, to, size)]
    print(json.dumps({"bytes": size, "bound_bytes": BOUND, "rows": rows}))
    if any(row["result"] == "OTHER BYTES" or not row["within_bound"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
