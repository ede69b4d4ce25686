"""The table of measurements that spformat ships for 2:4: python benchmarks/tune.py [--out measured.json] [--repeats 15]

Every kernel and tile on random 2:4 weights in the shapes of models, N from 8 to 4096; results are checked before they
are timed (cold L2). Rows are merged into --out (default: the file the package reads).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

import spformat as sf
from spformat.backends.cuda.runtime import measured
from spformat.measure import tune as tuning
from spformat.preprocess import masks

SHAPES = ((4096, 4096), (11008, 4096), (14336, 4096), (4096, 11008), (8192, 8192), (2048, 2048), (1024, 4096))
WIDTHS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def main() -> None:
    """One shape after the other; what is done when the time is over is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=measured.SHIPPED)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new shapes after this long")
    options = parser.parse_args()
    import cupy as cp

    bfloat16, end = sf.arrays.dtypes.VALUE_TYPES["bfloat16"].numpy, time.perf_counter() + options.seconds
    for M, K in SHAPES:
        if time.perf_counter() > end:
            print(f"no time for {M}x{K}", flush=True)
            continue
        x = cp.random.default_rng(M + K).standard_normal((M, K), dtype=np.float32).astype(bfloat16)
        a = masks.prune_two_four(x, meta_order="fragment")
        found = tuning.tune(a, WIDTHS, options.repeats)
        for row, results in found:
            print(json.dumps([row, [(r.name, round(r.cold_us, 1), r.note) for r in results]]), flush=True)
        tuning.save([row for row, _ in found], x, f"python {' '.join(sys.argv)}", options.out)
        cp.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
