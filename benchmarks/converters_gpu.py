"""Converters on a GPU, as called: python benchmarks/converters_gpu.py [--only csr bsr ..] [--repeats 20] [--json FILE]

Wall time of a call with its allocations, its checks and its waits, the device idle before and after; medians.

dense      a bf16 matrix to each format and back, GB/s of dense bytes
csr        a CSR with 10 M nonzeros to each format and back, GB/s of the bytes of the CSR
prune      a bf16 matrix without zeros to some formats, the smallest values dropped: in one step, and by a mask; and
           what ``inspect`` counts of it
small      256 x 256: microseconds until a call returns, before anybody waits for the device

Values and structures suit each format: 2:4, vectors 8:32, blocks of 32, or nothing. Beside them are the calls of torch
(bf16) and CuPy (float32, since it has no CSR of 16-bit values) where they exist, on the same structure, and a copy of
the dense array. *target* is a multiple of the fastest of these calls, so it is known only where one of them ran.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import spformat as sf
from spformat import backends
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.formats import parse_spec
from spformat.formats.base import Format
from spformat.preprocess import masks
from spformat.preprocess.structure import analyse

SHAPES = ((8192, 8192), (4096, 4096), (11008, 4096))
SMALL = (256, 256)
PARTS = ("dense", "csr", "prune", "small")
NONZEROS = 10_000_000
CASES = (
    ("csr", "single", 0.5), ("csr", "single", 0.1), ("bitmask", "single", 0.5), ("bsr:blocksize=32x32", "blocks", 0.2),
    ("dbsr:blocksize=32x32", "blocks", 0.2), ("sr-bcrs", "single", 0.1), ("ell-buckets", "single", 0.05),
    ("two-four", "2:4", 0.5), ("vector-nm:n=8,m=32,vector_length=32", "8:32", 0.25),
)  # fmt: skip
"""Target, structure, share of nonzeros."""
PRUNED = (
    ("csr", 0.5), ("csr", 0.9), ("bitmask", 0.5), ("bsr:blocksize=32x32", 0.8), ("ell-buckets", 0.95),
    ("two-four", 0.5), ("vector-nm:n=8,m=32,vector_length=32", 0.75),
)  # fmt: skip
"""Target, share of values or blocks that are dropped."""
TARGETS = {("csr", "to"): 2.0, ("bsr", "to"): 3.0, ("csr", "back"): 5.0}
"""Wanted speed over the fastest other call."""
OF_CSR, SLOWER, OVER_OTHERS = 100.0, {"ell-buckets": 20.0, "sr-bcrs": 20.0}, 3.0
"""Wanted GB/s of the bytes of a CSR that is converted, of formats with a lower aim too, and speed over other calls."""


class Row(NamedTuple):
    """One line of the report."""

    part: str
    shape: tuple[int, int]
    target: str
    share: float
    direction: str
    """to: from the dense array or the CSR to the format; back: the reverse."""
    who: str
    us: float
    gb_per_s: float
    aim: float = math.nan
    """GB/s (in part small: 0)."""


def weights(xp: Any, shape: tuple[int, int], kind: str, share: float) -> Any:
    """bf16 [M, K] in the library ``xp``, random values where the structure ``kind`` has nonzeros."""
    rng, (M, K) = xp.random.default_rng(0), shape

    def drawn(*extents: int) -> Any:
        return rng.random(extents, dtype=np.float32)

    if kind in ("2:4", "8:32"):
        n, m = map(int, kind.split(":"))
        rows = M if m == 4 else M // 32
        keep = (xp.argsort(drawn(rows, K // m, m), axis=2) < n).reshape(rows, K)
        keep = keep if m == 4 else xp.repeat(keep, 32, axis=0)
    elif kind == "blocks":
        keep = xp.repeat(xp.repeat(drawn(M // 32, K // 32) < share, 32, axis=0), 32, axis=1)
    else:
        keep = drawn(M, K) < share
    bits = xp.where(keep, (drawn(M, K) * 1024).astype(np.uint16) + np.uint16(0x3C00), np.uint16(0))
    return bits.view(VALUE_TYPES["bfloat16"].numpy)


def shape_of(nonzeros: int, share: float) -> tuple[int, int]:
    """A shape with 4096 rows that has about so many nonzeros at that share."""
    return 4096, max(32, round(nonzeros / share / 4096 / 32) * 32)


class Clock:
    """Times calls; ``wait`` returns when the device is idle."""

    def __init__(self, wait: Callable[[], object], repeats: int, seconds: float) -> None:
        self.wait, self.repeats, self.seconds = wait, repeats, seconds

    def us(self, call: Callable[[], object], whole: bool = True) -> float:
        """Median microseconds of a call, until the device is idle or (not ``whole``) until the call returns.

        At least three calls beside the first two, at most ``repeats``; slow calls are repeated less often.
        """
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < self.repeats + 2 and (len(times) < 5 or time.perf_counter() - begin < self.seconds):
            self.wait()
            start = time.perf_counter()
            result = call()
            if whole:
                self.wait()
            times.append(time.perf_counter() - start)
            self.wait()
            del result
        return statistics.median(times[2:]) * 1e6


def check(what: str, x: Any, back: Any) -> None:
    """Raises SystemExit unless a dense array came back with the same bits."""
    if not bool((x.view(np.uint16) == back.view(np.uint16)).all()):
        raise SystemExit(f"{what}: {x.shape} came back different")


def rivals(x: Any, target: str) -> Iterator[tuple[str, str, int, Callable[[], object]]]:
    """Other libraries' calls for the same conversion: (who, direction, dense bytes, call)."""
    name = target.partition(":")[0]
    if importlib.util.find_spec("torch") and name in ("csr", "bsr"):
        import torch

        warnings.filterwarnings("ignore", "Sparse (CSR|BSR) tensor support")
        t = torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
        convert = t.to_sparse_csr if name == "csr" else lambda: t.to_sparse_bsr((32, 32))
        yield "torch", "to", x.nbytes, convert
        yield "torch", "back", x.nbytes, convert().to_dense
    if name == "csr" and type(x).__module__.startswith("cupy"):
        from cupyx.scipy import sparse

        wide = x.astype(np.float32)
        yield "cupyx", "to", wide.nbytes, lambda: sparse.csr_matrix(wide)
        yield "cupyx", "back", wide.nbytes, sparse.csr_matrix(wide).toarray


def dense_part(xp: Any, clock: Clock, shape: tuple[int, int], only: list[str] | None) -> Iterator[Row]:
    """Dense to each format and back, one row for each caller."""
    x = weights(xp, shape, "single", 0.5)
    yield _row("dense", shape, "-", 1, "to", "copy", clock.us(x.copy), x.nbytes)
    for target, kind, share in chosen(only):
        x = weights(xp, shape, kind, share)
        a = sf.convert(x, target)
        check(target, x, a.to_dense())
        others = [
            _row("dense", shape, target, share, direction, who, clock.us(call), size)
            for who, direction, size, call in rivals(x, target)
        ]
        for direction, call in (("to", lambda x=x, t=target: sf.convert(x, t)), ("back", a.to_dense)):
            speeds = [r.gb_per_s for r in others if r.direction == direction]
            factor = TARGETS.get((target.partition(":")[0], direction), math.nan)
            aim = factor * max(speeds) if speeds else math.nan
            row = _row("dense", shape, target, share, direction, "spformat", clock.us(call), x.nbytes)
            yield row._replace(aim=aim)
        yield from others


def csr_part(xp: Any, clock: Clock, only: list[str] | None, nonzeros: int = NONZEROS) -> Iterator[Row]:
    """A CSR of that many nonzeros to each format and back, and transposed."""
    for target, kind, share in chosen(only):
        x = weights(xp, shape_of(nonzeros, share), kind, share)
        a, name = sf.convert(x, "csr"), target.partition(":")[0]
        calls = [("csr transposed", "to", a.transposed)]
        if name != "csr":
            f: Format = sf.convert(a, target)
            check(target, x, f.to_dense())
            calls = [(target, "to", lambda a=a, t=target: sf.convert(a, t)), (target, "back", f.to_csr)]
        if name == "bsr":
            calls.append(("bsr transposed", "to", f.T.materialize))
        others = [
            _row("csr", x.shape, what, share, direction, who, clock.us(call), size)
            for who, what, direction, size, call in rivals_of_csr(x, a, target)
        ]
        for what, direction, call in calls:
            speeds = [r.gb_per_s for r in others if (r.target, r.direction) == (what, direction)]
            aim = max(SLOWER.get(name, OF_CSR), OVER_OTHERS * max(speeds, default=0.0))
            yield _row("csr", x.shape, what, share, direction, "spformat", clock.us(call), a.nbytes)._replace(aim=aim)
        yield from others


def rivals_of_csr(x: Any, a: Any, target: str) -> Iterator[tuple[str, str, str, int, Callable[[], object]]]:
    """Other libraries' calls that begin or end with a CSR of the same structure: (who, target as in the table,
    direction, bytes of the CSR, call). Those that a library refuses, for its types or on a device, are left out."""
    name, cupy = target.partition(":")[0], type(x).__module__.startswith("cupy")
    if importlib.util.find_spec("torch") and name in ("csr", "bsr") and cupy:
        import torch

        warnings.filterwarnings("ignore", "Sparse (CSR|BSR|CSC) tensor support")
        sizes = 4 * (a.indptr.size + a.indices.size) + a.data.nbytes
        values = torch.from_dlpack(a.data.view(np.int16)).view(torch.bfloat16)
        indices = (torch.from_dlpack(i.astype(np.int32)) for i in (a.indptr, a.indices))
        csr = torch.sparse_csr_tensor(*indices, values, a.shape)
        wanted = [("csr transposed", "to", lambda: csr.to_sparse_csc())]
        if name == "bsr":
            wanted = [(target, "to", lambda: csr.to_sparse_bsr((32, 32)))]
            with contextlib.suppress(RuntimeError):
                bsr = torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16).to_sparse_bsr((32, 32))
                wanted.append((target, "back", lambda: bsr.to_sparse_csr()))
        for what, direction, call in wanted:
            with contextlib.suppress(RuntimeError):
                call()
                yield "torch", what, direction, sizes, call
    if name == "csr" and cupy:
        from cupyx.scipy import sparse

        wide = sparse.csr_matrix((a.data.astype(np.float32), a.indices, a.indptr), shape=a.shape)
        yield "cupyx", "csr transposed", "to", a.nbytes + a.data.nbytes, wide.tocsc


def prune_part(xp: Any, clock: Clock, shape: tuple[int, int], only: list[str] | None) -> Iterator[Row]:
    """Pruned to a format: ``masks.prune``, and beside it a mask, the pruned array, and the conversion of that."""
    x = (xp.random.default_rng(0).random(shape, dtype=np.float32) * 32768).astype(np.uint16)
    x = (x % 0x4000 + 0x3000).view(VALUE_TYPES["bfloat16"].numpy)
    for target, zeros in PRUNED:
        if only and target.partition(":")[0] not in only:
            continue
        fmt, given = parse_spec(target)
        pattern = fmt.pattern(fmt.resolve_params(given))

        def by_mask(t: str = target, zeros: float = zeros, pattern: Any = pattern) -> Format:
            return sf.convert(masks.apply(x, masks.of_pattern(x, pattern, zeros)), t)

        def at_once(t: str = target, zeros: float = zeros) -> Format:
            return masks.prune(x, t, sparsity=zeros)

        check(target, by_mask().to_dense(), at_once().to_dense())
        for who, call in (("spformat", at_once), ("by mask", by_mask)):
            yield _row("prune", shape, target, 1 - zeros, "to", who, clock.us(call), x.nbytes)
    if not only:
        yield _row("prune", shape, "counts of inspect", 1, "to", "spformat", clock.us(lambda: analyse(x)), x.nbytes)


def small_part(xp: Any, clock: Clock, only: list[str] | None) -> Iterator[Row]:
    """Host time of calls on a small matrix."""
    for target, kind, share in chosen(only):
        x = weights(xp, SMALL, kind, share)
        a = sf.convert(x, target)
        calls = [("spformat", "to", lambda x=x, t=target: sf.convert(x, t)), ("spformat", "back", a.to_dense)]
        calls += [(who, direction, call) for who, direction, _, call in rivals(x, target)]
        for who, direction, call in calls:
            yield Row("small", SMALL, target, share, direction, who, clock.us(call, whole=False), 0)


def chosen(only: list[str] | None) -> list[tuple[str, str, float]]:
    """The cases of the formats in ``only``; all of them without it."""
    return [c for c in CASES if not only or c[0].partition(":")[0] in only]


def _row(part: str, shape: Any, target: str, share: float, direction: str, who: str, us: float, size: int) -> Row:
    return Row(part, shape, target, share, direction, who, us, size / us / 1e3)


def text_of(r: Row) -> str:
    """A line of the table."""
    what = f"{r.part:6s}{r.shape[0]:6d} x {r.shape[1]:<6d}{r.target:36s}{r.share:4.0%}"
    label = f"{what} {r.direction:5s}{r.who:9s}{r.us:10.1f} us"
    if r.part == "small":
        return label
    aim = "" if math.isnan(r.aim) else f"   target {r.aim:6.0f}, {'met' if r.gb_per_s >= r.aim else 'MISSED'}"
    return f"{label}{r.gb_per_s:8.0f} GB/s{aim}"


def main() -> None:
    """The table, and a JSON document in ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FORMAT", help="formats")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.4, help="most for one call, after five of it")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    options = parser.parse_args()
    missing = backends.get("cuda").missing()
    if missing:
        raise SystemExit(f"cuda: {'; '.join(missing)}")
    import cupy as cp

    clock = Clock(cp.cuda.Device().synchronize, options.repeats, options.seconds)
    parts = {
        "dense": lambda: (r for s in SHAPES for r in dense_part(cp, clock, s, options.only)),
        "csr": lambda: csr_part(cp, clock, options.only),
        "prune": lambda: (r for s in SHAPES[:2] for r in prune_part(cp, clock, s, options.only)),
        "small": lambda: small_part(cp, clock, options.only),
    }
    rows, begin = [], time.perf_counter()
    for part in options.parts:
        for row in parts[part]():
            rows.append(row)
            print(text_of(row), flush=True)
    print(f"{len(rows)} rows in {time.perf_counter() - begin:.0f} s")
    if options.json:
        name = cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        about = {"device": name, "cupy": cp.__version__, "spformat": sf.__version__}
        plain = [r._asdict() | {"aim": None if math.isnan(r.aim) else r.aim} for r in rows]
        options.json.write_text(json.dumps(about | {"rows": plain}, indent=1))


if __name__ == "__main__":
    main()
