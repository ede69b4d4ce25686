"""SpMM on CSR, columns of B in shared memory and C written along its lines; sm_80 up.  Kernel: spmm_csr_panel.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div
from ....products.ideal import cache_us, load_us, plain_arithmetic, product_us, rounds, stored_bytes, traffic_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import Problem, itemsize
from ....products.roofline import Device, device_of, shared_limit
from ..runtime.c_types import index_type
from ..runtime.column_panels import PREFETCHED, WORD, by_layout, over_panels, single_us, smem
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import restored
from ..runtime.row_work import row_gather_reasons
from ..runtime.token_sums import room
from .csr_records import instead_of_arrays

WARP = 32
AT_ONCE = 1024
"""Threads on a multiprocessor: with more they had fewer registers than the items take that are on their way."""
WORDS = (1, 2)
"""Pieces of 16 bytes in a row of B that a block keeps; with four, blocks are too few."""
LOGS, GROUPS = (1, 2, 3), (16, 8)
"""Of the slots of a row of A, and neighbouring rows of a warp: more rows leave too few warps with work."""
LOADS, MOST_LOADS = 2, 6
"""Loads of values that a slot has in flight, and how many it has altogether where a row could get more slots."""


@dataclass(frozen=True)
class Tile:
    """A block keeps ``columns`` columns of B; ``resident`` of them run on a multiprocessor at once."""

    columns: int
    lanes: int
    log: int
    """A row of A gets 2^log slots of ``lanes`` lanes."""
    group: int
    """Neighbouring rows of A that a warp takes."""
    resident: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return AT_ONCE // self.resident

    @property
    def tasks(self) -> int:
        """Warps of a block."""
        return self.threads // WARP

    @property
    def slots(self) -> int:
        """Slots of a row of A."""
        return 1 << self.log

    def __str__(self) -> str:
        return f"{self.columns} columns, {self.threads} threads, {self.slots} slots, {self.group} rows"


def load_items(dtype: str) -> int:
    """Neighbouring items that a lane loads at a time."""
    return 2 if itemsize(dtype) == 8 else 4


def loads_of_a_row(log: int, p: Problem) -> int:
    """Loads of values of each of 2^log slots. A row is as long as that of an average item: neighbours wait for it."""
    length, each = max(1, ceil_div(p.nnz, max(1, p.M)), p.row_length - 1), load_items(p.a_dtype)
    return ceil_div(length + each - 1, each << log)


def shared_bytes(columns: int, group: int, threads: int, p: Problem) -> int:
    """bytes of a block: columns of B, and the sums of a group for each warp."""
    sum_size = 8 if p.a_dtype == "float64" else 4
    return smem(columns, p.changed(K=p.K + 1)) + threads // WARP * columns * (group + 1) * sum_size


def tile(columns: int, log: int, group: int, p: Problem) -> Tile | None:
    """The tile of these extents; None if its columns of B do not fit shared memory."""
    limit = shared_limit(p.sm)
    fits = [b for b in (1, 2, 4) if shared_bytes(columns, group, AT_ONCE // b, p) <= room(limit, b)]
    return Tile(columns, max(1, columns * itemsize(p.a_dtype) // WORD), log, group, fits[-1]) if fits else None


class SpmmCSRPanel(CudaKernel):
    """``out = alpha * A @ B + beta * out + bias`` for CSR. B and C are read and written where they lie.

    Sums are float32 (float64 for float64), in a fixed order. K is limited by shared memory: a block keeps all rows of
    some columns of B there. Rows of A should be of similar lengths: neighbours are multiplied together.
    """

    name = "cuda.spmm_csr_panel"
    takes = spmm_of("csr")
    archs = ("sm_80",)
    epilogue = True
    terms = ("launch", "memory", "A again", "B by every block", "single elements of B", "products", "steps")

    def unsupported(self, p: Problem) -> list[str]:
        columns = WORD // itemsize(p.a_dtype)
        sums = shared_bytes(columns, GROUPS[-1], AT_ONCE, p.changed(K=0))
        fits = (room(shared_limit(p.sm), 1) - sums) // WORD
        return row_gather_reasons(p) + reasons(
            (2**31 - WARP <= p.M < 2**32, f"counts rows with 31 bits: M must be below {2**31 - WARP}, got {p.M}"),
            (p.nnz >= 2**31, f"numbers items with 31 bits: nnz must be below 2**31, got {p.nnz}"),
            (fits < p.K, f"keeps columns of B in shared memory: K must be at most {fits:,}, got {p.K:,}"),
        )

    def only_by_name(self, p: Problem) -> str:
        return instead_of_arrays(p)

    def options(self, p: Problem) -> list[Tile]:
        """Tiles with one and two pieces of 16 bytes in a row of B, a pass of whole rows, and not too many slots."""
        out = []
        for words in WORDS:
            columns = words * WORD // itemsize(p.a_dtype)
            if words > 1 and columns >= 2 * p.n:
                continue
            for log in LOGS:
                if log < LOGS[-1] and loads_of_a_row(log, p) > MOST_LOADS:
                    continue
                rows = WARP // words >> log
                some = [tile(columns, log, group, p) for group in GROUPS if rows <= group and words << log <= 16]
                out += [t for t in some if t is not None]
        return out

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        A again: from L2, for every tile of columns after the first. B by every block: from L2 to shared memory, with
        single elements where its rows are no whole words. products: of each item that a slot has room for. steps: 0.1
        us for each time that a warp waits for items.
        """
        panels, size = ceil_div(p.n, tile.columns), itemsize(p.a_dtype)
        loads, each = loads_of_a_row(tile.log, p), load_items(p.a_dtype) * tile.slots
        groups, at_once = ceil_div(p.M, tile.group), device.processors * tile.resident
        blocks = max(1, min(ceil_div(groups, tile.tasks), at_once // panels))
        turns = rounds(blocks * panels, at_once)
        again = (panels - 1) * cache_us(stored_bytes(p), device)
        copied = turns * tile.resident * load_us(smem(tile.columns, p), device)
        single = turns * tile.resident * single_us(tile.columns, p, device)
        multiplied = 2.0 * panels * tile.columns * p.M * loads * each
        products = product_us(multiplied, plain_arithmetic(p.a_dtype), device)
        passes = tile.group * tile.slots * tile.columns * size // (WARP * WORD)
        steps = turns * rounds(groups, blocks * tile.tasks) * passes * ceil_div(loads, LOADS) * 0.1
        return 1.0, traffic_us(p, device), again, copied, single, products, steps

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build: every value type, both layouts of B, both types of indptr."""
        return (
            "spmm_csr_panel<__nv_bfloat16, __nv_bfloat16, int, 8, 512, 2, 2, 16, true, false>",
            "spmm_csr_panel<__half, float, long long, 16, 512, 2, 1, 16, false, true>",
            "spmm_csr_panel<__half, __half, int, 16, 1024, 1, 3, 8, true, true>",
            "spmm_csr_panel<float, float, int, 4, 256, 4, 1, 16, true, false>",
            "spmm_csr_panel<double, double, long long, 2, 512, 2, 2, 8, false, true>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        stored = restored(a)
        indptr, indices, data = stored.indptr, stored.indices, stored.data
        types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}, {index_type(indptr)}"
        shape = f"{tile.columns}, {tile.threads}, {tile.resident}, {tile.log}, {tile.group}"
        dynamic = shared_bytes(tile.columns, tile.group, tile.threads, p)
        prefetch = int(data.nbytes + indices.nbytes <= PREFETCHED)
        fixed = (indptr, indices, data, int(data.size), prefetch, p.M, p.K)
        source, name = "csr/spmm_csr_panel.cu", f"spmm_csr_panel<{types}, {shape}"
        variant = by_layout(p, self.archs, source, name, "PPPqiii", fixed, tile.threads, dynamic)
        at_once = device_of(p).processors * tile.resident
        blocks = ceil_div(ceil_div(p.M, tile.group), tile.tasks)
        return Prepared(over_panels(p, tile.columns, at_once, blocks, variant), str(tile))
