"""A kernel beside the other kernels, from measured points: python benchmarks/beside.py KERNEL FILE..

The files are what ``spformat bench --calibrate --points FILE`` wrote, of one device. For products of which the kernel
and at least one other were measured, by format, share of stored elements and number of columns: how many times as fast
as the dense product with the same operands the fastest other kernel is, and the fastest of all with this one. Of each
kernel its fastest tile counts that was measured. Products by way of copies of operands are left out, since another
kernel computes them, which may be the one that is asked about.

``--chosen``: of the measured tiles the one that expects the least time now, among those of the other kernels and among
all; the fastest ones may be others.

``--shares 0.04,0.08`` and ``--columns 1,17,65`` say where rows of the table start (the last is open); ``--torch``
takes only products in torch's layout (both operands column-major, or one column).
"""

from __future__ import annotations

import argparse
import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from spformat.measure.calibration_fit import priced
from spformat.measure.calibration_points import DENSE, Point, load
from spformat.products.problem import COL, Problem


class Times(NamedTuple):
    """The fastest times of one product, in microseconds."""

    problem: Problem
    dense: float
    others: float
    kernel: float
    best: float
    """Of the others and the kernel."""


def products(points: Iterable[Point], kernel: str, chosen: bool = False) -> list[Times]:
    """Those of which the dense product, the kernel and another one were measured. chosen: by ``Point.expected``."""
    cases: dict[int, list[Point]] = defaultdict(list)
    for x in points:
        cases[x.case].append(x)

    def of(some: list[Point]) -> float:
        return min(some, key=lambda x: x.expected if chosen else x.us).us

    rows = []
    for some in cases.values():
        dense = [x.us for x in some if x.kernel.name == DENSE]
        left = [x for x in some if x.kernel.name != DENSE and not x.kernel.name.startswith("composed.")]
        if chosen:  # tiles that would not be considered expect NaN
            left = [x for x in left if not math.isnan(x.expected)]
        own, others = [x for x in left if x.kernel.name == kernel], [x for x in left if x.kernel.name != kernel]
        if own and others and dense:
            rows.append(Times(some[0].problem, min(dense), of(others), of(own), of(left)))
    return rows


def in_torchs_layout(p: Problem) -> bool:
    """Both operands are column-major, or vectors."""
    return p.n == 1 or p.b_layout == p.out_layout == COL


def table(rows: Sequence[Times], shares: Sequence[float], columns: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each format, share and number of columns of which there are products, and one for all."""
    groups: dict[tuple[str, int, int], list[Times]] = defaultdict(list)
    for x in rows:
        share = x.problem.nnz / max(1, x.problem.M * x.problem.K)
        at, n = bisect_right(shares, share) - 1, bisect_right(columns, x.problem.n) - 1
        if at >= 0 and n >= 0:
            groups[x.problem.format, at, n].append(x)
    chosen = [x for some in groups.values() for x in some]
    parts = [
        (name, shares_of(shares, at), columns_of(columns, n), groups[name, at, n]) for name, at, n in sorted(groups)
    ]
    return [_row(*part) for part in [*parts, ("all", "", "", chosen)] if part[-1]]


def shares_of(starts: Sequence[float], at: int) -> str:
    """Which shares of stored elements a row covers, in per cent."""
    last = f"to {100 * starts[at + 1]:g}" if at + 1 < len(starts) else "and more"
    return f"{100 * starts[at]:g} {last}"


def columns_of(starts: Sequence[int], at: int) -> str:
    """Which numbers of columns a row covers."""
    first, last = starts[at], starts[at + 1] - 1 if at + 1 < len(starts) else None
    return f"{first} and more" if last is None else str(first) if first == last else f"{first}-{last}"


def _row(name: str, stored: str, n: str, some: Sequence[Times]) -> dict[str, Any]:
    return {
        "format": name, "stored %": stored, "N": n, "products": len(some),
        "others": geometric_mean(x.dense / x.others for x in some),
        "with it": geometric_mean(x.dense / x.best for x in some),
        "worst": min(x.dense / x.best for x in some),
        "over others": geometric_mean(x.others / x.kernel for x in some),
    }  # fmt: skip


def text(rows: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown."""
    names = list(rows[0])
    lines = [
        names,
        ["---"] * len(names),
        *([f"{x:.2f}" if isinstance(x, float) else str(x) for x in r.values()] for r in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def numbers(of: type) -> Any:
    """A parser of ascending numbers with commas."""

    def parse(argument: str) -> list[Any]:
        parsed = [of(x) for x in argument.split(",")]
        if parsed != sorted(set(parsed)):
            raise argparse.ArgumentTypeError(f"must ascend: {argument}")
        return parsed

    return parse


def main() -> None:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=about, epilog=rest)
    parser.add_argument("kernel")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--shares", type=numbers(float), default=[0.0])
    parser.add_argument("--columns", type=numbers(int), default=[1, 17, 65, 257])
    parser.add_argument("--torch", action="store_true", help="only products in torch's layout")
    parser.add_argument("--chosen", action="store_true", help="by expected times, not the fastest")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loaded = load(options.files)
    points = priced(loaded.points) if options.chosen else loaded.points
    every = products(points, options.kernel, options.chosen)
    rows = [x for x in every if in_torchs_layout(x.problem) or not options.torch]
    compared = table(rows, options.shares, options.columns)
    if not compared:
        parser.error(f"{options.kernel}: no product of these files was measured with it, another kernel and dense")
    for reason, count in loaded.left_out.items():
        print(f"{count} points left out: {reason}")
    print(f"{options.kernel} on {loaded.about.device}, {loaded.about.date}, commit {loaded.about.commit}\n")
    print(text(compared))
    if options.json:
        options.json.write_text(json.dumps(compared, indent=1))


if __name__ == "__main__":
    main()
