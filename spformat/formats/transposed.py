"""The lazy transpose: ``a.T`` is a view [K, M] of a matrix [M, K], and copies nothing until a method needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrays.dtypes import bits
from ..arrays.library import Array, ceil_div, current_device, index_dtype, namespace
from ..arrays.segments import counts_of, pointer, stable_order
from . import edges
from .array_methods import frozen
from .base import Format
from .bsr import BSR
from .csc import CSC
from .csr import CSR
from .dbsr import DBSR
from .dense import Dense


@frozen
@dataclass(frozen=True, slots=True, eq=False)
class Transposed:
    """The transpose of ``matrix``, as a view without arrays of its own."""

    matrix: Format
    __array_ufunc__: ClassVar[None] = None  # else numpy makes an array of one object for ``x @ a.T``
    __matmul__: ClassVar[Callable[[Any, Any], Any]]  # set by a layer above, to ``spmm``
    __rmatmul__: ClassVar[Callable[[Any, Any], Any]]
    ndim: ClassVar[int] = 2

    @property
    def T(self) -> Format:  # noqa: N802 - numpy's name
        """The matrix itself."""
        return self.matrix

    @property
    def shape(self) -> tuple[int, int]:
        """(K, M) of a matrix [M, K]."""
        M, K = self.matrix.shape
        return K, M

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the values."""
        return self.matrix.dtype

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:<id>"."""
        return self.matrix.device

    @property
    def nnz(self) -> int:
        """``nnz`` of the matrix."""
        return self.matrix.nnz

    def __repr__(self) -> str:
        return f"Transposed({self.matrix!r}, shape={self.shape})"

    def __eq__(self, other: object) -> bool:
        """Whether it is the transpose of an equal matrix."""
        return self.matrix == other.matrix if isinstance(other, Transposed) else NotImplemented

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Raises TypeError: a matrix is never converted to a dense array implicitly."""
        raise TypeError("this is the transpose of a sparse matrix, no array; use to_dense()")

    def to(self, device: str) -> Transposed:
        """The view of the matrix on "cpu", "cuda" or "cuda:<id>"; itself when it is there."""
        moved = self.matrix.to(device)
        return self if moved is self.matrix else Transposed(moved)

    def to_dense(self) -> Array:
        """A fresh array [K, M] in row-major order. LimitError when over the memory budget."""
        with current_device(self.matrix.values):
            return namespace(self.matrix.values).ascontiguousarray(self.matrix.to_dense().T)

    def to_csr(self) -> CSR:
        """The transpose as an ordered CSR [K, M] on the same device, every stored item with its bits; O(nnz).

        That of a CSC shares its arrays.
        """
        with current_device(self.matrix.values):
            if isinstance(self.matrix, CSC):
                return self.matrix.ensure_valid().transposed_csr()
            return self.matrix.to_csr().transposed()

    toarray = todense = to_dense
    tocsr = to_csr

    def dot(self, other: Any) -> Any:
        """``self @ other``."""
        return self @ other

    def materialize(self) -> Format:
        """The transpose as a stored matrix, in the format that costs least.

        BSR and DBSR give a BSR of transposed blocks, blocksize (C, R); Dense gives Dense; every other format gives CSR.
        All are exact.
        """
        if isinstance(self.matrix, BSR | DBSR):
            self.matrix.ensure_valid()
            a = self.matrix
            with current_device(a.data):
                direct: BSR | None = edges.take(a.name, edges.TRANSPOSED, a, {}, a.data)
                return _transposed_blocks(a) if direct is None else direct
        if isinstance(self.matrix, Dense):
            return Dense.from_dense(self.to_dense())
        return self.to_csr()


def _transposed_blocks(a: BSR | DBSR) -> BSR:
    """BSR [K, M] of the transposed blocks, in order of block column and then block row; O(stored values)."""
    xp, (M, K), (R, C) = namespace(a.data), a.shape, a.blocksize
    order = stable_order(a.indices, ceil_div(K, C))
    data = xp.ascontiguousarray(bits(a.data)[order].transpose(0, 2, 1)).view(a.dtype)
    return BSR.trusted(
        shape=(K, M),
        blocksize=(C, R),
        indptr=pointer(counts_of(a.indices, ceil_div(K, C)), a.nnzb),
        indices=a.block_rows()[order].astype(index_dtype(ceil_div(M, R) - 1)),
        data=data,
    )


Format.T = property(Transposed)  # type: ignore[assignment, method-assign]
