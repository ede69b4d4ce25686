"""Tensors [E, M, K], such as the weights of a mixture of experts: each of the E matrices is converted as a tensor of
its own, named ``w.0``, ``w.1``, .., and all of them together are written as one ``Stack``.

All matrices of a stack get the same format and params. "auto" is the format with the fewest bytes for the whole stack,
and where one matrix does not fit its target, the target for misfits holds for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.dtypes import SAFETENSORS, VALUE_TYPES, value_type
from ..arrays.library import Array, to_device
from ..errors import UsageError
from ..formats.stack import Stack
from ..limits import product
from ..preprocess.coordinates import structure_of
from ..preprocess.structure import analyse, stacked
from ..storage.descriptor import Record
from ..storage.filewriter import Tensor
from ..storage.tensorfile import TensorFile, undescribed
from .fastest import is_fastest, no_kernel, resolved_for_all
from .recipe import ERROR, KEEP, Recipe, looks_stacked, needs_counts
from .tensor_plans import TensorOutcome, TensorPlan, dense_of, misfit_plan, prune


def is_stack(plan: TensorPlan) -> bool:
    """Whether the tensor is converted matrix by matrix."""
    return len(plan.shape) == 3 and plan.target != KEEP


def records_of(r: Record) -> tuple[Record, ...]:
    """The records of the matrices of a stack; of any other tensor, its own."""
    if len(r.shape) != 3:
        return (r,)
    if r.parts:
        return tuple(r.parts.values())
    ((code, (E, *matrix)),) = r.arrays.values()
    shape = tuple(matrix)
    return tuple(Record(f"{r.name}.{e}", None, shape, r.dtype, {"": (code, shape)}) for e in range(E))


def holds_matrices(r: Record) -> bool:
    """Whether a tensor is a matrix, or a stack of them, of a value type."""
    stack = len(r.shape) == 3 and (r.format is not None or looks_stacked(r.shape))
    return (len(r.shape) == 2 or stack) and r.dtype in VALUE_TYPES


def matrices_of(plan: TensorPlan) -> tuple[TensorPlan, ...]:
    """A plan for each matrix of a stack."""
    return tuple(replace(plan, name=r.name, record=r, bytes_in=nbytes_of(r)) for r in records_of(plan.record))


def nbytes_of(r: Record) -> int:
    """Bytes of the arrays of a matrix, those of its parts included."""
    return sum(product(*shape, SAFETENSORS[code].itemsize) for code, shape in r.arrays.values())


def expanded(plans: Sequence[TensorPlan]) -> tuple[TensorPlan, ...]:
    """The plans, with those of its matrices in place of each stack.

    UsageError if a tensor of the shard has the name that a matrix gets.
    """
    names = {plan.name for plan in plans}
    out: list[TensorPlan] = []
    for plan in plans:
        members = matrices_of(plan) if is_stack(plan) else (plan,)
        taken = next((m.name for m in members if m.name in names and m is not plan), None)
        if taken is not None:
            raise UsageError(f"its matrices would be called {taken} and so on, which is the name of another tensor; "
                             "--exclude one of them", tensor=plan.name)  # fmt: skip
        out += members
    return tuple(out)


class StackedFile:
    """An open shard in which the matrices of stacks can be read like tensors, ``f.read("w.3")``.

    The parts of a stored ``Stack`` are read as they are; a plain tensor [E, M, K] is read slice by slice. If the file
    has a checksum of such a tensor, the whole of it is checked before its first slice is given out.
    """

    def __init__(self, f: TensorFile, records: Iterable[Record]) -> None:
        self._f = f
        plain = [r for r in records if len(r.shape) == 3 and not r.parts]
        self._places = {m.name: (r, e) for r in plain for e, m in enumerate(records_of(r))}
        self._checked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._f, name)

    def _place(self, name: str) -> tuple[Record, int] | None:
        """The tensor of a matrix, and the place of the matrix in it; None for a name that is no matrix of a tensor."""
        place = self._places.get(name)
        if place is not None and place[0].name not in self._checked:
            r = place[0]
            if any(c is not None for c in r.crc32.values()):
                for _ in self._f.raw(r.name):
                    pass
            self._checked.add(r.name)
        return place

    def array(self, name: str, rows: slice | None = None, device: str = "cpu", array: str = "") -> Array:
        """As the method of ``TensorFile``."""
        place = self._place(name)
        if place is None:
            return self._f.array(name, rows, device, array)
        r, e = place
        x = self._f.array(r.name, slice(e, e + 1))[0]
        return to_device(x if rows is None else x[rows], device)

    def read(self, name: str, device: str = "cpu") -> Tensor:
        """As the method of ``TensorFile``."""
        return undescribed(self.array(name), device) if name in self._places else self._f.read(name, device)

    def read_rows(self, name: str, begin: int, out: np.ndarray[Any, Any], array: str = "") -> None:
        """As ``TensorFile.read_rows``."""
        place = self._place(name)
        if place is None:
            self._f.read_rows(name, begin, out, array)
        else:
            r, e = place
            self._f.read_rows(r.name, e * r.shape[1] + begin, out)


def matrices_in(f: TensorFile, record: Record) -> Any:
    """The file from which the matrices of a tensor are read, by the names of ``records_of``."""
    return StackedFile(f, [record]) if len(record.shape) == 3 else f


def resolved(f: Any, plan: TensorPlan, recipe: Recipe) -> TensorPlan:
    """The plan of a stack with the format that "auto" or "fastest" is for it: of those that hold all of its matrices,
    the smallest, or the one with the least sum of expected times.

    Where no kernel multiplies any of them, a stack for "fastest" is kept or goes to the target for misfits, as the
    recipe says; if that ends the run, StructureError.

    f: the shard, as a ``StackedFile``.
    """
    if is_fastest(plan.target):
        matrices = (f.read(m.name) for m in matrices_of(plan))
        kept = (prune(dense_of(x), plan.target, recipe) if recipe.prune else x for x in matrices)
        target = resolved_for_all(plan.target, map(structure_of, kept))
        if target is not None:
            return replace(plan, target=target, chosen_by=plan.target)
        e = no_kernel(plan.target, plan.record.dtype)
        if recipe.misfit == ERROR:
            raise e.at(path=f.path, tensor=plan.name)
        if recipe.misfit == KEEP:
            return replace(plan, target=KEEP, why=f"kept: {e.message}")
        other = misfit_plan(plan, e, recipe)
        return resolved(f, other, recipe.without_misfit()) if needs_counts(other.target) else other
    structures = (analyse(prune(dense_of(f.read(m.name)), plan.target, recipe)) for m in matrices_of(plan))
    return replace(plan, target=stacked(structures).smallest(), chosen_by=plan.target)


# ------------------------------------------------------------------ together again


def stacked_record(plan: TensorPlan, matrices: Sequence[Record]) -> Record:
    """The description of a stack in the output."""
    arrays = {f"{e}.{path}": spec for e, r in enumerate(matrices) for path, spec in r.arrays.items()}
    parts = {str(e): r for e, r in enumerate(matrices)}
    return Record(plan.name, Stack, plan.shape, plan.record.dtype, arrays, parts=parts)


def stacked_outcome(plan: TensorPlan, matrices: Sequence[TensorOutcome]) -> TensorOutcome:
    """The outcome of a stack: sums over its matrices, and the first error."""
    first = next((m for m in matrices if m.error), matrices[0])
    sizes, counts = [m.bytes_out for m in matrices], [m.nnz for m in matrices]
    dense = product(*plan.shape, value_type(plan.record.dtype).numpy.itemsize)
    return replace(
        first,
        name=plan.name, shape=plan.shape, bytes_in=plan.bytes_in,
        error=f"matrix {matrices.index(first)}: {first.error}" if first.error else "",
        bytes_out=None if None in sizes else sum(n or 0 for n in sizes),
        nnz=None if None in counts else sum(n or 0 for n in counts),
        larger_than_dense=sum(n or 0 for n in sizes) > dense,
        negative_zeros=sum(m.negative_zeros for m in matrices),
        dropped_zeros=sum(m.dropped_zeros for m in matrices),
        pruned=sum(m.pruned for m in matrices),
        lost_sum=math.fsum(m.lost_sum for m in matrices),
        lost_norm=math.hypot(*(m.lost_norm for m in matrices)),
        norm=math.hypot(*(m.norm for m in matrices)),
    )  # fmt: skip


def stacked_outcomes(plans: Iterable[TensorPlan], outcomes: Iterable[TensorOutcome]) -> Iterator[TensorOutcome]:
    """The outcomes of tensors, from those of the matrices of stacks and of all other tensors, in any order.

    One is yielded when all of it is there.
    """
    stacks = {m.name: plan for plan in plans if is_stack(plan) for m in matrices_of(plan)}
    waiting: dict[str, dict[str, TensorOutcome]] = {}
    for outcome in outcomes:
        plan = stacks.get(outcome.name)
        if plan is None:
            yield outcome
            continue
        there = waiting.setdefault(plan.name, {})
        there[outcome.name] = outcome
        if len(there) == plan.shape[0]:
            yield stacked_outcome(plan, [there[m.name] for m in matrices_of(plan)])
            del waiting[plan.name]
