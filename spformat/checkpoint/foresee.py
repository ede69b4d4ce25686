"""What a conversion would do, without writing anything: an outcome for every tensor."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ..arrays.dtypes import value_type
from ..errors import LimitError, StructureError, UsageError
from ..limits import product
from ..storage.files import Path
from ..storage.tensorfile import TensorFile
from .conversion import Conversion
from .entry_names import check_entries
from .layouts import NEUTRAL, check_layout
from .parts import Part
from .recipe import ERROR, KEEP, Recipe, needs_counts, writes_dense
from .shard_input import Progress, read
from .source import open_source
from .stacks import StackedFile, expanded, is_stack, matrices_of, resolved, stacked_outcome
from .tensor_plans import TensorOutcome, TensorPlan, dense_of, foresee, kept, loss, plan_tensors, prune


def foresee_checkpoint(
    src: Path, recipe: Recipe, progress: Progress | None = None, *, layout: str = NEUTRAL, part: Part | None = None
) -> tuple[TensorOutcome, ...]:
    """The outcomes that ``convert_checkpoint`` would have. Every tensor is read once, and nothing is written.

    UsageError where a file of the output would hold two arrays of one name, LimitError where it would hold more arrays,
    or longer names, than the limits allow; UsageError or InputError where the layout cannot be written. part: only its
    tensors.
    """
    check_layout(layout, writes_dense(recipe))
    source = open_source(src)
    out: list[TensorOutcome] = []
    plans = plan_tensors(source, recipe)
    c = Conversion(source, plans, recipe, "", layout=layout)
    c.check_config()
    if part is not None:
        plans = tuple(plan for file_plan in c.parts(part.of)[part.number - 1] for plan in file_plan.plans)
    by_shard: dict[str, list[TensorPlan]] = {}
    for plan in () if writes_dense(recipe) else plans:  # names of a dense checkpoint are those of the source
        by_shard.setdefault(os.path.join(source.folder, plan.shard), []).append(plan)
    for path, of_shard in by_shard.items():
        try:
            expanded(of_shard)
        except UsageError as e:
            raise e.at(path=path) from None
    for plan, (_, f) in zip(plans, source.opened(plan.name for plan in plans), strict=True):
        if plan.target == KEEP and plan.record.format is not None and writes_dense(recipe):
            out.append(_decoded(plan))
        else:
            out.append(_foresee_stack(f, plan, recipe) if is_stack(plan) else _foresee_tensor(f, plan, recipe))
        if progress:
            progress(out[-1])
    outcomes = {o.name: o for o in out}
    for path, of_shard in by_shard.items():
        check_entries(path, [(plan, outcomes[plan.name]) for plan in of_shard])
    return tuple(out)


def _decoded(plan: TensorPlan) -> TensorOutcome:
    """The outcome of a sparse tensor that the recipe keeps, in a dense checkpoint: nothing is sparse there."""
    size = product(*plan.shape, value_type(plan.record.dtype).numpy.itemsize)
    return replace(kept(plan), target="dense", bytes_out=size)


def _foresee_tensor(f: TensorFile, plan: TensorPlan, recipe: Recipe) -> TensorOutcome:
    x, lost = None, {}
    if plan.target != KEEP:
        x = read(f, plan)
        try:
            if recipe.prune:
                whole = dense_of(x)
                x = prune(whole, plan.pruned_for, recipe)
                lost = loss(whole, x)
        except (LimitError, StructureError) as e:
            raise e.at(path=f.path, tensor=plan.name) from None
    try:
        outcome = foresee(plan, x, recipe)
    except LimitError as e:
        raise e.at(path=f.path, tensor=plan.name) from None
    return outcome if outcome.target == KEEP else replace(outcome, **lost)


def _foresee_stack(f: TensorFile, plan: TensorPlan, recipe: Recipe) -> TensorOutcome:
    """The outcome of a stack. If one of its matrices goes to the target for misfits, all of them do."""
    matrices: Any = StackedFile(f, [plan.record])
    if needs_counts(plan.target):
        try:
            plan = resolved(matrices, plan, recipe)
        except StructureError as refusal:
            return replace(kept(plan), target=plan.target, bytes_out=None, error=refusal.message)
        if plan.target == KEEP:
            return kept(plan)
    outcomes = []
    for e, m in enumerate(matrices_of(plan)):
        outcomes.append(_foresee_tensor(matrices, m, recipe if recipe.misfit == KEEP else recipe.without_misfit()))
        if outcomes[-1].error and recipe.misfit not in (ERROR, KEEP):
            other = replace(plan, target=recipe.misfit, why=f"not {plan.target}: {outcomes[-1].error}")
            return _foresee_stack(f, other, recipe.without_misfit())
        if outcomes[-1].target == KEEP:
            return replace(kept(plan), why=f"{outcomes[-1].why} (matrix {e})")
    return stacked_outcome(plan, outcomes)
