"""SpMM on 2:4 weights for N <= 64: streams the weights once; sm_80 up.  Kernel: spmm_two_four_tokens.cu."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import b_alignment, cache_us, memory_us, rounds, tile_us
from ....products.kernel import spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import TENSOR_16, Device, device_of, shared_limit
from ..runtime import jit, token_sums
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Launch
from .spmm_two_four import DEPTH, RECORD, c_type, mma_reasons
from .two_four_records import WORDS, TwoFourRecords

MAX_COLS = 64


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
        return f"{self.rows}x{self.cols}x{DEPTH} split {self.splits}"


def slot_bytes(row_tiles: int, column_tiles: int) -> int:
    """bytes of a slab: weights of 16 rows each, and B."""
    return row_tiles * WORDS * 4 + column_tiles * 8 * DEPTH * 2


def splits(tiles: int, K: int, device: Device) -> int:
    """Ranges that K is cut into: a power of two that gives most multiprocessors a block; at least 16 slabs in a range.

    One less where so many clusters would not fit at the same time.
    """
    slabs, count = ceil_div(K, DEPTH), 1
    while count < 8 and tiles * count * 4 < device.processors * 3 and slabs >= 32 * count:
        count *= 2
    return count - (count > 2 and bool(device.most_clusters) and tiles > device.clusters(count))


def choose(M: int, n: int, K: int, device: Device, smem: int) -> Tile:
    """Rows such that one round of blocks covers C, or, where that takes too many, two blocks a multiprocessor.

    ``smem``: bytes a block may have. The weights decide the time; a block keeps as many of them under way as fit.
    """
    column_tiles = power_of_two(min(max(n, 8), MAX_COLS)) // 8
    tiles, most = max(1, ceil_div(M, 16)), 8 if column_tiles < 8 else 4
    rounds = ceil_div(tiles, device.processors * most)
    row_tiles = ceil_div(tiles, device.processors * rounds)
    blocks = min(rounds, 2)
    warps = 8 if row_tiles <= 3 else 4
    room = token_sums.room(smem, blocks)
    slots = min(room // (warps * slot_bytes(row_tiles, column_tiles)), 8)
    if slots < 2:
        return Tile(row_tiles, column_tiles, warps // 2, 2, 1, splits(ceil_div(tiles, row_tiles), K, device))
    return Tile(row_tiles, column_tiles, warps, slots, blocks, splits(ceil_div(tiles, row_tiles), K, device))


class SpmmTwoFourTokens(CudaKernel):
    """C = A @ B for ``TwoFour`` A and N <= 64. Bytes, not arithmetic, set its speed: each weight is read once.

    Sums of the K ranges are added in a fixed order: inside a thread block cluster on sm_90 and later, else by the
    block that finishes last, through a workspace kept per stream.
    """

    name = "cuda.spmm_two_four_tokens"
    epilogue = True
    takes = spmm_of("two-four")
    terms = ("launch", "memory of A", "memory of B and C", "B by every block", "products", "steps", "splits")

    def unsupported(self, p: Problem) -> list[str]:
        return mma_reasons(p, 80) + [f"takes at most {MAX_COLS} columns, got up to {p.n}"] * (p.n > MAX_COLS)

    def options(self, p: Problem) -> tuple[Tile]:
        """The one tile that suits the shape."""
        return (choose(p.M, p.n, p.K, device_of(p), shared_limit(p.sm)),)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By layout of B: a column-major B is read along K, and so is a vector in either layout."""
        if p.n == 1:
            return ("col-major B",)
        return (f"{p.b_layout}-major B" + ("" if b_alignment(p) == 16 else ", unaligned"),)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        One launch for every ``tile.cols`` columns. memory of A: read by every launch. B by every block: B from L2 once
        for each tile of rows. products: on the tensor cores. steps: a block's steps along K, 10 ns each. splits: parts
        of K that are added up.
        """
        launches, blocks = ceil_div(p.n, tile.cols), ceil_div(p.M, tile.rows)
        weights = launches * memory_us(p.M * p.K * RECORD, device)
        others = memory_us(p.K * p.n * 2 + p.M * p.n * itemsize(p.out_dtype), device)
        shared = cache_us(launches * blocks * p.K * tile.cols * 2, device)
        turns = launches * rounds(blocks, device.clusters(tile.splits, tile.blocks))
        steps = turns * ceil_div(ceil_div(p.K, DEPTH), tile.splits * tile.warps) * 0.01
        products = turns * tile_us(tile.rows, tile.cols, p.K / tile.splits, TENSOR_16, device)
        return float(launches), weights, others, shared, products, steps, launches * (tile.splits - 1) * 0.5

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = Problem.product("two-four", (), 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        wide = Problem.product("two-four", (), 1, 1, 0, 0, "float16", "float16", "float32", COL, COL, epilogue=True)
        return (
            _instance(Tile(2, 2, 8, 6, 1, 1), p, False, False),
            _instance(Tile(7, 8, 4, 2, 1, 2), wide, False, True),
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
