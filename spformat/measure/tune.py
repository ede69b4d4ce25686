"""tune(): measure the formats that ``recommend`` names first, on the device at hand, and remember which was fastest.

Successive halving within a budget of seconds: all formats are measured a few times in turn, the slower half is left
out, the others are measured twice as often, until two are left. What was measured is kept in
$XDG_CACHE_HOME/spformat/tuned.json (else under ~/.cache) for matrices with the same counts, on the same device, with
the same version of this package. Products by a backend that ``use_backend`` or SPFORMAT_BACKEND names are remembered
apart from others.

SPFORMAT_TUNED=off neither reads nor writes that file.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import numbers
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from .. import backends
from ..arrays import threads
from ..arrays.library import Array, import_cupy, namespace, parse_device
from ..backends.host import numpy_dtype
from ..dispatch.api import backend_name, plan
from ..dispatch.recommend import COLUMNS, Recommendation, recommend
from ..errors import (
    ContainerError,
    DeviceError,
    DeviceUnavailable,
    InputError,
    LimitError,
    NoKernelError,
    OutputError,
    StructureError,
    UsageError,
    WriteError,
)
from ..formats.base import Format
from ..formats.convert import convert
from ..formats.dense import Dense
from ..formats.foreign import as_format
from ..preprocess.coordinates import structure_of
from ..preprocess.structure import Structure
from ..products import rates
from ..products.problem import ROW, columns_text
from ..products.roofline import Device, device_for
from ..storage.files import Path as AnyPath
from ..storage.files import read_small
from ..storage.locks import one_at_a_time
from .bench import clock
from .contenders import operand

log = logging.getLogger("spformat")

MODES = ("on", "off")
_LARGEST, _MOST = 16 << 20, 4096
"""Bytes and entries of a file of results; of more entries the oldest are dropped."""
_FIRST = 3
"""Runs of each format in the first round."""
_OVER = "the time was over"


@dataclass(frozen=True)
class Trial:
    """One format that was tried."""

    format: str
    us: dict[int, float]
    """Columns of B -> median microseconds with cold caches, of its last round; empty if it was not measured."""
    expected_us: dict[int, float | None]
    nbytes: int | None
    rounds: int = 0
    """Rounds of successive halving that it was in."""
    note: str = ""
    """Why it was not measured."""

    @property
    def total_us(self) -> float:
        """The sum over the columns; infinity if it was not measured."""
        return sum(self.us.values()) if self.us else float("inf")


@dataclass(frozen=True)
class Tuned:
    """What was measured for matrices with the same counts. ``str()`` is the text the CLI prints."""

    fingerprint: str
    """SHA-256 of the counts."""
    shape: tuple[int, int]
    dtype: str
    n: tuple[int, ...]
    b_layout: str
    device: str
    version: str
    date: str
    trials: tuple[Trial, ...]
    """Those of the last round first, the fastest of them first; at the end what was not measured."""
    seconds: float
    """Time that it took, conversions included."""
    budget: float
    """Seconds that it was given."""
    remembered: bool = False
    """Whether it comes from the file, and nothing was measured now."""
    backend: str = ""
    """The backend or kernel that ``use_backend`` or SPFORMAT_BACKEND named; "" where the dispatcher chose among all."""

    @property
    def format(self) -> str:
        """The fastest format, for ``convert``."""
        return self.trials[0].format

    @property
    def where(self) -> str:
        """The device, and the backend if one was named, as text."""
        return self.device + (f" by {self.backend}" if self.backend else "")

    @property
    def key(self) -> str:
        """What the result holds for."""
        columns = "+".join(map(str, self.n))
        named = f", backend={self.backend}" if self.backend else ""
        return f"{self.fingerprint}, n={columns}, {self.b_layout}, {self.device}, {self.version}{named}"

    def __str__(self) -> str:
        how = f"measured {self.date}" + (", remembered" if self.remembered else f" in {self.seconds:.1f} s")
        lines = [f"{'x'.join(map(str, self.shape))} {self.dtype} on {self.where}: {self.format}; {how}"]
        for t in self.trials:
            times = ", ".join(f"{us:.1f} us at {columns_text(n)}" for n, us in t.us.items())
            expected = ", ".join("no time" if us is None else f"{us:.1f}" for us in t.expected_us.values())
            lines.append(f"  {t.format}: {times or 'not measured, ' + t.note} (expected {expected})")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self) | {"shape": list(self.shape), "n": list(self.n), "trials": [_trial(t) for t in self.trials]}

    @classmethod
    def from_json(cls, tree: Any) -> Tuned:
        """The object that ``to_json`` described; ValueError, KeyError, TypeError or AttributeError for another tree."""
        trials = tuple(
            Trial(str(t["format"]), {int(k): _finite(v) for k, v in t["us"].items()},
                  {int(k): None if v is None else _finite(v) for k, v in t["expected_us"].items()},
                  None if t["nbytes"] is None else int(t["nbytes"]), int(t["rounds"]), str(t["note"]))
            for t in tree["trials"]
        )  # fmt: skip
        M, K = map(int, tree["shape"])
        if not trials or not trials[0].us:
            raise ValueError("no format was measured")
        texts: dict[str, Any] = {
            k: str(tree[k]) for k in ("fingerprint", "dtype", "b_layout", "device", "version", "date")
        }
        times: dict[str, Any] = {k: _finite(tree[k]) for k in ("seconds", "budget")}
        n, remembered = tuple(map(int, tree["n"])), bool(tree["remembered"])
        texts["backend"] = str(tree.get("backend", ""))  # results of earlier versions name none
        return cls(shape=(M, K), n=n, trials=trials, remembered=remembered, **texts, **times)


def _finite(x: Any) -> float:
    number = float(x)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number}")
    return number


def _trial(t: Trial) -> dict[str, Any]:
    return asdict(t) | {key: {str(k): v for k, v in getattr(t, key).items()} for key in ("us", "expected_us")}


def tune(
    A: Any, n: int | Iterable[int] = COLUMNS, *, seconds: float = 10.0, device: str = "cpu", most: int = 6,
    b_layout: str = ROW, fresh: bool = False,
) -> Tuned:  # fmt: skip
    """Which format of a matrix is fastest on the device at hand, measured.

    A: a host matrix [M, K]: numpy, any spformat format, scipy. n: columns of B; the sum of the times counts.
    seconds: the budget. It may be exceeded: the first format and dense are always measured, and what has begun (a
        conversion, a compilation, a round) is ended. Of the others, those that are not reached say so.
    device: "cpu", "cuda" or "cuda:<id>". most: formats that are tried, the first that ``recommend`` names, and dense.
        All of them are in memory at the same time.
    b_layout: as of ``recommend``. fresh: measure again, also where a result is remembered. One that left formats out
        for want of time is not taken for a larger budget.

    Products run by the backend that ``use_backend`` or SPFORMAT_BACKEND names, if any; such a result is remembered for
    calls with the same one. ``recommend`` still ranks by all kernels.

    Results of products are not checked here; ``spformat bench`` does. Raises UsageError for a budget that is not above
    0 or infinite, what ``recommend`` raises, DeviceUnavailable (without a GPU that was asked for, and on the host
    without the ``cpu`` extra unless a backend is named), and NoKernelError where no format can be run.
    """
    numeric = isinstance(seconds, numbers.Real) and isinstance(most, numbers.Integral)
    if not numeric or isinstance(seconds, bool) or isinstance(most, bool) or not 0 < seconds < math.inf or most < 1:
        got = f"{seconds!r:.80} and {most!r:.80}"
        raise UsageError(f"expected seconds above 0, not infinite, and most, an int of at least 1, got {got}")
    begin = time.perf_counter()
    counts = structure_of(A)
    where = parse_device(device)
    if where is None and not backend_name() and (why := backends.get("cpu").missing()):
        raise DeviceUnavailable(f"no kernel of ours runs on the CPU here: {'; '.join(why)}")  # the reference is slow
    like = _array_on(where)
    target = "cpu" if where is None else _board(like)
    ranked = recommend(A, n, device=target, b_layout=b_layout)
    blank = Tuned(
        fingerprint(counts), counts.shape, counts.dtype, ranked.n, b_layout, device_name(like), _version(),
        time.strftime("%Y-%m-%d"), (), 0.0, seconds, backend=backend_name() or "",
    )  # fmt: skip
    first = [r for r in ranked[:most] if r.format != Dense.name]
    first[1:1] = [r for r in ranked if r.format == Dense.name]  # with a small budget it is compared with the best
    known = None if fresh else remembered().get(blank.key)
    if known is not None and _answers(known, first, seconds):
        return replace(known, remembered=True)
    trials = _halved(as_format(A), first, ranked.n, device, b_layout, begin + seconds)
    tuned = replace(blank, trials=tuple(trials), seconds=time.perf_counter() - begin)
    if not tuned.trials[0].us:
        reasons = [f"{t.format}: {t.note}" for t in trials]
        raise NoKernelError(f"no format could be run on {device}: {'; '.join(reasons)}", reasons=reasons)
    try:
        _remember({tuned.key: tuned})
    except (OutputError, WriteError) as e:  # a home folder that cannot be written is no reason to lose the result
        log.warning("the result is not remembered: %s", e)
    return tuned


def _answers(known: Tuned, first: list[Recommendation], seconds: float) -> bool:
    """Whether a result of before is what these formats and this budget would give: it tried them, or had the time."""
    tried = {t.format for t in known.trials if t.note != _OVER}
    return {r.format for r in first} <= (tried if known.budget < seconds else {t.format for t in known.trials})


def _halved(
    a: Format, first: list[Recommendation], n: tuple[int, ...], device: str, b_layout: str, end: float
) -> list[Trial]:
    """The trials of these formats, the fastest of the last round first."""
    runs: dict[str, list[Callable[[], Any]]] = {}
    trials: dict[str, Trial] = {}
    B: dict[int, Array] = {}
    for r in first:
        trials[r.format] = t = Trial(r.format, {}, r.expected_us, r.nbytes)
        if len(runs) >= 2 and time.perf_counter() > end:
            trials[r.format] = replace(t, note=_OVER)
            continue
        try:
            m = convert(a, r.format).to(device)
            B = B or {k: operand(m, k, layout=b_layout) for k in n}
            runs[r.format] = [_run(m, B[k]) for k in n]
        except (NoKernelError, StructureError, LimitError, DeviceError) as e:
            trials[r.format] = replace(t, note=e.message.splitlines()[0][:160])
    alive, repeats = list(runs), _FIRST
    watch = clock(next(iter(B.values()))) if B else None
    while alive and watch is not None:
        left, rounds = max(0.0, end - time.perf_counter()), max(1, (len(alive) - 1).bit_length())
        each = left / rounds / len(n) / len(alive)
        times = [watch.take_turns([runs[f][i] for f in alive], repeats, 1, cold=True, seconds=each)
                 for i in range(len(n))]  # fmt: skip
        for j, f in enumerate(alive):
            us = {k: times[i][j] for i, k in enumerate(n)}
            trials[f] = replace(trials[f], us=us, rounds=trials[f].rounds + 1)
        alive.sort(key=lambda f: trials[f].total_us)
        if len(alive) <= 2 or time.perf_counter() > end:
            break
        alive, repeats = alive[: (len(alive) + 1) // 2], 2 * repeats
    return sorted(trials.values(), key=lambda t: (-t.rounds, t.total_us))


def _run(m: Format, B: Array) -> Callable[[], Any]:
    """The product as a call without arguments, which has run once: what is compiled is compiled."""
    p = plan(m, B=B)
    out = namespace(B).empty((m.shape[0], B.shape[1]), numpy_dtype(p.problem.out_dtype))
    run = functools.partial(p, B, out)
    run()
    return run


# ------------------------------------------------------------------ what a result holds for


def fingerprint(s: Structure) -> str:
    """SHA-256 of the counts of a matrix: shape, dtype, row lengths in any order, and all other counts."""
    lengths, rows = np.unique(s.row_lengths, return_counts=True)
    counts = [s.shape, s.dtype, s.nnz, s.bad_groups, sorted(s.window_max.items()), sorted(s.blocks.items()),
              sorted(s.vector_counts.items()), sorted(s.tile_columns.items()), lengths.tolist(),
              rows.tolist()]  # fmt: skip
    return hashlib.sha256(str(counts).encode()).hexdigest()


def _array_on(device: int | None) -> Any:
    """An array on a device, or None for the host."""
    if device is None:
        return None
    cupy = import_cupy()
    with cupy.cuda.Device(device):
        return cupy.zeros(1)


def device_name(like: Any) -> str:
    """The device of an array as the vendor calls it; for None the processor of this host, with its cores."""
    if like is None:
        return f"{platform.processor() or platform.machine()}, {threads.cores()} cores"
    name: bytes = namespace(like).cuda.runtime.getDeviceProperties(like.device.id)["name"]
    return name.decode()


def _board(like: Any) -> Device:
    """The rates of this GPU: those of its name, of its architecture, or of the H200."""
    name, sm = device_name(like), int(like.device.compute_capability)
    return device_for(name, sm, name)


def _version() -> str:
    try:
        return metadata.version("spformat")
    except metadata.PackageNotFoundError:  # a source folder on the path
        return "unknown"


# ------------------------------------------------------------------ the file


def path() -> Path:
    """Where results are kept: tuned.json beside the user's rates."""
    return rates.user_path().with_name("tuned.json")


def remembered() -> dict[str, Tuned]:
    """Key -> result of everything in the file; nothing of a damaged file, or with SPFORMAT_TUNED=off."""
    if not _wanted():
        return {}
    try:
        return _read(path())
    except (InputError, ContainerError) as e:
        if path().exists():
            log.warning("%s is left out (%s): delete it, or tune again", path(), e.message)
        return {}


def export_results(to: AnyPath) -> int:
    """Write all remembered results into a JSON file, for ``import_results`` elsewhere; returns how many they are.

    OutputError, WriteError where the file cannot be written.
    """
    results = remembered()
    _write(Path(to), results)
    return len(results)


def import_results(source: AnyPath) -> int:
    """Remember the results in a file of ``export_results``; returns how many they are.

    They hold for the devices and the version that they name. Raises InputError, and ContainerError for a file of
    anything else.
    """
    results = _read(Path(source))
    _remember(results)
    return len(results)


def _wanted() -> bool:
    mode = os.environ.get("SPFORMAT_TUNED", "on")
    if mode not in MODES:
        raise UsageError(f"SPFORMAT_TUNED: expected one of {', '.join(MODES)}, got {mode!r:.80}", value=mode)
    return mode == "on"


def _remember(results: Mapping[str, Tuned]) -> None:
    if not (_wanted() and results):
        return
    with contextlib.suppress(OSError):  # where it cannot be made, ``_write`` says so
        path().parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(path().parent):  # else one of two processes would write the file without what the other adds
        _write(path(), {k: v for k, v in remembered().items() if k not in results} | dict(results))


def _write(to: Path, results: Mapping[str, Tuned]) -> None:
    rates.write_own(to, {"results": [t.to_json() for t in list(results.values())[-_MOST:]]})


def _read(source: Path) -> dict[str, Tuned]:
    try:
        results = [Tuned.from_json(t) for t in json.loads(read_small(source, _LARGEST))["results"]]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as e:
        message = f"expected results of spformat tune, got something else ({e!s:.100})"
        raise ContainerError(message, path=str(source)) from e
    return {t.key: t for t in results[-_MOST:]}
