"""Fit the constants of expected times to points, and say what choosing by them costs.

A kernel expects a sum of constants times ideal times. The constants make the sum of squared logarithms of expected over
measured small: least squares with constants of at least 0, repeated with weights 1 / sqrt(expected * measured), points
further than 30 % off counting less. One set of constants is fitted for each variant of a kernel with enough points,
and one to all points, which holds for the others. The launch, or the call on a host, has a part of every time: without
a least constant for it, terms that nearly all points of a variant have would take it over, and products without them
would seem to cost nothing.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..products import rates, tiles
from ..products.kernel import LEAST_CALL_US
from ..products.roofline import device_of
from .calibration_points import DENSE, Point

ENOUGH = 3
"""Points that a variant needs for each constant of its own."""
ROUNDS = 8
NEAR = 0.3
LEAST, OF_LEAST = {"launch": 4.5, "start": LEAST_CALL_US}, 0.6
"""A term of such a name has a constant of so many microseconds at least, or this part of the least time of the
kernel."""


class Fit(NamedTuple):
    """The constants of a kernel, and how well they agree with its measurements."""

    kernel: str
    points: int
    median: float
    near: float
    """Share of the points that are within 30 %."""
    entry: dict[str, Any]
    """As in a file of rates."""

    @property
    def constants(self) -> rates.Constants:
        """The same for ``rates.trying``."""
        sets = {variant: tuple(theta) for variant, theta in self.entry["tiles"].items()}
        return rates.Constants(tuple(self.entry["terms"]), tuple(self.entry["all"]), sets, "this fit")


def constants(quantities: Any, us: Any, least: Any = 0.0) -> list[float]:
    """The constants of one variant: float64 [points, terms] and [points] to [terms], four significant digits.

    least: [terms], what each constant is at least.
    """
    from scipy.optimize import nnls

    Q, t = np.asarray(quantities, float), np.asarray(us, float)
    weights = 1 / t
    theta = lowest = np.zeros(Q.shape[1]) + least
    for _ in range(ROUNDS):
        above, _ = nnls(Q * weights[:, None], (t - Q @ lowest) * weights)
        theta = lowest + above
        expected = np.maximum(Q @ theta, 1e-3)
        off = np.abs(np.log(expected / t))
        weights = 1 / np.sqrt(expected * t) / np.sqrt(np.maximum(1, off / NEAR))
    return [float(f"{x:.4g}") for x in theta]


def fit(points: Sequence[Point], only: Collection[str] = ()) -> list[Fit]:
    """The constants of every kernel with enough points, or of those whose names are in ``only``."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for x in points:
        name = x.kernel.constants_of or x.kernel.name
        if x.kernel.terms and (not only or name in only) and x.kernel.is_its_own(x.problem):
            groups[name].append(x)
    return [_fitted(name, some) for name, some in sorted(groups.items()) if len(some) >= ENOUGH * len(_terms(some))]


def lost_variants(fitted: Fit, points: Iterable[Point]) -> list[str]:
    """Variants of a kernel with constants of their own in the files in use, and without after this fit."""
    p = next(x.problem for x in points if fitted.kernel in (x.kernel.constants_of, x.kernel.name))
    known = rates.constants(fitted.kernel, tuple(fitted.entry["terms"]), p)
    return sorted(set(known.variants) - set(fitted.entry["tiles"])) if known else []


def _terms(points: Sequence[Point]) -> tuple[str, ...]:
    return points[0].kernel.terms


def _fitted(name: str, points: list[Point]) -> Fit:
    rows = [(x, x.kernel.quantities(x.problem, x.tile, device_of(x.problem)), _own(x)) for x in points]
    groups: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        for variant in row[0].kernel.variant(row[0].problem, row[0].tile):
            groups[variant].append(row)
    terms = _terms(points)
    most = OF_LEAST * min(us for *_, us in rows)
    least = [min(LEAST.get(term, 0.0), most) for term in terms]
    every = constants([q for _, q, _ in rows], [us for *_, us in rows], least)
    sets = {
        variant: constants([q for _, q, _ in some], [us for *_, us in some], least)
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


def priced(points: Iterable[Point], fits: Sequence[Fit] = ()) -> list[Point]:
    """The points with the times that their kernels expect now, by the constants of ``fits`` where they have some.

    NaN for tiles that would not be considered, and for the dense product.
    """
    out = []
    with rates.trying({f.kernel: f.constants for f in fits}), rates.read_once():
        for x in points:
            expected = math.nan
            if x.kernel.name != DENSE and (not x.kernel.terms or x.tile in list(x.kernel.options(x.problem))):
                with tiles.forced(x.kernel.name, str(x.tile)):
                    expected = x.kernel.expected_us(x.problem)
            out.append(x._replace(expected=expected))
    return out


def agreement(points: Iterable[Point]) -> list[dict[str, Any]]:
    """By kernel: points, median error of the expected times, share within 30 %."""
    off: dict[str, list[float]] = defaultdict(list)
    for x in points:
        if not math.isnan(x.expected):
            off[x.kernel.name].append(max(x.expected / x.us, x.us / x.expected) - 1)
    return [
        {"kernel": k, "points": len(v), "median_error": statistics.median(v),
         "within_30_percent": sum(e <= NEAR for e in v) / len(v)}
        for k, v in sorted(off.items())
    ]  # fmt: skip


def regret(points: Iterable[Point]) -> list[dict[str, Any]]:
    """By format, and for all: time of what was expected to be fastest over the time of the fastest, less one.

    Of products with several kernels or tiles: geometric mean, what 90 % are within, and the worst. "over_dense": how
    much longer the dense product of the same matrix took than what was chosen, geometric mean; None without one.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    dense: dict[str, list[float]] = defaultdict(list)
    for some in _by_case(points):
        chosen, fastest = _choice(some)
        for name in (some[0].problem.format, "all"):
            ratios[name].append(chosen.us / fastest)
            dense[name] += [x.us / chosen.us for x in some if x.kernel.name == DENSE]
    return [
        {"format": name, "products": len(r), "regret": _mean(r) - 1,
         "ninety_percent": sorted(r)[int(0.9 * (len(r) - 1))] - 1, "worst": max(r) - 1,
         "over_dense": _mean(dense[name]) if dense[name] else None}
        for name, r in sorted(ratios.items(), key=lambda item: (item[0] == "all", item[0]))
    ]  # fmt: skip


def tile_regret(points: Iterable[Point], kernel: str) -> float | None:
    """What one kernel loses by its choice of tiles: geometric mean, less one; None without a choice.

    kernel: its name, or that of the kernel whose constants it uses.
    """
    own = (x for x in points if (x.kernel.constants_of or x.kernel.name) == kernel)
    ratios = [chosen.us / fastest for chosen, fastest in map(_choice, _by_case(own, by_kernel=True))]
    return _mean(ratios) - 1 if ratios else None


def _by_case(points: Iterable[Point], by_kernel: bool = False) -> list[list[Point]]:
    """The points of each product where something was to be chosen."""
    products: dict[Any, list[Point]] = defaultdict(list)
    for x in points:
        products[x.case, x.kernel.name if by_kernel else ""].append(x)
    return [some for some in products.values() if sum(not math.isnan(x.expected) for x in some) > 1]


def _choice(some: list[Point]) -> tuple[Point, float]:
    """What the expected times choose, and the least time of what could be chosen."""
    candidates = [x for x in some if not math.isnan(x.expected)]
    return min(candidates, key=lambda x: x.expected), min(x.us for x in candidates)


def _mean(ratios: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(statistics.fmean(map(math.log, ratios)))
