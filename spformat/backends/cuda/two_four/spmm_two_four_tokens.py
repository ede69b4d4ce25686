"""SpMM on 2:4 weights for N <= 64: streams the weights once; sm_80 up.  Kernel: spmm_two_four_tokens.cu."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from ....arrays.library import ceil_div
from ....products.ideal import b_alignment, load_us, memory_us, rounds
from ....products.kernel import spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import Device, device_of, shared_limit
from ..runtime import jit, token_sums
from ..runtime.few_columns import column_tiles
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Launch
from .spmm_two_four import DEPTH, RECORD, c_type, mma_reasons
from .two_four_records import WORDS, TwoFourRecords

MAX_COLS = 64
ROW_TILES, WARPS, SPLITS = (1, 2, 3, 4, 6, 8), (8, 4), (1, 2, 4, 8)
"""What a tile may have."""
MOST_SLOTS = 8
MOST_SUMS, REGISTERS = 160, 60
"""Sums of a thread at most, beyond which the compiler keeps some in memory; and registers that it needs beside them."""


@dataclass(frozen=True)
class Tile:
    """A block computes 16 * ``row_tiles`` rows; each warp has a ring of ``slots`` slabs of 64 columns of its own.

    ``blocks`` of them run on a multiprocessor at once; ``splits`` share the slabs of the same rows.
    """

    row_tiles: int
    column_tiles: int
    warps: int
    slots: int
    blocks: int
    splits: int

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles

    @property
    def cols(self) -> int:
        return 8 * self.column_tiles

    @property
    def smem(self) -> int:
        return self.warps * self.slots * slot_bytes(self.row_tiles, self.column_tiles)

    def __str__(self) -> str:
        return (
            f"{self.rows}x{self.cols}x{DEPTH}, {self.warps} warps"
            + (f", {self.blocks} blocks" if self.blocks > 1 else "")
            + (f", split {self.splits}" if self.splits > 1 else "")
        )


def slot_bytes(row_tiles: int, column_tiles: int) -> int:
    """bytes of a slab: weights of 16 rows each, and B."""
    return row_tiles * WORDS * 4 + column_tiles * 8 * DEPTH * 2


@functools.lru_cache(maxsize=256)
def tiles(M: int, K: int, column_tiles: int, device: Device, smem: int) -> tuple[Tile, ...]:
    """All tiles for a shape. ``smem``: bytes of shared memory that a block may have.

    A block keeps as many weights under way as fit. Where there are more blocks than multiprocessors, two run on each if
    they fit.
    """
    out, slabs = [], ceil_div(K, DEPTH)
    for row_tiles, warps, splits in itertools.product(ROW_TILES, WARPS, SPLITS):
        if splits > 1 and slabs < 2 * splits:
            continue
        sums, slot = row_tiles * column_tiles * 4, slot_bytes(row_tiles, column_tiles)
        several = ceil_div(M, 16 * row_tiles) * splits > device.processors
        for blocks in (2, 1) if several else (1,):
            slots = min(token_sums.room(smem, blocks) // (warps * slot), MOST_SLOTS)
            fits = slots >= 2 and slots * slot >= sums * 128
            if fits and sums <= MOST_SUMS and sums + REGISTERS <= 65536 // (32 * warps * blocks):
                out.append(Tile(row_tiles, column_tiles, warps, slots, blocks, splits))
                break
    return tuple(out)


class SpmmTwoFourTokens(CudaKernel):
    """C = A @ B for ``TwoFour`` A and N <= 64. Bytes, not arithmetic, set its speed: each weight is read once.

    Sums of the K ranges are added in a fixed order: inside a thread block cluster on sm_90 and later, else by the
    block that finishes last, through a workspace kept per stream.
    """

    name = "cuda.spmm_two_four_tokens"
    epilogue = True
    takes = spmm_of("two-four")
    terms = (
        "launch", "memory of A", "memory of B and C", "loads", "steps", "copies", "first copies", "sums", "clusters",
        "splits",
    )  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        return mma_reasons(p, 80) + [f"takes at most {MAX_COLS} columns, got up to {p.n}"] * (p.n > MAX_COLS)

    def options(self, p: Problem) -> tuple[Tile, ...]:
        return tiles(p.M, p.K, column_tiles(p, MAX_COLS), device_of(p), shared_limit(p.sm))

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By layout of B: a column-major B is read along K, and so is a vector in either layout."""
        if p.n == 1:
            return ("col-major B",)
        return (f"{p.b_layout}-major B" + ("" if b_alignment(p) == 16 else ", unaligned"),)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        One launch for every ``tile.cols`` columns. memory of A: read by every launch. loads: A and B of the blocks of a
        multiprocessor, from L2. steps: slabs that a warp takes one after the other, 10 ns each. copies: instructions
        for them, 1 ns each; first copies: before it waits for the first one. sums: of all warps of a multiprocessor.
        """
        launches, blocks = ceil_div(p.n, tile.cols), ceil_div(p.M, tile.rows)
        weights = launches * memory_us(p.M * p.K * RECORD, device)
        others = memory_us(p.K * p.n * 2 + p.M * p.n * itemsize(p.out_dtype), device)
        turns = launches * rounds(blocks, device.clusters(tile.splits, tile.blocks))
        slabs = ceil_div(ceil_div(p.K, DEPTH), tile.splits)
        steps = ceil_div(slabs, tile.warps)
        of_slab = tile.row_tiles * WORDS * 4 + min(p.n, tile.cols) * DEPTH * 2
        copies = ceil_div(tile.row_tiles * WORDS * 4, 512) + 2 * tile.column_tiles
        return (
            float(launches), weights, others, turns * load_us(tile.blocks * slabs * of_slab, device),
            turns * steps * 0.01, turns * steps * copies * 1e-3, turns * min(steps, tile.slots) * copies * 1e-3,
            turns * tile.blocks * tile.rows * tile.cols * tile.warps * 1e-5, launches * float(tile.splits > 1),
            launches * (tile.splits - 1.0),
        )  # fmt: skip

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = Problem.product("two-four", (), 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        wide = Problem.product("two-four", (), 1, 1, 0, 0, "float16", "float16", "float32", COL, COL, epilogue=True)
        return (
            _instance(Tile(2, 2, 8, 6, 1, 1), p, False, False),
            _instance(Tile(4, 8, 4, 2, 1, 2), wide, False, True),
            _instance(Tile(6, 5, 4, 4, 1, 1), wide, False, True),
            _instance(Tile(1, 1, 8, 8, 1, 4), p, True, False),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        weights, tile = TwoFourRecords().of(a, p), self.best(p).tile

        @functools.lru_cache(maxsize=2)
        def variant(b_col: bool) -> Launch:
            instance = _instance(tile, p, token_sums.clustered(p, tile), b_col)
            arch = jit.architecture(p.sm or 80, ())
            function = jit.load("two_four/spmm_two_four_tokens.cu", instance, arch, p.device_id, tile.smem)
            return Launch(
                function, "Pii" + token_sums.TAIL, (weights, p.M, p.K), tile.warps * 32, tile.smem, waits=True
            )

        prepare, kept = token_sums.launches(p, tile, variant)
        return Prepared(prepare, str(tile), kept)


def _instance(tile: Tile, p: Problem, cluster: bool, b_col: bool) -> str:
    flags = ", ".join(str(f).lower() for f in (cluster, b_col, p.out_layout == COL, p.epilogue))
    shape = f"{tile.row_tiles}, {tile.column_tiles}, {tile.warps}, {tile.slots}, {tile.blocks}, {tile.splits}"
    return f"spmm_two_four_tokens<{c_type(p.a_dtype)}, {c_type(p.out_dtype)}, {shape}, {flags}>"
