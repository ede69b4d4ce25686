"""SpMM on BSR and DBSR with blocks 16 high and wgmma: A becomes dense on its way to the registers.

Kernel: spmm_bsr_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0063-slots-and-blocks-in-registers.md.
"""

from __future__ import annotations

from typing import Any

from ....arrays.library import Array, ceil_div, namespace
from ....products.kernel import reasons, spmm_of
from ....products.problem import Problem, itemsize
from ..runtime import launch, refusals
from ..runtime.expanding import DEPTH
from ..runtime.record_products import InMemory, RecordProducts, refused, room_of, tiles_of
from . import spmm_bsr

VALUES = "bfloat16", "float16"
HEIGHT, WIDTHS = 16, (16, 32, 64)
"""Of blocks."""
MOST_BLOCKS = 1 << 28
"""Blocks are numbered in 28 bits."""
SMALL_TABLE = 1 << 20
"""Bytes of a table that no matrix is refused for."""
TILES = tiles_of(record_rows=HEIGHT, notes=True, image=16, most_ahead=192)


def starts_of(indptr: Array, indices: Array, steps: int, width: int) -> Array:
    """uint32[block rows * steps + 1], ``starts`` of the kernel, for all block rows of a BSR. numpy or CuPy."""
    xp, stored, together = namespace(indices), int(indices.size), DEPTH // width
    rows = int(indptr.size) - 1
    row = xp.searchsorted(indptr[1:], xp.arange(stored), side="right")
    step = row * steps + indices // together
    before = xp.searchsorted(step, xp.arange(rows * steps + 1))
    bits = xp.zeros(stored + 1, "int64")
    xp.cumsum(xp.left_shift(xp.int64(1), indices.astype("int64") % together), out=bits[1:])
    there = xp.zeros(rows * steps + 1, "int64")
    there[:-1] = bits[before[1:]] - bits[before[:-1]]
    return (before | there << 28).astype("uint32")


class SpmmBSRExpanding(RecordProducts):
    """``out = A @ B`` for A in BSR or DBSR with blocks 16 high, 16, 32 or 64 wide, on sm_90a only.

    A plan keeps a table of 4 bytes for each 16 rows and 64 columns. Zeros inside of blocks meet no infinity of B.
    """

    name = "cuda.spmm_bsr_expanding_sm90a"
    source = "bsr/spmm_bsr_expanding_sm90a.cu"
    takes = spmm_of("bsr", "dbsr")
    tiles = TILES
    compiled_params = (("blocksize", (16, 16)),)
    compiled_room = 2048

    def unsupported(self, p: Problem) -> list[str]:
        height, width = p.p["blocksize"]
        size, table = f"{height}x{width}", 4 * ceil_div(p.M, HEIGHT) * ceil_div(p.K, DEPTH)
        most = max(SMALL_TABLE, p.nnz * itemsize(p.a_dtype) // 10)
        return (
            refusals.every(p, 80, VALUES)
            + refused(p, 0)
            + reasons(
                (height != HEIGHT or width not in WIDTHS, f"blocks must be 16x16, 16x32 or 16x64, got {size}"),
                (p.nnz // (height * width) >= MOST_BLOCKS, f"numbers of blocks must fit 28 bits, got nnz = {p.nnz}"),
                (table > most, f"its table would have {table:,} bytes, more than a tenth of the blocks"),
            )
        )

    def records(self, a: Any, p: Problem) -> InMemory:
        def build() -> tuple[Array, Array]:
            x = spmm_bsr.arrays_of(a)
            rows, steps = ceil_div(p.M, HEIGHT), ceil_div(p.K, DEPTH)
            indptr = x.indptr if x.row_ids is None else spmm_bsr.every_row(x.row_ids, x.indptr, rows)
            starts = starts_of(indptr, x.indices, steps, p.p["blocksize"][1])
            # The copy engine reads blocks from where they are; an array on another boundary is copied.
            data = x.data if x.data.data.ptr % 16 == 0 else x.data.copy()
            launch.finish_arrays()  # synchronize!
            return data, starts

        data, starts = a.kernel_arrays("steps of block rows", build)
        return InMemory(data, starts, 2 * HEIGHT * DEPTH)

    def expected_room(self, p: Problem) -> int:
        return room_of(2 * HEIGHT * DEPTH)

    def leading(self, p: Problem) -> str:
        return f"{super().leading(p)}, {p.p['blocksize'][1]}"
