"""Which tensor becomes what: a frozen TensorPlan per tensor, from headers alone, before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.dtypes import value_type
from ..arrays.library import Array
from ..errors import StructureError, UsageError
from ..formats import parse_spec, spec_text
from ..formats.base import Format
from ..formats.convert import convert
from ..formats.dense import Dense
from ..formats.hooks import Pattern
from ..limits import product
from ..preprocess import masks
from ..preprocess.structure import Structure, analyse
from ..storage.descriptor import Record
from .fastest import is_fastest, resolved
from .recipe import AUTO, ERROR, KEEP, Recipe, needs_counts, require_match, writes_dense
from .source import Source


@dataclass(frozen=True)
class TensorPlan:
    """One tensor: from which shard, into which target, and why."""

    name: str
    shard: str
    record: Record
    bytes_in: int
    target: str
    """"keep", "auto", "fastest" or a format text."""
    why: str
    chosen_by: str = ""
    """The "auto" or "fastest" that has led to ``target``, for all matrices of a stack."""

    @property
    def pruned_for(self) -> str:
        """The target whose pattern ``prune`` takes: not that of a format which was chosen by what pruning leaves."""
        return self.chosen_by or self.target

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.record.shape


@dataclass(frozen=True)
class TensorOutcome:
    """What a TensorPlan leads to: one line of the table that the command prints, and of the manifest."""

    name: str
    target: str
    """Format text with its params, or "keep"."""
    why: str
    shape: tuple[int, ...]
    dtype: str
    bytes_in: int
    bytes_out: int | None
    nnz: int | None = None
    negative_zeros: int = 0
    dropped_zeros: int = 0
    """Zeros that the input stored explicitly and the target does not."""
    larger_than_dense: bool = False
    error: str = ""
    pruned: int = 0
    """Nonzero values that --prune set to zero."""
    lost_sum: float = 0.0
    """Sum of their magnitudes."""
    lost_norm: float = 0.0
    """Frobenius norm of these values."""
    norm: float = 0.0
    """Frobenius norm of the matrix before it was pruned; 0 if it was not."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types, without those that are empty. 0 nonzeros and 0 bytes are known values, not missing
        ones, and stay, as does an empty name."""
        tree = {
            k: v for k, v in self.__dict__.items() if v not in (None, "", 0, False) or (v == 0 and k in _KNOWN_ZEROS)
        }
        return {"name": self.name, **tree, "shape": list(self.shape)}


_KNOWN_ZEROS = ("nnz", "bytes_in", "bytes_out")


def plan_tensors(source: Source, recipe: Recipe) -> tuple[TensorPlan, ...]:
    """A TensorPlan for every tensor, in the order of the output. UsageError for a rule or pattern that matches
    nothing."""
    plans = []
    for name, (shard, record, size) in source.records.items():
        stacked = record.format is not None and len(record.shape) == 3
        target, why = recipe.target_of(name, record.shape, record.dtype, stacked)
        plans.append(TensorPlan(name, shard, record, size, target, why))
    _require_matches(recipe, plans)
    return tuple(plans)


def _require_matches(recipe: Recipe, plans: list[TensorPlan]) -> None:
    patterns = [("--rule", r.pattern) for r in recipe.rules]
    patterns += [("--include", p) for p in recipe.include] + [("--exclude", p) for p in recipe.exclude]
    for flag, pattern in patterns:
        require_match(flag, pattern, [plan.name for plan in plans])


def prune(x: np.ndarray[Any, Any], target: str, recipe: Recipe) -> np.ndarray[Any, Any]:
    """``x`` with its smallest values set to zero so that it fits ``target``; ``x`` unless the recipe asks to prune."""
    if not recipe.prune:
        return x
    if target == KEEP or needs_counts(target):
        mask: Any = None if recipe.sparsity is None else masks.magnitude(x, recipe.sparsity, nonfinite=recipe.nonfinite)
    else:
        fmt, given = parse_spec(target)
        pattern = fmt.pattern(fmt.resolve_params(given))
        _require_sparsity(target, pattern, recipe)
        mask = masks.of_pattern(x, pattern, recipe.sparsity or 0.0, nonfinite=recipe.nonfinite)
    return x if mask is None else masks.apply(x, mask)


def prune_into(x: Array, target: str, recipe: Recipe) -> Format:
    """``convert(prune(x, target, recipe), target)`` for a recipe that prunes; on a device in one step, where ``target``
    is a format."""
    fmt, given = parse_spec(target)
    if needs_counts(target):
        return convert(prune(x, target, recipe), fmt, **given)
    _require_sparsity(target, fmt.pattern(fmt.resolve_params(given)), recipe)
    return masks.prune(x, fmt, sparsity=recipe.sparsity, nonfinite=recipe.nonfinite, **given)


def _require_sparsity(target: str, pattern: Pattern, recipe: Recipe) -> None:
    if recipe.sparsity is None and masks.needs_sparsity(pattern):
        whole = "the share of values (or blocks) to zero"
        raise UsageError(f"--prune magnitude to {target} needs --sparsity, {whole}")


def loss(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What pruning took from a matrix: the fields ``pruned``, ``lost_sum``, ``lost_norm`` and ``norm`` of its
    TensorOutcome."""
    e = masks.error(before, after)
    return {"pruned": e.zeroed, "lost_sum": e.lost_sum, "lost_norm": e.lost_norm, "norm": e.norm}


def resolve_target(plan: TensorPlan, x: Format | np.ndarray[Any, Any], structure: Structure | None = None) -> str:
    """The target text of a matrix read from a file, with all its params. "auto" becomes the smallest format, "fastest"
    the one that is recommended; ``x`` may be sparse unless the target is "auto"."""
    if is_fastest(plan.target):
        return resolved(plan.target, structure or x)
    if plan.target == AUTO:
        return (structure or analyse(x)).smallest()
    fmt, given = parse_spec(plan.target)
    return spec_text(fmt, fmt.resolve_params(given))


def kept(plan: TensorPlan) -> TensorOutcome:
    """The outcome of a tensor that stays as it is."""
    return TensorOutcome(
        name=plan.name, target=KEEP, why=plan.why, shape=plan.shape, dtype=plan.record.dtype, bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_in,
    )  # fmt: skip


def counted(
    outcome: TensorOutcome, fmt: type[Format], x: Format | Array | None, counts: tuple[int, int] = (0, 0)
) -> TensorOutcome:
    """``outcome`` with the nonzeros of a matrix that becomes ``fmt``, and the zeros whose bits it does not keep.

    x: the matrix in a sparse format. Of a dense one only ``counts`` matter: its nonzeros, and its elements that are
    -0.0.
    """
    if isinstance(x, Format) and not isinstance(x, Dense):
        zeros = x.stored_zeros
        dropped = 0 if fmt.keeps_stored_zeros else zeros
        return replace(outcome, nnz=x.count_nonzeros() + zeros - dropped if zeros else x.nnz, dropped_zeros=dropped)
    nnz, negative = counts
    return replace(outcome, nnz=nnz, negative_zeros=0 if fmt.keeps_negative_zeros else negative)


def foresee(plan: TensorPlan, x: Format | np.ndarray[Any, Any] | None, recipe: Recipe) -> TensorOutcome:
    """The outcome that a conversion of one tensor would have. It is converted only where counts do not suffice.

    x: the dense matrix, already pruned, or a matrix in a sparse format; None for a tensor that is kept.
    """
    base = kept(plan)
    if plan.target == KEEP or x is None:
        return base
    try:
        if isinstance(x, Format):  # converted without decoding it: a dense graph might not fit into memory
            base, dense, counts = replace(base, nnz=x.nnz), product(*x.shape, x.dtype.itemsize), (0, 0)
            target = resolve_target(plan, dense_of(x) if plan.target == AUTO else x)
            fmt, given = parse_spec(target)
            size = convert(x, fmt, **given).nbytes
        else:
            structure = analyse(x)
            base, dense = replace(base, nnz=structure.nnz), structure.dense_bytes
            target, counts = resolve_target(plan, x, structure), (structure.nnz, structure.negative_zeros)
            size = _exact_size(structure, target, x)
    except StructureError as e:
        if recipe.misfit == KEEP:
            return replace(base, why=f"kept: {e.message}")
        if recipe.misfit == ERROR:
            return replace(base, target=plan.target, bytes_out=None, error=e.message)
        other = misfit_plan(plan, e, recipe)
        return foresee(other, x, recipe.without_misfit())
    outcome = replace(base, target=target, bytes_out=size, larger_than_dense=size > dense)
    outcome = counted(outcome, parse_spec(target)[0], x, counts)
    return replace(outcome, dropped_zeros=0) if writes_dense(recipe) else outcome  # a dense checkpoint has every zero


def misfit_plan(plan: TensorPlan, e: StructureError, recipe: Recipe) -> TensorPlan:
    """The plan of a tensor that its target cannot hold, for the reason ``e``: it goes to the target for misfits."""
    return replace(plan, target=recipe.misfit, why=f"not {plan.target}: {e.message}")


def _exact_size(s: Structure, target: str, x: np.ndarray[Any, Any]) -> int:
    fmt, given = parse_spec(target)
    fmt.accepts(value_type(s.dtype).numpy)
    known = s.nbytes(target) if fmt.fits(s, fmt.resolve_params(given)) else None
    if known is not None:
        return known
    return fmt.from_dense(x, **given).nbytes  # raises the StructureError with its coordinates if x does not fit


def dense_of(x: Any) -> np.ndarray[Any, Any]:
    """What was read from a file as a dense host matrix: a Format is decoded, an array is returned as it is."""
    dense: np.ndarray[Any, Any] = x.to_dense() if isinstance(x, Format) else x
    return dense
