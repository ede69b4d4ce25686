"""Doubly compressed BSR: block rows without blocks are left out.  Spec: docs/formats/dbsr.md.

SparseTIR's DBSR (Ye et al., ASPLOS 2023). ``indices`` and ``data`` are those of BSR.

    block rows 0, 2 and 3 of 4 hold blocks      row_ids [0 2 3]      indptr [0 2 5 7]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..arrays import scans
from ..arrays.library import Array, ceil_div, index_dtype, namespace, on_own_device
from ..arrays.segments import rows_of
from ..errors import PointerError
from .base import INDEX, VALUE, Format, array, param
from .blocks import BlockHooks, blocks_to_csr, blocks_to_dense, check_blocks, check_inside, counted_blocks
from .bsr import BSR
from .csr import CSR
from .hooks import Counts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class DBSR(BlockHooks, Format):
    """BSR that lists only the block rows that have blocks."""

    name, version, torch_layout = "dbsr", 1, ""
    paper = "SparseTIR: Composable Abstractions for Sparse Compilation in Deep Learning (ASPLOS 2023)"

    blocksize: tuple[int, int] = param("pair", 1, 1024, default=(32, 32), doc="block height R, width C")
    row_ids: Array = array(INDEX, "nrb", bound="Mb-1", doc="listed block rows, ascending")
    indptr: Array = array(INDEX, "nrb+1", bound="nnzb", doc="first block of each listed block row")
    indices: Array = array(INDEX, "nnzb", bound="Kb-1", doc="block column, strictly increasing in a block row")
    data: Array = array(VALUE, "nnzb", "R", "C", doc="blocks, each row-major")

    def dims(self) -> dict[str, int]:
        Mb, Kb = self.grid
        listed = self.row_ids.shape[0] if getattr(self.row_ids, "ndim", 0) == 1 else 0
        sizes = {"nrb+1": listed + 1, "Mb-1": Mb - 1, "Kb-1": Kb - 1}
        return sizes | {"R": self.blocksize[0], "C": self.blocksize[1]}

    @classmethod
    def bytes_of(cls, counts: Counts, params: dict[str, Any]) -> int | None:
        blocks = counted_blocks(counts, params["blocksize"])
        if blocks is None:
            return None
        row_ids = index_dtype(blocks.grid[0] - 1).itemsize * blocks.rows
        return row_ids + index_dtype(blocks.nnzb).itemsize * (blocks.rows + 1) + blocks.nbytes

    @classmethod
    def examples(cls) -> tuple[dict[str, Any], ...]:
        return {"blocksize": (16, 16)}, {"blocksize": (5, 7)}

    @classmethod
    def candidates(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        return ({"blocksize": (32, 32)},)

    @classmethod
    def alternatives(cls, counts: Counts) -> tuple[dict[str, Any], ...]:
        """Other sizes of blocks, where some block rows are empty; without such rows BSR is the same and simpler."""
        some_empty = (b for b, (_, rows) in counts.blocks.items() if rows < ceil_div(counts.shape[0], b))
        return tuple({"blocksize": (b, b)} for b in some_empty if b != 32)

    @on_own_device
    def block_rows(self) -> Array:
        """int64[nnzb]: block row of each block."""
        return self.row_ids[rows_of(self.indptr, self.nnzb)].astype(np.int64)

    def check_memory(self) -> None:
        Mb, Kb = self.grid
        scans.within(self, "row_ids", Mb)
        scans.strictly_increasing(self, "row_ids")
        scans.pointer(self, "indptr", self.nnzb)
        scans.within(self, "indices", Kb)
        last = self.row_ids.size - 1
        ends_at_last_row = last >= 0 and int(self.row_ids[last]) == Mb - 1  # synchronize!
        check_inside(self, int(self.indptr[last]) if ends_at_last_row else self.nnzb)

    def check_canonical(self) -> None:
        scans.strictly_increasing(self, "indptr", PointerError)
        scans.increasing_in_segments(self, "indptr", "indices")
        check_blocks(self)

    @classmethod
    def from_bsr(cls, b: BSR) -> Self:
        """The same blocks with the empty block rows left out; O(Mb). Validates ``b`` first."""
        b.ensure_valid()  # the result is marked
        xp = namespace(b.data)
        nonempty = xp.flatnonzero(b.indptr[1:] > b.indptr[:-1])  # synchronize!
        indptr = xp.zeros(nonempty.size + 1, b.indptr.dtype)
        indptr[1:] = b.indptr[nonempty + 1]
        row_ids = nonempty.astype(index_dtype(b.grid[0] - 1))
        return cls.trusted(
            shape=b.shape, blocksize=b.blocksize, row_ids=row_ids, indptr=indptr, indices=b.indices, data=b.data
        )

    @classmethod
    def _from_dense(cls, x: Array, **params: Any) -> Self:
        return cls.from_bsr(BSR.from_dense(x, **params))

    @classmethod
    def _from_csr(cls, a: CSR, **params: Any) -> Self:
        return cls.from_bsr(BSR.from_csr(a, **params))

    def _to_csr(self) -> CSR:
        return blocks_to_csr(self, self.block_rows())

    def _to_dense(self) -> Array:
        return blocks_to_dense(self, self.block_rows())
