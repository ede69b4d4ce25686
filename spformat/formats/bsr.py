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
from ..arrays.dtypes import bits, nonzero_mask, value_type
from ..arrays.library import Array, ceil_div, index_dtype, is_cupy, namespace
from ..arrays.segments import counts_of, distinct_sorted, pointer, rows_of
from ..errors import PatternError, UsageError
from ..limits import check_bytes, product
from .base import INDEX, VALUE, Format, RowChunks, array, param
from .csr import CSR
from .hooks import (
    Blocks,
    Condition,
    Counts,
    Measure,
    Pattern,
    dense_cells,
    percent,
)

ROW_CHUNK = 1 << 22
"""Dense elements that the host converts at a time."""
_USUAL = (16, 32, 64)
"""Sizes of square blocks among which the smallest format is sought."""

BLOCK_DENSITY = Measure("density", True, "share of the R*C places of its block that hold a value")
HALF_FULL = Condition("density", ">=", 0.5)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class BSR(Format):
    """Dense R x C blocks in rows of blocks (scipy's layout); edge blocks are full size, +0 outside the shape."""

    name, version, tie_rank = "bsr", 1, 3
    torch_layout = "sparse_bsr"
    measures = (BLOCK_DENSITY,)

    blocksize: tuple[int, int] = param("pair", 1, 1024, default=(32, 32), doc="block height R, width C")
    indptr: Array = array(INDEX, "Mb+1", bound="nnzb", doc="first block of each block row")
    indices: Array = array(INDEX, "nnzb", bound="Kb-1", doc="block column, strictly increasing in a block row")
    data: Array = array(VALUE, "nnzb", "R", "C", doc="blocks, each row-major")

    @property
    def grid(self) -> tuple[int, int]:
        """(Mb, Kb): block rows and block columns."""
        return block_grid(self.shape, self.blocksize)

    @property
    def nnzb(self) -> int:
        """Stored blocks."""
        return int(self.data.shape[0])

    def dims(self) -> dict[str, int]:
        Mb, Kb = self.grid
        return {"Mb+1": Mb + 1, "Kb-1": Kb - 1, "R": self.blocksize[0], "C": self.blocksize[1]}

    @classmethod
    def row_chunks(cls, params: dict[str, Any]) -> RowChunks:
        return RowChunks(params["blocksize"][0], pointers=("indptr",))

    @classmethod
    def pattern(cls, params: dict[str, Any]) -> Pattern:
        return Blocks(params["blocksize"])

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
    def stored_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        return stored_in_blocks(counts, params["blocksize"])

    @classmethod
    def remark(cls, counts: Counts, params: dict[str, Any]) -> str:
        return remark_on_blocks(counts, params)

    @classmethod
    def usual_conditions(cls, params: dict[str, Any]) -> tuple[Condition, ...]:
        return (HALF_FULL,)

    @classmethod
    def covered(cls, a: CSR, params: dict[str, Any], conditions: tuple[Condition, ...]) -> Array:
        return dense_cells(a, params["blocksize"], conditions)

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return {"blocksize": (16, 16)}, {"blocksize": (2, 3)}, {"blocksize": (1, 1)}

    def block_rows(self) -> Array:
        """int64[nnzb]: block row of each block."""
        return rows_of(self.indptr, self.nnzb)

    def row_range(self, first: int, last: int) -> BSR:
        """Rows first .. last-1 of a valid matrix; UsageError if they cut a block."""
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


@dataclass(frozen=True)
class CountedBlocks:
    """The blocks of a matrix, as far as its counts tell."""

    grid: tuple[int, int]
    nnzb: int
    rows: int
    """Block rows with at least one block."""
    nbytes: int
    """Bytes of indices and data."""


def counted_blocks(counts: Counts, blocksize: tuple[int, int]) -> CountedBlocks | None:
    """The blocks of this size; None if they were not counted."""
    (R, C), (Mb, Kb) = blocksize, block_grid(counts.shape, blocksize)
    if R != C or R not in counts.blocks:
        return None
    nnzb, rows = counts.blocks[R]
    block = index_dtype(Kb - 1).itemsize + value_type(counts.dtype).numpy.itemsize * R * C
    return CountedBlocks((Mb, Kb), nnzb, rows, nnzb * block)


def stored_in_blocks(counts: Counts, blocksize: tuple[int, int]) -> int | None:
    """``Format.stored`` of a matrix in blocks of this size; None if they were not counted."""
    blocks = counted_blocks(counts, blocksize)
    return None if blocks is None else blocks.nnzb * blocksize[0] * blocksize[1]


def remark_on_blocks(counts: Counts, params: dict[str, Any]) -> str:
    """How full the blocks would be, if they were counted."""
    stored = stored_in_blocks(counts, params["blocksize"]) if params else None
    if not stored:
        return ""
    b, fill = params["blocksize"][0], counts.block_fill(params["blocksize"][0])
    text = f"block fill {percent(fill)} at {b}"
    return text if fill > _FULL else f"{text}: {percent(1 - fill)} of the stored values would be padding"


_FULL = 0.9
"""Share of nonzeros above which blocks count as full."""


def block_grid(shape: tuple[int, int], blocksize: tuple[int, int]) -> tuple[int, int]:
    """(Mb, Kb)."""
    return ceil_div(shape[0], blocksize[0]), ceil_div(shape[1], blocksize[1])


def check_inside(f: Any, last_row_start: int) -> None:
    """Require that values of edge blocks outside the shape are zero. last_row_start: first block of the last block
    row."""
    (M, K), (R, C), (_, Kb) = f.shape, f.blocksize, f.grid
    xp = namespace(f.data)
    if M % R:
        part = f.data[last_row_start:, M % R :, :]
        scans.zero_in(f, "data", part, f"in rows >= {M}", lambda i: (i[0] + last_row_start, i[1] + M % R, i[2]))
    if K % C:
        edge = xp.flatnonzero(f.indices == Kb - 1)  # synchronize!
        part = f.data[edge][:, :, K % C :]
        scans.zero_in(f, "data", part, f"in columns >= {K}", lambda i: (int(edge[i[0]]), i[1], i[2] + K % C))


def check_blocks(f: Any) -> None:
    """Require that every block has a nonzero, and that there is no -0.0."""
    for s in scans.chunks(f.nnzb, f.data, max(1, scans.CHUNK // (f.blocksize[0] * f.blocksize[1]))):
        empty = ~nonzero_mask(f.data[s]).any(axis=(1, 2))
        offenders = scans.first_true(empty)
        if offenders:
            scans.fail(
                f,
                PatternError,
                "data",
                s.start + offenders[0],
                "all zeros",
                "a nonzero in each block",
                count=offenders[1],
            )
    scans.negative_zero_free(f, "data")


def blocks_to_csr(f: Any, block_rows: Array) -> CSR:
    """CSR of the nonzeros of blocks at (block_rows, f.indices)."""
    xp, (R, C) = namespace(f.data), f.blocksize
    block, r, c = xp.nonzero(nonzero_mask(f.data))  # synchronize!
    rows = block_rows[block] * R + r
    cols = f.indices[block].astype(np.int64) * C + c
    return CSR.from_coordinates(f.shape, rows, cols, bits(f.data)[block, r, c].view(f.dtype))


def blocks_to_dense(f: Any, block_rows: Array) -> Array:
    """Array [M, K] with each block written at its place."""
    out = f.empty_dense()
    xp, (M, K), (R, C), (Mb, Kb) = namespace(f.data), f.shape, f.blocksize, f.grid
    whole = (Mb * R, Kb * C) == (M, K)
    padded = bits(out) if whole else xp.zeros((Mb * R, Kb * C), bits(out).dtype)
    padded.reshape(Mb, R, Kb, C)[block_rows, :, f.indices.astype(np.int64), :] = bits(f.data)
    if not whole:
        bits(out)[...] = padded[:M, :K]
    return out
