"""Dense: the baseline is a format too.  Spec: docs/formats/dense.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays.library import Array, current_device
from .base import VALUE, Format, RowChunks, array, checked_values
from .csr import CSR
from .hooks import Counts, percent


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Dense(Format):
    """All M*K elements in row-major order. -0.0 is kept here (and lost by ``to_csr``)."""

    name, version, aligned = "dense", 1, False
    tie_rank, torch_layout, keeps_negative_zeros = 0, "strided", True

    data: Array = array(VALUE, "M", "K", doc="elements, row-major")

    def dims(self) -> dict[str, int]:
        return {"M": self.shape[0], "K": self.shape[1]}

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        return {"data": (dtype, shape)}

    @classmethod
    def edge_name(cls, dtype: Any) -> str:
        """Not "dense", under which edges from and to plain arrays are registered."""
        return f"{cls.name}:matrix"

    @classmethod
    def row_chunks(cls, params: dict[str, Any]) -> RowChunks:
        return RowChunks(1)

    @classmethod
    def remark(cls, counts: Counts, params: dict[str, Any]) -> str:
        return f"{percent(1 - counts.density)} of its elements are zero" if counts.nnz else ""

    @classmethod
    def from_dense(cls, x: Array, **params: Any) -> Self:
        cls.resolve_params(params)
        x = checked_values(x, cls.name)
        return cls.trusted(shape=x.shape, data=x)

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        return cls.trusted(shape=a.shape, data=a.without_zeros().to_dense())

    def to_csr(self) -> CSR:
        return CSR.from_dense(self.data)

    def to_dense(self) -> Array:
        with current_device(self.data):
            return self.data.copy()
