"""The evaluations of papers on one GPU: python benchmarks/papers.py [bert nm graphs tca parts] [--seconds 60]

bert    SparseTIR, pruned BERT: its linear layers with 512 and 4096 columns, float16. Structured: blocks of 32 x 32, of
        which 0.5 to 20 % are kept, half of the block rows empty. Unstructured: 1 to 20 % of the values. BSR, DBSR and
        SR-BCRS (t = 8, g = 16 and 32) beside dense cuBLAS and cuSPARSE
nm      NM-SpMM: 256 to 4096 columns, the 20 layers of its Llama shapes, 0 to 87.5 % zeros, float32, vectors of 32; what
        spmm() runs (three TF32 products) and the kernel on CUDA cores, as the paper's, beside dense cuBLAS
graphs  SparseTIR: padding of hyb(c, k) over c, and hyb beside CSR and cuSPARSE with 32 to 512 columns, float32
tca     TCA-SpMM: its kernel, with sums between lanes and in shared memory, beside CSR on CUDA cores and cuSPARSE: real
        matrices and graphs, float16 and float32 (three TF32 products), 32, 128 and 512 columns
parts   SparseTIR: hyb(1), hyb(2), hyb(4) and hyb(8) beside CSR on a graph of Reddit's size, rows and columns skewed,
        128 columns, float32; a part of B stays in L2 while it is worked on. In no default run: python papers.py parts

``--seconds`` bounds each of them; cases that are not reached are counted. Cold L2, medians, contenders in turn; every
result is checked first.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from gpu import MATRICES, SYNTHETIC, _power_law, _real

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.csr.spmm_csr_tc import BY_LANES, SHARED
from spformat.formats.base import Format
from spformat.measure import bench, contenders
from spformat.products.tiles import forced

Row = dict[str, Any]
Case = tuple[str, int, Sequence[tuple[str, Format]], Sequence[Callable[[Format, Any], list[bench.Contender]]]]
"""Name, columns, (label, matrix) of each of our formats, and the peers, which get the first matrix."""

BERT = ((768, 768),) * 4 + ((3072, 768), (768, 3072))
"""M x K of query, key, value, attention output, and the two layers of the feed-forward network."""
WIDTHS, KEPT = (256, 512, 1024, 2048, 4096), (32, 16, 12, 8, 4)
HIDDEN = ((2048, 5632), (4096, 11008), (5120, 13824), (6656, 17920), (8192, 22016))
"""(h, f): the layers are (h, h), (3h, h), (h, f) and (f, h), given as the paper's (n, k); ours are M = n, K = k."""
DEVICE_FLOAT32 = 67e12
"""Operations a second of the CUDA cores of an H200, from its datasheet."""


def normal(shape: tuple[int, int], dtype: str, seed: int) -> Any:
    """Normal values on the device."""
    import cupy as cp

    return cp.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(VALUE_TYPES[dtype].numpy)


def spread(count: int, low: float, high: float) -> Iterator[float]:
    """Densities from low to high in equal ratios."""
    return (low * (high / low) ** (i / max(1, count - 1)) for i in range(count))


def bert() -> Iterator[Case]:
    """Structured layers first, then unstructured ones."""
    import cupy as cp

    rng = cp.random.default_rng(5)
    for i, ((M, K), share) in enumerate(zip(BERT * 2, spread(12, 0.005, 0.2), strict=True)):
        keep = rng.random((M // 32, K // 32), dtype=np.float32) < 2 * share
        keep[cp.asarray(np.random.default_rng(i).permutation(M // 32)[: M // 64])] = False
        x = normal((M, K), "float16", i) * cp.repeat(cp.repeat(keep, 32, axis=0), 32, axis=1)
        forms = [(f, sf.convert(x, f, blocksize=(32, 32))) for f in ("bsr", "dbsr")]
        yield from ((f"blocks {M}x{K} {100 * share:.1f} %", n, forms, [contenders.dense]) for n in (512, 4096))
    for i, ((M, K), share) in enumerate(zip(BERT, spread(6, 0.01, 0.2), strict=True)):
        x = normal((M, K), "float16", i) * (rng.random((M, K), dtype=np.float32) < share)
        forms = [(f"sr-bcrs(8, {g})", sf.convert(x, "sr-bcrs", vector_length=8, stride=g)) for g in (16, 32)]
        forms.append(("bsr 32", sf.convert(x, "bsr", blocksize=(32, 32))))
        peers = [contenders.dense, contenders.sparse_library]
        yield from ((f"anywhere {M}x{K} {100 * share:.1f} %", n, forms, peers) for n in (512, 4096))


def nm() -> Iterator[Case]:
    """A layer at a time, all its widths; the layers of all sizes in turn."""
    import cupy as cp

    shapes = [s for h, f in HIDDEN for s in ((h, h), (3 * h, h), (h, f), (f, h))]
    shapes.sort(key=lambda s: s[0] * s[1])
    for (M, K), n in itertools.product(shapes, KEPT):
        order = cp.random.default_rng(n).random((M // 32, K // 32, 32), dtype=np.float32).argsort(axis=2) < n
        x = normal((M, K), "float32", n) * cp.repeat(order.reshape(M // 32, K), 32, axis=0)
        forms = [(f"{n}:32", sf.convert(x, "vector-nm", n=n, m=32, vector_length=32))]
        del x, order
        yield from ((f"{M}x{K} {n}:32", width, forms, [cuda_cores, contenders.dense]) for width in WIDTHS)


EXACT = {"CUDA cores": "cuda.spmm_vector_nm", "CUDA cores, sm_90": "cuda.spmm_vector_nm_sm90"}


def cuda_cores(a: Format, B: Any) -> list[bench.Contender]:
    """Vector n:m in exact float32, by each kernel that takes it on this device."""
    import cupy as cp

    out, some = cp.empty((a.shape[0], B.shape[1]), a.dtype), []
    for label, name in EXACT.items():
        if sf.explain(a, B, backend=name).chosen:
            product = functools.partial(sf.plan(a, B=B, out=out, backend=name), B, out=out)
            some.append(bench.Contender(label, product))
    return some


def graphs() -> Iterator[Case]:
    """Real matrices, then graphs of the sizes of the paper."""
    makers: list[tuple[str, Callable[[str], Format]]] = []
    for path in sorted(MATRICES.glob("*.npz")):
        makers.append((path.stem, functools.partial(_real, path, "float32")))
    for name, nodes, edges, alpha in SYNTHETIC:
        makers.append((name, functools.partial(_power_law, nodes, edges, alpha, "float32")))
    for name, make in makers:
        a = make("csr")
        host = a.to("cpu")
        for c in (1, 2, 4, 8, 16):
            hyb = sf.convert(host, "ell-buckets", column_parts=c)
            print(
                f"padding  {name} hyb({c}, {hyb.max_width}): {100 * (1 - a.nnz / max(1, hyb.stored)):.1f} %", flush=True
            )
        forms = [("csr", a), ("hyb(1)", make("ell-buckets"))]
        yield from ((name, n, forms, [contenders.sparse_library]) for n in (32, 64, 128, 256, 512))


def tca() -> Iterator[Case]:
    """Real matrices, then graphs."""
    makers: list[tuple[str, Callable[[str, str], Format]]] = []
    for path in sorted(MATRICES.glob("*.npz")):
        makers.append((path.stem, functools.partial(_real, path)))
    for name, nodes, edges, alpha in SYNTHETIC[:2]:
        makers.append((name, functools.partial(_power_law, nodes, edges, alpha)))
    for (name, make), dtype in itertools.product(makers, ("float16", "float32")):
        a = make(dtype, "csr")
        peers = [functools.partial(tensor_cores, tile) for tile in (BY_LANES, SHARED)]
        for n in (32, 128, 512):
            yield f"{name} {dtype}", n, [("csr", a)], [*peers, contenders.sparse_library]


def tensor_cores(tile: str, a: Format, B: Any) -> list[bench.Contender]:
    """TCA-SpMM with one of its two ways to add."""
    import cupy as cp

    C = cp.empty((a.shape[0], B.shape[1]), a.dtype)
    with forced("cuda.spmm_csr_tc", tile):
        product = sf.plan(a, B=B, out=C, backend="cuda.spmm_csr_tc")
    label = "tca, shared sums" if tile == SHARED else "tca"
    return [bench.Contender(label, functools.partial(product, B, out=C))]


REDDIT = 232_965, 114_600_000
"""Nodes and edges of the graph of posts; its own edges are not here, so rows and columns are drawn from power laws."""


def parts() -> Iterator[Case]:
    """One graph, built on the device: a host would need minutes."""
    import cupy as cp

    nodes, edges = REDDIT
    rng, host = cp.random.default_rng(6), np.random.default_rng(6)
    weight = host.pareto(1.5, nodes) + 1
    degree = np.minimum(host.poisson(weight * edges / weight.sum()), nodes // 4)
    rows = cp.repeat(cp.arange(nodes), degree.tolist())
    near = host.permutation(nodes)  # columns that are drawn often lie anywhere
    columns = cp.asarray(near)[(nodes * rng.random(rows.size, dtype=np.float64) ** 2).astype(np.int64)]
    keys = cp.unique(rows * nodes + columns)
    del rows, columns
    values = rng.standard_normal(keys.size, dtype=np.float32)
    indptr = cp.searchsorted(keys, cp.arange(nodes + 1) * nodes).astype(np.int32)
    a = sf.CSR(shape=(nodes, nodes), indptr=indptr, indices=(keys % nodes).astype(np.int32), data=values).validate()
    del keys
    print(f"graph: {nodes} nodes, {a.nnz} edges after duplicates are merged, longest row {int(cp.diff(indptr).max())}")
    forms: list[tuple[str, Format]] = [("csr", a)]
    for c in (1, 2, 4, 8):
        forms.append((f"hyb({c})", sf.convert(a, "ell-buckets", column_parts=c)))
        cp.get_default_memory_pool().free_all_blocks()
    yield "power law of Reddit's size", 128, forms, []


SUITES: dict[str, Callable[[], Iterator[Case]]] = {"bert": bert, "nm": nm, "graphs": graphs, "tca": tca, "parts": parts}


def measure(case: Case, seconds: float) -> Row:
    """Microseconds of each contender whose result is right."""
    import cupy as cp

    name, n, forms, peers = case
    first = forms[0][1]
    B = normal((first.shape[1], n), first.dtype.name, 1)
    crowd = []
    for label, a in forms:
        C = cp.empty((a.shape[0], n), a.dtype)
        crowd.append(bench.Contender(label, functools.partial(sf.plan(a, B=B, out=C), B, out=C)))
    crowd += [c for peer in peers for c in peer(first, B)]
    results = bench.compare(bench.Case(name, first, B, tuple(crowd), first.dtype.name, {"nnz": first.nnz}), 9, 4,
                            seconds, hot=False)  # fmt: skip
    us = {r.name: r.cold_us for r in results if r.cold_us == r.cold_us and r.error <= 1}
    wrong = {r.name: r.note or r.error for r in results if r.name not in us}
    (M, K), stored = first.shape, first.stored
    moved = first.nbytes + (K + M) * n * first.dtype.itemsize
    return {"name": name, "n": n, "M": M, "K": K, "us": us, "wrong": wrong, "flop": 2.0 * stored * n, "bytes": moved}


def table(rows: list[Row], group: Callable[[Row], str]) -> Iterator[str]:
    """How many times faster than each peer: geometric mean and worst of the rows of a group."""
    peers = list(dict.fromkeys(k for r in rows for k in r["us"] if k.startswith(("dense", "cuSPARSE"))))
    ours = list(dict.fromkeys(k for r in rows for k in r["us"] if k not in peers))
    pairs = [(a, b) for a in ours for b in (*peers, *ours) if a != b]
    yield "| | " + " | ".join(f"{a} over {b}" for a, b in pairs) + " |"
    yield "|---|" + "---|" * len(pairs)
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[group(row)].append(row)
    for key, some in groups.items():
        cells = []
        for a, b in pairs:
            x = [r["us"][b] / r["us"][a] for r in some if a in r["us"] and b in r["us"]]
            cells.append(f"{geometric_mean(x):.2f} / {min(x):.2f} ({len(x)})" if x else "-")
        yield f"| {key} | " + " | ".join(cells) + " |"


def summary(suite: str, rows: list[Row]) -> Iterator[str]:
    """The table of a suite: geometric mean / worst (cases)."""
    if suite == "bert":
        for kind in ("blocks", "anywhere"):
            some = [r for r in rows if r["name"].startswith(kind)]
            yield from table(some, lambda r: f"{r['name'].rpartition(' ')[0].rpartition(' ')[0]}, N = {r['n']}")
            yield ""
    elif suite == "nm":
        for row in rows:
            row["us"] = {"n:m" if ":32" in k else k: v for k, v in row["us"].items()}
        yield from table(rows, lambda r: f"{r['name'].split()[1]}, {r['n']} columns")
        yield ""
        yield from table(rows, lambda r: r["name"].split()[1])
    else:
        yield from table(rows, lambda r: f"{r['name']}, {r['n']} columns")
    for row in rows:
        for name, why in row["wrong"].items():
            yield f"not counted: {row['name']}, {row['n']} columns, {name}: {why}"


def plot(rows: list[Row], path: Path, memory: float) -> None:
    """The roofline of float32 on CUDA cores, as SVG: a dot for the faster kernel there, a ring for spmm(), for each
    product of ``nm``.

    memory: bytes a second that a copy on the device reads and writes.
    """
    left, top = 70, 20
    edge = DEVICE_FLOAT32 / memory

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = left + 120 * (math.log10(intensity) + 0.5)
        return round(x, 1), round(top + 150 * (math.log10(2 * DEVICE_FLOAT32) - math.log10(rate)), 1)

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'

    roof = ((0.5, 0.5 * memory), (edge, DEVICE_FLOAT32), (3000.0, DEVICE_FLOAT32))
    points = " ".join(f"{x},{y}" for x, y in (at(*p) for p in roof))
    shapes = [f'<polyline fill="none" stroke="black" points="{points}"/>']
    colours = {"32:32": "#666", "16:32": "#1b6ca8", "12:32": "#2a9d62", "8:32": "#d98324", "4:32": "#b23a48"}
    for row in rows:
        colour = colours[row["name"].split()[1]]
        exact = min((row["us"][kind] for kind in EXACT if kind in row["us"]), default=0.0)
        for us, look in ((row["us"].get("n:m"), f'fill="none" stroke="{colour}"'), (exact, f'fill="{colour}"')):
            if us:
                x, y = at(row["flop"] / row["bytes"], row["flop"] / us * 1e6)
                shapes.append(f'<circle cx="{x}" cy="{y}" r="2.5" {look}/>')
    for i, (kind, colour) in enumerate(colours.items()):
        shapes.append(f'<circle cx="{left + 20}" cy="{top + 18 * i + 10}" r="4" fill="{colour}"/>')
        shapes.append(text(left + 30, top + 18 * i + 14, kind, "start"))
    shapes += [text(at(v, 1e12)[0], 395, str(v)) for v in (1, 10, 100, 1000)]
    shapes += [text(left - 8, at(1, v)[1], f"{v / 1e12:.0f}", "end") for v in (1e12, 1e13, 1e14)]
    shapes.append(text(300, 415, "operations for each byte from memory"))
    shapes.append(text(8, 14, "Tera-operations a second over the kept values", "start"))
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 425" font-family="sans-serif" font-size="12">'
    path.write_text(head + "\n".join(shapes) + "</svg>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", default=["bert", "nm", "graphs"], metavar="suite", help=", ".join(SUITES))
    parser.add_argument("--seconds", type=float, default=60, help="for each suite")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="SVG of the roofline of nm")
    options = parser.parse_args()
    import cupy as cp

    about, results = bench.environment(cp.zeros(1)), {}
    print(json.dumps(about))
    for suite in options.suites:
        end, rows, left = time.monotonic() + options.seconds, [], 0
        for case in SUITES[suite]():
            if time.monotonic() > end:
                left += 1
                break
            rows.append(measure(case, 0.1))
            if suite == "parts":
                print(rows[-1]["us"], flush=True)  # microseconds, beside the ratios of the table
            cp.get_default_memory_pool().free_all_blocks()
        print(f"\n### {suite}: {len(rows)} cases{', the time was over' if left else ''}\n")
        print("\n".join(summary(suite, rows)), flush=True)
        results[suite] = rows
    if options.json:
        options.json.write_text(json.dumps({"environment": about, "suites": results}) + "\n")
    if options.plot and "nm" in results:
        plot(results["nm"], options.plot, 1e12 * about["copy_tb_per_s"])


if __name__ == "__main__":
    main()
