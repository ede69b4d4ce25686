"""SpMM on 16-bit SR-BCRS for N <= 16: slots once from memory, B in shared memory.  Kernel: spmm_sr_bcrs_vector.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import cache_us, load_us, memory_us, operands_bytes, rounds, stored_bytes
from ....products.kernel import reasons, spmm_of
from ....products.problem import Problem
from ....products.roofline import Device, device_of, shared_limit
from ..runtime import refusals
from ..runtime.column_panels import PREFETCHED, by_layout, over_panels, single_us, smem
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.token_sums import room
from .mma_fragments import DEPTH, MMA_TYPES, PANEL, fragments_of, too_many, types

MAX_COLS = 16
WIDEST = 8
"""Most columns of B that are in shared memory at a time."""
AT_ONCE = 1024
"""Threads on a multiprocessor; half of them with 8 columns, whose sums take twice the registers."""


@dataclass(frozen=True)
class Tile:
    """A block keeps ``columns`` columns of B; ``resident`` of them run on a multiprocessor at once."""

    columns: int
    resident: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (AT_ONCE if self.columns < WIDEST else AT_ONCE // 2) // self.resident

    def __str__(self) -> str:
        return f"{self.columns} columns, {self.threads} threads"


def tile(columns: int, p: Problem) -> Tile | None:
    """The tile of so many columns: two blocks on a multiprocessor where B has room twice; None if it has none."""
    sums = AT_ONCE // 32 * PANEL * columns * 4
    fits = [b for b in (1, 2) if smem(columns, p) + sums // b <= room(shared_limit(p.sm), b)]
    return Tile(columns, fits[-1]) if fits else None


class SpmmSRBCRSVector(CudaKernel):
    """``out = alpha * A @ B + beta * out + bias`` for 16-bit ``SRBCRS`` A of any vector_length and stride, N <= 16.

    Bytes of A decide its time. Sums are float32, in a fixed order. K is limited by shared memory.
    """

    name = "cuda.spmm_sr_bcrs_vector"
    takes = spmm_of("sr-bcrs")
    archs = ("sm_80",)
    epilogue = True
    terms = ("launch", "memory", "A again", "B by every block", "single elements of B", "slots", "rounds")

    def unsupported(self, p: Problem) -> list[str]:
        fits = (room(shared_limit(p.sm), 1) - AT_ONCE // 32 * PANEL * 4) // 2  # bytes of a value
        return (
            refusals.every(p, 80, MMA_TYPES)
            + too_many(p)
            + reasons(
                (p.n > MAX_COLS, f"takes at most {MAX_COLS} columns, got up to {p.n}"),
                (fits < p.K, f"keeps columns of B in shared memory: K must be at most {fits:,}, got {p.K:,}"),
            )
        )

    def options(self, p: Problem) -> list[Tile]:
        """The most columns that fit, and half of them."""
        columns = power_of_two(min(max(p.n, 1), WIDEST))
        while columns > 1 and tile(columns, p) is None:
            columns //= 2
        tiles = [tile(c, p) for c in ((columns, columns // 2) if columns > 1 else (columns,))]
        return [t for t in tiles if t is not None]

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        A again: from L2, for every tile of columns after the first. B by every block: from L2 to shared memory; where
        its rows are no whole words, by single elements. slots: of the steps of an average panel, empty ones too, with
        their products, at the rate of L2. rounds: 0.1 us for each step that a warp takes.
        """
        panels, length = ceil_div(p.n, tile.columns), p.p["vector_length"]
        share = min(1.0, p.nnz / length / max(1, ceil_div(p.M, length) * p.K))
        used = DEPTH * (1 - (1 - share) ** max(1, PANEL // length))  # columns of a chunk that a panel uses
        steps = ceil_div(p.K, DEPTH) * max(1.0, used / 16)
        rows = ceil_div(p.M, PANEL)
        again = (panels - 1) * cache_us(stored_bytes(p), device)
        copied = tile.resident * load_us(smem(tile.columns, p), device)
        single = tile.resident * single_us(tile.columns, p, device)
        slots = cache_us(panels * rows * steps * 64 * 16 * (1 + tile.columns / 2), device)
        turns = rounds(rows * panels, device.processors * tile.resident) * steps / (tile.threads // 32)
        return 1.0, memory_us(stored_bytes(p) + operands_bytes(p), device), again, copied, single, slots, turns * 0.1

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "spmm_sr_bcrs_vector<__nv_bfloat16, __nv_bfloat16, 1, 512, 2, true, true>",
            "spmm_sr_bcrs_vector<__half, float, 2, 1024, 1, false, false>",
            "spmm_sr_bcrs_vector<__half, __half, 4, 512, 2, false, true>",
            "spmm_sr_bcrs_vector<__nv_bfloat16, float, 8, 256, 2, true, false>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        slots = fragments_of(a, p)
        pieces = int(slots.pieces.shape[0])
        fixed = (slots.first, slots.pieces, pieces, int(slots.nbytes <= PREFETCHED), p.M, p.K)
        dynamic = smem(tile.columns, p)
        source = "sr_bcrs/spmm_sr_bcrs_vector.cu"
        name = f"spmm_sr_bcrs_vector<{types(p)}, {tile.columns}, {tile.threads}, {tile.resident}"
        variant = by_layout(p, self.archs, source, name, "PPqiqi", fixed, tile.threads, dynamic)

        at_once = device_of(p).processors * tile.resident
        return Prepared(over_panels(p, tile.columns, at_once, slots.panels, variant), str(tile))
