"""Points: single measurements of kernels, and the file that keeps them for another fit, which needs no GPU.

The file is JSON: {"points_of": "spformat bench --calibrate", "version": 1, "device", "sm", "date", "commit", "seed",
"command", "products": [{"format", "params", "M", "K", "n", "nnz", "a_dtype", "b_dtype", "out_dtype", "b_layout",
"out_layout", "times": [[kernel, tile, microseconds], ..]}, ..]}. "sm" is null for the host. Expected times are not in
it: they follow from the problem, the tile and the constants of the day.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import backends
from ..arrays.dtypes import VALUE_TYPES
from ..errors import InputError, SpformatError, UsageError
from ..formats import by_name
from ..products import rates
from ..products.kernel import Kernel
from ..products.problem import Problem
from ..storage.files import read_small

DENSE = "dense"
"""Stands for the dense product of the same matrix in the place of a kernel."""
_NUMBERS = ("M", "K", "n", "nnz", "row_length")
_FIELDS = ("format", *_NUMBERS, "a_dtype", "b_dtype", "out_dtype", "b_layout", "out_layout")
_NAME, _VERSION, _LARGEST = "spformat bench --calibrate", 1, 256 << 20
_DAMAGED = (SpformatError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class DenseProduct(Kernel):
    """The dense product, as a yardstick: it is never chosen, and has no constants."""

    name = DENSE


YARDSTICK = DenseProduct()


class Point(NamedTuple):
    """One measurement of a kernel."""

    kernel: Kernel
    problem: Problem
    tile: Any
    us: float
    expected: float
    """What the kernel expects for this tile; NaN where it is not known, or the tile would not be considered."""
    case: int
    """Number of the product; the same for all kernels that computed it."""


class About(NamedTuple):
    """Where points come from."""

    device: str
    sm: int | None
    """Architecture of the GPU; None for the host."""
    date: str
    commit: str
    seed: int
    command: str

    def to_json(self) -> dict[str, Any]:
        """As in the head of a file of rates."""
        return {k: v for k, v in self._asdict().items() if k != "sm"}


def kernels_by_name(device: str) -> dict[str, Kernel]:
    """The kernels that may multiply a matrix on a device, without the reference, which is always slow."""
    names = ("cpu",) if device == "cpu" else ("cuda", "vendor", "composed")
    return {k.name: k for b in names for k in backends.get(b).kernels()}


def save(path: Path, about: About, points: Iterable[Point]) -> None:
    """Write a file of points. OutputError where it cannot be created."""
    products = []
    for _, some in itertools.groupby(points, key=lambda x: x.case):
        own = list(some)
        p = own[0].problem
        times = [[x.kernel.name, str(x.tile), x.us] for x in own]
        products.append({**{f: getattr(p, f) for f in _FIELDS}, "params": dict(p.params), "times": times})
    head = {"points_of": _NAME, "version": _VERSION, **about._asdict()}
    rates.write_own(path, {**head, "products": products})


class Loaded(NamedTuple):
    """What files of points held."""

    about: About
    points: list[Point]
    left_out: dict[str, int]
    """Reason -> points that no kernel of today could have made."""


def load(paths: Sequence[Path]) -> Loaded:
    """The points of some files, which must be of one device. InputError for a damaged file, UsageError for a mixture.

    Points whose kernel or tile is gone, and products that a kernel takes no more, are left out and counted.
    """
    points: list[Point] = []
    left_out: Counter[str] = Counter()
    heads: list[About] = []
    case = 0
    for path in paths:
        try:
            tree = json.loads(read_small(path, _LARGEST))
            heads.append(_head(tree))
            known = kernels_by_name("cpu" if heads[-1].sm is None else "cuda")
            for product in tree["products"]:
                case += 1
                points += _points(product, heads[-1], known, case, left_out)
        except _DAMAGED as e:
            if isinstance(e, InputError) and e.path:
                raise
            raise InputError(f"no file of points of {_NAME} ({str(e)[:200]!s})", path=str(path)) from e
    if len({(a.device, a.sm) for a in heads}) > 1:
        devices = ", ".join(sorted({a.device for a in heads}))
        raise UsageError(f"--from-points: expected points of one device, got those of {devices}")
    return Loaded(_joined(heads), points, dict(left_out))


def _head(tree: Mapping[str, Any]) -> About:
    if tree["points_of"] != _NAME or tree["version"] != _VERSION:
        raise ValueError(f"points_of {tree['points_of']!s:.80}, version {tree['version']!s:.20}")
    about = About(*(tree[name] for name in About._fields))
    texts = about.device, about.date, about.commit, about.command
    if any(type(x) is not str for x in texts) or type(about.seed) is not int or type(about.sm) not in (int, type(None)):
        raise ValueError("device, sm, date, commit, seed or command")
    return about


def _joined(heads: Sequence[About]) -> About:
    """What is said of points of several files: the last date, and every commit."""
    last = max(heads, key=lambda a: a.date)
    return last._replace(commit=", ".join(dict.fromkeys(a.commit for a in heads)))


def _points(
    product: Mapping[str, Any], about: About, known: Mapping[str, Kernel], case: int, left_out: Counter[str]
) -> Iterator[Point]:
    product = {"row_length": 0, **product}  # files of earlier versions do not have it
    for name in _FIELDS:
        wanted = int if name in _NUMBERS else str
        bad = product[name] < 0 if wanted is int else name.endswith("dtype") and product[name] not in VALUE_TYPES
        if type(product[name]) is not wanted or bad:
            raise ValueError(f"{name} of a product: {product[name]!r:.80}")
    params = tuple(by_name(product["format"]).resolve_params(product["params"]).items())
    own = {f: product[f] for f in _FIELDS}
    where = {"device": "cpu"} if about.sm is None else {"device": "cuda", "sm": about.sm, "board": about.device}
    p = Problem.product(params=params, **own, **where)
    for name, tile, us in product["times"]:
        if type(us) not in (int, float) or not math.isfinite(us) or us <= 0:
            raise ValueError(f"microseconds of {name!s:.80}: {us!r:.40}")
        kernel = YARDSTICK if name == DENSE else known.get(name)
        why = "no such kernel" if kernel is None else ""
        found: Any = None
        if kernel is not None and kernel is not YARDSTICK:
            if ("spmm", p.format) not in kernel.takes or kernel.unsupported(p):
                why = f"does not take some products of {p.format}"
            else:
                try:
                    found = kernel.tile_named(p, tile)
                except KeyError:
                    why = f"no tile {tile!s:.80}"
        if why or kernel is None:
            left_out[f"{name!s:.80}: {why}"] += 1
        else:
            yield Point(kernel, p, found, float(us), math.nan, case)
