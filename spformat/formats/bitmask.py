"""Bitmask: one bit an element and the nonzeros in row order.  Spec: docs/formats/bitmask.md.

The smallest store for 16-bit values at 7-96 % sparsity (compressed-tensors' sparse-bitmask, full pointer).

    row  1 . . . . . . 2 | 3 . .      bitmask [129 1]   (129 = 2^0 + 2^7)      data [1 2 3]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import bits, nonzero_mask
from ..arrays.library import Array, ceil_div, index_dtype, is_cupy, namespace
from ..arrays.segments import pointer
from ..errors import IndexBoundsError, InvariantError, PatternError
from .base import INDEX, VALUE, Format, RowChunks, array
from .csr import CSR
from .hooks import Counts, percent

ROW_CHUNK = 1 << 20
"""Dense elements that the host processes at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Bitmask(Format):
    """Lowest bit = lowest column; the values of a row lie at indptr[i] .. indptr[i+1]-1."""

    name, version, tie_rank = "bitmask", 1, 1

    indptr: Array = array(INDEX, "M+1", bound="nnz", doc="first value of each row")
    bitmask: Array = array("uint8", "M", "ceil(K/8)", doc="bit b of byte y is column 8y+b; 1 where value != 0")
    data: Array = array(VALUE, "nnz", doc="values in row-major order")

    def dims(self) -> dict[str, int]:
        M, K = self.shape
        return {"M+1": M + 1, "M": M, "ceil(K/8)": ceil_div(K, 8)}

    @classmethod
    def array_specs(
        cls, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, params: dict[str, Any]
    ) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        M, K = shape
        packed = (np.dtype(np.uint8), (M, ceil_div(K, 8)))
        return {"indptr": (index_dtype(nnz), (M + 1,)), "bitmask": packed, "data": (dtype, (nnz,))}

    @classmethod
    def row_chunks(cls, params: dict[str, Any]) -> RowChunks:
        return RowChunks(1, pointers=("indptr",))

    @classmethod
    def remark(cls, counts: Counts, params: dict[str, Any]) -> str:
        return f"a bit for each element, of which {percent(1 - counts.density)} are zero" if counts.nnz else ""

    @property
    def nnz(self) -> int:
        """Stored values, none of them zero: O(1)."""
        return self.stored

    def _row_chunks(self) -> list[slice]:
        M, K = self.shape
        return list(scans.chunks(M, self.data, max(1, ROW_CHUNK // max(1, K))))

    def check_memory(self) -> None:
        K = self.shape[1]
        xp = namespace(self.data)
        scans.pointer(self, "indptr", self.nnz)
        if K % 8:
            extra = (self.bitmask[:, -1] >> np.uint8(K % 8)) != 0
            offenders = scans.first_true(extra)
            if offenders:
                at = (offenders[0], ceil_div(K, 8) - 1)
                want = f"0 in the bits of columns >= {K}"
                scans.fail(self, IndexBoundsError, "bitmask", at, int(self.bitmask[at]), want, count=offenders[1])
        for s in self._row_chunks():
            packed = self.bitmask[s]
            if xp is np and packed.size and packed.shape[1] % 8 == 0:
                packed = packed.view(np.uint64)
            ones = xp.bitwise_count(packed).sum(axis=1, dtype=np.int64)
            # The pointer is known to ascend, so this difference cannot wrap.
            lengths = self.indptr[s.start + 1 : s.stop + 1].astype(np.int64) - self.indptr[s]
            offenders = scans.first_true(ones != lengths)
            if offenders:
                i = s.start + offenders[0]
                want = f"indptr[{i}] + the {int(ones[offenders[0]])} bits set in row {i}"
                scans.fail(self, InvariantError, "indptr", i + 1, int(self.indptr[i + 1]), want, count=offenders[1])

    def check_canonical(self) -> None:
        for s in scans.chunks(self.nnz, self.data):
            zero = ~nonzero_mask(self.data[s])
            scans.require_none(self, zero, "data", "a value that is not zero", PatternError, s.start)

    @classmethod
    def _from_dense(cls, x: Array, **params: Any) -> Self:
        xp, (M, K) = namespace(x), x.shape
        wide = ceil_div(K, 8)
        bitmask = xp.zeros((M, wide), np.uint8)
        counts = xp.zeros(M, np.int64)
        data = [xp.zeros(0, bits(x).dtype)]
        step = max(1, M if is_cupy(x) else ROW_CHUNK // max(1, K))
        for i in range(0, M if K else 0, step):
            chunk = x[i : i + step]
            mask = nonzero_mask(chunk)
            data.append(bits(chunk)[mask])  # synchronize!
            counts[i : i + step] = mask.sum(axis=1, dtype=np.int64)
            if K % 8:
                full = xp.zeros((chunk.shape[0], wide * 8), bool)
                full[:, :K] = mask
                mask = full
            bitmask[i : i + step] = xp.packbits(mask.reshape(-1), bitorder="little").reshape(-1, wide)
        values = xp.concatenate(data).view(x.dtype)
        return cls.trusted(shape=(M, K), indptr=pointer(counts, values.size), bitmask=bitmask, data=values)

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        a = a.without_zeros()
        xp, (M, K) = namespace(a.data), a.shape
        wide = ceil_div(K, 8)
        flat = xp.zeros(M * wide, np.uint8)
        if a.nnz:
            col = a.indices.astype(np.int64)
            byte = a.rows() * wide + col // 8  # ascending: the bits of a byte are neighbours, and distinct
            new = xp.ones(byte.size, bool)
            new[1:] = byte[1:] != byte[:-1]
            start = xp.flatnonzero(new)  # synchronize!
            one = xp.left_shift(1, col % 8).astype(np.int64)
            flat[byte[start]] = xp.add.reduceat(one, start).astype(np.uint8)
        indptr = a.indptr.astype(index_dtype(a.nnz))
        return cls.trusted(shape=a.shape, indptr=indptr, bitmask=flat.reshape(M, wide), data=a.data)

    def _mask(self, s: slice) -> Array:
        """bool[rows, K]: the mask of some rows."""
        xp, K = namespace(self.data), self.shape[1]
        packed = self.bitmask[s]
        flat = xp.unpackbits(packed.reshape(-1), bitorder="little")
        return (
            flat.reshape(packed.shape[0], -1)[:, :K].astype(bool) if packed.size else xp.zeros((len(packed), K), bool)
        )

    def _to_csr(self) -> CSR:
        xp, K = namespace(self.data), self.shape[1]
        cols = [xp.nonzero(self._mask(s))[1].astype(index_dtype(K - 1)) for s in self._row_chunks()]  # synchronize!
        indices = xp.concatenate(cols) if cols else xp.zeros(0, index_dtype(K - 1))
        return CSR.trusted(shape=self.shape, indptr=self.indptr, indices=indices, data=self.data)

    def _to_dense(self) -> Array:
        out = self.empty_dense()
        for s in self._row_chunks():
            lo, hi = int(self.indptr[s.start]), int(self.indptr[s.stop])
            bits(out)[s][self._mask(s)] = bits(self.data)[lo:hi]
        return out
