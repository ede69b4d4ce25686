"""What the hooks of a format exchange with the layers above: patterns to prune to, and counts of a matrix.

A format says of itself which pattern its matrices have (``Format.pattern``), whether counts prove that it holds a
matrix (``fits``), how many bytes it would take (``bytes_of``) and with which parameters it is worth a look
(``candidates``). The layers above prune, count and choose, and know no format by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from ..arrays.dtypes import value_type
from ..limits import product
from .declare import REQUIRED, Declared

VECTOR_ROWS, VECTOR_STRIDE = 8, 16
"""The one height and group of vectors that are counted."""


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
    """Whole blocks of R x C stay or go."""

    blocksize: tuple[int, int]


Pattern: TypeAlias = Groups | Vectors | Blocks | None
"""None: values stay or go one by one."""


class Counts(Protocol):
    """Exact counts of one matrix, as ``preprocess.structure.analyse`` finds them. What is not counted is not there."""

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
    """What other layers ask a format, with answers that fit one without a pattern. ``Format`` derives from it."""

    __slots__ = ()

    tie_rank: ClassVar[int] = 9
    """Of the formats that take the fewest bytes, the one with the lowest number is called the smallest."""
    torch_layout: ClassVar[str] = "sparse_csr"
    """The layout of torch that this format is measured against: "strided", "sparse_csr", "sparse_bsr",
    "semi_structured", or "" for none."""

    @classmethod
    def pattern(cls, params: dict[str, Any]) -> Pattern:
        """What values are dropped together when a matrix is pruned to fit; None: each for itself."""
        return None

    @classmethod
    def fits(cls, counts: Counts, params: dict[str, Any]) -> bool:
        """Whether ``counts`` prove that the format holds the matrix; False = only a conversion can tell."""
        return True

    @classmethod
    def bytes_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        """Exact bytes of all arrays of the matrix, or None when ``counts`` do not decide them (then convert)."""
        if len(params) != len(cls.declared_params()):
            return None
        specs = cls.array_specs(counts.shape, value_type(counts.dtype).numpy, counts.nnz, params)
        return None if specs is None else sum(product(dtype.itemsize, *shape) for dtype, shape in specs.values())

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        """Parameters worth a look for a matrix with these counts that the format is proved to hold."""
        return () if any(d.default is REQUIRED for d in cls.declared_params()) else ({},)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        """Parameters that tests and docs try the format with, small and odd ones among them."""
        return ({},)
