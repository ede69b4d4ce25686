"""Host time of SparseLinear beside torch.nn.Linear, on a GPU: python benchmarks/torch_linear.py [--json FILE]

The time that a call takes on the host without waiting for the device (20 calls between two waits), in microseconds of
the wall clock, in eager mode under ``torch.no_grad``. The layers are small, so that the queue never fills. The ways:

again    ``layer(x)`` with the same x, whose result is freed before the next call: a decoding loop gets the same memory
new      ``layer(x)`` with memory of x and y that the layer has not seen before, at every call
operator ``torch.ops.spformat.linear``: what a compiled graph calls
graph    not a call: one replay of a CUDA graph of 20 calls, divided by 20

``linear`` is the call of ``spformat.linear`` on the same operands. All cases take turns, in an order drawn anew each
round: a machine that is slow for a second is slow for all of them. ``times_dense`` is the median over that of nn.Linear
with the same sizes and dtype, in the same run. Every product is compared with that of the dense weight first.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import torch

import spformat as sf
import spformat.torch as st
from spformat.measure import bench
from spformat.torch.weights import OPERANDS

CALLS, ROUNDS, OTHERS = 20, 25, OPERANDS + 6
SIZES = (1024, 1024)
FORMATS: dict[str, dict[str, Any]] = {
    "two-four": {},
    "vector-nm": {"n": 8, "m": 32, "vector_length": 32},
    "bsr": {"blocksize": (32, 32), "sparsity": 0.8},
    "bitmask": {"sparsity": 0.5},
    "csr": {"sparsity": 0.9},
}


class Case:
    """One layer, and the ways to call it."""

    def __init__(self, name: str, layer: Any, rows: int, with_bias: bool) -> None:
        self.name, self.rows, self.bias = name, rows, with_bias
        self.times: dict[str, list[float]] = defaultdict(list)
        self.layer, K = layer, layer.in_features
        self.x = torch.randint(-2, 3, (rows, K), device="cuda").to(torch.bfloat16)
        self.others = [self.x.clone() for _ in range(OTHERS)]
        self.outputs: list[Any] = []
        self.at = 0
        self.ways: dict[str, Callable[[], Any]] = {"again": lambda: layer(self.x), "new": self._new}
        if isinstance(layer, st.SparseLinear):
            tensors, text = layer._tensors(), layer.description.text
            self.ways["operator"] = lambda: torch.ops.spformat.linear(self.x, tensors, layer.bias, text, False)
            self.ways["linear"] = lambda: sf.linear(self.x, layer.matrix, layer.bias)
        self.check()
        self.graph = self._captured()

    def _new(self) -> None:
        """Another x than in the last calls, and a y that stays for as long as the x are not used up."""
        self.at = (self.at + 1) % OTHERS
        if not self.at:
            self.outputs.clear()
        self.outputs.append(self.layer(self.others[self.at]))

    def check(self) -> None:
        """SystemExit if the product is not that of the dense weight."""
        wanted = torch.nn.functional.linear(self.x.double(), self.layer.weight.double())
        wanted += 0 if self.layer.bias is None else self.layer.bias.double()
        error = (self.layer(self.x).double() - wanted).abs().max() / wanted.abs().max()
        if not error < 2**-7:
            raise SystemExit(f"{self.name}: the product is wrong by {float(error):.1e} of the largest value")

    def _captured(self) -> Any:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.layer(self.x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                self.layer(self.x)
        return graph

    def measure(self, way: str) -> None:
        """Add one measurement of a way to call."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        if way == "graph":
            self.graph.replay()
        else:
            run = self.ways[way]
            for _ in range(CALLS):
                run()
        self.times[way].append(1e6 * (time.perf_counter() - start) / CALLS)
        torch.cuda.synchronize()

    def row(self) -> dict[str, Any]:
        """Median and least microseconds of a call; the first measurement of each way is left out."""
        row: dict[str, Any] = {"case": self.name, "rows": self.rows, "bias": self.bias}
        for way, (_, *times) in self.times.items():
            row |= {way: statistics.median(times), f"{way}_least": min(times)}
        return row


def cases() -> list[Case]:
    """nn.Linear and every format, for one row and 16, with and without bias."""
    all_cases = []
    for with_bias in (False, True):
        dense = torch.nn.Linear(*SIZES, bias=with_bias, device="cuda", dtype=torch.bfloat16)
        torch.nn.init.uniform_(dense.weight, 0.5, 1.5)
        layers = {"nn.Linear": dense} | {
            fmt: st.SparseLinear.from_linear(dense, fmt, prune=True, **params) for fmt, params in FORMATS.items()
        }
        for rows in (1, 16):
            all_cases += [Case(name, layer, rows, with_bias) for name, layer in layers.items()]
    return all_cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    wanted = parser.parse_args()
    with torch.no_grad():
        tried = cases()
        order, rng = [(case, way) for case in tried for way in (*case.ways, "graph")], random.Random(0)
        for _ in range(wanted.rounds + 1):
            rng.shuffle(order)
            for case, way in order:
                case.measure(way)
    rows = [case.row() for case in tried]
    dense = {(r["rows"], r["bias"]): r for r in rows if r["case"] == "nn.Linear"}
    for r in rows:
        beside = dense[r["rows"], r["bias"]]
        r["times_dense"] = {way: r[way] / beside[way] for way in ("again", "new", "graph")}
    print("| case | rows | bias | again (least) | / nn.Linear | new | / nn.Linear | operator | linear | graph |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        cells = [r["case"], r["rows"], "yes" if r["bias"] else "no", f"{r['again']:.1f} ({r['again_least']:.1f})"]
        cells += [f"{r['times_dense']['again']:.2f}", f"{r['new']:.1f}", f"{r['times_dense']['new']:.2f}"]
        cells += [f"{r[way]:.1f}" if way in r else "" for way in ("operator", "linear", "graph")]
        print("|", " | ".join(map(str, cells)), "|")
    if wanted.json:
        environment = bench.environment(cupy.zeros(1))
        wanted.json.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
