"""Products between other kernels, as a decoding step runs them: python benchmarks/chain.py [--json FILE]

Square layers with weights of their own, more bytes in all than L2 holds, one after another in a CUDA graph. Before
each product a small kernel scales the tokens. Torch's layout of B and C (column-major), bfloat16. Measured in turn:

early  kernels that wait themselves may begin before the kernel before them is over (docs/decisions/0057)
after  every kernel begins when the one before it is over
dense  cuBLAS on the same weights

*chain*: microseconds of one layer in the graph. *row*: the same without the small kernel, product after product of the
same tokens. *call*: one product alone between two events, cold L2; an event lies between it and the kernel before, so
that nothing can begin early. *host*: microseconds of the host for one call of a plan with operands that it has seen.
Both ways of launching have to give the same bits.
"""

from __future__ import annotations

import argparse
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
from spformat.backends.cuda.runtime import launch
from spformat.formats.base import Format
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


def cases(side: int, columns: list[int], formats: list[str]) -> Iterator[tuple[Spec, int]]:
    """(matrix, N)."""
    for name, density, params in KINDS:
        if formats and name not in formats:
            continue
        for n in columns:
            together = params.get("blocksize", (1, 1))
            widths = ((n, "col", "col"),)
            yield Spec(name, "bfloat16", side, side, density, together, tuple(params.items()), widths), n


def plans(weights: list[Format], x: Any, y: Any, *, early: bool) -> list[Any]:
    """A plan for each weight whose launches are early, or follow one another."""
    usual = getattr(launch, "early_driver", None)  # versions before had early launches within a product only
    try:
        if not early:
            launch.early_driver = lambda: None  # type: ignore[attr-defined]
        prepared = [sf.plan(a, B=x, out=y) for a in weights]
        for plan in prepared:
            plan(x, out=y)
    finally:
        if usual:
            launch.early_driver = usual  # type: ignore[attr-defined]
    return prepared


def graph_of(products: list[Callable[[], Any]], x: Any, y: Any, scale: float) -> Any:
    """A CUDA graph in which each product takes the result of the one before, scaled; scale 0: all take the same x."""
    stream = cupy.cuda.Stream(non_blocking=True)
    before, after = y.T.view("uint16"), x.T.view("uint16")
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
                result = y.T.view("uint16")
                assert way == "dense" or bool((bits.setdefault(way, result.copy()) == result).all()), f"{way}: differs"
            times[way].append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / REPLAYS / len(ways[way]))
    assert bool((bits["early"] == bits["after"]).all()), "early launches give another result"
    return {way: statistics.median(times[way]) for way in ways}


def measure(spec: Spec, n: int, seed: int) -> dict[str, Any]:
    """One row: microseconds by way."""
    first = calibration_cases.build(spec, cupy, seed)
    number = max(4, round(BYTES / first.nbytes))
    weights = [first.with_arrays(**{k: v.copy() for k, v in first.all_arrays().items()}) for _ in range(number)]
    x = calibration_cases.operand(cupy, spec.K, n, "col", spec.dtype)
    y = cupy.empty_like(x)
    dense = [Dense.from_dense(first.to_dense()) for _ in range(max(4, round(BYTES / (2 * spec.M * spec.K))))]
    scale = (1 / (spec.density * spec.K)) ** 0.5
    ways: dict[str, list[Callable[[], Any]]] = {
        way: [lambda p=plan: p(x, out=y) for plan in plans(weights, x, y, early=way == "early")]
        for way in ("early", "after")
    }
    kernel = sf.plan(first, B=x, out=y).kernel
    products = [sf.plan(w, B=x, out=y, backend="vendor") for w in dense]
    ways["dense"] = [lambda p=plan: p(x, out=y) for plan in products]
    start = calibration_cases.operand(cupy, spec.K, n, "col", spec.dtype)
    row: dict[str, Any] = {"matrix": str(spec), "density": spec.density, "params": dict(spec.params), "N": n}
    row |= {"kernel": kernel, "chain": replayed(ways, start, x, y, scale), "row": replayed(ways, start, x, y, 0)}
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
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    environment, began = bench.environment(cupy.zeros(1)), time.monotonic()
    print(f"{environment['device']}, {environment['date']}\n")
    columns = " | ".join(f"{what}: early | after | dense" for what in MEASURED)
    print(f"| matrix | density | N | kernel | {columns} |\n|" + "---|" * (4 + 3 * len(MEASURED)))
    rows = []
    for side in map(int, a.sides.split(",")):
        for spec, n in cases(side, [int(n) for n in a.columns.split(",")], [f for f in a.formats.split(",") if f]):
            row = measure(spec, n, a.seed)
            rows.append(row)
            cells = " | ".join(f"{t:.2f}" for what in MEASURED for t in row[what].values())
            print(f"| {spec} | {spec.density} | {n} | `{row['kernel']}` | {cells} |", flush=True)
    if rows:
        for what in MEASURED:
            logs = [row[what]["after"] / row[what]["early"] for row in rows]
            print(f"{what}: early {statistics.geometric_mean(logs):.3f} times as fast as after, worst {min(logs):.3f}")
    print(f"{time.monotonic() - began:.0f} s")
    if a.json:
        a.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
