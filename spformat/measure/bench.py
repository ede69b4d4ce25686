"""Measure products: contenders are checked, then timed in turn in one process; medians with cold and with hot caches.

On a device, times are taken with CUDA events, after a write of 256 MB (cold L2) or right after the same product (hot);
on the host, with the wall clock. Only ratios measured side by side in one run mean anything. ``compare`` therefore runs
the contenders of a case in turn, in an order drawn anew in each round, so that changes of clocks and other load affect
all of them alike.
"""

from __future__ import annotations

import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import numpy as np

from ..arrays.library import Array, device_error, is_cupy, namespace
from ..errors import DeviceFault, SpformatError
from ..formats.base import Format

FLUSH = 256 << 20
"""Bytes written between cold runs; more than any L2."""
DENSE, SAMPLED = 1 << 28, 128
"""Up to this many elements, A is checked as a dense matrix; of a larger A this many rows are checked."""
FLUSH_US = 50
"""Microseconds that writing ``FLUSH`` bytes takes at least, on any device of today."""
IN_FLIGHT = 8
"""Rounds of contenders that are queued on a device before the host waits for it."""

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int32": 0.0}
"""Half a unit in the last place of an output type."""


@dataclass(frozen=True)
class Contender:
    """One way to compute the product: ``run()`` computes it again and returns C."""

    name: str
    run: Callable[[], Array]
    peer: bool = False
    """Whether it is another library, with which our kernels are compared."""


@dataclass(frozen=True)
class Result:
    """One contender in one case."""

    case: str
    name: str
    peer: bool
    cold_us: float
    hot_us: float
    host_us: float
    """Host time of one call, without waiting for the device."""
    error: float
    """Largest error as a share of the bound u |C| + 2 (ceil(K/16)+1) 2^-24 (|A| @ |B|); > 1 is wrong. Infinite where
    NaN and infinities are not exactly those of the product."""
    useful_tflops: float
    dense_tflops: float
    """Dense-equivalent: 2 M N K / t."""
    gbytes_per_s: float
    """Bytes that must move (A as stored, B and C once) / cold time."""
    note: str = ""


@dataclass(frozen=True)
class Case:
    """A matrix and a dense operand, on one device."""

    name: str
    a: Format
    B: Array
    contenders: tuple[Contender, ...]
    out_dtype: str
    meta: dict[str, Any] = field(default_factory=dict)


@np.errstate(invalid="ignore", over="ignore")  # NaN and infinities of A are data here, and compared
def compare(case: Case, repeats: int = 50, warmups: int = 10, seconds: float = 3.0, hot: bool = True) -> list[Result]:
    """Check, then time every contender in turn; the fastest first. A contender that fails is reported as a note.

    seconds: bounds the time of each contender. hot: also the times with hot caches and of the host; NaN without.
    """
    reference = _reference(case)
    alive, out = [], []
    for c in case.contenders:
        try:
            spoil(c.run())  # contenders may share C: one that writes nothing must not pass with another's result
            alive.append((c, _error(c.run(), *reference, case)))
        except (SpformatError, ValueError, TypeError, RuntimeError) as e:
            if isinstance(device_error(e) or e, DeviceFault):
                raise  # no later result would mean anything
            nan = float("nan")
            note = str(e).splitlines()[0][:160]
            out.append(Result(case.name, c.name, c.peer, nan, nan, nan, nan, nan, nan, nan, note))
    del reference
    watch = clock(case.B)
    runs = [c.run for c, _ in alive]
    cold = watch.take_turns(runs, repeats, warmups, cold=True, seconds=seconds)
    unknown = [float("nan")] * len(runs)
    warm = watch.take_turns(runs, repeats, 2, cold=False, seconds=seconds) if hot else unknown
    host = watch.host_times(runs) if hot else unknown
    (M, K), N = case.a.shape, case.B.shape[1]
    nnz = int(case.meta.get("nnz", case.a.stored))
    out_bytes = M * N * (UNIT_BYTES.get(case.out_dtype) or np.dtype(case.out_dtype).itemsize)
    moved = case.a.nbytes + case.B.nbytes + out_bytes
    for (c, error), t_cold, t_hot, t_host in zip(alive, cold, warm, host, strict=True):
        out.append(Result(
            case.name, c.name, c.peer, t_cold, t_hot, t_host, error, 2e-6 * nnz * N / t_cold,
            2e-6 * M * N * K / t_cold, 1e-3 * moved / t_cold,
        ))  # fmt: skip
    return sorted(out, key=lambda r: (r.cold_us != r.cold_us, r.cold_us))


UNIT_BYTES = {"bfloat16": 2}


def _reference(case: Case) -> tuple[Array, Array, Any]:
    """(A @ B, |A| @ |B|, rows) in float64. All rows, on the operands' device; for a large A some rows, on the host."""
    (M, K), xp = case.a.shape, namespace(case.B)
    if M * K <= DENSE:
        A, B = case.a.to_dense().astype(np.float64), case.B.astype(np.float64)
        return A @ B, xp.abs(A) @ xp.abs(B), slice(None)
    csr, B = case.a.to("cpu").to_csr(), case.B.get() if is_cupy(case.B) else case.B
    rows = np.unique(np.append(np.linspace(0, M - 1, SAMPLED, dtype=np.int64), np.diff(csr.indptr).argmax()))
    C, magnitude = (np.zeros((rows.size, B.shape[1])) for _ in range(2))
    for i, (lo, hi) in enumerate(zip(csr.indptr[rows], csr.indptr[rows + 1], strict=True)):
        values, lines = csr.data[lo:hi].astype(np.float64), B[csr.indices[lo:hi]].astype(np.float64)
        C[i], magnitude[i] = values @ lines, np.abs(values) @ np.abs(lines)
    return xp.asarray(C), xp.asarray(magnitude), xp.asarray(rows)


def spoil(C: Array) -> None:
    """Every byte of ``C`` becomes 0xFF, which is NaN in each floating-point type."""
    (C.T if C.flags.f_contiguous else C).reshape(-1).view(np.uint8)[...] = 0xFF


def _error(C: Array, ref: Array, magnitude: Array, rows: Any, case: Case) -> float:
    xp, K, C = namespace(ref), case.a.shape[1], C[rows]
    unit = UNIT.get(C.dtype.name, 2.0**-24)
    subnormal = 2.0**-25 if C.dtype.name == "float16" else 0.0
    bound = unit * xp.abs(ref) + subnormal + 2 * (-(-K // 16) + 1) * 2.0**-24 * magnitude
    got = C.astype(np.float64)
    ratio = xp.abs(got - ref) / xp.maximum(bound, 1e-30)
    ratio[(got == ref) | (xp.isnan(got) & xp.isnan(ref))] = 0  # infinities and NaN, whose differences are NaN, too
    if not bool(xp.isfinite(ratio).all()):
        return float("inf")
    return float(ratio.max()) if ratio.size else 0.0


def _orders(contenders: int, rounds: int) -> Iterator[list[int]]:
    """The order of each round, drawn anew, the same in every run of a program.

    In a fixed order a contender would always follow the same other one, which can gain it up to 5 % on a device.
    """
    draw = random.Random(0)
    for _ in range(rounds):
        yield draw.sample(range(contenders), contenders)


def clock(B: Array) -> _HostClock | _DeviceClock:
    """The clock for products with a dense operand like B: events on its device, or the wall clock."""
    return _DeviceClock(B) if is_cupy(B) else _HostClock()


class _HostClock:
    """Wall clock; cold means that a large buffer was written between runs."""

    def __init__(self) -> None:
        self._buffer = np.zeros(FLUSH // 8, np.float64)

    def take_turns(
        self, runs: Sequence[Callable[[], Any]], repeats: int, warmups: int, *, cold: bool, seconds: float
    ) -> list[float]:
        """Median microseconds of each."""
        for _ in range(min(warmups, 2)):
            for run in runs:
                run()
        times: list[list[float]] = [[] for _ in runs]
        end = time.perf_counter() + seconds * max(1, len(runs))
        for order in _orders(len(runs), repeats):
            for k in order:
                if cold:
                    self._buffer += 1
                start = time.perf_counter()
                runs[k]()
                times[k].append(1e6 * (time.perf_counter() - start))
            if time.perf_counter() > end:
                break
        return [statistics.median(t) for t in times]

    def host_times(self, runs: Sequence[Callable[[], Any]]) -> list[float]:
        """NaN: on the host this time is the time of the run itself."""
        return [float("nan")] * len(runs)


class _DeviceClock:
    """CUDA events on the current stream."""

    def __init__(self, like: Array) -> None:
        self._cp = namespace(like)
        self._buffer = self._cp.zeros(FLUSH // 4, np.float32)

    def take_turns(
        self, runs: Sequence[Callable[[], Any]], repeats: int, warmups: int, *, cold: bool, seconds: float
    ) -> list[float]:
        """Median microseconds of each, between events.

        The stream is blocked while the host queues a call, so that the time between the events is that of the kernels.
        It is blocked equally long for all contenders: as long as the slowest needs. Hot: the same product has just run.
        """
        from ..backends.cuda.runtime.hold import hold

        event, sync = self._cp.cuda.Event, self._cp.cuda.runtime.deviceSynchronize
        ahead = 2 * self._queueing(runs, max(1, warmups)) + 20 - (FLUSH_US if cold else 0)
        pairs: list[list[tuple[Any, Any]]] = [[] for _ in runs]
        end = time.perf_counter() + seconds * max(1, len(runs))
        for i, order in enumerate(_orders(len(runs), repeats)):
            for k in order:
                if cold:
                    self._buffer.fill(0)
                else:
                    runs[k]()
                start, stop = event(), event()
                if ahead > 0:
                    hold(ahead)
                start.record()
                runs[k]()
                stop.record()
                pairs[k].append((start, stop))
            # Wait rarely: the first call on an idle device is up to a fifth slower.
            if i % IN_FLIGHT == IN_FLIGHT - 1:
                sync()
            if time.perf_counter() > end:
                break
        sync()
        elapsed = self._cp.cuda.get_elapsed_time
        return [1e3 * statistics.median(elapsed(a, b) for a, b in events) for events in pairs]

    def _queueing(self, runs: Sequence[Callable[[], Any]], times: int) -> float:
        """Run each a few times: microseconds of the host for a call of the slowest, each at its fastest."""
        slowest = 0.0
        for run in runs:
            calls_us = []
            for _ in range(times):
                start = time.perf_counter()
                run()
                calls_us.append(1e6 * (time.perf_counter() - start))
            slowest = max(slowest, min(calls_us))
        self._cp.cuda.runtime.deviceSynchronize()
        return min(slowest, 5000)

    def host_times(self, runs: Sequence[Callable[[], Any]]) -> list[float]:
        """Microseconds that a call takes on the host, without waiting for the device."""
        sync, out = self._cp.cuda.runtime.deviceSynchronize, []
        for run in runs:
            calls_us = []
            for _ in range(5):
                sync()
                start = time.perf_counter()
                for _ in range(20):
                    run()
                calls_us.append(5e4 * (time.perf_counter() - start))
            sync()
            out.append(min(calls_us))
        return out


def environment(like: Array | None = None) -> dict[str, Any]:
    """Device, clocks and versions, which belong to every published figure."""
    names = ("spformat", "numpy", "scipy", "numba", "cupy-cuda13x", "cupy-cuda12x", "torch", "nvidia-cusparselt-cu13")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    tree: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "versions": versions,
        "processor": platform.processor() or platform.machine(),
    }  # fmt: skip
    if like is not None and is_cupy(like):
        cp = namespace(like)
        runtime, device = cp.cuda.runtime, like.device.id
        p = runtime.getDeviceProperties(device)
        tree |= {
            "device": p["name"].decode(), "sms": p["multiProcessorCount"], "l2_bytes": p["l2CacheSize"],
            "sm_clock_mhz": p.get("clockRate", 0) // 1000, "driver": runtime.driverGetVersion(),
            "runtime": runtime.runtimeGetVersion(), "copy_tb_per_s": round(_copy_rate(cp), 2),
        }  # fmt: skip
    return tree


def _copy_rate(cp: Any) -> float:
    """TB/s of a device copy, read and written bytes counted: the ceiling of memory-bound kernels here."""
    a = cp.ones(1 << 28, np.float32)
    b = cp.empty_like(a)
    (us,) = _DeviceClock(a).take_turns([lambda: cp.copyto(b, a)], 20, 3, cold=False, seconds=1)
    return float(2 * a.nbytes / us / 1e6)


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Plain rows. A number that is not finite becomes null, and "right" says whether the result was: null if none."""
    return [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(r).items()}
        | {"right": None if r.error != r.error else r.error <= 1}
        for r in results
    ]


def _steady(r: Result) -> bool:
    """Whether the two times of a contender can be of the same product. Caches explain a factor of ten at the most, and
    hot ones make nothing slower."""
    return r.hot_us != r.hot_us or r.cold_us / 10 <= r.hot_us <= 1.5 * r.cold_us


def verdict(results: Sequence[Result]) -> str:
    """One line in plain words: how the best of ours stands against the best peer of the case."""
    ours = [r for r in results if not r.peer and r.cold_us == r.cold_us]
    peers = [r for r in results if r.peer and r.cold_us == r.cold_us]
    if not ours:
        return "nothing of ours ran"
    best = min(ours, key=lambda r: r.cold_us)
    how = f"error {best.error:.1f} of the bound" if best.error < math.inf else "other NaN or infinities than A @ B has"
    wrong = f"; WRONG RESULT, {how}" if best.error > 1 else ""
    if not peers:
        return f"{best.name} {best.cold_us:.1f} us{wrong}"
    peer = min(peers, key=lambda r: r.cold_us)
    if noisy := next((r for r in (best, peer) if not _steady(r)), None):
        times = f"{noisy.cold_us:.1f} us with cold caches and {noisy.hot_us:.1f} with hot ones"
        return f"too noisy to compare: {noisy.name} took {times}; repeat on a quiet machine{wrong}"
    ratio = peer.cold_us / best.cold_us
    slower = ", slower" if ratio < 1 else ""
    return f"{best.name} is {ratio:.2f}x the speed of {peer.name}{slower}{wrong}"
