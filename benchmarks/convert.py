"""Conversion of a generated checkpoint, end to end: python benchmarks/convert.py [--gb 1] [--targets two-four,..]

Writes a bf16 safetensors file of 4096 x 11008 weights (2:4 in vectors of 32, so that every target takes it exactly),
converts it with the command line in a process of its own and prints GB/s of dense bytes and peak memory, beside
a plain `cp` of the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
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


def main() -> None:
    """One line a target, and a JSON document last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--targets", default=",".join(TARGETS).replace(",m", ";m").replace(",v", ";v"))
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    source = folder / "dense.safetensors"
    size = generate(source, options.gb)
    start = time.perf_counter()
    shutil.copyfile(source, folder / "copy")
    os.sync()
    copy = time.perf_counter() - start
    (folder / "copy").unlink()
    print(f"{size / 1e9:.2f} GB, cp {size / copy / 1e9:.2f} GB/s")
    rows = []
    for target in options.targets.split(","):
        target = target.replace(";", ",")
        out = folder / "out.safetensors"
        out.unlink(missing_ok=True)
        code = (
            "import sys, resource; sys.argv[0] = 'spformat'\nfrom spformat_cli.main import app\n"
            "try: app()\nexcept SystemExit as e: code = e.code\n"
            "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "print(f'PEAK {peak}', file=sys.stderr); sys.exit(code)"
        )
        command = [sys.executable, "-c", code, "convert", str(source), str(out), "--to", target, "--json"]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        if done.returncode:
            print(f"{target}: exit {done.returncode}: {done.stderr[-300:]}")
            continue
        peak = int(done.stderr.rsplit("PEAK ", 1)[1].split()[0]) * 1024
        row = {"target": target, "seconds": seconds, "gb_per_s": size / seconds / 1e9, "peak_bytes": peak,
               "bound_bytes": 2 * 2 * ROWS * COLS + 300 * 10**6, "bytes_out": out.stat().st_size}  # fmt: skip
        rows.append(row)
        print(f"{target:40s} {seconds:6.2f} s  {row['gb_per_s']:.2f} GB/s  peak {peak / 1e6:.0f} MB "
              f"(bound {row['bound_bytes'] / 1e6:.0f})  {out.stat().st_size / size:.3f}x")  # fmt: skip
    print(json.dumps({"bytes": size, "cp_gb_per_s": size / copy / 1e9, "rows": rows}))
    if options.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
