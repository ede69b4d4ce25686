"""One shard in, one file out: first the sizes of all tensors, then the tensors one after the other, in row chunks where
the target allows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

from .. import limits
from ..arrays.dtypes import SAFETENSORS, SAFETENSORS_CODE, value_type
from ..arrays.library import default_stream
from ..errors import FormatError, LimitError, StructureError, UsageError
from ..formats import parse_spec
from ..formats.convert import convert
from ..formats.fast import compiled
from ..limits import check_bytes, product
from ..preprocess.structure import count_nonzeros
from ..storage.descriptor import Record
from ..storage.filewriter import FileWriter, create
from ..storage.stwriter import Writer, dense_metadata
from ..storage.tensorfile import TensorFile
from .expand import chunk_decoder, error_of_whole_tensor
from .recipe import KEEP, Recipe, needs_counts, writes_dense
from .row_chunks import Team, plan_chunks
from .shard_input import Progress, ShardTask, one_ahead, read
from .sizing import SizedTensor, refusal_of_whole, same_for_stacks, size_tensors
from .source import Source
from .stacks import (
    StackedFile,
    expanded,
    is_stack,
    matrices_of,
    resolved,
    stacked_outcome,
    stacked_outcomes,
    stacked_record,
)
from .tensor_plans import TensorOutcome, TensorPlan, counted, dense_of, prune_into


def write_shard(
    source: Source,
    shard: str,
    plans: tuple[TensorPlan, ...],
    recipe: Recipe,
    path: str,
    force: bool,
    progress: Progress | None,
    *,
    device: str = "cpu",
    share: int = 1,
) -> tuple[TensorOutcome, ...]:
    """Convert the tensors of ``shard`` and write the file ``path``; a TensorOutcome for each, in the input's order.

    share: how many shards are converted on the device at once.
    """
    of_shard = tuple(plan for plan in plans if plan.shard == shard)
    write = _write_dense if writes_dense(recipe) else _write_packed
    with default_stream(device), source.open(shard) as f:
        try:
            return write(ShardTask(f, of_shard, recipe, path, force, progress, device, share))
        except (LimitError, StructureError, UsageError) as e:
            raise e.at(path=f.path) from None


def _write_dense(task: ShardTask) -> tuple[TensorOutcome, ...]:
    f, plans, recipe = task.f, task.plans, task.recipe
    host = task.device == "cpu" and not recipe.prune
    decoders = {plan.name: x for plan in plans if host and (x := chunk_decoder(f, plan)) is not None}
    compiled.prepare(sum(product(*x.plan.shape, 2) for x in decoders.values()))
    specs: list[Any] = []
    for plan in plans:
        if plan.record.format is not None:
            dtype, in_chunks = value_type(plan.record.dtype).numpy, plan.name in decoders
            # A tensor in row chunks, or matrix by matrix, needs no memory of that size. A small file that claims a
            # huge matrix is refused.
            with limits.using(memory=None) if in_chunks or is_stack(plan) else nullcontext():
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
    lost: dict[str, Any]
    with (
        Team(task.teams) as team,
        Writer(task.path, specs, dense_metadata(f.own_metadata), overwrite=task.force) as out,
    ):
        written = team.results(t for x in decoders.values() for t in x.tasks(f, out, team))
        for plan in plans:
            x, lost = decoders.get(plan.name), {}
            if x is not None:
                try:
                    for _ in itertools.islice(written, x.count):
                        pass
                    x.check(f)
                except FormatError as e:
                    raise error_of_whole_tensor(f, plan, e) from None
                size = product(*plan.shape, value_type(plan.record.dtype).numpy.itemsize)
            elif is_stack(plan) and (plan.record.format is not None or recipe.prune):
                lost = _put_dense_stack(task, plan, out)
                size = product(*plan.shape, value_type(plan.record.dtype).numpy.itemsize)
            elif plan.record.format is not None or (recipe.prune and plan.target != KEEP):
                values = dense_of(read(f, plan, task.device))
                dense, lost = task.pruned(values, plan) if plan.target != KEEP else (values, {})
                lost |= {"nnz": count_nonzeros(dense)[0]} if lost else {}
                out.put(plan.name, dense)
                size = dense.nbytes
            else:
                out.put(plan.name, f.raw(plan.name))
                size = plan.bytes_in
            target = KEEP if plan.target == KEEP and plan.record.format is None else "dense"
            outcomes.append(
                TensorOutcome(plan.name, target, plan.why, plan.shape, plan.record.dtype, plan.bytes_in, size, **lost)
            )
            if task.progress:
                task.progress(outcomes[-1])
    return tuple(outcomes)


def _put_dense_stack(task: ShardTask, plan: TensorPlan, out: Writer) -> dict[str, Any]:
    """Write the matrices of a stack as one dense tensor, one after the other; returns what pruning took, as
    ``ShardTask.pruned`` does, with the number of nonzeros."""
    f: Any = StackedFile(task.f, [plan.record])
    outcomes: list[TensorOutcome] = []

    def matrices() -> Iterator[Any]:
        for m in matrices_of(plan):
            dense, lost = task.pruned(dense_of(read(f, m)), m)
            nnz = count_nonzeros(dense)[0] if lost else None
            outcomes.append(TensorOutcome(m.name, "dense", "", m.shape, m.record.dtype, 0, 0, nnz, **lost))
            yield dense[None]

    out.put(plan.name, matrices())
    o = stacked_outcome(plan, outcomes)
    if not task.recipe.prune:
        return {}
    lost = {"pruned": o.pruned, "lost_sum": o.lost_sum, "lost_norm": o.lost_norm, "norm": o.norm}
    return {"nnz": o.nnz, **lost}


def _write_packed(whole: ShardTask) -> tuple[TensorOutcome, ...]:
    f: Any = StackedFile(whole.f, [p.record for p in whole.plans if is_stack(p)])
    plans = [resolved(f, p, whole.recipe) if is_stack(p) and needs_counts(p.target) else p for p in whole.plans]
    task, chunked = replace(whole, f=f, plans=expanded(plans)), {}
    if task.device == "cpu":
        chunked = {plan.name: c for plan in task.plans if (c := plan_chunks(plan, task.recipe)) is not None}
    compiled.prepare(sum(c.plan.bytes_in for c in chunked.values()))
    outcomes: dict[str, TensorOutcome] = {}
    with Team(task.teams) as team:
        plans, sized = same_for_stacks(task, plans, size_tensors(task, chunked, team))
        # Between the matrices of a model lie small tensors that are kept. All matrices in row chunks are written first,
        # so that the threads do not stop for each small tensor.
        in_chunks, wholes = [s for s in sized if s.encoder], [s for s in sized if not s.encoder]
        records, metadata = _records(plans, sized), task.f.own_metadata
        with create(task.path, records, overwrite=task.force, metadata=metadata) as out:
            del sized  # the memory of a converted tensor is free again once it is written
            put = itertools.chain(_put_chunks(task.f, in_chunks, out, team), _put_whole(task, wholes, out))
            for outcome in stacked_outcomes(plans, put):
                outcomes[outcome.name] = outcome
                if task.progress:
                    task.progress(outcome)
    return tuple(outcomes[plan.name] for plan in plans)


def _records(plans: Iterable[TensorPlan], sized: Iterable[SizedTensor]) -> list[Record]:
    """The description of every tensor of the output; those of the matrices of a stack become one."""
    each = iter(sized)
    return [
        stacked_record(p, [next(each).record for _ in range(p.shape[0])]) if is_stack(p) else next(each).record
        for p in plans
    ]


def _put_chunks(f: TensorFile, group: list[SizedTensor], out: FileWriter, team: Team) -> Iterator[TensorOutcome]:
    """Write the tensors that are converted in row chunks, without a pause between two of them."""
    encoders = [s.encoder for s in group if s.encoder is not None]
    written = team.results(task for e in encoders for task in e.tasks(f, out, team))
    for s, encoder in zip(group, encoders, strict=True):
        with refusal_of_whole(f, encoder.chunks):
            counts = list(itertools.islice(written, encoder.chunks.count))
        if s.outcome.nnz is not None:
            yield s.outcome
        else:
            sums = sum(n for n, _ in counts), sum(z for _, z in counts)
            yield counted(s.outcome, encoder.chunks.target, None, sums)


def _put_whole(task: ShardTask, sized: list[SizedTensor], out: FileWriter) -> Iterator[TensorOutcome]:
    """Convert and write tensors one by one, each as a whole."""
    # Beside a result that is larger than its input there is no memory for the next tensor.
    roomy = [True, *((s.outcome.bytes_out or 0) <= s.plan.bytes_in for s in sized[:-1])]
    wanted = [
        (s.plan, task.device) if _needs_values(s) and room else None for s, room in zip(sized, roomy, strict=False)
    ]
    with ThreadPoolExecutor(1) as writer:
        # What was converted on a device is copied to the file while the next tensor is converted. At most one such copy
        # is under way, and an outcome does not wait for it: so this is a single future, not ``threads.in_order``.
        copying: Future[None] | None = None
        for i, values in enumerate(one_ahead(task.f, wanted)):
            outcome, write = _put(task, sized[i], out, values)
            del values
            sized[i] = replace(sized[i], matrix=None)
            if copying is not None:
                copying.result()
            copying = None if write is None else writer.submit(copy_context().run, write)
            yield outcome
        if copying is not None:
            copying.result()


def _needs_values(s: SizedTensor) -> bool:
    return s.outcome.target != KEEP and s.matrix is None


def _put(
    task: ShardTask, s: SizedTensor, out: FileWriter, values: Any
) -> tuple[TensorOutcome, Callable[[], None] | None]:
    """Convert one tensor and write it. ``values``: the tensor, if it was read ahead.

    Returns its outcome, with the counts that were not known before; and, for a tensor on a device, a call that copies
    it to the file.
    """
    if s.outcome.target == KEEP:
        if s.record.format is None:
            out.put_array(s.plan.name, "", task.f.raw(s.plan.name))
        else:
            out.put(s.plan.name, task.f.read(s.plan.name))
        return s.outcome, None
    matrix, outcome = s.matrix, s.outcome
    if matrix is None:
        fmt, given = parse_spec(s.outcome.target)
        try:
            x = read(task.f, s.plan, task.device) if values is None else values
            if (
                outcome.norm and outcome.nnz is not None and not needs_counts(s.plan.pruned_for)
            ):  # what it takes is known
                matrix = prune_into(dense_of(x), s.outcome.target, task.recipe)
            else:
                x, lost = task.pruned(x, s.plan, known=bool(outcome.norm))
                outcome = replace(outcome, **lost)
                matrix = convert(x, fmt, **given)
        except StructureError as e:
            raise e.at(path=task.f.path, tensor=s.plan.name) from None
        if outcome.nnz is None:
            outcome = counted(outcome, fmt, None, count_nonzeros(x))
        del x  # so that no more than one tensor and its converted form are in memory
    if matrix.device != "cpu":
        return outcome, partial(out.put, s.plan.name, matrix)
    out.put(s.plan.name, matrix)
    return outcome, None
