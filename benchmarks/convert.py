"""Conversion of a generated checkpoint, end to end: python benchmarks/convert.py [--gb 1] [--targets two-four ..]
[--device cuda]

Writes a bf16 safetensors file of 4096 x 11008 weights (2:4 in vectors of 32, so that every target takes it exactly),
converts it with the command line in a process of its own and prints GB/s of dense bytes and peak memory, beside
a plain `cp` of the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import spformat as sf

ROWS, COLS = 4096, 11008
TARGETS = ("two-four", "bitmask", "csr", "vector-nm:n=2,m=4,vector_length=32")


def generate(path: Path, gigabytes: float) -> int:
    """A file of identical-shaped weights with different values; its size in bytes."""
    rng = np.random.default_rng(0)
    count = max(1, round(gigabytes * 1e9 / (2 * ROWS * COLS)))
    keep = rng.random((ROWS // 32, COLS // 4, 4), np.float32).argsort(axis=2) < 2
    keep = np.repeat(keep.reshape(ROWS // 32, COLS), 32, axis=0)
    bits = rng.integers(0x3C00, 0x4000, (ROWS, COLS), np.uint16) * keep
    tensors = {}
    for i in range(count):
        rolled = np.roll(bits, 32 * i, axis=0)
        tensors[f"model.layers.{i}.mlp.down_proj.weight"] = rolled.view(sf.dtypes.VALUE_TYPES["bfloat16"].numpy)
    sf.save_dense(path, tensors, overwrite=True)
    return path.stat().st_size


def peak_of(text: str) -> int:
    """Peak resident bytes a child wrote of itself: VmHWM, since ru_maxrss would count its parent before the exec."""
    return int(text.rsplit("VmHWM:", 1)[1].split()[0]) * 1024


_STATUS = "print(open('/proc/self/status').read(), file=sys.stderr)"
COMMAND = (
    "import sys; sys.argv[0] = 'spformat'\nfrom spformat_cli.main import app\n"
    f"try: app()\nexcept SystemExit as e: code = e.code\n{_STATUS}; sys.exit(code)"
)
LIBRARY = (
    "import sys, time\nfrom spformat.checkpoint import convert_checkpoint\n"
    "_, source, out, target, device = sys.argv\nfor i in range(7):\n    start = time.perf_counter()\n"
    "    convert_checkpoint(source, out, target, force=True, device=device)\n"
    "    print(time.perf_counter() - start)"
)
"""The first of the seven loads the compiled code and is not counted."""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter; its failure ends the benchmark with what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done


def measure(source: Path, target: str, out: Path, device: str) -> dict[str, object]:
    """Wall time and peak memory of the command, and the rates of six conversions in a warm process."""
    out.unlink(missing_ok=True)
    start = time.perf_counter()
    done = run(COMMAND, "convert", source, out, "--to", target, "--device", device, "--json")
    seconds, size = time.perf_counter() - start, source.stat().st_size
    rates = sorted(size / float(t) / 1e9 for t in run(LIBRARY, source, out, target, device).stdout.split()[1:])
    return {
        "target": target, "device": device, "command_gb_per_s": size / seconds / 1e9, "warm_gb_per_s": rates,
        "warm_median": statistics.median(rates), "peak_bytes": peak_of(done.stderr), "bytes_out": out.stat().st_size,
    }  # fmt: skip


def main() -> None:
    """One line a target, and a JSON document last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--device", default="cpu", help="where matrices are converted: cpu, cuda or cuda:<id>")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "dense.safetensors", Path(name) / "out.safetensors"
        size = generate(source, options.gb)
        start = time.perf_counter()
        shutil.copyfile(source, out)
        os.sync()
        copy = size / (time.perf_counter() - start) / 1e9
        bound = 2 * 2 * ROWS * COLS + 300 * 10**6
        print(f"{size / 1e9:.2f} GB, cp {copy:.2f} GB/s, memory bound {bound / 1e6:.0f} MB", flush=True)
        rows = []
        for target in options.targets:
            row = measure(source, target, out, options.device)
            rows.append(row)
            low, *_, high = row["warm_gb_per_s"]
            print(f"{target:40s} command {row['command_gb_per_s']:.2f} GB/s  warm {low:.2f} .. {high:.2f}, median "
                  f"{row['warm_median']:.2f}  peak {row['peak_bytes'] / 1e6:.0f} MB", flush=True)  # fmt: skip
    print(json.dumps({"bytes": size, "cp_gb_per_s": copy, "bound_bytes": bound, "rows": rows}))


if __name__ == "__main__":
    main()
