"""Which kernel and tile were fastest: tables of measurements, looked up by the nearest problem.

Two tables, each a JSON file {"device", "date", "command", "fields", "rows"}: ``measured.json`` beside this file, if
the package ships one, and the user's own, which ``spformat bench --tune`` writes to the cache folder. A row answers
for a problem of its format and compute capability whose M, N and K are each within a factor of two of its own; the
nearest row wins, and of equally near ones the user's. Where no row answers, or the row names a kernel that refuses or
a tile that is gone, the rules of the kernels decide: ``rank`` picks the kernel, its cost model the tile.

SPFORMAT_MEASURED=off leaves both tables out, =shipped the user's.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ....errors import UsageError
from ....limits import MAX_DIM
from ....products.problem import Problem
from ....storage.files import read_small

log = logging.getLogger("spformat")

SHIPPED = Path(__file__).with_suffix(".json")
REACH = 1.0
"""Powers of two that an extent of a row may be away from a problem's."""
_LARGEST = 16 << 20
MODES = ("on", "shipped", "off")

Tile = TypeVar("Tile")
_forced: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("spformat_forced_tile", default=None)


class Row(NamedTuple):
    """One measurement: for problems like this one, ``kernel`` with ``tile`` was the fastest."""

    format: str
    sm: int
    M: int
    n: int
    """Tile class of N, as in ``Problem``."""
    K: int
    kernel: str
    tile: str
    us: float
    """Microseconds, cold caches."""


def user_path() -> Path:
    """Where the user's table lies: $XDG_CACHE_HOME/spformat/measured.json, else under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spformat" / "measured.json"


def nearest(p: Problem) -> Row | None:
    """The row that answers for ``p``; UsageError for a SPFORMAT_MEASURED that is none of its values."""
    mode = os.environ.get("SPFORMAT_MEASURED", "on")
    if mode not in MODES:
        raise UsageError(f"SPFORMAT_MEASURED: expected one of {', '.join(MODES)}, got {mode!r}", value=mode)
    if mode == "off" or p.sm is None or not (p.M and p.n and p.K):
        return None
    rows = read(SHIPPED) if mode == "shipped" else (*read(user_path()), *read(SHIPPED))
    alike = [(_away(r, p), r) for r in rows if (r.format, r.sm) == (p.format, p.sm)]
    distance, row = min(alike, key=lambda pair: pair[0], default=((math.inf, 0.0), None))
    return row if distance[0] <= REACH else None


def _away(r: Row, p: Problem) -> tuple[float, float]:
    """(largest, sum) of the distances of the extents, in powers of two."""
    steps = [abs(math.log2(a / b)) for a, b in ((r.M, p.M), (r.n, p.n), (r.K, p.K))]
    return max(steps), sum(steps)


def kernel(p: Problem) -> str:
    """Name of the kernel that a measurement prefers for ``p``; "" without one."""
    row = nearest(p)
    return row.kernel if row else ""


def tile(name: str, p: Problem, tiles: Iterable[Tile]) -> Tile | None:
    """The one of ``tiles`` that a measurement of kernel ``name`` prefers for ``p``, by its text; None without one."""
    wanted = _forced.get()
    if wanted is None:
        row = nearest(p)
        wanted = (row.kernel, row.tile) if row else ("", "")
    return next((t for t in tiles if (name, str(t)) == wanted), None)


@contextlib.contextmanager
def forced(name: str, text: str) -> Iterator[None]:
    """Inside the block ``tile`` answers with this tile of kernel ``name``, and with none for every other kernel."""
    token = _forced.set((name, text))
    try:
        yield
    finally:
        _forced.reset(token)


def read(path: Path) -> tuple[Row, ...]:
    """The rows of a table; none where there is no file. One that is damaged counts as empty, and a warning says so."""
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return ()
    return _parsed(path, stamp)


@functools.lru_cache(maxsize=8)
def _parsed(path: Path, stamp: int) -> tuple[Row, ...]:
    try:
        tree = json.loads(read_small(path, _LARGEST))
        if tree["fields"] != list(Row._fields):
            raise ValueError(f"fields {tree['fields']}")
        rows = tuple(Row(*row) for row in tree["rows"])
        if any([type(v) for v in r[:7]] != [str, int, int, int, int, str, str] or min(r[1:5]) < 1 for r in rows):
            raise ValueError("a row of wrong types")
        if any(max(r[1:5]) > MAX_DIM or type(r.us) not in (int, float) for r in rows):
            raise ValueError("a row with numbers out of range")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        log.warning("%s is left out, it is no table of measurements (%s): delete it, or run bench --tune", path, e)
        return ()
    return rows


def write(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Put ``rows`` into the table at ``path``: they replace rows of the same problems, the others stay."""
    merged = {row[:5]: row for row in (*read(path), *rows)}
    head = "".join(f" {json.dumps(k)}: {json.dumps(v)},\n" for k, v in about.items() | {"fields": Row._fields}.items())
    body = ",\n".join(f"  {json.dumps(list(row))}" for row in sorted(merged.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(f'{{\n{head} "rows": [\n{body}\n ]\n}}\n')
    new.replace(path)
