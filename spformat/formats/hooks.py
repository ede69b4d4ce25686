"""The hooks of a format, and what they exchange with the layers above: sparsity patterns, and counts of a matrix.

Each format states which pattern its matrices have (``Format.pattern``), whether the counts of a matrix prove that it
fits (``fits``), how many bytes it would need (``bytes_of``), which parameters are worth considering (``candidates``)
and which values of a matrix it takes as a part of a sum (``covered``). So the layers above prune, count, choose and
divide without knowing any format by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np

from ..arrays.dtypes import value_type
from ..arrays.library import Array, namespace
from ..arrays.segments import cells_of
from ..errors import UsageError
from ..limits import product
from .declare import (
    MAX_DIMENSION,
    REQUIRED,
    VALUE,
    Declared,
    plain_int,
)

if TYPE_CHECKING:
    from .csr import CSR

VECTOR_HEIGHTS, VECTOR_ROWS, VECTOR_STRIDE = (8, 16), 8, 16
"""Vectors are counted for these heights, of which the first is the usual one, and this group size only."""


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


@dataclass(frozen=True)
class Measure:
    """A number that every value of a matrix has, such as the length of its row. Conditions compare it with a bound."""

    name: str
    share: bool
    """Whether it is a share in 0 .. 1; otherwise a number of values."""
    doc: str

    def bound(self, text: str) -> float:
        """The bound of a condition from its text; UsageError unless it is a share in 0 .. 1, or an int >= 0."""
        try:
            number = float(text) if self.share else plain_int(text)
            if 0 <= number <= (1 if self.share else MAX_DIMENSION):  # false for NaN
                return abs(number)  # -0.0 is written as 0
        except ValueError:
            pass
        wanted = "a share in 0 .. 1" if self.share else "an int >= 0"
        raise UsageError(f"{self.name}: expected {wanted}, got {text!r:.80}", value=text)


ROW_LENGTH = Measure("row_length", False, "values in the row")
COLUMN_DEGREE = Measure("column_degree", False, "values in the column")
LINES = (ROW_LENGTH, COLUMN_DEGREE)
"""The measures that all formats have."""


@dataclass(frozen=True)
class Condition:
    """``measure >= bound`` or ``measure <= bound``: a value that does not meet it is not taken."""

    measure: str
    operator: str
    bound: float

    @property
    def key(self) -> tuple[str, str]:
        """What may be said once in a rule."""
        return self.measure, self.operator

    def holds(self, numbers: Array) -> Array:
        """bool: which of the numbers meet the condition."""
        met: Array = numbers >= self.bound if self.operator == ">=" else numbers <= self.bound
        return met

    def __str__(self) -> str:
        return f"{self.measure}{self.operator}{repr(self.bound).removesuffix('.0')}"


def dense_cells(a: CSR, cell: tuple[int, int], conditions: Iterable[Condition]) -> Array:
    """bool[nnz]: whether the R x C cell of each value meets all conditions on its density.

    The density of a cell is the share of its R*C places that hold a value. A cell at the edge of the matrix has R*C
    places, too, as it is stored.
    """
    counts, of_value = cells_of(a.rows(), a.indices, a.shape, cell)
    density = counts / (cell[0] * cell[1])
    met = namespace(a.data).ones(density.size, bool)
    for condition in conditions:
        met &= condition.holds(density)
    return met[of_value]


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
    def vector_counts(self) -> dict[int, tuple[int, int]]:
        """h -> (nonempty h x 1 vectors, groups of VECTOR_STRIDE of them, padded per tile of h rows)."""
        ...

    @property
    def density(self) -> float:
        """nnz / (M*K)."""
        ...

    @property
    def mean_row(self) -> float:
        """Nonzeros of a row on average."""
        ...

    @property
    def longest_row(self) -> int:
        """Nonzeros of the longest row."""
        ...

    @property
    def two_four_share(self) -> float:
        """Share of the groups of four columns with at most two nonzeros."""
        ...

    def gather_reuse(self, height: int) -> float:
        """Nonzeros for each nonempty vector of so many rows."""
        ...

    def block_fill(self, b: int) -> float:
        """Share of the elements of the nonempty b x b blocks that are nonzero."""
        ...


def percent(share: float) -> str:
    """A share as text: "12.5 %"."""
    return f"{100 * share:.1f} %"


class Hooks(Declared):
    """Questions of other layers to a format, with default answers for a format without a pattern. ``Format`` derives
    from this class."""

    __slots__ = ()

    tie_rank: ClassVar[int] = 9
    """If several formats need the same least number of bytes, the one with the lowest rank counts as the smallest."""
    torch_layout: ClassVar[str] = "sparse_csr"
    """The torch layout with which this format is compared in benchmarks: "strided", "sparse_csr", "sparse_bsr",
    "semi_structured", or "" for none."""

    def row_length(self) -> int:
        """Stored items of the row, or row of blocks, in which an average item of a matrix on a device lies.

        0: not known. Where half of the rows are empty it is twice the average over rows. For kernels whose time
        depends on it; read once for a matrix, when a product is planned.
        """
        return 0

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
        if not cls.has_all_params(params):
            return None
        specs = cls.array_specs(counts.shape, value_type(counts.dtype).numpy, counts.nnz, params)
        return None if specs is None else sum(product(dtype.itemsize, *shape) for dtype, shape in specs.values())

    @classmethod
    def edge_name(cls, dtype: Any) -> str:
        """The name under which the edges of this format are registered, for values of this dtype."""
        return cls.name

    measures: ClassVar[tuple[Measure, ...]] = ()
    """What conditions of this format may compare as a part of a sum, beside the length of rows and columns."""
    selective: ClassVar[bool] = False
    """Whether ``covered`` leaves out some values without any condition: 2:4 takes two of every four."""

    @classmethod
    def usual_conditions(cls, params: dict[str, Any]) -> tuple[Condition, ...]:
        """Conditions that hold for a part of a sum unless others on the same measure are given. ``params``: resolved;
        AUTO params may be missing."""
        return ()

    @classmethod
    def covered(cls, a: CSR, params: dict[str, Any], conditions: tuple[Condition, ...]) -> Array:
        """bool[nnz]: the values of ``a`` that this format takes as a part of a sum.

        a: an ordered CSR without stored zeros, on any device. params: all of them. conditions: those on ``measures``;
        rows and columns have been chosen before. It must cost O(nnz).
        """
        return namespace(a.data).ones(a.nnz, bool)

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        """Parameters that are worth considering for a matrix with these counts."""
        return () if any(d.default is REQUIRED for d in cls.declared_params()) else ({},)

    @classmethod
    def alternatives(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        """Parameters beyond ``candidates`` that are worth considering where the time of products counts, not bytes."""
        return ()

    @classmethod
    def params_of(cls, counts: Counts, given: dict[str, Any]) -> dict[str, Any] | None:
        """All parameters of the matrix, those that it decides itself included; None if its counts do not tell them."""
        params = cls.resolve_params(given)
        return params if cls.has_all_params(params) else None

    @classmethod
    def stored_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        """``Format.stored`` of the matrix, padding included; None if ``counts`` do not decide it."""
        specs = cls.array_specs(counts.shape, value_type(counts.dtype).numpy, counts.nnz, params)
        if specs is None:
            return None
        return sum(product(*specs[d.name][1]) for d in cls.declared_arrays() if d.kind == VALUE)

    @classmethod
    def remark(cls, counts: Counts, params: dict[str, Any]) -> str:
        """What the counts of a matrix say for or against this format, in a clause that names the number; or nothing.

        For a format without candidates for the matrix it is asked with no params, and says why there are none.
        """
        return ""

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        """Parameters with which tests and docs try the format, among them small and odd ones."""
        return ({},)
