"""A format that is not built in, and two edges for it: one loop of the host and one kernel of a device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

import spformat as sf
from spformat.arrays import scans
from spformat.arrays.dtypes import bits, nonzero_mask, value_type
from spformat.arrays.library import Array, index_dtype
from spformat.errors import OrderError, PatternError
from spformat.formats.base import INDEX, VALUE, Format, array
from spformat.formats.edges import DENSE, Edge


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Coordinates(Format):
    """Coordinates: row, column and value of every nonzero, in row-major order."""

    name = "coordinates"

    rows: Array = array(INDEX, "nnz", bound="M-1", doc="row, not falling")
    cols: Array = array(INDEX, "nnz", bound="K-1", doc="column, strictly increasing in a row")
    data: Array = array(VALUE, "nnz", doc="value")

    def dims(self) -> dict[str, int]:
        return {"M-1": self.shape[0] - 1, "K-1": self.shape[1] - 1}

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        rows, cols = (index_dtype(n - 1) for n in shape)
        return {"rows": (rows, (nnz,)), "cols": (cols, (nnz,)), "data": (dtype, (nnz,))}

    def check_memory(self) -> None:
        scans.within(self, "rows", self.shape[0])
        scans.within(self, "cols", self.shape[1])

    def check_canonical(self) -> None:
        key = self.rows * np.int64(self.shape[1]) + self.cols
        scans.require_none(self, key[1:] <= key[:-1], "cols", "row-major order, no place twice", OrderError, 1)
        scans.require_none(self, ~nonzero_mask(self.data), "data", "no stored zero", PatternError)

    @classmethod
    def _from_csr(cls, a: sf.CSR, **params: Any) -> Self:
        a = a.without_zeros()
        rows = a.rows().astype(index_dtype(a.shape[0] - 1))
        return cls.trusted(shape=a.shape, rows=rows, cols=a.indices, data=a.data)

    def _to_csr(self) -> sf.CSR:
        return sf.CSR.from_coordinates(self.shape, self.rows, self.cols, self.data)


# ------------------------------------------------------------------ an edge of the host: one loop, one line


@functools.cache
def loop() -> Any:
    """The compiled loop; numba is imported when the first large array comes."""
    import numba

    @numba.njit(nogil=True)
    def items(x: Any, zero_mask: Any, rows: Any, cols: Any, data: Any) -> int:
        at = 0
        for i in range(x.shape[0]):
            for j in range(x.shape[1]):
                if x[i, j] & zero_mask:
                    if at < rows.size:
                        rows[at], cols[at], data[at] = i, j, x[i, j]
                    at += 1
        return at

    return items


def coordinates_from_dense(x: Array, params: dict[str, Any]) -> Coordinates:
    """Array [M, K] -> Coordinates."""
    raw, (M, K) = bits(x), x.shape
    mask = raw.dtype.type(value_type(x.dtype).zero_mask)
    nothing = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, raw.dtype)
    nnz = loop()(raw, mask, *nothing)
    rows, cols = np.empty(nnz, index_dtype(M - 1)), np.empty(nnz, index_dtype(K - 1))
    data = np.empty(nnz, raw.dtype)
    loop()(raw, mask, rows, cols, data)
    return Coordinates.trusted(shape=(M, K), rows=rows, cols=cols, data=data.view(x.dtype))


HOST = Edge(DENSE, "coordinates", "cpu", coordinates_from_dense, lambda x, elements: elements >= 64)


# ------------------------------------------------------------------ an edge of a device: one kernel, one line


SCATTER = r"""
extern "C" __global__ void scatter(const int* rows, const int* cols, const float* data, int nnz, long long K,
                                   float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < nnz) out[rows[i] * K + cols[i]] = data[i];
}
"""


def coordinates_to_dense_cuda(a: Coordinates, params: dict[str, Any]) -> Array | None:
    """Coordinates -> array [M, K]; float32 with 32-bit indices; the general code converts the rest."""
    import cupy

    if a.dtype != np.float32 or a.rows.dtype != np.int32 or a.cols.dtype != np.int32:
        return None
    out = a.empty_dense()
    if a.data.size:
        kernel = cupy.RawKernel(SCATTER, "scatter")
        nnz = a.data.size
        kernel((-(-nnz // 256),), (256,), (a.rows, a.cols, a.data, np.int32(nnz), np.int64(a.shape[1]), out))
    return out


DEVICE = Edge("coordinates", DENSE, "cuda", coordinates_to_dense_cuda)
