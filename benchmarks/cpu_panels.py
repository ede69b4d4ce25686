"""Products on the host with 17 to 96 columns of B: one loop for all of them beside panels of the loops for few columns.

python benchmarks/cpu_panels.py [--rows 2048] [--cols 4096]

One plan of each format's kernel runs both ways in turn (``times.IN_PANELS`` empty, and as it is). Prints the medians in
milliseconds as a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from at_rest import dense

import spformat as sf
from spformat.backends.cpu import spmm, times

COLUMNS = (17, 24, 32, 40, 48, 64, 80, 96)
RUNS, WARMUPS = 20, 2
CASES: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("two-four", {}, 0.5), ("bitmask", {}, 0.5), ("csr", {}, 0.9), ("ell-buckets", {}, 0.9),
    ("vector-nm", {"n": 8, "m": 32, "vector_length": 32}, 0.75), ("sr-bcrs", {"vector_length": 8, "stride": 8}, 0.8),
    ("bsr", {"blocksize": (32, 32)}, 0.8),
)  # fmt: skip
"""(format, params, share of zeros)"""


def medians(a: Any, n: int) -> tuple[float, float]:
    """Milliseconds of one loop for all columns, and of panels."""
    (kernel,) = (k for k in spmm.KERNELS if a.name in k.formats)
    B = np.random.default_rng(1).standard_normal((a.shape[1], n)).astype(a.dtype)
    out, limits = np.empty((a.shape[0], n), B.dtype), dict(times.IN_PANELS)
    plan = sf.plan(a, B=B, out=out, backend=kernel.name)
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARMUPS + RUNS):
        for some, own in zip(({}, limits), took, strict=True):
            times.IN_PANELS.clear()
            times.IN_PANELS.update(some)
            start = time.perf_counter()
            plan(B, out)
            own.append(1e3 * (time.perf_counter() - start))
    return statistics.median(took[0][WARMUPS:]), statistics.median(took[1][WARMUPS:])


def main() -> None:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=about, epilog=rest)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--cols", type=int, default=4096)
    options = parser.parse_args()
    print(f"| format | {' | '.join(map(str, COLUMNS))} |\n|{'---|' * (1 + len(COLUMNS))}")
    for dtype in ("bfloat16", "float32"):
        for name, params, zeros in CASES:
            if name == "two-four" and dtype == "float32":
                continue
            a = sf.convert(dense(name, params, zeros, (options.rows, options.cols), dtype), name, **params)
            cells = ["{:.2f} / {:.2f}".format(*medians(a, n)) if n <= times.IN_PANELS[name] else "-" for n in COLUMNS]
            print(f"| {name} {dtype} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
