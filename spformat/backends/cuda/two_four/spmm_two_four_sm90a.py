"""SpMM on 2:4 weights with wgmma.sp, weights in registers, B by TMA; sm_90a only.  Kernel: spmm_two_four_sm90a.cu."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div
from ....products.ideal import load_us, product_us, rounds, tile_us, traffic_us, unaligned_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import TENSOR_16, Device
from ..runtime import jit, tensor_map
from ..runtime.kernel import CopyEngineKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands, Prepare
from ..runtime.occupancy import max_clusters
from .spmm_two_four import DEPTH, KERNEL, RECORD, c_type, launcher, mma_reasons
from .two_four_records import WORDS, TwoFourRecords, record_map

SOURCE, ARCH = "two_four/spmm_two_four_sm90a.cu", "sm_90a"


@dataclass(frozen=True)
class Tile:
    """``warpgroups`` of ``64 * row_tiles`` rows, ``cols`` columns, ``stages`` slabs of B, ``span`` of weights ahead.

    ``slots``: blocks of 64 x 64 sums of a warpgroup that are on their way to C while the next tile is computed.
    ``cluster`` blocks share each slab of B; ``splits`` such groups, in one cluster, share K.
    """

    warpgroups: int
    row_tiles: int
    cols: int
    stages: int
    span: int
    slots: int
    cluster: int
    splits: int
    group: int
    shared: bool
    """Weights pass through shared memory instead of going straight to registers; ``span`` is 1."""

    @property
    def rows(self) -> int:
        return 64 * self.row_tiles * self.warpgroups

    @property
    def blocks(self) -> int:
        """Blocks of a thread block cluster."""
        return self.cluster * self.splits

    @property
    def smem(self) -> int:
        """bytes: slabs of B, the epilogue's slots, sums of another part of K, room to align to 1024."""
        sums = self.rows * self.cols * 2 if self.splits > 1 else 0
        slab = DEPTH * self.cols * 2 + (self.rows // 16 * WORDS * 4 if self.shared else 0)
        return self.stages * slab + self.warpgroups * self.slots * 64 * 128 + sums + 1024

    def __str__(self) -> str:
        parts = f"cluster {self.cluster} split {self.splits} stages {self.stages} span {self.span}"
        return f"{self.rows}x{self.cols}x{DEPTH} {parts}" + " shared" * self.shared


TILES = (
    Tile(2, 1, 256, 5, 1, 1, 2, 1, 8, True),
    Tile(2, 1, 256, 6, 4, 2, 2, 1, 8, False),
    Tile(2, 1, 256, 5, 4, 2, 2, 1, 8, False),
    Tile(2, 1, 256, 6, 4, 2, 1, 1, 8, False),
    Tile(2, 1, 256, 5, 4, 2, 1, 1, 8, False),
    Tile(3, 1, 128, 8, 3, 1, 1, 1, 8, False),
    Tile(2, 1, 128, 8, 6, 2, 1, 1, 8, False),
    Tile(2, 1, 128, 8, 6, 2, 2, 1, 8, False),
    Tile(2, 1, 64, 16, 8, 1, 1, 1, 8, False),
    Tile(2, 1, 128, 7, 4, 1, 1, 2, 8, False),
    Tile(2, 1, 128, 7, 6, 1, 1, 2, 8, False),
    Tile(2, 1, 64, 16, 8, 1, 1, 2, 8, False),
    Tile(2, 1, 64, 12, 6, 1, 1, 2, 8, False),
    Tile(1, 1, 64, 20, 9, 1, 1, 2, 8, False),
    Tile(1, 1, 64, 14, 7, 1, 1, 2, 8, False),
)


class SpmmTwoFourSm90a(CopyEngineKernel):
    """C = A @ B for ``TwoFour`` A on Hopper.

    TMA needs B on a 16-byte boundary with a pitch of a multiple of 16 bytes; a call with another B runs the sm_80
    kernel.
    """

    name = "cuda.spmm_two_four_sm90a"
    takes = spmm_of("two-four")
    otherwise = KERNEL
    epilogue = True
    tiles = TILES
    terms = ("launch", "memory", "products", "loads", "tiles", "sums", "column-major C", "slower of the two",
             "products of all", "unaligned C")  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        return mma_reasons(p, 80) + reasons(
            (p.sm != 90, f"needs sm_90 (wgmma), got {p.sm_name}"),
            (p.K == 0, "K is 0: no tensor map of an empty B"),
            (p.b_layout == COL and p.K % 8, f"TMA needs column-major B with K a multiple of 8, got K = {p.K}"),
        )

    def options(self, p: Problem) -> list[Tile]:
        """Tiles whose parts of K all have a slab. None for an empty A, which a tensor map cannot describe."""
        slabs, mapped = max(1, ceil_div(p.K, DEPTH)), p.M and p.K
        return [t for t in TILES if t.splits <= slabs and (mapped or not t.shared)]

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By tile."""
        return (str(tile),)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Those of ``spmm_two_four.TERMS``, in rounds of clusters; sums: parts of K exchanged through shared memory.

        products of all: of all tiles at the rate of the device, as multiprocessors without work leave the others more.
        unaligned C: C once more, where its lines start anywhere.
        """
        clusters = ceil_div(p.M, tile.rows * tile.cluster) * ceil_div(p.n, tile.cols)
        turns = rounds(clusters, device.processors // tile.blocks)
        steps = ceil_div(ceil_div(p.K, DEPTH), tile.splits)
        products = turns * steps * tile_us(tile.rows, tile.cols, DEPTH, TENSOR_16, device) / 2
        loaded = tile.rows * DEPTH * RECORD + tile.cols * DEPTH * 2 / tile.cluster
        loads = turns * steps * load_us(loaded, device)
        written = turns * load_us(tile.rows * tile.cols * itemsize(p.out_dtype), device)
        sums = turns * (tile.splits - 1) * load_us(tile.rows * tile.cols * 4, device)
        memory = traffic_us(p, device)
        turned = written if p.out_layout == COL else 0.0
        steps_of_all = clusters * tile.cluster * ceil_div(p.K, DEPTH)
        every = product_us(steps_of_all * tile.rows * tile.cols * DEPTH, TENSOR_16, device)
        slower, unaligned = max(memory, products), unaligned_us(p, device)
        return 1.0, memory, products, loads, written, sums, turned, slower, every, unaligned

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = Problem.product("two-four", (), 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        wide = p.changed(a_dtype="float16", out_dtype="float32", b_layout=COL, out_layout=COL, epilogue=True)
        return _instance(TILES[0], p), *(_instance(TILES[i], wide) for i in (0, 1, -1))

    def prepared(self, a: Any, p: Problem) -> Prepared:
        import cupy

        b_col = p.b_layout == COL
        tile = self.best(p).tile
        item = VALUE_TYPES[p.b_dtype].numpy.itemsize
        smem = tile.smem
        threads = 128 * (tile.warpgroups + 1)
        function = jit.load(SOURCE, _instance(tile, p), ARCH, p.device_id, smem)
        weights = TwoFourRecords().of(a, p)
        map_type = tensor_map.TensorMap
        signature = (*"Pii", map_type, *"Piq", map_type, map_type, *"iPff")
        with cupy.cuda.Device(p.device_id):
            resident = max_clusters(function, tile.blocks, threads, smem)
        cluster_rows = ceil_div(p.M, tile.rows * tile.cluster)
        box = (DEPTH, (tile.cols if b_col else DEPTH) // tile.cluster)
        c_col = p.out_layout == COL
        copied = itemsize(p.out_dtype) == 2 and (c_col or tile.cols // tile.splits % 64 == 0)

        a_map = None
        if tile.shared:
            a_map = record_map(weights, p, tile.rows)
        launch = Launch(function, signature, (weights, p.M, p.K), threads, smem, waits=True)

        @functools.lru_cache(maxsize=1)
        def unaligned() -> Prepare:
            return launcher(weights, p)[0]

        def prepare(o: Operands) -> Sequence[Bound]:
            if o.b % 16 or o.ldb * item % 16:
                return unaligned()(o)
            extents = (p.K, o.n) if b_col else (o.n, p.K)
            b_map = tensor_map.tiled(o.b, p.b_dtype, extents, (o.ldb,), box, 128)
            c_map, by_copy = tensor_map.UNMAPPED, 0
            if copied:
                c_map, by_copy = tensor_map.of_c(o.c, p.out_dtype, p.M, o.n, o.ldc, c_col)
            clusters = cluster_rows * ceil_div(o.n, tile.cols)
            grid = ((clusters if tile.splits > 1 else min(clusters, resident)) * tile.blocks, 1, 1)
            rest = o.bias, o.alpha, o.beta
            return (launch.bind(grid, o.stream, b_map, o.c, o.n, o.ldc, c_map, a_map or b_map, by_copy, *rest),)

        return Prepared(prepare, str(tile))


def _instance(tile: Tile, p: Problem) -> str:
    shape = (
        tile.warpgroups, tile.row_tiles, tile.cols, tile.stages, tile.span, tile.slots, tile.cluster, tile.splits,
        tile.group, tile.shared,
    )  # fmt: skip
    flags = ", ".join(str(f).lower() for f in (p.b_layout == COL, p.out_layout == COL, p.epilogue))
    return f"spmm_two_four_sm90a<{c_type(p.a_dtype)}, {c_type(p.out_dtype)}, {str(shape)[1:-1].lower()}, {flags}>"
