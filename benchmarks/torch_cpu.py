"""bfloat16 products on a CPU beside torch's dense ones: python benchmarks/torch_cpu.py [--seconds 150] [--seed N]

Layers of real models in every format, in torch's layout, with numbers of columns drawn from 17 to 2048. Medians: the
kernel that the dispatcher chooses, the one that it would choose without ``cpu.expand_then_torch``, and
``torch.nn.functional.linear`` with the same weight. They take turns, in an order drawn anew each round. Before each
call the cores rest, because threads of OpenMP look for work for a while after a product, the same call runs once, and
caches are overwritten. Results are compared with float64 first.

Without ``--seed`` one is drawn and printed, so that the shapes are on nobody's list.
"""

from __future__ import annotations

import argparse
import functools
import random
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch

import spformat as sf
from spformat.arrays.torch_tensors import array_to_torch
from spformat.dispatch import select
from spformat.dispatch.api import problem_of
from spformat.measure import bench, calibration_cases
from spformat.products.problem import COL

BINS = ((17, 64), (65, 256), (257, 2048))
FORMATS = ("two-four", "vector-nm", "bsr", "bitmask", "csr", "sr-bcrs", "ell-buckets")
BY_TORCH = "cpu.expand_then_torch"
ROUNDS, REST, LEAST, FLUSHED = 5, 0.02, 1 << 19, 64 << 20
"""Timed calls of each; seconds; elements of the smallest matrix; bytes that are overwritten before each call."""


def medians(calls: list[Callable[[], Any]]) -> list[float]:
    """Milliseconds of each, in turn."""
    flush = np.zeros(FLUSHED, np.uint8)
    times: list[list[float]] = [[] for _ in calls]
    pairs = list(zip(calls, times, strict=True))
    for _ in range(ROUNDS):
        random.shuffle(pairs)
        for call, taken in pairs:
            time.sleep(REST)
            call()
            flush += 1
            start = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def checked(name: str, got: Any, wanted: Any) -> None:
    """SystemExit for a result that is not that of float64, up to the rounding of sums and of bfloat16."""
    error = np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max()
    if not error < 2**-7:
        raise SystemExit(f"{name}: the product is wrong by {error:.1e} of the largest value")


def products(seed: int, seconds: float) -> Iterator[tuple[str, int, float, float, str]]:
    """(format, N, times as fast as torch: now, without the kernel; the kernel) for each product."""
    end = time.monotonic() + seconds
    for spec in calibration_cases.draw(seed, "cpu", 2, FORMATS, BINS):
        if time.monotonic() > end:
            return
        if spec.dtype != "bfloat16" or spec.M * spec.K < LEAST:
            continue
        a = calibration_cases.build(spec, np, seed)
        W = a.to_dense()
        for n, *_ in spec.widths:
            B = calibration_cases.operand(np, spec.K, n, COL, spec.dtype)
            C = np.empty((spec.M, n), B.dtype, order="F")
            p = problem_of(a, n, b_layout=COL, out_layout=COL)
            chosen, before = select.choose(p).name, select.choose(p, without=BY_TORCH).name
            wanted, calls = W.astype(np.float64) @ B.astype(np.float64), []
            for kernel in (chosen, before):
                plan = sf.plan(a, B=B, out=C, backend=kernel)
                bench.spoil(C)
                checked(f"{spec} N={n} {kernel}", plan(B, out=C), wanted)
                calls.append(functools.partial(plan, B, out=C))
            dense = functools.partial(torch.nn.functional.linear, array_to_torch(B.T), array_to_torch(W))
            now, without, by_torch = medians([*calls, dense])
            yield spec.format, n, by_torch / now, by_torch / without, chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="draws shapes and values; without it a fresh one")
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    groups: dict[tuple[str, tuple[int, int]], list[tuple[float, float, str]]] = defaultdict(list)
    with torch.no_grad():
        for name, n, now, before, kernel in products(seed, options.seconds):
            columns = next(bins for bins in BINS if bins[0] <= n <= bins[1])
            groups[name, columns].append((now, before, kernel))
    total = sum(map(len, groups.values()))
    print(f"seed {seed}, {total} products, torch {torch.__version__}, {bench.environment(np.zeros(1))}")
    print("\nTimes as fast as torch's dense product, geometric mean / worst\n")
    print("| format | N | products | by torch | now | without |\n|---|---|---|---|---|---|")
    for (name, (low, high)), some in sorted(groups.items()):
        cells = [f"{geometric_mean(x):.2f} / {min(x):.2f}" for x in ([s[i] for s in some] for i in (0, 1))]
        count = sum(kernel == BY_TORCH for *_, kernel in some)
        print(f"| {name} | {low}-{high} | {len(some)} | {count} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
