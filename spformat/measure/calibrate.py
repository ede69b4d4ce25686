"""Measure kernels on layers of real models, for the constants of their expected times and for a check of these times.

The kernels of a product, the best of the others beside them, and the dense product run in turn in one process, so that
their times can be compared. Results are compared, too: a kernel that differs from the first one is left out.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays.library import Array, device_error
from ..dispatch.select import named
from ..errors import DeviceFault, NoKernelError, SpformatError, UsageError
from ..formats.base import Format
from ..products import kernel as products
from ..products import rates, tiles
from ..products.kernel import Kernel
from ..products.problem import Problem
from ..products.roofline import device_of
from . import calibration_cases as cases
from . import contenders
from .bench import clock, spoil
from .calibration_points import YARDSTICK, Point, kernels_by_name

log = logging.getLogger("spformat")

RIVALS = 4
"""Kernels that are measured beside the chosen ones for each product: those that expect the least time."""
BETTER = 8
"""The better tiles are the third that is expected to be fastest, but no fewer than so many."""
DIFFERENT = 0.02
"""Largest difference between results of two kernels, over the largest value: far above rounding."""
REFUSED = 200
"""So many matrices in a row that cannot be built, or that no chosen kernel takes, end a measurement."""
FAILURES = (SpformatError, ValueError, TypeError, RuntimeError, MemoryError)


@dataclass(frozen=True)
class Scope:
    """What is measured: drawn with ``seed`` on ``device``, until ``seconds`` or ``products`` are used up."""

    seed: int
    device: str
    seconds: float
    kernels: tuple[str, ...] = ()
    """Names of the kernels whose tiles are measured, their rivals beside them; all without any."""
    formats: tuple[str, ...] = ()
    """Ids of the only formats; all without any."""
    columns: tuple[int, int] = (1, 4096)
    """Least and largest number of columns."""
    widths: int = 4
    """Products of each matrix."""
    tiles: int = 3
    """Tiles of a kernel for each product: the one expected to be fastest, and others that are drawn."""
    products: int = 1 << 30

    def specs(self) -> Iterator[cases.Spec]:
        """The matrices and products, an endless sequence."""
        formats = self.formats
        if self.kernels:
            known = kernels_by_name(self.device)
            taken = {f for name in self.kernels for operation, f in known[name].takes if operation == "spmm"}
            drawn = dict.fromkeys(kind[0] for kind in cases.KINDS)
            formats = tuple(f for f in drawn if f in taken and (not formats or f in formats))
            if not formats:
                raise UsageError(f"--kernels: {', '.join(self.kernels)} take none of the formats that are drawn")
        bins = cases.clipped(cases.FINE_BINS if self.kernels else cases.BINS, *self.columns)
        return cases.draw(self.seed, self.device, self.widths, formats, bins)


def chosen_kernels(names: Sequence[str], device: str) -> tuple[str, ...]:
    """Names of kernels in full; the name of a backend stands for its kernels that have constants.

    UsageError for a name that is unknown, of a kernel of another device, or of one without constants.
    """
    known, out = kernels_by_name(device), []
    for name in names:
        backend, only = named(name)
        some = [k for k in backend.kernels() if only in (None, k.name)]
        if absent := next((k.name for k in some if k.name not in known), None):
            raise UsageError(f"--kernels: {absent} does not run on {device}", value=name)
        if not any(k.terms for k in some):
            raise UsageError(f"--kernels: {name} has no constants to fit", value=name)
        out += [k.name for k in some if k.terms]
    return tuple(dict.fromkeys(out))


class Run(NamedTuple):
    """A kernel with a tile, or the dense product, in one product."""

    kernel: Kernel
    tile: Any
    start: Callable[[], Callable[[], Array]]
    """Plans the product; returns what runs it and gives its result."""


def measure(scope: Scope, compile_ahead: Any = None) -> Iterator[Point]:
    """Measurements of kernels. A case that fails is logged and left out.

    compile_ahead: a ``CompileAhead`` of the CUDA backend, to compile the kernels of a matrix in several processes.
    """
    xp = _library(scope.device)
    sm, board = None, ""
    if scope.device != "cpu":
        sm = int(xp.cuda.Device().compute_capability)
        board = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)["name"].decode()
    watch = clock(xp.empty(1, np.float32))
    end, rng, number, refused = time.monotonic() + scope.seconds, random.Random(scope.seed), 0, 0
    for spec in scope.specs():
        if number >= scope.products or time.monotonic() > end:
            return
        if refused == REFUSED:
            log.warning("none of the last %d matrices that were drawn could be measured with these kernels", REFUSED)
            return
        refused += 1
        if not any(_is_wanted(scope, p) for p in spec.problems(scope.device, sm)):
            continue
        try:
            a = cases.build(spec, xp, scope.seed)
            a.keep_arrays()  # else kernels that take the arrays restore them after those that drop them
        except FAILURES as e:
            _note(str(spec), e)
            continue
        refused = 0
        every = (p.changed(board=board) for p in _problems(spec, a, scope.device, sm))
        drawn = [(p, _runs(scope, a, p, xp, rng)) for p in every if _is_wanted(scope, p)]
        if compile_ahead is not None:
            compile_ahead.compile_for(
                [functools.partial(_once, run) for _, runs in drawn for run in runs], lambda: time.monotonic() > end
            )
        for p, runs in drawn:
            if number >= scope.products or time.monotonic() > end:
                return
            number += 1
            yield from _measured(runs, p, watch, number)


def _problems(spec: cases.Spec, a: Format, device: str, sm: int | None) -> Iterator[Problem]:
    name, params, length = a.dtype.name, tuple(a.params().items()), a.row_length()
    for n, b, c in spec.widths:
        yield Problem.product(
            a.name, params, *a.shape, n, a.stored, name, name, name, b, c, device, sm, row_length=length
        )  # fmt: skip


def _kernels(scope: Scope, p: Problem) -> tuple[list[Kernel], list[Kernel]]:
    """(the chosen kernels that take a product, the others), without those that run another kernel's code."""
    chosen, others = [], []
    for k in kernels_by_name(scope.device).values():
        if ("spmm", p.format) not in k.takes or k.unsupported(p) or k.workspace_bytes(p) > p.workspace:
            continue
        if not scope.kernels or k.name in scope.kernels:
            if k.is_its_own(p):
                chosen.append(k)
        elif not k.only_by_name(p):
            others.append(k)
    return chosen, others


def _is_wanted(scope: Scope, p: Problem) -> bool:
    return bool(_kernels(scope, p)[0])


def _runs(scope: Scope, a: Format, p: Problem, xp: Any, rng: random.Random) -> list[Run]:
    """What is measured for one product."""
    chosen, others = _kernels(scope, p)

    @functools.cache
    def operands() -> tuple[Array, Array]:
        B = cases.operand(xp, p.K, p.n, p.b_layout, p.b_dtype)
        return B, cases.operand(xp, p.M, p.n, p.out_layout, p.out_dtype)

    def planned(kernel: Kernel, tile: Any) -> Callable[[], Array]:
        B, C = operands()
        with tiles.forced(kernel.name, str(tile)):
            plan = kernel.plan(a, p)
            if not plan.tile.startswith(str(tile)) and len(tuple(kernel.options(p))) > 1:
                raise NoKernelError(
                    f"its plan would run another tile, {plan.tile}, whose time says nothing of this one"
                )
            spoil(C)
            plan(B, C)  # compiles, and chooses where the tile depends on the operands
        return lambda: plan(B, C)

    def dense() -> Callable[[], Array]:
        B, C = operands()
        (contender,) = contenders.dense(a, B, C)
        contender.run()
        return contender.run

    pairs = [(k, tile) for k in chosen for tile in _tiles(k, p, scope.tiles, rng)]
    rivals = sorted(others, key=lambda k: k.expected_us(p))[:RIVALS]
    pairs += [(k, k.best(p).tile) for k in rivals]
    runs = [Run(k, tile, functools.partial(planned, k, tile)) for k, tile in pairs]
    return [Run(YARDSTICK, None, dense), *runs]


def _tiles(kernel: Kernel, p: Problem, most: int, rng: random.Random) -> list[Any]:
    """The tile that is expected to be fastest, and others: half of them the best of their variants, whatever these are
    expected to take, since a variant that is expected to be slow would else never be measured, and the better ones."""
    known = rates.constants(kernel.constants_of or kernel.name, kernel.terms, p) if kernel.terms else None
    device = device_of(p)
    ranked = sorted(kernel.options(p), key=lambda t: products.tile_us(kernel, p, t, device, known))
    if not ranked:
        return [kernel.best(p).tile]
    best: dict[tuple[str, ...], Any] = {}
    for tile in ranked:
        best.setdefault(kernel.variant(p, tile), tile)
    others = [tile for tile in best.values() if tile != ranked[0]]
    some = rng.sample(others, min((most - 1) // 2, len(others)))
    rest = [tile for tile in ranked[1 : max(BETTER, len(ranked) // 3)] if tile not in some]
    return [ranked[0], *some, *rng.sample(rest, min(most - 1 - len(some), len(rest)))]


def _once(run: Run) -> None:
    run.start()


def _measured(runs: Sequence[Run], p: Problem, watch: Any, number: int) -> Iterator[Point]:
    """The runs of one product that work and agree, timed in turn."""
    ready: list[tuple[Run, Callable[[], Array]]] = []
    reference: Any = None
    for run in runs:
        what = f"{run.kernel.name} {run.tile} on {p.format} {p.M}x{p.K} N={p.n}"
        try:
            again = run.start()
            C = again().astype(np.float32)
            reference = C if reference is None else reference
            difference = float(abs(C - reference).max()) / (float(abs(reference).max()) or 1.0)
        except FAILURES as e:
            _note(what, e)
            continue
        if difference <= DIFFERENT:  # also false for NaN
            ready.append((run, again))
        else:
            log.error("%s: WRONG RESULT, %.3g of the largest value: left out", what, difference)
    if not ready:
        return
    try:
        times = watch.take_turns([again for _, again in ready], 9, 2, cold=True, seconds=0.2)
    except FAILURES as e:
        _note(f"{p.format} {p.M}x{p.K} N={p.n}", e)
        return
    for (run, _), us in zip(ready, times, strict=True):
        yield Point(run.kernel, p, run.tile, float(f"{us:.6g}"), math.nan, number)


def _library(device: str) -> Any:
    if device == "cpu":
        return np
    from ..arrays.library import import_cupy

    return import_cupy()


def _note(what: str, e: BaseException) -> None:
    """Log a failure that concerns one case; raise one after which no later measurement would mean anything."""
    if isinstance(device_error(e) or e, DeviceFault):
        raise e
    log.warning("%s: left out: %s", what, str(e)[:200])


def check_device(device: str) -> None:
    """UsageError for a device that cannot be calibrated."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--calibrate: expected cpu or cuda, got {device!r:.80}", value=device)
