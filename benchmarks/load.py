"""Loading a file to the host or a GPU against reading its bytes: python benchmarks/load.py [--device cuda] [--gb 4]

Writes files of pruned weights (4096 x 11008, bfloat16) in several formats to a folder in memory and, with --disk, to
one on a disk; reads each file raw (into one buffer, one thread and several) and with ``load``, which also checks every
CRC and validates every array. The time to validate arrays that are already in memory is given as a share of that. A
file on a disk is read cold, with nothing of it in the page cache, as ``RWF_NOWAIT`` confirms before each run, and then
hot. GB/s are bytes of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import spformat as sf

ROWS, COLS = 4096, 11008
FORMATS = ("two-four", "bitmask", "csr", "bsr:blocksize=64x64", "sr-bcrs", "dense")
"""Other formats can be given as well: dbsr, vector-nm:n=2,m=4,vector_length=32, ell-buckets."""
_BUFFER = 16 << 20


def matrix(target: str) -> np.ndarray[Any, Any]:
    """bfloat16[ROWS, COLS] that the format is meant for: 2:4, of rows or vectors, nine tenths empty, or in blocks."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0x3C00, 0x4000, (ROWS, COLS), np.uint16)
    if target.startswith(("csr", "sr-bcrs", "ell-buckets")):
        keep = rng.random((ROWS, COLS), np.float32) < 0.1
    elif target.startswith("vector-nm"):
        keep = rng.random((ROWS // 32, COLS // 4, 4)).argsort(axis=2).reshape(-1, COLS) < 2
        keep = np.repeat(keep, 32, axis=0)
    elif target.startswith(("bsr", "dbsr")):
        keep = np.repeat(np.repeat(rng.random((ROWS // 64, COLS // 64)) < 0.2, 64, axis=0), 64, axis=1)
    else:
        keep = rng.random((ROWS, COLS // 4, 4), np.float32).argsort(axis=2).reshape(ROWS, COLS) < 2
    pruned: np.ndarray[Any, Any] = (bits * keep).view(sf.arrays.dtypes.VALUE_TYPES["bfloat16"].numpy)
    return pruned


def write(path: Path, target: str, gigabytes: float) -> int:
    """A file of about that size, the same matrix under many names; its size in bytes."""
    a = sf.convert(matrix(target), target)
    count = max(1, round(gigabytes * 1e9 / a.nbytes))
    sf.save(path, {f"layers.{i}.weight": a for i in range(count)}, overwrite=True)
    return path.stat().st_size


def forget(path: Path) -> float | None:
    """Drop the cached pages of a file on a disk. Returns the share still cached, None where that is unknown."""
    fd, page = os.open(path, os.O_RDONLY), bytearray(1)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        places, cached = range(4096, os.fstat(fd).st_size, 64 << 20), 0
        for at in places:
            try:
                os.preadv(fd, [page], at, os.RWF_NOWAIT)
                cached += 1
            except BlockingIOError:
                pass
            except OSError:  # a file system without it
                return None
        return cached / max(1, len(places))
    finally:
        os.close(fd)


def read_raw(path: Path, threads: int) -> None:
    """Every byte of the file into buffers that are used again."""
    size, fd = path.stat().st_size, os.open(path, os.O_RDONLY)

    def part(i: int) -> None:
        buffer = memoryview(bytearray(_BUFFER))
        for at in range(i * _BUFFER, size, threads * _BUFFER):
            os.preadv(fd, [buffer], at)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, range(threads)))
    os.close(fd)


def timed(work: Any, path: Path, size: int, runs: int, cold: bool) -> list[float]:
    """GB/s of each run, slowest first."""
    rates = []
    for _ in range(runs):
        if cold and (forget(path) or 0) > 0.01:
            raise SystemExit(f"{path} stays in the page cache: nothing cold can be measured here")
        start = time.perf_counter()
        work()
        rates.append(size / (time.perf_counter() - start) / 1e9)
    return sorted(rates)


def load(path: Path, device: str) -> dict[str, Any]:
    """The file on the device, every kernel finished."""
    loaded = sf.load(path, device=device)
    finish(device)
    return loaded


def finish(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        sys.modules["cupy"].cuda.runtime.deviceSynchronize()


def validated(path: Path, device: str, runs: int) -> float:
    """Seconds to validate every matrix of the file where it is, the fastest run."""
    matrices, times = load(path, device).values(), []
    for _ in range(runs):
        unmarked = [f.with_arrays(**f.arrays()) for f in matrices]
        finish(device)
        start = time.perf_counter()
        for f in unmarked:
            f.validate()
        finish(device)
        times.append(time.perf_counter() - start)
    return min(times)


def measure(path: Path, target: str, device: str, runs: int, cold: bool) -> dict[str, Any]:
    """Raw and loaded rates of one file."""
    size, many = path.stat().st_size, min(16, len(os.sched_getaffinity(0)))
    row: dict[str, Any] = {"file": str(path), "format": target, "bytes": size, "cold": cold, "device": device}
    if not cold:
        read_raw(path, many)
    row["raw_1"] = timed(lambda: read_raw(path, 1), path, size, runs, cold)
    row[f"raw_{many}"] = timed(lambda: read_raw(path, many), path, size, runs, cold)
    row["first"] = timed(lambda: load(path, device), path, size, 1, cold)[0]
    row["load"] = timed(lambda: load(path, device), path, size, runs, cold)
    raw, loaded = (statistics.median(row[k]) for k in ("raw_1", "load"))
    row["share"] = loaded / raw
    row["validate_s"] = validated(path, device, runs)
    row["validate_share"] = row["validate_s"] * loaded * 1e9 / size
    place = "memory" if str(path).startswith("/dev/shm") else "cold" if cold else "hot"
    print(f"{place:6s} {target:20s} {size / 1e9:.2f} GB  raw {raw:6.2f}, {many} threads "
          f"{statistics.median(row[f'raw_{many}']):6.2f}  load {loaded:6.2f} ({row['load'][0]:.2f} .. "
          f"{row['load'][-1]:.2f}, first {row['first']:.2f}) GB/s: {100 * row['share']:.0f} %; validate "
          f"{1e3 * row['validate_s']:.1f} ms, {100 * row['validate_share']:.1f} % of the load", flush=True)  # fmt: skip
    return row


def main() -> None:
    """One line a file, and a JSON document last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, help="also measure with files in this folder, cold and hot")
    options = parser.parse_args()
    rows = []
    for target in options.formats:
        for folder, cold in ((options.memory, (False,)), (options.disk, (True, False))):
            if folder is None:
                continue
            path = folder / "spformat-benchmark.safetensors"
            try:
                write(path, target, options.gb)
                rows += [measure(path, target, options.device, options.runs, c) for c in cold]
            finally:
                path.unlink(missing_ok=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
