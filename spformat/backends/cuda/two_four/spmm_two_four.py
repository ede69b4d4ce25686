"""SpMM on 2:4 weights with mma.sp m16n8k32 (bf16/f16 in, f32 sums), sm_80 and later.  Kernel: spmm_two_four.cu."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div
from ....products.ideal import b_alignment, load_us, rounds, tile_us, traffic_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import TENSOR_16, Device, shared_limit
from ..runtime import jit, refusals
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands, Prepare
from .two_four_records import TwoFourRecords

NAME = "cuda.spmm_two_four"
MMA_TYPES = ("bfloat16", "float16")
DEPTH = 64
RECORD = 18 / 16
"""Bytes of stored A for each element of a dense 16-bit matrix: half the values, and two bits for each of them."""
TERMS = ("launch", "memory", "products", "loads", "tiles", "column-major C", "slower of the two")


@dataclass(frozen=True)
class Tile:
    """A block computes ``rows`` x ``cols`` of C, a warp ``warp_rows`` x ``warp_cols``; ``stages`` slabs."""

    rows: int
    cols: int
    warp_rows: int
    warp_cols: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * (self.rows // self.warp_rows) * (self.cols // self.warp_cols)

    @property
    def smem(self) -> int:
        """bytes: the pipeline, or the epilogue's staging where that is larger (16 x warp_cols float32 a warp)."""
        slab = self.rows * DEPTH + self.cols * DEPTH * 2 + self.rows * 8
        return max(self.stages * slab, self.threads // 32 * 16 * self.warp_cols * 4)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{DEPTH} stages {self.stages}"


TILES = (
    Tile(256, 128, 64, 64, 4),
    Tile(128, 128, 64, 64, 4),
    Tile(128, 128, 64, 64, 3),  # fits the 99 KB of sm_86, sm_89 and sm_120
    Tile(128, 64, 64, 32, 4),
    Tile(64, 64, 32, 32, 4),
)


def mma_quantities(p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
    """Ideal microseconds of each of TERMS, for a tile with ``rows`` and ``cols`` that a block computes.

    launch: 1. memory: A, B and C once. products: rounds of tiles, each as long as its steps along K need on the sparse
    tensor cores (twice the dense peak). loads: the same rounds at the rate of L2. tiles: C written by each round.
    column-major C: written element by element. The last: memory and products overlap.
    """
    turns = rounds(ceil_div(p.M, tile.rows) * ceil_div(p.n, tile.cols), device.processors)
    steps = ceil_div(p.K, DEPTH)
    products = turns * steps * tile_us(tile.rows, tile.cols, DEPTH, TENSOR_16, device) / 2
    loads = turns * steps * load_us(tile.rows * DEPTH * RECORD + tile.cols * DEPTH * 2, device)
    written = turns * load_us(tile.rows * tile.cols * itemsize(p.out_dtype), device)
    memory = traffic_us(p, device)
    turned = written if p.out_layout == COL else 0.0
    return 1.0, memory, products, loads, written, turned, max(memory, products)


def c_type(dtype: str) -> str:
    return VALUE_TYPES[dtype].cuda


def mma_reasons(p: Problem, sm: int) -> list[str]:
    """The reasons for which 2:4 tensor-core kernels that need ``sm`` refuse ``p``: the rules that they share."""
    return refusals.every(p, sm, MMA_TYPES) + reasons(
        (p.M >= 1 << 31 or p.K >= 1 << 24, f"M must be below 2^31 and K below 2^24, got {p.M} x {p.K}"),
    )


class SpmmTwoFour(CudaKernel):
    """C = A @ B for ``TwoFour`` A; any M, K, N, both layouts of B and C, any leading dimension."""

    name = NAME
    epilogue = True
    tiles = TILES
    takes = spmm_of("two-four")
    terms = TERMS

    def unsupported(self, p: Problem) -> list[str]:
        return mma_reasons(p, 80)

    def options(self, p: Problem) -> list[Tile]:
        """The tiles that shared memory has room for."""
        return [t for t in TILES if t.smem <= shared_limit(p.sm)]

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By tile, and apart for a B whose rows do not start on 16-byte boundaries."""
        return (str(tile),) if b_alignment(p) == 16 else (f"{tile}, unaligned",)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        return mma_quantities(p, tile, device)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "spmm_two_four<__nv_bfloat16, __nv_bfloat16, 256, 128, 64, 64, 4, false, false, true, false>",
            "spmm_two_four<__half, float, 128, 64, 64, 32, 4, true, true, true, true>",
            "spmm_two_four<__half, __half, 64, 64, 32, 32, 4, false, true, false, true>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        prepare, tile = launcher(TwoFourRecords().of(a, p), p)
        return Prepared(prepare, str(tile))


def launcher(weights: Any, p: Problem) -> tuple[Prepare, Tile]:
    """The launches of a plan, and the tile it uses. weights: those of ``TwoFourRecords``."""
    tile = KERNEL.best(p).tile
    kinds = p.b_layout == COL, p.out_layout == COL
    shape = f"{tile.rows}, {tile.cols}, {tile.warp_rows}, {tile.warp_cols}, {tile.stages}"
    row_tiles = -(-p.M // tile.rows)

    @functools.lru_cache(maxsize=2)
    def variant(aligned: bool) -> Launch:
        flags = ", ".join(str(f).lower() for f in (*kinds, aligned, p.epilogue))
        instance = f"spmm_two_four<{c_type(p.a_dtype)}, {c_type(p.out_dtype)}, {shape}, {flags}>"
        function = jit.load(
            "two_four/spmm_two_four.cu", instance, jit.architecture(p.sm or 80, ()), p.device_id, tile.smem
        )
        return Launch(function, "PiiPPiqqPff", (weights, p.M, p.K), tile.threads, tile.smem)

    variant(True)  # compile this variant now, and the other at the first call that needs it

    def prepare(o: Operands) -> tuple[Bound]:
        launch = variant(o.b % 16 == 0 and o.ldb % 8 == 0)
        grid = (row_tiles * -(-o.n // tile.cols), 1, 1)
        return (launch.bind(grid, o.stream, o.b, o.c, o.n, o.ldb, o.ldc, o.bias, o.alpha, o.beta),)

    return prepare, tile


KERNEL = SpmmTwoFour()
