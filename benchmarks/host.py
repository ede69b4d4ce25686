"""Host time of a product on the GPU: python benchmarks/host.py [--only csr,bsr] [--json FILE]

The time that a call takes on the host without waiting for the device (20 calls between two waits), in microseconds of
the wall clock. The problems are small, so that the queue never fills. There are four ways to call:

again   ``plan(B, out=C)`` with operands that the plan has seen before
new     the same with different memory for C in every call, more arrays than the plan remembers
spmm    ``spmm(A, B, out=C)``, whose plan is cached with A
alloc   ``spmm(A, B)``, which allocates C

(for torch tensors ``linear`` instead, if torch is installed)

Two more rows serve as references: *driver* is ``cuLaunchKernel`` of an empty kernel through the same code, which no
call can beat. *RawKernel* is an empty kernel launched as CuPy users do it, with an array and nine numbers; it helps to
compare machines.

All cases take turns, in an order drawn anew each round: a machine that is slow for a second is slow for all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import spformat as sf
from spformat.backends.cuda.runtime import jit
from spformat.backends.cuda.runtime.device_plan import REMEMBERED
from spformat.backends.cuda.runtime.launch import Launch
from spformat.formats.base import Format
from spformat.measure import bench
from spformat.preprocess import masks

CALLS, ROUNDS, OTHERS = 20, 25, REMEMBERED + 6


def cases() -> Iterator[tuple[str, Callable[[], Format], int, str | None, str, bool]]:
    """Name, matrix on the device, N, name of a kernel or None, layout of B, whether there is a bias."""
    for dtype in ("float32", "float16"):
        yield f"csr {dtype}", lambda d=dtype: matrix(1024, 1024, 0.02, d, "csr"), 64, None, "row", False
        yield f"ell-buckets {dtype}", lambda d=dtype: matrix(1024, 1024, 0.02, d, "ell-buckets"), 64, None, "row", False
    yield "csr float32, a long row cut in pieces", long_row, 32, None, "row", False
    yield "csr float32, columns of B", lambda: matrix(1024, 1024, 0.02, "float32", "csr"), 64, None, "col", False
    yield "csr tensor cores", lambda: matrix(1024, 1024, 0.02, "float16", "csr"), 64, "cuda.spmm_csr_tc", "row", False
    yield "bsr, mma", lambda: matrix(768, 768, 0.1, "bfloat16", "bsr", blocksize=(32, 32)), 512, None, "row", False
    for fmt in ("bsr", "dbsr"):
        yield (
            f"{fmt}, wgmma",
            lambda f=fmt: matrix(4096, 512, 0.2, "bfloat16", f, blocksize=(64, 64)),
            4096,
            None,
            "row",
            False,
        )
    yield "sr-bcrs float16", lambda: matrix(1024, 1024, 0.05, "float16", "sr-bcrs"), 512, None, "row", False
    yield "sr-bcrs float32", lambda: matrix(1024, 1024, 0.05, "float32", "sr-bcrs"), 128, None, "row", False
    for dtype, length in (("float32", 32), ("bfloat16", 32), ("bfloat16", 128)):
        form = {"n": 8, "m": 32, "vector_length": length}
        name = f"vector-nm L={length} {dtype}"
        yield name, lambda d=dtype, f=form: matrix(2048, 2048, 1, d, "vector-nm", **f), 1024, None, "row", False
    yield "vector-nm, K split", lambda: matrix(256, 2048, 1, "float32", "vector-nm", **form), 64, None, "row", False
    for n in (1, 16, 256, 2048):
        yield f"two-four N={n}", lambda: matrix(2048, 1024, 1, "bfloat16", "two-four"), n, None, "row", False
    yield (
        "two-four mma.sp",
        lambda: matrix(1024, 1024, 1, "bfloat16", "two-four"),
        128,
        "cuda.spmm_two_four",
        "row",
        False,
    )
    for dtype in ("float32", "bfloat16"):
        yield f"bitmask {dtype}", lambda d=dtype: matrix(1024, 1024, 0.5, d, "bitmask"), 16, None, "row", False
    for fmt in ("csr", "two-four"):
        yield f"{fmt} with a bias", lambda f=fmt: matrix(1024, 1024, 0.02, "float16", f), 64, None, "row", True
    yield "dense, cuBLAS", lambda: matrix(1024, 1024, 1, "bfloat16", "dense"), 64, "vendor", "row", False
    yield "csr, cuSPARSE", lambda: matrix(1024, 1024, 0.02, "float32", "csr"), 64, "vendor", "row", False


def matrix(M: int, K: int, density: float, dtype: str, fmt: str, **params: Any) -> Format:
    """Small integers on the device; those formats that have a pattern prune to it."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 5, (M, K)).astype(sf.arrays.dtypes.VALUE_TYPES[dtype].numpy)
    if fmt == "two-four":
        return masks.prune_two_four(x).to("cuda")
    if fmt == "vector-nm":
        return masks.prune_vector_nm(x, **params).to("cuda")
    height, width = params.get("blocksize", (1, 1))
    keep = rng.random((M // height, K // width)) < density
    return sf.convert(x * keep.repeat(height, 0).repeat(width, 1).astype(x.dtype), fmt, **params).to("cuda")


def long_row() -> Format:
    """A row of 40,000 items, which several blocks should share, and 999 short ones."""
    x = np.zeros((1000, 50_000), np.float32)
    x[3, :40_000] = 1
    x[:, 5::9999] = 2
    return sf.convert(x, "csr").to("cuda")


class Case:
    """One product and the ways to call it."""

    def __init__(self, name: str, a: Format, n: int, backend: str | None, layout: str, epilogue: bool) -> None:
        import cupy

        self.name, self.n, self.times, self.calls_of_new = name, n, defaultdict[str, list[float]](list), 0
        B = cupy.ones(
            (a.shape[1], n), sf.arrays.dtypes.VALUE_TYPES[a.dtype.name].numpy, "F" if layout == "col" else "C"
        )
        more = {"bias": cupy.zeros(a.shape[0], B.dtype)} if epilogue else {}
        first = self.first = sf.spmm(a, B, backend=backend, **more)
        outs = self.outs = [cupy.empty_like(first) for _ in range(OTHERS)]
        plan = sf.plan(a, B=B, out=outs[0], backend=backend, epilogue=epilogue)
        self.kernel = plan.kernel
        self.ways: dict[str, Callable[[int], Any]] = {
            "again": lambda _: plan(B, out=outs[0], **more),
            "new": lambda i: plan(B, out=outs[i % OTHERS], **more),
            "spmm": lambda _: sf.spmm(a, B, out=outs[0], backend=backend, **more),
            "alloc": lambda _: sf.spmm(a, B, backend=backend, **more),
        }

    def measure(self, way: str, calls: int = CALLS) -> None:
        from cupy.cuda.runtime import deviceSynchronize

        run, at = self.ways[way], self.calls_of_new
        self.calls_of_new += calls if way == "new" else 0
        deviceSynchronize()
        start = time.perf_counter()
        for i in range(at, at + calls):
            run(i)
        self.times[way].append(1e6 * (time.perf_counter() - start) / calls)
        deviceSynchronize()

    def row(self) -> dict[str, Any]:
        """Median and least microseconds of a call, each way; the first measurement, which compiles, left out."""
        if not bool((self.outs[0] == self.first).all()):
            raise SystemExit(f"{self.kernel}: a repeated call gave another product")
        row: dict[str, Any] = {"case": self.name, "kernel": self.kernel, "N": self.n}
        for way, (_, *times) in self.times.items():
            row |= {way: statistics.median(times), f"{way}_least": min(times)}
        return row


class Torch(Case):
    """The same with torch tensors, on torch's stream and in its memory: ``linear``, which is called without a plan."""

    def __init__(self, name: str, a: Format, n: int) -> None:
        import torch

        self.name, self.n, self.times, self.calls_of_new = name, n, defaultdict[str, list[float]](list), 0
        x = torch.ones((n, a.shape[1]), dtype=getattr(torch, a.dtype.name), device="cuda")
        self.first = sf.linear(x, a)
        self.outs = [torch.empty_like(self.first)]
        self.kernel = str(sf.plan(a, B=x.T, out=self.outs[0].T).kernel)
        self.ways = {
            "spmm": lambda _: sf.linear(x, a, out=self.outs[0]),
            "alloc": lambda _: sf.linear(x, a),
        }


class Bare(Case):
    """A launch and nothing else: a kernel that does nothing."""

    def __init__(self, name: str, launch: Callable[[], Any]) -> None:
        import cupy

        self.name, self.kernel, self.n, self.times, self.calls_of_new = name, "empty", 0, defaultdict(list), 0
        self.first = self.outs = cupy.zeros(1)
        self.ways = {"again": lambda _: launch()}


def bare() -> Iterator[Case]:
    """The driver alone, launching the kernel ``hold`` with a waiting time of 0; and a launch by CuPy."""
    import cupy

    device = cupy.cuda.Device()
    function = jit.load("runtime/hold.cu", "hold", jit.architecture(int(device.compute_capability), ()), device.id)
    yield Bare("driver", Launch(function, "q", (), 1).bind((1, 1, 1), 0, 0))
    numbers = ", ".join(f"int x{i}" for i in range(9))
    raw = cupy.RawKernel(f'extern "C" __global__ void empty(float* x, {numbers}) {{}}', "empty")
    arguments = (cupy.zeros(1, "f4"), *map(np.int32, range(9)))
    yield Bare("RawKernel", lambda: raw((1,), (1,), arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names begin so, comma-separated")
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    chosen = [case for case in cases() if case[0].startswith(tuple(wanted.only.split(",")))]
    tried: list[Case] = [*bare(), *(Case(name, make(), *rest) for name, make, *rest in chosen)]
    if "torch".startswith(tuple(wanted.only.split(","))) and importlib.util.find_spec("torch"):
        for fmt, density in (("csr", 0.02), ("two-four", 1)):
            name = f"torch: linear, {fmt}"
            tried.append(Torch(name, matrix(1024, 1024, density, "float16", fmt), 16))
    for case in tried:
        for way in case.ways:
            case.measure(way, OTHERS)
    order, rng = [(case, way) for case in tried for way in case.ways], random.Random(0)
    for _ in range(ROUNDS):
        rng.shuffle(order)
        for case, way in order:
            case.measure(way)
    rows = [case.row() for case in tried]
    print("| case | N | kernel | again | new | spmm | alloc |\n|---|---|---|---|---|---|---|")
    for row in rows:
        show(row)
    if wanted.json:
        import cupy

        tree = {"environment": bench.environment(cupy.zeros(1)), "rows": rows}
        wanted.json.write_text(json.dumps(tree, indent=1) + "\n")


def show(row: dict[str, Any]) -> None:
    cells = [
        f"{row[way]:.1f} ({row[way + '_least']:.1f})" if way in row else "" for way in ("again", "new", "spmm", "alloc")
    ]
    print("|", " | ".join([row["case"], str(row["N"]), row["kernel"], *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
