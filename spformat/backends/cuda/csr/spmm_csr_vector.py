"""SpMM on CSR for N <= 64: lanes of a warp share a row, B in shared memory; sm_80 up.  Kernel: spmm_csr_vector.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import cache_us, load_us, plain_arithmetic, product_us, rounds, stored_bytes, traffic_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import Problem, itemsize
from ....products.roofline import Device, device_of, shared_limit
from ..runtime.column_panels import PREFETCHED, WORD, by_layout, over_panels, single_us, smem
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Operands, restored
from ..runtime.row_work import GROUP, BinTable, bin_table, row_gather_reasons, rows_by_length
from ..runtime.scratch import Scratch
from ..runtime.token_sums import room
from .csr_records import instead_of_arrays

MAX_COLS = 64
WIDEST = 32
"""Most columns of B that are in shared memory at a time."""
WARP = 32
AT_ONCE = 1024
"""Threads on a multiprocessor: with more they had fewer registers than the items take that are on their way."""
LOADS = 2
"""Loads of values that a slot has in flight."""
FILLS = (8, 16)
"""Items that a slot gets; tiles are compared for each."""


@dataclass(frozen=True)
class Tile:
    """A block keeps ``columns`` columns of B; ``resident`` of them run on a multiprocessor at once."""

    columns: int
    lanes: int
    fill: int
    """Items a slot of ``lanes`` lanes should get."""
    resident: int

    @property
    def slots(self) -> int:
        """Slots of a warp."""
        return WARP // self.lanes

    @property
    def threads(self) -> int:
        """Threads of a block: blocks of half a multiprocessor where two have room for B."""
        return AT_ONCE // self.resident

    @property
    def tasks(self) -> int:
        """Warps of a block, each with a task of its own."""
        return self.threads // WARP

    def __str__(self) -> str:
        return f"{self.columns} columns, {self.threads} threads, fill {self.fill}"


def tile(columns: int, fill: int, p: Problem) -> Tile | None:
    """The tile of these extents; None if its columns of B do not fit shared memory."""
    fits = [b for b in (1, 2) if smem(columns, p) <= room(shared_limit(p.sm), b)]
    return Tile(columns, max(1, columns // load_items(p.a_dtype)), fill, fits[-1]) if fits else None


def load_items(dtype: str) -> int:
    """Items that one load of values brings."""
    return 16 // itemsize(dtype)


class SpmmCSRVector(CudaKernel):
    """``out = alpha * A @ B + beta * out + bias`` for CSR and N <= 64. B and C are read and written where they lie.

    Sums are float32 (float64 for float64), in a fixed order. K is limited by shared memory: a block keeps all rows of
    some columns of B there. This is the vector kernel of N. Bell and M. Garland, "Implementing sparse matrix-vector
    multiplication on throughput-oriented processors" (2009), with aligned loads and rows sorted by length.
    """

    name = "cuda.spmm_csr_vector"
    takes = spmm_of("csr")
    archs = ("sm_80",)
    epilogue = True
    terms = ("launch", "memory", "A again", "B by every block", "single elements of B", "products", "steps")

    def unsupported(self, p: Problem) -> list[str]:
        fits = room(shared_limit(p.sm), 1) // itemsize(p.a_dtype)
        return row_gather_reasons(p) + reasons(
            (p.n > MAX_COLS, f"takes at most {MAX_COLS} columns, got up to {p.n}"),
            (p.nnz >= 2**31, f"numbers items with 31 bits: nnz must be below 2**31, got {p.nnz}"),
            (fits < p.K, f"keeps columns of B in shared memory: K must be at most {fits:,}, got {p.K:,}"),
        )

    def only_by_name(self, p: Problem) -> str:
        return instead_of_arrays(p)

    def options(self, p: Problem) -> list[Tile]:
        """The most columns that fit shared memory, and half of them, with every fill."""
        columns = power_of_two(min(max(p.n, 1), WIDEST, 8 * WORD // itemsize(p.a_dtype)))
        while columns > 1 and tile(columns, FILLS[0], p) is None:
            columns //= 2
        widths = (columns, columns // 2) if columns > 1 else (columns,)
        tiles = [tile(c, fill, p) for c in widths for fill in FILLS]
        return [t for t in tiles if t is not None]

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``, with rows of average length.

        A again: from L2, for every tile of columns after the first. B by every block: from L2 to shared memory; where
        its rows are no whole words, by single elements. products: of each item that a slot has room for. steps: 0.1 us
        for each time that a warp waits for items.
        """
        panels = ceil_div(p.n, tile.columns)
        length = ceil_div(p.nnz, max(1, p.M))
        slots = min(tile.slots, power_of_two(max(1, ceil_div(length, GROUP))) * GROUP // tile.fill or 1)
        loads = max(1, ceil_div(length, slots * load_items(p.a_dtype)))
        tasks = max(1, ceil_div(p.M * slots, tile.slots))
        at_once = tile.tasks * max(1, device.processors * tile.resident // panels)
        again = (panels - 1) * cache_us(stored_bytes(p), device)
        copied = tile.resident * load_us(smem(tile.columns, p), device)
        single = tile.resident * single_us(tile.columns, p, device)
        multiplied = 2.0 * panels * tile.columns * p.M * slots * loads * load_items(p.a_dtype)
        products = product_us(multiplied, plain_arithmetic(p.a_dtype), device)
        steps = rounds(tasks, at_once) * ceil_div(loads, LOADS) * 0.1
        return 1.0, traffic_us(p, device), again, copied, single, products, steps

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build: every value type, both layouts of B, with and without pieces."""
        return (
            "spmm_csr_vector<__nv_bfloat16, __nv_bfloat16, 1, 1024, 1, 2, false, true, true>",
            "spmm_csr_vector<__half, float, 8, 512, 2, 2, true, false, true>",
            "spmm_csr_vector<__half, __half, 16, 512, 2, 2, false, true, false>",
            "spmm_csr_vector<float, float, 32, 1024, 1, 2, true, true, false>",
            "spmm_csr_vector<double, double, 2, 512, 2, 2, false, true, true>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        stored = restored(a)
        rows, indices, data = rows_by_length(a, p), stored.indices, stored.data
        types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"
        shape = f"{tile.columns}, {tile.threads}, {tile.resident}, {LOADS}"
        dynamic = smem(tile.columns, p)
        table = bin_table(rows, tile.slots, tile.fill)
        prefetch = int(data.nbytes + indices.nbytes <= PREFETCHED)
        fixed = (table, rows.records, indices, data, int(data.size), prefetch, p.K, rows.cuts)
        sum_size, cuts = 8 if p.a_dtype == "float64" else 4, len(rows.cuts)
        sums, arrivals = Scratch(), Scratch(zeros=True)
        source, name = "csr/spmm_csr_vector.cu", f"spmm_csr_vector<{types}, {shape}, {bool(rows.pieces)}"
        variant = by_layout(p, self.archs, source, name, (BinTable, *"PPPqiiPPP"), fixed, tile.threads, dynamic)

        def workspace(o: Operands, n: int, panels: int) -> tuple[int, int]:
            if not cuts:
                return 0, 0
            return (
                sums.buffer(o.stream, rows.pieces * n * sum_size),
                arrivals.buffer(o.stream, cuts * panels * 4),
            )

        at_once, blocks = device_of(p).processors * tile.resident, ceil_div(table.blocks, tile.tasks)
        prepare = over_panels(p, tile.columns, at_once, blocks, variant, workspace)
        return Prepared(prepare, str(tile), int(rows.records.nbytes))
