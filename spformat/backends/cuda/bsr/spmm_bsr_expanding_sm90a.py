"""SpMM on BSR and DBSR with blocks 16 high and wgmma: A becomes dense on its way to the registers.

Kernel: spmm_bsr_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0063-slots-and-blocks-in-registers.md.
"""

from __future__ import annotations

from typing import Any

from ....arrays.library import Array, ceil_div, namespace
from ....products.kernel import reasons, spmm_of
from ....products.problem import Problem
from ..runtime import launch, refusals
from ..runtime.expanding import DEPTH
from ..runtime.record_products import InMemory, RecordProducts, Tile, refused, room_of, with_parts
from . import spmm_bsr

VALUES = "bfloat16", "float16"
HEIGHT, WIDTHS = 16, (16, 32, 64)
"""Of blocks."""
MOST_BLOCKS = 1 << 28
"""Blocks are numbered in 28 bits."""
_EXTENTS = (
    (1, 16, 6), (1, 16, 4), (2, 16, 3), (1, 32, 6), (2, 32, 3), (1, 64, 4), (1, 64, 3), (2, 64, 2), (2, 64, 1),
    (1, 128, 3), (1, 128, 2), (2, 128, 1), (3, 128, 1), (2, 192, 1), (2, 256, 1),
)  # fmt: skip
TILES = with_parts(Tile(*extent, record_rows=HEIGHT, notes=True, image=16, most_ahead=192) for extent in _EXTENTS)


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
    compiled = (
        ("64x16, 6 blocks parts 8", "col"), ("64x16, 4 blocks", "wide"), ("128x16, 3 blocks", "col"),
        ("64x32, 6 blocks", "col"), ("128x32, 3 blocks", "row"), ("64x64, 4 blocks", "wide"),
        ("64x64, 3 blocks", "row"),
        ("128x64, 2 blocks parts 4", "wide"), ("128x64", "col"), ("64x128, 3 blocks", "row"),
        ("64x128, 2 blocks parts 2", "col"), ("128x128 parts 3", "col"), ("128x128", "wide"),
        ("192x128 parts 3", "col"), ("192x128", "row"), ("128x192", "col"), ("128x256 parts 2", "row"),
    )  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        height, width = p.p["blocksize"]
        size = f"{height}x{width}"
        return refusals.every(p, 80, VALUES) + refused(p, 0) + reasons(
            (height != HEIGHT or width not in WIDTHS, f"blocks must be 16x16, 16x32 or 16x64, got {size}"),
            (p.nnz // (height * width) >= MOST_BLOCKS, f"numbers of blocks must fit 28 bits, got nnz = {p.nnz}"),
        )  # fmt: skip

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
