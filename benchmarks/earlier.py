"""Conversions and loads of this version against an earlier one: python benchmarks/earlier.py --earlier v0.1.0

The earlier package is taken from git (any commit of this repository) and imported under another name, so that both
versions run in one process: each call of one is followed by the same call of the other, on the same values. Neighbours
on the machine and clocks that change then slow both down alike. Prints the ratio of the medians (new over earlier:
below 1 this version is faster) by what was done, and the cases above ``--report``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
from converters import weights

import spformat
from spformat.measure import bench

ROOT, NAME = Path(__file__).parents[1], "spformat_earlier"
CASES = (
    ("two-four", "2:4", 0.5), ("bitmask", "2:4", 0.5), ("vector-nm:n=2,m=4,vector_length=32", "vectors", 0.5),
    ("bsr:blocksize=32x32", "blocks", 0.3), ("dbsr:blocksize=32x32", "blocks", 0.3),
    ("sr-bcrs", "unstructured", 0.1), ("ell-buckets", "unstructured", 0.1),
    ("csr", "unstructured", 0.5), ("csr", "unstructured", 0.1),
)  # fmt: skip
"""(format, structure of the values, density)"""
TENSORS = 4
"""A file has the matrix under so many names."""


def earlier_package(commit: str, folder: Path) -> Any:
    """The package of a commit, or of a folder that contains it, imported as ``spformat_earlier``."""
    if Path(commit, "spformat").is_dir():
        shutil.copytree(Path(commit, "spformat"), folder / "spformat")
    else:
        archive = subprocess.run(["git", "-C", ROOT, "archive", commit, "spformat"], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    package = (folder / "spformat").rename(folder / NAME)
    for path in package.rglob("*.py"):  # modules that are imported by a string
        path.write_text(re.sub(r"([\"'])spformat\.", rf"\1{NAME}.", path.read_text()))
    sys.path.insert(0, str(folder))
    return importlib.import_module(NAME)


def operations(sf: Any, x: Any, spec: str, path: Path, device: str) -> dict[str, Callable[[], Any]]:
    """What is measured of one version, for the dense matrix ``x`` on the device."""
    a = sf.convert(x, spec)
    csr, host = sf.convert(a, "csr"), a.to("cpu")
    tensors = {str(i): host for i in range(TENSORS)}
    save = functools.partial(sf.save, path, tensors, overwrite=True)
    save()
    between = {"to csr": lambda: sf.convert(a, "csr"), "from csr": lambda: sf.convert(csr, spec)}
    return {
        "from dense": lambda: sf.convert(x, spec), "to dense": a.to_dense, "validate": a.validate,
        **({} if spec == "csr" else between),
        "load": lambda: sf.load(path, **({} if device == "cpu" else {"device": device})),
        **({"save": save} if device == "cpu" else {}),
    }  # fmt: skip


def pair(old: Callable[[], Any], new: Callable[[], Any], seconds: float, wait: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds of both, which run in turn."""
    for call in (old, new, old, new):
        call()
    wait()
    gc.collect()
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < 6 or (time.perf_counter() < end and len(times[0]) < 2000):
        order = ((old, times[0]), (new, times[1]))
        for call, seen in order[:: 1 if len(times[0]) % 2 else -1]:
            start = time.perf_counter()
            result = call()
            wait()
            seen.append(1e3 * (time.perf_counter() - start))
            del result
    before, now = map(statistics.median, times)
    return {"ratio": now / before, "least": min(times[1]) / min(times[0]), "earlier_ms": before, "ms": now,
            "calls": len(times[0])}  # fmt: skip


def measure(earlier: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each case and operation."""
    wait: Callable[[], Any] = int
    if options.device != "cpu":
        import cupy

        wait = cupy.cuda.get_current_stream().synchronize
    for size in options.sizes:
        shape = tuple(map(int, size.split("x")))
        for spec, structure, density in CASES:
            values = weights(shape, structure, density, ml_dtypes.bfloat16)
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                x = [sf.Dense.from_dense(values).to(options.device).data for sf in (earlier, spformat)]
                both = [
                    operations(sf, own, spec, Path(folder, f"{sf.__name__}.safetensors"), options.device)
                    for sf, own in zip((earlier, spformat), x, strict=True)
                ]
                for what in both[0]:
                    row = pair(both[0][what], both[1][what], options.seconds, wait)
                    yield {"size": size, "format": spec, "density": density, "what": what} | row


def summary(rows: list[dict[str, Any]], report: float) -> Iterator[str]:
    """Geometric mean of the ratios by operation, and the cases above ``report``."""
    yield "| what | cases | geometric mean | worst | cases above 1.05 |\n|---|---|---|---|---|"
    for what in dict.fromkeys(row["what"] for row in rows):
        r = [row["ratio"] for row in rows if row["what"] == what]
        yield f"| {what} | {len(r)} | {statistics.geometric_mean(r):.3f} | {max(r):.3f} | {sum(x > 1.05 for x in r)} |"
    yield f"\nAbove {report}:"
    for row in sorted(rows, key=lambda row: -row["ratio"]):
        if row["ratio"] > report:
            yield (f"  {row['ratio']:.3f} (least {row['least']:.3f}) {row['size']} {row['format']} {row['density']}"
                   f" {row['what']}: {row['earlier_ms']:.3f} -> {row['ms']:.3f} ms, {row['calls']} calls")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--earlier", required=True, help="a commit, tag or branch, or a folder that contains spformat/")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", nargs="*", default=["256x256", "1024x1024", "4096x11008"])
    parser.add_argument("--seconds", type=float, default=0.4, help="for each case")
    parser.add_argument("--report", type=float, default=1.05)
    parser.add_argument("--folder", help="where the files to load lie; default: that of temporary files")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measure(earlier_package(options.earlier, Path(folder)), options))
    environment = bench.environment(None)
    print(f"against {options.earlier}, {options.device}, {environment}\n")
    print("\n".join(summary(rows, options.report)))
    if options.json:
        options.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
