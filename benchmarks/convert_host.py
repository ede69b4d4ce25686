"""What a conversion on a GPU asks of the host, counted without one: python benchmarks/convert_host.py [--only bsr ..]

The project's code for CUDA runs as it is, on the CuPy of tests/emulator, with bf16 matrices of 256 x 256. A conversion
first runs on the emulated GPU, which needs g++; the words that the host waits for are written down. Then it runs again
and again with launches that do nothing, and is given these words, so that only Python is left.

launches   kernels that are queued        memory   allocations on the device     pinned   of pinned memory
memsets    allocations that are zeroed    waits    until the device is done      copies   between host and device
array ops  CuPy's own operations on arrays, each at least one launch that is not ours

*Python* is the least time of a call on this CPU, without what the stand-in for CuPy takes; it says nothing about a GPU.
*assumed* adds what each of these costs a host with CuPy, roughly and without any kernel's own time: see ``COSTS``.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
import converters_gpu as converters  # noqa: E402
from counting_cupy import COUNTS, PINNED, FastArray, Machine, empty, launch  # noqa: E402
from emulator import missing  # noqa: E402

import spformat as sf  # noqa: E402
from spformat.arrays.dtypes import VALUE_TYPES  # noqa: E402
from spformat.formats.base import Format  # noqa: E402
from spformat.preprocess import masks  # noqa: E402

BFLOAT16, FLOAT32 = VALUE_TYPES["bfloat16"].numpy, VALUE_TYPES["float32"].numpy

SHAPE = (256, 256)
CASES = (
    ("csr", "single", 0.5), ("bitmask", "single", 0.5), ("bsr:blocksize=32x32", "blocks", 0.2),
    ("dbsr:blocksize=32x32", "blocks", 0.2), ("sr-bcrs", "single", 0.1), ("ell-buckets", "single", 0.05),
    ("two-four", "2:4", 0.5), ("vector-nm:n=8,m=32,vector_length=32", "8:32", 0.25),
)  # fmt: skip
"""Target, structure, share of nonzeros."""
COSTS = {"launches": 3.5, "memory": 2.0, "pinned": 1.5, "memsets": 2.5, "waits": 12.0, "copies": 10.0, "array ops": 8.0}
"""Assumed microseconds on a host with CuPy: of its calls and of the driver's, not of a device."""
ROUNDS = 2000
"""Most calls of a conversion."""


def overheads() -> dict[str, float]:
    """Microseconds that the stand-in itself takes for one of each."""
    calls: dict[str, Callable[[], Any]] = {
        "launches": lambda: launch(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11),
        "memory": lambda: empty((256, 256), FLOAT32),
        "pinned": lambda: None,
        "waits": lambda: None,
    }
    nothing = least(lambda: None)
    return {name: least(call) - nothing for name, call in calls.items()}


def least(call: Callable[[], Any], seconds: float = 0.2) -> float:
    """Least microseconds of a call."""
    best, until, rounds = float("inf"), time.perf_counter() + seconds, 0
    while rounds < ROUNDS and (rounds < 50 or time.perf_counter() < until):
        start = time.perf_counter_ns()
        call()
        best, rounds = min(best, time.perf_counter_ns() - start), rounds + 1
    return best / 1e3


class Row(NamedTuple):
    """One conversion."""

    name: str
    counts: dict[str, int]
    python: float
    """Microseconds of a call."""

    @property
    def assumed(self) -> float:
        """Microseconds of a call with what CuPy and the driver take."""
        return self.python + sum(COSTS[name] * n for name, n in self.counts.items())


def measured(
    machine: Machine, name: str, call: Callable[[Any], Any], x: Any, taken: dict[str, float], seconds: float
) -> Row:
    """One conversion ``call(x)``, recorded and then repeated."""
    for _ in range(2):  # the first call may allocate what stays
        machine.computes()
        call(x)
    machine.counts()
    light = lightened(x)

    def once() -> None:
        PINNED.start()
        call(light)

    once()
    COUNTS.clear()
    once()
    counts = {k: n for k, n in COUNTS.items() if n}
    own = sum(taken.get(k, 0.0) * n for k, n in counts.items())
    row = Row(name, counts, least(once, seconds) - own)
    machine.computes()
    return row


def lightened(x: Any) -> Any:
    """The array, or the matrix, on arrays that cost little."""
    if not isinstance(x, Format):
        return FastArray(x.shape, x.dtype)
    return type(x).trusted(**x.fields() | {k: FastArray(a.shape, a.dtype) for k, a in x.arrays().items()})


def conversions(only: list[str] | None) -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    """What it is, the call, and its argument."""
    import cupy

    for target, kind, share in CASES:
        name = target.partition(":")[0]
        if only and name not in only:
            continue
        x = cupy.asarray(converters.weights(np, SHAPE, kind, share).view(np.uint16)).view(BFLOAT16)
        a = sf.convert(x, target)
        yield f"dense -> {name}", lambda x, t=target: sf.convert(x, t), x
        yield f"{name} -> dense", lambda a: a.to_dense(), a
        if name != "csr":
            csr = sf.convert(x, "csr")
            yield f"csr -> {name}", lambda a, t=target: sf.convert(a, t), csr
            yield f"{name} -> csr", lambda a: a.to_csr(), a
        if name in ("csr", "bsr", "dbsr"):
            yield f"{name} transposed", lambda a: a.T.materialize(), a
        yield f"check of {name}", lambda a: type(a)(**a.fields()).validate(), a
    if only and "masks" not in only:
        return
    x = cupy.asarray(converters.weights(np, SHAPE, "single", 1).view(np.uint16)).view(BFLOAT16)
    yield "mask, magnitude", lambda x: masks.magnitude(x, 0.5), x
    yield "mask, 2:4", lambda x: masks.magnitude_nm(x, 2, 4), x
    yield "mask, vectors", lambda x: masks.magnitude_vector_nm(x, 8, 32, 32), x
    yield "mask, blocks", lambda x: masks.magnitude_blocks(x, (32, 32), 0.5), x
    for target in ("csr", "bitmask", "bsr", "dbsr"):
        given = {"blocksize": (32, 32)} if "bsr" in target else {}
        yield f"prune to {target}", lambda x, t=target, g=given: masks.prune(x, t, sparsity=0.5, **g), x
    yield "prune to two-four", masks.prune_two_four, x
    yield "prune to vector-nm", lambda x: masks.prune_vector_nm(x, n=8, m=32, vector_length=32), x


def main() -> None:
    """The table, and a JSON document in ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FORMAT", help="formats, and masks")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    parser.add_argument("--seconds", type=float, default=0.4, help="most for one conversion, after 50 calls")
    parser.add_argument("--profile", action="store_true", help="where Python's time goes, of each conversion")
    options = parser.parse_args()
    machine, taken = Machine(), overheads()
    print(f"{'':22s}" + "".join(f"{name:>10s}" for name in (*COSTS, "Python us", "assumed us")))
    rows = []
    for name, call, x in conversions(options.only):
        row = measured(machine, name, call, x, taken, options.seconds)
        rows.append(row)
        counts = "".join(f"{row.counts.get(k, 0) or '.':>10}" for k in COSTS)
        print(f"{name:22s}{counts}{row.python:10.1f}{row.assumed:10.0f}", flush=True)
        if options.profile:
            profile(machine, call, x)
    if options.json:
        about = {"shape": SHAPE, "costs": COSTS, "stand-in": taken, "python": sys.version.split()[0]}
        plain = [r._asdict() | {"assumed": r.assumed} for r in rows]
        options.json.write_text(json.dumps(about | {"rows": plain}, indent=1))


def profile(machine: Machine, call: Callable[[Any], Any], x: Any) -> None:
    """The functions that take most of the time."""
    machine.computes()
    call(x)
    machine.counts()
    light, profiler = lightened(x), cProfile.Profile()
    for _ in range(3000):
        PINNED.start()
        profiler.enable()
        call(light)
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    machine.computes()


if __name__ == "__main__":
    if reason := missing():
        raise SystemExit(f"emulator: {reason}")
    main()
