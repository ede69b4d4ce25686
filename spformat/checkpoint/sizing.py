"""The sizing pass over a shard: the sizes of all tensors in the output, before its first byte is written.

Where shape and target alone decide the sizes of a tensor, nothing is read for that. Otherwise its nonzeros are counted;
or, where only the conversion tells the sizes, it is converted, and the result stays in memory until it is written if it
is small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..arrays.dtypes import SAFETENSORS, value_type
from ..arrays.library import is_cupy, room_on
from ..errors import LimitError, StructureError
from ..formats import parse_spec, spec_text
from ..formats.base import Format
from ..formats.convert import convert
from ..limits import product
from ..preprocess.structure import count_nonzeros
from ..storage.descriptor import Record
from ..storage.filewriter import outline
from ..storage.stwriter import code_of
from ..storage.tensorfile import TensorFile
from .recipe import AUTO, ERROR, KEEP, Recipe, needs_counts
from .row_chunks import ChunkEncoder, ChunkPlan, Team, count_chunks, record_of
from .shard_input import ShardTask, one_ahead, read
from .stacks import is_stack, matrices_of, resolved
from .tensor_plans import TensorOutcome, TensorPlan, counted, dense_of, kept, misfit_plan, resolve_target

_MOST_IN_MEMORY = 128 << 20
"""Bytes of converted tensors that stay in memory between the sizing and the writing pass."""


@dataclass(frozen=True)
class SizedTensor:
    """What is known of one tensor between the sizing and the writing pass."""

    plan: TensorPlan
    outcome: TensorOutcome
    record: Record
    matrix: Format | None = None
    """The converted tensor, if the sizing pass had to convert it and it is small."""
    encoder: ChunkEncoder | None = None
    """Set for a tensor that is converted in row chunks."""


def size_tensors(task: ShardTask, chunked: dict[str, ChunkPlan], team: Team) -> list[SizedTensor]:
    """Every tensor of the shard, sized. ``chunked``: those that are converted in row chunks, by their names."""
    sized_in_chunks, in_memory = _size_chunks(task.f, chunked, team)
    # A format is chosen by its counts on the host, which is faster at them.
    wanted = [
        (plan, "cpu" if needs_counts(plan.target) else task.device)
        if plan.name not in chunked and _must_be_read(plan, task.recipe)
        else None
        for plan in task.plans
    ]
    sized: list[SizedTensor] = []
    room = _MOST_IN_MEMORY if task.device == "cpu" else room_on(task.device) // task.share
    for plan, values in zip(task.plans, one_ahead(task.f, wanted), strict=True):
        sized.append(sized_in_chunks.get(plan.name) or _size_tensor(task, plan, room - in_memory, values))
        matrix = sized[-1].matrix
        in_memory += matrix.nbytes if matrix is not None else 0
    return sized


def same_for_stacks(
    task: ShardTask, stacks: Sequence[TensorPlan], sized: list[SizedTensor]
) -> tuple[list[TensorPlan], list[SizedTensor]]:
    """Where one matrix of a stack goes to the target for misfits, let all of them go there.

    stacks: the plans of the shard, before those of matrices took the places of stacks. Returns them with their final
    targets, and ``sized`` with a single entry for a stack that is kept.
    """
    by_name = {s.plan.name: s for s in sized}
    out: list[SizedTensor] = []
    plans: list[TensorPlan] = []
    for plan in stacks:
        members = [by_name[m.name] for m in matrices_of(plan)] if is_stack(plan) else [by_name[plan.name]]
        misfit = next((s for s in members if s.plan.target != plan.target or s.outcome.target == KEEP), None)
        if not is_stack(plan) or misfit is None:
            plans.append(plan)
            out += members
        elif misfit.outcome.target == KEEP:
            why = f"{misfit.outcome.why} (matrix {members.index(misfit)})"
            plans.append(replace(plan, target=KEEP, why=why))
            out.append(SizedTensor(plans[-1], kept(plans[-1]), _kept_record(plan)))
        else:
            again = replace(task, recipe=task.recipe.without_misfit())
            plan = replace(plan, target=misfit.plan.target, why=misfit.plan.why)
            plan = resolved(task.f, plan, again.recipe) if needs_counts(plan.target) else plan
            plans.append(plan)
            out += [_size_tensor(again, m, 0, read(task.f, m, task.device)) for m in matrices_of(plan)]
    return plans, out


def _size_chunks(f: TensorFile, chunked: dict[str, ChunkPlan], team: Team) -> tuple[dict[str, SizedTensor], int]:
    """The tensors that are converted in row chunks, sized; and the bytes of converted row chunks that stay in
    memory."""
    records = {name: _record_of_header(c.plan) for name, c in chunked.items()}
    unknown = [c for name, c in chunked.items() if records[name] is None]
    each, in_memory, sized = count_chunks(f, unknown, team), 0, {}
    for name, c in chunked.items():
        record, counts = records[name], None
        outcome = replace(kept(c.plan), target=spec_text(c.target, c.params))
        if record is None:
            counts = []
            with refusal_of_whole(f, c):
                for chunk in itertools.islice(each, c.count):
                    size = chunk.matrix.nbytes if chunk.matrix is not None else 0
                    fits = in_memory + size <= _MOST_IN_MEMORY
                    in_memory += size if fits else 0
                    counts.append(chunk if fits else replace(chunk, matrix=None))
            sums = sum(p.nnz for p in counts), sum(p.negative_zeros for p in counts)
            outcome = counted(outcome, c.target, None, sums)
            record = record_of(c, counts)
        encoder = ChunkEncoder(c, record, counts)
        sized[name] = SizedTensor(c.plan, _with_size(outcome, record), record, encoder=encoder)
    return sized, in_memory


@contextmanager
def refusal_of_whole(f: TensorFile, c: ChunkPlan) -> Iterator[None]:
    """If a row chunk does not fit the target, raise the error of the whole matrix: its count and positions are those of
    the whole. Of a matrix beyond the memory budget, that of the row chunk, which says so."""
    try:
        yield
    except StructureError as e:
        try:
            convert(f.array(c.plan.name), c.target, **c.params)
        except StructureError as whole:
            raise whole.at(path=f.path, tensor=c.plan.name) from None
        except LimitError:
            begin, end = e.fields["rows"]
            why = "numbered from 0 here, as --max-memory does not hold the matrix"
            e.message = f"in rows {begin}..{end - 1}, {why}: {e.message}"
        raise e.at(path=f.path, tensor=c.plan.name) from None


def _size_tensor(task: ShardTask, plan: TensorPlan, room: int, values: Any) -> SizedTensor:
    """Decide target and sizes of one tensor.

    Where only the conversion tells the sizes, the tensor is converted, and stays in memory if it has at most ``room``
    bytes. values: the tensor, if it was read.
    """
    base = kept(plan)
    if plan.target == KEEP:
        return SizedTensor(plan, base, _kept_record(plan))
    if values is None:
        record = _record_of_header(plan)
        assert record is not None  # else its values were read
        outcome = replace(base, target=spec_text(*_parsed(plan.target)))
        return SizedTensor(plan, _with_size(outcome, record), record)
    x, lost = task.pruned(values, plan)
    dense = None if isinstance(x, Format) else x
    try:
        target = resolve_target(plan, dense_of(x) if plan.target == AUTO else x)
    except LimitError as e:
        raise e.at(path=task.f.path, tensor=plan.name) from None
    except StructureError as e:  # "fastest", and no kernel takes values of its type
        return _size_misfit(task, plan, e, room, x)
    fmt, given = parse_spec(target)
    counts = count_nonzeros(dense) if dense is not None else (0, 0)
    try:
        fmt.accepts(value_type(plan.record.dtype).numpy)
        params = fmt.resolve_params(given)
        specs = None
        now = is_cupy(dense) and room > 0  # what fits the device is converted at once, so that it is read only once
        # A param that is missing here is decided by the values, during the conversion.
        if dense is not None and not now and fmt.has_all_params(params):
            specs = fmt.array_specs((dense.shape[0], dense.shape[1]), dense.dtype, counts[0], params)
        matrix = None if specs is not None else convert(x, fmt, **given)
        if specs is not None and task.recipe.misfit != ERROR:
            fmt.from_dense(dense, **params)  # only to learn whether the tensor fits
    except StructureError as e:
        return _size_misfit(task, plan, e, room, x)
    if specs is not None:
        arrays = {k: (code_of(dtype), shape) for k, (dtype, shape) in specs.items()}
        record = Record(plan.name, fmt, plan.shape, plan.record.dtype, arrays, params)
    else:
        assert matrix is not None
        record = outline(plan.name, matrix)
    outcome = counted(replace(base, target=target, **lost), fmt, x, counts)
    small = matrix is not None and matrix.nbytes <= room
    return SizedTensor(plan, _with_size(outcome, record), record, matrix if small else None)


def _size_misfit(task: ShardTask, plan: TensorPlan, e: StructureError, room: int, x: Any) -> SizedTensor:
    """As ``_size_tensor``, of a tensor that its target cannot hold, for the reason ``e``: what the recipe does then."""
    if task.recipe.misfit == ERROR:
        raise e.at(path=task.f.path, tensor=plan.name) from None
    if task.recipe.misfit == KEEP:
        return SizedTensor(plan, replace(kept(plan), why=f"kept: {e.message}"), _kept_record(plan))
    again = replace(task, recipe=task.recipe.without_misfit())
    return _size_tensor(again, misfit_plan(plan, e, task.recipe), room, x)


def _with_size(outcome: TensorOutcome, record: Record) -> TensorOutcome:
    """``outcome`` with the size that ``record`` has in the output."""
    size = sum(_nbytes(code, shape) for code, shape in record.arrays.values())
    dense = value_type(record.dtype).numpy.itemsize * record.shape[0] * record.shape[1]
    return replace(outcome, bytes_out=size, larger_than_dense=size > dense)


def _record_of_header(plan: TensorPlan) -> Record | None:
    """The description of a plain matrix in the output, if its target has the same size for all values (2:4, n:m).

    None for any other tensor.
    """
    if needs_counts(plan.target) or plan.record.format is not None:
        return None
    fmt, params = _parsed(plan.target)
    dtype = value_type(plan.record.dtype).numpy
    if plan.record.dtype not in fmt.value_dtypes or not fmt.has_all_params(params):
        return None
    shape = (plan.shape[0], plan.shape[1])
    specs = fmt.array_specs(shape, dtype, 0, params)
    if specs is None or specs != fmt.array_specs(shape, dtype, 1, params):
        return None
    return Record(plan.name, fmt, shape, plan.record.dtype, {k: (code_of(d), s) for k, (d, s) in specs.items()}, params)


def _parsed(target: str) -> tuple[type[Format], dict[str, Any]]:
    fmt, given = parse_spec(target)
    return fmt, fmt.resolve_params(given)


def _must_be_read(plan: TensorPlan, recipe: Recipe) -> bool:
    """Whether the sizes of the output depend on the values."""
    return plan.target != KEEP and (recipe.misfit != ERROR or _record_of_header(plan) is None)


def _kept_record(plan: TensorPlan) -> Record:
    """The description of a tensor that stays as it is. If numpy lacks its type, its size is stated in bytes."""
    if len(plan.record.arrays) != 1 or next(iter(plan.record.arrays.values()))[0] in SAFETENSORS:
        return plan.record
    ((code, shape),) = plan.record.arrays.values()
    sized: Any = (code, shape, plan.bytes_in)
    return replace(plan.record, arrays={"": sized})


def _nbytes(code: str, shape: tuple[int, ...]) -> int:
    return product(*shape, SAFETENSORS[code].itemsize)
