"""How good the first recommendation is: python benchmarks/recommend.py

``sf.recommend`` ranks formats from counts alone. Here all that it ranks for a matrix, dense among them, and sums of
formats beside them, are converted and measured, and the first is compared with the fastest. The matrices: layers of
real models with zeros in several patterns, random graphs, and the matrices in ``fixtures/matrices``, in turn.
``--device cpu`` measures on this host.

regret      how much longer the first recommendation takes than the fastest format that was measured, in percent
tuned       the same for the choice of ``sf.tune`` in ``--budget`` seconds, on every fifth matrix
held back   a third of the matrices, by a hash of their names. Nothing that chooses may be fitted to them.

Cold caches, contenders in turn, medians; every result is checked against a float64 product first.

It ends within ``--seconds``, imports, matrices and compilation included. Each product is printed, and written to
``--json``, when it was measured: a run that is cut off leaves those.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import secrets
import signal
import sys
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.measure import bench, calibration_cases
from spformat.measure.layers import LAYERS
from spformat.measure.tune import device_name, tune
from spformat.preprocess.structure import Structure, analyse

SUMS = ("bsr:blocksize=32x32,density>=0.5+csr", "two-four+csr", "vector-nm:n=8,m=32,vector_length=32+csr")
PATTERNS = ("50 % anywhere", "70 % anywhere", "90 % anywhere", "97 % anywhere", "2:4", "8:32 of 32", "blocks of 32",
            "blocks of 64", "blocks and scatter", "2:4 and outliers", "vectors of 8")  # fmt: skip
MOST_BYTES = 64 << 20
"""Bytes of the largest dense matrix: all formats of one are in memory at the same time."""
ENDING = 4.0
"""Seconds before the end when measuring stops: for the tables, and for compilers that still run."""


class TimeIsUp(BaseException):
    """Raised wherever the program is; no failed product, so that nobody who expects those catches it."""


@contextlib.contextmanager
def until(end: float) -> Iterator[None]:
    """The block, which is left at ``end``, a time of ``time.monotonic()``."""

    def leave(*_: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, leave)
    # Again after a second: Python drops what is raised while an object is freed.
    signal.setitimer(signal.ITIMER_REAL, max(1e-3, end - time.monotonic()), 1.0)
    try:
        yield
    except TimeIsUp:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def layer(rng: np.random.Generator, M: int, K: int, pattern: str, dtype: str) -> Any:
    """A matrix [M, K] with zeros in the pattern."""
    x = rng.integers(1, 100, (M, K), np.int16).astype(np.float32).astype(VALUE_TYPES[dtype].numpy)

    def blocks(rows: int, cols: int, density: float) -> Any:
        keep = rng.random((-(-M // rows), -(-K // cols)), np.float32) < density
        return np.repeat(np.repeat(keep, rows, axis=0), cols, axis=1)[:M, :K]

    def some(n: int, m: int, rows: int) -> Any:
        order = rng.random((-(-M // rows), -(-K // m), m), np.float32).argsort(axis=2) < n
        return np.repeat(order.reshape(len(order), -1), rows, axis=0)[:M, :K]

    patterns: dict[str, Callable[[], Any]] = {
        "2:4": lambda: some(2, 4, 1),
        "8:32 of 32": lambda: some(8, 32, 32),
        "blocks of 32": lambda: blocks(32, 32, 0.1),
        "blocks of 64": lambda: blocks(64, 64, 0.2),
        "blocks and scatter": lambda: blocks(32, 32, 0.08) | blocks(1, 1, 0.02),
        "2:4 and outliers": lambda: some(2, 4, 1) | blocks(1, 1, 0.01),
        "vectors of 8": lambda: blocks(8, 1, 0.1),
    }
    keep = patterns[pattern]() if pattern in patterns else blocks(1, 1, 1 - float(pattern.split()[0]) / 100)
    return np.where(keep, x, x.dtype.type(0))


def graph(rng: np.random.Generator, nodes: int, kind: str) -> Any:
    """The adjacency of a random graph as CSR, float32: degrees of a power law, or dense communities among them."""
    degrees = np.minimum(nodes // 4, (4 / (1 - rng.random(nodes)) ** 0.7).astype(np.int64))
    rows = np.repeat(np.arange(nodes), degrees)
    cols = (nodes * rng.random(rows.size) ** (2.5 if kind == "power law" else 1)).astype(np.int64)
    if kind == "communities":
        near = rng.random(rows.size) < 0.7
        cols[near] = rows[near] // 64 * 64 + rng.integers(0, 64, int(near.sum()))
    x = scipy.sparse.csr_matrix((np.ones(rows.size, np.float32), (rows, np.minimum(cols, nodes - 1))), (nodes, nodes))
    x.sum_duplicates()
    return sf.from_scipy(x)


class Drawn(NamedTuple):
    """A matrix, and what is counted of a dense one."""

    name: str
    x: Any
    counts: Structure | None


def files(data: Path) -> Iterator[Callable[[], Drawn]]:
    """The matrices in a folder, as CSR."""
    for path in sorted(data.glob("*")) if data.is_dir() else ():
        if path.suffix in (".npz", ".mtx", ".smtx"):
            for name in (opened := sf.open(path)):
                dtype = np.float16 if "dlmc" in path.name else np.float32
                yield lambda x=opened[name], dtype=dtype, stem=path.stem: Drawn(
                    stem, sf.convert(x, "csr").astype(dtype), None
                )


def layers(seed: int) -> Iterator[Callable[[], Drawn]]:
    """Layers of real models without end, a pattern after the other."""
    shapes = [s for s in LAYERS if 2 * s[0] * s[1] <= MOST_BYTES]
    for i in itertools.count():
        rng, pattern = np.random.default_rng([seed, 0, i]), PATTERNS[i % len(PATTERNS)]
        (M, K), dtype = (
            shapes[rng.integers(len(shapes))],
            ("bfloat16", "float16", "float32")[rng.choice(3, p=(0.5, 0.2, 0.3))],
        )

        def build(rng: Any = rng, M: int = M, K: int = K, pattern: str = pattern, dtype: str = dtype) -> Drawn:
            x = layer(rng, M, K, pattern, dtype)
            return Drawn(f"layer {M}x{K} {pattern} {dtype}", x, analyse(x))

        yield build


def graphs(seed: int) -> Iterator[Callable[[], Drawn]]:
    """Random graphs without end, the kinds in turn."""
    for i in itertools.count():
        rng, kind = np.random.default_rng([seed, 1, i]), ("power law", "communities")[i % 2]
        nodes = int(rng.integers(2000, 40000))
        yield lambda rng=rng, kind=kind, nodes=nodes: Drawn(f"graph {kind} {nodes}", graph(rng, nodes, kind), None)


def matrices(seed: int, data: Path, ahead: int = 4) -> Iterator[Drawn]:
    """Matrices of all kinds in turn, so that any number of them has some of each: a file, two layers, a graph, as long
    as there are files. ``ahead`` of them are built by other threads while those before are measured."""
    kinds = {"files": files(data), "layers": layers(seed), "graphs": graphs(seed)}
    waiting: deque[Any] = deque()
    with ThreadPoolExecutor(ahead) as pool, contextlib.ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # where the caller has enough
        for kind in itertools.cycle(("files", "layers", "graphs", "layers")):
            build = next(kinds[kind], None)
            if build is not None:
                waiting.append(pool.submit(build))
            if len(waiting) > ahead:
                yield waiting.popleft().result()


def held_back(name: str) -> bool:
    """Whether the matrix belongs to the third that nothing may be fitted to."""
    return zlib.crc32(name.encode()) % 3 == 0


def converted(a: Any, formats: Iterator[str]) -> dict[str, Any]:
    """Format text -> the matrix in it, without the formats that refuse it."""
    out = {}
    for text in formats:
        try:
            out[text] = sf.convert(a, text)
        except sf.errors.SpformatError as e:
            print(f"  {text}: {e.message.splitlines()[0][:120]}", flush=True)
    return out


def measured(forms: dict[str, Any], n: int, device: str, ahead: Any) -> dict[str, float]:
    """Format text -> microseconds of the product with n columns; only those whose result is right."""
    first = next(iter(forms.values()))
    xp = np if device == "cpu" else __import__("cupy")
    B = calibration_cases.operand(xp, first.shape[1], n, "row", first.dtype.name)
    if ahead is not None:
        ahead.compile_for([functools.partial(product, a, B) for a in forms.values()])
    runs = []
    for text, a in forms.items():
        try:
            plan, C = sf.plan(a, B=B), xp.empty((a.shape[0], n), B.dtype)
            runs.append(bench.Contender(text, functools.partial(plan, B, out=C)))
        except sf.errors.SpformatError as e:
            print(f"  {text}, {n} columns: {e.message.splitlines()[0][:120]}", flush=True)
    case = bench.Case("", first, B, tuple(runs), first.dtype.name, {"nnz": first.nnz})
    results = bench.compare(case, repeats=9, warmups=4, seconds=0.15, hot=False)
    return {r.name: r.cold_us for r in results if r.error <= 1 and r.cold_us == r.cold_us}


def product(a: Any, B: Any) -> Any:
    """A product in new memory, by a new plan."""
    return sf.plan(a, B=B)(B)


def measure(
    seed: int, end: float, device: str, board: str, budget: float, data: Path, ahead: Any
) -> Iterator[dict[str, Any]]:
    """A row for each matrix and number of columns, without end. end: when the time is up."""
    rng = np.random.default_rng(seed)
    for i, (name, x, counts) in enumerate(matrices(seed, data)):
        widths = sorted({round(1 + 15 * rng.random()), round(16 * 128 ** rng.random())})
        a = x if device == "cpu" else on_device(x, device)
        forms: dict[str, Any] = {}
        for n in widths:
            ranked = sf.recommend(counts or x, n, device=board)
            forms |= converted(a, (t for t in (*(r.format for r in ranked), *SUMS) if t not in forms))
            us = measured(forms, n, device, ahead)
            first = ranked[0].format
            if first not in us or len(us) < 2:
                print(f"  {name}, {n} columns: {first} was not measured", flush=True)
                continue
            row = {"name": name, "n": n, "first": first, "us": us, "held_back": held_back(name),
                   "expected": {r.format: r.total_us for r in ranked},
                   "kernels": {r.format: r.kernels[n] for r in ranked}}  # fmt: skip
            if i % 5 == 2 and time.monotonic() + budget < end:
                best = tune(x, n, seconds=budget, device=device, fresh=True)
                row |= {"tuned": best.format, "tuned_seconds": best.seconds}
            yield row


def on_device(x: Any, device: str) -> Any:
    """The matrix on the device."""
    return sf.Dense.from_dense(x).to(device).to_dense() if isinstance(x, np.ndarray) else x.to(device)


def regret(row: dict[str, Any], key: str = "first") -> float:
    """Time of the choice over that of the fastest."""
    return float(row["us"][row[key]] / min(row["us"].values()))


def line(row: dict[str, Any]) -> str:
    """A row in one line."""
    first, best = row["first"], min(row["us"], key=row["us"].__getitem__)

    def expected(text: str) -> str:
        if text not in row["expected"]:
            return "not ranked"  # a sum that recommend did not consider
        us = row["expected"][text]
        return "no time expected" if us is None else f"expected {us:.1f}"

    times = (f"{t} {row['us'][t]:.1f} us ({expected(t)})" for t in (first, best))
    return f"{100 * (regret(row) - 1):.0f} %  {row['name']}, {row['n']} columns: {', fastest '.join(times)}"


def described(rows: list[dict[str, Any]], key: str = "first") -> str:
    """Geometric mean and worst of the regret, share within 5 %."""
    r = [regret(row, key) for row in rows if row.get(key) in row["us"]]
    if not r:
        return "nothing was measured"
    mean, worst, within = geometric_mean(r), max(r), sum(x <= 1.05 for x in r) / len(r)
    return f"{100 * (mean - 1):.1f} % mean, {100 * (worst - 1):.0f} % worst, {100 * within:.0f} % within 5 % ({len(r)})"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The tables."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        words = row["name"].split(" ", 2)
        groups[f"layer, {words[2]}" if words[0] == "layer" else words[0] if words[0] == "graph" else "files"].append(
            row
        )
    yield "| matrices | regret of the first recommendation |"
    yield "|---|---|"
    yield f"| all | {described(rows)} |"
    yield f"| held back | {described([r for r in rows if r['held_back']])} |"
    yield f"| not held back | {described([r for r in rows if not r['held_back']])} |"
    for kind in ("files", "layer", "graph"):
        some = [r for name, group in groups.items() if name.startswith(kind) for r in group]
        count = len({r["name"] for r in some})
        yield f"| {count} {kind.removesuffix('s')}{'s' * (count != 1)} | {described(some)} |"
    for lo, hi in ((1, 16), (17, 128), (129, 1 << 30)):
        some = [row for row in rows if lo <= row["n"] <= hi]
        yield f"| {lo} to {hi if hi < 1 << 30 else '..'} columns | {described(some)} |"
    for name, some in sorted(groups.items()):
        if name == "files":
            continue
        yield f"| {name} | {described(some)} |"
    took = [r["tuned_seconds"] for r in rows if "tuned" in r]
    if took:
        yield f"\ntuned: {described(rows, 'tuned')}; seconds: {np.median(took):.1f} median, {max(took):.1f} most"
    yield "\nThe worst:"
    for row in sorted(rows, key=regret, reverse=True)[:15]:
        yield f"  {line(row)}"


def write(path: Path, result: dict[str, Any]) -> None:
    """The result as JSON: all of it or, where the program is stopped, what was there."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(result) + "\n")
    part.replace(path)


def main() -> None:
    started = time.monotonic() - time.process_time()  # imports took about as long as they kept the processor busy
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="draws shapes and values; without it a fresh one")
    parser.add_argument("--seconds", type=float, default=240, help="of the whole run")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds that sf.tune is given for a matrix")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--board", default="", help="device whose times are expected; default: the one at hand")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent / "fixtures" / "matrices")
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if o.seed is None else o.seed
    like = None if o.device == "cpu" else __import__("cupy").zeros(1)
    board = o.board or ("cpu" if like is None else "H100" if "H100" in device_name(like) else "H200")
    about, end = bench.environment(np.zeros(1) if like is None else like), started + o.seconds - ENDING
    result: dict[str, Any] = {"seed": seed, "environment": about, "rows": (rows := [])}
    print(f"seed {seed}, times expected for {board}, {about}\n", flush=True)
    with contextlib.ExitStack() as stack:
        ahead = None
        if like is not None:
            from spformat.backends.cuda.runtime.compile_ahead import CompileAhead

            ahead = stack.enter_context(CompileAhead())
        with until(end):
            for row in measure(seed, end, o.device, board, o.budget, o.data, ahead):
                rows.append(row)
                print(line(row), flush=True)
                if o.json:
                    write(o.json, result)
    if o.json:
        write(o.json, result)
    print(f"\n{len(rows)} products in {time.monotonic() - started:.0f} s\n")
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads may still build matrices, which nobody would measure
