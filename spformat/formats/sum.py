"""A sum of matrices, each in the format that suits it: A = A1 + A2 + ...  Spec: docs/formats/sum.md.

Sum(parts=(bsr, csr))      blocks where A is dense, single values where it is not

A (4x4)       part "0", bsr 2x2     part "1", csr
1 2 . .       1 2 | . .             . . . .
3 4 . 7   =   3 4 | . .        +    . . . 7
. . . .       ----+----             . . . .
9 . . .       . . | . .             9 . . .
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np

from ..arrays.dtypes import bits
from ..arrays.library import Array, namespace
from ..errors import OrderError, UsageError
from .base import Format
from .composed import Composed
from .csr import CSR
from .declare import part
from .hooks import Counts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Sum(Composed):
    """Two or more matrices of one shape, dtype and device. No element is nonzero in two of them.

    So every nonzero of A lies in exactly one part, with its bits, and is read without adding. Zeros that a part stores
    (padding of blocks, stored items) do not count. The shape is that of the parts and need not be given.
    """

    name, version, torch_layout = "sum", 1, ""

    shape: tuple[int, int] = dataclasses.field(default=(-1, -1))
    parts: tuple[Format, ...] = part(many=True, doc="the summands, two or more, each of any format")

    def __post_init__(self) -> None:
        given = self.parts if isinstance(self.parts, (tuple, list)) else ()
        if self.shape == (-1, -1) and given and isinstance(given[0], Format):
            object.__setattr__(self, "shape", given[0].shape)
        if len(given) < 2:
            raise UsageError(
                f"sum: parts: expected two matrices or more, got {len(given) or type(self.parts).__name__}"
            )
        Composed.__post_init__(self)  # super() is lost when slots=True remakes the class

    @classmethod
    def from_parts(cls, parts: Iterable[Format]) -> Self:
        """The validated sum of matrices; OrderError for an element that is nonzero in two of them."""
        return cls(parts=tuple(parts)).validate()

    def layout_problems(self) -> list[tuple[str, str]]:
        problems, first = Format.layout_problems(self), self.parts[0]
        for i, p in enumerate(self.parts):
            if p.shape != self.shape:
                problems.append(("parts", f"part {i}: expected shape {self.shape}, got {p.shape}"))
            if p.dtype != first.dtype:
                problems.append(("parts", f"part {i}: expected dtype {first.dtype} as part 0, got {p.dtype}"))
            if p.device != first.device:
                problems.append(("parts", f"part {i}: expected device {first.device} as part 0, got {p.device}"))
        return problems

    def check_canonical(self) -> None:
        rows, cols, _, owner = self._items()
        xp, (M, K) = namespace(rows), self.shape
        if M * K < 2**63:
            order = xp.argsort(rows * K + cols, kind="stable")  # int64: M*K overflows int32
        else:
            order = xp.lexsort(xp.stack((cols, rows)))
        rows, cols = rows[order], cols[order]
        twice = (rows[1:] == rows[:-1]) & (cols[1:] == cols[:-1])
        count = int(twice.sum())  # synchronize!
        if count:
            at = int(twice.argmax())
            row, col, pair = int(rows[at]), int(cols[at]), (int(owner[order[at]]), int(owner[order[at + 1]]))
            both = " and ".join(f"{i} ({self.parts[i].name})" for i in pair)
            raise OrderError(
                f"sum: expected each nonzero in one part, got row {row}, column {col} in parts {both} ({count} such "
                "places in all); subtract one part from the other before they are put together",
                array="parts", index=(row, col), value=pair, count=count,
            )  # fmt: skip

    def _items(self) -> tuple[Array, Array, Array, Array]:
        """(row, column, values, number of the part) of every nonzero, part after part; values as their bits."""
        nonzeros = [p.to_csr().without_zeros() for p in self.parts]
        xp = namespace(self.values)
        rows = xp.concatenate([a.rows() for a in nonzeros])
        cols = xp.concatenate([a.indices.astype(np.int64) for a in nonzeros])
        owner = xp.concatenate([xp.full(a.nnz, i, np.int32) for i, a in enumerate(nonzeros)])
        return rows, cols, xp.concatenate([bits(a.data) for a in nonzeros]), owner

    def _to_csr(self) -> CSR:
        rows, cols, values, _ = self._items()
        return CSR.from_coordinates(self.shape, rows, cols, values.view(self.dtype))

    @classmethod
    def require_converter(cls) -> NoReturn:
        raise UsageError(
            "sum: which part takes which values is yours to say: convert the parts, then Sum(parts=(a, b)); no matrix "
            "is converted into a sum as a whole"
        )

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        return ()

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return ()
