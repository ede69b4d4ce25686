"""SpMM on CSR for N <= 64: lanes of a warp share a row, B in shared memory; sm_80 up.  Kernel: spmm_csr_vector.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import cache_us, load_us, plain_arithmetic, product_us, rounds, stored_bytes, traffic_us
from ....products.problem import Problem, itemsize
from ....products.roofline import Device, shared_limit
from ..runtime.row_work import GROUP
from ..runtime.token_sums import room
from .column_panels import ColumnPanels, smem

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


class SpmmCSRVector(ColumnPanels):
    """A slot loads neighbouring items of a row, 16 bytes of values at a time.

    The vector kernel of N. Bell and M. Garland, "Implementing sparse matrix-vector multiplication on
    throughput-oriented processors" (2009), with aligned loads, rows sorted by length and B in shared memory.
    """

    name = "cuda.spmm_csr_vector"
    source = "csr/spmm_csr_vector.cu"
    max_cols = MAX_COLS
    reserved = 0
    terms = ("launch", "memory", "A again", "B by every block", "products", "steps")

    def options(self, p: Problem) -> list[Tile]:
        """The most columns that fit shared memory, and half of them, with every fill."""
        columns = power_of_two(min(max(p.n, 1), WIDEST, 128 // itemsize(p.a_dtype)))
        while columns > 1 and tile(columns, FILLS[0], p) is None:
            columns //= 2
        widths = (columns, columns // 2) if columns > 1 else (columns,)
        tiles = [tile(c, fill, p) for c in widths for fill in FILLS]
        return [t for t in tiles if t is not None]

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``, with rows of average length.

        A again: from L2, for every tile of columns after the first. B by every block: from L2 to shared memory.
        products: of each item that a slot has room for. steps: 0.1 us for each time that a warp waits for items.
        """
        panels = ceil_div(p.n, tile.columns)
        length = ceil_div(p.nnz, max(1, p.M))
        slots = min(tile.slots, power_of_two(max(1, ceil_div(length, GROUP))) * GROUP // tile.fill or 1)
        loads = max(1, ceil_div(length, slots * load_items(p.a_dtype)))
        tasks = max(1, ceil_div(p.M * slots, tile.slots))
        at_once = tile.tasks * max(1, device.processors * tile.resident // panels)
        again = (panels - 1) * cache_us(stored_bytes(p), device)
        copied = tile.resident * load_us(smem(tile.columns, p), device)
        multiplied = 2.0 * panels * tile.columns * p.M * slots * loads * load_items(p.a_dtype)
        products = product_us(multiplied, plain_arithmetic(p.a_dtype), device)
        steps = rounds(tasks, at_once) * ceil_div(loads, LOADS) * 0.1
        return 1.0, traffic_us(p, device), again, copied, products, steps

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build: every value type, both layouts of B, both index types."""
        return (
            "spmm_csr_vector<__nv_bfloat16, __nv_bfloat16, int, 1, 1024, 1, 2, false, true, true>",
            "spmm_csr_vector<__half, float, long long, 8, 512, 2, 2, true, false, true>",
            "spmm_csr_vector<__half, __half, int, 16, 512, 2, 2, false, true, false>",
            "spmm_csr_vector<float, float, int, 32, 1024, 1, 2, true, true, false>",
            "spmm_csr_vector<double, double, long long, 2, 512, 2, 2, false, true, true>",
        )

    def shape(self, p: Problem, tile: Tile) -> str:
        return f"{tile.columns}, {tile.threads}, {tile.resident}, {LOADS}"
