"""Plain matrices converted in row chunks: a thread reads a few megabytes of rows, converts them and writes them.

Reading, converting and writing overlap. A row chunk stays in the caches of one core all the way, and the memory in use
is a few row chunks for each core, however large the tensor is. The format says whether its arrays can be built this
way (``Format.row_chunks``). Row chunks and whole matrices are converted by the same code, the format's ``from_dense``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from .. import limits
from ..arrays import threads
from ..arrays.dtypes import SAFETENSORS, SAFETENSORS_CODE, value_type
from ..arrays.library import ceil_div, index_dtype, round_up
from ..errors import StructureError
from ..formats import parse_spec
from ..formats.base import Format, RowChunks
from ..formats.declare import arrays_counted_by
from ..preprocess.structure import count_nonzeros
from ..storage.descriptor import Record
from ..storage.filewriter import FileWriter
from ..storage.tensorfile import TensorFile
from .recipe import ERROR, KEEP, Recipe, needs_counts
from .tensor_plans import TensorPlan

CHUNK_BYTES = 8 << 20
"""Dense bytes that a thread converts at a time."""
_LINE = 64
"""Bytes of a cache line; every buffer starts on one."""
LARGEST_CHUNK_BYTES = 64 << 20
"""If the smallest row chunk that a format allows has more dense bytes than this, the whole tensor is converted."""

T = TypeVar("T")
Specs = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""dtype and shape of each array."""


class Team:
    """One thread for each core, or for its share of them, with buffers that each thread uses again for every task.

    The limits that are in force where the team is created hold in its threads.
    """

    def __init__(self, share: int = 1) -> None:
        """share: how many teams have the cores together."""
        self._limits, self._size = limits.current(), max(1, threads.cores() // share)
        self._pool = ThreadPoolExecutor(self._size, "spformat")
        self._local = threading.local()

    def results(self, tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
        """What each task returns, in order. Only a few tasks are started before their results are taken."""
        return threads.in_order(self._pool, (partial(self._run, task) for task in tasks), 2 * self._size)

    def _run(self, task: Callable[[], T]) -> T:
        with limits.using(self._limits), threads.alone():
            return task()

    def buffers(self, arrays: Iterable[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[np.ndarray[Any, Any]]:
        """Arrays in memory that belongs to the calling thread. Every call uses the same memory again, so the system
        provides its pages only once."""
        wanted = [(shape, dtype, limits.product(*shape, dtype.itemsize)) for shape, dtype in arrays]
        total = sum(n + _LINE for _, _, n in wanted)
        memory = getattr(self._local, "memory", None)
        if memory is None or memory.nbytes < total:
            usual = min(CHUNK_BYTES, self._limits.memory or CHUNK_BYTES) + _LINE
            self._local.memory = memory = np.empty(max(total, usual), np.uint8)
        out, at = [], -memory.ctypes.data % _LINE
        for shape, dtype, n in wanted:
            out.append(memory[at : at + n].view(dtype).reshape(shape))
            at += round_up(n, _LINE)
        return out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class ChunkCounts:
    """What the sizing pass learns about one row chunk."""

    nnz: int
    negative_zeros: int
    specs: Specs
    matrix: Format | None = None
    """The converted row chunk, where only the conversion tells the sizes."""


@dataclass(frozen=True)
class ChunkPlan:
    """A plain matrix of a file, divided into row chunks for its target format."""

    plan: TensorPlan
    target: type[Format]
    params: dict[str, Any]
    layout: RowChunks
    step: int
    """Rows of a row chunk; the last may have fewer."""

    @property
    def count(self) -> int:
        """Number of row chunks."""
        return ceil_div(self.plan.shape[0], self.step)

    def rows(self, i: int) -> int:
        """Rows of row chunk ``i``."""
        return min(self.step, self.plan.shape[0] - i * self.step)

    def read(self, f: TensorFile, team: Team, i: int) -> np.ndarray[Any, Any]:
        """Row chunk ``i``, in the buffer of the calling thread."""
        (buffer,) = team.buffers([((self.rows(i), self.plan.shape[1]), value_type(self.plan.record.dtype).numpy)])
        f.read_rows(self.plan.name, i * self.step, buffer)
        return buffer

    def specs(self, i: int, nnz: int) -> Specs | None:
        """The arrays of row chunk ``i``; None unless the number of its nonzeros decides them."""
        dtype = value_type(self.plan.record.dtype).numpy
        return self.target.array_specs((self.rows(i), self.plan.shape[1]), dtype, nnz, self.params)

    def converted(self, x: np.ndarray[Any, Any], i: int) -> Format:
        """Row chunk ``i`` in the target format. A StructureError knows ``rows``, the first and the one after the last:
        its own numbers of rows begin with 0 at the first."""
        try:
            return self.target.from_dense(x, **self.params)
        except StructureError as e:
            raise e.at(rows=(i * self.step, i * self.step + self.rows(i))) from None

    def size(self, f: TensorFile, team: Team, i: int) -> ChunkCounts:
        """Count the nonzeros of row chunk ``i``. Where they do not decide the sizes, the row chunk is converted.

        Raises StructureError if it cannot be converted.
        """
        x = self.read(f, team, i)
        nnz, negative = count_nonzeros(x)
        specs = self.specs(i, nnz)
        if specs is not None:
            return ChunkCounts(nnz, negative, specs)
        matrix = self.converted(x, i)
        return ChunkCounts(nnz, negative, {name: (a.dtype, a.shape) for name, a in matrix.arrays().items()}, matrix)


def plan_chunks(plan: TensorPlan, recipe: Recipe) -> ChunkPlan | None:
    """The row chunks of a tensor; None where the tensor, its target or the recipe needs the whole matrix at once."""
    r = plan.record
    if plan.target == KEEP or needs_counts(plan.target) or r.format is not None:
        return None
    if recipe.prune or recipe.misfit != ERROR:
        return None
    if len(plan.shape) != 2 or 0 in plan.shape:
        return None
    if any(c is not None for c in r.crc32.values()):  # checksums are of whole arrays
        return None
    fmt, given = parse_spec(plan.target)
    params = fmt.resolve_params(given)
    try:
        fmt.accepts(value_type(r.dtype).numpy)
    except StructureError as e:
        budget = limits.current().memory
        whole = plan.bytes_in if budget is not None and plan.bytes_in > budget else None  # what --misfit would read
        raise e.at(tensor=plan.name, beyond_budget=whole) from None
    layout = fmt.row_chunks(params) if fmt.has_all_params(params) else None
    if layout is None:
        what = f"{plan.name}: {fmt.name} is converted as a whole, not in row chunks: dense array of shape {plan.shape}"
        limits.check_bytes(limits.product(*plan.shape, value_type(r.dtype).numpy.itemsize), what, plan.bytes_in)
        return None
    rows = rows_per_chunk(plan, fmt, params, layout)
    return None if rows is None else ChunkPlan(plan, fmt, params, layout, rows)


def rows_per_chunk(plan: TensorPlan, target: type[Format], params: dict[str, Any], layout: RowChunks) -> int | None:
    """Rows of a row chunk: as many as ``CHUNK_BYTES`` dense bytes hold, or fewer if the memory budget demands it.

    None where a row chunk cannot be small. LimitError states the least budget that would do: that of the smallest row
    chunk of the format.
    """
    dtype = value_type(plan.record.dtype).numpy
    least = (layout.rows, plan.shape[1])
    dense = limits.product(*least, dtype.itemsize)
    if dense > LARGEST_CHUNK_BYTES:
        return None
    budget, count = limits.current().memory, CHUNK_BYTES // dense
    if budget is not None:
        # Where nothing is zero, indices may need more bytes than values, and blocks may reach beyond the last column.
        specs = target.array_specs(least, dtype, limits.product(*least), params)
        if specs is None:  # only a conversion tells the sizes; this one is at most ``LARGEST_CHUNK_BYTES``
            with limits.using(memory=None):
                full = target.from_dense(np.ones(least, dtype), **params).arrays()
            specs = {name: (a.dtype, a.shape) for name, a in full.items()}
        largest = max(dense, *(limits.product(*shape, d.itemsize) for d, shape in specs.values()))
        limits.check_bytes(largest, f"{plan.name}: {target.name} of {layout.rows} row(s), the smallest row chunk")
        count = min(count, budget // largest)
    return layout.rows * max(1, count)


def count_chunks(f: TensorFile, matrices: Iterable[ChunkPlan], team: Team) -> Iterator[ChunkCounts]:
    """The counts of every row chunk of every matrix, in order."""
    return team.results(partial(c.size, f, team, i) for c in matrices for i in range(c.count))


def record_of(c: ChunkPlan, counts: list[ChunkCounts]) -> Record:
    """The description of the whole matrix in the output, from the sizes of its row chunks."""
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {}
    last = len(counts) - 1
    for name, (dtype, shape) in counts[0].specs.items():
        length = sum(p.specs[name][1][0] for p in counts)
        if name in c.layout.pointers:
            counted = arrays_counted_by(c.target, name)[0]
            dtype, length = index_dtype(sum(p.specs[counted][1][0] for p in counts)), length - last
        arrays[name] = (SAFETENSORS_CODE[dtype], (length, *shape[1:]))
    return Record(c.plan.name, c.target, c.plan.shape, c.plan.record.dtype, arrays, c.params)


class ChunkEncoder:
    """Converts the row chunks of one matrix and writes each at its place in the output."""

    def __init__(self, chunks: ChunkPlan, record: Record, counts: list[ChunkCounts] | None) -> None:
        self.chunks, self.record = chunks, record
        self._matrices = [p.matrix for p in counts] if counts else [None] * chunks.count
        self.counted = bool(counts)
        specs = [p.specs for p in counts] if counts else [chunks.specs(i, 0) or {} for i in range(chunks.count)]
        self._starts: list[dict[str, int]] = []
        at = dict.fromkeys(record.arrays, 0)
        for arrays in specs:
            self._starts.append(dict(at))
            for name, (_, shape) in arrays.items():
                at[name] += shape[0] - (1 if name in chunks.layout.pointers else 0)
        self._counted_by = {name: arrays_counted_by(chunks.target, name)[0] for name in chunks.layout.pointers}

    def tasks(self, f: TensorFile, out: FileWriter, team: Team) -> Iterator[Callable[[], tuple[int, int]]]:
        """A task for each row chunk, which converts and writes it. It returns the number of nonzeros and of -0.0 in
        the row chunk, or (0, 0) where the sizing pass has counted them already."""
        return (partial(self._write, f, out, team, i) for i in range(self.chunks.count))

    def _write(self, f: TensorFile, out: FileWriter, team: Team, i: int) -> tuple[int, int]:
        matrix, counts = self._matrices[i], (0, 0)
        self._matrices[i] = None
        if matrix is None:
            x = self.chunks.read(f, team, i)
            if not self.counted:
                counts = count_nonzeros(x)
            matrix = self.chunks.converted(x, i)
        start = self._starts[i]
        for name, a in matrix.arrays().items():
            dtype, at = SAFETENSORS[self.record.arrays[name][0]], start[name]
            if name in self.chunks.layout.pointers:
                first = 1 if i else 0  # the row chunk before this one has written the entry that both share
                a, at = a[first:].astype(np.int64) + start[self._counted_by[name]], at + first
            out.put_part(self.record.name, name, at, a.astype(dtype, copy=False))
        return counts
