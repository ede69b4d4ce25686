"""2:4 in bf16 against cuBLAS and cuSPARSELt on one GPU: python benchmarks/two_four.py [--out DIR] [--repeats 30]

One run: large, middle and few tokens, side by side. Everything is launched from a CUDA graph, so that nothing waits for
its host code; our plan and CuPy's cuBLAS are called as well. Correct first, cold L2, random normals, contenders in
turns, medians. cuBLAS: the faster of CuPy's and torch's call. cuSPARSELt: its own search over all algorithms, the
faster of both layouts of B; through nvmath, or else torch. Writes two_four.json and two_four.md.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu

import spformat as sf
from spformat.backends.cuda.two_four.spmm_two_four import SpmmTwoFour
from spformat.backends.cuda.two_four.spmm_two_four_sm90 import SpmmTwoFourSm90
from spformat.backends.vendor import CusparseLt
from spformat.formats.base import Format
from spformat.measure import bench, contenders
from spformat.measure.bench import Contender
from spformat.products.operations import SPMM
from spformat.products.problem import COL

LARGE = ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192), (11008, 4096, 4096), (4096, 4096, 11008))
ROWS, DEPTH = (4096, 11008, 14336), 4096
TOKENS = (1, 8, 16, 32, 64, 128, 256)
TARGETS = {(4096, 4096): (1.15, 1.5), (8192, 8192): (1.15, 1.5)}
"""(times cuSPARSELt, times dense) by (M, K) of the large products; (1.10, none) for the others."""
LIBRARIES = ("cuBLAS", "cuSPARSELt")


def graphed(run: Callable[[], Any], times: int = 1) -> Callable[[], Any]:
    """``run``, captured once (``times`` in a row) and replayed: returns what the captured call returned."""
    import cupy as cp

    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        run()  # libraries allocate their workspaces at the first call of a stream
        stream.synchronize()
        stream.begin_capture()
        for _ in range(times):
            result = run()
        graph = stream.end_capture()

    def replay(kept: Any = run) -> Any:  # what the graph reads and writes must live as long as the graph
        graph.launch()
        return result

    return replay


def torch_graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    """The same for a torch call, whose streams and memory are torch's."""
    import torch

    from spformat.arrays.torch_tensors import torch_to_array

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        result = run()
    out = torch_to_array(result)

    def replay(kept: Any = run) -> Any:
        graph.replay()
        return out

    return replay


def cusparselt(a: Format, B: Any) -> list[Contender]:
    """cuSPARSELt with its fastest algorithm: B as it is, and column-major."""
    import cupy as cp

    rows = []
    for layout, b in (("row", B), (COL, cp.asfortranarray(B.view("u2")).view(B.dtype))):
        out = cp.empty((a.shape[0], B.shape[1]), B.dtype)
        lt_plan = CusparseLt(search=True).plan(a, SPMM.problem(a, b, out))
        run = graphed(lambda lt_plan=lt_plan, b=b, out=out: lt_plan(b, out))
        rows.append(Contender(f"cuSPARSELt {layout}", run, peer=True))
    return rows


def torch_peers(a: Format, B: Any, sparse: bool) -> list[Contender]:
    """torch's dense product, and with ``sparse`` its way to cuSPARSELt."""
    import torch

    from spformat.arrays.torch_tensors import array_to_torch

    x, b = array_to_torch(a.to_dense()), array_to_torch(B)
    rows = [Contender("cuBLAS torch", torch_graphed(lambda: torch.mm(x, b)), peer=True)]
    if sparse:
        packed = torch._cslt_compress(x)
        best = torch._cslt_sparse_mm_search(packed, b)
        run = torch_graphed(lambda: torch._cslt_sparse_mm(packed, b, alg_id=best))
        rows.append(Contender("cuSPARSELt torch", run, peer=True))
    return rows


def crowd(a: Format, B: Any, mma: bool) -> list[Contender]:
    """Our kernel, called and from a graph, cuBLAS and cuSPARSELt. A peer that fails is reported and left out."""
    import cupy as cp

    out = cp.empty((a.shape[0], B.shape[1]), B.dtype)
    plan = sf.plan(a, B=B, out=out)
    rows = [
        Contender(f"call {plan.kernel} {plan.tile}", lambda: plan(B, out)),
        Contender("graph", graphed(lambda: plan(B, out))),
    ]
    if mma:
        for kernel in (SpmmTwoFourSm90(), SpmmTwoFour()):
            other, sums = kernel.plan(a, SPMM.problem(a, B, out)), cp.empty_like(out)
            rows.append(Contender(f"mma.sp {other.kernel}", graphed(functools.partial(other, B, sums))))
    rows += [replace(c, name="cuBLAS cupy, called") for c in contenders.dense(a, B)]  # CuPy does not capture it
    whole = B.shape[1] % 8 == 0
    has_nvmath = importlib.util.find_spec("nvmath") is not None
    makers: list[Callable[[], list[Contender]]] = [lambda: torch_peers(a, B, whole and not has_nvmath)]
    if whole and has_nvmath:
        makers.append(lambda: cusparselt(a, B))
    for make in makers:
        try:
            rows += make()
        except (sf.errors.SpformatError, ImportError, AttributeError, RuntimeError, ValueError, TypeError) as e:
            print(f"left out: {type(e).__name__}: {str(e)[:300]}", flush=True)
    return rows


def measure(a: Format, M: int, N: int, K: int, repeats: int) -> tuple[dict[str, Any], list[bench.Result]]:
    """The row of one product, and every result."""
    B = contenders.operand(a, N)
    mma = (M, N, K) == (4096, 4096, 4096)
    case = bench.Case(f"{M}x{N}x{K}", a, B, tuple(crowd(a, B, mma)), a.dtype.name, {"nnz": a.nnz})
    results = bench.compare(case, repeats, seconds=0.4)
    timed = [r for r in results if r.cold_us == r.cold_us and r.error <= 1]
    for r in results:
        if r not in timed:
            print(f"{case.name} {r.name}: error {r.error} {r.note}", flush=True)
    called = next(r for r in timed if r.name.startswith("call"))
    row: dict[str, Any] = {
        "M": M, "N": N, "K": K, "kernel": called.name.removeprefix("call "), "call_us": called.cold_us,
        "host_us": called.host_us, "error": called.error,
        "us": next((r.cold_us for r in timed if r.name == "graph"), called.cold_us),
    }  # fmt: skip
    for library in LIBRARIES:
        times = {r.name: r.cold_us for r in timed if r.name.startswith(library)}
        if times:
            row[f"{library}_us"] = min(times.values())
            row[f"x_{library}"] = min(times.values()) / row["us"]
    for r in timed:
        if r.name.startswith("mma.sp"):
            row.setdefault("mma.sp", {})[r.name.removeprefix("mma.sp ")] = r.cold_us
    row["missed"] = missed(row)
    return row, results


def missed(row: dict[str, Any]) -> list[str]:
    """The targets that a row does not reach, in words."""
    M, N, K = row["M"], row["N"], row["K"]
    vendor, dense = row.get("x_cuSPARSELt"), row.get("x_cuBLAS", float("inf"))
    bounds: list[tuple[str, float, float | None]] = []
    if N >= 2048:
        first, second = TARGETS.get((M, K), (1.10, 0.0)) if M == N else (1.10, 0.0)
        bounds = [("cuSPARSELt", first, vendor), ("dense", second, dense)]
    elif N == 256:
        bounds = [("dense", 1.5, dense)]
    else:
        bounds = [("dense", 2.0 if N == 16 else 1.0, dense)]
    words = [f"{least:.2f}x {name}" for name, least, got in bounds if got is not None and got < least]
    if (M, N, K) == (4096, 16, 4096) and row["us"] > 9:
        words.append("9 us")
    return words + (["8 us of host"] if row["host_us"] > 8 else [])


def in_a_row(a: Format, N: int, times: int = 50) -> dict[str, float]:
    """Microseconds per product for ``times`` products in a row, hot: called one by one, and as one graph."""
    import cupy as cp

    B = contenders.operand(a, N)
    out = cp.empty((a.shape[0], N), B.dtype)
    plan = sf.plan(a, B=B, out=out)
    graph = graphed(lambda: plan(B, out), times)

    def calls() -> None:
        for _ in range(times):
            plan(B, out)

    def clock(run: Callable[[], Any]) -> float:
        calls_us = []
        for _ in range(7):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record()
            run()
            stop.record()
            stop.synchronize()
            calls_us.append(1e3 * cp.cuda.get_elapsed_time(start, stop) / times)
        return statistics.median(calls_us)

    return {"called_us": clock(calls), "graph_us": clock(graph)}


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/results/*-two-four-*.md."""
    head = ("M, N, K", "kernel", "us", "called", "host us", "cuBLAS", "cuSPARSELt", "x dense", "x cuSPARSELt", "missed")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:

        def num(key: str, digits: int = 1, r: dict[str, Any] = r) -> str:
            return f"{r[key]:.{digits}f}" if key in r else "-"

        cells = [f"{r['M']}, {r['N']}, {r['K']}", r["kernel"].removeprefix("cuda.spmm_"), num("us"), num("call_us")]
        cells += [num("host_us"), num("cuBLAS_us"), num("cuSPARSELt_us"), num("x_cuBLAS", 2), num("x_cuSPARSELt", 2)]
        lines.append("| " + " | ".join([*cells, ", ".join(r["missed"])]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure large products first, then by rows. Results up to the time limit are written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new products after this long")
    options = parser.parse_args()
    import cupy as cp

    options.out.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + options.seconds
    report: dict[str, Any] = {"environment": bench.environment(cp.zeros(1)), "rows": [], "raw": []}
    shapes = [(M, K, (N,)) for M, N, K in LARGE] + [(M, DEPTH, TOKENS[::-1]) for M in ROWS]
    for M, K, widths in shapes:
        if time.perf_counter() > end:
            print(f"no time for {M}x{K}", flush=True)
            continue
        a = gpu.random_two_four(M, K)
        for N in widths:
            row, results = measure(a, M, N, K, options.repeats)
            report["rows"].append(row)
            report["raw"] += bench.to_json(results)
            print(markdown([row]).splitlines()[-1], flush=True)
        if (M, K, widths) == (4096, DEPTH, TOKENS[::-1]):
            report["in a row"] = {N: in_a_row(a, N) for N in (1, 16, 256)}
            print(report["in a row"], flush=True)
        (options.out / "two_four.json").write_text(json.dumps(report))
        (options.out / "two_four.md").write_text(markdown(report["rows"]))
        cp.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
