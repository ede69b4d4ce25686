"""One checkpoint converted in every way that spreads or interrupts the work: python benchmarks/cluster.py [--gb 8]

A generated bf16 checkpoint in shards of about 1 GB is converted in one run; in two parts that are merged; by a
command that is killed (SIGKILL) when half of the shards are there, and resumed; by two worker processes of a dask
LocalCluster, one of which is killed half-way. Each output is compared with the first by SHA-256 of every file.
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

from convert import generate

from spformat.checkpoint import convert_checkpoint, open_workers

CLI = "import sys; sys.argv[0] = 'spformat'\nfrom spformat_cli.main import main; main()"


def hashes(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as f:
            out[str(path.relative_to(folder))] = hashlib.file_digest(f, "sha256").hexdigest()
    return out


def command(*arguments: object) -> subprocess.Popen[bytes]:
    """The command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", CLI, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def done(process: subprocess.Popen[bytes]) -> None:
    """Wait for it; a failure ends the benchmark."""
    errors = process.communicate()[1]
    if process.returncode:
        raise SystemExit(errors.decode()[-2000:])


def finished(out: Path) -> int:
    """Shards that the journals in a folder name."""
    found = [json.loads(p.read_text()) for p in out.glob("spformat.partial*.json")]
    return sum(len(tree["shards"]) for tree in found)


def when_half(out: Path, shards: int, act: Callable[[], None]) -> threading.Thread:
    """Does ``act`` once half of the shards are there."""

    def watch() -> None:
        while finished(out) < max(1, shards // 2):
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def one_run(source: Path, out: Path, to: str, shards: int) -> None:
    """The run that the others are compared with."""
    done(command("convert", source, out, "--to", to))


def two_parts(source: Path, out: Path, to: str, shards: int) -> None:
    """Two parts side by side, then merge."""
    running = [command("convert", source, out, "--to", to, "--part", f"{i}/2") for i in (1, 2)]
    for process in running:
        done(process)
    done(command("merge", out))


def killed_and_resumed(source: Path, out: Path, to: str, shards: int) -> None:
    """SIGKILL half-way, then --resume."""
    process = command("convert", source, out, "--to", to)
    watch = when_half(out, shards, process.kill)
    process.communicate()
    watch.join()
    assert process.returncode == -signal.SIGKILL
    done(command("convert", source, out, "--to", to, "--resume"))


def dask_worker_killed(source: Path, out: Path, to: str, shards: int) -> None:
    """Two worker processes, one killed half-way."""
    import distributed

    with open_workers("dask", 2, paths=[source]) as workers:
        pids = list(distributed.get_client().run(os.getpid).values())
        watch = when_half(out, shards, lambda: os.kill(pids[0], signal.SIGKILL))
        convert_checkpoint(source, out, to, executor=workers)
        watch.join()


def main() -> None:
    """One line a way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--to", default="two-four")
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source = Path(name) / "dense"
        size = generate(source, options.gb)
        shards, expected = len(list(source.glob("*.safetensors"))), {}
        print(f"{size / 1e9:.2f} GB in {shards} shards to {options.to}", flush=True)
        for way in (one_run, two_parts, killed_and_resumed, dask_worker_killed):
            out, start = Path(name) / way.__name__, time.perf_counter()
            way(source, out, options.to, shards)
            seconds = time.perf_counter() - start
            found = hashes(out)
            expected = expected or found
            same = "same bytes" if found == expected else "OTHER BYTES"
            print(f"{way.__name__:20s} {seconds:6.1f} s  {size / seconds / 1e9:.2f} GB/s  {same}", flush=True)
            shutil.rmtree(out)


if __name__ == "__main__":
    main()
