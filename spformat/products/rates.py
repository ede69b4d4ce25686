"""Constants of expected times, fitted to measurements: how much longer than its ideal time each part takes.

A file of rates is JSON: {"device", "date", "commit", "command", "kernels": {name: {"terms": [..], "all": [..],
"tiles": {variant: [..]}}}}. "terms" names the parts of the kernel's time (``Kernel.terms``), "all" has a constant for
each, and "tiles" has other ones for some variants (``Kernel.variant``). Two files come with the package: those of an
H200 (for some kernels of an H100), which hold for every GPU in proportion to its rates, and those of a host.
``spformat bench --calibrate`` writes one of the user's own, whose kernels also name the device, the date and the
architecture ("sm") that they hold for.

SPFORMAT_RATES=shipped leaves the user's file out, =off all of them: a kernel then expects ``roofline.plain_us``.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import InputError, OutputError, UsageError
from ..storage.files import read_small, reason
from ..storage.output import publish
from . import roofline
from .problem import Problem

log = logging.getLogger("spformat")

SHIPPED = Path(__file__).parent / "rates"
"""The folder of the files that come with the package."""
_SHIPPED = {"host": str(SHIPPED / "host.json"), "device": str(SHIPPED / "h200.json")}
MODES = ("on", "shipped", "off")
_LARGEST = 4 << 20
_MOST, _LONGEST = 4096, 200
"""Most kernels, and variants of one, in a file; most characters of a name."""
_GREATEST = 1e12


@dataclass(frozen=True, eq=False)
class Constants:
    """The constants of one kernel."""

    terms: tuple[str, ...]
    every: tuple[float, ...]
    """The constants of variants that have none of their own."""
    variants: Mapping[str, tuple[float, ...]]
    origin: str
    """Device, date and commit of the measurement, for people."""
    sm: int | None = None
    """The only architecture that they hold for; None for all, and on the host."""

    def of(self, names: tuple[str, ...]) -> tuple[float, ...]:
        """The constants of the first of these variants that has some."""
        for name in names:
            if name in self.variants:
                return self.variants[name]
        return self.every


def user_path() -> Path:
    """Where the user's file lies: $XDG_CACHE_HOME/spformat/rates.json, else under ~/.cache."""
    return Path(_user_path(os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME")))


@functools.lru_cache(maxsize=8)
def _user_path(cache: str | None, home: str | None) -> str:
    own = os.path.expanduser("~")
    if own == "~":  # nobody knows the home of this user id, as in containers: nothing is there, nothing can be kept
        own = os.devnull
    return str(Path(cache or Path(own) / ".cache") / "spformat" / "rates.json")


def constants(kernel: str, terms: tuple[str, ...], p: Problem) -> Constants | None:
    """The constants of a kernel for a problem; None if no file has any for these terms.

    UsageError for an unknown value of SPFORMAT_RATES.
    """
    tried = _tried.get()
    for table in (tried, *_tables(p)) if tried else _tables(p):
        entry = table.get(kernel)
        if entry is not None and entry.terms == terms:
            return entry
    return None


_tried: ContextVar[Mapping[str, Constants] | None] = ContextVar("spformat_tried_rates", default=None)


@contextmanager
def trying(table: Mapping[str, Constants]) -> Iterator[None]:
    """Inside the block these constants win for the kernels that they name: what would be chosen by them?"""
    token = _tried.set(table)
    try:
        yield
    finally:
        _tried.reset(token)


def source(p: Problem) -> str:
    """One line of text that names the measurements behind the expected times of a problem: those of most kernels."""
    table = next((table for table in _tables(p) if table), None)
    if table is None:
        return "no rates (SPFORMAT_RATES=off): times are rough bounds"
    ((origin, _),) = Counter(c.origin for c in table.values()).most_common(1)
    first = next(c for c in table.values() if c.origin == origin)
    line = f"rates of {first.origin}"
    if p.device == "cpu" or first.sm is not None:
        return line
    device = roofline.device_of(p)
    if _rates_of(device) != _rates_of(roofline.H200):
        return f"{line}, scaled to {device.name}"
    return line if p.sm in (None, roofline.H200.sm) else f"{line}, taken for {p.sm_name} as they are"


def _rates_of(device: roofline.Device) -> tuple[Any, ...]:
    return device.memory, device.cache, device.peak


_Tables: TypeAlias = list[Mapping[str, Constants]]
_seen: ContextVar[dict[tuple[str, int | None], _Tables] | None] = ContextVar("spformat_rates", default=None)


@contextmanager
def read_once() -> Iterator[None]:
    """Inside the block SPFORMAT_RATES and the user's file are looked at once, not for every kernel."""
    if _seen.get() is not None:
        yield
        return
    token = _seen.set({})
    try:
        yield
    finally:
        _seen.reset(token)


def _tables(p: Problem) -> _Tables:
    """The constants for a problem by kernel: first from the user's file, then from the shipped file of its device."""
    seen = _seen.get()
    if seen is None:
        return _current_tables(p)
    key = p.device, p.sm
    if key not in seen:
        seen[key] = _current_tables(p)
    return seen[key]


def _current_tables(p: Problem) -> _Tables:
    mode = os.environ.get("SPFORMAT_RATES", "on")
    if mode not in MODES:
        raise UsageError(f"SPFORMAT_RATES: expected one of {', '.join(MODES)}, got {mode!r:.80}", value=mode)
    if mode == "off":
        return []
    shipped = _parsed(_SHIPPED["host" if p.device == "cpu" else "device"], 0).get(None, {})
    return [shipped] if mode == "shipped" else [*_users(p), shipped]


def _users(p: Problem) -> _Tables:
    path = _user_path(os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))
    try:
        stamp = os.stat(path).st_mtime_ns
    except OSError:
        return []
    own = _parsed(path, stamp).get(None if p.device == "cpu" else p.sm)
    return [own] if own else []


@functools.lru_cache(maxsize=8)
def _parsed(path: str, stamp: int) -> dict[int | None, dict[str, Constants]]:
    """The constants in a file by architecture and kernel. For a damaged file: none, and a warning in the log."""
    try:
        return read(Path(path))
    except (InputError, ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError) as e:
        reason = str(e)[:200]
        log.warning("%s is left out, it is no file of rates (%s): delete it, or run bench --calibrate", path, reason)
        return {}


def read(path: Path) -> dict[int | None, dict[str, Constants]]:
    """The kernels of a file by architecture; raises ValueError, TypeError, KeyError or InputError for a damaged one."""
    tree = json.loads(read_small(path, _LARGEST))
    kernels_by_sm: dict[int | None, dict[str, Constants]] = {}
    kernels = tree["kernels"]
    if len(kernels) > _MOST:
        raise ValueError(f"{len(kernels)} kernels")
    for name, own in kernels.items():
        about = {key: own.get(key, tree.get(key)) for key in ("device", "date", "commit")}
        sm = own.get("sm")
        terms = tuple(own["terms"])
        if not terms or any(type(t) is not str for t in terms) or (sm is not None and type(sm) is not int):
            raise ValueError(f"terms or sm of {name!r:.80}")
        if len(own["tiles"]) > _MOST or any(len(v) > _LONGEST for v in own["tiles"]):
            raise ValueError(f"variants of {name!r:.80}")
        origin = f"{about['device']!s:.80}, measured {about['date']!s:.20} at {about['commit']!s:.40}"
        variants = {v: _numbers(x, len(terms)) for v, x in own["tiles"].items()}
        every = _numbers(own["all"], len(terms))
        kernels_by_sm.setdefault(sm, {})[name] = Constants(terms, every, variants, origin, sm)
    return kernels_by_sm


def _numbers(values: Any, count: int) -> tuple[float, ...]:
    """A list of constants as floats; ValueError for values that cannot be constants."""
    if type(values) is not list or len(values) != count or any(type(x) not in (int, float) for x in values):
        raise ValueError("constants: expected a number for each term")
    numbers = tuple(float(x) for x in values)
    if not all(math.isfinite(x) and 0 <= x <= _GREATEST for x in numbers) or not any(numbers):
        raise ValueError("constants: expected numbers of at least 0, and one above it")
    return numbers


def write(path: Path, about: Mapping[str, Any], kernels: Mapping[str, Any]) -> None:
    """Put constants into the file at ``path``: those of other kernels in it stay, a damaged file is replaced.

    about: what is said of the measurement ("device", "date", "commit", "command", ..); kernels: name -> constants.
    Where kernels that stay do not say themselves where they were measured, the head of the file, which does, stays.
    """
    head, others = about, dict[str, Any]()
    try:
        read(path)
        old = json.loads(read_small(path, _LARGEST))
        others = {name: own for name, own in old.pop("kernels").items() if name not in kernels}
        if any("device" not in own for own in others.values()):
            head = old
    except (InputError, OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
        others = {}
    write_own(path, {**head, "kernels": dict(sorted({**others, **kernels}.items()))})


def write_own(path: Path, tree: Mapping[str, Any]) -> None:
    """Write a JSON file of measurements; what was there is replaced. The folder of ``user_path`` is made if need be.

    A symlink stays one. OutputError where no file can be created, WriteError where it cannot be written.
    """
    where = path.resolve()
    if where.parent == user_path().parent.resolve():
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise OutputError(f"cannot create the folder: {reason(e)}", path=str(where.parent)) from e
    publish(where, (_text(tree) + "\n").encode(), overwrite=True)


def _text(tree: Any, margin: str = "") -> str:
    """JSON with a line for each name, each list of numbers and each object of a list: a comparison shows changes."""
    if isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        return "[\n" + ",\n".join(f"{margin} {json.dumps(value)}" for value in tree) + f"\n{margin}]"
    if not isinstance(tree, Mapping) or not tree:
        return json.dumps(tree)
    inner = margin + " "
    lines = (f"{inner}{json.dumps(name)}: {_text(value, inner)}" for name, value in tree.items())
    return "{\n" + ",\n".join(lines) + f"\n{margin}}}"
