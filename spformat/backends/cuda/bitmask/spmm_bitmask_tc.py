"""SpMM on Bitmask with tensor cores, bf16/f16 in, f32 sums, few columns of B.  Kernel: spmm_bitmask_tc.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, power_of_two
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem
from ....products.roofline import Device, device_of, shared_limit
from ..runtime import jit
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Launch, over_tiles
from ..runtime.record_products import MOST_PIECES, room_of
from . import bitmask_records
from .bitmask_records import expected_room
from .bitmask_slices import STEP, TERMS, bitmask_quantities, bitmask_reasons, bitmask_variant

SOURCE = "bitmask/spmm_bitmask_tc.cu"
FEW = 16
"""Columns up to which expected times have constants of their own."""


@dataclass(frozen=True)
class Tile:
    """What one block computes: 16 * ``fragments`` * ``parts`` rows x ``cols`` columns of C.

    K is cut into ``ranges``; each has ``parts`` warps, which share the rows. ``stages`` steps of a range are in shared
    memory or on their way there.
    """

    fragments: int
    cols: int
    parts: int
    ranges: int
    stages: int

    @property
    def tiles(self) -> int:
        """row tiles of 16"""
        return self.fragments * self.parts

    @property
    def rows(self) -> int:
        return 16 * self.tiles

    @property
    def warps(self) -> int:
        return self.parts * self.ranges

    def smem(self, room: int) -> int:
        """bytes: per range the stages of B and of records of ``room`` bytes, or its sums."""
        stage = self.tiles * room + STEP * self.cols * 2
        return self.ranges * max(self.stages * stage, self.rows * self.cols * 4)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}, {self.ranges}x{self.parts} warps, {self.stages} stages"


def choose(M: int, n: int, room: int, sms: int, smem: int) -> Tile:
    """Narrowest tile that holds N, rows such that whole rounds of blocks cover C, as many warps as registers allow."""
    cols = min(64, power_of_two(max(8, n)))
    tiles = max(1, ceil_div(M, 16))
    height = ceil_div(tiles, sms * ceil_div(tiles, sms * 8))
    halves = Tile(2, cols, 1, 8, 2)
    if height == 4 and cols <= 16 and 2 * halves.smem(room) <= smem:  # two blocks side by side: 5 to 13 % faster
        return halves
    parts = 1 if height <= 2 and cols <= 16 else height
    most = 16 if cols > 32 or parts == 1 else 21 if cols > 16 else 28
    stages = (2,) if parts < height else (3, 2)
    options = (
        Tile(height // parts, cols, parts, ranges, deep)
        for ranges in range(max(1, most // parts), 0, -1)
        for deep in stages
    )
    return next(t for t in options if t.smem(room) <= smem)


class SpmmBitmaskTensor(CudaKernel):
    """C = A @ B for 16-bit ``Bitmask`` A; tuned for N <= 64, correct for any M, K, N, layout and leading dimension."""

    name = "cuda.spmm_bitmask_tc"
    takes = spmm_of("bitmask")
    terms = TERMS

    def unsupported(self, p: Problem) -> list[str]:
        return bitmask_reasons(p, ("bfloat16", "float16"), (p.a_dtype, "float32")) + reasons(
            (bitmask_records.pieces_at_most(p) >= MOST_PIECES, f"records must stay below 64 GiB, got nnz = {p.nnz}")
        )

    def options(self, p: Problem) -> tuple[Tile]:
        """The tile for records of the expected length; ``prepared`` knows the longest one of its matrix."""
        return (choose(p.M, p.n, expected_room(p), device_of(p).processors, shared_limit(p.sm)),)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """As for the other kernels; with few columns constants of their own."""
        names = bitmask_variant(p)
        return (*(f"{name}, to {FEW} columns" for name in names if p.n <= FEW), *names)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        return bitmask_quantities(p, tile.rows, tile.cols, device)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "spmm_bitmask_tc<__nv_bfloat16, __nv_bfloat16, 16, 2, 1, 16, 2, false>",
            "spmm_bitmask_tc<__nv_bfloat16, float, 8, 1, 7, 4, 3, true>",
            "spmm_bitmask_tc<__half, __half, 64, 1, 2, 8, 2, false>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        room = room_of(bitmask_records.records(a, p).longest)
        tile = choose(p.M, p.n, room, device_of(p).processors, shared_limit(p.sm))
        return self.prepared_with(a, p, tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile; ``prepared`` chooses it."""
        records = bitmask_records.records(a, p)
        room = room_of(records.longest)
        types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"
        shape = f"{tile.cols}, {tile.fragments}, {tile.parts}, {tile.ranges}, {tile.stages}"
        share = ceil_div(records.steps, tile.ranges)
        fixed = (records.data, records.starts, p.M, p.K, records.steps, share, room)

        instance = f"spmm_bitmask_tc<{types}, {shape}, {str(p.b_layout == COL).lower()}>"
        function = jit.load(SOURCE, instance, jit.architecture(p.sm or 80, ()), p.device_id, tile.smem(room))
        launch = Launch(function, "PPqqiiiPPqqqq", fixed, 32 * tile.warps, tile.smem(room))
        prepare = over_tiles(launch, ceil_div(p.M, tile.rows), tile.cols, p.out_layout == COL)
        return Prepared(prepare, str(tile))
