"""SpMM on a sum of parts in one launch: blocks or 2:4, and scattered nonzeros, added up before C is written.

Kernel: spmm_sum.cu. It is mostly slower than its parts one after the other, so that it runs only where a call names it
(docs/decisions/0034-fused-sums.md).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, namespace, power_of_two
from ....formats.sum import Sum
from ....products.ideal import memory_us, operands_bytes, product_us, traffic_us
from ....products.kernel import Kernel, reasons, spmm_of
from ....products.problem import COL, ROW, Problem, itemsize
from ....products.roofline import CUDA_32, TENSOR_16, TF32_THREE, device_of, shared_limit
from ..bsr import spmm_bsr
from ..csr.spmm_csr import SpmmCSR
from ..ell_buckets.spmm_ell_buckets import SpmmELLBuckets
from ..runtime import jit, refusals, row_tiles
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import MAX_GRID_Y, Bound, Launch, Operands, Prepare, finish_arrays
from ..runtime.scratch import Scratch
from ..runtime.transpose import row_major
from .structured import BLOCKS, STATIC, TWO_FOUR, Structured, Tile, part_problem, structured_of
from .sum_work import CHUNK, Items, RowTiles, Tasks, scattered, tasks

TYPES = ("float32", "float16", "bfloat16")
SCATTERED = ("csr", "ell-buckets")
K_MAX = 2**31 - 2048
"""Rows of B are counted in int32, a chunk past the end included."""
LEAST_WORK = 512
"""Rows of B: a tile with up to twice as many is not cut."""
LAUNCH_US, PEAK_SHARE = 6.0, 0.45
"""What the fitted models of the parts' kernels have for a launch, and the share of the peak that mma.sync and CUDA
cores are expected to reach. Both only enter the prediction."""
OWN: dict[str, Kernel] = {
    "bsr": spmm_bsr.KERNEL, "dbsr": spmm_bsr.KERNEL, "csr": SpmmCSR(), "ell-buckets": SpmmELLBuckets(),
}  # fmt: skip
"""Kernels of the parts, whose models the prediction uses."""


class SpmmSum(CudaKernel):
    """C = (A1 + A2 + ..) @ B for at most one part in bsr, dbsr or two-four and any number in csr and ell-buckets.

    The same bits every run. float32 without tensor cores. B column-major: through a transposed copy.
    """

    name = "cuda.spmm_sum"
    takes = spmm_of(Sum.name)
    archs = ("sm_80",)
    epilogue = True
    multiplies_zeros = True  # what a 2:4 part does not keep is multiplied as zero
    by_name_only = "mostly slower than its parts one after the other (decision 0034)"

    def unsupported(self, p: Problem) -> list[str]:
        parts = p.operands[0].parts
        others = [
            f"part {i} ({q.format})" for i, q in enumerate(parts) if q.format not in (*BLOCKS, TWO_FOUR, *SCATTERED)
        ]
        structured = [q.format for q in parts if q.format in (*BLOCKS, TWO_FOUR)]
        return refusals.every(p, 80, TYPES) + reasons(
            (not parts, "the problem names no parts"),
            (bool(others), f"takes parts in bsr, dbsr, two-four, csr and ell-buckets, not {', '.join(others)}"),
            (len(structured) > 1, f"takes one part in bsr, dbsr or two-four, got {', '.join(structured)}"),
            (bool(parts) and len(structured) == len(parts), "takes one part or more in csr or ell-buckets"),
            (p.K > K_MAX, f"K must be at most {K_MAX}, got {p.K}"),
            (TWO_FOUR in structured and p.K >= 1 << 24, f"K must be below 2^24 with a part in two-four, got {p.K}"),
            (p.M > K_MAX, f"M must be at most {K_MAX}, got {p.M}"),
        )

    def expected_us(self, p: Problem) -> float:
        """A prediction: the times that the parts' own kernels expect, less what one launch saves.

        For each part but the first that is a launch, and B and C once more. Items cost no rows of B beside a 2:4 part,
        whose products take the time of dense ones; float32 blocks take that of the CUDA cores.
        """
        first, *others = sorted(p.operands[0].parts, key=lambda x: x.format in SCATTERED)  # stable
        q, device, size = part_problem(p, first), device_of(p), itemsize(p.a_dtype)
        kind = TENSOR_16 if size == 2 else CUDA_32
        if q.format == TWO_FOUR:
            products = product_us(2.0 * p.M * p.K * p.n, kind, device) / PEAK_SHARE
            items = memory_us(sum(x.stored for x in others) * (size + 6), device)
            return LAUNCH_US + max(products, traffic_us(q, device)) + items
        time = OWN[q.format].expected_us(q)
        if size == 4 and q.format in BLOCKS:
            slower = (product_us(2.0 * q.nnz * p.n, x, device) for x in (CUDA_32, TF32_THREE))
            time += max(0.0, next(slower) - next(slower)) / PEAK_SHARE
        saved = LAUNCH_US + memory_us(operands_bytes(q), device)
        time += sum(OWN[x.format].expected_us(part_problem(p, x)) - saved for x in others)
        return max(time, LAUNCH_US + traffic_us(q, device))

    def instances(self) -> tuple[str, ...]:
        """C++ names for the compile tests: every kind of parts, wide and single loads, both layouts of C."""
        return (
            "spmm_sum<__nv_bfloat16, __nv_bfloat16, Blocks<int, 32, 32>, 32, 128, 1, true, true, false>",
            "spmm_sum<__half, float, Blocks<long long, 5, 7>, 16, 64, 1, false, false, true>",
            "spmm_sum<float, float, Blocks<int, 64, 64>, 64, 64, 1, true, true, false>",
            "spmm_sum<__nv_bfloat16, float, TwoFour, 128, 128, 2, false, true, true>",
            "spmm_sum<__half, __half, TwoFour, 64, 64, 1, false, false, false>",
            "spmm_sum<float, float, TwoFour, 64, 64, 1, false, true, false>",
            "spmm_sum<__half, __half, Nothing, 32, 128, 1, false, true, false>",
            "spmm_sum<float, float, Nothing, 32, 64, 1, false, false, true>",
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        import cupy

        tile, size = tile_for(p), itemsize(p.a_dtype)
        main = structured_of(a.parts, tile, p)
        tiles = RowTiles(p.M, main.height, tile.rows)

        def build_items() -> Items:
            with cupy.cuda.Device(p.device_id):
                rest = [x.to_csr() for x in a.parts if x.name in SCATTERED]
                if main.merges:  # a zero that is stored may lie over a value of another part
                    rest = [x.without_zeros() for x in rest]
                items = scattered(rest, tiles, main.chunks)
                finish_arrays()  # synchronize!
            return items

        items = a.kernel_arrays(("scattered items", tiles, main.chunks), build_items)
        rows_of_b = main.rows_of_b(tiles) + (0 if main.merges else int(items.values.size))
        shares = 2 * row_tiles.device_of(p.device_id).sms
        budget = power_of_two(max(LEAST_WORK, rows_of_b * ceil_div(max(1, p.n), tile.cols) // shares))

        def build_tasks() -> Tasks:
            with cupy.cuda.Device(p.device_id):
                xp = namespace(items.first)
                # Merged items belong to their chunks, not to tasks.
                first_item = xp.zeros(tiles.number + 1, np.int64) if main.merges else items.first
                table = tasks(*main.blocks_of(tiles, xp), main.width, first_item, budget)
                finish_arrays()  # synchronize!
            return table

        table = a.kernel_arrays(("tasks", tiles, main.merges, budget), build_tasks)
        workspace = items.nbytes + int(table.table.nbytes + table.cuts.nbytes)
        prepare = row_major(p.changed(out_layout=ROW), self._launches(p, tile, main, items, table, size))
        return Prepared(prepare, f"{tile}, {len(table.table)} tasks", workspace)

    def _launches(self, p: Problem, tile: Tile, main: Structured, items: Items, table: Tasks, size: int) -> Prepare:
        """The launches for a row-major B."""
        arch, smem = jit.architecture(p.sm or 80, self.archs), tile.smem(size, main.depth)
        types = ", ".join(VALUE_TYPES[t].cuda for t in (p.a_dtype, p.out_dtype))
        arrays = items.first, items.columns, items.places, items.values
        fixed = (table.table, table.cuts, *main.arguments, *arrays, p.M, p.K)
        cuts, count = len(table.cuts), len(table.table)

        @functools.cache
        def variant(wide_b: bool) -> Launch:
            wide_a = main.depth > 0 and not main.merges and main.width * size % 16 == 0
            flags = ", ".join(str(f).lower() for f in (wide_a, wide_b, p.out_layout == COL))
            instance = f"spmm_sum<{types}, {main.template}, {tile.rows}, {tile.cols}, {tile.warps}, {flags}>"
            function = jit.load("sum/spmm_sum.cu", instance, arch, p.device_id, smem)
            return Launch(function, "PPPPPiiPPPPqqPPPPqqqPff", fixed, tile.threads, smem)

        variant(True)  # compiled now, the other at the first call that needs it
        sums, arrivals = Scratch(), Scratch(zeros=True)

        def prepare(o: Operands) -> tuple[Bound]:
            columns = ceil_div(o.n, tile.cols)
            sums_at, arrivals_at = 0, 0
            if cuts:
                sums_at = sums.buffer(o.stream, table.pieces * columns * tile.rows * tile.cols * 4)
                arrivals_at = arrivals.buffer(o.stream, cuts * columns * 4)
            launch = variant(o.b % 16 == 0 and o.ldb * size % 16 == 0)
            tail = sums_at, arrivals_at, o.b, o.c, o.n, o.ldb, o.ldc, o.bias, o.alpha, o.beta
            return (launch.bind((count, min(columns, MAX_GRID_Y), 1), o.stream, *tail),)

        return prepare


def tile_for(p: Problem) -> Tile:
    """Rows as the blocks of the first part need them, columns so that the multiprocessors have work."""
    device, size = device_of(p), itemsize(p.a_dtype)
    first = next((x for x in p.operands[0].parts if x.format not in SCATTERED), None)
    wide = 128 if size == 2 and p.n > 64 else 64
    if first is None:
        return Tile(32, wide)
    if first.format == TWO_FOUR:
        enough = ceil_div(p.M, 128) * ceil_div(p.n, wide) >= device.processors
        options = [Tile(128, wide, 2)] * (size == 2 and enough) + [Tile(64, wide), Tile(32, wide)]
        limit = shared_limit(p.sm) - STATIC
        return next(t for t in options if t.smem(size, CHUNK) <= limit or t.rows == 32)
    height = dict(first.params)["blocksize"][0]
    rows = 16 * ceil_div(min(height, 64), 16)
    blocks = ceil_div(p.M, min(height, rows))
    cols = 64 if blocks * ceil_div(p.n, wide) < device.processors else wide
    few = blocks * ceil_div(p.n, cols) < 2 * device.processors
    return Tile(rows, cols, 2 if few and rows % 32 == 0 else 1)  # more warps share the items of a tile
