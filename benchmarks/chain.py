"""Products between other kernels, as a decoding step runs them: python benchmarks/chain.py [--json FILE]

Square layers with weights of their own, more bytes in all than L2 holds, one after another in a CUDA graph. Before
each product a small kernel scales the tokens. bfloat16, cuBLAS on the same weights beside, in turn.

*chain*: microseconds of one layer in the graph. *row*: the same without the small kernel, product after product of the
same tokens. *call*: one product alone between two events, cold L2. *host*: microseconds of the host for one call of a
plan with operands that it has seen. Every replay of ours has to give the same bits.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cupy

import spformat as sf
from spformat.formats.dense import Dense
from spformat.measure import bench, calibration_cases
from spformat.measure.calibration_cases import Spec

KINDS: tuple[tuple[str, float, dict[str, Any]], ...] = (
    ("two-four", 0.5, {}), ("bitmask", 0.5, {}), ("bitmask", 0.3, {}),
    ("vector-nm", 0.5, {"n": 16, "m": 32, "vector_length": 128}), ("bsr", 0.2, {"blocksize": (64, 64)}),
    ("bsr", 0.2, {"blocksize": (32, 32)}),
)  # fmt: skip
"""Format, density, parameters."""
BYTES = 200e6
"""Least bytes of all weights of a chain."""
MEASURED = ("chain", "row", "call", "host")
ROUNDS, REPLAYS = 15, 5
SCALED = cupy.ElementwiseKernel(
    "uint16 a, float32 s", "uint16 b",
    "unsigned x = __float_as_uint(__uint_as_float(unsigned(a) << 16) * s); b = (x + 0x7fff + (x >> 16 & 1)) >> 16",
    "scaled",
)  # fmt: skip
"""bfloat16 times a number, rounded to nearest."""


def cases(side: int, columns: list[int], formats: list[str], layout: str) -> Iterator[tuple[Spec, int]]:
    """(matrix, N)."""
    for name, density, params in KINDS:
        if formats and name not in formats:
            continue
        for n in columns:
            together = params.get("blocksize", (1, 1))
            widths = ((n, layout, layout),)
            yield Spec(name, "bfloat16", side, side, density, together, tuple(params.items()), widths), n


def bits_of(x: Any) -> Any:
    """The same memory as 16-bit integers, in its order."""
    return (x if x.flags.c_contiguous else x.T).view("uint16")


def graph_of(products: list[Callable[[], Any]], x: Any, y: Any, scale: float) -> Any:
    """A CUDA graph in which each product takes the result of the one before, scaled; scale 0: all take the same x."""
    stream = cupy.cuda.Stream(non_blocking=True)
    before, after = bits_of(y), bits_of(x)
    with stream:
        SCALED(before, scale, after)  # compiles
        for product in products:
            product()
        stream.synchronize()
        stream.begin_capture()
        for product in products:
            if scale:
                SCALED(before, scale, after)
            product()
        return stream.end_capture()


def replayed(ways: dict[str, list[Callable[[], Any]]], start: Any, x: Any, y: Any, scale: float) -> dict[str, float]:
    """Microseconds of one layer, by way; graphs take turns."""
    graphs = {way: graph_of(products, x, y, scale) for way, products in ways.items()}
    stream, order, bits = cupy.cuda.Stream(non_blocking=True), list(graphs), dict[str, Any]()
    times = defaultdict[str, list[float]](list)
    cupy.cuda.Device().synchronize()
    for _ in range(ROUNDS):
        random.shuffle(order)
        for way in order:
            with stream:
                x[...], y[...] = start, start
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record()
                for _ in range(REPLAYS):
                    graphs[way].launch()
                end.record()
                end.synchronize()
                result = bits_of(y)
                assert way == "dense" or bool((bits.setdefault(way, result.copy()) == result).all()), "replays differ"
            times[way].append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / REPLAYS / len(ways[way]))
    return {way: statistics.median(times[way]) for way in ways}


def measure(spec: Spec, n: int, seed: int) -> dict[str, Any]:
    """One row: microseconds by way."""
    layout = spec.widths[0][1]
    first = calibration_cases.build(spec, cupy, seed)
    number = max(4, round(BYTES / first.nbytes))
    weights = [first.with_arrays(**{k: v.copy() for k, v in first.all_arrays().items()}) for _ in range(number)]
    x = calibration_cases.operand(cupy, spec.K, n, layout, spec.dtype)
    y = cupy.empty_like(x)
    dense = [Dense.from_dense(first.to_dense()) for _ in range(max(4, round(BYTES / (2 * spec.M * spec.K))))]
    scale = (1 / (spec.density * spec.K)) ** 0.5
    plans = {"ours": [sf.plan(a, B=x, out=y) for a in weights],
             "dense": [sf.plan(w, B=x, out=y, backend="vendor") for w in dense]}  # fmt: skip
    ways = {way: [functools.partial(plan, x, out=y) for plan in each] for way, each in plans.items()}
    start = calibration_cases.operand(cupy, spec.K, n, layout, spec.dtype)
    row: dict[str, Any] = {"matrix": str(spec), "density": spec.density, "params": dict(spec.params), "N": n}
    row |= {
        "kernel": plans["ours"][0].kernel,
        "chain": replayed(ways, start, x, y, scale),
        "row": replayed(ways, start, x, y, 0),
    }
    clock = bench._DeviceClock(x)
    runs = [products[0] for products in ways.values()]
    calls = clock.take_turns(runs, 30, 4, cold=True, seconds=0.2)
    row |= {"call": dict(zip(ways, calls, strict=True)), "host": dict(zip(ways, clock.host_times(runs), strict=True))}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="4096", help="rows and columns of the layers, comma-separated")
    parser.add_argument("--columns", default="1,5,16,64,256", help="numbers of tokens, comma-separated")
    parser.add_argument("--formats", default="", help="formats, comma-separated; without it, all")
    parser.add_argument("--layout", choices=("col", "row"), default="col", help="of B and C; col is torch's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    environment, began = bench.environment(cupy.zeros(1)), time.monotonic()
    print(f"{environment['device']}, {environment['date']}\n")
    columns = " | ".join(f"{what}: ours | dense" for what in MEASURED)
    print(f"| matrix | density | N | kernel | {columns} |\n|" + "---|" * (4 + 2 * len(MEASURED)))
    rows = []
    for side in map(int, a.sides.split(",")):
        for spec, n in cases(
            side, [int(n) for n in a.columns.split(",")], [f for f in a.formats.split(",") if f], a.layout
        ):
            row = measure(spec, n, a.seed)
            rows.append(row)
            cells = " | ".join(f"{t:.2f}" for what in MEASURED for t in row[what].values())
            print(f"| {spec} | {spec.density} | {n} | `{row['kernel']}` | {cells} |", flush=True)
    if rows:
        for what in MEASURED:
            times = [row[what]["dense"] / row[what]["ours"] for row in rows]
            print(f"{what}: {statistics.geometric_mean(times):.3f} times as fast as dense, worst {min(times):.3f}")
    print(f"{time.monotonic() - began:.0f} s")
    if a.json:
        a.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
