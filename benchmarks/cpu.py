"""Products and conversions on the host, beside scipy, numpy and (if installed) torch.

    python benchmarks/cpu.py [--size 4096] [--repeats 7] [--json cpu.json]
    python benchmarks/cpu.py --only few [--size 2048] [--repeats 15]      # 1 to 16 columns of B, as one table

Every contender is checked against float64 before it is timed; contenders take turns inside each repeat, so that a
slow minute of the machine hits all of them; each has one untimed call before the timed one. Times are medians and best
of the repeats, in milliseconds. Conversions are given in GB/s of dense bytes, products also in GFLOP/s of stored
nonzeros.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the name bfloat16)
import numpy as np
import scipy.sparse

from spformat.arrays import threads
from spformat.dispatch.api import plan, spmm
from spformat.formats import CSR, Bitmask, TwoFour, VectorNM
from spformat.formats.convert import convert
from spformat.preprocess import masks

Timed = dict[str, Callable[[], Any]]


def turns(contenders: Timed, repeats: int) -> dict[str, dict[str, float]]:
    """{name: {median_ms, best_ms}}, one untimed call each first."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(repeats):
        for name, call in contenders.items():
            time.sleep(0.05)  # OpenBLAS threads keep a core busy for a while after a product
            call()  # its own caches, and cores that are awake
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: {"median_ms": statistics.median(t), "best_ms": min(t)} for name, t in times.items()}


def agree(name: str, got: Any, wanted: np.ndarray, rows: np.ndarray, tolerance: float) -> None:
    """Some rows of a product against float64."""
    error = np.abs(np.asarray(got)[rows].astype(np.float64) - wanted).max() / np.abs(wanted).max()
    if not error < tolerance:
        raise SystemExit(f"{name}: wrong result, relative error {error:.2e}")


def products(size: int, repeats: int, columns: list[int]) -> list[dict[str, Any]]:
    """Unstructured weights at several densities, then each structured format."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, size)).astype(np.float32)
    cases: list[tuple[str, np.ndarray, tuple[str, ...]]] = []
    for density in (0.1, 0.05, 0.02):
        weight = np.where(rng.random(x.shape) < density, x, np.float32(0))
        cases.append((f"{100 - 100 * density:.0f} % zeros", weight, ("csr", "ell-buckets", "bitmask")))
    blocks = masks.apply(x, masks.magnitude_blocks(x, (32, 32), 0.9))
    cases += [
        ("2:4", masks.apply(x, masks.magnitude_nm(x, 2, 4)), ("two-four", "bitmask")),
        ("2:8, 32 rows", masks.apply(x, masks.magnitude_vector_nm(x, 2, 8, 32)), ("vector-nm:n=2,m=8",)),
        ("32x32 blocks, 90 %", blocks, ("bsr", "sr-bcrs:vector_length=32")),
    ]
    results = []
    for title, weight, specs in cases:
        weight = np.asarray(weight, np.float32)
        nnz = int(np.count_nonzero(weight))
        for n in columns:
            B = rng.standard_normal((size, n)).astype(np.float32)
            rows = rng.choice(size, 16, replace=False)
            contenders: Timed = {}
            for spec in specs:
                for dtype in ("float32", "bfloat16"):
                    if spec == "two-four" and dtype == "float32":
                        continue
                    a, b = convert(weight.astype(dtype), spec), B.astype(dtype)
                    run = plan(a, B=b, backend="cpu")
                    wanted = weight[rows].astype(dtype).astype(np.float64) @ b.astype(np.float64)
                    agree(spec, run(b), wanted, rows, 1e-5 if dtype == "float32" else 1e-2)
                    contenders[f"{spec.partition(':')[0]} {dtype}"] = lambda run=run, b=b: run(b)
            peer = scipy.sparse.csr_array(weight)
            contenders["scipy csr float32"] = lambda peer=peer, B=B: peer @ B
            contenders["numpy dense float32"] = lambda weight=weight, B=B: weight @ B
            contenders |= torch_products(weight, B)
            for name, timed in turns(contenders, repeats).items():
                gflops = 2e-6 * nnz * n / timed["best_ms"]
                results.append({"matrix": title, "nnz": nnz, "N": n, "what": name, **timed, "gflops": gflops})
                print(f"{title:20} N={n:<4} {name:22} {timed['median_ms']:9.2f} {timed['best_ms']:9.2f} ms "
                      f"{gflops:7.1f} GFLOP/s", flush=True)  # fmt: skip
    return results


def torch_products(weight: np.ndarray, B: np.ndarray) -> Timed:
    """torch's CSR product, when torch is there."""
    try:
        import torch
    except ImportError:
        return {}
    a, b = torch.from_numpy(weight).to_sparse_csr(), torch.from_numpy(B)
    return {"torch csr float32": lambda: a @ b}


def few_columns(size: int, repeats: int, columns: list[int]) -> list[dict[str, Any]]:
    """Every format with few columns of B, as a caller writes it: ``sf.spmm(A, B)``. One row a format at the end."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size, size)).astype(np.float32)

    def dropped(share: float) -> np.ndarray:
        return np.where(rng.random(x.shape) < share, np.float32(0), x)

    tenth, half = dropped(0.9), dropped(0.5)
    vectors = np.asarray(masks.apply(x, masks.magnitude_vector_nm(x, 8, 32, 32)), np.float32)
    blocks, tall = (
        np.asarray(masks.apply(x, masks.magnitude_blocks(x, b, 0.8)), np.float32) for b in ((32, 32), (8, 1))
    )
    pairs = np.asarray(masks.apply(x, masks.magnitude_nm(x, 2, 4)), np.float32)
    cases = [
        ("csr, 90 %", tenth, "csr", ("float32", "bfloat16")),
        ("ell-buckets, 90 %", tenth, "ell-buckets", ("float32",)),
        ("vector-nm 8:32, 32 rows", vectors, "vector-nm:n=8,m=32,vector_length=32", ("float32", "bfloat16")),
        ("bsr 32x32, 80 %", blocks, "bsr:blocksize=32x32", ("float32", "bfloat16")),
        ("sr-bcrs 32 rows, 80 %", blocks, "sr-bcrs:vector_length=32,stride=16", ("float32", "bfloat16")),
        ("sr-bcrs 8 rows, 80 %", tall, "sr-bcrs:vector_length=8,stride=16", ("float32", "bfloat16")),
        ("bitmask, 50 %", half, "bitmask", ("float32", "bfloat16", "float16")),
        ("2:4", pairs, "two-four", ("bfloat16", "float16")),
    ]
    matrices = {
        f"{title}, {dtype}": convert(np.asarray(weight.astype(dtype)), spec)
        for title, weight, spec, dtypes in cases
        for dtype in dtypes
    }
    peer, results = scipy.sparse.csr_array(tenth), []
    for n in columns:
        B = rng.standard_normal((size, n)).astype(np.float32)
        contenders: Timed = {"BLAS, float32": lambda B=B: x @ B, "scipy csr, 90 %, float32": lambda B=B: peer @ B}
        rows = rng.choice(size, 64, replace=False)
        for name, a in matrices.items():
            b = B.astype(a.dtype)
            wanted = a.to_dense()[rows].astype(np.float64) @ b.astype(np.float64)
            agree(name, spmm(a, b), wanted, rows, 1e-5 if a.dtype == np.float32 else 1e-2)
            contenders[name] = lambda a=a, b=b: spmm(a, b)
        for name, timed in turns(contenders, repeats).items():
            results.append({"N": n, "what": name, **timed})
    print("\n| best of", repeats, "(median), ms |", " | ".join(f"N = {n}" for n in columns), "|")
    print("|---|" + "---|" * len(columns))
    for name in dict.fromkeys(r["what"] for r in results):
        cells = [f"{r['best_ms']:.2f} ({r['median_ms']:.2f})" for r in results if r["what"] == name]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return results


def conversions(size: int, repeats: int) -> list[dict[str, Any]]:
    """Dense to each format and back; the numpy path of the same converter is a contender."""
    from spformat.formats.fast import compiled

    rng = np.random.default_rng(1)
    x = rng.standard_normal((size, size)).astype(np.float32)
    half = masks.apply(x, masks.magnitude_nm(x, 2, 4)).astype("bfloat16")
    tenth = np.where(rng.random(x.shape) < 0.1, x, np.float32(0))
    vectors = np.asarray(masks.apply(x, masks.magnitude_vector_nm(x, 2, 8, 32))).astype("bfloat16")
    cases: list[tuple[str, Any, np.ndarray, dict[str, Any]]] = [
        ("two-four bf16", TwoFour, half, {}),
        ("bitmask bf16 50 %", Bitmask, half, {}),
        ("bitmask f32 90 %", Bitmask, tenth, {}),
        ("csr bf16 50 %", CSR, half, {}),
        ("csr f32 90 %", CSR, tenth, {}),
        ("vector-nm 2:8 bf16", VectorNM, vectors, {"n": 2, "m": 8, "vector_length": 32}),
    ]

    def in_numpy(call: Callable[[], Any]) -> Any:
        serves, compiled.serves = compiled.serves, lambda *_: False  # type: ignore[assignment]
        try:
            return call()
        finally:
            compiled.serves = serves

    results = []
    for title, fmt, dense, params in cases:
        dense = np.ascontiguousarray(dense)
        matrix = fmt.from_dense(dense, **params)
        if matrix != in_numpy(lambda fmt=fmt, dense=dense, params=params: fmt.from_dense(dense, **params)):
            raise SystemExit(f"{title}: compiled and numpy converters differ")
        contenders: Timed = {
            "from dense": lambda fmt=fmt, dense=dense, params=params: fmt.from_dense(dense, **params),
            "to dense": matrix.to_dense,
        }
        contenders |= {f"{k}, numpy": (lambda call=call: in_numpy(call)) for k, call in list(contenders.items())}
        if dense.dtype == np.float32:
            contenders["from dense, scipy csr"] = lambda dense=dense: scipy.sparse.csr_array(dense)
            contenders["to dense, scipy csr"] = scipy.sparse.csr_array(dense).toarray
        for name, timed in turns(contenders, repeats).items():
            rate = 1e-6 * dense.nbytes / timed["best_ms"]
            results.append({"matrix": title, "bytes": dense.nbytes, "what": name, **timed, "GB/s": rate})
            print(
                f"{title:20} {name:28} {timed['median_ms']:9.2f} {timed['best_ms']:9.2f} ms {rate:7.2f} GB/s",
                flush=True,
            )
    return results


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    names = ("spformat", "numpy", "scipy", "numba", "torch")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    return {
        "cpu": cpu,
        "cores": threads.cores(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        **versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, help="rows and columns of the matrices")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("-n", type=int, nargs="+", help="columns of B")
    parser.add_argument("--only", choices=("products", "conversions", "few"))
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    few = options.only == "few"
    size = options.size or (2048 if few else 4096)
    columns = options.n or ([1, 2, 4, 8, 16] if few else [16, 128, 512])
    report: dict[str, Any] = {"machine": machine(), "size": size}
    print(report["machine"])
    if few:
        report["few columns"] = few_columns(size, options.repeats, columns)
    if options.only in (None, "products"):
        report["products"] = products(size, options.repeats, columns)
    if options.only in (None, "conversions"):
        report["conversions"] = conversions(size, options.repeats)
    report["machine"]["load at the end"] = os.getloadavg()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
