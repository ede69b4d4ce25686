"""Bytes that a matrix keeps on a GPU after products: python benchmarks/at_rest.py [--size 4096] [--every] [--json FILE]

For each format a matrix of 16-bit values (csr and ell-buckets in float32, too) is multiplied with B of 1, 16, 300 and
2048 columns, row-major and column-major, by the kernels that the dispatcher chooses (--every: by all that take it).
The table says, in units of the format's bytes, what is freed with the matrix afterwards: the matrix itself and what
kernels derived from it (at rest), and apart from that the workspaces of its plans. A second matrix keeps alive what
matrices share.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import numpy as np

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime.scratch import Scratch
from spformat.preprocess import masks
from spformat.products.kernel import Accepted

COLUMNS = (1, 16, 300, 2048)
CASES: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("two-four", {}, 0.5),
    ("bitmask", {}, 0.5), ("bitmask", {}, 0.7), ("bitmask", {}, 0.9),
    ("sr-bcrs", {"vector_length": 8, "stride": 16}, 0.9),
    ("vector-nm", {"n": 16, "m": 32, "vector_length": 128}, 0.5),
    ("vector-nm", {"n": 8, "m": 32, "vector_length": 32}, 0.75),
    ("bsr", {"blocksize": (64, 64)}, 0.8), ("bsr", {"blocksize": (16, 16)}, 0.8),
    ("dbsr", {"blocksize": (64, 64)}, 0.8),
    ("csr", {}, 0.9), ("csr", {}, 0.95), ("ell-buckets", {}, 0.9),
)  # fmt: skip
"""(format, params, share of zeros)"""


def dense(name: str, params: dict[str, Any], zeros: float, shape: tuple[int, int], dtype: str) -> np.ndarray[Any, Any]:
    """A random matrix that fits the format."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape).astype(VALUE_TYPES[dtype].numpy)
    if name == "two-four":
        return masks.apply(w, masks.magnitude_nm(w, 2, 4))
    if name == "vector-nm":
        return masks.apply(w, masks.magnitude_vector_nm(w, params["n"], params["m"], params["vector_length"]))
    height, width = {"sr-bcrs": (params.get("vector_length", 1), 1)}.get(name, params.get("blocksize", (1, 1)))
    kept = rng.random((-(-shape[0] // height), -(-shape[1] // width))) >= zeros
    return w * np.kron(kept, np.ones((height, width), bool))[: shape[0], : shape[1]].astype(w.dtype)


def multiply(a: Any, every: bool) -> None:
    """The products of the table."""
    import cupy

    for n in COLUMNS:
        for order in "CF":
            b = cupy.ones((a.shape[1], n), a.dtype, order)
            sf.spmm(a, b)
            if every:
                for answer in sf.explain(a, b).answers:
                    if isinstance(answer, Accepted) and answer.kernel.startswith("cuda."):
                        sf.spmm(a, b, backend=answer.kernel)
    cupy.cuda.runtime.deviceSynchronize()


def workspaces() -> int:
    """Bytes of the workspaces of all plans that plans do not share."""
    alive = [x for x in gc.get_objects() if type(x) is Scratch and not x._purpose]
    return sum(int(b.array.nbytes) for s in alive for b in (*s._buffers.values(), *s._recorded))


def measured(name: str, params: dict[str, Any], zeros: float, size: int, dtype: str, every: bool) -> dict[str, Any]:
    """One row of the table."""
    import cupy

    pool = cupy.get_default_memory_pool()
    x = dense(name, params, zeros, (size, size), dtype)
    other, a = (sf.convert(x, name, **params).to("cuda").ensure_valid() for _ in range(2))
    multiply(other, every)
    multiply(a, every)
    gc.collect()
    before, work, nbytes = pool.used_bytes(), workspaces(), a.nbytes
    del a
    gc.collect()
    freed, work = before - pool.used_bytes(), work - workspaces()
    row = {"format": name, "params": str(params), "dtype": dtype, "zeros": zeros, "bytes": nbytes}
    return row | {"of dense": nbytes / x.nbytes, "at rest": (freed - work) / nbytes, "workspaces": work / nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--every", action="store_true", help="by every kernel that takes the product")
    parser.add_argument("--formats", nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'format':46} {'dtype':9} zeros of dense  at rest  workspaces")
    for name, params, zeros in CASES:
        for dtype in ("float16", "float32") if name in ("csr", "ell-buckets") else ("float16",):
            if options.formats and name not in options.formats:
                continue
            rows.append(r := measured(name, params, zeros, options.size, dtype, options.every))
            text = f"{name}:{','.join(f'{k}={v}' for k, v in params.items())}".rstrip(":")
            print(
                f"{text:46} {dtype:9} {zeros:5} {r['of dense']:8.2f} {r['at rest']:8.3f} {r['workspaces']:11.3f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
