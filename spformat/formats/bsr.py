"""Block sparse row (BSR).  Spec: docs/formats/bsr.md.

A (4x6), blocksize (2, 3)         indptr  [0 1 3]
1 2 . | . . .                     indices [0 0 1]
. 3 . | . . .                     data    [[[1 2 .] [. 3 .]], [[4 . .] [. . .]], [[. 5 .] [. . 6]]]
------+------
4 . . | . 5 .
. . . | . . 6
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import bits, nonzero_mask
from ..arrays.library import Array, ceil_div, index_dtype, is_cupy, namespace, on_own_device
from ..arrays.segments import counts_of, distinct_sorted, pointer, rows_of
from ..errors import UsageError
from ..limits import check_bytes, product
from .base import INDEX, VALUE, Format, RowChunks, array, param
from .blocks import BlockHooks, block_grid, blocks_to_csr, blocks_to_dense, check_blocks, check_inside, counted_blocks
from .csr import CSR
from .declare import parse_rows
from .hooks import Counts

ROW_CHUNK = 1 << 22
"""Dense elements that the host converts at a time."""
_USUAL = (16, 32, 64)
"""Sizes of square blocks among which the smallest format is sought."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class BSR(BlockHooks, Format):
    """Dense R x C blocks in rows of blocks (scipy's layout); edge blocks are full size, +0 outside the shape."""

    name, version, tie_rank = "bsr", 1, 3
    torch_layout = "sparse_bsr"

    blocksize: tuple[int, int] = param("pair", 1, 1024, default=(32, 32), doc="block height R, width C")
    indptr: Array = array(INDEX, "Mb+1", bound="nnzb", doc="first block of each block row")
    indices: Array = array(INDEX, "nnzb", bound="Kb-1", doc="block column, strictly increasing in a block row")
    data: Array = array(VALUE, "nnzb", "R", "C", doc="blocks, each row-major")

    def dims(self) -> dict[str, int]:
        Mb, Kb = self.grid
        return {"Mb+1": Mb + 1, "Kb-1": Kb - 1, "R": self.blocksize[0], "C": self.blocksize[1]}

    @classmethod
    def row_chunks(cls, params: dict[str, Any]) -> RowChunks:
        return RowChunks(params["blocksize"][0], pointers=("indptr",))

    @classmethod
    def bytes_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        blocks = counted_blocks(counts, params["blocksize"])
        return None if blocks is None else index_dtype(blocks.nnzb).itemsize * (blocks.grid[0] + 1) + blocks.nbytes

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        return tuple({"blocksize": (b, b)} for b in counts.blocks if b in _USUAL)

    @classmethod
    def alternatives(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        return tuple({"blocksize": (b, b)} for b in counts.blocks if b not in _USUAL)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return {"blocksize": (16, 16)}, {"blocksize": (2, 3)}, {"blocksize": (1, 1)}

    @on_own_device
    def block_rows(self) -> Array:
        """int64[nnzb]: block row of each block."""
        return rows_of(self.indptr, self.nnzb)

    def row_range(self, first: int, last: int) -> BSR:
        """Rows first .. last-1; UsageError if they cut a block, and unless 0 <= first <= last <= M. Validates a matrix
        that is not marked as validated."""
        self.ensure_valid()  # the result is marked
        first, last = parse_rows(self.name, first, last)
        if not 0 <= first <= last <= self.shape[0]:
            message = f"bsr: rows: expected 0 <= first <= last <= {self.shape[0]}, got {first} .. {last}"
            raise UsageError(f"{message}; a[{first}:{last}] counts as slices do")
        R = self.blocksize[0]
        if first % R or (last % R and last != self.shape[0]):
            message = f"bsr: rows {first}:{last} cut a block of {R} rows; use multiples of {R}, or to_scipy()"
            raise UsageError(message)
        begin, end = first // R, ceil_div(last, R)
        lo, hi = int(self.indptr[begin]), int(self.indptr[end])  # synchronize!
        return BSR.trusted(
            shape=(last - first, self.shape[1]),
            blocksize=self.blocksize,
            indptr=(self.indptr[begin : end + 1] - self.indptr[begin]).astype(index_dtype(hi - lo)),
            indices=self.indices[lo:hi],
            data=self.data[lo:hi],
        )

    def check_memory(self) -> None:
        scans.pointer(self, "indptr", self.nnzb)
        scans.within(self, "indices", self.grid[1])
        check_inside(self, int(self.indptr[self.grid[0] - 1]) if self.grid[0] else 0)

    def check_canonical(self) -> None:
        scans.increasing_in_segments(self, "indptr", "indices")
        check_blocks(self)

    @classmethod
    def _from_dense(cls, x: Array, **params: Any) -> Self:
        xp, (M, K), (R, C) = namespace(x), x.shape, params["blocksize"]
        Mb, Kb = block_grid(x.shape, (R, C))
        step = max(1, Mb if is_cupy(x) else ROW_CHUNK // max(1, R * K))
        counts, columns, blocks = [xp.zeros(0, np.int64)], [xp.zeros(0, np.int64)], [xp.zeros((0, R, C), bits(x).dtype)]
        for b in range(0, Mb, step):
            chunk = bits(x[b * R : (b + step) * R])
            rows = ceil_div(chunk.shape[0], R)
            if chunk.shape != (rows * R, Kb * C):
                padded = xp.zeros((rows * R, Kb * C), chunk.dtype)
                padded[: chunk.shape[0], :K] = chunk
                chunk = padded
            tiles = chunk.reshape(rows, R, Kb, C).transpose(0, 2, 1, 3)
            nonempty = nonzero_mask(tiles.view(x.dtype) if xp is np else xp.ascontiguousarray(tiles).view(x.dtype))
            nonempty = nonempty.any(axis=(2, 3))
            row, col = xp.nonzero(nonempty)  # synchronize!
            counts.append(counts_of(row, rows))
            columns.append(col)
            blocks.append(tiles[row, col])
        data = xp.concatenate(blocks)
        data[~nonzero_mask(data.view(x.dtype))] = 0  # -0.0 becomes +0
        return cls.trusted(
            shape=(M, K),
            blocksize=(R, C),
            indptr=pointer(xp.concatenate(counts), data.shape[0]),
            indices=xp.concatenate(columns).astype(index_dtype(Kb - 1)),
            data=data.view(x.dtype),
        )

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        a = a.without_zeros()
        xp, (R, C) = namespace(a.data), params["blocksize"]
        Mb, Kb = block_grid(a.shape, (R, C))
        row, col = a.rows(), a.indices.astype(np.int64)
        blocks, slot = distinct_sorted((row // R) * Kb + col // C, Mb * Kb)
        check_bytes(product(blocks.size, R, C, a.dtype.itemsize), f"{cls.name}: {blocks.size:,} blocks", a.nbytes)
        data = xp.zeros((blocks.size, R, C), a.dtype)
        bits(data)[slot, row % R, col % C] = bits(a.data)
        return cls.trusted(
            shape=a.shape,
            blocksize=(R, C),
            indptr=pointer(counts_of(blocks // max(1, Kb), Mb), blocks.size),
            indices=(blocks % max(1, Kb)).astype(index_dtype(Kb - 1)),
            data=data,
        )

    def _to_csr(self) -> CSR:
        return blocks_to_csr(self, self.block_rows())

    def _to_dense(self) -> Array:
        return blocks_to_dense(self, self.block_rows())
