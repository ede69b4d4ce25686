"""One shard in, one file out: first the sizes of all tensors, then the tensors one after the other, in row chunks where
the target allows it.

A file is laid out before its first byte is written. Where shape and target alone decide the sizes of a tensor, nothing
is read for that. Otherwise its nonzeros are counted; or, where only the conversion tells the sizes, it is converted,
and the result stays in memory until it is written if it is small.
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
from ..arrays import threads
from ..arrays.dtypes import SAFETENSORS, SAFETENSORS_CODE, value_type
from ..arrays.library import default_stream, has_dtype, is_cupy, room_on
from ..errors import FormatError, LimitError, StructureError
from ..formats import parse_spec, spec_text
from ..formats.base import Format
from ..formats.convert import convert
from ..formats.fast import compiled
from ..limits import check_bytes, product
from ..preprocess.structure import count_nonzeros
from ..storage.descriptor import Record
from ..storage.filewriter import FileWriter, create, outline
from ..storage.stwriter import Writer, code_of
from ..storage.tensorfile import TensorFile
from .expand import chunk_decoder, error_of_whole_tensor
from .recipe import AUTO, KEEP, Recipe, writes_dense
from .row_chunks import ChunkEncoder, ChunkPlan, Team, count_chunks, plan_chunks, record_of
from .source import Source
from .tensor_plans import TensorOutcome, TensorPlan, dense_of, prune, resolve_target

Progress = Callable[[TensorOutcome], None]
_MOST_IN_MEMORY = 128 << 20
"""Bytes of converted tensors that stay in memory between the sizing and the writing pass."""
_WORTH_MOVING = 4 << 20
"""Bytes from which a tensor is converted on the device; a smaller one is converted faster by the host."""
_AHEAD = 96 << 20
"""Tensors of up to this many bytes are read while the one before them is converted and written."""


def write_shard(
    source: Source,
    shard: str,
    plans: tuple[TensorPlan, ...],
    recipe: Recipe,
    path: str,
    force: bool,
    progress: Progress | None,
    device: str = "cpu",
) -> tuple[TensorOutcome, ...]:
    """Convert the tensors of ``shard`` and write the file ``path``; a TensorOutcome for each, in the input's order."""
    of_shard = [plan for plan in plans if plan.shard == shard]
    write = _write_dense if writes_dense(recipe) else _write_packed
    with default_stream(device), source.open(shard) as f:
        return write(f, of_shard, recipe, path, force, progress, device)


def read(f: TensorFile, plan: TensorPlan, device: str = "cpu") -> Any:
    """The tensor: a Format if it is stored in a sparse format, else an array. Small ones stay on the host."""
    place = device if plan.bytes_in >= _WORTH_MOVING and has_dtype(device, plan.record.dtype) else "cpu"
    return f.array(plan.name, device=place) if plan.record.format is None else f.read(plan.name, place)


def _write_dense(
    f: TensorFile,
    plans: list[TensorPlan],
    recipe: Recipe,
    path: str,
    force: bool,
    progress: Progress | None,
    device: str,
) -> tuple[TensorOutcome, ...]:
    host = device == "cpu" and not recipe.prune
    decoders = {plan.name: x for plan in plans if host and (x := chunk_decoder(f, plan)) is not None}
    compiled.prepare(sum(product(*x.plan.shape, 2) for x in decoders.values()))
    specs: list[Any] = []
    for plan in plans:
        if plan.record.format is not None:
            dtype, in_chunks = value_type(plan.record.dtype).numpy, plan.name in decoders
            # A tensor in row chunks needs no memory of that size. A small file that claims a huge matrix is refused.
            with limits.using(memory=None) if in_chunks else nullcontext():
                check_bytes(
                    product(*plan.shape, dtype.itemsize),
                    f"{plan.name}: dense array of shape {plan.shape}",
                    plan.bytes_in,
                )
            specs.append((plan.name, SAFETENSORS_CODE[dtype], plan.shape))
        else:
            ((code, shape),) = plan.record.arrays.values()
            specs.append((plan.name, code, shape) if code in SAFETENSORS else (plan.name, code, shape, plan.bytes_in))
    outcomes = []
    with Team() as team, Writer(path, specs, {"format": "pt"}, overwrite=force) as out:
        written = team.results(t for x in decoders.values() for t in x.tasks(f, out, team))
        for plan in plans:
            x = decoders.get(plan.name)
            if x is not None:
                try:
                    for _ in itertools.islice(written, x.count):
                        pass
                    x.check(f)
                except FormatError as e:
                    raise error_of_whole_tensor(f, plan, e) from None
                size = product(*plan.shape, value_type(plan.record.dtype).numpy.itemsize)
            elif plan.record.format is not None or (recipe.prune and plan.target != KEEP):
                # Masks are chosen on the host.
                dense = prune(dense_of(read(f, plan, "cpu" if recipe.prune else device)), plan.target, recipe)
                out.put(plan.name, dense)
                size = dense.nbytes
            else:
                out.put(plan.name, f.raw(plan.name))
                size = plan.bytes_in
            outcomes.append(
                TensorOutcome(plan.name, "dense", plan.why, plan.shape, plan.record.dtype, plan.bytes_in, size)
            )
            if progress:
                progress(outcomes[-1])
    return tuple(outcomes)


@dataclass(frozen=True)
class _SizedTensor:
    """What is known of one tensor between the sizing and the writing pass."""

    plan: TensorPlan
    outcome: TensorOutcome
    record: Record
    matrix: Format | None = None
    """The converted tensor, if the sizing pass had to convert it and it is small."""
    encoder: ChunkEncoder | None = None
    """Set for a tensor that is converted in row chunks."""


def _write_packed(
    f: TensorFile,
    plans: list[TensorPlan],
    recipe: Recipe,
    path: str,
    force: bool,
    progress: Progress | None,
    device: str,
) -> tuple[TensorOutcome, ...]:
    there = "cpu" if recipe.prune else device  # masks are chosen on the host
    chunked = {plan.name: c for plan in plans if there == "cpu" and (c := plan_chunks(plan, recipe)) is not None}
    compiled.prepare(sum(c.plan.bytes_in for c in chunked.values()))
    outcomes: dict[str, TensorOutcome] = {}
    with Team() as team:
        sized_in_chunks, in_memory = _size_chunks(f, chunked, team)
        # The smallest format is chosen on the host, which is faster at the counts that this needs.
        wanted = [plan.name not in chunked and _must_be_read(plan, recipe) for plan in plans]
        read_now = [
            (plan, "cpu" if plan.target == AUTO else there) if w else None
            for plan, w in zip(plans, wanted, strict=True)
        ]
        sized: list[_SizedTensor] = []
        room = _MOST_IN_MEMORY if there == "cpu" else room_on(there)
        for plan, values in zip(plans, _one_ahead(f, read_now), strict=True):
            sized.append(sized_in_chunks.get(plan.name) or _size_tensor(f, plan, recipe, room - in_memory, values))
            matrix = sized[-1].matrix
            in_memory += matrix.nbytes if matrix is not None else 0
        sized_in_chunks.clear()
        # Between the matrices of a model lie small tensors that are kept. All matrices in row chunks are written first,
        # so that the threads do not stop for each small tensor.
        in_chunks, wholes = [s for s in sized if s.encoder], [s for s in sized if not s.encoder]
        with create(path, [s.record for s in sized], overwrite=force) as out:
            others = _put_whole(f, wholes, recipe, out, device)
            for outcome in itertools.chain(_put_chunks(f, in_chunks, out, team), others):
                outcomes[outcome.name] = outcome
                if progress:
                    progress(outcome)
    return tuple(outcomes[plan.name] for plan in plans)


def _size_chunks(f: TensorFile, chunked: dict[str, ChunkPlan], team: Team) -> tuple[dict[str, _SizedTensor], int]:
    """The tensors that are converted in row chunks, sized; and the bytes of converted row chunks that stay in
    memory."""
    records = {name: _record_of_header(c.plan) for name, c in chunked.items()}
    unknown = [c for name, c in chunked.items() if records[name] is None]
    counted, in_memory, sized = count_chunks(f, unknown, team), 0, {}
    for name, c in chunked.items():
        record, counts = records[name], None
        outcome = replace(_kept(c.plan), target=spec_text(c.target, c.params))
        if record is None:
            counts = []
            with _refusal_of_whole(f, c):
                for chunk in itertools.islice(counted, c.count):
                    size = chunk.matrix.nbytes if chunk.matrix is not None else 0
                    fits = in_memory + size <= _MOST_IN_MEMORY
                    in_memory += size if fits else 0
                    counts.append(chunk if fits else replace(chunk, matrix=None))
            nnz = sum(p.nnz for p in counts)
            outcome = replace(outcome, nnz=nnz, negative_zeros=sum(p.negative_zeros for p in counts))
            record = record_of(c, counts)
        encoder = ChunkEncoder(c, record, counts)
        sized[name] = _SizedTensor(c.plan, _with_size(outcome, record), record, encoder=encoder)
    return sized, in_memory


def _put_chunks(f: TensorFile, group: list[_SizedTensor], out: FileWriter, team: Team) -> Iterator[TensorOutcome]:
    """Write the tensors that are converted in row chunks, without a pause between two of them."""
    encoders = [s.encoder for s in group if s.encoder is not None]
    written = team.results(task for e in encoders for task in e.tasks(f, out, team))
    for s, encoder in zip(group, encoders, strict=True):
        with _refusal_of_whole(f, encoder.chunks):
            counts = list(itertools.islice(written, encoder.chunks.count))
        if s.outcome.nnz is not None:
            yield s.outcome
        else:
            yield replace(s.outcome, nnz=sum(n for n, _ in counts), negative_zeros=sum(z for _, z in counts))


@contextmanager
def _refusal_of_whole(f: TensorFile, c: ChunkPlan) -> Iterator[None]:
    """If a row chunk does not fit the target, raise the error of the whole matrix: its count and positions are those of
    the whole."""
    try:
        yield
    except StructureError as e:
        try:
            convert(f.array(c.plan.name), c.target, **c.params)
        except StructureError as whole:
            raise whole.at(path=f.path, tensor=c.plan.name) from None
        raise e.at(path=f.path, tensor=c.plan.name) from None


def _put_whole(
    f: TensorFile, sized: list[_SizedTensor], recipe: Recipe, out: FileWriter, device: str
) -> Iterator[TensorOutcome]:
    """Convert and write tensors one by one, each as a whole."""
    there = "cpu" if recipe.prune else device
    # Beside a result that is larger than its input there is no memory for the next tensor.
    roomy = [True, *((s.outcome.bytes_out or 0) <= s.plan.bytes_in for s in sized[:-1])]
    wanted = [(s.plan, there) if _needs_values(s) and room else None for s, room in zip(sized, roomy, strict=False)]
    with ThreadPoolExecutor(1) as writer:
        # What was converted on a device is copied to the file while the next tensor is converted. At most one such copy
        # is under way, and an outcome does not wait for it: so this is a single future, not ``threads.in_order``.
        copying: Future[None] | None = None
        for i, values in enumerate(_one_ahead(f, wanted)):
            outcome, write = _put(f, sized[i], recipe, out, values, device)
            del values
            sized[i] = replace(sized[i], matrix=None)
            if copying is not None:
                copying.result()
            copying = None if write is None else writer.submit(copy_context().run, write)
            yield outcome
        if copying is not None:
            copying.result()


def _kept(plan: TensorPlan) -> TensorOutcome:
    return TensorOutcome(
        name=plan.name, target=KEEP, why=plan.why, shape=plan.shape, dtype=plan.record.dtype, bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_in,
    )  # fmt: skip


def _size_tensor(f: TensorFile, plan: TensorPlan, recipe: Recipe, room: int, values: Any) -> _SizedTensor:
    """Decide target and sizes of one tensor.

    Where only the conversion tells the sizes, the tensor is converted, and stays in memory if it has at most ``room``
    bytes. values: the tensor, if it was read.
    """
    kept = _kept(plan)
    if plan.target == KEEP:
        return _SizedTensor(plan, kept, _kept_record(plan))
    if values is None:
        record = _record_of_header(plan)
        assert record is not None  # else its values were read
        outcome = replace(kept, target=spec_text(*_parsed(plan.target)))
        return _SizedTensor(plan, _with_size(outcome, record), record)
    x = prune_any(values, plan, recipe)
    dense = None if isinstance(x, Format) else x
    try:
        target = resolve_target(plan, dense_of(x) if plan.target == AUTO else x)
    except LimitError as e:
        raise e.at(path=f.path, tensor=plan.name) from None
    fmt, given = parse_spec(target)
    nnz, negative = count_nonzeros(dense) if dense is not None else (x.nnz, 0)
    dropped = 0
    if dense is None and (zeros := x.stored_zeros):
        dropped = 0 if fmt.keeps_stored_zeros else zeros
        nnz = x.count_nonzeros() + zeros - dropped
    try:
        fmt.accepts(value_type(plan.record.dtype).numpy)
        params = fmt.resolve_params(given)
        specs = None
        now = is_cupy(dense) and room > 0  # what fits the device is converted at once, so that it is read only once
        # A param that is missing here is decided by the values, during the conversion.
        if dense is not None and not now and len(params) == len(fmt.declared_params()):
            specs = fmt.array_specs((dense.shape[0], dense.shape[1]), dense.dtype, nnz, params)
        matrix = None if specs is not None else convert(x, fmt, **given)
    except StructureError as e:
        return _SizedTensor(plan, _misfit(e.at(path=f.path, tensor=plan.name), kept, recipe), _kept_record(plan))
    if specs is not None:
        arrays = {k: (code_of(dtype), shape) for k, (dtype, shape) in specs.items()}
        record = Record(plan.name, fmt, plan.shape, plan.record.dtype, arrays, params)
        if recipe.misfit == "keep" and not _fits(dense, fmt, params):
            return _SizedTensor(plan, replace(kept, why="kept: the target cannot hold it"), _kept_record(plan))
    else:
        assert matrix is not None
        record = outline(plan.name, matrix)
    counted = replace(kept, target=target, nnz=nnz, negative_zeros=negative, dropped_zeros=dropped)
    small = matrix is not None and matrix.nbytes <= room
    return _SizedTensor(plan, _with_size(counted, record), record, matrix if small else None)


def _with_size(outcome: TensorOutcome, record: Record) -> TensorOutcome:
    """``outcome`` with the size that ``record`` has in the output."""
    size = sum(_nbytes(code, shape) for code, shape in record.arrays.values())
    dense = value_type(record.dtype).numpy.itemsize * record.shape[0] * record.shape[1]
    return replace(outcome, bytes_out=size, larger_than_dense=size > dense)


def _record_of_header(plan: TensorPlan) -> Record | None:
    """The description of a plain matrix in the output, if its target has the same size for all values (2:4, n:m).

    None for any other tensor.
    """
    if plan.target == AUTO or plan.record.format is not None:
        return None
    fmt, params = _parsed(plan.target)
    dtype = value_type(plan.record.dtype).numpy
    if plan.record.dtype not in fmt.value_dtypes or len(params) != len(fmt.declared_params()):
        return None
    shape = (plan.shape[0], plan.shape[1])
    specs = fmt.array_specs(shape, dtype, 0, params)
    if specs is None or specs != fmt.array_specs(shape, dtype, 1, params):
        return None
    return Record(plan.name, fmt, shape, plan.record.dtype, {k: (code_of(d), s) for k, (d, s) in specs.items()}, params)


def _parsed(target: str) -> tuple[type[Format], dict[str, Any]]:
    fmt, given = parse_spec(target)
    return fmt, fmt.resolve_params(given)


def _fits(x: Any, fmt: type[Format], params: dict[str, Any]) -> bool:
    try:
        fmt.from_dense(x, **params)
    except StructureError:
        return False
    return True


def _misfit(e: Exception, kept: TensorOutcome, recipe: Recipe) -> TensorOutcome:
    if recipe.misfit != "keep":
        raise e
    return replace(kept, why=f"kept: {getattr(e, 'message', e)}")


def prune_any(x: Any, plan: TensorPlan, recipe: Recipe) -> Any:
    """``x`` pruned if the recipe asks for it; a Format is decoded for that."""
    return prune(dense_of(x), plan.target, recipe) if recipe.prune else x


def _needs_values(s: _SizedTensor) -> bool:
    return s.outcome.target != KEEP and s.matrix is None


def _must_be_read(plan: TensorPlan, recipe: Recipe) -> bool:
    """Whether the sizes of the output depend on the values."""
    return plan.target != KEEP and (recipe.misfit == "keep" or _record_of_header(plan) is None)


def _one_ahead(f: TensorFile, wanted: list[tuple[TensorPlan, str] | None]) -> Iterator[Any]:
    """The values of each (plan, device), or None for None. A small tensor is read while the caller uses the one before
    it; a large one is read when it is asked for, so that two are not in memory."""

    def small(pair: tuple[TensorPlan, str] | None) -> Any:
        return read(f, *pair) if pair and pair[0].bytes_in <= _AHEAD else None

    with ThreadPoolExecutor(1) as reader:
        tasks = (partial(small, pair) for pair in wanted)
        for pair, values in zip(wanted, threads.in_order(reader, tasks, 1), strict=True):
            if pair and values is None:
                values = read(f, *pair)
            yield values
            del values


def _put(
    f: TensorFile, s: _SizedTensor, recipe: Recipe, out: FileWriter, values: Any, device: str
) -> tuple[TensorOutcome, Callable[[], None] | None]:
    """Convert one tensor and write it. ``values``: the tensor, if it was read ahead.

    Returns its outcome, with the counts that were not known before; and, for a tensor on a device, a call that copies
    it to the file.
    """
    if s.outcome.target == KEEP:
        if s.record.format is None:
            out.put_array(s.plan.name, "", f.raw(s.plan.name))
        else:
            out.put(s.plan.name, f.read(s.plan.name))
        return s.outcome, None
    matrix, outcome = s.matrix, s.outcome
    if matrix is None:
        fmt, given = parse_spec(s.outcome.target)
        try:
            there = "cpu" if recipe.prune else device
            x = prune_any(read(f, s.plan, there) if values is None else values, s.plan, recipe)
            matrix = convert(x, fmt, **given)
        except StructureError as e:
            raise e.at(path=f.path, tensor=s.plan.name) from None
        if outcome.nnz is None:
            nnz, negative = count_nonzeros(x)
            outcome = replace(outcome, nnz=nnz, negative_zeros=negative)
        del x  # so that no more than one tensor and its converted form are in memory
    if matrix.device != "cpu":
        return outcome, partial(out.put, s.plan.name, matrix)
    out.put(s.plan.name, matrix)
    return outcome, None


def _kept_record(plan: TensorPlan) -> Record:
    """The description of a tensor that stays as it is. If numpy lacks its type, its size is stated in bytes."""
    if len(plan.record.arrays) != 1 or next(iter(plan.record.arrays.values()))[0] in SAFETENSORS:
        return plan.record
    ((code, shape),) = plan.record.arrays.values()
    sized: Any = (code, shape, plan.bytes_in)
    return replace(plan.record, arrays={"": sized})


def _nbytes(code: str, shape: tuple[int, ...]) -> int:
    return product(*shape, SAFETENSORS[code].itemsize)
