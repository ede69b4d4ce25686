"""The hooks of a format, and what they exchange with the layers above: sparsity patterns, and counts of a matrix.

Each format states which pattern its matrices have (``Format.pattern``), whether the counts of a matrix prove that it
fits (``fits``), how many bytes it would need (``bytes_of``) and which parameters are worth considering
(``candidates``). So the layers above prune, count and choose without knowing any format by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from ..arrays.dtypes import value_type
from ..limits import product
from .declare import REQUIRED, Declared

VECTOR_ROWS, VECTOR_STRIDE = 8, 16
"""Vectors are counted for this height and this group size only."""


@dataclass(frozen=True)
class Groups:
    """At most n values in every m consecutive columns of a row."""

    n: int
    m: int


@dataclass(frozen=True)
class Vectors:
    """At most n nonempty columns in every m consecutive ones, the same for ``length`` rows."""

    n: int
    m: int
    length: int


@dataclass(frozen=True)
class Blocks:
    """Blocks of R x C values are kept or pruned as a whole."""

    blocksize: tuple[int, int]


Pattern: TypeAlias = Groups | Vectors | Blocks | None
"""None: each value is kept or pruned by itself."""


class Counts(Protocol):
    """Exact counts of one matrix, as ``preprocess.structure.analyse`` returns them. Keys that were not counted are
    missing."""

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the value type."""
        ...

    @property
    def nnz(self) -> int:
        """Values that are not zero."""
        ...

    @property
    def row_lengths(self) -> np.ndarray[Any, Any]:
        """int64[M]: nonzeros in each row."""
        ...

    @property
    def bad_groups(self) -> int:
        """Groups of four columns with more than two nonzeros."""
        ...

    @property
    def window_max(self) -> dict[tuple[int, int], int]:
        """(m, vector length) -> most nonempty vectors in a window of m columns."""
        ...

    @property
    def blocks(self) -> dict[int, tuple[int, int]]:
        """b -> (nonempty b x b blocks, nonempty block rows)."""
        ...

    @property
    def vector_groups(self) -> int:
        """Groups of VECTOR_STRIDE nonempty VECTOR_ROWS x 1 vectors, padded per tile of VECTOR_ROWS rows."""
        ...


class Hooks(Declared):
    """Questions of other layers to a format, with default answers for a format without a pattern. ``Format`` derives
    from this class."""

    __slots__ = ()

    tie_rank: ClassVar[int] = 9
    """If several formats need the same least number of bytes, the one with the lowest rank counts as the smallest."""
    torch_layout: ClassVar[str] = "sparse_csr"
    """The torch layout with which this format is compared in benchmarks: "strided", "sparse_csr", "sparse_bsr",
    "semi_structured", or "" for none."""

    @classmethod
    def pattern(cls, params: dict[str, Any]) -> Pattern:
        """Which values are dropped together when a matrix is pruned to fit; None: each value by itself."""
        return None

    @classmethod
    def fits(cls, counts: Counts, params: dict[str, Any]) -> bool:
        """Whether ``counts`` prove that the matrix fits the format. If False, only a conversion can tell."""
        return True

    @classmethod
    def bytes_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        """The exact bytes of all arrays of the matrix; None if ``counts`` do not decide them, then convert it."""
        if len(params) != len(cls.declared_params()):
            return None
        specs = cls.array_specs(counts.shape, value_type(counts.dtype).numpy, counts.nnz, params)
        return None if specs is None else sum(product(dtype.itemsize, *shape) for dtype, shape in specs.values())

    @classmethod
    def edge_name(cls, dtype: Any) -> str:
        """The name under which the edges of this format are registered, for values of this dtype."""
        return cls.name

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        """Parameters that are worth considering for a matrix with these counts."""
        return () if any(d.default is REQUIRED for d in cls.declared_params()) else ({},)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        """Parameters with which tests and docs try the format, among them small and odd ones."""
        return ({},)
