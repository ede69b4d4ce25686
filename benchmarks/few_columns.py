"""Few columns of B on a GPU: python benchmarks/few_columns.py [--formats csr] [--seed 1] [--json FILE]

Layers of real models in CSR, BSR, DBSR, bitmask (float32) and vector n:m, 1 to 64 columns (vector n:m: to 16), both
layouts of B and C. Every result is checked first. Cold L2, contenders in turn, medians: the kernel for few columns, the
kernel that is expected to be fastest without it, and cuBLAS on the same matrix, the fastest of its layouts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from sweep import choices, peers, run_of

import spformat as sf
from spformat.measure import bench, calibration_cases
from spformat.measure.calibration_cases import KINDS, Spec
from spformat.measure.layers import LAYERS

KERNEL = {
    "vector-nm": "cuda.spmm_vector_nm_tokens", "bsr": "cuda.spmm_bsr_tokens", "dbsr": "cuda.spmm_bsr_tokens",
    "csr": "cuda.spmm_csr_vector", "bitmask": "cuda.spmm_bitmask_mma",
}  # fmt: skip
COLUMNS = {"vector-nm": (1, 1, 2, 3, 4, 5, 8, 11, 16), "bsr": (1, 1, 2, 3, 4, 7, 8, 11, 16, 23, 32, 37, 48, 64)}
RANGES = ((1, 1), (2, 8), (9, 64))
HANDFUL, FOR_A_HANDFUL = 4, {"bitmask": "cuda.spmm_bitmask_tokens"}
"""Kernels for up to so many columns."""
LARGEST = 1 << 26
"""Elements of the largest dense matrix."""


def draw(seed: int, formats: Sequence[str]) -> Iterator[tuple[Spec, int, str]]:
    """Matrices with a number of columns and a layout each, without end."""
    kinds = [k for k in KINDS if k[0] in KERNEL and (k[0] != "bitmask" or k[1] == "float32")]
    kinds.append(("bsr", "bfloat16", 0.2, (32, 32), {"blocksize": (32, 32)}))
    kinds = [k for k in kinds if k[0] in formats]
    rng, shapes = random.Random(seed), [s for s in LAYERS if s[0] * s[1] <= LARGEST]
    while True:
        for layout in ("col", "row"):
            for name, dtype, density, together, params in kinds:
                n = rng.choice(COLUMNS.get(name, COLUMNS["bsr"]))
                spec = (name, dtype, *rng.choice(shapes), density, together, tuple(params.items()))
                yield Spec(*spec, ((n, layout, layout),)), n, layout


def measure(seed: int, seconds: float, formats: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each product that was measured before the time was over."""
    import cupy

    end = time.monotonic() + seconds
    for spec, n, layout in draw(seed, formats):
        if time.monotonic() > end:
            return
        a = calibration_cases.build(spec, cupy, seed)
        B = calibration_cases.operand(cupy, spec.K, n, layout, spec.dtype)
        C = cupy.empty((spec.M, n), B.dtype, order="F" if layout == "col" else "C")
        new = FOR_A_HANDFUL.get(spec.format, KERNEL[spec.format]) if n <= HANDFUL else KERNEL[spec.format]
        other = next(r.kernel for r in choices(a, B, C).answers if r and r.kernel != new)
        runs = [
            bench.Contender(label, run_of(sf.plan(a, B=B, out=C, backend=name), B, C))
            for label, name in (("few columns", new), ("others", other))
        ]
        case = bench.Case(str(spec), a, B, (*runs, *peers(a, B, C)), a.dtype.name, {"nnz": a.nnz})
        results = bench.compare(case, repeats=9, warmups=2, seconds=0.1, hot=False)
        yield {"format": spec.format, "params": dict(spec.params), "dtype": spec.dtype, "M": spec.M, "K": spec.K,
               "N": n, "layout": layout, "other": other,
               "us": {r.name: r.cold_us for r in results if r.cold_us == r.cold_us},
               "errors": {r.name: r.error for r in results}}  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Geometric means by format and range of N."""
    yield "| format | N | products | times dense | worst | times the other kernels | worst |"
    yield "|---|---|---|---|---|---|---|"
    for name, dtype in dict.fromkeys((r["format"], r["dtype"]) for r in rows):
        for lo, hi in RANGES:
            chosen = [r for r in rows if (r["format"], r["dtype"]) == (name, dtype)]
            us = [r["us"] for r in chosen if lo <= r["N"] <= hi and "few columns" in r["us"]]
            if not us:
                continue
            dense = [min(t for k, t in x.items() if "dense" in k) / x["few columns"] for x in us]
            others = [x["others"] / x["few columns"] for x in us]
            cells = (f"{geometric_mean(r):.2f} | {min(r):.2f}" for r in (dense, others))
            yield f"| {name} {dtype} | {lo}-{hi} | {len(us)} | {' | '.join(cells)} |"
    wrong = [r for r in rows if not r["errors"].get("few columns", 2) <= 1]
    yield f"\nResults outside the bound of float32 sums: {len(wrong)} of {len(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(KERNEL), help="comma-separated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = list(measure(options.seed, options.seconds, options.formats))
    print("\n".join(summary(rows)))
    if options.json:
        options.json.write_text(json.dumps({"seed": options.seed, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
