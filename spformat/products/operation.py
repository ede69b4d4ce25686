"""The definition of an operation: how arguments become a problem, its reference in numpy, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .problem import Problem


class Items(NamedTuple):
    """The stored values of a sparse matrix one by one, as a reference reads them; -0.0 and zeros are left out."""

    shape: tuple[int, int]
    rows: Any
    """int64[items], ascending."""
    cols: Any
    """int64[items], ascending inside a row."""
    values: Any
    """float64[items], or int64 where the result is of integers."""


@dataclass(frozen=True)
class Operation:
    """One operation: one file in ``operations`` and one line in ``OPERATIONS``."""

    name: str
    problem: Callable[..., Problem]
    """(matrix, *dense arrays, out=None, epilogue=False) -> Problem; ValueError, TypeError or UsageError for arguments
    that do not fit. The matrix is a Format, the arrays are of numpy or CuPy, ``out`` is an array or None."""
    reference: Callable[..., Any]
    """(Items, *dense arrays) -> the result in float64 (int64 for integers): the definition in numpy."""
    gradients: Mapping[str, str] = field(default_factory=dict)
    """Argument -> the operation that computes its gradient."""
