"""CSR with few columns in one launch: a block keeps some columns of B, all K rows of them, in shared memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import device_of, shared_limit
from ..runtime import jit
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import MAX_GRID_Y, Bound, Launch, Operands
from ..runtime.row_work import BinTable, Rows, bin_table, row_gather_reasons, rows_by_length
from ..runtime.scratch import Scratch
from ..runtime.token_sums import room

PREFETCHED = 32 << 20
"""Bytes of A up to which all of it is asked for in L2 at the start."""


class PanelTile(Protocol):
    """A block of ``threads`` keeps ``columns`` columns of B; ``resident`` of them run on a multiprocessor at once."""

    @property
    def columns(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def resident(self) -> int: ...
    @property
    def fill(self) -> int: ...
    @property
    def slots(self) -> int:
        """Slots that share the rows of a task."""

    @property
    def tasks(self) -> int:
        """Tasks that a block works on at a time."""


def smem(columns: int, p: Problem) -> int:
    """bytes: ``columns`` columns of B."""
    return p.K * columns * itemsize(p.a_dtype)


class ColumnPanels(CudaKernel):
    """``out = alpha * A @ B + beta * out + bias`` for CSR and few columns. B and C are read and written where they lie.

    Sums are float32 (float64 for float64), in a fixed order. K is limited by shared memory: a block keeps all rows of
    some columns of B there. The .cu twin has the arguments of ``spmm_csr_tokens`` and the template arguments
    ``T, Out, Index, <shape>, cut, B by columns, epilogue``.
    """

    takes = spmm_of("csr")
    archs = ("sm_80",)
    epilogue = True
    max_cols: ClassVar[int]
    source: ClassVar[str]
    """The .cu file, whose function has the same name."""
    reserved: ClassVar[int]
    """Bytes of shared memory that the largest block needs beside one column of B."""

    def shape(self, p: Problem, tile: Any) -> str:
        """The template arguments that depend on the tile."""
        raise NotImplementedError

    def unsupported(self, p: Problem) -> list[str]:
        fits = (room(shared_limit(p.sm), 1) - self.reserved) // itemsize(p.a_dtype)
        return row_gather_reasons(p) + reasons(
            (p.n > self.max_cols, f"takes at most {self.max_cols} columns, got up to {p.n}"),
            (fits < p.K, f"keeps columns of B in shared memory: K must be at most {fits:,}, got {p.K:,}"),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: PanelTile) -> Prepared:
        """The launches of one tile."""
        rows: Rows = rows_by_length(a, p)
        indices, data = a.indices, a.data
        value, out = VALUE_TYPES[p.a_dtype], VALUE_TYPES[p.out_dtype]
        index = "long long" if indices.dtype.itemsize == 8 else "int"
        arch, dynamic = jit.architecture(p.sm or 80, self.archs), smem(tile.columns, p)
        table = bin_table(rows, tile.slots, tile.fill)
        prefetch = int(data.nbytes + indices.nbytes <= PREFETCHED)
        fixed = (table, rows.records, indices, data, int(data.size), prefetch, p.K, rows.cuts)
        out_size, sum_size = itemsize(p.out_dtype), 8 if p.a_dtype == "float64" else 4
        b_col, c_col, cuts = p.b_layout == COL, p.out_layout == COL, len(rows.cuts)
        at_once, blocks = device_of(p).processors * tile.resident, ceil_div(table.blocks, tile.tasks)
        sums, arrivals, function = Scratch(), Scratch(zeros=True), Path(self.source).stem

        @functools.lru_cache(maxsize=2)
        def launch(by_columns: bool) -> Launch:
            flags = ", ".join(str(f).lower() for f in (bool(rows.pieces), by_columns, p.epilogue))
            name = f"{function}<{value.cuda}, {out.cuda}, {index}, {self.shape(p, tile)}, {flags}>"
            compiled = jit.load(self.source, name, arch, p.device_id, dynamic)
            return Launch(compiled, (BinTable, *"PPPqiiPPPPPiqqqPdd"), fixed, tile.threads, dynamic)

        launch(b_col or p.n == 1)  # compile this variant now, and the other at the first call that needs it

        def prepare(o: Operands) -> list[Bound]:
            by_columns = b_col or (o.n == 1 and o.ldb == 1)  # a contiguous vector is both
            c_row, c_col_step = (1, o.ldc) if c_col else (o.ldc, 1)
            calls = []
            for first in range(0, o.n, MAX_GRID_Y * tile.columns):
                n = min(o.n - first, MAX_GRID_Y * tile.columns)
                panels = ceil_div(n, tile.columns)
                sums_at = sums.buffer(o.stream, rows.pieces * n * sum_size) if cuts else 0
                arrivals_at = arrivals.buffer(o.stream, cuts * panels * 4) if cuts else 0
                b = o.b + first * value.numpy.itemsize * (o.ldb if by_columns else 1)
                c = o.c + first * out_size * c_col_step
                tail = sums_at, arrivals_at, b, c, n, o.ldb, c_row, c_col_step, o.bias, o.alpha, o.beta
                grid = min(blocks, max(1, at_once // panels)), panels, 1
                calls.append(launch(by_columns).bind(grid, o.stream, *tail))
            return calls

        return Prepared(prepare, str(tile), int(rows.records.nbytes))
