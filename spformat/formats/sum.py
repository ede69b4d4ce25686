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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from ..arrays.dtypes import bits
from ..arrays.library import Array, namespace
from ..errors import OrderError, UsageError
from .base import Format
from .composed import Composed
from .cover import CoverRule, decomposed
from .csr import CSR
from .declare import part


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Sum(Composed):
    """Two or more matrices of one shape, dtype and device. No element is nonzero in two of them.

    So every nonzero of A lies in exactly one part, with its bits, and is read without adding. Zeros that a part stores
    (padding of blocks, stored items) do not count. The shape is that of the parts and need not be given.
    """

    name, version, torch_layout = "sum", 1, ""
    parse_rule: ClassVar[Callable[[str], CoverRule]]  # set where the formats are registered

    shape: tuple[int, int] = dataclasses.field(default=(-1, -1))
    parts: tuple[Format, ...] = part(many=True, doc="the summands, two or more, each of any format")

    def __post_init__(self) -> None:
        given = self.parts if isinstance(self.parts, (tuple, list)) else ()
        if self.shape == (-1, -1) and given and isinstance(given[0], Format):
            object.__setattr__(self, "shape", given[0].shape)
        if len(given) < 2:
            got = len(given) or "none" if isinstance(self.parts, (tuple, list)) else type(self.parts).__name__
            raise UsageError(f"sum: parts: expected two matrices or more, got {got}")
        Composed.__post_init__(self)  # super() is lost when slots=True remakes the class

    @classmethod
    def from_parts(cls, parts: Iterable[Format]) -> Self:
        """The validated sum of matrices; OrderError for an element that is nonzero in two of them."""
        return cls(parts=tuple(parts)).validate()

    def layout_problems(self) -> list[tuple[str, str]]:
        return Format.layout_problems(self) + self.unequal_parts(self.shape)

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

    # ---------------------------------------------------------------- converting

    @classmethod
    def require_converter(cls, **params: Any) -> None:
        if params.get("rules") is None:
            raise UsageError(
                "sum: say what each part takes: spformat.decompose(x, 'bsr:blocksize=32x32,density>=0.5', 'csr'), or "
                "--to 'bsr:32x32,density>=0.5+csr'; or convert the parts, then Sum(parts=(a, b))"
            )

    @classmethod
    def resolve_params(cls, given: dict[str, Any], a: CSR | None = None) -> dict[str, Any]:
        """{"rules": one complete text for each part}, or {}, because a sum in memory does not know its rules."""
        unknown = [k for k in given if k != "rules"]
        if unknown:
            raise UsageError(
                f"sum: unknown parameter {unknown[0]!r:.80}; each part has its own, as in 'bsr:blocksize=32x32+csr'"
            )
        if given.get("rules") is None:
            return {}
        return {"rules": tuple(rule.text for rule in cls.cover_rules(given["rules"]))}

    @classmethod
    def cover_rules(cls, texts: Any) -> tuple[CoverRule, ...]:
        """The rules of all parts, complete and in order; UsageError for one that is malformed, or fewer than two."""
        if not isinstance(texts, (tuple, list)) or not all(isinstance(t, str) for t in texts):
            raise UsageError(f"sum: rules: expected a text for each part, got {texts!r:.80}")
        if len(texts) < 2:
            raise UsageError(f"sum: expected the rules of two parts or more, got {len(texts)}; the last takes the rest")
        rules = []
        for i, text in enumerate(texts):
            try:
                rules.append(cls.parse_rule(text).resolved(last=i == len(texts) - 1))
            except UsageError as e:
                raise UsageError(f"sum: part {i}: {e.message}", value=text) from None
        return tuple(rules)

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        return cls.trusted(parts=decomposed(a, cls.cover_rules(params["rules"])))

    def _mapped(self, function: Callable[[Array], Array]) -> Self:
        return type(self)(parts=tuple(p._mapped(function) for p in self.parts)).validate()
