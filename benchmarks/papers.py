"""The evaluations of papers on one GPU, every figure of docs/papers.md in one run: python benchmarks/papers.py all

bert     SparseTIR, pruned BERT: its linear layers with 512 and 4096 columns, float16. Structured: blocks of 32 x 32, of
         which 0.5 to 20 % are kept, half of the block rows empty. Unstructured: 1 to 20 % of the values. BSR, DBSR and
         SR-BCRS (t = 8, g = 16 and 32) beside dense cuBLAS and cuSPARSE
shapes   NM-SpMM: its shapes A to F (F is 4096^3), 50 to 87.5 % zeros, float32, vectors of 32; what spmm() runs (three
         TF32 products) and the kernels on CUDA cores, as the paper's, beside dense cuBLAS
two-four 2:4 in bf16 at 4096^3: wgmma.sp, mma.sp by TMA and mma.sp beside cuSPARSELt (searched) and cuBLAS
blocks   SparseTIR, block-pruned weights: BSR and DBSR in bf16 beside dense and torch's BSR
unstructured  SparseTIR: SR-BCRS, float16, 4096 x 4096, 512 columns, beside cuSPARSE and dense
graphs   SparseTIR: padding of hyb(c, k) over c, and hyb beside CSR and cuSPARSE with 32 to 512 columns, float32
operators  SparseTIR's operators of graph networks and TCA-SpMM: real graphs and pruned weights, then drawn graphs, in
         CSR and ELL buckets, and the kernel of TCA-SpMM with sums between lanes and in shared memory, beside cuSPARSE
         (CuPy's call and torch's) and dense: float16 and float32, 32, 128 and 512 columns
nm       NM-SpMM: 256 to 4096 columns, the 20 layers of its Llama shapes, 0 to 87.5 % zeros, otherwise as shapes
packing  2:4: dense to two-four, exact and pruned, and back, 4096 x 4096, beside a copy of as many bytes
tca      the graphs of operators alone, in CSR and by TCA-SpMM, beside cuSPARSE. Not in all
parts    SparseTIR: hyb(1), hyb(2), hyb(4) and hyb(8) beside CSR on a graph of Reddit's size, rows and columns skewed,
         128 columns, float32; a part of B stays in L2 while it is worked on. Not in all

``--seconds`` bounds each of them, compilation included; what was not reached is said. Cold L2, medians, contenders in
turn; every result is checked first. Prints the tables and the headline figures. ``--page JSON`` prints the page of
results of an earlier run instead, which needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pack
import papers_cases as cases
import papers_page
from papers_cases import Case
from papers_page import Row

import spformat as sf
from spformat.arrays.library import device_error
from spformat.backends.cuda.runtime.compile_ahead import CompileAhead
from spformat.backends.cuda.two_four.two_four_pack import TwoFourPack
from spformat.errors import DeviceFault, SpformatError
from spformat.measure import bench

SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "bert": cases.bert, "shapes": cases.shapes, "two-four": cases.two_four_cases, "blocks": cases.blocks,
    "unstructured": cases.unstructured, "graphs": cases.graphs, "operators": cases.operators, "nm": cases.nm,
    "tca": cases.tca, "parts": cases.parts,
}  # fmt: skip
PACKING = "packing"
"""The suite whose rows are no products: ``pack.measure`` makes them."""
ALL = ("bert", "shapes", "two-four", "blocks", "unstructured", "graphs", "operators", "nm", PACKING)
"""Those of which docs/papers.md has figures."""
SECONDS = {"bert": 60.0, "two-four": 40.0, "graphs": 40.0, "operators": 80.0, "nm": 90.0}
"""For suites that need another time than ``USUAL``: the first also starts the processes that compile."""
USUAL = 30.0
AHEAD = 40
"""Cases of a suite whose kernels are compiled in several processes before the first is measured."""
REPEATS = {"nm": 9}
"""Of the suites that have many long products; 25 of the others."""
FAILURES = (SpformatError, RuntimeError, ValueError, TypeError, MemoryError, ImportError)


def makers(case: Case, B: Any, kernels: dict[str, str]) -> Iterator[tuple[str, Callable[[], list[bench.Contender]]]]:
    """(label, what makes its contenders) for each of our formats and each kernel that is named.

    kernels: gets the kernel and the tile of each format.
    """
    first = case.forms[0][1]
    for label, a in case.forms:
        yield label, functools.partial(product, label, a, B, kernels)
    for label, named in case.named:
        yield label, functools.partial(named, first, B)


def product(label: str, a: sf.Format, B: Any, kernels: dict[str, str]) -> list[bench.Contender]:
    """The product as spmm() runs it."""
    import cupy as cp

    C = cp.empty((a.shape[0], B.shape[1]), a.dtype)
    plan = sf.plan(a, B=B, out=C)
    kernels[label] = f"{plan.kernel} {plan.tile}".strip()
    return [bench.Contender(label, functools.partial(plan, B, out=C))]


def attempts(case: Case) -> Iterator[Callable[[], Any]]:
    """A product by each of our kernels, for ``CompileAhead``."""

    def run(k: int) -> None:
        _, make = next(itertools.islice(makers(case, operand(case), {}), k, None))
        for contender in make():
            contender.run()

    return (functools.partial(run, k) for k in range(len(case.forms) + len(case.named)))


def operand(case: Case) -> Any:
    """B of a case."""
    a = case.forms[0][1]
    return cases.normal((a.shape[1], case.n), a.dtype.name, 1)


def measure(case: Case, repeats: int, seconds: float = 0.1) -> Row:
    """Microseconds of each contender whose result is right."""
    first, B = case.forms[0][1], operand(case)
    kernels: dict[str, str] = {}
    wrong: dict[str, Any] = {}
    crowd: list[bench.Contender] = []
    wanted = list(makers(case, B, kernels))
    wanted += [("a library", functools.partial(peer, first, B)) for peer in case.peers]
    for label, make in wanted:
        try:
            crowd += make()
        except FAILURES as e:
            if isinstance(device_error(e) or e, DeviceFault):
                raise  # no later result would mean anything
            wrong[label] = f"{type(e).__name__}: {str(e)[:160]}"
    compared = bench.Case(case.name, first, B, tuple(crowd), first.dtype.name, {"nnz": first.nnz})
    results = bench.compare(compared, repeats, warmups=4, seconds=seconds, hot=False)
    us = {r.name: r.cold_us for r in results if r.cold_us == r.cold_us and r.error <= 1}
    wrong |= {r.name: r.note or r.error for r in results if r.name not in us}
    (M, K), stored = first.shape, first.stored
    moved = first.nbytes + (K + M) * case.n * first.dtype.itemsize
    ordered = {c.name: us[c.name] for c in crowd if c.name in us}
    return {"name": case.name, "n": case.n, "M": M, "K": K, "us": ordered, "wrong": wrong, "kernels": kernels,
            "flop": 2.0 * stored * case.n, "bytes": moved}  # fmt: skip


def measured(suite: str, end: float, ahead: CompileAhead) -> Iterator[Row]:
    """The rows of a suite until its time is over, and an empty one if it was over before the last."""
    import cupy as cp

    if suite == PACKING:
        pack.check(cp, TwoFourPack())
        for row in pack.measure(cp, TwoFourPack(), (4096, 4096), 30):
            yield row | {"name": row["what"], "n": 0, "wrong": {}}
        return
    rest = SUITES[suite]()
    first = list(itertools.islice(rest, AHEAD))
    count = ahead.compile_for((run for case in first for run in attempts(case)), lambda: time.monotonic() > end)
    print(f"{suite}: {count} kernels compiled ahead", flush=True)
    for case in itertools.chain(first, rest):
        if time.monotonic() > end:
            yield {}
            return
        yield measure(case, REPEATS.get(suite, 25))
        cp.get_default_memory_pool().free_all_blocks()


def run(suites: list[str], seconds: float | None, ahead: CompileAhead, report: dict[str, Any], to: Path | None) -> None:
    """Measure the suites into the report, which is written after each of them, and print their tables."""
    for suite in suites:
        start = time.monotonic()
        rows = list(measured(suite, start + (seconds or SECONDS.get(suite, USUAL)), ahead))
        if {} in rows:
            rows.remove({})
            report["cut"].append(suite)
        report["suites"][suite], report["seconds"][suite] = rows, time.monotonic() - start
        over = ", the time was over" if suite in report["cut"] else ""
        print(f"\n### {suite}: {len(rows)} cases{over}, {report['seconds'][suite]:.1f} s\n")
        print("\n".join(papers_page.summary(suite, rows)), flush=True)
        if to:
            to.write_text(json.dumps(report) + "\n")


def commit() -> str:
    """The commit of the working tree, if git is here and knows."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = f"all, or some of {', '.join((*SUITES, PACKING))}"
    parser.add_argument("suites", nargs="*", default=["all"], metavar="suite", help=choices)
    parser.add_argument("--seconds", type=float, help=f"for each suite; default: {USUAL:.0f}, more for long ones")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="what the page calls the commit; default: git's answer")
    parser.add_argument("--plot", type=Path, help="SVG of the roofline of nm")
    parser.add_argument("--page", type=Path, metavar="JSON", help="only print the page of results of this run")
    options = parser.parse_args()
    if options.page:
        print("\n".join(papers_page.page(json.loads(options.page.read_text()))))
        return
    suites = list(ALL) if options.suites == ["all"] else options.suites
    if unknown := set(suites) - {*SUITES, PACKING}:
        parser.error(f"expected {choices}, got {', '.join(sorted(unknown))}")
    import cupy as cp

    about = bench.environment(cp.zeros(1, np.float32))
    print(json.dumps(about))
    command = " ".join(["python benchmarks/papers.py", *options.suites])
    command += f" --seconds {options.seconds:g}" if options.seconds else ""
    report: dict[str, Any] = {"environment": about, "commit": options.commit or commit(), "command": command}
    report |= {"cut": [], "seconds": {}, "suites": {}}
    with CompileAhead() as ahead:
        run(suites, options.seconds, ahead, report, options.json)
    print("\n### Headline figures\n")
    print("\n".join(papers_page.summary_of_headlines(report["suites"])))
    if options.plot and "nm" in report["suites"]:
        papers_page.plot(report["suites"]["nm"], options.plot, 1e12 * about["copy_tb_per_s"])


if __name__ == "__main__":
    main()
