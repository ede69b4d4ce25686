"""Products of this version against an earlier one: python benchmarks/earlier_products.py --earlier v0.1.0 --kernels A,B

Both packages run in one process (``earlier.py``). Layers of models are drawn as for calibrations (``spformat bench
--calibrate``), in the formats of the kernels; for each product and kernel both versions run the tile that they choose.
With ``--formats`` instead of ``--kernels`` both run the kernel that they choose. They run in turn, the dense product
beside them, with cold L2, and every result is checked. Prints how many times as fast as the earlier version this one
is, and both over dense: geometric mean and worst, by kernel or format, layout and number of columns.

With ``--odd`` B and C are row-major and numbers of columns are odd, so that rows of 16-bit values start anywhere. This
version's product with the next multiple of 8 columns, whose rows are aligned, then runs in turn with them, too: how
much longer both versions take than it, and how many products more than 1.25 times as long.

``--jobs`` processes compile the kernels first: what they leave in CuPy's cache is not compiled again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from earlier import ROOT, earlier_package

import spformat
from spformat.backends.cuda import KERNELS
from spformat.errors import SpformatError
from spformat.measure import bench, calibration_cases, contenders
from spformat.products.problem import COL, PITCH, ROW

WIDTHS = 4
"""Numbers of columns for each matrix."""
LONGER = 1.25
"""Times the next multiple of 8 columns that an odd number may take."""
COLUMNS = ((1, 16), (17, 64), (65, 256), (257, 4096))


class Row(NamedTuple):
    """One product by one kernel, in microseconds."""

    kernel: str
    """Or the format, if each version chose a kernel."""
    name: str
    n: int
    torch: bool
    """Whether both operands are column-major, or vectors."""
    tiles: tuple[str, str]
    """With the kernels, if these were chosen."""
    earlier: float
    now: float
    dense: float
    next: float | None = None
    """With the next multiple of ``PITCH`` columns by this version, where that was asked for."""


def products(
    seed: int, kernels: Sequence[str], formats: Sequence[str], columns: tuple[int, int], odd: bool, bits: int
) -> Iterator[tuple[Any, Any, Any, str]]:
    """Without end: a matrix, B and C of a product, and the name of a kernel for its format.

    Without kernels of products in ``formats``, with an empty name. bits: of a value, 16 or 32.
    """
    import cupy as cp

    known = {k.name: k for k in KERNELS}
    formats = formats or sorted({f for name in kernels for f in known[name].formats})
    bins = calibration_cases.clipped(calibration_cases.FINE_BINS, *columns)
    for number, spec in enumerate(calibration_cases.draw(seed, "cuda", WIDTHS, formats, bins)):
        takes = [name for name in kernels if spec.format in known[name].formats] or [""]
        if (spec.dtype == "float32") != (bits == 32):
            continue
        a = calibration_cases.build(spec, cp, number)
        for n, b_layout, c_layout in widths(spec, odd):
            B = calibration_cases.operand(cp, spec.K, n, b_layout, spec.dtype)
            C = cp.empty((spec.M, n), a.dtype, order="F" if c_layout == COL else "C")
            yield from ((a, B, C, name) for name in takes)


def widths(spec: Any, odd: bool) -> list[tuple[int, str, str]]:
    """Numbers of columns of what was drawn, with the layouts of B and C. odd: rows of odd lengths instead."""
    return [(n | 1, ROW, ROW) if odd else (n, b_layout, c_layout) for n, b_layout, c_layout in spec.widths]


def plans(a: Any, B: Any, C: Any, kernel: str, packages: Sequence[Any]) -> list[Any]:
    """A plan of each package for the same matrix; SpformatError where one of them refuses."""
    dense, params, each = a.to_dense(), a.params(), []
    for sf in packages:
        try:
            each.append(sf.plan(sf.convert(dense, a.name, **params), B=B, out=C, backend=kernel or None))
        except sf.errors.SpformatError as e:  # of this package or of the earlier one
            raise SpformatError(str(e)) from e
    return each


def aligned(a: Any, B: Any, C: Any) -> bench.Contender:
    """This version's product of row-major operands with the next multiple of 8 columns; gives those of C."""
    import cupy as cp

    n = B.shape[1]
    wider = cp.zeros((B.shape[0], -(-n // PITCH) * PITCH), B.dtype)
    wider[:, :n] = B
    result = cp.empty((C.shape[0], wider.shape[1]), C.dtype)
    plan = spformat.plan(spformat.convert(a.to_dense(), a.name, **a.params()), B=wider, out=result)

    def run() -> Any:
        plan(wider, out=result)
        return result[:, :n]

    return bench.Contender("next", run)


def contending(both: Sequence[Any], a: Any, B: Any, C: Any, odd: bool) -> list[bench.Contender]:
    """The plans of both versions; odd: and the next multiple of 8 columns, if there is more than one."""
    runs = zip(("earlier", "now"), both, strict=True)
    crowd = [bench.Contender(label, functools.partial(plan, B, out=C)) for label, plan in runs]
    return [*crowd, aligned(a, B, C)] if odd and B.shape[1] > 1 else crowd


def measured(a: Any, B: Any, C: Any, kernel: str, packages: Sequence[Any], odd: bool) -> Row:
    """Both versions in turn. RuntimeError for a wrong result."""
    both = plans(a, B, C, kernel, packages)
    ours = contending(both, a, B, C, odd)
    labels = [x.name for x in ours]
    name = f"{a.name} {a.dtype.name} {a.shape[0]}x{a.shape[1]} {100 * a.stored / (a.shape[0] * a.shape[1]):.0f} %"
    case = bench.Case(name, a, B, (*ours, *contenders.dense(a, B, C)), a.dtype.name)
    results = {r.name: r for r in bench.compare(case, 25, warmups=3, seconds=0.05, hot=False)}
    if wrong := [label for label in labels if not results[label].error <= 1]:
        raise RuntimeError(f"{name}, N = {B.shape[1]}: {', '.join(wrong)} wrong by {kernel}")
    (dense,) = (r.cold_us for label, r in results.items() if label not in labels)
    torch = B.shape[1] == 1 or (B.flags.f_contiguous and C.flags.f_contiguous)
    then, now = (p.tile if kernel else f"{p.kernel} {p.tile}".strip() for p in both)
    us = {label: results[label].cold_us for label in labels}
    return Row(
        kernel or a.name, name, B.shape[1], torch, (then, now), us["earlier"], us["now"], dense, us.get("next")
    )  # fmt: skip


def until(seconds: float, work: Iterator[tuple[Any, Any, Any, str]], each: Callable[..., Any]) -> Iterator[Any]:
    """What ``each`` gives of one product after the other; those that a version refuses are left out."""
    end = time.monotonic() + seconds
    for product in work:
        if time.monotonic() > end:
            return
        try:
            yield each(*product)
        except SpformatError:
            continue


def summary(rows: Sequence[Row]) -> list[str]:
    """A table in Markdown: all, then by kernel or format, layout and number of columns."""
    groups: list[tuple[str, list[Row]]] = [("all", list(rows))]
    groups += [(k, [r for r in rows if r.kernel == k]) for k in dict.fromkeys(r.kernel for r in rows)]
    groups += [("torch's layout", [r for r in rows if r.torch]), ("other layouts", [r for r in rows if not r.torch])]
    groups += [(f"N {low} to {high}", [r for r in rows if low <= r.n <= high]) for low, high in COLUMNS]
    head = ["", "products", "earlier / now", "of dense, earlier", "of dense, now"]
    if beside := any(r.next for r in rows):
        head += ["of the next multiple, earlier", "of the next multiple, now"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, some in groups:
        if some:
            ratios = [r.earlier / r.now for r in some]
            then, now = (geometric_mean(r.dense / us for r, us in zip(some, times, strict=True))
                         for times in ([r.earlier for r in some], [r.now for r in some]))  # fmt: skip
            spread = f"{geometric_mean(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append(f"| {name} | {len(some)} | {spread} | {then:.2f} | {now:.2f} |" + beside * beside_next(some))
    return lines


def beside_next(rows: Sequence[Row]) -> str:
    """Two cells: how many times as long as the next multiple of 8 columns both versions take; how often too long."""
    cells = ""
    for times in ([r.earlier for r in rows], [r.now for r in rows]):
        ratios = [us / r.next for r, us in zip(rows, times, strict=True) if r.next]
        long = sum(x > LONGER for x in ratios)
        cells += f" {geometric_mean(ratios):.3f}, {long} above {LONGER} |" if ratios else " |"
    return cells


def drawn() -> list[str]:
    """The formats that matrices are drawn in."""
    return sorted({kind[0] for kind in calibration_cases.KINDS})


def ends(argument: str) -> tuple[int, int]:
    """The least and the largest number of columns, as 1-512."""
    least, dash, most = argument.partition("-")
    if not (dash and least.isdigit() and most.isdigit()):
        raise argparse.ArgumentTypeError(f"expected numbers of columns like 1-512, got {argument}")
    return int(least), int(most)


def main() -> None:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=about, epilog=rest)
    parser.add_argument("--earlier", required=True, metavar="COMMIT", help="of this repository, or a folder")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--kernels", help="comma-separated")
    chosen.add_argument(
        "--formats", help="comma-separated: each version chooses a kernel for products in these formats"
    )
    parser.add_argument("--columns", type=ends, default=(1, 4096), metavar="LEAST-MOST")
    parser.add_argument("--odd", action="store_true", help="row-major B and C, odd numbers of columns")
    parser.add_argument("--bits", type=int, choices=(16, 32), default=16, help="of a value (default: 16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile first; 0: none")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile-only", nargs=2, help=argparse.SUPPRESS)  # the number of this process, and of all
    options = parser.parse_args()
    kernels, formats = (text.split(",") if text else [] for text in (options.kernels, options.formats))
    for what, unknown in ("kernel", set(kernels) - {k.name for k in KERNELS}), ("format", set(formats) - set(drawn())):
        if unknown:
            parser.error(f"no {what} is called {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as scratch:
        # The processes that compile use the folder of the first one, as its path is part of what CuPy's cache looks up.
        folder = Path(options.earlier) if options.compile_only else Path(scratch)
        if options.compile_only:
            sys.path.insert(0, str(folder))
            packages = (__import__("spformat_earlier"), spformat)
        else:
            packages = (earlier_package(options.earlier, folder), spformat)
        work = products(options.seed, kernels, formats, options.columns, options.odd, options.bits)
        if options.compile_only:
            number, of = map(int, options.compile_only)
            mine = itertools.islice(work, number, None, of)

            def compiled(a: Any, B: Any, C: Any, kernel: str) -> None:
                for x in contending(plans(a, B, C, kernel, packages), a, B, C, options.odd):
                    x.run()

            print(sum(1 for _ in until(options.seconds, mine, compiled)), "products compiled")
            return
        command = [sys.executable, __file__, *sys.argv[1:], "--earlier", str(folder), "--compile-only"]
        jobs = [subprocess.Popen([*command, str(i), str(options.jobs)], cwd=ROOT) for i in range(options.jobs)]
        for job in jobs:
            job.wait()
        rows = list(until(options.seconds, work, lambda *p: measured(*p, packages, options.odd)))
    if not rows:
        parser.error("no product was measured: both versions must have the kernels and take the same formats")
    print("\n".join(summary(rows)))
    if options.json:
        options.json.write_text(json.dumps([r._asdict() for r in rows], indent=1))


if __name__ == "__main__":
    main()
