"""Host time of a product on the GPU: python benchmarks/host.py [--only csr,bsr] [--json FILE]

What a call keeps the host, the device not waited for (20 calls between two waits), in microseconds of the wall clock,
on small problems, so that the queue never fills. Four ways to call:

again   ``plan(B, out=C)`` with operands that the plan has had
new     the same with other memory for C at every call, more than the plan remembers
spmm    ``spmm(A, B, out=C)``, the plan cached with A
alloc   ``spmm(A, B)``, C allocated

and, for what nobody can save: *driver*, ``cuLaunchKernel`` of an empty kernel through the same code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import spformat as sf
from spformat import bench
from spformat.backends.cuda import jit
from spformat.backends.cuda.launch import REMEMBERED, Launch
from spformat.formats.base import Format
from spformat.preprocess import masks

CALLS, ROUNDS, OTHERS = 20, 25, REMEMBERED + 6


def cases() -> Iterator[tuple[str, Callable[[], Format], int, str | None, str]]:
    """Name, matrix on the device, N, kernel asked for by name, layout of B."""
    for dtype in ("float32", "float16"):
        yield f"csr {dtype}", lambda d=dtype: random(1024, 1024, 0.02, d, "csr"), 64, None, "row"
        yield f"ell-buckets {dtype}", lambda d=dtype: random(1024, 1024, 0.02, d, "ell-buckets"), 64, None, "row"
    yield "csr float32, a long row cut in pieces", long_row, 32, None, "row"
    yield "csr float32, columns of B", lambda: random(1024, 1024, 0.02, "float32", "csr"), 64, None, "col"
    yield "csr tensor cores", lambda: random(1024, 1024, 0.02, "float16", "csr"), 64, "cuda.spmm_csr_tc", "row"
    yield "bsr, mma", lambda: random(768, 768, 0.1, "bfloat16", "bsr", blocksize=(32, 32)), 512, None, "row"
    for fmt in ("bsr", "dbsr"):
        yield (
            f"{fmt}, wgmma",
            lambda f=fmt: random(4096, 512, 0.2, "bfloat16", f, blocksize=(64, 64)),
            4096,
            None,
            "row",
        )
    yield "sr-bcrs float16", lambda: random(1024, 1024, 0.05, "float16", "sr-bcrs"), 512, None, "row"
    yield "sr-bcrs float32", lambda: random(1024, 1024, 0.05, "float32", "sr-bcrs"), 128, None, "row"
    for dtype, length in (("float32", 32), ("bfloat16", 32), ("bfloat16", 128)):
        form = {"n": 8, "m": 32, "vector_length": length}
        name = f"vector-nm L={length} {dtype}"
        yield name, lambda d=dtype, f=form: random(2048, 2048, 1, d, "vector-nm", **f), 1024, None, "row"
    yield "vector-nm, K split", lambda: random(256, 2048, 1, "float32", "vector-nm", **form), 64, None, "row"
    for n in (1, 16, 256, 2048):
        yield f"two-four N={n}", lambda: random(2048, 1024, 1, "bfloat16", "two-four"), n, None, "row"
    yield "two-four mma.sp", lambda: random(1024, 1024, 1, "bfloat16", "two-four"), 128, "cuda.spmm_two_four", "row"
    for dtype in ("float32", "bfloat16"):
        yield f"bitmask {dtype}", lambda d=dtype: random(1024, 1024, 0.5, d, "bitmask"), 16, None, "row"
    yield "dense, cuBLAS", lambda: random(1024, 1024, 1, "bfloat16", "dense"), 64, "vendor", "row"
    yield "csr, cuSPARSE", lambda: random(1024, 1024, 0.02, "float32", "csr"), 64, "vendor", "row"


def random(M: int, K: int, density: float, dtype: str, fmt: str, **params: Any) -> Format:
    """Small integers on the device; those formats that have a pattern prune to it."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 5, (M, K)).astype(sf.dtypes.VALUE_TYPES[dtype].numpy)
    if fmt == "two-four":
        return masks.prune_two_four(x).to("cuda")
    if fmt == "vector-nm":
        return masks.prune_vector_nm(x, **params).to("cuda")
    height, width = params.get("blocksize", (1, 1))
    keep = rng.random((M // height, K // width)) < density
    return sf.convert(x * keep.repeat(height, 0).repeat(width, 1).astype(x.dtype), fmt, **params).to("cuda")


def long_row() -> Format:
    """A row of 40,000 items, which no one block should walk alone, and 999 short ones."""
    x = np.zeros((1000, 50_000), np.float32)
    x[3, :40_000] = 1
    x[:, 5::9999] = 2
    return sf.convert(x, "csr").to("cuda")


def host_us(run: Callable[[int], Any]) -> tuple[float, float]:
    """Median and least of the microseconds of a call; ``run`` gets the number of the call."""
    from cupy.cuda.runtime import deviceSynchronize

    taken, at = [], 0
    for _ in range(OTHERS):
        run(at)
        at += 1
    for _ in range(ROUNDS):
        deviceSynchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run(at)
            at += 1
        taken.append(1e6 * (time.perf_counter() - start) / CALLS)
    deviceSynchronize()
    return statistics.median(taken), min(taken)


def measure(a: Format, n: int, backend: str | None, layout: str) -> dict[str, Any]:
    import cupy

    B = cupy.ones((a.shape[1], n), sf.dtypes.VALUE_TYPES[a.dtype.name].numpy, "F" if layout == "col" else "C")
    first = sf.spmm(a, B, backend=backend)
    outs = [cupy.empty_like(first) for _ in range(OTHERS)]
    plan = sf.plan(a, B=B, out=outs[0], backend=backend)
    ways = {
        "again": lambda _: plan(B, out=outs[0]),
        "new": lambda i: plan(B, out=outs[i % OTHERS]),
        "spmm": lambda _: sf.spmm(a, B, out=outs[0], backend=backend),
        "alloc": lambda _: sf.spmm(a, B, backend=backend),
    }
    row: dict[str, Any] = {"kernel": plan.kernel, "N": n}
    for name, run in ways.items():
        row[name], row[f"{name}_least"] = host_us(run)
    if not bool((outs[0] == first).all()):
        raise SystemExit(f"{plan.kernel}: a call made again gave another product")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names begin so, comma-separated")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    rows = [{"case": "driver", "kernel": "empty", "N": 0, **dict(zip(("again", "again_least"), driver(), strict=True))}]
    print("| case | N | kernel | again | new | spmm | alloc |\n|---|---|---|---|---|---|---|")
    show(rows[0])
    for name, make, n, backend, layout in cases():
        if name.startswith(tuple(wanted.only.split(","))):
            rows.append({"case": name, **measure(make(), n, backend, layout)})
            show(rows[-1])
    if wanted.json:
        import cupy

        tree = {"environment": bench.environment(cupy.zeros(1)), "rows": rows}
        wanted.json.write_text(json.dumps(tree, indent=1) + "\n")


def driver() -> tuple[float, float]:
    """A launch and nothing else: the kernel that waits, told to wait for no time."""
    import cupy

    device = cupy.cuda.Device()
    function = jit.load("hold.cu", "hold", jit.architecture(int(device.compute_capability), ()), device.id)
    call = Launch(function, "q", (), 1).bind((1, 1, 1), 0, 0)
    return host_us(lambda _: call())


def show(row: dict[str, Any]) -> None:
    cells = [
        f"{row[way]:.1f} ({row[way + '_least']:.1f})" if way in row else "" for way in ("again", "new", "spmm", "alloc")
    ]
    print("|", " | ".join([row["case"], str(row["N"]), row["kernel"], *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
