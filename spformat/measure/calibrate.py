"""Measure kernels, fit the constants of their expected times, and check the choice that these times lead to.

A kernel expects a sum of constants times ideal times. The constants make the sum of squared logarithms of expected over
measured small: least squares with constants of at least 0, repeated with weights 1 / sqrt(expected * measured), points
further than 30 % off counting less. One set of constants is fitted for each variant of a kernel with enough points,
and one to all points, which holds for the others.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import backends
from ..arrays.library import device_error
from ..errors import DeviceFault, SpformatError, UsageError
from ..formats.base import Format
from ..products import tiles
from ..products.kernel import Kernel
from ..products.problem import Problem
from ..products.roofline import device_of
from . import calibration_cases as cases
from .bench import clock

log = logging.getLogger("spformat")

ENOUGH = 3
"""Points that a variant needs for each constant of its own."""
ROUNDS = 8
TILES = 3
"""Tiles of a kernel that are measured for a problem: its best one, and others drawn at random."""
NEAR = 0.3
FAILURES = (SpformatError, ValueError, TypeError, RuntimeError, MemoryError)


class Point(NamedTuple):
    """One measurement of a kernel."""

    kernel: Kernel
    problem: Problem
    tile: Any
    us: float
    expected: float
    """The kernel's expected time for this problem before the fit; NaN for any tile but its best one."""
    case: int
    """Number of the product; the same for all kernels that computed it."""


class Fit(NamedTuple):
    """The constants of a kernel, and how well they agree with its measurements."""

    kernel: str
    points: int
    median: float
    near: float
    """Share of the points that are within 30 %."""
    entry: dict[str, Any]
    """As in a file of rates."""


def kernels_of(a: Format, device: str) -> list[Kernel]:
    """The kernels that may multiply a matrix on a device, without the reference, which is always slow."""
    names = ("cpu",) if device == "cpu" else ("cuda", "vendor", "composed")
    return [k for b in names for k in backends.get(b).kernels() if ("spmm", a.name) in k.takes]


def measure(
    seed: int, device: str, seconds: float, *, widths: int = 4, all_tiles: bool = True, products: int = 1 << 30,
    formats: Sequence[str] = (),
) -> Iterator[Point]:  # fmt: skip
    """Measurements until ``seconds`` or ``products`` are used up. A case that fails is logged and left out.

    all_tiles: for a fit, also some other tiles of a kernel; otherwise only its best one. formats: only these.
    """
    xp = _library(device)
    end, rng, number = time.monotonic() + seconds, random.Random(seed), 0
    for spec in cases.draw(seed, device, widths, formats):
        if time.monotonic() > end:
            return
        try:
            a = cases.build(spec, xp, seed)
        except FAILURES as e:
            _note(str(spec), e)
            continue
        watch = None
        for n, b_layout, out_layout in spec.widths:
            if number >= products or time.monotonic() > end:
                return
            p = _problem(a, n, b_layout, out_layout, device, xp)
            B = cases.operand(xp, p.K, n, b_layout, p.b_dtype)
            C = cases.operand(xp, p.M, n, out_layout, p.out_dtype)
            watch = watch or clock(B)
            number += 1
            for kernel in kernels_of(a, device):
                yield from _measured(kernel, a, p, (B, C), watch, number, rng if all_tiles else None)


def _measured(
    kernel: Kernel, a: Format, p: Problem, operands: tuple[Any, Any], watch: Any, case: int, rng: random.Random | None
) -> Iterator[Point]:
    if kernel.unsupported(p) or kernel.workspace_bytes(p) > p.workspace:
        return
    expected, best = kernel.expected_us(p), kernel.best(p).tile
    wanted = [best]
    if rng is not None:
        if not kernel.is_its_own(p):
            return
        others = [t for t in kernel.options(p) if t != best]
        wanted += rng.sample(others, min(TILES - 1, len(others)))
    for tile in wanted:
        try:
            with tiles.forced(kernel.name, str(tile)):
                plan = kernel.plan(a, p)
                plan(*operands)  # compiles, and chooses where the tile depends on the operands
            (us,) = watch.take_turns([lambda plan=plan: plan(*operands)], 7, 2, cold=True, seconds=0.3)
        except FAILURES as e:
            if isinstance(device_error(e) or e, DeviceFault):
                raise  # no later measurement would mean anything
            _note(f"{kernel.name} {tile} on {p.format} {p.M}x{p.K} N={p.n}", e)
            continue
        yield Point(kernel, p, tile, us, expected if tile is best else math.nan, case)


def _problem(a: Format, n: int, b_layout: str, out_layout: str, device: str, xp: Any) -> Problem:
    sm = None if device == "cpu" else int(xp.cuda.Device().compute_capability)
    name, params = a.dtype.name, tuple(a.params().items())
    return Problem.product(
        a.name, params, *a.shape, n, a.stored, name, name, name, b_layout, out_layout, device, sm
    )  # fmt: skip


def _library(device: str) -> Any:
    if device == "cpu":
        return np
    from ..arrays.library import import_cupy

    return import_cupy()


def _note(what: str, e: BaseException) -> None:
    log.warning("%s: left out: %s", what, str(e)[:200])


# ------------------------------------------------------------------ constants


def constants(quantities: Any, us: Any) -> list[float]:
    """The constants of one variant: float64 [points, terms] and [points] to [terms], four significant digits."""
    from scipy.optimize import nnls

    Q, t = np.asarray(quantities, float), np.asarray(us, float)
    weights = 1 / t
    theta = np.zeros(Q.shape[1])
    for _ in range(ROUNDS):
        theta, _ = nnls(Q * weights[:, None], t * weights)
        expected = np.maximum(Q @ theta, 1e-3)
        off = np.abs(np.log(expected / t))
        weights = 1 / np.sqrt(expected * t) / np.sqrt(np.maximum(1, off / NEAR))
    return [float(f"{x:.4g}") for x in theta]


def fit(points: Sequence[Point]) -> list[Fit]:
    """The constants of every kernel with enough points."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for x in points:
        if x.kernel.terms:
            groups[x.kernel.constants_of or x.kernel.name].append(x)
    return [_fitted(name, some) for name, some in sorted(groups.items()) if len(some) >= ENOUGH * len(_terms(some))]


def _terms(points: Sequence[Point]) -> tuple[str, ...]:
    return points[0].kernel.terms


def _fitted(name: str, points: list[Point]) -> Fit:
    rows = [(x, x.kernel.quantities(x.problem, x.tile, device_of(x.problem)), _own(x)) for x in points]
    groups: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        for variant in row[0].kernel.variant(row[0].problem, row[0].tile):
            groups[variant].append(row)
    every = constants([q for _, q, _ in rows], [us for *_, us in rows])
    terms = _terms(points)
    sets = {
        variant: constants([q for _, q, _ in some], [us for *_, us in some])
        for variant, some in sorted(groups.items())
        if len(some) >= ENOUGH * len(terms)
    }
    off = []
    for x, q, us in rows:
        theta = next((sets[v] for v in x.kernel.variant(x.problem, x.tile) if v in sets), every)
        expected = max(1e-3, float(np.dot(theta, q)))
        off.append(max(expected / us, us / expected) - 1)
    entry = {"terms": list(terms), "all": every, "tiles": {k: v for k, v in sets.items() if any(v)}}
    return Fit(name, len(rows), statistics.median(off), sum(x <= NEAR for x in off) / len(off), entry)


def _own(x: Point) -> float:
    """The measured time without the expected time of other kernels that run after this one."""
    return max(0.1 * x.us, x.us - x.kernel.rest_us(x.problem, x.tile))


# ------------------------------------------------------------------ the choice


def agreement(points: Iterable[Point]) -> list[dict[str, Any]]:
    """By kernel: points, median error of the expected times, share within 30 %."""
    off: dict[str, list[float]] = defaultdict(list)
    for x in points:
        off[x.kernel.name].append(max(x.expected / x.us, x.us / x.expected) - 1)
    return [
        {"kernel": k, "points": len(v), "median_error": statistics.median(v),
         "within_30_percent": sum(e <= NEAR for e in v) / len(v)}
        for k, v in sorted(off.items())
    ]  # fmt: skip


def regret(points: Iterable[Point]) -> list[dict[str, Any]]:
    """By format, and for all: time of the kernel that was expected to be fastest over that of the fastest, less one.

    Of products that more than one kernel took: geometric mean, what 90 % are within, and the worst.
    """
    products: dict[int, list[Point]] = defaultdict(list)
    for x in points:
        products[x.case].append(x)
    ratios: dict[str, list[float]] = defaultdict(list)
    for some in products.values():
        if len(some) > 1:
            chosen = min(some, key=lambda x: x.expected)
            ratio = chosen.us / min(x.us for x in some)
            ratios[some[0].problem.format].append(ratio)
            ratios["all"].append(ratio)
    return [
        {"format": name, "products": len(r), "regret": math.exp(statistics.fmean(map(math.log, r))) - 1,
         "ninety_percent": sorted(r)[int(0.9 * (len(r) - 1))] - 1, "worst": max(r) - 1}
        for name, r in sorted(ratios.items(), key=lambda item: (item[0] == "all", item[0]))
    ]  # fmt: skip


def check_device(device: str) -> None:
    """UsageError for a device that cannot be calibrated."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--calibrate: expected cpu or cuda, got {device!r:.80}", value=device)
