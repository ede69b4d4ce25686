"""SpMM on BSR and DBSR with TMA and wgmma (Hopper), blocks of 16 to 128. Kernel: spmm_bsr_sm90a.cu.

The fallback for everything else, and for operands TMA cannot address, is spmm_bsr.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ....arrays.library import ceil_div, namespace
from ....products.ideal import load_us, memory_us, operands_bytes, rounds, stored_bytes, tile_us, unaligned_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, ROW, Problem, itemsize
from ....products.roofline import TENSOR_16, Device
from ..runtime import jit, launch, refusals, tensor_map
from ..runtime.kernel import CopyEngineKernel, Prepared
from . import spmm_bsr

_C_TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half"}
_SIZES = (16, 32, 64, 128)
_ITEM = 2
_INT32_MAX = 2**31 - 1
_SIGNATURE = (tensor_map.TensorMap, *"PPPPqq", tensor_map.TensorMap, tensor_map.TensorMap, *"Pqq")


@dataclass(frozen=True)
class Tile:
    """Warpgroups along rows and columns of a tile, ring slots for B, bytes of the ring of A, warps that load B."""

    warpgroups_m: int
    warpgroups_n: int
    slots: int
    ring_a: int
    loaders_b: int
    low_rows: int = 128
    """Rows of a warpgroup where blocks lie on the n axis of wgmma."""

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups_m * self.warpgroups_n + 1)

    def extent(self, height: int) -> tuple[int, int]:
        """Rows and columns of C in a tile: a warpgroup owns 64 x 128; at most 128 x 64 where blocks lie on n."""
        rows, cols = (64, 128) if height >= 64 else (self.low_rows, 64)
        return self.warpgroups_m * rows, self.warpgroups_n * cols

    def smem(self, height: int) -> int:
        """Bytes: the rings of B (64 rows a slot) and A, the tile of C on its way out (4096 for each warp that stores
        it itself), and room to align them."""
        rows, cols = self.extent(height)
        leaving = max(rows * cols * _ITEM, 4 * 4096 * self.warpgroups_m * self.warpgroups_n)
        return self.slots * 64 * cols * _ITEM + self.ring_a + leaving + 1024


def tiles_for(p: Problem) -> tuple[Tile, ...]:
    """A few block rows and many columns, and the same rows with half as many columns; of low blocks also fewer rows."""
    height, width = p.p["blocksize"]
    loaders = 3 if width < 64 else 1  # narrow blocks come as many small boxes of B
    if height == 128:
        return Tile(2, 2, 3, 65536, loaders), Tile(2, 1, 5, 65536, loaders)
    if height == 64:
        return Tile(2, 2, 4, 32768, loaders), Tile(2, 1, 6, 32768, loaders)
    wide, narrow = Tile(1, 4, 4, 32768, loaders), Tile(1, 2, 6, 32768, loaders)
    lower = (replace(t, low_rows=rows) for t, rows in ((wide, 96), (wide, 64), (narrow, 64), (narrow, 32)))
    return wide, narrow, *lower


def choose_tile(p: Problem) -> Tile:
    """The tile that expects to be fastest for a problem."""
    tile: Tile = KERNEL.best(p).tile
    return tile


class Slices(NamedTuple):
    """The tables that the loading warps read: the blocks of each group of block rows, merged by column.

    Their layouts are described in spmm_bsr_sm90a.cu.
    """

    plan: Any
    slices: Any
    order: Any

    @property
    def nbytes(self) -> int:
        return int(self.plan.nbytes + self.slices.nbytes + self.order.nbytes)


def merge_slices(
    indptr: Any, indices: Any, block_columns: int, group: int, cost: tuple[int, int], stride: int
) -> Slices:
    """The slices of each ``group`` consecutive list entries: int32[groups, 4], int32[slices+4, 4], int32[nnzb+32].

    ``cost``: of a slice and of a block, to tell long groups from short ones; ``stride``: how far apart in the plan the
    groups stand that one CTA takes one after the other. numpy or CuPy, O(nnzb log nnzb); needs at least one block.
    Slices and order are longer than their content, because the loaders read ahead.
    """
    xp = namespace(indices)
    blocks, entries = int(indices.size), int(indptr.size) - 1
    groups = ceil_div(entries, group)
    entry = xp.searchsorted(indptr[1:], xp.arange(blocks), side="right")
    key = entry // group * block_columns + indices  # int64: groups * block columns
    order = xp.argsort(key * group + entry % group)
    key, bit = key[order], xp.left_shift(1, entry[order] % group)
    starts = xp.flatnonzero(xp.concatenate([xp.ones(1, bool), key[1:] != key[:-1]]))  # synchronize!
    until = xp.cumsum(bit)
    ends = xp.concatenate([starts[1:], xp.full(1, blocks)])
    slices = xp.zeros((starts.size + 4, 4), xp.int32)
    slices[:-4, 0] = key[starts] % block_columns
    slices[:-4, 1] = (
        until[ends - 1] - until[starts] + bit[starts]
    )  # the bits of a slice differ, so their sum is their union
    bounds = xp.searchsorted(key[starts] // block_columns, xp.arange(groups + 1))
    positions = indptr[xp.minimum(xp.arange(groups + 1) * group, entries)]
    taken = interleave(cost[0] * xp.diff(bounds) + cost[1] * xp.diff(positions), stride)
    plan = xp.stack([bounds[:-1][taken], bounds[1:][taken], positions[:-1][taken], taken], axis=1).astype(xp.int32)
    padded = xp.zeros(blocks + 32, xp.int32)
    padded[:-32] = order
    return Slices(plan, slices, padded)


def interleave(work: Any, stride: int) -> Any:
    """An order of groups such that those ``stride`` apart, cyclically, are long and short in turn; int64[groups].

    A persistent CTA takes every ``stride``-th group: its sum then comes close to the mean.
    """
    xp = namespace(work)
    n = int(work.size)
    stride %= n
    if stride == 0:
        return xp.arange(n)
    rank = xp.argsort(-work)
    index = xp.arange(n)
    turns = rank[xp.where(index % 2 == 0, index // 2, n - 1 - index // 2)]  # longest, shortest, second longest, ...
    cycles = math.gcd(stride, n)
    if n // cycles % 2 == 0:  # pairs of long and short go round the cycles
        cycle, step = index // 2 % cycles, index // 2 // cycles * 2 + index % 2
    else:
        cycle, step = index // (n // cycles), index % (n // cycles)
    taken = xp.empty(n, xp.int64)
    taken[(cycle + step * stride) % n] = turns
    return taken


class SpmmBSRHopper(CopyEngineKernel):
    """``out = A @ B`` for A in BSR or DBSR, bf16 or fp16, on Hopper GPUs."""

    name = "cuda.spmm_bsr_sm90a"
    takes = spmm_of("bsr", "dbsr")
    otherwise = spmm_bsr.KERNEL
    archs = ("sm_90a",)
    terms = ("launch", "memory", "products", "rounds", "loads", "steps", "tiles", "column-major C",
             "unaligned C")  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        height, width = p.p["blocksize"]
        sizes = ", ".join(map(str, _SIZES))
        return (
            refusals.on_device(p)
            + refusals.types(p, tuple(_C_TYPES))
            + refusals.strides(p)
            + reasons(
                (p.device == "cuda" and p.sm != 90, f"needs sm_90 (wgmma), got {p.sm_name}"),
                (
                    height not in _SIZES or width not in _SIZES,
                    f"block height and width must be one of {sizes}, got {height}x{width}",
                ),
                (p.K > spmm_bsr.K_MAX, f"K must be at most {spmm_bsr.K_MAX}, got {p.K}"),
                (
                    p.b_layout == COL and p.K * _ITEM % 16,
                    f"columns of B must start on 16-byte boundaries for TMA, got K = {p.K}",
                ),
            )
        )

    def options(self, p: Problem) -> tuple[Tile, ...]:
        """A few block rows and many columns, half as many columns, and fewer rows."""
        return tiles_for(p)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By block height."""
        return (f"blocks {p.p['blocksize'][0]} high",)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        A tile covers several block rows; a slice of B is loaded for every block column that one of them has, fewer
        where many block rows are empty. products: those of stored blocks, spread evenly. rounds: the same in whole
        rounds of tiles. loads: slices of B and blocks of A from L2, in whole rounds. steps: 0.1 us for each slice of 64
        columns that a tile waits for. tiles: C of each round. column-major C: the same where it is. unaligned C: C once
        more, where its lines start anywhere.
        """
        height, width = p.p["blocksize"]
        rows, cols = tile.extent(height)
        group = max(1, rows // height)
        rows_of_blocks, block_columns = ceil_div(p.M, height), ceil_div(p.K, width)
        blocks = p.nnz / (height * width)
        share = min(1.0, blocks / max(1, rows_of_blocks * block_columns))
        groups = ceil_div(rows_of_blocks, group)
        tiles = groups * ceil_div(p.n, cols)
        longer = spmm_bsr.longer_rows(p)
        # Columns of A that a group names, if blocks lie at random in the rows that have any.
        depth = block_columns * (1 - (1 - min(1.0, share * longer)) ** (group / longer)) * width
        one = tile_us(height, cols, blocks / groups * width, TENSOR_16, device)
        loaded = load_us(depth * cols * 2 + blocks / groups * height * width * 2, device)
        turns = rounds(tiles, device.processors)
        written = turns * load_us(rows * cols * itemsize(p.out_dtype), device)
        memory = memory_us(stored_bytes(p) + operands_bytes(p), device)
        turned = written if p.out_layout == COL else 0.0
        even = tiles / device.processors
        waits, unaligned = turns * depth / 64 * 0.1, unaligned_us(p, device)
        return 1.0, memory, even * one, turns * one, turns * loaded, waits, written, turned, unaligned

    def prepared(self, a: Any, p: Problem) -> Prepared:
        tile = choose_tile(p)
        rows, cols = tile.extent(p.p["blocksize"][0])
        prepare, workspace = _launcher(a, p, tile)
        return Prepared(prepare, f"{rows}x{cols}x64", workspace)

    def instances(self) -> tuple[str, ...]:
        """C++ names that together reach every branch of spmm_bsr_sm90a.cu, for the compile test."""
        problems = (
            spmm_bsr.sample_problem("bsr", (64, 64), "bfloat16", "bfloat16", ROW, ROW),
            spmm_bsr.sample_problem("dbsr", (128, 128), "float16", "float32", COL, COL),
            spmm_bsr.sample_problem("bsr", (32, 32), "bfloat16", "bfloat16", ROW, COL),
            spmm_bsr.sample_problem("dbsr", (16, 16), "bfloat16", "float32", COL, ROW),
        )
        return tuple(
            _instance(p, tile, "int", p.format == "dbsr", bulk)
            for p in problems
            for tile in (choose_tile(p), tiles_for(p)[-1])
            for bulk in (False, True)
            if not bulk or p.out_dtype != "float32"
        )


KERNEL = SpmmBSRHopper()


def _instance(p: Problem, t: Tile, row_type: str, listed: bool, bulk_c: bool) -> str:
    height, width = p.p["blocksize"]
    rows = t.extent(height)[0] // t.warpgroups_m
    units = t.ring_a // (height * min(width, 64) * _ITEM)
    flags = (p.b_layout == COL, p.out_layout == COL, listed, bulk_c)
    return (
        f"spmm_bsr_sm90a<{_C_TYPES[p.a_dtype]}, {spmm_bsr.C_TYPES[p.out_dtype]}, {row_type}, {height}, {width}, "
        f"{rows}, {t.warpgroups_m}, {t.warpgroups_n}, {t.slots}, {units}, {t.loaders_b}, "
        f"{spmm_bsr.zero_rows(height)}, {', '.join(str(f).lower() for f in flags)}>"
    )


def _launcher(matrix: Any, p: Problem, tile: Tile) -> tuple[launch.Prepare, int]:
    """The launches of a plan, and its workspace in bytes.

    Whether B suits TMA is known per call only; operands that do not go to spmm_bsr.
    """
    a, (height, width) = spmm_bsr.arrays_of(matrix), p.p["blocksize"]
    blocks, entries, block_rows = int(a.indices.size), int(a.indptr.size) - 1, ceil_div(p.M, height)
    plain: list[launch.Prepare] = []

    def fall_back(x: launch.Operands) -> Sequence[launch.Bound]:
        if not plain:
            plain.append(spmm_bsr.launcher(a, p))
        return plain[0](x)

    pointer = a.data.data.ptr
    if not blocks or not tensor_map.aligned(pointer, width, _ITEM) or max(blocks * height, p.M) > _INT32_MAX:
        return fall_back, 0  # coordinates of a tensor map are 32-bit

    # Rows that DBSR does not list are filled with zeros after the product. Many of them are faster as tiles without
    # blocks.
    listed = p.format == "dbsr" and (block_rows - entries) * 8 <= block_rows
    indptr = a.indptr
    if p.format == "dbsr" and not listed:
        indptr, entries = spmm_bsr.every_row(a.row_ids, a.indptr, block_rows), block_rows
    b_col, c_col = p.b_layout == COL, p.out_layout == COL
    slice_k = min(width, 64)
    rows, cols = tile.extent(height)
    smem = tile.smem(height)
    swizzle = slice_k * _ITEM
    a_map = tensor_map.tiled(pointer, p.a_dtype, (width, blocks * height), (width,), (slice_k, height), swizzle)
    processors = _processors(p.device_id)
    cut = rows // height, (cols, height), processors

    def build() -> Slices:
        merged = merge_slices(indptr, a.indices, ceil_div(p.K, width), *cut)
        launch.finish_arrays()  # synchronize!
        return merged

    merged: Slices = matrix.kernel_arrays(("slices", listed, *cut), build)
    fixed = (a_map, a.row_ids if listed else 0, *merged, p.M, entries)
    groups = ceil_div(entries, rows // height)
    gaps = entries < block_rows
    narrow = min(height, 64)

    def map_b(x: launch.Operands) -> bytes:
        if b_col:
            return tensor_map.tiled(x.b, p.b_dtype, (p.K, x.n), (x.ldb,), (slice_k, cols), swizzle)
        return tensor_map.tiled(x.b, p.b_dtype, (x.n, p.K), (x.ldb,), (64, slice_k), 128)

    def map_c(x: launch.Operands) -> bytes:
        if c_col:
            box = (narrow, 128 if height >= 64 else 64)
            return tensor_map.tiled(x.c, p.out_dtype, (p.M, x.n), (x.ldc,), box, narrow * _ITEM)
        return tensor_map.tiled(x.c, p.out_dtype, (x.n, p.M), (x.ldc,), (64, narrow), 128)

    @functools.lru_cache(maxsize=2)
    def variant(bulk_c: bool) -> launch.Launch:
        row_type = "long long" if listed and a.row_ids.dtype.itemsize == 8 else "int"
        name = _instance(p, tile, row_type, listed, bulk_c)
        function = jit.load("bsr/spmm_bsr_sm90a.cu", name, "sm_90a", p.device_id, smem)
        return launch.Launch(function, _SIGNATURE, fixed, tile.threads, smem, waits=True)

    def prepare(x: launch.Operands) -> Sequence[launch.Bound]:
        if (
            not tensor_map.aligned(x.b, x.ldb, _ITEM)
            or groups * ceil_div(x.n, cols) > _INT32_MAX
            or x.n > _INT32_MAX - cols
        ):
            return fall_back(x)
        bulk_c = p.out_dtype != "float32" and tensor_map.writable(x.c, p.M if c_col else x.n, x.ldc, _ITEM)
        b = map_b(x)
        c = map_c(x) if bulk_c else b
        grid = (processors if gaps else min(groups * ceil_div(x.n, cols), processors), 1, 1)
        return (variant(bulk_c).bind(grid, x.stream, b, c, x.c, x.n, x.ldc),)

    return prepare, merged.nbytes


def _processors(device_id: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device_id).attributes["MultiProcessorCount"])
