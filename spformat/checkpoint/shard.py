"""One shard in, one file out: sizes first, then tensor by tensor, in panels of rows where the target allows it.

A file is laid out before its first byte is written. Where shape and target decide the sizes, nothing is read for
that; else the tensor is counted, or, where only a conversion tells, converted (and held for the writing if small).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .. import limits
from ..arrays.dtypes import SAFETENSORS, SAFETENSORS_CODE, value_type
from ..arrays.library import default_stream, has_dtype, is_cupy, room_on
from ..errors import FormatError, LimitError, StructureError
from ..formats import parse_spec, spec_text
from ..formats.base import Format
from ..formats.convert import convert
from ..formats.fast import compiled
from ..limits import check_bytes, product
from ..preprocess.structure import count_nonzeros
from ..storage.container import TensorFile
from ..storage.descriptor import Record
from ..storage.filewriter import FileWriter, create, outline
from ..storage.stwriter import Writer, code_of
from .expand import expansion, told_by_the_whole
from .jobs import Job, Outcome, dense_of, prune, settle
from .recipe import AUTO, KEEP, Recipe, writes_dense
from .row_chunks import Cut, Placed, Team, cut, record_of, sizing
from .source import Source

Progress = Callable[[Outcome], None]
_KEPT = 128 << 20
"""Bytes of converted tensors held between the sizing and the writing pass."""
_WORTH_MOVING = 4 << 20
"""Bytes from which a tensor is converted on the device: below, launches take longer than the host's conversion."""
_AHEAD = 96 << 20
"""Tensors of up to this many bytes are read while the one before them is converted and written."""


def write_shard(
    source: Source,
    shard: str,
    jobs: tuple[Job, ...],
    recipe: Recipe,
    path: str,
    force: bool,
    progress: Progress | None,
    device: str = "cpu",
) -> tuple[Outcome, ...]:
    """Convert the tensors of ``shard`` into the file ``path``; an Outcome for each, in the order of the input."""
    mine = [j for j in jobs if j.shard == shard]
    write = _write_dense if writes_dense(recipe) else _write_packed
    with default_stream(device), source.open(shard) as f:
        return write(f, mine, recipe, path, force, progress, device)


def read(f: TensorFile, job: Job, device: str = "cpu") -> Any:
    """The tensor as a Format if it is stored as one, else as an array; small ones stay on the host."""
    place = device if job.bytes_in >= _WORTH_MOVING and has_dtype(device, job.record.dtype) else "cpu"
    return f.array(job.name, device=place) if job.record.format is None else f.read(job.name, place)


def _write_dense(
    f: TensorFile, jobs: list[Job], recipe: Recipe, path: str, force: bool, progress: Progress | None, device: str
) -> tuple[Outcome, ...]:
    host = device == "cpu" and not recipe.prune
    expansions = {j.name: x for j in jobs if host and (x := expansion(f, j)) is not None}
    compiled.prepare(sum(product(*x.job.shape, 2) for x in expansions.values()))
    specs: list[Any] = []
    for j in jobs:
        if j.record.format is not None:
            dtype, in_panels = value_type(j.record.dtype).numpy, j.name in expansions
            # What goes in panels needs no memory of that size; a small file that claims a huge matrix is refused.
            with limits.using(memory=None) if in_panels else nullcontext():
                check_bytes(product(*j.shape, dtype.itemsize), f"{j.name}: dense array of shape {j.shape}", j.bytes_in)
            specs.append((j.name, SAFETENSORS_CODE[dtype], j.shape))
        else:
            ((code, shape),) = j.record.arrays.values()
            specs.append((j.name, code, shape) if code in SAFETENSORS else (j.name, code, shape, j.bytes_in))
    outcomes = []
    with Team() as team, Writer(path, specs, {"format": "pt"}, overwrite=force) as out:
        written = team.results(t for x in expansions.values() for t in x.tasks(f, out, team))
        for j in jobs:
            x = expansions.get(j.name)
            if x is not None:
                try:
                    for _ in itertools.islice(written, x.count):
                        pass
                    x.check(f)
                except FormatError as e:
                    raise told_by_the_whole(f, j, e) from None
                size = product(*j.shape, value_type(j.record.dtype).numpy.itemsize)
            elif j.record.format is not None or (recipe.prune and j.target != KEEP):
                # Masks are chosen on the host.
                dense = prune(dense_of(read(f, j, "cpu" if recipe.prune else device)), j.target, recipe)
                out.put(j.name, dense)
                size = dense.nbytes
            else:
                out.put(j.name, f.raw(j.name))
                size = j.bytes_in
            outcomes.append(Outcome(j.name, "dense", j.why, j.shape, j.record.dtype, j.bytes_in, size))
            if progress:
                progress(outcomes[-1])
    return tuple(outcomes)


@dataclass(frozen=True)
class _Settled:
    """One tensor between the sizing and the writing pass."""

    job: Job
    outcome: Outcome
    record: Record
    made: Format | None = None
    placed: Placed | None = None
    """Set for a tensor that is converted in panels."""


def _write_packed(
    f: TensorFile, jobs: list[Job], recipe: Recipe, path: str, force: bool, progress: Progress | None, device: str
) -> tuple[Outcome, ...]:
    there = "cpu" if recipe.prune else device  # masks are chosen on the host
    cuts = {j.name: c for j in jobs if there == "cpu" and (c := cut(j, recipe)) is not None}
    compiled.prepare(sum(c.job.bytes_in for c in cuts.values()))
    outcomes: dict[str, Outcome] = {}
    with Team() as team:
        placed, held = _size_panels(f, cuts, team)
        # The smallest format is chosen on the host: what that looks at is not what a device is fast at.
        wanted = [j.name not in cuts and _must_be_read(j, recipe) for j in jobs]
        read_now = [(j, "cpu" if j.target == AUTO else there) if w else None for j, w in zip(jobs, wanted, strict=True)]
        settled: list[_Settled] = []
        room = _KEPT if there == "cpu" else room_on(there)
        for j, values in zip(jobs, _one_ahead(f, read_now), strict=True):
            settled.append(placed.get(j.name) or _settle(f, j, recipe, room - held, values))
            made = settled[-1].made
            held += made.nbytes if made is not None else 0
        placed.clear()
        # Small tensors that are kept lie between the matrices of a model: the team does not stop for each of them.
        panels, wholes = [s for s in settled if s.placed], [s for s in settled if not s.placed]
        with create(path, [s.record for s in settled], overwrite=force) as out:
            others = _put_whole(f, wholes, recipe, out, device)
            for outcome in itertools.chain(_put_panels(f, panels, out, team), others):
                outcomes[outcome.name] = outcome
                if progress:
                    progress(outcome)
    return tuple(outcomes[j.name] for j in jobs)


def _size_panels(f: TensorFile, cuts: dict[str, Cut], team: Team) -> tuple[dict[str, _Settled], int]:
    """Everything about the tensors that go in panels, and the bytes of converted panels that are held."""
    records = {name: _record_of_header(c.job) for name, c in cuts.items()}
    unknown = [c for name, c in cuts.items() if records[name] is None]
    counted, held, settled = sizing(f, unknown, team), 0, {}
    for name, c in cuts.items():
        record, panels = records[name], None
        outcome = replace(_kept(c.job), target=spec_text(c.target, c.params))
        if record is None:
            panels = []
            with _refusal(f, c):
                for panel in itertools.islice(counted, c.count):
                    size = panel.made.nbytes if panel.made is not None else 0
                    fits = held + size <= _KEPT
                    held += size if fits else 0
                    panels.append(panel if fits else replace(panel, made=None))
            nnz = sum(p.nnz for p in panels)
            outcome = replace(outcome, nnz=nnz, negative_zeros=sum(p.negative_zeros for p in panels))
            record = record_of(c, panels)
        settled[name] = _Settled(c.job, _sized(outcome, record), record, placed=Placed(c, record, panels))
    return settled, held


def _put_panels(f: TensorFile, group: list[_Settled], out: FileWriter, team: Team) -> Iterator[Outcome]:
    """Write tensors panel by panel, without a pause between them."""
    placed = [s.placed for s in group if s.placed is not None]
    written = team.results(task for p in placed for task in p.tasks(f, out, team))
    for s, p in zip(group, placed, strict=True):
        with _refusal(f, p.cut):
            counts = list(itertools.islice(written, p.cut.count))
        if s.outcome.nnz is not None:
            yield s.outcome
        else:
            yield replace(s.outcome, nnz=sum(n for n, _ in counts), negative_zeros=sum(z for _, z in counts))


@contextmanager
def _refusal(f: TensorFile, c: Cut) -> Iterator[None]:
    """What a panel refuses is refused by the whole matrix, with the count and the place of all of it."""
    try:
        yield
    except StructureError as e:
        try:
            convert(f.array(c.job.name), c.target, **c.params)
        except StructureError as whole:
            raise whole.at(path=f.path, tensor=c.job.name) from None
        raise e.at(path=f.path, tensor=c.job.name) from None


def _put_whole(
    f: TensorFile, settled: list[_Settled], recipe: Recipe, out: FileWriter, device: str
) -> Iterator[Outcome]:
    """Write tensors one by one, as wholes."""
    there = "cpu" if recipe.prune else device
    # Beside a result larger than its input there is no room for the next tensor.
    roomy = [True, *((s.outcome.bytes_out or 0) <= s.job.bytes_in for s in settled[:-1])]
    wanted = [(s.job, there) if _needs_values(s) and room else None for s, room in zip(settled, roomy, strict=False)]
    with ThreadPoolExecutor(1) as writer:
        behind: Future[None] | None = None  # what was converted on the device goes to the file during the next one
        for i, values in enumerate(_one_ahead(f, wanted)):
            outcome, write = _put(f, settled[i], recipe, out, values, device)
            del values
            settled[i] = replace(settled[i], made=None)
            if behind is not None:
                behind.result()
            behind = None if write is None else writer.submit(copy_context().run, write)
            yield outcome
        if behind is not None:
            behind.result()


def _kept(job: Job) -> Outcome:
    return Outcome(
        name=job.name, target=KEEP, why=job.why, shape=job.shape, dtype=job.record.dtype, bytes_in=job.bytes_in,
        bytes_out=job.bytes_in,
    )  # fmt: skip


def _settle(f: TensorFile, job: Job, recipe: Recipe, hold: int, values: Any) -> _Settled:
    """Decide target and sizes of one tensor. What only a conversion tells is converted, and held if small."""
    kept = _kept(job)
    if job.target == KEEP:
        return _Settled(job, kept, _kept_record(job))
    if values is None:
        record = _record_of_header(job)
        assert record is not None  # else its values were read
        return _Settled(job, _sized(replace(kept, target=spec_text(*_parsed(job.target))), record), record)
    x = prune_any(values, job, recipe)
    dense = None if isinstance(x, Format) else x
    try:
        target = settle(job, dense_of(x) if job.target == AUTO else x)
    except LimitError as e:
        raise e.at(path=f.path, tensor=job.name) from None
    fmt, given = parse_spec(target)
    nnz, negative = count_nonzeros(dense) if dense is not None else (x.nnz, 0)
    dropped = 0
    if dense is None and (zeros := x.stored_zeros):
        dropped = 0 if fmt.keeps_stored_zeros else zeros
        nnz = x.count_nonzeros() + zeros - dropped
    try:
        fmt.accepts(value_type(job.record.dtype).numpy)
        params = fmt.resolve_params(given)
        specs = None
        now = is_cupy(dense) and hold > 0  # what fits the device is converted at once: it is read once
        if dense is not None and not now and len(params) == len(fmt.declared_params()):  # none that only values tell
            specs = fmt.array_specs((dense.shape[0], dense.shape[1]), dense.dtype, nnz, params)
        made = None if specs is not None else convert(x, fmt, **given)
    except StructureError as e:
        return _Settled(job, _misfit(e.at(path=f.path, tensor=job.name), kept, recipe), _kept_record(job))
    if specs is not None:
        arrays = {k: (code_of(dtype), shape) for k, (dtype, shape) in specs.items()}
        record = Record(job.name, fmt, job.shape, job.record.dtype, arrays, params)
        if recipe.misfit == "keep" and not _fits(dense, fmt, params):
            return _Settled(job, replace(kept, why="kept: the target cannot hold it"), _kept_record(job))
    else:
        assert made is not None
        record = outline(job.name, made)
    settled = replace(kept, target=target, nnz=nnz, negative_zeros=negative, dropped_zeros=dropped)
    outcome = _sized(settled, record)
    return _Settled(job, outcome, record, made if made is not None and made.nbytes <= hold else None)


def _sized(outcome: Outcome, record: Record) -> Outcome:
    """``outcome`` with the bytes of ``record``."""
    size = sum(_nbytes(code, shape) for code, shape in record.arrays.values())
    dense = value_type(record.dtype).numpy.itemsize * record.shape[0] * record.shape[1]
    return replace(outcome, bytes_out=size, larger_than_dense=size > dense)


def _record_of_header(job: Job) -> Record | None:
    """What the output says of a plain matrix whose target has one size whatever the values (2:4, n:m); else None."""
    if job.target == AUTO or job.record.format is not None:
        return None
    fmt, params = _parsed(job.target)
    dtype = value_type(job.record.dtype).numpy
    if job.record.dtype not in fmt.value_dtypes or len(params) != len(fmt.declared_params()):
        return None
    shape = (job.shape[0], job.shape[1])
    specs = fmt.array_specs(shape, dtype, 0, params)
    if specs is None or specs != fmt.array_specs(shape, dtype, 1, params):
        return None
    return Record(job.name, fmt, shape, job.record.dtype, {k: (code_of(d), s) for k, (d, s) in specs.items()}, params)


def _parsed(target: str) -> tuple[type[Format], dict[str, Any]]:
    fmt, given = parse_spec(target)
    return fmt, fmt.resolve_params(given)


def _fits(x: Any, fmt: type[Format], params: dict[str, Any]) -> bool:
    try:
        fmt.from_dense(x, **params)
    except StructureError:
        return False
    return True


def _misfit(e: Exception, kept: Outcome, recipe: Recipe) -> Outcome:
    if recipe.misfit != "keep":
        raise e
    return replace(kept, why=f"kept: {getattr(e, 'message', e)}")


def prune_any(x: Any, job: Job, recipe: Recipe) -> Any:
    """``x`` pruned when the recipe says so; a Format is decoded for that."""
    return prune(dense_of(x), job.target, recipe) if recipe.prune else x


def _needs_values(s: _Settled) -> bool:
    return s.outcome.target != KEEP and s.made is None


def _must_be_read(job: Job, recipe: Recipe) -> bool:
    """Whether the sizes of the output depend on the values."""
    return job.target != KEEP and (recipe.misfit == "keep" or _record_of_header(job) is None)


def _one_ahead(f: TensorFile, jobs: list[tuple[Job, str] | None]) -> Iterator[Any]:
    """The values of each (job, device), None for None: small tensors are read while the one before is worked on."""
    with ThreadPoolExecutor(1) as reader:
        ahead: Future[Any] | None = None
        for job, following in zip(jobs, [*jobs[1:], None], strict=False):
            values = ahead.result() if ahead else read(f, *job) if job else None
            ahead = None
            if following and following[0].bytes_in <= _AHEAD:  # under the limits of this thread
                ahead = reader.submit(copy_context().run, partial(read, f, *following))
            yield values
            del values


def _put(
    f: TensorFile, s: _Settled, recipe: Recipe, out: FileWriter, values: Any, device: str
) -> tuple[Outcome, Callable[[], None] | None]:
    """Write one tensor (``values``: what was read ahead); its outcome, with counts not known before, and what is left
    to do for a tensor on a device: copying it to the file."""
    if s.outcome.target == KEEP:
        if s.record.format is None:
            out.put_array(s.job.name, "", f.raw(s.job.name))
        else:
            out.put(s.job.name, f.read(s.job.name))
        return s.outcome, None
    made, outcome = s.made, s.outcome
    if made is None:
        fmt, given = parse_spec(s.outcome.target)
        try:
            there = "cpu" if recipe.prune else device
            x = prune_any(read(f, s.job, there) if values is None else values, s.job, recipe)
            made = convert(x, fmt, **given)
        except StructureError as e:
            raise e.at(path=f.path, tensor=s.job.name) from None
        if outcome.nnz is None:
            nnz, negative = count_nonzeros(x)
            outcome = replace(outcome, nnz=nnz, negative_zeros=negative)
        del x  # one tensor and its converted form, never more
    if made.device != "cpu":
        return outcome, partial(out.put, s.job.name, made)
    out.put(s.job.name, made)
    return outcome, None


def _kept_record(job: Job) -> Record:
    """What the output says of a tensor that stays as it is; the size of a type numpy lacks is given in bytes."""
    if len(job.record.arrays) != 1 or next(iter(job.record.arrays.values()))[0] in SAFETENSORS:
        return job.record
    ((code, shape),) = job.record.arrays.values()
    sized: Any = (code, shape, job.bytes_in)
    return replace(job.record, arrays={"": sized})


def _nbytes(code: str, shape: tuple[int, ...]) -> int:
    return product(*shape, SAFETENSORS[code].itemsize)
