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
import ctypes
import json
import pstats
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
import converters_gpu as converters  # noqa: E402
from emulator import missing, stand_in  # noqa: E402

import spformat as sf  # noqa: E402
from spformat.arrays.dtypes import VALUE_TYPES  # noqa: E402
from spformat.backends.cuda.runtime import scratch  # noqa: E402
from spformat.backends.cuda.runtime.scratch import Counters, Workspace  # noqa: E402
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


class Memory:
    """Where an array is: every one at the same place, as nothing is read or written."""

    ptr = 1 << 20


class Scope:
    """The device, the stream, and what else is entered."""

    id, ptr = 0, 0
    compute_capability = "90"

    def __enter__(self) -> Scope:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FastArray(stand_in.Array):
    """An array of which only the form is known. What needs contents gets zeros."""

    __slots__ = ("data", "device", "dtype", "flags", "itemsize", "nbytes", "ndim", "shape", "size", "strides")

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.shape = shape if type(shape) is tuple else tuple(shape) if isinstance(shape, list) else (int(shape),)
        self.dtype = np.dtype(dtype)
        self.data, self.device, self.flags, self.ndim = MEMORY, SCOPE, FLAGS, len(self.shape)
        size = 1
        for extent in self.shape:
            size *= extent
        self.size, self.itemsize = size, self.dtype.itemsize
        self.nbytes = size * self.itemsize

    @property
    def host(self) -> np.ndarray[Any, Any]:  # type: ignore[override]
        """Its contents."""
        return np.zeros(self.shape, self.dtype)

    def view(self, dtype: Any) -> FastArray:
        """The same memory as another type of the same width."""
        return FastArray(self.shape, dtype)

    def reshape(self, *shape: Any) -> FastArray:
        """The same memory in another shape."""
        return FastArray(self.host.reshape(*shape).shape, self.dtype)

    def astype(self, dtype: Any, copy: bool = True) -> FastArray:
        """A copy, unless ``dtype`` is the own type and no copy is asked for."""
        if not copy and self.dtype == dtype:
            return self
        COUNTS["array ops"] += 1
        return FastArray(self.shape, dtype)

    def __getitem__(self, at: Any) -> FastArray:
        return FastArray(self.host[at].shape, self.dtype)

    def copy(self) -> FastArray:
        COUNTS["array ops"] += 1
        return FastArray(self.shape, self.dtype)

    def fill(self, _: Any) -> None:
        COUNTS["memsets"] += 1

    def get(self) -> np.ndarray[Any, Any]:
        """Its contents on the host."""
        return PINNED.get(self)


MEMORY, SCOPE, FLAGS = Memory(), Scope(), np.empty((1, 1)).flags
COUNTS: Counter[str] = Counter()


class Pinned:
    """Pinned memory, and what the kernels of a call had written there whenever the host had waited for them.

    What a call allocates is the same memory in every call, as CuPy's pool would give it.
    """

    def __init__(self) -> None:
        self.known: list[Any] = []
        self.own: list[Any] = []
        self.log: list[Any] = []
        self.recording, self.allocated, self.waits = True, 0, 0

    def record(self) -> None:
        """The next call runs in the emulator."""
        self.recording, self.own, self.log = True, [], []
        self.known = [w for w in self.known if w() is not None]

    def start(self) -> None:
        """A call begins in which launches do nothing."""
        self.recording, self.allocated, self.waits = False, 0, 0

    def alloc(self, size: int) -> Any:
        """``cupy.cuda.alloc_pinned_memory``"""
        COUNTS["pinned"] += 1
        if not self.recording:
            self.allocated += 1
            return self.own[self.allocated - 1]
        buffer = stand_in._pinned(size)
        self.own.append(buffer)
        self.known.append(weakref.ref(buffer))
        return buffer

    def wait(self) -> None:
        """The device is done."""
        if self.recording:
            live = [b for w in self.known if (b := w()) is not None]
            self.log.append([(ctypes.addressof(b), bytes(b)) for b in live])
            return
        COUNTS["waits"] += 1
        for address, words in self.log[self.waits]:
            ctypes.memmove(address, words, len(words))
        self.waits += 1

    def get(self, a: Any) -> np.ndarray[Any, Any]:
        """The host copies an array."""
        if self.recording:
            self.log.append(a.host.copy())
            return self.log[-1]  # type: ignore[no-any-return]
        COUNTS["waits"] += 1
        COUNTS["copies"] += 1
        self.waits += 1
        return self.log[self.waits - 1]  # type: ignore[no-any-return]


PINNED = Pinned()


class Stream:
    """The current stream."""

    ptr = 0

    def synchronize(self) -> None:
        """Wait for the device."""
        PINNED.wait()


def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, counted as ``name``."""

    def counted(*args: Any, **options: Any) -> Any:
        COUNTS[name] += 1
        return function(*args, **options)

    return counted


def launch(*_: Any) -> None:
    """``cuLaunchKernel`` of a kernel that does nothing."""
    COUNTS["launches"] += 1


def empty(shape: Any, dtype: Any = float, order: str = "C") -> FastArray:
    """``cupy.empty``"""
    COUNTS["memory"] += 1
    return FastArray(shape, dtype)


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> FastArray:
    """``cupy.zeros``"""
    COUNTS["memory"] += 1
    COUNTS["memsets"] += 1
    return FastArray(shape, dtype)


def asarray(x: Any, dtype: Any = None) -> FastArray:
    """``cupy.asarray``"""
    if isinstance(x, FastArray):
        return x
    COUNTS["memory"] += 1
    COUNTS["copies"] += 1
    return FastArray(np.shape(x), dtype or x.dtype)


class Machine:
    """Two states of the stand-in for CuPy: it computes, or it only counts."""

    def __init__(self) -> None:
        stand_in.install()
        import cupy

        cupy.__spec__ = ModuleSpec("cupy", None)
        cupy.__spec__._initializing = False  # as of a real module: "import cupy" takes 0.8 us longer without it
        from cupy.cuda import runtime
        from cupy_backends.cuda.api import driver

        cupy.cuda.alloc = alloc
        stream = Stream()
        cupy.cuda.get_current_stream = lambda: stream
        cupy.cuda.alloc_pinned_memory = PINNED.alloc
        stand_in.Array.get = lambda a: PINNED.get(a)  # type: ignore[method-assign]
        fast = {
            "ndarray": FastArray,
            "empty": empty,
            "zeros": zeros,
            "asarray": asarray,
            "ascontiguousarray": lambda x: x,
        }
        others = stand_in.strict_cupy.FUNCTIONS - fast.keys()
        fast |= {name: counting("array ops", getattr(cupy, name)) for name in others}
        self.places = [(cupy, name, getattr(cupy, name), f) for name, f in fast.items()]
        self.places.append((driver, "launchKernel", driver.launchKernel, launch))
        self.places.append((runtime, "memsetAsync", runtime.memsetAsync, memset))
        self.places.append((Workspace, "_allocated", Workspace._allocated, staticmethod(allocated)))
        self.places.append((scratch, "_carved", vars(scratch)["_carved"], carved))
        Counters.POLLS = 0  # the words that a kernel stores are there after a wait

    def computes(self) -> None:
        """Kernels run in the emulator."""
        for module, name, real, _ in self.places:
            setattr(module, name, staticmethod(real) if module is Workspace else real)
        PINNED.record()

    def counts(self) -> None:
        """Kernels do nothing."""
        for module, name, _, fast in self.places:
            setattr(module, name, fast)


def memset(*_: Any) -> None:
    """``memsetAsync``"""
    COUNTS["memsets"] += 1


CUT = Workspace.__dict__["_allocated"].__func__
"""How a workspace is cut, before the stand-in gives each piece pages of its own."""


def alloc(nbytes: int) -> Memory:
    """``cupy.cuda.alloc``"""
    COUNTS["memory"] += 1
    return MEMORY


def allocated(nbytes: tuple[int, ...]) -> Any:
    """The pieces of a workspace, cut as on a device."""
    return CUT(nbytes)


def carved(specs: tuple[Any, ...]) -> list[FastArray]:
    """New arrays; small ones, as here, in one allocation."""
    COUNTS["memory"] += 1
    return [FastArray(*spec) for spec in specs]


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
