"""The transpose of a matrix as a view: nothing is moved until somebody asks for a stored form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from .base import Format


@dataclass(frozen=True, eq=False, slots=True)
class Transposed:
    """``A.T`` of a matrix A [M, K]: shape (K, M)."""

    matrix: Format
    __array_ufunc__: ClassVar[None] = None
    __matmul__: ClassVar[Callable[[Any, Any], Any]]

    @property
    def shape(self) -> tuple[int, int]:
        """(K, M)."""
        M, K = self.matrix.shape
        return K, M

    @property
    def T(self) -> Format:  # noqa: N802
        """The matrix itself."""
        return self.matrix

    def materialize(self) -> Format:
        """The transpose, stored as CSR."""
        import numpy as np

        from ..arrays.library import namespace
        from .csr import CSR

        a = self.matrix.to_csr()
        rows = a.rows()
        order = namespace(rows).argsort(a.indices.astype(np.int64) * max(1, self.matrix.shape[0]) + rows)
        return CSR.from_coordinates(self.shape, a.indices[order].astype(np.int64), rows[order], a.data[order])
