"""How products compare with dense ones on shapes that nobody tuned for: python benchmarks/sweep.py

Layers of real models (``spformat/measure/layers.py``) in every format, with numbers of columns drawn from 1 to 4096,
few of them powers of two, and both layouts of B and C (torch's is column-major). Every result is checked first. Cold
L2, contenders in turn, medians. A product runs as ``spmm`` would run it; beside it stand

dense       cuBLAS on the same matrix, the fastest of row-major and column-major operands without gaps, and of torch's
            own call if torch is installed
best        the fastest of all our kernels for the product (``--regret``): what a better choice would have gained
cuSPARSELt  for 2:4, through torch, its algorithms searched
next        the same product with the next multiple of eight columns (``--unaligned``, which draws row-major operands
            and odd numbers of columns from 17 on): what lines that start anywhere cost

Prints the geometric mean and the worst by format, layout and range of N. Without ``--seed`` one is drawn and printed,
so that the shapes are on nobody's list.

``--device cpu`` does the same on the host, with smaller layers: beside the product stand numpy's BLAS in float32 on the
widened matrix, in both layouts, and torch's dense and CSR products if torch is installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

import spformat as sf
from spformat.arrays.library import is_cupy, round_up
from spformat.formats.base import Format
from spformat.formats.dense import Dense
from spformat.measure import bench, calibration_cases, contenders
from spformat.measure.calibration_cases import Spec
from spformat.products.operations import SPMM
from spformat.products.problem import COL, PITCH, ROW

RANGES = ((1, 16), (17, 64), (65, 256), (257, 4096))
DENSE = ("dense", "torch dense")
OURS = ("cuda.", "cpu.", "composed.", "vendor.")
"""Prefixes of the names of our other kernels."""
OTHERS = 4
"""Of our other kernels, those that expect to be fastest are measured for the regret, so many."""
WARMUPS = 4
"""Calls before the time is taken: the first loads code, and later ones find the memory that the pool then has."""


def label(spec: Spec) -> str:
    """The format with its parameters, as one row of the table names it."""
    p = dict(spec.params)
    if spec.format == "vector-nm":
        return f"vector {p['n']}:{p['m']} L={p['vector_length']} {spec.dtype}"
    if "blocksize" in p:
        return f"{spec.format} {p['blocksize'][0]} {100 * (1 - spec.density):.0f} % {spec.dtype}"
    return spec.format + f" {100 * (1 - spec.density):.0f} % {spec.dtype}"


def products(
    seed: int, device: str, formats: list[str], unaligned: bool
) -> Iterator[tuple[Spec, Format, Any, Any, str]]:
    """(matrix, its operands B and C, layout of both) one after the other, without end."""
    xp = arrays_of(device)
    for spec in calibration_cases.draw(seed, device, 3 if unaligned else 2, formats):
        if spec.format == "dense":
            continue
        a = calibration_cases.build(spec, xp, seed)
        for drawn, *_ in spec.widths:
            odd = max(17, drawn) | 1
            for n, layout in ((odd, ROW), (next_multiple(odd), ROW)) if unaligned else ((drawn, COL), (drawn, ROW)):
                B = calibration_cases.operand(xp, spec.K, n, layout, spec.dtype)
                C = xp.empty((spec.M, n), B.dtype, order="F" if layout == COL else "C")
                yield spec, a, B, C, layout


def arrays_of(device: str) -> Any:
    """CuPy for "cuda", numpy for "cpu"."""
    return importlib.import_module({"cuda": "cupy", "cpu": "numpy"}[device])


def next_multiple(n: int) -> int:
    """The least number of columns, n or more, whose rows start on 16-byte boundaries in 16-bit types."""
    return round_up(n, PITCH)


def crowd(a: Format, B: Any, C: Any, regret: bool) -> list[bench.Contender]:
    """The product as spmm runs it, some of our other kernels, and the peers."""
    _, *others = [r.kernel for r in choices(a, B, C).answers if r]
    runs = [bench.Contender("ours", run_of(sf.plan(a, B=B, out=C), B, C))]
    for name in others[:OTHERS] if regret else []:
        runs.append(bench.Contender(name, run_of(sf.plan(a, B=B, out=C, backend=name), B, C)))
    return runs + peers(a, B, C)


def choices(a: Format, B: Any, C: Any) -> Any:
    """Every kernel's answer for a product that writes C."""
    return sf.explain(SPMM.problem(a, B, C), installed=True)


def peers(a: Format, B: Any, C: Any) -> list[bench.Contender]:
    """Dense products in both layouts and as torch calls it, where sums may be narrower; cuSPARSELt for 2:4."""
    if not is_cupy(B):
        return host_peers(a, B)
    import cupy

    dense, runs = Dense.from_dense(a.to_dense()), []
    for order in "CF":
        b, c = cupy.array(B, order=order), cupy.empty(C.shape, C.dtype, order=order)
        plan = sf.plan(dense, B=b, out=c, backend="vendor")
        runs.append(bench.Contender(f"dense {order}", run_of(plan, b, c), peer=True))
    searched = contenders.torch_peers(a, B) if importlib.util.find_spec("torch") else []
    return runs + [c for c in searched if "searched" in c.name or c.name == "torch dense"]


def host_peers(a: Format, B: Any) -> list[bench.Contender]:
    """BLAS in float32 with operands of both layouts, and torch."""
    dtype = np.promote_types(a.dtype, np.float32)
    x, b = a.to_dense().astype(dtype), B.astype(dtype)
    b_f = np.asfortranarray(b)
    runs = [bench.Contender("dense C", functools.partial(np.matmul, x, np.ascontiguousarray(b)), peer=True),
            bench.Contender("dense F", lambda: np.matmul(b_f.T, x.T).T, peer=True)]  # fmt: skip
    return runs + contenders.torch_peers(a, B)


def run_of(plan: Any, B: Any, C: Any) -> Callable[[], Any]:
    """A product that writes C and returns it."""
    return functools.partial(plan, B, out=C)


def measure(
    seed: int, device: str, seconds: float, formats: list[str], regret: bool, unaligned: bool
) -> list[dict[str, Any]]:
    """A row for each product that was measured before the time was over."""
    end, rows = time.monotonic() + seconds, []
    for spec, a, B, C, layout in products(seed, device, formats, unaligned):
        if time.monotonic() > end:
            break
        case = bench.Case(str(spec), a, B, tuple(crowd(a, B, C, regret)), a.dtype.name, {"nnz": a.nnz})
        results = bench.compare(case, repeats=9, warmups=WARMUPS, seconds=0.2, hot=False)
        us = {r.name: r.cold_us for r in results if r.cold_us == r.cold_us}
        errors = {r.name: r.error for r in results if r.name in us}
        row = {"kind": label(spec), "M": spec.M, "K": spec.K, "N": B.shape[1], "layout": layout, "us": us,
               "kernel": choices(a, B, C).chosen, "errors": errors,
               "notes": [f"{r.name}: {r.note}" for r in results if r.note]}  # fmt: skip
        rows.append(row)
    return rows


def ratios(rows: list[dict[str, Any]], against: str | tuple[str, ...]) -> list[tuple[float, dict[str, Any]]]:
    """(time of a peer over ours, row) of the rows that have both; > 1 means that ours is faster."""
    pairs = []
    for row in rows:
        us = row["us"]
        times = [t for name, t in us.items() if name != "ours" and name.startswith(against)]
        if "ours" in us and times:
            pairs.append((min(times) / us["ours"], row))
    return pairs


def with_next(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with an odd number of columns, and among their times that of the next multiple of eight."""
    known = {(r["kind"], r["layout"], r["M"], r["K"], r["N"]): r["us"].get("ours") for r in rows}
    odd = [r for r in rows if r["N"] % 2]
    times = [known.get((r["kind"], r["layout"], r["M"], r["K"], next_multiple(r["N"]))) for r in odd]
    return [{**r, "us": {**r["us"], "next multiple": us}} for r, us in zip(odd, times, strict=True) if us]


def table(rows: list[dict[str, Any]], against: str | tuple[str, ...], title: str) -> Iterator[str]:
    """Geometric mean / worst (number of products) by kind and layout, a column for each range of N.

    Nothing if no product was measured beside the peer.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for _, row in ratios(rows, against):
        groups[row["kind"], row["layout"]].append(row)
    if not groups:
        return
    yield f"\n{title}: geometric mean / worst (products)\n"
    yield "| format | layout | " + " | ".join(f"N {lo}-{hi}" for lo, hi in RANGES) + " |"
    yield "|---|---|" + "---|" * len(RANGES)
    for (kind, layout), some in sorted(groups.items()):
        cells = []
        for lo, hi in RANGES:
            r = [x for x, _ in ratios([row for row in some if lo <= row["N"] <= hi], against)]
            cells.append(f"{geometric_mean(r):.2f} / {min(r):.2f} ({len(r)})" if r else "-")
        yield f"| {kind} | {layout} | " + " | ".join(cells) + " |"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """All tables, and what went wrong."""
    yield from table(rows, DENSE, "Times the dense product (the fastest of its layouts)")
    yield from table(rows, "cuSPARSELt", "Times cuSPARSELt (searched)")
    if pairs := with_next(rows):
        yield from table(pairs, "next multiple", "Times as fast as with the next multiple of eight columns")
    kept = [max(1.0, 1 / x) for x, _ in ratios(rows, OURS)]
    if kept:
        average, worst = (100 * (x - 1) for x in (geometric_mean(kept), max(kept)))
        yield f"\nRegret against our best kernel: {average:.1f} %, worst {worst:.0f} %"
    slow = sorted(ratios(rows, DENSE), key=lambda pair: pair[0])
    yield f"\nSlower than dense: {sum(x < 1 for x, _ in slow)} of {len(slow)} products. The slowest:"
    for x, row in slow[:15]:
        yield f"  {x:.2f}  {row['kind']} {row['M']}x{row['K']} N={row['N']} {row['layout']} by {row['kernel']}"
    wrong = [(row, {name: x for name, x in row["errors"].items() if not x <= 1}) for row in rows]
    wrong = [(row, names) for row, names in wrong if names or "ours" not in row["errors"]]
    yield f"\nResults outside the bound of float32 sums, which is 1: {len(wrong)} of {len(rows)} products"
    for row, names in wrong[:40]:
        errors = ", ".join(f"{name} {x:.1f}" for name, x in names.items())
        yield f"  {row['kind']} {row['M']}x{row['K']} N={row['N']} {row['layout']}: {errors or 'no result'}"
    for note in sorted({note for row in rows for note in row["notes"]})[:20]:
        yield f"  not measured: {note}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="draws shapes and values; without it a fresh one")
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--formats", default="", help="only these, comma-separated")
    parser.add_argument("--regret", action="store_true", help="also measure our other kernels")
    parser.add_argument("--unaligned", action="store_true", help="row-major operands with odd numbers of columns")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    rows = measure(seed, options.device, options.seconds, [f for f in options.formats.split(",") if f],
                   options.regret, options.unaligned)  # fmt: skip
    about = bench.environment(arrays_of(options.device).zeros(1))
    print(f"seed {seed}, {len(rows)} products, {about}")
    print("\n".join(summary(rows)))
    if options.json:
        options.json.write_text(json.dumps({"seed": seed, "environment": about, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
