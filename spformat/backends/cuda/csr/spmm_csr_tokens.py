"""SpMM on CSR for N <= 64 in one launch, any layouts: B in shared memory; sm_80 up.  Kernel: spmm_csr_tokens.cu."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import INDEX, cache_us, plain_arithmetic, product_us, rounds, traffic_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import Device, device_of, shared_limit
from ..runtime import jit
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import MAX_GRID_Y, Bound, Launch, Operands
from ..runtime.row_work import GROUP, BinTable, bin_table, row_gather_reasons, rows_by_length
from ..runtime.scratch import Scratch
from ..runtime.token_sums import room

MAX_COLS = 64
WIDEST = 32
"""Most columns of B that are in shared memory at a time."""
LOADS = 8
"""Items of a slot whose loads are in flight together."""
PREFETCHED = 32 << 20
"""Bytes of A up to which all of it is asked for in L2 at the start."""
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
    def blocks(self) -> int:
        """Blocks on a multiprocessor that the registers allow."""
        return 512 // self.threads

    def __str__(self) -> str:
        return f"{self.columns} columns, {self.threads} threads, fill {self.fill}"


def smem(columns: int, p: Problem) -> int:
    """bytes: ``columns`` columns of B."""
    return p.K * columns * itemsize(p.a_dtype)


def static_smem(columns: int, threads: int, p: Problem) -> int:
    """bytes: the sums of all warps, and flags."""
    return threads // 32 * columns * max(4, itemsize(p.a_dtype)) + 64


def tile(columns: int, threads: int, fill: int, p: Problem) -> Tile | None:
    """The tile of these extents; None if its columns of B do not fit shared memory."""
    needed = smem(columns, p) + static_smem(columns, threads, p)
    fits = [b for b in range(1, 512 // threads + 1) if needed <= room(shared_limit(p.sm), b)]
    lanes = max(1, columns * itemsize(p.a_dtype) // 16)
    return Tile(columns, lanes, threads, fill, fits[-1]) if fits else None


class SpmmCSRTokens(CudaKernel):
    """``out = alpha * A @ B + beta * out + bias`` for CSR and N <= 64. B and C are read and written where they lie.

    Sums are float32 (float64 for float64), in a fixed order. K is limited by shared memory: a block keeps all rows of
    some columns of B there.
    """

    name = "cuda.spmm_csr_tokens"
    takes = spmm_of("csr")
    archs = ("sm_80",)
    epilogue = True
    terms = ("launch", "memory", "B by every block", "items", "gathers", "products", "rounds")

    def unsupported(self, p: Problem) -> list[str]:
        fits = (room(shared_limit(p.sm), 1) - static_smem(1, 512, p)) // itemsize(p.a_dtype)
        return row_gather_reasons(p) + reasons(
            (p.n > MAX_COLS, f"takes at most {MAX_COLS} columns, got up to {p.n}"),
            (fits < p.K, f"keeps columns of B in shared memory: K must be at most {fits:,}, got {p.K:,}"),
        )

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

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, chosen: Tile) -> Prepared:
        """The launches of one tile."""
        rows, indices, data = rows_by_length(a, p), a.indices, a.data
        value, out = VALUE_TYPES[p.a_dtype], VALUE_TYPES[p.out_dtype]
        index = "long long" if indices.dtype.itemsize == 8 else "int"
        arch, dynamic = jit.architecture(p.sm or 80, self.archs), smem(chosen.columns, p)
        table = bin_table(rows, chosen.slots, chosen.fill)
        whole = int(data.size) if data.nbytes + indices.nbytes <= PREFETCHED else 0
        fixed = (table, rows.records, indices, data, whole, p.K, rows.cuts)
        out_size, sum_size = itemsize(p.out_dtype), 8 if p.a_dtype == "float64" else 4
        b_col, c_col, processors, cuts = p.b_layout == COL, p.out_layout == COL, device_of(p).processors, len(rows.cuts)
        sums, arrivals = Scratch(), Scratch(zeros=True)

        @functools.lru_cache(maxsize=2)
        def launch(by_columns: bool) -> Launch:
            flags = ", ".join(str(f).lower() for f in (bool(rows.pieces), by_columns, p.epilogue))
            shape = f"{chosen.columns}, {chosen.threads}, {chosen.blocks}, {LOADS}"
            name = f"spmm_csr_tokens<{value.cuda}, {out.cuda}, {index}, {shape}, {flags}>"
            function = jit.load("csr/spmm_csr_tokens.cu", name, arch, p.device_id, dynamic)
            return Launch(function, (BinTable, *"PPPqiPPPPPiqqqPdd"), fixed, chosen.threads, dynamic)

        launch(b_col or p.n == 1)  # compile this variant now, and the other at the first call that needs it

        def prepare(o: Operands) -> list[Bound]:
            by_columns = b_col or (o.n == 1 and o.ldb == 1)  # a contiguous vector is both
            c_row, c_col_step = (1, o.ldc) if c_col else (o.ldc, 1)
            calls = []
            for first in range(0, o.n, MAX_GRID_Y * chosen.columns):
                n = min(o.n - first, MAX_GRID_Y * chosen.columns)
                panels = ceil_div(n, chosen.columns)
                at_once = max(1, processors * chosen.resident // panels)
                sums_at = sums.buffer(o.stream, rows.pieces * n * sum_size) if cuts else 0
                arrivals_at = arrivals.buffer(o.stream, cuts * panels * 4) if cuts else 0
                b = o.b + first * value.numpy.itemsize * (o.ldb if by_columns else 1)
                c = o.c + first * out_size * c_col_step
                tail = sums_at, arrivals_at, b, c, n, o.ldb, c_row, c_col_step, o.bias, o.alpha, o.beta
                calls.append(launch(by_columns).bind((min(table.blocks, at_once), panels, 1), o.stream, *tail))
            return calls

        return Prepared(prepare, str(chosen), int(rows.records.nbytes))
