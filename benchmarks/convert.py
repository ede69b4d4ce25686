"""Conversion of generated checkpoints, end to end: python benchmarks/convert.py [--gb 0.1 1 8] [--cores 1 2]
[--device cuda]

Writes safetensors files of bf16 weights 4096 x 11008 (2:4 in vectors of 32, so that every target takes them exactly),
one shard a gigabyte, converts them with the command line in a process of its own, and prints GB/s of dense bytes and
peak memory beside a plain `cp` of the same files. Generating leaves dirty pages, and converting does too: before a run
is timed, all files are flushed and the machine is left alone for a second. Other processes are not stopped; the column
"others" says how many cores they used meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import spformat as sf

ROWS, COLS = 4096, 11008
TARGETS = ("two-four", "bitmask", "csr", "vector-nm:n=2,m=4,vector_length=32")
BOUND = 2 * 2 * ROWS * COLS + 300 * 10**6
"""Twice the largest tensor and 300 MB."""
SHARD = 10**9


def generate(folder: Path, gigabytes: float) -> int:
    """Weights of one shape with different values, in shards of about 1 GB; their bytes."""
    rng = np.random.default_rng(0)
    count = max(1, round(gigabytes * 1e9 / (2 * ROWS * COLS)))
    keep = rng.random((ROWS // 32, COLS // 4, 4), np.float32).argsort(axis=2) < 2
    keep = np.repeat(keep.reshape(ROWS // 32, COLS), 32, axis=0)
    bits = rng.integers(0x3C00, 0x4000, (ROWS, COLS), np.uint16) * keep
    folder.mkdir()
    shards = -(-count * 2 * ROWS * COLS // SHARD)
    places: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        tensors = {}
        for i in range(shard * count // shards, (shard + 1) * count // shards):
            rolled = np.roll(bits, 32 * i, axis=0)
            tensors[f"model.layers.{i}.mlp.down_proj.weight"] = rolled.view(
                sf.arrays.dtypes.VALUE_TYPES["bfloat16"].numpy
            )
        sf.save_dense(folder / name, tensors)
        places |= dict.fromkeys(tensors, name)
    if shards > 1:
        index = {"metadata": {"total_size": 2 * ROWS * COLS * count}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size_of(folder)


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    return sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size


def peak_of(text: str) -> int:
    """Peak resident bytes a child wrote of itself: VmHWM, since ru_maxrss would count its parent before the exec."""
    return int(text.rsplit("VmHWM:", 1)[1].split()[0]) * 1024


CLI = "import runpy, sys; sys.argv[0] = 'spformat'\n"
"""The start of a program that runs the command."""
RUN = "runpy.run_module('spformat')"
"""The command, installed or in a checkout whose root is the working folder."""
COMMAND = CLI + (
    f"try: {RUN}\nexcept SystemExit as e: code = e.code\n"
    "print(open('/proc/self/status').read(), file=sys.stderr); sys.exit(code)"
)
LIBRARY = (
    "import sys, time\nfrom spformat.checkpoint import convert_checkpoint\n"
    "_, source, out, target, device = sys.argv\nfor i in range(7):\n    start = time.perf_counter()\n"
    "    convert_checkpoint(source, out, target, force=True, device=device)\n"
    "    print(time.perf_counter() - start)"
)
"""The first of the seven loads the compiled code and is not counted."""


def remove(path: Path) -> None:
    """A file or folder, which need not be there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def settle() -> None:
    """Nothing left to write back, and a second for the device."""
    os.sync()
    time.sleep(1)


def run(code: str, *arguments: object, cores: int) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter on ``cores`` cores; its failure ends the benchmark with what it printed."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done


@dataclass
class Times:
    """Wall seconds of each run, and the cores that everything else on the machine used meanwhile."""

    seconds: list[float]
    others: float

    @contextmanager
    def timed(self) -> Iterator[None]:
        busy, own, start = _busy(), _own(), time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - start)
        self.others += max(0.0, _busy() - busy - (_own() - own)) / self.seconds[-1]

    def rate(self, size: int) -> str:
        """Slowest .. fastest, median, in GB/s."""
        rates = sorted(size / s / 1e9 for s in self.seconds)
        return f"{rates[0]:.2f} .. {rates[-1]:.2f}, median {statistics.median(rates):.2f}"


def _busy() -> float:
    """Seconds all cores have worked since the machine started."""
    fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def repeated(work: Callable[[], object], out: Path, repeats: int) -> Times:
    """``work`` timed, each time from a settled machine and without ``out``."""
    times = Times([], 0.0)
    for _ in range(repeats):
        remove(out)
        settle()
        with times.timed():
            work()
    times.others /= repeats
    return times


def copy(source: Path, out: Path) -> None:
    """cp, and what it wrote on the device: that is what a conversion promises."""
    subprocess.run(["cp", "-r", source, out], check=True)
    os.sync()


def main() -> None:
    """A line for each size, number of cores and target, and a JSON document last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0])
    parser.add_argument("--cores", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--device", default="cpu", help="where matrices are converted: cpu, cuda or cuda:<id>")
    parser.add_argument(
        "--workers", type=int, default=0, help="shards side by side: --executor threads; on one GPU, too"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="six conversions in one process too, the first not counted")
    parser.add_argument("--back", action="store_true", help="convert back to dense too, and compare every tensor")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []

    def report(size: int, cores: int, what: str, times: Times, peak: int = 0) -> None:
        rows.append({"bytes": size, "cores": cores, "what": what, "peak_bytes": peak, **asdict(times)})
        memory = f"  peak {peak / 1e6:.0f} MB" if peak else ""
        print(f"{size / 1e9:5.2f} GB  {cores} core(s)  {what:42s} {times.rate(size)} GB/s{memory}"
              f"  others {times.others:.1f}", flush=True)  # fmt: skip

    print(f"memory bound {BOUND / 1e6:.0f} MB")
    with tempfile.TemporaryDirectory() as name:
        for gigabytes in options.gb:
            folder, out, back = Path(name) / "dense", Path(name) / "out", Path(name) / "back"
            size = generate(folder, gigabytes)
            files = list(folder.iterdir())
            source = files[0] if len(files) == 1 else folder
            if source.is_file():
                out, back = (p.with_suffix(".safetensors") for p in (out, back))
            report(size, 1, "cp, sync", repeated(lambda s=source, o=out: copy(s, o), out, options.repeats))
            for cores in options.cores:
                for target in options.targets:
                    peaks = []

                    def command(s: Path, o: Path, t: str, n: int = cores, peaks: list[int] = peaks) -> None:
                        options_of = ["--to", t, "--device", options.device, "--json"]
                        if options.workers:
                            options_of += ["--executor", "threads", "--workers", str(options.workers)]
                        peaks.append(peak_of(run(COMMAND, "convert", s, o, *options_of, cores=n).stderr))

                    times = repeated(lambda s=source, o=out, t=target: command(s, o, t), out, options.repeats)
                    report(size, cores, f"{target}, command", times, max(peaks))
                    if options.back:
                        peaks.clear()
                        times = repeated(lambda s=out, o=back: command(s, o, "dense"), back, options.repeats)
                        report(size, cores, f"{target} to dense, command", times, max(peaks))
                        compare(folder, back)
                    if options.warm:
                        settle()
                        done = run(LIBRARY, source, out, target, options.device, cores=cores).stdout.split()
                        report(size, cores, f"{target}, warm", Times([float(t) for t in done[1:]], 0.0))
            for path in (folder, out, back):
                remove(path)
    print(json.dumps({"bound_bytes": BOUND, "rows": rows}))


def compare(dense: Path, back: Path) -> None:
    """Raise SystemExit unless every tensor came back with the same bytes."""
    paths = {}
    for path in [back] if back.is_file() else sorted(back.glob("*.safetensors")):
        with sf.safe_open(path) as f:
            paths |= dict.fromkeys(f, path)
    for path in sorted(dense.glob("*.safetensors")):
        with sf.safe_open(path) as f:
            for name in f:
                with sf.safe_open(paths.pop(name)) as g:
                    if not np.array_equal(f.array(name).view(np.uint16), g.array(name).view(np.uint16)):
                        raise SystemExit(f"{name} came back different")
    if paths:
        raise SystemExit(f"{len(paths)} tensors came back that were not there, first {min(paths)}")


if __name__ == "__main__":
    main()
