"""Vector n:m against dense cuBLAS over shapes, beside the expected times: python benchmarks/vector_nm.py

Shapes A to F of the NM-SpMM paper and the linear layers of Llama, in float32 and bf16, with vectors of 32, 64 and 128
rows, each at 16:32, 12:32, 8:32 and 4:32; *columns* are layers with 65 and more columns, of one and several rounds of
tiles, with weights that stay in L2 and that do not. Cold L2, medians, correctness first, the dense product alternating
in the same process. Then conversion on the device. Writes vector_nm.json and vector_nm.md. B of a layer is [K, tokens];
with --torch-layout it is the transpose of torch's x [tokens, K], and copying it is inside the time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

import spformat as sf
from spformat.dispatch import cost
from spformat.formats.vector_nm import VectorNM
from spformat.measure import bench, contenders

KEPT = (16, 12, 8, 4)
"""Of every 32 columns."""
PAPER = {
    "A": (512, 512, 512), "B": (1024, 512, 1024), "C": (2048, 512, 2048), "D": (2048, 1024, 2048),
    "E": (4096, 2048, 4096), "F": (4096, 4096, 4096),
}  # fmt: skip
"""M, N, K with the sparse matrix on the left: the paper's n, m, k."""
LAYERS = ((4096, 4096), (11008, 4096), (4096, 11008), (12288, 4096))
TOKENS = (256, 512, 1024, 4096)
Matrices = tuple[tuple[str, int, int, tuple[int, ...]], ...]
PAPER_MATRICES: Matrices = tuple((name, M, K, (N,)) for name, (M, N, K) in PAPER.items())
LAYER_MATRICES: Matrices = tuple(("", M, K, TOKENS) for M, K in LAYERS)
COLUMN_MATRICES: Matrices = tuple(
    ("", M, K, (N,))
    for M, K, N in (
        (8192, 3072, 184), (4096, 14336, 176), (14336, 4096, 136), (11008, 4096, 538), (14336, 3584, 816),
        (4096, 4096, 2000), (8192, 8192, 1448), (1024, 4096, 1504), (768, 768, 584), (4096, 1024, 136),
        (10240, 2560, 1520), (14336, 4096, 432),
    )
)  # fmt: skip
SUITES: dict[str, tuple[str, int, Matrices]] = {
    f"{family}-{short}-L{L}": (dtype, L, matrices)
    for family, matrices in (("paper", PAPER_MATRICES), ("llama", LAYER_MATRICES), ("columns", COLUMN_MATRICES))
    for short, dtype in (("float32", "float32"), ("bf16", "bfloat16"))
    for L in (32, 64, 128)
}
"""Value type, vector length, and (name, M, K, Ns) of each matrix."""


def dense(M: int, K: int, n: int, L: int, dtype: str, seed: int = 0) -> Any:
    """Normal values [M, K] where a random n:32 pattern keeps them, on the device."""
    import cupy as cp

    rng = cp.random.default_rng(seed)
    keep = rng.random((M // L, K // 32, 32), dtype=np.float32).argsort(axis=2) < n
    x = rng.standard_normal((M, K), dtype=np.float32)
    x *= cp.repeat(keep.reshape(M // L, K), L, axis=0)
    return x.astype(sf.arrays.dtypes.VALUE_TYPES[dtype].numpy)


def measure(a: VectorNM, N: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row: the kernel that spmm() runs, or ``--kernel``, and cuBLAS."""
    import cupy as cp

    shape = (N, a.shape[1]) if options.torch_layout else (a.shape[1], N)
    B = cp.random.default_rng(1).standard_normal(shape, dtype=np.float32).astype(a.dtype)
    B = B.T if options.torch_layout else B
    crowd = contenders.ours(a, B, first=True)
    if options.kernel:
        out = cp.empty((a.shape[0], N), B.dtype, order="F" if options.torch_layout else "C")
        product = functools.partial(sf.plan(a, B=B, out=out, backend=options.kernel), B, out)
        crowd = [bench.Contender(options.kernel, product)]
    if options.compile_only:
        return {}
    case = bench.Case("", a, B, (*crowd, *contenders.dense(a, B)), a.dtype.name, {"nnz": a.stored})
    results = bench.compare(case, options.repeats, warmups=2, seconds=1.0, hot=False)
    mine, peer = (next(r for r in results if r.peer is peer) for peer in (False, True))
    row = {"kernel": mine.name, "us": mine.cold_us, "dense_us": peer.cold_us, "error": mine.error, "note": mine.note}
    predicted = cost.estimate(a, N, b_layout="col" if options.torch_layout else "row")
    row |= {"predicted_us": predicted.expected_us, "bound": predicted.bound, "floor_us": predicted.floor_us}
    return row | {"ratio": peer.cold_us / mine.cold_us, "tflops": mine.useful_tflops}


def conversions(dtype: str, L: int, repeats: int) -> list[dict[str, Any]]:
    """Dense to vector n:m and back on the device: GB of dense bytes a second, and host-visible time of a call."""
    import cupy as cp

    rows = []
    clock = bench._DeviceClock(cp.zeros(1, np.float32))
    for size, tile in ((4096, {}), (4096, {"tile_rows": 128, "tile_cols": 128}), (8192, {})):
        x = dense(size, size, 8, L, dtype)
        params: dict[str, Any] = {"n": 8, "m": 32, "vector_length": L, **tile}
        a = VectorNM.from_dense(x, **params)
        assert a.to_csr() == sf.CSR.from_dense(x), "the conversion is wrong"
        runs = [lambda x=x, p=params: VectorNM.from_dense(x, **p), a.to_dense]
        there, back = clock.take_turns(runs, repeats, 3, cold=True, seconds=1.0)
        row = {"case": f"{dtype} {size}x{size} 8:32 L={L}{' packed' if tile else ''}"}
        rows.append(row | {"to_us": there, "to_gbps": x.nbytes / there / 1e3, "back_us": back,
                           "back_gbps": x.nbytes / back / 1e3})  # fmt: skip
    return rows


def mean(values: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / len(values))


def table(suite: str, rows: list[dict[str, Any]]) -> str:
    """Speed-up over dense by shape and pattern, time and prediction beside, and the means."""
    head = ["shape (M, N, K)", *(f"{n}:32" for n in KEPT)]
    lines = [f"### {suite}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    key = lambda r: (r["name"], r["M"], r["N"], r["K"])  # noqa: E731
    for where, group in itertools.groupby(sorted(rows, key=key), key):
        by = {r["n"]: r for r in group}
        cells = [
            f"{by[n]['ratio']:.2f}x, {by[n]['us']:.0f} us ({by[n]['predicted_us']:.0f})" if n in by else "-"
            for n in KEPT
        ]
        lines.append(f"| {where[0]} {where[1]}, {where[2]}, {where[3]} | " + " | ".join(cells) + " |")
    ratios = [[r["ratio"] for r in rows if r["n"] == n] for n in KEPT]
    lines.append("| geometric mean | " + " | ".join(f"{mean(r):.2f}x" if r else "-" for r in ratios) + " |")
    off = sorted(r["predicted_us"] / r["us"] - 1 for r in rows)
    worst, error = min(r["ratio"] for r in rows), max(r["error"] for r in rows)
    lines += [
        "",
        f"Worst {worst:.2f}x; largest error {error:.2f} of the bound. In parentheses the expected ratio:",
    ]
    lines += [f"{100 * off[0]:+.0f} % .. {100 * off[-1]:+.0f} %, {sum(abs(d) <= 0.3 for d in off)} of {len(off)} cases "
              "within 30 %."]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the chosen suites. A case that fails becomes a line with its error, and the run goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join((*SUITES, "conversions")))
    parser.add_argument("--kept", default=",".join(map(str, KEPT)))
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new case after this long")
    parser.add_argument("--torch-layout", action="store_true")
    parser.add_argument("--kernel", default="", help="this kernel instead of the one that spmm() runs")
    parser.add_argument("--compile-only", action="store_true", help="fill the compiler's cache, measure nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + options.seconds
    import cupy as cp

    environment = {} if options.compile_only else bench.environment(cp.zeros(1, np.float32))
    tables: dict[str, list[dict[str, Any]]] = {}
    for suite in options.only.split(","):
        rows = tables.setdefault(suite, [])
        if suite == "conversions":
            if not options.compile_only:
                rows += conversions("bfloat16", 32, options.repeats) + conversions("float32", 32, options.repeats)
                print(*rows, sep="\n", flush=True)
            continue
        dtype, L, matrices = SUITES[suite]
        for (name, M, K, widths), n in itertools.product(matrices, map(int, options.kept.split(","))):
            if time.perf_counter() > end:
                break
            a = VectorNM.from_dense(dense(M, K, n, L, dtype), n=n, m=32, vector_length=L)
            for N in widths:
                try:
                    row = measure(a, N, options)
                except (sf.errors.SpformatError, RuntimeError, ValueError) as e:
                    print(f"{suite} {M}x{K} N={N}: {type(e).__name__}: {str(e).splitlines()[0][:200]}", flush=True)
                    continue
                if row:
                    rows.append({"name": name, "M": M, "N": N, "K": K, "n": n, "L": L, "dtype": dtype} | row)
                    print(rows[-1], flush=True)
            cp.get_default_memory_pool().free_all_blocks()
        (options.out / "vector_nm.json").write_text(json.dumps({"environment": environment, "rows": tables}))
        text = [table(s, r) for s, r in tables.items() if r and s != "conversions"]
        (options.out / "vector_nm.md").write_text("\n".join([json.dumps(environment) + "\n", *text]))
    (options.out / "vector_nm.json").write_text(json.dumps({"environment": environment, "rows": tables}))


if __name__ == "__main__":
    main()
