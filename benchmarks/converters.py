"""Converters in memory: python benchmarks/converters.py [--rows 4096] [--cols 11008] [--cores 1 2] [--only csr ..]

Every format from and to a dense bf16 matrix, GB/s of dense bytes, best of ``--repeats``; the structure detection of
`inspect`; scipy's CSR beside ours at three densities (float32, since scipy has no 16-bit floats), and torch's where it
is installed. Values and structures suit each format: 2:4, vectors of 32, blocks of 32, or nothing.

*whole*: one call, every core, the result in fresh memory; the time includes what the system takes to give out pages.
*chunks*: row chunks of 8 MB, each on one core, their memory reused: how a checkpoint is converted.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import operator
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import scipy.sparse

import spformat as sf
from spformat.checkpoint import row_chunks
from spformat.preprocess.structure import analyse


def weights(shape: tuple[int, int], kind: str, density: float, dtype: Any) -> np.ndarray[Any, Any]:
    """Random values where the structure ``kind`` has nonzeros."""
    rng = np.random.default_rng(0)
    M, K = shape
    if kind == "2:4":
        keep = (rng.random((M, K // 4, 4), np.float32).argsort(axis=2) < 2).reshape(M, K)
    elif kind == "vectors":
        keep = np.repeat((rng.random((M // 32, K // 4, 4), np.float32).argsort(axis=2) < 2).reshape(-1, K), 32, axis=0)
    elif kind == "blocks":
        keep = np.kron(rng.random((M // 32, K // 32)) < density, np.ones((32, 32), bool))
    else:
        keep = rng.random(shape, np.float32) < density
    return (rng.integers(1, 100, shape, np.int16) * keep).astype(np.float32).astype(dtype)


CASES = (
    ("two-four", "2:4", 0.5), ("bitmask", "2:4", 0.5), ("vector-nm:n=2,m=4,vector_length=32", "vectors", 0.5),
    ("bsr:blocksize=32x32", "blocks", 0.3), ("dbsr:blocksize=32x32", "blocks", 0.3),
    ("sr-bcrs", "unstructured", 0.1), ("ell-buckets", "unstructured", 0.1),
    ("csr", "unstructured", 0.5), ("csr", "unstructured", 0.1), ("csr", "unstructured", 0.05),
)  # fmt: skip


def team(work: Callable[[Any], object], parts: list[Any]) -> None:
    """``work`` on each part, a part a core."""
    with row_chunks.Team() as t:
        for _ in t.results(functools.partial(_dropped, work, p) for p in parts):
            pass


def _dropped(work: Callable[[Any], object], part: Any) -> None:
    work(part)


def contenders(options: argparse.Namespace) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """(label, dense bytes, what to time)."""
    shape = (options.rows, options.cols)
    for target, kind, density in CASES:
        if options.only and target.partition(":")[0] not in options.only:
            continue
        x = weights(shape, kind, density, ml_dtypes.bfloat16)
        label = f"{target}, {kind} {density:.0%} nonzero"
        yield f"whole   dense -> {label}", x.nbytes, lambda x=x, t=target: sf.convert(x, t)
        a = sf.convert(x, target)
        yield f"whole   dense <- {label}", x.nbytes, a.to_dense
        if a.row_chunks(a.params()) is not None:
            step = row_chunks.CHUNK_BYTES // x[:1].nbytes // 64 * 64
            parts = [x[i : i + step] for i in range(0, x.shape[0], step)]
            yield (
                f"chunks  dense -> {label}",
                x.nbytes,
                functools.partial(team, functools.partial(sf.convert, target=target), parts),
            )
            converted = [sf.convert(p, target) for p in parts]
            yield (
                f"chunks  dense <- {label}",
                x.nbytes,
                functools.partial(team, operator.methodcaller("to_dense"), converted),
            )
        if target == "csr":
            wide = x.astype(np.float32)
            yield f"whole   dense -> {label}, float32", wide.nbytes, lambda y=wide: sf.convert(y, "csr")
            yield (
                f"        scipy csr_array, {density:.0%}, float32",
                wide.nbytes,
                functools.partial(scipy.sparse.csr_array, wide),
            )
            if importlib.util.find_spec("torch"):
                import torch

                warnings.filterwarnings("ignore", "Sparse CSR tensor support")

                torch.set_num_threads(len(os.sched_getaffinity(0)))
                z = torch.from_numpy(wide)
                yield f"        torch to_sparse_csr, {density:.0%}, float32", wide.nbytes, z.to_sparse_csr
    if not options.only or "structure" in options.only:
        x = weights(shape, "unstructured", 0.5, ml_dtypes.bfloat16)
        yield "        structure (inspect)", x.nbytes, lambda: analyse(x)


def main() -> None:
    """One line each, and a JSON document last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--cols", type=int, default=11008)
    parser.add_argument("--cores", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="formats, or structure")
    options = parser.parse_args()
    allowed, rows = sorted(os.sched_getaffinity(0)), []
    for cores in options.cores:
        os.sched_setaffinity(0, allowed[:cores])
        for label, size, work in contenders(options):
            work()  # loads what is compiled
            best = float("inf")
            for _ in range(options.repeats):
                start = time.perf_counter()
                work()
                best = min(best, time.perf_counter() - start)
            rows.append({"cores": cores, "what": label, "gb_per_s": size / best / 1e9})
            print(f"{cores} core(s)  {label:78s} {size / best / 1e9:6.2f} GB/s", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
