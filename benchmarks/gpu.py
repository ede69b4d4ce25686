"""The GPU tables of docs/results, in one command: python benchmarks/gpu.py [--only two-four,csr,..] [--out DIR]

Writes results.json, table.md and ratios.svg. Random normal values, correctness checked first, alternating
runs, cold and hot L2, medians. Peers: dense cuBLAS, cuSPARSE, torch (2:4 through cuSPARSELt, BSR) when there.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import spformat as sf
from spformat.formats.base import Format
from spformat.interop.matrices import read_matrix
from spformat.measure import bench, contenders

MATRICES = Path(__file__).parent.parent / "fixtures" / "matrices"
Suite = Iterator[tuple[str, Callable[[], Format], tuple[int, ...]]]


def _cupy() -> Any:
    import cupy

    return cupy


def _normal(cp: Any, shape: tuple[int, int], dtype: str, seed: int = 0) -> Any:
    return (
        cp.random.default_rng(seed)
        .standard_normal(shape, dtype=np.float32)
        .astype(sf.arrays.dtypes.VALUE_TYPES[dtype].numpy)
    )


def _masked(x: Any, keep: Any) -> Any:
    x.view(f"uint{8 * x.itemsize}")[~keep] = 0  # in place, as bits: cupy.where would widen bfloat16
    return x


def random_two_four(M: int, K: int) -> Format:
    """bf16 normals, two of each four kept at random."""
    cp = _cupy()
    keep = (cp.random.default_rng(1).random((M, K // 4, 4), dtype=np.float32).argsort(axis=2) < 2).reshape(M, K)
    return sf.convert(_masked(_normal(cp, (M, K), "bfloat16"), keep), "two-four", meta_order="fragment")


def two_four() -> Suite:
    """2:4 bf16: large, middle and few tokens."""
    for M, N, K in (
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (11008, 4096, 4096),
        (4096, 4096, 11008),
    ):
        yield f"2:4 bf16 {M}x{K}", lambda M=M, K=K: random_two_four(M, K), (N,)
    for M in (4096, 11008, 14336):
        yield f"2:4 bf16 {M}x4096", lambda M=M: random_two_four(M, 4096), (1, 8, 16, 32, 64, 256)


def vector_nm() -> Suite:
    """Vector n:m, fp32 at L = 32, bf16 at L = 128 and 32, 4096^3."""
    cp = _cupy()

    def make(n: int, m: int, L: int, dtype: str) -> Format:
        M = K = 4096
        keep = cp.random.default_rng(2).random((M // L, K // m, m), dtype=np.float32).argsort(axis=2) < n
        keep = cp.repeat(keep.reshape(M // L, K), L, axis=0)
        return sf.convert(_masked(_normal(cp, (M, K), dtype), keep), "vector-nm", n=n, m=m, vector_length=L)

    for dtype, L in (("float32", 32), ("bfloat16", 128), ("bfloat16", 32)):
        for n in (16, 12, 8, 4):
            yield f"vector {n}:32 L={L} {dtype} 4096x4096", lambda n=n, L=L, d=dtype: make(n, 32, L, d), (4096,)


def bsr() -> Suite:
    """BSR and DBSR bf16: block sizes by sparsity at 4096^3, and the pruned-BERT shapes."""
    cp = _cupy()

    def make(M: int, K: int, b: int, density: float, fmt: str) -> Format:
        keep = cp.random.default_rng(3).random((M // b, K // b), dtype=np.float32) < density
        keep = cp.repeat(cp.repeat(keep, b, axis=0), b, axis=1)
        return sf.convert(_masked(_normal(cp, (M, K), "bfloat16"), keep), fmt, blocksize=(b, b))

    for b in (128, 64, 32, 16):
        for density in (0.5, 0.2, 0.07):
            label = f"bsr {b}x{b} {100 * (1 - density):.0f} % bf16 4096x4096"
            yield label, lambda b=b, d=density: make(4096, 4096, b, d, "bsr"), (4096,)
    yield "dbsr 64x64 80 % bf16 4096x4096", lambda: make(4096, 4096, 64, 0.2, "dbsr"), (4096,)
    for M, K in ((768, 768), (3072, 768), (768, 3072)):
        for fmt in ("bsr", "dbsr"):
            yield f"{fmt} 32x32 93 % bf16 {M}x{K}", lambda M=M, K=K, f=fmt: make(M, K, 32, 0.07, f), (512,)


def unstructured() -> Suite:
    """SR-BCRS at 4096x4096x512 fp16, and bitmask at few tokens bf16."""
    cp = _cupy()

    def make(M: int, K: int, density: float, dtype: str, fmt: str, **params: Any) -> Format:
        keep = cp.random.default_rng(4).random((M, K), dtype=np.float32) < density
        return sf.convert(_masked(_normal(cp, (M, K), dtype), keep), fmt, **params)

    for density in (0.1, 0.05, 0.02):
        label = f"sr-bcrs 8x16 {100 * (1 - density):.0f} % fp16 4096x4096"
        yield label, lambda d=density: make(4096, 4096, d, "float16", "sr-bcrs"), (512,)
    for M in (4096, 14336):
        for density in (0.5, 0.3):
            label = f"bitmask {100 * (1 - density):.0f} % bf16 {M}x4096"
            yield label, lambda M=M, d=density: make(M, 4096, d, "bfloat16", "bitmask"), (1, 16, 64)


def graphs(fmt: str, folder: Path) -> Suite:
    """Real and synthetic sparse matrices, fp32 and fp16, N = 32, 128, 512."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".npz", ".mtx", ".smtx"):
            for dtype in ("float32", "float16"):
                yield f"{fmt} {path.stem} {dtype}", lambda p=path, d=dtype: _real(p, d, fmt), (32, 128, 512)
    for name, nodes, edges, alpha in SYNTHETIC:
        for dtype in ("float32", "float16"):
            yield (
                f"{fmt} {name} {dtype}",
                lambda a=(nodes, edges, alpha), d=dtype: _power_law(*a, d, fmt),
                (32, 128, 512),
            )


def _real(path: Path, dtype: str, fmt: str) -> Format:
    return sf.convert(read_matrix(path, values="normal", seed=0, dtype=dtype), fmt).to("cuda")


SYNTHETIC = (
    ("arxiv-like", 169_343, 1_166_243, 1.5),
    ("ppi-like", 44_906, 1_271_274, 1.6),
    ("proteins-like", 132_534, 39_561_252, math.inf),
)
"""Name, nodes, edges, and the exponent of the degrees; infinite for equal ones."""


def _power_law(nodes: int, edges: int, alpha: float, dtype: str, fmt: str) -> Format:
    """Row degrees Poisson round a Pareto sample scaled to the edge count, columns uniform, duplicates merged."""
    rng = np.random.default_rng(6)
    mean = rng.pareto(alpha, nodes) + 1 if alpha < math.inf else np.ones(nodes)
    degree = np.minimum(rng.poisson(mean * edges / mean.sum()), nodes)
    rows = np.repeat(np.arange(nodes), degree)
    keys = np.sort(rows * nodes + rng.integers(0, nodes, rows.size))
    keys = keys[np.diff(keys, prepend=-1) > 0]  # np.unique takes a minute for 40 million
    values = rng.standard_normal(keys.size).astype(sf.arrays.dtypes.VALUE_TYPES[dtype].numpy)
    return sf.convert(sf.CSR.from_coordinates((nodes, nodes), keys // nodes, keys % nodes, values), fmt).to("cuda")


SUITES: dict[str, Callable[[], Suite]] = {
    "two-four": two_four,
    "vector-nm": vector_nm,
    "bsr": bsr,
    "unstructured": unstructured,
    "csr": lambda: graphs("csr", MATRICES),
    "ell-buckets": lambda: graphs("ell-buckets", MATRICES),
}


TYPE_LABELS = {"bfloat16": ("bf16", "bfloat16"), "float16": ("fp16", "float16"), "float32": ("fp32", "float32")}


def measure(name: str, a: Format, n: int, repeats: int) -> tuple[list[bench.Result], dict[str, Any]]:
    """Every contender on one case, and the summary row of the table."""
    if not any(label in name for label in TYPE_LABELS[a.dtype.name]):
        raise ValueError(f"{name}: the matrix holds {a.dtype.name}")  # a table must not name another type
    B = contenders.operand(a, n)
    dense_fits = a.shape[0] * a.shape[1] <= bench.DENSE
    crowd = contenders.ours(a, B)
    if dense_fits:
        crowd += contenders.dense(a, B) + contenders.torch_peers(a, B)
    if a.name in ("csr", "ell-buckets", "sr-bcrs", "bitmask"):
        crowd += contenders.sparse_library(a, B)
    case = bench.Case(name, a, B, tuple(crowd), a.dtype.name, {"nnz": a.nnz})
    results = bench.compare(case, repeats, seconds=0.6)
    timed = [r for r in results if r.cold_us == r.cold_us]
    mine, peers = [r for r in timed if not r.peer], [r for r in timed if r.peer]
    row: dict[str, Any] = {"case": name, "N": n}
    if mine:
        # spmm() runs the first kernel that accepts: its time is that of the product; the best one is given beside it.
        first = next(r for r in mine if r.name == next(c.name for c in crowd if not c.peer))
        best = min(mine, key=lambda r: r.cold_us)
        row |= {"chosen": first.name, "us": first.cold_us, "hot_us": first.hot_us, "host_us": first.host_us,
                "error": first.error, "tflops": first.useful_tflops, "gbps": first.gbytes_per_s,
                "best": best.name, "best_us": best.cold_us}  # fmt: skip
    dense = [r for r in peers if "dense" in r.name]
    others = [r for r in peers if "dense" not in r.name]
    for label, group in (("dense", dense), ("peer", others)):
        if group:
            fastest = min(group, key=lambda r: r.cold_us)
            row |= {label: fastest.name, f"{label}_us": fastest.cold_us}
            if mine:
                row[f"vs_{label}"] = fastest.cold_us / row["us"]
    return results, row


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/results/*-gpu-*.md."""
    head = ("case", "N", "kernel", "us cold / hot", "host us", "useful TFLOP/s", "GB/s", "dense us", "x dense",
            "best peer", "peer us", "x peer", "error")  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:

        def num(key: str, digits: int = 1, r: dict[str, Any] = r) -> str:
            v = r.get(key)
            return "-" if v is None or v != v else f"{v:.{digits}f}"

        cells = [
            r["case"], r["N"], r.get("chosen", "none"), f"{num('us')} / {num('hot_us')}", num("host_us"),
            num("tflops", 2), num("gbps", 0), num("dense_us"), num("vs_dense", 2), r.get("peer", "-"), num("peer_us"),
            num("vs_peer", 2), num("error", 2),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for label in ("dense", "peer"):
        ratios = [r[f"vs_{label}"] for r in rows if r.get(f"vs_{label}")]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(
                f"\nGeometric mean against {label}: {mean:.2f}x over {len(ratios)} cases, worst {min(ratios):.2f}x."
            )
    return "\n".join(lines) + "\n"


WIDTHS = ((16, "1 to 16 columns"), (256, "17 to 256"), (math.inf, "more than 256"))


def family(row: dict[str, Any]) -> tuple[str, str]:
    """The line of the plot on which a case is: its format, and how many columns B has."""
    return row["case"].split()[0], next(text for most, text in WIDTHS if int(row["N"]) <= most)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratios against dense and the best peer: a line for each format and number of columns, a dot for each case."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "spformat"  # equal tables give equal bytes
    import matplotlib.pyplot as plt

    shown = [r for r in rows if r.get("vs_dense") or r.get("vs_peer")]
    formats = list(dict.fromkeys(family(r)[0] for r in shown))
    lines = [(name, text) for name in formats for _, text in WIDTHS if (name, text) in set(map(family, shown))]
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.42 * len(lines)), layout="constrained")
    series = (("vs_dense", -0.16, "tab:gray", "dense cuBLAS"), ("vs_peer", 0.16, "tab:blue", "best other library"))
    for key, offset, color, label in series:
        dots = [(r[key], lines.index(family(r)) + offset) for r in shown if r.get(key)]
        axis.plot(*zip(*dots, strict=True), "o", markersize=5, alpha=0.45, markeredgewidth=0, color=color, label=label)
        for i, line in enumerate(lines):
            ratios = [r[key] for r in shown if r.get(key) and family(r) == line]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                axis.plot(mean, i + offset, "|", markersize=11, markeredgewidth=2.5, color=color)
    axis.set_yticks(range(len(lines)), [f"{name}, {text}" for name, text in lines])
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}x")
    axis.axvline(1, color="black", linewidth=1)
    axis.grid(axis="both", linewidth=0.3)
    axis.set_ylim(len(lines) - 0.5, -0.5)
    axis.set_xlabel("speed against (right of the line: ours is faster); | is the geometric mean")
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path, metadata={"Date": None})


def rows_of(page: str) -> list[dict[str, Any]]:
    """The rows of a page that holds tables of ``markdown``, as ``plot`` wants them."""
    rows = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 13 and cells[1].isdigit():
            ratios = {"vs_dense": cells[8], "vs_peer": cells[11]}
            rows.append({"case": cells[0], "N": cells[1]} | {k: float(v) for k, v in ratios.items() if v != "-"})
    return rows


def main() -> None:
    """Run the chosen suites. A case that fails becomes a row with its error, and the run goes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SUITES))
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new cases after this long")
    parser.add_argument(
        "--matrices", type=Path, help="another folder of .npz, .mtx, .smtx for the suites csr, ell-buckets"
    )
    parser.add_argument("--plot", type=Path, metavar="PAGE", help="only draw OUT/ratios.svg of a page with its tables")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.plot:
        plot(rows_of(options.plot.read_text()), options.out / "ratios.svg")
        return
    if options.matrices:
        SUITES.update({fmt: lambda f=fmt: graphs(f, options.matrices) for fmt in ("csr", "ell-buckets")})
    end = time.perf_counter() + options.seconds
    cp = _cupy()
    environment = bench.environment(cp.zeros(1, np.float32))
    tables: dict[str, list[dict[str, Any]]] = {}
    raw: list[dict[str, Any]] = []
    for suite in options.only.split(","):
        rows = tables.setdefault(suite, [])
        for name, make, widths in SUITES[suite]():
            if time.perf_counter() > end:
                break
            try:
                a = make()
                for n in widths:
                    results, row = measure(name, a, n, options.repeats)
                    raw += bench.to_json(results)
                    rows.append(row)
                    print(f"{name} N={n}: {bench.verdict(results)}", flush=True)
            except (sf.errors.SpformatError, RuntimeError, ValueError) as e:
                print(f"{name}: {type(e).__name__}: {str(e).splitlines()[0][:200]}", flush=True)
            cp.get_default_memory_pool().free_all_blocks()
        (options.out / "results.json").write_text(json.dumps({"environment": environment, "rows": tables, "raw": raw}))
        text = "\n".join(f"### {s}\n\n{markdown(r)}" for s, r in tables.items() if r)
        (options.out / "table.md").write_text(f"{json.dumps(environment)}\n\n{text}")
    try:
        plot([r for rows in tables.values() for r in rows], options.out / "ratios.svg")
    except ImportError:
        print("matplotlib is not installed: no plot")


if __name__ == "__main__":
    main()
