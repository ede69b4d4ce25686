"""SpMM on CSR and ELL buckets in records, few columns, on the CUDA cores; sm_80 up.  Kernel: spmm_csr_records.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import cache_us, load_us, memory_us, operands_bytes, rounds
from ....products.kernel import reasons, spmm_of
from ....products.problem import Problem, itemsize
from ....products.roofline import Device, shared_limit
from ..ell_buckets import ell_buckets_records
from ..runtime import refusals
from ..runtime.column_panels import by_layout, over_panels, single_us
from ..runtime.column_panels import smem as panel_bytes
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import MAX_GRID_Y
from ..runtime.record_products import MOST_PIECES
from ..runtime.token_sums import room
from . import csr_records

MAX_COLS = 4
WARP, RECORD_ROWS = 32, 16
"""Lanes of a warp; rows of a part of a record."""
AT_ONCE = 32
"""Warps that a multiprocessor should run."""
FLIGHT = 4
"""Loads of a lane that are in flight; as in the kernel."""
LONGEST = 4
"""Loads of a lane for one record, at most."""


@dataclass(frozen=True)
class Tile:
    """A block computes ``parts`` times the rows of a warp and ``columns`` columns of C."""

    columns: int
    parts: int
    warps: int
    """Warps for the same rows, each with some of the records along K."""
    lanes: int
    """Lanes that take a record of 16 rows together; a warp has 16 rows for each."""
    resident: int
    """Blocks that a multiprocessor runs at a time."""

    @property
    def threads(self) -> int:
        return WARP * self.parts * self.warps

    @property
    def rows(self) -> int:
        return RECORD_ROWS * WARP // self.lanes * self.parts

    def __str__(self) -> str:
        return f"{self.columns} columns, {self.parts} x {self.warps} warps, {self.lanes} lanes"


EXTENTS = ((1, 8), (2, 8), (4, 8), (1, 16), (2, 4), (4, 4))
"""(parts, warps) of blocks."""


TWO_RECORDS = 2 * csr_records.COLUMNS
"""Rows of B that lie between each other in shared memory."""
SUMS = 4 * WARP * (RECORD_ROWS + 1)
"""Bytes of the sums of a warp for one column, with those of no use."""
LEAST_WARPS = 8
"""Warps of the smallest blocks."""


def smem(p: Problem, columns: int, warps: int) -> int:
    """Bytes of shared memory: the columns of B, and the sums of every lane of so many warps."""
    return columns * (itemsize(p.b_dtype) * TWO_RECORDS * ceil_div(p.K, TWO_RECORDS) + warps * SUMS)


def most_rows_of_b(p: Problem) -> int:
    """The largest K of which a column fits shared memory."""
    free = room(shared_limit(p.sm), 1) - LEAST_WARPS * SUMS
    return free // (itemsize(p.b_dtype) * TWO_RECORDS) * TWO_RECORDS


def tile(p: Problem, columns: int, parts: int, warps: int, lanes: int) -> Tile | None:
    """The tile of these extents; None if it does not fit shared memory."""
    nbytes = smem(p, columns, parts * warps)
    fits = [b for b in range(1, AT_ONCE // (parts * warps) + 1) if nbytes <= room(shared_limit(p.sm), b)]
    return Tile(columns, parts, warps, lanes, fits[-1]) if fits else None


def loads_of(p: Problem, lanes: int) -> int:
    """Loads that a lane has in flight for a record: enough for almost all of them, if the items are spread evenly."""
    mean = RECORD_ROWS * csr_records.COLUMNS * min(1.0, p.nnz / max(1, p.M * p.K))
    return max(1, min(LONGEST, ceil_div(round(mean + 3 * mean**0.5), 4 * lanes)))


class SpmmCSRRecords(CudaKernel):
    """``out = alpha * A @ B + beta * out + bias`` for 16-bit A in CSR or ELL buckets and N <= 4.

    B and C are read and written where they lie. Sums are float32, in a fixed order. K is limited by shared memory: a
    block keeps all rows of some columns of B there.
    """

    name = "cuda.spmm_csr_records"
    takes = spmm_of("csr", "ell-buckets")
    archs = ("sm_80",)
    epilogue = True
    terms = ("launch", "memory", "A again", "B by every block", "single elements of B", "headers", "steps", "records",
             "loads", "warps")  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        fits, pieces = most_rows_of_b(p), csr_records.pieces_at_most(p)
        return refusals.every(p, 80, ("bfloat16", "float16")) + reasons(
            (p.n > MAX_COLS, f"takes at most {MAX_COLS} columns, got up to {p.n}"),
            (pieces >= MOST_PIECES, f"records must stay below 64 GiB, got nnz = {p.nnz}"),
            (fits < p.K, f"keeps columns of B in shared memory: K must be at most {fits:,}, got {p.K:,}"),
        )

    def only_by_name(self, p: Problem) -> str:
        return csr_records.beside_arrays(p)

    def options(self, p: Problem) -> list[Tile]:
        widest = power_of_two(min(max(p.n, 1), MAX_COLS))
        columns = (widest, widest // 2) if widest > 1 else (widest,)
        lanes = (WARP, WARP // 2) if loads_of(p, WARP) == 1 else (WARP,)
        tiles = [tile(p, c, *extent, some) for c in columns for extent in EXTENTS for some in lanes]
        return [t for t in tiles if t is not None]

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        return (str(tile.columns),)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``; for the last five what there is of it, a constant each.

        B by every block: from L2 to shared memory; where its rows are no whole words, by single elements. headers,
        steps: how often a warp waits for starts of records, and for a record. Of a multiprocessor, in thousands:
        records that its warps take, loads of their lanes for them, and warps, whose sums are added up.
        """
        panels = ceil_div(p.n, tile.columns)
        blocks = panels * ceil_div(p.M, tile.rows)
        at_once = min(tile.resident, ceil_div(blocks, device.processors))
        waves = rounds(blocks, device.processors * tile.resident)
        nbytes = csr_records.expected_bytes(p)
        again = (panels - 1) * cache_us(nbytes, device)
        copied = waves * at_once * load_us(panel_bytes(tile.columns, p), device)
        single = waves * at_once * single_us(tile.columns, p, device)
        steps = ceil_div(ceil_div(p.K, csr_records.COLUMNS), tile.warps)
        headers = waves * ceil_div(steps, tile.lanes - FLIGHT)
        warps = 1e-3 * waves * at_once * tile.parts * tile.warps
        return (
            1.0, memory_us(nbytes + operands_bytes(p), device), again, copied, single, float(headers),
            float(waves * steps), warps * steps, warps * steps * loads_of(p, tile.lanes), warps,
        )  # fmt: skip

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build: both value types, both layouts of B."""
        return (
            "spmm_csr_records<__nv_bfloat16, __nv_bfloat16, 1, 32, 1, 8, 4, 1, true, true>",
            "spmm_csr_records<__half, float, 2, 16, 2, 8, 2, 2, false, false>",
            "spmm_csr_records<__half, __half, 4, 32, 1, 8, 2, 3, true, false>",
            "spmm_csr_records<__nv_bfloat16, float, 4, 32, 4, 8, 1, 4, false, true>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        of_format = ell_buckets_records if p.format == "ell-buckets" else csr_records
        packed = of_format.records(a, p)
        types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"
        shape = f"{tile.columns}, {tile.lanes}, {tile.parts}, {tile.warps}, {tile.resident}, {loads_of(p, tile.lanes)}"
        dynamic = smem(p, tile.columns, tile.parts * tile.warps)
        fixed = (packed.data, packed.starts, p.M, p.K, packed.steps)
        source, name = "csr/spmm_csr_records.cu", f"spmm_csr_records<{types}, {shape}"
        variant = by_layout(p, self.archs, source, name, "PPqii", fixed, tile.threads, dynamic, waits=True)
        blocks = ceil_div(p.M, tile.rows)
        return Prepared(over_panels(p, tile.columns, blocks * MAX_GRID_Y, blocks, variant), str(tile))
