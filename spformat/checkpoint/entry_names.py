"""The names that the arrays of tensors get in an output file, known before anything is converted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .. import limits
from ..arrays.dtypes import value_type
from ..errors import LimitError, UsageError
from ..formats import parse_spec
from ..formats.base import Format
from ..formats.sum import Sum
from ..storage.stheader import check_length
from ..storage.stwriter import require_distinct
from .recipe import KEEP
from .stacks import is_stack, matrices_of
from .tensor_plans import TensorOutcome, TensorPlan


def check_entries(path: str, tensors: Iterable[tuple[TensorPlan, TensorOutcome]]) -> None:
    """UsageError, as when they are written, if two arrays of the tensors of one file would have one name; LimitError if
    a name would be too long, or if there would be too many arrays.

    path: the shard, for the message.
    """
    names = [name for plan, outcome in tensors if not outcome.error for name in entries_of(plan, outcome)]
    try:
        require_distinct(names)
        limits.check("tensors", len(names), "number of tensors")
        for name in names:
            check_length(name)
    except (LimitError, UsageError) as e:
        raise e.at(path=path) from None


def entries_of(plan: TensorPlan, outcome: TensorOutcome) -> Iterator[str]:
    """The names of the arrays of a tensor in the file that it goes into."""
    if outcome.target == KEEP:
        yield from (plan.record.entry(array) for array in plan.record.arrays)
        return
    for matrix in matrices_of(plan) if is_stack(plan) else (plan,):
        yield from (matrix.record.entry(array) for array in _arrays(*parse_spec(outcome.target), matrix))


def _arrays(fmt: type[Format], given: dict[str, Any], plan: TensorPlan) -> Iterable[str]:
    """The arrays of a matrix in a format."""
    if issubclass(fmt, Sum):
        parts = enumerate(fmt.cover_rules(given["rules"]))
        return [f"{i}.{array}" for i, part in parts for array in _arrays(part.format, part.params, plan)]
    shape = (plan.shape[0], plan.shape[1])
    specs = fmt.array_specs(shape, value_type(plan.record.dtype).numpy, 0, fmt.resolve_params(given))
    return specs or [d.name for d in fmt.declared_arrays()]
