"""Plain matrices converted panel by panel: a thread reads a few megabytes of rows, converts, sums and writes them.

So reading, converting and writing overlap, a panel stays in the caches of one core all the way, and memory is a few
panels a core however large the tensor is. The format says whether its arrays may be made this way
(``Format.panels``); the converter is the format's own ``from_dense``, so there is one code for panels and wholes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from .. import limits
from ..arrays import threads
from ..arrays.dtypes import SAFETENSORS, SAFETENSORS_CODE, value_type
from ..arrays.library import ceil_div, index_dtype, round_up
from ..formats import parse_spec
from ..formats.base import Format, Panels
from ..preprocess.structure import count_nonzeros
from ..storage.container import TensorFile
from ..storage.descriptor import Record
from ..storage.filewriter import FileWriter
from .jobs import Job
from .recipe import AUTO, KEEP, Recipe

PANEL = 8 << 20
"""Dense bytes a thread works on at a time."""
_LINE = 64
WIDEST = 64 << 20
"""Dense bytes of the smallest panel a format allows, above which the tensor is converted as a whole."""

T = TypeVar("T")
Specs = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""dtype and shape of each array."""


class Team:
    """One thread a core, for tasks in a row; results come in order, and only a few tasks are under way.

    The limits in force where the team is made hold in its threads.
    """

    def __init__(self) -> None:
        self._limits, self._size = limits.current(), threads.cores()
        self._pool = ThreadPoolExecutor(self._size, "spformat")
        self._rooms = threading.local()

    def results(self, tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
        """What each task returns, in order; the first exception is raised here, when its turn has come."""
        under_way: deque[Future[T]] = deque()
        for task in tasks:
            under_way.append(self._pool.submit(self._run, task))
            if len(under_way) > 2 * self._size:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _run(self, task: Callable[[], T]) -> T:
        with limits.using(self._limits), threads.alone():
            return task()

    def rooms(self, arrays: Iterable[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[np.ndarray[Any, Any]]:
        """Arrays in memory of the calling thread, the same at every call: its pages are fetched once."""
        chosen = [(shape, dtype, limits.product(*shape, dtype.itemsize)) for shape, dtype in arrays]
        total = sum(n + _LINE for _, _, n in chosen)
        held = getattr(self._rooms, "held", None)
        if held is None or held.nbytes < total:
            usual = min(PANEL, self._limits.memory or PANEL) + _LINE
            self._rooms.held = held = np.empty(max(total, usual), np.uint8)
        out, at = [], -held.ctypes.data % _LINE
        for shape, dtype, n in chosen:
            out.append(held[at : at + n].view(dtype).reshape(shape))
            at += round_up(n, _LINE)
        return out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Counted:
    """What the sizing pass finds in one panel."""

    nnz: int
    negative_zeros: int
    specs: Specs
    made: Format | None = None


@dataclass(frozen=True)
class Cut:
    """A plain matrix of a file, cut into panels for its target."""

    job: Job
    target: type[Format]
    params: dict[str, Any]
    layout: Panels
    step: int
    """Rows of a panel; the last may have fewer."""

    @property
    def count(self) -> int:
        """Panels."""
        return ceil_div(self.job.shape[0], self.step)

    def rows(self, i: int) -> int:
        """Rows of panel ``i``."""
        return min(self.step, self.job.shape[0] - i * self.step)

    def read(self, f: TensorFile, team: Team, i: int) -> np.ndarray[Any, Any]:
        """Panel ``i``, in the memory of the calling thread."""
        (room,) = team.rooms([((self.rows(i), self.job.shape[1]), value_type(self.job.record.dtype).numpy)])
        f.panel(self.job.name, i * self.step, room)
        return room

    def specs(self, i: int, nnz: int) -> Specs | None:
        """The arrays of panel ``i``, where the number of its nonzeros decides them."""
        dtype = value_type(self.job.record.dtype).numpy
        return self.target.array_specs((self.rows(i), self.job.shape[1]), dtype, nnz, self.params)

    def size(self, f: TensorFile, team: Team, i: int) -> Counted:
        """Count panel ``i``; where counts do not tell the sizes it is converted (StructureError if it cannot be)."""
        x = self.read(f, team, i)
        nnz, negative = count_nonzeros(x)
        specs = self.specs(i, nnz)
        if specs is not None:
            return Counted(nnz, negative, specs)
        made = self.target.from_dense(x, **self.params)
        return Counted(nnz, negative, {name: (a.dtype, a.shape) for name, a in made.arrays().items()}, made)


def cut(job: Job, recipe: Recipe) -> Cut | None:
    """``job`` in panels, or None where the tensor, the target or the recipe asks for the whole."""
    r = job.record
    if job.target in (KEEP, AUTO) or r.format is not None or recipe.prune or recipe.misfit == "keep":
        return None
    if len(job.shape) != 2 or 0 in job.shape:
        return None
    if any(c is not None for c in r.crc32.values()):  # checksums are of whole arrays
        return None
    fmt, given = parse_spec(job.target)
    params = fmt.resolve_params(given)
    if r.dtype not in fmt.value_dtypes or len(params) != len(fmt.declared_params()):
        return None
    layout = fmt.panels(params)
    rows = None if layout is None else panel_rows(job, fmt, params, layout)
    return None if layout is None or rows is None else Cut(job, fmt, params, layout, rows)


def panel_rows(job: Job, target: type[Format], params: dict[str, Any], layout: Panels) -> int | None:
    """Rows of a panel: ``PANEL`` dense bytes of them, or as many as the memory budget lets an array of theirs have.

    None where a panel cannot be small. LimitError names the least budget, that of the smallest panel of the format.
    """
    dtype = value_type(job.record.dtype).numpy
    least = (layout.rows, job.shape[1])
    dense = limits.product(*least, dtype.itemsize)
    if dense > WIDEST:
        return None
    budget, count = limits.current().memory, PANEL // dense
    if budget is not None:
        # Where nothing is zero, indices may need more bytes than values, and blocks stand over the last column.
        specs = target.array_specs(least, dtype, limits.product(*least), params)
        if specs is None:  # converted to see: a panel is no wider than ``WIDEST``
            with limits.using(memory=None):
                full = target.from_dense(np.ones(least, dtype), **params).arrays()
            specs = {name: (a.dtype, a.shape) for name, a in full.items()}
        largest = max(dense, *(limits.product(*shape, d.itemsize) for d, shape in specs.values()))
        limits.check_bytes(largest, f"{job.name}: {target.name} of {layout.rows} row(s), the smallest panel")
        count = min(count, budget // largest)
    return layout.rows * max(1, count)


def sizing(f: TensorFile, cuts: Iterable[Cut], team: Team) -> Iterator[Counted]:
    """Every panel of every matrix counted, in order."""
    return team.results(bound(c.size, f, team, i) for c in cuts for i in range(c.count))


def record_of(c: Cut, panels: list[Counted]) -> Record:
    """What the output says of the whole, from the sizes of its panels."""
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    last = len(panels) - 1
    for name, (dtype, shape) in panels[0].specs.items():
        length = sum(p.specs[name][1][0] for p in panels)
        if name in c.layout.pointers:
            counted = counted_by(c.target, name)[0]
            dtype, length = index_dtype(sum(p.specs[counted][1][0] for p in panels)), length - last
        arrays[name] = (SAFETENSORS_CODE[dtype], (length, *shape[1:]))
    return Record(c.job.name, c.target, c.job.shape, c.job.record.dtype, arrays, c.params)


class Placed:
    """A cut matrix whose panels know their place in the output."""

    def __init__(self, c: Cut, record: Record, sized: list[Counted] | None) -> None:
        self.cut, self.record = c, record
        self._made = [p.made for p in sized] if sized else [None] * c.count
        self.counted = bool(sized)
        specs = [p.specs for p in sized] if sized else [c.specs(i, 0) or {} for i in range(c.count)]
        self._starts: list[dict[str, int]] = []
        at = dict.fromkeys(record.arrays, 0)
        for panel in specs:
            self._starts.append(dict(at))
            for name, (_, shape) in panel.items():
                at[name] += shape[0] - (1 if name in c.layout.pointers else 0)
        self._counted_by = {name: counted_by(c.target, name)[0] for name in c.layout.pointers}

    def tasks(self, f: TensorFile, out: FileWriter, team: Team) -> Iterator[Callable[[], tuple[int, int]]]:
        """Convert and write each panel; a task returns (nonzeros, -0.0) of it, or zeros where they are known."""
        return (bound(self._write, f, out, team, i) for i in range(self.cut.count))

    def _write(self, f: TensorFile, out: FileWriter, team: Team, i: int) -> tuple[int, int]:
        made, counts = self._made[i], (0, 0)
        self._made[i] = None
        if made is None:
            x = self.cut.read(f, team, i)
            if not self.counted:
                counts = count_nonzeros(x)
            made = self.cut.target.from_dense(x, **self.cut.params)
        start = self._starts[i]
        for name, a in made.arrays().items():
            dtype, at = SAFETENSORS[self.record.arrays[name][0]], start[name]
            if name in self.cut.layout.pointers:
                first = 1 if i else 0  # the panel before has written it
                a, at = a[first:].astype(np.int64) + start[self._counted_by[name]], at + first
            out.put_part(self.record.name, name, at, a.astype(dtype, copy=False))
        return counts


def counted_by(target: type[Format], pointer: str) -> tuple[str, ...]:
    """The arrays whose entries a pointer counts."""
    arrays = target.declared_arrays()
    label = next(d.bound for d in arrays if d.name == pointer)
    return tuple(d.name for d in arrays if d.dims[0] == label)


def bound(call: Callable[..., T], *args: Any) -> Callable[[], T]:
    """A task of a team."""
    return lambda: call(*args)
