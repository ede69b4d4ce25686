"""SpMM on 2:4 weights with wgmma.sp in tiles as wide as N needs, whole or in equal shares of the work; sm_90a only.

Kernel: spmm_two_four_shares_sm90a.cu. docs/decisions/0029-even-shares.md, 0055-parts-of-k.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, round_up
from ....products.ideal import load_us, product_us, tile_us, traffic_us, unaligned_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import TENSOR_16, Device, device_of
from ..runtime import jit, row_tiles, tensor_map
from ..runtime.kernel import CopyEngineKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands, Prepare
from ..runtime.occupancy import max_clusters
from ..runtime.scratch import Scratch
from .spmm_two_four import DEPTH, KERNEL, RECORD, c_type, launcher, mma_reasons
from .two_four_records import TwoFourRecords

SOURCE, ARCH = "two_four/spmm_two_four_shares_sm90a.cu", "sm_90a"
ROWS, WORKERS = 128, 256
"""Rows of a tile; threads that multiply. The same in the kernel."""
LEAST_STEPS = 8
"""Steps along K that a share has at least where there are fewer tiles than multiprocessors."""
LARGE_B = 32 << 20
"""Bytes of B above which tiles are taken whole."""


@dataclass(frozen=True)
class Tile:
    """Tiles of 128 x ``cols``; ``even``: clusters share out the last rounds of them by steps along K.

    A cluster is ``cluster`` blocks, 1 or 2, with neighbouring tiles of rows of the same columns: each loads its part of
    every slab of B for both. ``parts`` of K of one tile go to the blocks of a cluster, which add up their sums.
    """

    cols: int
    even: bool
    cluster: int = 1
    parts: int = 1

    @property
    def span(self) -> int:
        """Slabs of weights that a warp loads ahead: what registers have room for beside the sums."""
        return (
            7 if self.cols <= 64 else 6 if self.cols <= 96 else 5 if self.cols <= 128 else 4 if self.cols <= 208 else 3
        )

    @property
    def stages(self) -> int:
        """Slabs of B in flight. Shared memory leaves room for L1, through which the weights come."""
        return min(12, (160 << 10) // self.slab)

    @property
    def slab(self) -> int:
        """Bytes of 64 rows of B at most: a row-major one comes 64 columns at a time."""
        return DEPTH * 2 * round_up(self.cols, 64)

    @property
    def smem(self) -> int:
        """bytes: slabs of B, or the sums of parts that take their place; two slots of 64 x 64 values of C for each
        warpgroup; room to align to 1024."""
        sums = ceil_div(self.cols // 16, self.parts) * self.parts * ROWS * 16 * 4 if self.parts > 1 else 0
        return max(self.stages * self.slab, sums) + WORKERS // 128 * 2 * 8192 + 1024

    def units(self, M: int, n: int) -> int:
        """Units of work of a product: ``cluster`` tiles of rows beside each other."""
        return ceil_div(M, ROWS * self.cluster) * ceil_div(n, self.cols)

    def clusters(self, units: int, steps: int, resident: int) -> int:
        """Clusters for so many units of so many steps, where ``resident`` run at once: each has work."""
        if self.parts > 1:
            return units
        if not self.even or units >= resident:
            return min(units, resident)
        return min(resident, max(units, units * steps // LEAST_STEPS))

    def __str__(self) -> str:
        how = f"parts {self.parts}" if self.parts > 1 else "even" if self.even else "whole"
        return f"{ROWS}x{self.cols}x{DEPTH} {how}" + ", pairs" * (self.cluster > 1)


TILES = tuple(Tile(cols, even, n) for n in (1, 2) for even in (False, True) for cols in range(16, 257, 16))
WHOLE = tuple(t for t in TILES if not t.even)
LEAST_OF_PART, MOST_PARTS = 4, 8
"""Steps along K that a part has at least, and blocks of a cluster."""
NARROW = 48
"""Columns of C up to which parts of K never were the fastest."""


def in_parts(p: Problem, cols: int) -> list[Tile]:
    """The tile ``cols`` wide in as many parts of K as there are blocks for, all tiles at one time; none if that is one.

    For column-major operands: strips of 16 columns make short runs in the rows of C.
    """
    device, steps = device_of(p), ceil_div(p.K, DEPTH)
    if p.n <= NARROW or p.b_layout != COL or p.out_layout != COL:
        return []
    units = Tile(cols, False).units(p.M, p.n)
    fits = (n for n in range(MOST_PARTS, 1, -1) if device.clusters(n) >= units and steps >= n * LEAST_OF_PART)
    return [Tile(cols, False, parts=n) for n in (*fits,)[:1]]


class SpmmTwoFourShares(CopyEngineKernel):
    """C = A @ B for ``TwoFour`` A on Hopper, for N and numbers of tiles that fit large tiles badly.

    N is padded by at most 15 columns a tile. The same bits every run. With equal shares the plan owns a workspace for
    each stream, of at most 1024 * multiprocessors * columns of a tile bytes. TMA needs B on a 16-byte boundary with a
    pitch of a multiple of 16 bytes; a call with another B runs the sm_80 kernel.
    """

    name = "cuda.spmm_two_four_shares_sm90a"
    takes = spmm_of("two-four")
    otherwise = KERNEL
    epilogue = True
    tiles = TILES
    terms = (
        "launch", "steps", "memory", "products", "loads", "intake", "slower of products and loads",
        "slower of memory and products", "products of all", "handed over", "sums", "row-major C", "column-major C",
        "unaligned C",
    )  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        return mma_reasons(p, 80) + reasons(
            (p.sm != 90, f"needs sm_90 (wgmma), got {p.sm_name}"),
            (p.K == 0, "K is 0: no tensor map of an empty B"),
            (p.b_layout == COL and p.K % 8, f"TMA needs column-major B with K a multiple of 8, got K = {p.K}"),
        )

    def options(self, p: Problem) -> tuple[Tile, ...]:
        """All tiles, or those that are taken whole.

        With equal shares neighbouring tiles of rows are at different places along K at a time, so that B comes from
        memory once for each of them if L2 has no room for it beside the weights that pass. Measured: 1.2 to 1.9 times
        the time of whole tiles with 40 to 70 MB of B.
        """
        if p.K * p.n * itemsize(p.b_dtype) > LARGE_B:
            return WHOLE
        most = round_up(max(p.n, 1), 16)
        parts = (t for cols in range(16, min(most, 256) + 1, 16) for t in in_parts(p, cols))
        return (*TILES, *parts)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By what the blocks of a cluster do."""
        return ("parts" if tile.parts > 1 else "pairs" if tile.cluster > 1 else "single blocks",)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of the block with the most work.

        launch: constant. steps: their number, in microseconds. products, loads (weights and B from L2; a cluster
        loads B once), intake (what arrives in a multiprocessor, B in each block of a cluster): of these steps.
        products of all: of all tiles at the rate of the device, as multiprocessors without work leave the others more.
        handed over: constant where a tile has several blocks. sums: handed over and added once for each further one;
        of parts of K, written and read once.
        unaligned C: C once more, where its lines start anywhere.
        """
        units, steps = tile.units(p.M, p.n), ceil_div(p.K, DEPTH)
        clusters = tile.clusters(units, steps, max(1, device.processors // tile.cluster))
        turns = ceil_div(units, clusters)
        longest, handed, sums = turns * steps, 0.0, 0.0
        if tile.even and units % clusters:
            longest = ceil_div(units * steps, clusters)
            others = ceil_div(steps, longest)  # clusters that have a part of a tile whose beginning is another's
            handed, sums = 1.0, (1 + others) * load_us(ROWS * tile.cols * 4, device)
        if tile.parts > 1:
            longest = ceil_div(steps, tile.parts)
            handed, sums = 1.0, 2 * load_us(ROWS * tile.cols * 4, device)
        products = longest * tile_us(ROWS, tile.cols, DEPTH, TENSOR_16, device) / 2
        loads = longest * load_us(ROWS * DEPTH * RECORD + tile.cols * DEPTH * 2 / tile.cluster, device)
        intake = longest * load_us(ROWS * DEPTH * RECORD + tile.cols * DEPTH * 2, device)
        written = turns * load_us(ROWS * tile.cols * itemsize(p.out_dtype), device)
        by_layout = (0.0, written) if p.out_layout == COL else (written, 0.0)
        memory, unaligned = traffic_us(p, device), unaligned_us(p, device)
        slower = max(products, loads), max(memory, products)
        every = product_us(units * tile.cluster * steps * ROWS * tile.cols * DEPTH, TENSOR_16, device)
        return 1.0, longest, memory, products, loads, intake, *slower, every, handed, sums, *by_layout, unaligned

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = Problem.product("two-four", (), 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        wide = p.changed(a_dtype="float16", out_dtype="float32", b_layout=COL, out_layout=COL, epilogue=True)
        built = (16, 1, p), (128, 1, wide), (208, 1, p), (256, 1, wide), (48, 2, wide), (208, 2, p), (256, 2, wide)
        parts = (64, 3, wide), (144, 4, p.changed(b_layout=COL, out_layout=COL))
        return (
            *(_instance(Tile(cols, True, cluster), q) for cols, cluster, q in built),
            *(_instance(Tile(cols, False, parts=n), q) for cols, n, q in parts),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        import cupy

        b_col, tile = p.b_layout == COL, self.best(p).tile
        item = VALUE_TYPES[p.b_dtype].numpy.itemsize
        function = jit.load(SOURCE, _instance(tile, p), ARCH, p.device_id, tile.smem)
        weights = TwoFourRecords().of(a, p)
        resident = row_tiles.device_of(p.device_id).sms
        if tile.cluster > 1:
            with cupy.cuda.Device(p.device_id):
                resident = max_clusters(function, tile.cluster, WORKERS + 128, tile.smem)
        signature = (*"Pii", tensor_map.TensorMap, *"Piq", tensor_map.TensorMap, *"iiPPPff")
        launch = Launch(function, signature, (weights, p.M, p.K), WORKERS + 128, tile.smem, waits=True)
        steps, box = ceil_div(p.K, DEPTH), (DEPTH, (tile.cols if b_col else DEPTH) // tile.cluster)
        sums, flags = Scratch(), Scratch(zeros=True)

        @functools.lru_cache(maxsize=1)
        def unaligned() -> Prepare:
            return launcher(weights, p)[0]

        def prepare(o: Operands) -> Sequence[Bound]:
            if o.b % 16 or o.ldb * item % 16:
                return unaligned()(o)
            extents = (p.K, o.n) if b_col else (o.n, p.K)
            b_map = tensor_map.tiled(o.b, p.b_dtype, extents, (o.ldb,), box, 128)
            units = tile.units(p.M, o.n)
            clusters = tile.clusters(units, steps, resident)
            blocks = clusters * tile.cluster * tile.parts
            shared, sums_at, flags_at = bool(clusters and tile.even and units % clusters), 0, 0
            if shared:
                sums_at = sums.buffer(o.stream, blocks * ROWS * tile.cols * 4)
                flags_at = flags.buffer(o.stream, 2 * blocks * 4)
            c_map, copied = tensor_map.UNMAPPED, 0
            if itemsize(p.out_dtype) == 2:
                c_map, copied = tensor_map.of_c(o.c, p.out_dtype, p.M, o.n, o.ldc, p.out_layout == COL)
            rest = c_map, copied, int(shared), sums_at, flags_at, o.bias, o.alpha, o.beta
            return (launch.bind((blocks, 1, 1), o.stream, b_map, o.c, o.n, o.ldc, *rest),)

        return Prepared(prepare, str(tile))


def _instance(tile: Tile, p: Problem) -> str:
    flags = ", ".join(str(f).lower() for f in (p.b_layout == COL, p.out_layout == COL, p.epilogue))
    shape = f"{tile.cols}, {tile.stages}, {tile.span}, {tile.cluster}, {tile.parts}"
    return f"spmm_two_four_shares_sm90a<{c_type(p.a_dtype)}, {c_type(p.out_dtype)}, {shape}, {flags}>"
