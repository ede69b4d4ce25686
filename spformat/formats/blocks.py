"""What BSR and DBSR share: their blocks, counted, checked and decoded, and the answers to other layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrays import scans
from ..arrays.dtypes import bits, nonzero_mask, value_type
from ..arrays.library import Array, ceil_div, index_dtype, namespace
from ..errors import PatternError
from .csr import CSR
from .hooks import Blocks, Condition, Counts, Hooks, Measure, Pattern, dense_cells, percent
from .row_length import row_length

_FULL = 0.9
"""Share of nonzeros above which blocks count as full."""


class BlockHooks(Hooks):
    """Answers to other layers, and sizes, of a format that stores dense blocks of ``blocksize``."""

    __slots__ = ()

    measures: ClassVar[tuple[Measure, ...]] = (
        Measure("density", True, "share of the R*C places of its block that hold a value"),
    )
    shape: tuple[int, int]
    blocksize: tuple[int, int]
    data: Array

    @property
    def grid(self) -> tuple[int, int]:
        """(Mb, Kb): block rows, with and without blocks, and block columns."""
        return block_grid(self.shape, self.blocksize)

    @property
    def nnzb(self) -> int:
        """Stored blocks."""
        return int(self.data.shape[0])

    def row_length(self) -> int:
        return round(row_length(self, self.grid[1]) * self.blocksize[0] * self.blocksize[1])

    @classmethod
    def pattern(cls, params: dict[str, Any]) -> Pattern:
        return Blocks(params["blocksize"])

    @classmethod
    def usual_conditions(cls, params: dict[str, Any]) -> tuple[Condition, ...]:
        return (Condition("density", ">=", 0.5),)

    @classmethod
    def covered(cls, a: CSR, params: dict[str, Any], conditions: tuple[Condition, ...]) -> Array:
        return dense_cells(a, params["blocksize"], conditions)

    @classmethod
    def stored_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        return stored_in_blocks(counts, params["blocksize"])

    @classmethod
    def remark(cls, counts: Counts, params: dict[str, Any]) -> str:
        """How full the blocks would be, if they were counted."""
        stored = stored_in_blocks(counts, params["blocksize"]) if params else None
        if not stored:
            return ""
        b, fill = params["blocksize"][0], counts.block_fill(params["blocksize"][0])
        text = f"block fill {percent(fill)} at {b}"
        return text if fill > _FULL else f"{text}: {percent(1 - fill)} of the stored values would be padding"


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
