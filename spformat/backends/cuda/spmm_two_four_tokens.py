"""SpMM on 2:4 weights for N <= 64: streams the weights once, splits K; sm_80 up.  Kernel: spmm_two_four_tokens.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...dtypes import VALUE_TYPES
from ...problem import COL, Plan, Problem
from . import jit
from .launch import Launch, Operands, device_plan
from .spmm_two_four import DEPTH, c_type, mma_reasons
from .two_four_records import TwoFourRecords

MAX_COLS = 64
CLUSTER_SM = 90  # thread block clusters add up the splits from here on


@dataclass(frozen=True)
class Tile:
    """A block computes 16 * ``row_tiles`` * ``warps`` rows; ``stages`` stages of ``step`` slabs of 64 columns."""

    row_tiles: int
    warps: int
    step: int
    stages: int

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.warps

    def smem(self, column_tiles: int) -> int:
        """bytes: per slab 1152 of weights for 16 rows and 128 for each column of B."""
        return self.stages * self.step * (self.warps * self.row_tiles * 1152 + column_tiles * 8 * DEPTH * 2)


TILES = {1: Tile(2, 4, 2, 4), 2: Tile(2, 4, 2, 4), 4: Tile(2, 8, 1, 4), 8: Tile(2, 8, 1, 4)}
"""By number of 8-column tiles."""


def splits(tiles: int, K: int, sms: int) -> int:
    """Ranges that K is cut into: the fewest that give most multiprocessors a block; at least 4 slabs in a range."""
    slabs, count = -(-K // DEPTH), 1
    while count < 8 and tiles * count * 10 < sms * 9 and slabs >= 8 * count:
        count *= 2
    return count


def _column_bytes(layout: str, dtype: str, ld: int) -> int:
    return (ld if layout == COL else 1) * VALUE_TYPES[dtype].numpy.itemsize


class SpmmTwoFourTokens:
    """C = A @ B for ``TwoFour`` A and N <= 64. Bytes, not arithmetic, set its speed: each weight is read once.

    Sums of the K ranges are added in a fixed order: inside a thread block cluster on sm_90 and later, else by the
    block that finishes last, through a workspace kept per stream.
    """

    name = "cuda.spmm_two_four_tokens"
    formats = frozenset({"two-four"})

    def unsupported(self, p: Problem) -> list[str]:
        return mma_reasons(p, 80) + [f"takes at most {MAX_COLS} columns, got up to {p.n}"] * (p.n > MAX_COLS)

    def rank(self, p: Problem) -> int:
        """First for up to 32 columns; on Hopper the wgmma kernel takes 64 in less time."""
        return -1 if p.n <= 32 else 0

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "spmm_two_four_tokens<__nv_bfloat16, __nv_bfloat16, 2, 2, 4, 2, 4, 8, false, false, false>",
            "spmm_two_four_tokens<__half, float, 2, 8, 8, 1, 4, 2, false, true, true>",
            "spmm_two_four_tokens<__half, __half, 2, 1, 4, 2, 4, 1, false, true, false>",
        )

    def plan(self, a: Any, p: Problem) -> Plan:
        import cupy

        weights = TwoFourRecords().of(a, p)
        column_tiles = max(1, min(p.n, MAX_COLS) // 8)
        tile, cols = TILES[column_tiles], column_tiles * 8
        tiles = -(-p.M // tile.rows)
        limits = cupy.cuda.Device(p.device_id).attributes
        while tile.smem(column_tiles) > limits["MaxSharedMemoryPerBlockOptin"]:
            tile = replace(tile, stages=tile.stages - 1)
        parts = splits(tiles, p.K, limits["MultiProcessorCount"])
        cluster = (p.sm or 0) >= CLUSTER_SM
        smem = tile.smem(column_tiles)
        flags = ", ".join(str(f).lower() for f in (cluster, p.b_layout == COL, p.out_layout == COL))
        shape = f"{tile.row_tiles}, {column_tiles}, {tile.warps}, {tile.step}, {tile.stages}, {parts}"
        instance = f"spmm_two_four_tokens<{c_type(p.a_dtype)}, {c_type(p.out_dtype)}, {shape}, {flags}>"
        function = jit.load("spmm_two_four_tokens.cu", instance, jit.architecture(p.sm or 80, ()), p.device_id, smem)
        launch = Launch(function, "PiiPPiqqPP", (weights, p.M, p.K), tile.warps * 32, smem)
        shared = parts > 1 and not cluster
        workspaces: dict[int, tuple[Any, Any]] = {}  # per stream: launches of one stream follow each other

        def workspace(stream: int) -> tuple[Any, Any]:
            if stream not in workspaces:
                workspaces[stream] = (
                    cupy.empty(tiles * parts * tile.rows * cols, "float32"),
                    cupy.zeros(tiles, "uint32"),
                )
            return workspaces[stream]

        def run(o: Operands) -> None:
            partials, counters = (x.data.ptr for x in workspace(o.stream)) if shared else (0, 0)
            for first in range(0, o.n, cols):
                b = o.b + first * _column_bytes(p.b_layout, p.b_dtype, o.ldb)
                c = o.c + first * _column_bytes(p.out_layout, p.out_dtype, o.ldc)
                launch((tiles, parts, 1), o.stream, b, c, min(cols, o.n - first), o.ldb, o.ldc, partials, counters)

        owned = int(weights.nbytes) + (tiles * parts * tile.rows * cols * 4 + tiles * 4 if shared else 0)
        return device_plan(self.name, p, run, f"{tile.rows}x{cols}x{DEPTH} split {parts}", owned)
