"""Sums of parts in one launch, beside other formats: python benchmarks/sums.py [--out DIR] [--predict]

Pruned BERT layers (32x32 blocks and 2 % scatter), masks like BigBird's, power-law graphs with dense communities, 2:4
with 1 % outliers, rows of two lengths. Contenders: the two kernels of sums in one launch, the composed sum, the same
matrix in single formats and dense (cuBLAS). Every result is checked first; cold L2, contenders in turn, medians. Writes
sums.json and sums.md. --predict: the expected times instead, which need no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.formats.base import Format
from spformat.measure import bench, contenders
from spformat.preprocess import masks
from spformat.products.problem import Operand, Problem

FUSED, MERGED, COMPOSED = "cuda.spmm_sum_rows", "cuda.spmm_sum", "composed.sum_of_parts"
"""One launch with the blocks beside the rows; one whose tiles add everything; a product for each part."""
TARGET = ("BERT", "BigBird", "power law")
"""The matrices on which one launch should be 1.3 times as fast as the best other format."""


class Spec(NamedTuple):
    """A matrix and how it is divided."""

    name: str
    build: Callable[[np.random.Generator], Any]
    """A dense array of float32, or a CSR of float32."""
    rules: tuple[str, ...]
    single: tuple[str, ...]
    """Formats for the whole matrix."""
    columns: tuple[int, ...]
    dtypes: tuple[str, ...] = ("bfloat16",)


def blocks_and_scatter(M: int, K: int, b: int, kept: float, scatter: float, rng: np.random.Generator) -> Any:
    """Blocks of b x b kept at random, and single values anywhere."""
    keep = np.kron(rng.random((M // b, K // b)) < kept, np.ones((b, b), bool)) | (rng.random((M, K)) < scatter)
    return np.where(keep, rng.standard_normal((M, K), np.float32), np.float32(0))


def big_bird(length: int, b: int, scatter: float, rng: np.random.Generator) -> Any:
    """A window of three blocks, the first two block rows and columns, three random blocks a row, single pairs."""
    n = length // b
    at = np.abs(np.arange(n)[:, None] - np.arange(n)) <= 1
    at[:2] = at[:, :2] = True
    at[np.arange(n)[:, None], rng.integers(0, n, (n, 3))] = True
    keep = np.kron(at, np.ones((b, b), bool)) | (rng.random((length, length)) < scatter)
    return np.where(keep, rng.random((length, length), np.float32), np.float32(0))


def communities(nodes: int, edges: int, groups: int, rng: np.random.Generator) -> Any:
    """A power-law graph (Pareto 1.6), and ``groups`` groups of 32 neighbours that know 60 % of each other."""
    degree = rng.pareto(1.6, nodes) + 1
    rows = np.repeat(np.arange(nodes), rng.poisson(degree * edges / degree.sum()))
    columns = rng.integers(0, nodes, rows.size)
    group = 32 * rng.permutation(nodes // 32)[:groups, None, None]
    inside = rng.random((groups, 32, 32)) < 0.6
    r, c = (np.broadcast_to(group + x, inside.shape)[inside] for x in (np.arange(32)[:, None], np.arange(32)))
    keys = np.unique(np.concatenate((rows, r)) * nodes + np.concatenate((columns, c)))
    values = rng.standard_normal(keys.size, np.float32)
    return sf.CSR.from_coordinates((nodes, nodes), keys // nodes, keys % nodes, values)


def two_four_and_outliers(M: int, K: int, share: float, rng: np.random.Generator) -> Any:
    """2:4 by magnitude, and a share of what that leaves out."""
    x = rng.standard_normal((M, K), np.float32)
    return np.where(masks.magnitude_nm(x, 2, 4) | (rng.random((M, K)) < 2 * share), x, np.float32(0))


def two_lengths(rows: int, columns: int, rng: np.random.Generator) -> Any:
    """Rows of 4 values, one in eight of 32."""
    lengths = np.where(rng.random(rows) < 1 / 8, 32, 4)
    row = np.repeat(np.arange(rows), lengths)
    keys = np.unique(row * columns + rng.integers(0, columns, row.size))
    values = rng.standard_normal(keys.size, np.float32)
    return sf.CSR.from_coordinates((rows, columns), keys // columns, keys % columns, values)


def specs() -> Iterator[Spec]:
    blocks, both = ("bsr:32x32,density>=0.5", "csr"), ("bfloat16", "float32")
    for M, K in ((768, 768), (3072, 768), (768, 3072)):
        build = functools.partial(blocks_and_scatter, M, K, 32, 0.07, 0.02)
        yield Spec(f"BERT {M}x{K}, 32x32 and 2 %", build, blocks, ("csr", "sr-bcrs"), (128, 512), both)
    build = functools.partial(big_bird, 4096, 64, 0.001)
    yield Spec(
        "BigBird 4096, 64x64 and 0.1 %", build, ("bsr:64x64,density>=0.5", "csr"), ("csr", "bsr:64x64"), (64, 256)
    )
    build = functools.partial(communities, 40_000, 400_000, 250)
    yield Spec("power law, 250 communities", build, blocks, ("csr", "ell-buckets"), (32, 128, 512), both)
    build = functools.partial(two_four_and_outliers, 4096, 4096, 0.01)
    yield Spec("2:4 and 1 %, 4096x4096", build, ("two-four", "csr"), ("bitmask",), (16, 256, 4096))
    rules = "ell-buckets:widths=4,row_length<=4", "ell-buckets:widths=32"
    build = functools.partial(two_lengths, 100_000, 20_000)
    yield Spec("rows of 4 and 32", build, rules, ("csr", "ell-buckets"), (32, 128), both)


def matrices(spec: Spec, dtype: str) -> tuple[Format, dict[str, Format]]:
    """The sum, and the matrix in single formats, on the host."""
    x = spec.build(np.random.default_rng(1))
    x = x.astype(dtype) if isinstance(x, Format) else x.astype(VALUE_TYPES[dtype].numpy)
    s = sf.decompose(x, *spec.rules)
    return s, {text: sf.convert(s, text) for text in spec.single}


def problem(a: Format, n: int) -> Problem:
    """A row-major product on an H200, which need not be here."""
    own, dtype = Operand.of(a, "cuda"), a.dtype.name
    return Problem.product(own.format, own.params, *a.shape, n, own.stored, dtype, dtype, dtype, device="cuda", sm=90,
                           parts=own.parts)  # fmt: skip


def predicted() -> Iterator[dict[str, Any]]:
    """The expected microseconds of every contender."""
    for spec in specs():
        for dtype in spec.dtypes:
            s, single = matrices(spec, dtype)
            dense = sf.Dense.from_dense(np.zeros((1, 1), dtype=VALUE_TYPES[dtype].numpy))
            for n in spec.columns:
                us = {name: sf.explain(problem(s, n), backend=name).expected_us for name in (FUSED, MERGED, COMPOSED)}
                us |= {text: sf.explain(problem(a, n)).expected_us for text, a in single.items()}
                plain = problem(dense, n).changed(M=s.shape[0], K=s.shape[1], nnz=s.shape[0] * s.shape[1])
                us["dense"] = sf.explain(plain, backend="vendor").expected_us
                yield {"case": spec.name, "dtype": dtype, "N": n, "us": us}


def measured() -> Iterator[dict[str, Any]]:
    """The microseconds of every contender on this GPU, and its error as a share of the bound of float32 sums."""
    import cupy

    for spec in specs():
        for dtype in spec.dtypes:
            s, single = matrices(spec, dtype)
            s, single = s.to("cuda"), {text: a.to("cuda") for text, a in single.items()}
            for n in spec.columns:
                B = cupy.random.default_rng(2).standard_normal((s.shape[1], n), dtype=np.float32)
                B = B.astype(VALUE_TYPES[dtype].numpy)
                C = cupy.empty((s.shape[0], n), B.dtype)
                runs = []
                for name in (FUSED, MERGED, COMPOSED):
                    if sf.explain(problem(s, n), backend=name).chosen:
                        runs.append(bench.Contender(name, product(s, B, C, name)))
                runs += [bench.Contender(text, product(a, B, C), peer=True) for text, a in single.items()]
                runs += contenders.dense(s, B)
                results = bench.compare(bench.Case(spec.name, s, B, tuple(runs), dtype), repeats=30, hot=False)
                yield {"case": spec.name, "dtype": dtype, "N": n,
                       "us": {r.name: r.cold_us if r.cold_us == r.cold_us else None for r in results},
                       "errors": {r.name: r.error for r in results if r.error == r.error},
                       "notes": {r.name: r.note for r in results if r.note}}  # fmt: skip


def product(a: Format, B: Any, C: Any, backend: str | None = None) -> Callable[[], Any]:
    """The product of a plan, which writes C."""
    return functools.partial(sf.plan(a, B=B, out=C, backend=backend), B, out=C)


def device_array() -> Any:
    """A small array on the device, which says which one it is."""
    import cupy

    return cupy.zeros(1, np.float32)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: times, and the faster of the two launches against the composed sum and the fastest of the others."""
    lines = [
        "| matrix | dtype | N | beside rows | in tiles | composed | others | times composed | times the best other |",
        "|" + "---|" * 9,
    ]
    best_of: dict[str, list[float]] = defaultdict(list)
    summary: list[str] = []
    for row in rows:
        us = {name: t for name, t in row["us"].items() if t}
        others = {name: t for name, t in us.items() if name not in (FUSED, MERGED, COMPOSED)}
        texts = ", ".join(f"{name} {t:.1f}" for name, t in others.items())
        composed, best = us.get(COMPOSED), min(others.values(), default=None)
        fused = min((us[name] for name in (FUSED, MERGED) if name in us), default=None)
        ratios = [f"{t / fused:.2f}" if fused and t else "" for t in (composed, best)]
        times = [f"{us[name]:.1f}" if name in us else "" for name in (FUSED, MERGED, COMPOSED)]
        if fused and best:
            best_of[next((name for name in TARGET if row["case"].startswith(name)), "others")].append(best / fused)
        cells = row["case"], row["dtype"], str(row["N"]), *times, texts, *ratios
        lines.append(f"| {' | '.join(cells)} |")
    wrong = [row["case"] for row in rows if any(e > 1 for e in row.get("errors", {}).values())]
    for group, ratios_of_group in (
        *best_of.items(),
        ("the target", [r for name in TARGET for r in best_of.get(name, ())]),
    ):
        if ratios_of_group:
            slower = f"{sum(r < 1 / 1.05 for r in ratios_of_group)} of {len(ratios_of_group)} more than 5 % slower"
            summary.append(f"{group}: {geometric_mean(ratios_of_group):.2f} times the best other format, {slower}")
    return "\n".join(
        [*lines, "", *summary, "", f"Results outside the bound of float32 sums: {', '.join(wrong) or 'none'}"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for sums.json and sums.md")
    parser.add_argument("--predict", action="store_true")
    options = parser.parse_args()
    rows = list(predicted() if options.predict else measured())
    text = table(rows)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {} if options.predict else bench.environment(device_array())
        (options.out / "sums.json").write_text(json.dumps({"environment": about, "rows": rows}, indent=1))
        (options.out / "sums.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
