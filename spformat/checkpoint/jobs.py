"""Which tensor becomes what: one frozen Job per tensor, made from headers alone before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.dtypes import value_type
from ..errors import StructureError, UsageError
from ..formats import parse_spec, spec_text
from ..formats.base import Format
from ..formats.convert import convert
from ..limits import product
from ..preprocess import masks
from ..preprocess.structure import Structure, analyse
from ..storage.descriptor import Record
from .recipe import AUTO, KEEP, Recipe, require_match
from .source import Source


@dataclass(frozen=True)
class Job:
    """One tensor: from which shard, into which target, and why."""

    name: str
    shard: str
    record: Record
    bytes_in: int
    target: str
    """"keep", "auto" or a format text."""
    why: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.record.shape


@dataclass(frozen=True)
class Outcome:
    """What a Job comes to: the line of the plan's table, and of the manifest."""

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
    """Zeros that the input stored as items and the target does not."""
    larger_than_dense: bool = False
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types, empty ones left out; nothing nonzero and no bytes are known numbers, not empty."""
        tree = {
            k: v for k, v in self.__dict__.items() if v not in (None, "", 0, False) or (v == 0 and k in _KNOWN_ZEROS)
        }
        return tree | {"shape": list(self.shape)}


_KNOWN_ZEROS = ("nnz", "bytes_in", "bytes_out")


def plan_jobs(source: Source, recipe: Recipe) -> tuple[Job, ...]:
    """A Job for every tensor, in the order of the output. UsageError for a rule or pattern that matches nothing."""
    jobs = []
    for name, (shard, record, size) in source.records.items():
        target, why = recipe.target_of(name, record.shape, record.dtype)
        jobs.append(Job(name, shard, record, size, target, why))
    _require_matches(recipe, jobs)
    return tuple(jobs)


def _require_matches(recipe: Recipe, jobs: list[Job]) -> None:
    patterns = [("--rule", r.pattern) for r in recipe.rules]
    patterns += [("--include", p) for p in recipe.include] + [("--exclude", p) for p in recipe.exclude]
    for flag, pattern in patterns:
        require_match(flag, pattern, [j.name for j in jobs])


def prune(x: np.ndarray[Any, Any], target: str, recipe: Recipe) -> np.ndarray[Any, Any]:
    """``x`` with its smallest values zeroed so that ``target`` holds it; needs the recipe's say-so."""
    if not recipe.prune:
        return x
    if target in (AUTO, KEEP):
        mask: Any = None if recipe.sparsity is None else masks.magnitude(x, recipe.sparsity, nonfinite=recipe.nonfinite)
    else:
        fmt, given = parse_spec(target)
        pattern = fmt.pattern(fmt.resolve_params(given))
        if recipe.sparsity is None and masks.needs_sparsity(pattern):
            whole = "the share of values (or blocks) to zero"
            raise UsageError(f"--prune magnitude to {fmt.name} needs --sparsity, {whole}")
        mask = masks.of_pattern(x, pattern, recipe.sparsity or 0.0, nonfinite=recipe.nonfinite)
    return x if mask is None else np.asarray(masks.apply(x, mask))


def settle(job: Job, x: np.ndarray[Any, Any], structure: Structure | None = None) -> str:
    """The target text of a matrix read from a file, params written out; auto is decided here."""
    if job.target == AUTO:
        return (structure or analyse(x)).smallest()
    fmt, given = parse_spec(job.target)
    return spec_text(fmt, fmt.resolve_params(given))


def foresee(job: Job, x: Format | np.ndarray[Any, Any] | None, recipe: Recipe) -> Outcome:
    """The table line of one job, values looked at but nothing converted where counts suffice.

    ``x``: the dense matrix, pruned already, or a stored one (then not for auto); None for tensors that are kept.
    """
    base = Outcome(
        name=job.name, target=KEEP, why=job.why, shape=job.shape, dtype=job.record.dtype, bytes_in=job.bytes_in,
        bytes_out=job.bytes_in,
    )  # fmt: skip
    if job.target == KEEP or x is None:
        return base
    try:
        if isinstance(x, Format):  # converted as it is stored: decoded, a graph may not fit into memory
            base, dense = replace(base, nnz=x.nnz), product(*x.shape, x.dtype.itemsize)
            fmt, given = parse_spec(job.target)
            target, size = spec_text(fmt, fmt.resolve_params(given)), convert(x, fmt, **given).nbytes
        else:
            structure = analyse(x)
            base, dense = (
                replace(base, nnz=structure.nnz, negative_zeros=structure.negative_zeros),
                structure.dense_bytes,
            )
            target = settle(job, x, structure)
            size = _exact_size(structure, target, x)
    except StructureError as e:
        if recipe.misfit == "keep":
            return replace(base, why=f"kept: {e.message}")
        return replace(base, target=job.target, bytes_out=None, error=e.message)
    return replace(base, target=target, bytes_out=size, larger_than_dense=size > dense)


def _exact_size(s: Structure, target: str, x: np.ndarray[Any, Any]) -> int:
    fmt, given = parse_spec(target)
    fmt.accepts(value_type(s.dtype).numpy)
    known = s.nbytes(target) if fmt.fits(s, fmt.resolve_params(given)) else None
    if known is not None:
        return known
    return fmt.from_dense(x, **given).nbytes  # also raises the StructureError with its coordinates


def dense_of(x: Any) -> np.ndarray[Any, Any]:
    """A host matrix of what a file held: a Format decoded, an array as it is."""
    dense: np.ndarray[Any, Any] = x.to_dense() if isinstance(x, Format) else x
    return dense
