"""The cases of benchmarks/papers.py: matrices on the device, our kernels for them, and the libraries beside them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import gpu
import numpy as np
import two_four
import vector_nm

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.csr.spmm_csr_tc import BY_LANES, SHARED
from spformat.formats.base import Format
from spformat.measure import bench, contenders
from spformat.products.tiles import forced

Contenders: TypeAlias = Callable[[Format, Any], list[bench.Contender]]
"""Contenders for the product of a matrix and a dense operand."""


class Case(NamedTuple):
    """One product, in several formats and by several libraries."""

    name: str
    n: int
    """Columns of the dense operand."""
    forms: Sequence[tuple[str, Format]]
    """(label, matrix) for each of our formats; the kernel is the one that spmm() runs."""
    peers: Sequence[Contenders]
    """Libraries, for the first matrix."""
    named: Sequence[tuple[str, Contenders]] = ()
    """(label, contender) for each kernel of ours that only a call by name runs, for the first matrix."""


BERT = ((768, 768),) * 4 + ((3072, 768), (768, 3072))
"""M x K of query, key, value, attention output, and the two layers of the feed-forward network."""
WIDTHS, KEPT = (256, 512, 1024, 2048, 4096), (32, 16, 12, 8, 4)
HIDDEN = ((2048, 5632), (4096, 11008), (5120, 13824), (6656, 17920), (8192, 22016))
"""(h, f): the layers are (h, h), (3h, h), (h, f) and (f, h), given as the paper's (n, k); ours are M = n, K = k."""
EXACT = {"CUDA cores": "cuda.spmm_vector_nm", "CUDA cores, sm_90": "cuda.spmm_vector_nm_sm90"}
"""Label and name of the kernels of vector n:m in exact float32."""
TCA = {"tca": BY_LANES, "tca, shared sums": SHARED}
"""Label and tile of the two ways in which the kernel of TCA-SpMM adds up."""
TWO_FOUR = {
    "mma.sp cuda.spmm_two_four": "mma.sp",
    "mma.sp cuda.spmm_two_four_sm90": "mma.sp by TMA",
    "graph": "wgmma.sp",
}
"""Names of ``two_four.crowd`` and ours, by the instruction of the kernel."""
COLUMNS = (32, 128, 512)
"""Of products with irregular matrices."""


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
        yield from (Case(f"blocks {M}x{K} {100 * share:.1f} %", n, forms, [contenders.dense]) for n in (512, 4096))
    for i, ((M, K), share) in enumerate(zip(BERT, spread(6, 0.01, 0.2), strict=True)):
        x = normal((M, K), "float16", i) * (rng.random((M, K), dtype=np.float32) < share)
        forms = [(f"sr-bcrs(8, {g})", sf.convert(x, "sr-bcrs", vector_length=8, stride=g)) for g in (16, 32)]
        forms.append(("bsr 32", sf.convert(x, "bsr", blocksize=(32, 32))))
        peers = [contenders.dense, contenders.sparse_library]
        yield from (Case(f"anywhere {M}x{K} {100 * share:.1f} %", n, forms, peers) for n in (512, 4096))


def vectors(M: int, K: int, n: int) -> list[tuple[str, Format]]:
    """A matrix of float32 in vector n:32 with vectors of 32, under its label."""
    x = vector_nm.dense(M, K, n, 32, "float32", seed=n)
    return [("n:m", sf.convert(x, "vector-nm", n=n, m=32, vector_length=32))]


def shapes() -> Iterator[Case]:
    """Shapes A to F of the paper; F is 4096^3."""
    for (name, (M, N, K)), n in itertools.product(vector_nm.PAPER.items(), vector_nm.KEPT):
        yield Case(f"{name} {M}x{K} {n}:32", N, vectors(M, K, n), [contenders.dense], CUDA_CORES)


def nm() -> Iterator[Case]:
    """A layer at a time, all its widths; the layers of all sizes in turn."""
    layers = [s for h, f in HIDDEN for s in ((h, h), (3 * h, h), (h, f), (f, h))]
    layers.sort(key=lambda s: s[0] * s[1])
    for (M, K), n in itertools.product(layers, KEPT):
        forms = vectors(M, K, n)
        yield from (Case(f"{M}x{K} {n}:32", width, forms, [contenders.dense], CUDA_CORES) for width in WIDTHS)


def cuda_cores(label: str, a: Format, B: Any) -> list[bench.Contender]:
    """Vector n:m by a kernel of ``EXACT``, if it takes the product on this device."""
    import cupy as cp

    out = cp.empty((a.shape[0], B.shape[1]), a.dtype)
    if not sf.explain(a, B, backend=EXACT[label]).chosen:
        return []
    return [bench.Contender(label, functools.partial(sf.plan(a, B=B, out=out, backend=EXACT[label]), B, out=out))]


CUDA_CORES = [(label, functools.partial(cuda_cores, label)) for label in EXACT]


def two_four_cases() -> Iterator[Case]:
    """4096^3, in the order of the metadata that ``wgmma.sp`` and ``mma.sp`` both take."""
    yield Case("2:4 bf16 4096x4096", 4096, [("called", gpu.random_two_four(4096, 4096))], [from_graphs])


def from_graphs(a: Format, B: Any) -> list[bench.Contender]:
    """Our kernels, cuSPARSELt (its algorithms searched) and cuBLAS, launched from CUDA graphs."""
    crowd = (c for c in two_four.crowd(a, B, mma=True) if not c.name.startswith("call"))
    return [replace(c, name=TWO_FOUR.get(c.name, c.name)) for c in crowd]


def blocks() -> Iterator[Case]:
    """BSR and DBSR: block sizes by sparsity at 4096^3, and shapes of BERT."""
    for name, make, widths in gpu.bsr():
        a = make()
        yield from (Case(name, n, [(a.name, a)], [contenders.dense, contenders.torch_peers]) for n in widths)


def unstructured() -> Iterator[Case]:
    """SR-BCRS, 4096 x 4096."""
    for name, make, widths in gpu.unstructured():
        if name.startswith("sr-bcrs"):
            a = make()
            yield from (Case(name, n, [("sr-bcrs", a)], libraries(a)) for n in widths)


def libraries(a: Format) -> list[Contenders]:
    """cuSPARSE, and cuBLAS and what torch has where the matrix fits as a dense one."""
    fits = a.shape[0] * a.shape[1] <= bench.DENSE
    return [contenders.sparse_library, *((contenders.dense, contenders.torch_peers) if fits else ())]


def irregular(suffixes: Sequence[str], graphs: int) -> Iterator[tuple[str, Format]]:
    """Name and CSR, float32, of the matrices in files with these suffixes, then of the first so many drawn graphs."""
    for path in sorted(gpu.MATRICES.iterdir()):
        if path.suffix in suffixes:
            yield path.stem, gpu._real(path, "float32", "csr")
    for name, nodes, edges, alpha in gpu.SYNTHETIC[:graphs]:
        yield name, gpu._power_law(nodes, edges, alpha, "float32", "csr")


def operators() -> Iterator[Case]:
    """Real graphs and pruned weights, then graphs, in CSR and ELL buckets and by TCA-SpMM."""
    for (name, a), dtype in itertools.product(irregular((".npz", ".mtx", ".smtx"), 3), ("float32", "float16")):
        csr = a.astype(dtype)
        forms = [("csr", csr), ("ell-buckets", sf.convert(csr, "ell-buckets"))]
        yield from (Case(f"{name} {dtype}", n, forms, libraries(a), TENSOR_CORES) for n in COLUMNS)


def graphs() -> Iterator[Case]:
    """Real graphs, then drawn ones."""
    for name, a in irregular((".npz",), 3):
        hyb = {c: sf.convert(a, "ell-buckets", column_parts=c) for c in (1, 2, 4, 8, 16)}
        for c, h in hyb.items():
            print(f"padding  {name} hyb({c}, {h.max_width}): {100 * (1 - a.nnz / max(1, h.stored)):.1f} %", flush=True)
        forms = [("csr", a), ("hyb(1)", hyb[1])]
        yield from (Case(name, n, forms, [contenders.sparse_library]) for n in (32, 64, 128, 256, 512))


def tca() -> Iterator[Case]:
    """Real graphs, then drawn ones."""
    for (name, a), dtype in itertools.product(irregular((".npz",), 2), ("float16", "float32")):
        forms = [("csr", a.astype(dtype))]
        yield from (Case(f"{name} {dtype}", n, forms, [contenders.sparse_library], TENSOR_CORES) for n in COLUMNS)


def tensor_cores(label: str, a: Format, B: Any) -> list[bench.Contender]:
    """TCA-SpMM with one of its two ways to add."""
    import cupy as cp

    C = cp.empty((a.shape[0], B.shape[1]), a.dtype)
    with forced("cuda.spmm_csr_tc", TCA[label]):
        product = sf.plan(a, B=B, out=C, backend="cuda.spmm_csr_tc")
    return [bench.Contender(label, functools.partial(product, B, out=C))]


TENSOR_CORES = [(label, functools.partial(tensor_cores, label)) for label in TCA]

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
    yield Case("power law of Reddit's size", 128, forms, [])
