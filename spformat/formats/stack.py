"""A stack of matrices of one shape, such as the expert weights of a mixture of experts.  Spec: docs/formats/stack.md.

Stack(parts=(a, b))        E = 2 matrices [M, K]: an array [E, M, K]

W[0]          part "0"      W[1]          part "1"
1 2 . .       1 2 . .       . . 5 .       . . 5 .
. . 3 4       . . 3 4       6 . . 7       6 . . 7
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from ..arrays.library import Array, namespace, on_own_device
from ..errors import UsageError
from ..limits import always_allowed, check_bytes, product
from .base import Format
from .composed import Composed
from .csr import CSR
from .declare import part


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Stack(Composed):
    """E matrices [M, K] of one dtype and device, each in a format of its own; ``w[e]`` is matrix e.

    The shape (E, M, K) follows from the parts and need not be given. A stack is multiplied matrix by matrix:
    ``sf.spmm(w[e], B)``.
    """

    name, version, rank, torch_layout = "stack", 1, 3, ""
    ndim = 3

    shape: tuple[int, int, int] = dataclasses.field(default=(-1, -1, -1))  # type: ignore[assignment]
    parts: tuple[Format, ...] = part(many=True, doc="the matrices, one or more, each of any format")

    def __post_init__(self) -> None:
        given = self.parts if isinstance(self.parts, (tuple, list)) else ()
        if self.shape == (-1, -1, -1) and given and isinstance(given[0], Format):
            object.__setattr__(self, "shape", (len(given), *given[0].shape))
        if not given:
            got = "none" if isinstance(self.parts, (tuple, list)) else type(self.parts).__name__
            raise UsageError(f"stack: parts: expected one matrix or more, got {got}")
        Composed.__post_init__(self)  # super() is lost when slots=True remakes the class

    @classmethod
    def from_parts(cls, parts: Iterable[Format]) -> Self:
        """The validated stack of matrices [M, K]."""
        return cls(parts=tuple(parts)).validate()

    # ---------------------------------------------------------------- reading

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Format]:
        return iter(self.parts)

    def __getitem__(self, index: Any) -> Any:
        """Matrix e for an int; a stack of some of the matrices for a slice. UsageError for anything else."""
        try:
            chosen: Any = None if isinstance(index, bool) else self.parts[index]
        except (TypeError, IndexError):
            chosen = None
        if chosen is None:
            numbers = f"{-len(self)} .. {len(self) - 1}"
            raise UsageError(f"stack: expected the number of a matrix in {numbers}, or a slice, got {index!r:.80}")
        return self._of(chosen) if isinstance(index, slice) else chosen

    def layout_problems(self) -> list[tuple[str, str]]:
        problems = Format.layout_problems(self)
        if self.shape[0] != len(self.parts):
            problems.append(("parts", f"expected {self.shape[0]} parts for shape {self.shape}, got {len(self.parts)}"))
        return problems + self.unequal_parts(self.shape[1:])

    @property
    def density(self) -> float:
        """nnz / (E*M*K); 0 for empty matrices."""
        size = product(*self.shape)
        return self.nnz / size if size else 0.0

    @property
    def matrix_shape(self) -> NoReturn:
        """Raises UsageError: a stack is multiplied matrix by matrix."""
        raise UsageError(f"stack: expected a matrix, got a stack of {len(self)} matrices: multiply them one by one, as "
                         "in spmm(w[0], B)")  # fmt: skip

    @property
    def T(self) -> NoReturn:  # noqa: N802 - numpy's name
        """Raises UsageError: each matrix has its own transpose, ``w[e].T``."""
        raise UsageError("stack: expected a matrix; take the transpose of each, as in w[0].T")

    # ---------------------------------------------------------------- converting

    @on_own_device
    def to_dense(self) -> Array:
        """A new array [E, M, K] of the value dtype on the same device. LimitError if it exceeds the memory budget."""
        self.ensure_valid()
        self.check_dense_bytes()
        out = namespace(self.values).empty(self.shape, self.dtype)
        for e, p in enumerate(self.parts):
            out[e] = p.to_dense()
        return out

    def check_dense_bytes(self) -> None:
        needed = product(*self.shape, self.dtype.itemsize)
        if not always_allowed(needed):
            check_bytes(needed, f"{self.name}: dense array of shape {self.shape}", self.nbytes)

    def astype(self, dtype: Any) -> Self:
        """The same stack with the values of each matrix rounded to another value type."""
        return self._of(p.astype(dtype) for p in self.parts)

    def to_csr(self) -> NoReturn:
        """Raises UsageError: a CSR is one matrix."""
        raise UsageError(f"stack: this is a stack of {len(self)} matrices; take one of them, as in w[0].to_csr(), or "
                         "stack(w, 'csr') to convert each")  # fmt: skip

    def smallest(self) -> NoReturn:
        """Raises UsageError: each matrix may have another smallest format."""
        raise UsageError(f"stack: this is a stack of {len(self)} matrices; take one of them, as in w[0].smallest(), or "
                         "stack(w, 'auto') to convert each")  # fmt: skip

    def sum(self, axis: int | None = None) -> Any:
        """The sum of all values, in float64, or int64 of int8. UsageError for an axis."""
        if axis is not None:
            raise UsageError(f"stack: sum: expected no axis, got {axis!r}; sum the matrices, as in w[0].sum(axis=0)")
        return sum(p.sum() for p in self.parts)

    def _mapped(self, function: Any) -> Self:
        return self._of(p._mapped(function) for p in self.parts)

    def _of(self, parts: Iterable[Format]) -> Self:
        return type(self)(parts=tuple(parts))

    @classmethod
    def from_csr(cls, a: CSR, **params: Any) -> NoReturn:
        """Raises UsageError: a CSR is one matrix."""
        cls.require_converter()

    @classmethod
    def require_converter(cls, **params: Any) -> NoReturn:
        raise UsageError(
            "stack: name the format of its matrices: spformat.stack(x, 'csr') converts an array [E, M, K], and --to "
            "csr a tensor of a file"
        )
