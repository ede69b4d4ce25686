"""SpMM on BSR and DBSR with mma.sync (sm_80 and later), any block size. Kernel: spmm_bsr.cu.

bf16 and fp16 use m16n8k16 with float32 sums; float32 uses three TF32 products per element, which keeps about 22 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ....arrays.library import ceil_div, namespace
from ....products.ideal import b_alignment, load_us, memory_us, operands_bytes, stored_bytes, tile_us, unaligned_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, ROW, Problem
from ....products.roofline import TENSOR_16, TF32_THREE, Device, shared_limit
from ..runtime import jit, launch, refusals
from ..runtime.kernel import CudaKernel, Prepared

C_TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float"}
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
K_MAX = 2**31 - 2048
"""Rows of B are counted in int32, a tile past the end included."""
_GRID_Y_MAX = 65535


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of a tile, warps along rows and columns, ring stages, blocks wanted on an SM."""

    rows: int
    cols: int
    depth: int
    warps_m: int
    warps_n: int
    stages: int
    resident: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def smem(self, itemsize: int, b_col: bool) -> int:
        """Bytes of the ring; the pitches are those of spmm_bsr.cu."""
        along_k = self.depth + (8 if itemsize == 2 else 4)
        b = self.cols * along_k if b_col else self.depth * (self.cols + 8)
        return self.stages * itemsize * (self.rows * along_k + b)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{self.depth}"


# (tile rows, 16-bit?) -> warps along rows and columns, depth, stages, blocks per SM for the widest tile. Rows between
# two entries use the next larger one's columns and the same single warp row.
_WIDE_16 = {
    16: Tile(16, 256, 32, 1, 8, 4, 3),
    32: Tile(32, 256, 32, 1, 4, 4, 3),
    64: Tile(64, 128, 64, 2, 2, 3, 2),
    128: Tile(128, 128, 32, 2, 4, 4, 2),
}
_WIDE_32 = {
    16: Tile(16, 64, 32, 1, 4, 3, 4),
    32: Tile(32, 64, 32, 1, 4, 3, 4),
    64: Tile(64, 64, 32, 2, 2, 3, 3),
    128: Tile(128, 64, 32, 4, 2, 3, 2),
}


def tile_rows(height: int) -> int:
    """Rows of a tile for blocks ``height`` high: whole blocks up to 128 rows, then pieces of 128 or 64."""
    if height <= 128:
        return 16 * ceil_div(height, 16)
    return 128 if ceil_div(height, 128) * 128 == ceil_div(height, 64) * 64 else 64


def tiles_for(p: Problem) -> list[Tile]:
    """The tiles of a block height, the widest first."""
    rows = tile_rows(p.p["blocksize"][0])
    table = _WIDE_16 if _ITEMSIZE[p.a_dtype] == 2 else _WIDE_32
    if rows in table:
        tile = table[rows]
    else:
        # An odd number of 16-row pieces: every warp computes all of them, and the warps divide the columns.
        tile = replace(table[32], rows=rows, cols=min(table[32].cols, 128), resident=2 if rows <= 64 else 1)
    tiles = [tile]
    while tiles[-1].cols > 16:
        cols = tiles[-1].cols // 2
        tiles.append(replace(tile, cols=cols, warps_n=max(1, min(tiles[-1].warps_n, cols // 32))))
    return tiles


def choose_tile(p: Problem) -> Tile:
    """The tile that expects to be fastest for a problem."""
    tile: Tile = KERNEL.best(p).tile
    return tile


class SpmmBSR(CudaKernel):
    """``out = A @ B`` for A in BSR (scipy's layout) or DBSR (SparseTIR's), tensor cores of sm_80 and later."""

    name = "cuda.spmm_bsr"
    takes = spmm_of("bsr", "dbsr")
    archs = ("sm_80",)
    product_error = 2.0**-21  # float32 as three TF32 products: the product of the two low parts is left out
    terms = ("launch", "memory", "products", "rounds", "loads", "rounds of loads", "tiles", "column-major C",
             "single loads", "unaligned C")  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        return refusals.every(p, 80, tuple(C_TYPES)) + reasons(
            (p.K > K_MAX, f"K must be at most {K_MAX}, got {p.K}"),
        )

    def options(self, p: Problem) -> list[Tile]:
        """Tiles of all widths that are not far wider than N."""
        size, b_col = _ITEMSIZE[p.a_dtype], p.b_layout == COL
        narrow = [t for t in tiles_for(p) if t.cols < 4 * max(p.n, 8)]
        return [t for t in narrow if t.smem(size, b_col) <= shared_limit(p.sm)] or narrow[-1:]

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By value type, layout of B and whether its lines start on 16-byte boundaries, and rows of the tile."""
        kind = "16-bit" if _ITEMSIZE[p.a_dtype] == 2 else p.a_dtype
        lines = "" if b_alignment(p) == 16 else ", unaligned"
        group = f"{kind}, {p.b_layout}-major B{lines}"
        return f"{group}, {min(tile.rows, 128)} rows", group, kind

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        memory: A, B and C once. products: all products of stored blocks, spread evenly over the multiprocessors.
        rounds: the same in whole rounds of tiles; where many block rows are empty, of the others, which are longer.
        loads and rounds of loads: as both, at the rate of L2. tiles: C written from each multiprocessor in turn.
        column-major C: the same, where C is written element by element. single loads: 0.1 us for each of B's elements
        that a thread loads alone, where lines are not aligned. unaligned C: C once more, where its lines are not.
        """
        (height, width), size = p.p["blocksize"], _ITEMSIZE[p.a_dtype]
        kind = TENSOR_16 if size == 2 else TF32_THREE
        rows_of_blocks = ceil_div(p.M, height)
        blocks, columns = p.nnz / (height * width), ceil_div(p.n, tile.cols)
        tiles = rows_of_blocks * ceil_div(height, tile.rows) * columns
        depth = blocks / rows_of_blocks * width  # columns of A that a tile multiplies, on average
        one = tile_us(tile.rows, tile.cols, depth, kind, device)
        loaded = load_us((min(height, tile.rows) + tile.cols) * depth * size, device)
        at_once, longer = device.processors * tile.resident, longer_rows(p)
        written = (
            ceil_div(tiles, at_once) * tile.resident * load_us(tile.rows * tile.cols * _ITEMSIZE[p.out_dtype], device)
        )
        turns = ceil_div(math.ceil(tiles / longer), at_once) * tile.resident * longer
        even = tiles / device.processors
        memory = memory_us(stored_bytes(p) + operands_bytes(p), device)
        turned = written if p.out_layout == COL else 0.0
        single = 0.0 if b_alignment(p) == 16 else turns * depth * (p.n / columns) / tile.threads * 0.1
        unaligned = unaligned_us(p, device)
        return 1.0, memory, even * one, turns * one, even * loaded, turns * loaded, written, turned, single, unaligned

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return Prepared(launcher(arrays_of(a), p), str(choose_tile(p)))

    def instances(self) -> tuple[str, ...]:
        """C++ names that together reach every branch of spmm_bsr.cu, for the compile test."""
        return tuple(
            instance(p, choose_tile(p), "int, int, int", wide, wide)
            for p, wide in (
                (sample_problem("bsr", (64, 64), "bfloat16", "bfloat16", ROW, ROW), True),
                (sample_problem("dbsr", (16, 16), "float16", "float32", COL, COL), True),
                (sample_problem("bsr", (5, 7), "bfloat16", "bfloat16", ROW, COL), False),
                (sample_problem("dbsr", (128, 32), "float32", "float32", ROW, ROW), True),
                (sample_problem("bsr", (1, 3), "float32", "float32", COL, ROW), False),
            )
        )


KERNEL = SpmmBSR()


def longer_rows(p: Problem) -> float:
    """How many times as long as on average a block row with blocks is; 1 where blocks are anywhere or nothing is known.

    At random, the row of an average block has up to one block more than an average row: only what is beyond counts.
    """
    if not (p.row_length and p.nnz):
        return 1.0
    height, width = p.p["blocksize"]
    rows, columns = max(1, ceil_div(p.M, height)), max(1, ceil_div(p.K, width))
    average, length = p.nnz / (height * width * rows), p.row_length / (height * width)
    longer: float = (length - (1 - length / columns)) / average
    return min(float(rows), max(1.0, longer))


def sample_problem(fmt: str, blocksize: tuple[int, int], dtype: str, out: str, b: str, c: str) -> Problem:
    """A large problem with these types and layouts."""
    return Problem.product(fmt, (("blocksize", blocksize),), 4096, 4096, 4096, 0, dtype, dtype, out, b, c, "cuda", 90)


def instance(p: Problem, t: Tile, index_types: str, wide_a: bool, wide_b: bool) -> str:
    """The C++ name of the kernel for a problem; wide_a, wide_b: whether A and B allow 16-byte copies."""
    height, width = p.p["blocksize"]
    flags = (wide_a, wide_b, p.b_layout == COL, p.out_layout == COL, p.format == "dbsr")
    return (
        f"spmm_bsr<{C_TYPES[p.a_dtype]}, {C_TYPES[p.out_dtype]}, {index_types}, {height}, {width}, "
        f"{t.rows}, {t.cols}, {t.warps_m}, {t.warps_n}, {t.depth}, {t.stages}, {t.resident}, "
        f"{zero_rows(height)}, {', '.join(str(f).lower() for f in flags)}>"
    )


def zero_rows(height: int) -> int:
    """Block rows that one task of writing zeros covers: about 64 rows of C."""
    return max(1, 64 // height)


class Arrays(NamedTuple):
    """The device arrays of A, which a plan keeps instead of the Format object, because that object stores the plan."""

    row_ids: Any
    """None for BSR."""
    indptr: Any
    indices: Any
    data: Any


def arrays_of(a: Any) -> Arrays:
    """The arrays of a BSR or DBSR object."""
    return Arrays(getattr(a, "row_ids", None), a.indptr, a.indices, a.data)


def launcher(a: Arrays, p: Problem) -> launch.Prepare:
    """The launches of a plan. A variant is compiled when operands first need it (aligned or not)."""
    height, width = p.p["blocksize"]
    tile = choose_tile(p)
    listed = p.format == "dbsr"
    b_col = p.b_layout == COL
    size = _ITEMSIZE[p.a_dtype]
    vector = 16 // size
    smem = tile.smem(size, b_col)
    block_rows = ceil_div(p.M, height)
    entries = int(a.indptr.size) - 1
    row_tiles = entries * ceil_div(height, tile.rows)
    gap_blocks = ceil_div(block_rows - entries, zero_rows(height)) if listed else 0
    wide_a = width % vector == 0
    fixed = (a.row_ids if listed else 0, a.indptr, a.indices, a.data, p.M, p.K, entries)
    arch = jit.architecture(p.sm or 80, SpmmBSR.archs)

    def variant(wide_b: bool) -> launch.Launch:
        function = jit.load(
            "bsr/spmm_bsr.cu", instance(p, tile, index_types(a), wide_a, wide_b), arch, p.device_id, smem
        )
        return launch.Launch(function, "PPPPqqqPPqqq", fixed, tile.threads, smem, waits=True)

    variants: dict[bool, launch.Launch] = {}

    def prepare(x: launch.Operands) -> tuple[launch.Bound]:
        wide_b = x.b % 16 == 0 and x.ldb % vector == 0 and (not b_col or width % vector == 0)
        if wide_b not in variants:
            variants[wide_b] = variant(wide_b)
        columns = min(ceil_div(x.n, tile.cols), _GRID_Y_MAX)
        grid = (row_tiles + gap_blocks, columns, 1)
        return (variants[wide_b].bind(grid, x.stream, x.b, x.c, x.n, x.ldb, x.ldc),)

    return prepare


def index_types(a: Arrays) -> str:
    """The C types of row_ids, indptr and indices as template arguments. For BSR, without row_ids, any type will do."""
    arrays = (a.indptr if a.row_ids is None else a.row_ids, a.indptr, a.indices)
    return ", ".join("long long" if x.dtype.itemsize == 8 else "int" for x in arrays)


def every_row(row_ids: Any, indptr: Any, block_rows: int) -> Any:
    """The indptr of the same blocks with all block rows listed: int[block_rows+1]."""
    xp = namespace(indptr)
    lengths = xp.zeros(block_rows + 1, indptr.dtype)
    lengths[row_ids + 1] = xp.diff(indptr)
    return xp.cumsum(lengths)
