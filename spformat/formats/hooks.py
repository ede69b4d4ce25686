"""What the hooks of a format exchange with the layers above: patterns to prune to, and counts of a matrix.

A format says of itself which pattern its matrices have (``Format.pattern``), whether counts prove that it holds a
matrix (``fits``), how many bytes it would take (``bytes_of``) and with which parameters it is worth a look
(``candidates``). The layers above prune, count and choose, and know no format by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

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
