"""SpMM on CSR for N <= 64 in one launch, any layouts: B in shared memory; sm_80 up.  Kernel: spmm_csr_tokens.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import INDEX, cache_us, plain_arithmetic, product_us, rounds, traffic_us
from ....products.problem import Problem, itemsize
from ....products.roofline import Device, shared_limit
from ..runtime.row_work import GROUP
from ..runtime.token_sums import room
from .column_panels import ColumnPanels, smem

MAX_COLS = 64
WIDEST = 32
"""Most columns of B that are in shared memory at a time."""
LOADS = 8
"""Items of a slot whose loads are in flight together."""
SHAPES = ((256, 8), (256, 16), (512, 8), (512, 16), (512, 32))
"""Threads of a block, and items that a slot gets; tiles are compared for each."""


@dataclass(frozen=True)
class Tile:
    """A block keeps ``columns`` columns of B; ``resident`` of them run on a multiprocessor at once."""

    columns: int
    lanes: int
    threads: int
    fill: int
    """Items a slot of ``lanes`` lanes should get."""
    resident: int

    @property
    def slots(self) -> int:
        return self.threads // self.lanes

    @property
    def tasks(self) -> int:
        """Tasks of a block at a time: its slots share one."""
        return 1

    @property
    def blocks(self) -> int:
        """Blocks on a multiprocessor that the registers allow."""
        return 512 // self.threads

    def __str__(self) -> str:
        return f"{self.columns} columns, {self.threads} threads, fill {self.fill}"


def static_smem(columns: int, threads: int, p: Problem) -> int:
    """bytes: the sums of all warps, and flags."""
    return threads // 32 * columns * max(4, itemsize(p.a_dtype)) + 64


def tile(columns: int, threads: int, fill: int, p: Problem) -> Tile | None:
    """The tile of these extents; None if its columns of B do not fit shared memory."""
    needed = smem(columns, p) + static_smem(columns, threads, p)
    fits = [b for b in range(1, 512 // threads + 1) if needed <= room(shared_limit(p.sm), b)]
    lanes = max(1, columns * itemsize(p.a_dtype) // 16)
    return Tile(columns, lanes, threads, fill, fits[-1]) if fits else None


class SpmmCSRTokens(ColumnPanels):
    """Slots of a block take the items of a row one by one, so that a warp loads neighbouring items together."""

    name = "cuda.spmm_csr_tokens"
    source = "csr/spmm_csr_tokens.cu"
    max_cols = MAX_COLS
    reserved = 512 // 32 * 8 + 64
    terms = ("launch", "memory", "B by every block", "items", "gathers", "products", "rounds")

    def options(self, p: Problem) -> list[Tile]:
        """The most columns that fit, and half of them, with every shape."""
        columns = power_of_two(min(max(p.n, 1), WIDEST, 128 // itemsize(p.a_dtype)))
        while columns > 1 and tile(columns, 512, 8, p) is None:
            columns //= 2
        widths = (columns, columns // 2) if columns > 1 else (columns,)
        tiles = [tile(c, threads, fill, p) for c in widths for threads, fill in SHAPES]
        return [t for t in tiles if t is not None]

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        B by every block: from L2 to shared memory. items: values and indices from L2, once for each tile of columns.
        gathers: a row of B from shared memory for each item, at the rate of L2. products: with columns past the last.
        rounds: of tasks of rows of average length, 0.01 us for each item of a slot and for 16 more.
        """
        size, panels = itemsize(p.a_dtype), ceil_div(p.n, tile.columns)
        per_row = power_of_two(max(1, ceil_div(ceil_div(p.nnz, max(1, p.M)), GROUP))) * GROUP
        tasks = max(1, ceil_div(p.M * max(1, per_row // tile.fill), tile.slots))
        at_once = max(1, device.processors * tile.resident // panels)
        copied = cache_us(panels * min(tasks, at_once) * smem(tile.columns, p), device)
        items = cache_us(panels * p.nnz * (size + INDEX), device)
        gathers = cache_us(panels * p.nnz * max(4, tile.columns * size), device)
        products = product_us(2.0 * p.nnz * panels * tile.columns, plain_arithmetic(p.a_dtype), device)
        turns = rounds(tasks, at_once) * (min(tile.fill, per_row) + 16) * 0.01
        return 1.0, traffic_us(p, device), copied, items, gathers, products, turns

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build: every value type, both layouts of B, both index types."""
        rest = "512, 1, 8"
        return (
            f"spmm_csr_tokens<__nv_bfloat16, __nv_bfloat16, int, 16, {rest}, false, true, true>",
            f"spmm_csr_tokens<__half, float, long long, 32, {rest}, true, false, true>",
            "spmm_csr_tokens<__half, __half, int, 1, 256, 2, 8, false, true, false>",
            "spmm_csr_tokens<float, float, int, 16, 256, 2, 8, true, true, false>",
            f"spmm_csr_tokens<double, double, int, 16, {rest}, false, true, true>",
        )

    def shape(self, p: Problem, tile: Tile) -> str:
        return f"{tile.columns}, {tile.threads}, {tile.blocks}, {LOADS}"
