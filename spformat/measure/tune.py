"""Measure every kernel and tile on a device and keep the fastest: what ``spformat bench --tune`` does."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import backends
from ..arrays.library import namespace
from ..backends.cuda.runtime import measured
from ..backends.host import numpy_dtype
from ..dispatch.api import describe
from ..errors import UsageError
from ..formats.base import Format
from . import bench
from .bench import Case, Contender, Result
from .contenders import operand


def contenders(a: Format, B: Any) -> Iterator[Contender]:
    """Every kernel of the CUDA backend that takes A @ B, with every tile it names; "kernel|tile"."""
    out = namespace(B).empty((a.shape[0], B.shape[1]), numpy_dtype(describe(a, B, None).out_dtype))
    problem = describe(a, B, out)
    for kernel in backends.get("cuda").kernels():
        if problem.format not in kernel.formats or kernel.unsupported(problem):
            continue
        for text in (str(t) for t in getattr(kernel, "tiles", None) or ("",)):
            with measured.forced(kernel.name, text):
                made = kernel.plan(a, problem)
            yield Contender(f"{kernel.name}|{text}", functools.partial(made, B, out))


def tune(
    a: Format, widths: Iterable[int], repeats: int = 20, seconds: float = 0.2
) -> list[tuple[measured.Row, list[Result]]]:
    """(the row of the fastest, all results) for each N of ``widths``; results are checked before they are timed.

    a: a valid matrix on a device. UsageError where no kernel takes it.
    """
    a.ensure_valid()
    if a.device == "cpu":
        raise UsageError("tune: expected a matrix on a device, got one on the host; use .to('cuda')")
    found = []
    for n in widths:
        B = operand(a, n)
        problem = describe(a, B, None)
        case = Case(f"{a.shape[0]}x{a.shape[1]} N={n}", a, B, tuple(contenders(a, B)), problem.out_dtype)
        results = bench.compare(case, repeats, seconds=seconds, hot=False)
        right = [r for r in results if r.cold_us == r.cold_us and r.error <= 1]
        if not right:
            raise UsageError(f"tune: no kernel of the cuda backend takes {case.name} in {a.name}")
        name, _, text = right[0].name.partition("|")
        row = measured.Row(
            a.name, problem.sm or 0, problem.M, problem.n, problem.K, name, text, round(right[0].cold_us, 2)
        )
        found.append((row, results))
    return found


def save(rows: list[measured.Row], like: Any, command: str, path: Path | None = None) -> Path:
    """Merge ``rows`` into the user's table (or the one at ``path``); its path. ``like``: an array on the device."""
    path = path or measured.user_path()
    device = bench.environment(like).get("device", "")
    about = {"device": device, "date": datetime.date.today().isoformat(), "command": command}
    measured.write(path, rows, about)
    return path
