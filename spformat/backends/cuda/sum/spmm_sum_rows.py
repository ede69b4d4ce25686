"""SpMM on a sum of blocks and scattered nonzeros in one launch: the nonzeros as CSR multiplies them, the blocks beside.

Kernel: spmm_sum_rows.cu. docs/decisions/0051-blocks-beside-rows.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, power_of_two
from ....errors import LimitError
from ....formats.csr import CSR
from ....formats.sum import Sum
from ....products import ideal, rates, roofline
from ....products.kernel import reasons, spmm_of, tile_us
from ....products.problem import COL, Operand, Problem, itemsize
from ....products.tiles import forced_tile
from ..csr.spmm_csr import ARCHS, SpmmCSR
from ..runtime import jit, row_tiles
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import MAX_GRID_Y, Bound, Launch, Operands, finish_arrays
from ..runtime.row_work import BinTable, bin_table, row_gather_reasons, rows_by_length
from ..runtime.scratch import Scratch
from ..runtime.transpose import row_major
from .structured import BLOCKS, blocks_of_tiles
from .sum_work import BlockTasks, RowTiles, block_tasks, merged

SOURCE = "sum/spmm_sum_rows.cu"
TYPES = ("float32", "float16", "bfloat16")
SCATTERED = ("csr", "ell-buckets")
K_MAX = 2**31 - 2048
"""Rows of B are counted in int32, a chunk past the end included."""
LEAST_DEPTH = 256
"""Columns of blocks in a task: a row of blocks with at most as many is not cut."""
MOST_SUMS = 16
"""Sums of a lane that gathers; with 32 rows took longer (docs/decisions/0051-blocks-beside-rows.md)."""
ROWS_OF_CSR = SpmmCSR()


@dataclass(frozen=True)
class Tile:
    """How rows of scattered nonzeros are gathered, and the tiles of C in which blocks are multiplied."""

    items: row_tiles.Tile
    rows: int
    cols: int

    def depth(self, width: int, size: int) -> int:
        """Columns of blocks ``width`` wide that are multiplied at a time."""
        return 64 if size == 2 and width % 64 == 0 else 32

    def smem(self, width: int, size: int) -> int:
        """Bytes of dynamic shared memory: the buffers of ``BlockSteps`` in tile_blocks.cuh."""
        depth, pad = self.depth(width, size), 16 // size
        stages = 4 if depth == 32 and size == 2 else 3
        return stages * size * (self.rows * (depth + pad) + depth * (self.cols + pad))

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols} blocks; {self.items}"


class SpmmSumRows(CudaKernel):
    """C = (A1 + A2 + ..) @ B for one part in bsr or dbsr, or none, and one part or more in csr and ell-buckets.

    The same bits every run. float32 without tensor cores. B or C column-major: through a transposed copy. Several
    scattered parts, or one in ell-buckets, are kept once more as one CSR. Without blocks it is ``cuda.spmm_csr`` of it.
    """

    name = "cuda.spmm_sum_rows"
    takes = spmm_of(Sum.name)
    archs = ARCHS
    multiplies_zeros = True  # those of blocks
    terms = ("rows", "blocks", "steps", "products", "loads", "sums")

    def unsupported(self, p: Problem) -> list[str]:
        parts = p.operands[0].parts
        others = [f"part {i} ({q.format})" for i, q in enumerate(parts) if q.format not in (*BLOCKS, *SCATTERED)]
        blocks = [q.format for q in parts if q.format in BLOCKS]
        return row_gather_reasons(p, TYPES) + reasons(
            (not parts, "the problem names no parts"),
            (bool(others), f"takes parts in bsr, dbsr, csr and ell-buckets, not {', '.join(others)}"),
            (len(blocks) > 1, f"takes one part in bsr or dbsr, got {', '.join(blocks)}"),
            (bool(parts) and len(blocks) == len(parts), "takes one part or more in csr or ell-buckets"),
            (p.K > K_MAX, f"K must be at most {K_MAX}, got {p.K}"),
        )

    def options(self, p: Problem) -> list[Tile]:
        size, out = itemsize(p.a_dtype), itemsize(p.out_dtype)
        ldb, ldc = (8 * ceil_div(p.n, 8) if layout == COL else p.n for layout in (p.b_layout, p.out_layout))
        return self._tiles(p, row_tiles.vector_width(size, out, p.n, 0, 0, ldb, ldc))

    def tile_for(self, p: Problem, vec: int) -> Tile:
        """The tile with the least expected time for loads of ``vec`` elements of B."""
        device, known = roofline.device_of(p), rates.constants(self.name, self.terms, p)
        options = self._tiles(p, vec)
        forced = forced_tile(self.name)
        return min([t for t in options if str(t) == forced] or options,
                   key=lambda t: tile_us(self, p, t, device, known))  # fmt: skip

    def _tiles(self, p: Problem, vec: int) -> list[Tile]:
        q, size, height = items_problem(p), itemsize(p.a_dtype), blocks_of(p)[1]
        cut = size, p.n, p.K, p.M, q.nnz, row_tiles.Device(roofline.device_of(p).processors)
        usual = dict.fromkeys(t for t in ROWS_OF_CSR._tiles(q, vec) if not t.resident and t.vec * t.tiles <= MOST_SUMS)
        gathers = list(usual) or [row_tiles.filled(vec, (8, 2, 8, 2) if vec * 16 <= 128 else (8, 1, 8, 3), *cut)]
        options = []
        for t in gathers:
            cols = 128 if t.columns > 64 or (p.n > 64 and size == 2) else 64
            for rows in (16,) if height <= 16 else (32,) if height < 64 else (32, 64):
                few = replace(t, threads=128, blocks=2 * t.blocks) if rows == 16 else t
                options.append(Tile(few, rows, cols))
        return options

    def expected_us(self, p: Problem) -> float:
        """Without blocks that of CSR."""
        return super().expected_us(p) if blocks_of(p)[0] else ROWS_OF_CSR.expected_us(items_problem(p))

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By the bytes of a value: 16-bit blocks are multiplied by tensor cores."""
        return (f"{itemsize(p.a_dtype)}-byte values",)

    def quantities(self, p: Problem, tile: Tile, device: roofline.Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        rows: what CSR expects for the scattered nonzeros, B and C. blocks: 1 where there are some. steps: chunks of
        columns of a task, one after the other, each a microsecond. products: those of the tasks of one multiprocessor.
        loads: of A and B by all tasks, from L2. sums: of tasks, written and read.
        """
        q, size = items_problem(p), itemsize(p.a_dtype)
        known = rates.constants(ROWS_OF_CSR.name, ROWS_OF_CSR.terms, q)
        rows = tile_us(ROWS_OF_CSR, q, tile.items, device, known)
        stored, _, width = blocks_of(p)
        if not stored:
            return rows, 0.0, 0.0, 0.0, 0.0, 0.0
        w, depth = work_of(p, tile, device.processors), tile.depth(width, size)
        of_task = w.chunks / w.tasks
        chunk = ideal.tile_us(tile.rows, tile.cols, depth, ideal.arithmetic(p.a_dtype), device)
        products = ceil_div(round(w.tasks * w.columns), device.processors) * of_task * chunk
        loads = ideal.cache_us(w.chunks * w.columns * size * depth * (tile.rows + tile.cols), device)
        sums = ideal.cache_us(2 * 4 * w.tasks * w.columns * tile.rows * tile.cols, device)
        return rows, 1.0, of_task, products, loads, sums

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests: value types, block sizes, wide and single loads, both index types."""
        wide = row_tiles.filled(8, (8, 2, 8, 2), 2, 512, 768, 3072, 50_000, row_tiles.Device())
        narrow = row_tiles.choose_tile(8, 2, 64, 768, 3072, 50_000, row_tiles.Device())
        single = row_tiles.choose_tile(1, 4, 33, 768, 3072, 50_000, row_tiles.Device())
        full = row_tiles.filled(4, (8, 4, 4, 2), 4, 512, 768, 3072, 50_000, row_tiles.Device())
        low = replace(wide, threads=128, blocks=4)
        return (
            _instance("bfloat16", "bfloat16", "int", wide, True, ("int", 32, 32), 32, 128, True),
            _instance("bfloat16", "float32", "int", narrow, False, ("int", 64, 64), 64, 64, True),
            _instance("float16", "float16", "long long", wide, True, ("long long", 64, 64), 64, 128, True),
            _instance("float16", "float16", "int", low, False, ("int", 16, 8), 16, 128, True),
            _instance("float32", "float32", "int", full, False, ("int", 32, 32), 32, 128, True),
            _instance("float32", "float32", "int", single, True, ("int", 5, 7), 16, 64, False),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        import cupy

        part = next((x for x in a.parts if x.name in BLOCKS and x.indices.size), None)
        rest = [x for x in a.parts if x.name in SCATTERED]

        def build() -> CSR:
            with cupy.cuda.Device(p.device_id):
                items = merged([x.to_csr() for x in rest])
                finish_arrays()  # synchronize!
            return items

        items = rest[0] if len(rest) == 1 and rest[0].name == "csr" else a.kernel_arrays("scattered nonzeros", build)
        q, copied = items_problem(p), 0 if items is rest[0] else int(items.nbytes)
        if part is None:
            alone = ROWS_OF_CSR.prepared(items, q)
            return alone._replace(workspace=alone.workspace + copied)
        return self._prepared(a, part, items, p, copied)

    def _prepared(self, a: Any, part: Any, items: CSR, p: Problem, copied: int) -> Prepared:
        import cupy

        q, size = items_problem(p), itemsize(p.a_dtype)
        rows, (height, width) = rows_by_length(items, q), part.blocksize
        types = tuple("long long" if x.indices.dtype.itemsize == 8 else "int" for x in (items, part))
        arch, nnz, cuts = jit.architecture(p.sm or 0, ARCHS), int(items.data.size), len(rows.cuts)
        device, out_size = row_tiles.device_of(p.device_id), itemsize(p.out_dtype)

        @functools.cache
        def work(tile: Tile, most: int) -> BlockTasks:
            def build() -> BlockTasks:
                with cupy.cuda.Device(p.device_id):
                    table = block_tasks(*blocks_of_tiles(part, RowTiles(p.M, height, tile.rows)), most)
                    finish_arrays()  # synchronize!
                return table

            tasks: BlockTasks = a.kernel_arrays(("tasks of blocks", tile.rows, most), build)
            return tasks

        @functools.cache
        def launch(tile: Tile, most: int) -> tuple[Launch, int, BlockTasks]:
            table, smem = work(tile, most), tile.smem(width, size)
            wide = width * size % 16 == 0 and part.data.data.ptr % 16 == 0
            instance = _instance(p.a_dtype, p.out_dtype, types[0], tile.items, bool(rows.pieces),
                                 (types[1], height, width), tile.rows, tile.cols, wide)  # fmt: skip
            function = jit.load(SOURCE, instance, arch, p.device_id, smem)
            bins = bin_table(rows, tile.items.slots, tile.items.fill)
            leading = leading_blocks(table.number, tile, device.sms)
            fixed = (bins, rows.records, items.indices, items.data, nnz, p.K, rows.cuts, table.tasks, table.of_tile,
                     table.number, leading, part.data, part.indices, p.M)  # fmt: skip
            signature = (BinTable, *"PPPqqPPPiiPPqPPPPPiiqq")
            return Launch(function, signature, fixed, tile.items.threads, smem), bins.blocks, table

        sums, arrivals, left = Scratch(), Scratch(zeros=True), Scratch(zeros=True)

        @functools.lru_cache(maxsize=256)
        def slabs(n: int, vec: int) -> tuple[Tile, list[tuple[int, int]], int]:
            """The tile, (first column, columns) of the slabs that one grid can cover, and most blocks of a task."""
            tile = self.tile_for(p.changed(n=n), vec)
            most = most_blocks(p.changed(n=n), tile, device.sms)
            step = MAX_GRID_Y // 2 * tile.items.columns // tile.cols * tile.cols
            return tile, [(at, min(n - at, step)) for at in range(0, n, step)], most

        def prepare(o: Operands) -> list[Bound]:
            if o.ldb * size >= 2**31:
                raise LimitError(f"B: a line of {o.ldb} elements passes 2 GiB; multiply fewer columns at a time")
            vec = row_tiles.vector_width(size, out_size, o.n, o.b & 15, o.c & 15, o.ldb, o.ldc)
            tile, parts, most = slabs(o.n, vec)
            product, blocks, table = launch(tile, most)
            calls = []
            for first, n in parts:
                panels, columns = ceil_div(n, tile.items.columns), ceil_div(n, tile.cols)
                prefetch = ((p.K - 1) * o.ldb + n) * size if tile.items.prefetch and p.K else 0
                sums_at = arrivals_at = 0
                if cuts:
                    sums_at = sums.buffer(o.stream, rows.pieces * n * 4)
                    arrivals_at = arrivals.buffer(o.stream, cuts * panels * 4)
                left_at = left.buffer(o.stream, table.number * tile.rows * columns * tile.cols * 4)
                grid = (leading_blocks(table.number, tile, device.sms) + ceil_div(blocks, tile.items.tasks), panels, 1)
                tail = (sums_at, arrivals_at, left_at, o.b + first * size, o.c + first * out_size, n, o.ldb * size,
                        o.ldc, prefetch)  # fmt: skip
                calls.append(product.bind(grid, o.stream, *tail))
            return calls

        tile, _, most = slabs(max(1, p.n), max(1, 16 // size))
        table = launch(tile, most)[2]
        workspace = copied + rows.records.nbytes + table.nbytes
        return Prepared(row_major(p, prepare), f"{tile}, {table.number} tasks", workspace)


def items_problem(p: Problem) -> Problem:
    """The product with all scattered nonzeros as one CSR."""
    stored = sum(x.stored for x in p.operands[0].parts if x.format in SCATTERED)
    a = p.operands[0]
    return replace(p, operands=(Operand("csr", a.shape, a.dtype, (), stored, device=a.device), *p.operands[1:]))


def blocks_of(p: Problem) -> tuple[int, int, int]:
    """(number of blocks, height, width) of the part in blocks; without one, no block."""
    part = next((x for x in p.operands[0].parts if x.format in BLOCKS), None)
    if part is None:
        return 0, 1, 1
    height, width = dict(part.params)["blocksize"]
    return part.stored // (height * width), height, width


def leaders(tile: Tile) -> int:
    """Thread blocks of a multiprocessor that multiply blocks at most: half of those that it holds at a time."""
    return ceil_div(tile.items.blocks, 2)


def leading_blocks(tasks: int, tile: Tile, processors: int) -> int:
    """Thread blocks of a column panel that multiply blocks."""
    return min(tasks, processors * leaders(tile))


def most_blocks(p: Problem, tile: Tile, processors: int) -> int:
    """Blocks of a task at most: a share of the work of a leading thread block, at least ``LEAST_DEPTH`` columns."""
    stored, height, width = blocks_of(p)
    columns = stored * width * ceil_div(height, tile.rows) * ceil_div(max(1, p.n), tile.cols)
    return max(1, power_of_two(max(LEAST_DEPTH, columns // (processors * leaders(tile)))) // width)


class Work(NamedTuple):
    """What the tasks of blocks come to, as far as the counts of a problem tell."""

    tasks: float
    chunks: float
    """Chunks of columns of all tasks."""
    columns: int
    """Column tiles."""


def work_of(p: Problem, tile: Tile, processors: int) -> Work:
    """The tasks of a problem with at least one block, if all rows of blocks have as many."""
    stored, height, width = blocks_of(p)
    lists = min(stored, ceil_div(p.M, height))
    of_list, of_task = stored / lists, most_blocks(p, tile, processors)
    tasks = lists * ceil_div(height, tile.rows) * max(1.0, of_list / of_task)
    chunks = stored * ceil_div(height, tile.rows) * max(1.0, width / tile.depth(width, itemsize(p.a_dtype)))
    return Work(tasks, max(chunks, tasks), ceil_div(max(1, p.n), tile.cols))


def _instance(
    dtype: str, out: str, index: str, items: row_tiles.Tile, cut: bool, blocks: tuple[str, int, int], rows: int,
    cols: int, wide: bool,
) -> str:  # fmt: skip
    types = ", ".join((VALUE_TYPES[dtype].cuda, VALUE_TYPES[out].cuda, index))
    flags = f"{cut}, Blocks<{', '.join(map(str, blocks))}>, {rows}, {cols}, {wide}".replace("True", "true")
    return f"spmm_sum_rows<{types}, {items.template()}, {flags.replace('False', 'false')}>"
