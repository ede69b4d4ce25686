"""SpMM on BSR and DBSR with low blocks and wgmma: A becomes dense on its way to the registers.

Kernel: spmm_bsr_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0063-slots-and-blocks-in-registers.md.
"""

from __future__ import annotations

from typing import Any

from ....arrays.library import Array, ceil_div, namespace
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ..runtime import launch, refusals
from ..runtime.expanding import DEPTH
from ..runtime.record_products import InMemory, RecordProducts, Tile, refused, room_of, tiles_of
from . import spmm_bsr

VALUES = "bfloat16", "float16"
HEIGHTS, WIDTHS = (16, 32), (16, 32, 64)
"""Of blocks."""
MOST_BLOCKS = 1 << 28
"""Blocks are numbered in 28 bits."""
SMALL_TABLE = 1 << 20
"""Bytes of a table that no matrix is refused for."""
EMPTY_STEPS = 6
"""Steps of a tile of C with blocks that take as long as a tile without blocks, which starts and stores zeros like any
other. When such a tile counted as a fixed share of another one, this kernel was chosen for small layers that other
kernels multiply up to 1.3 times as fast."""
TILES = {h: tiles_of(record_rows=h, notes=True, image=16) for h in HEIGHTS}


def starts_of(indptr: Array, indices: Array, steps: int, width: int) -> Array:
    """uint32[block rows * steps + 1], ``starts`` of the kernel, for the block rows of a BSR. numpy or CuPy."""
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


def table_of(
    indptr: Array, indices: Array, row_ids: Array | None, rows: int, steps: int, width: int
) -> tuple[Array, int]:
    """(uint32, how many of the ``rows`` block rows have blocks): ``starts_of`` these, then their numbers and those of
    the others. numpy or CuPy."""
    xp, lengths = namespace(indices), indptr[1:] - indptr[:-1]
    some = xp.flatnonzero(lengths)  # synchronize!
    filled = some if row_ids is None else row_ids[some]
    empty = xp.ones(rows, bool)
    empty[filled] = False
    starts = starts_of(indptr[xp.append(some, lengths.size)], indices, steps, width)
    order = xp.concatenate([filled.astype("uint32"), xp.flatnonzero(empty).astype("uint32")])  # synchronize!
    return xp.concatenate([starts, order]), int(some.size)


class SpmmBSRExpanding(RecordProducts):
    """``out = A @ B`` for A in BSR or DBSR with blocks 16 or 32 high, 16, 32 or 64 wide, on sm_90a only.

    A plan keeps a table of 4 bytes for each block row that has blocks and 64 columns. Zeros inside of blocks meet no
    infinity of B.
    """

    name = "cuda.spmm_bsr_expanding_sm90a"
    source = "bsr/spmm_bsr_expanding_sm90a.cu"
    takes = spmm_of("bsr", "dbsr")
    tiles = TILES[16]
    compiled_params = (("blocksize", (16, 16)),)
    compiled_room = 2048

    def unsupported(self, p: Problem) -> list[str]:
        height, width = p.p["blocksize"]
        size, table = f"{height}x{width}", 4 * ceil_div(p.M, height) * ceil_div(p.K, DEPTH)
        most = max(SMALL_TABLE, p.nnz * itemsize(p.a_dtype) // 10)
        return (
            refusals.every(p, 80, VALUES)
            + refused(p, 0)
            + reasons(
                (
                    height not in HEIGHTS or width not in WIDTHS,
                    f"blocks must be 16 or 32 high, and 16, 32 or 64 wide, got {size}",
                ),
                (p.nnz // (height * width) >= MOST_BLOCKS, f"numbers of blocks must fit 28 bits, got nnz = {p.nnz}"),
                (table > most, f"its table would have {table:,} bytes, more than a tenth of the blocks"),
            )
        )

    def records(self, a: Any, p: Problem) -> InMemory:
        height, width = p.p["blocksize"]

        def build() -> tuple[Array, Array, int]:
            x = spmm_bsr.arrays_of(a)
            table, filled = table_of(x.indptr, x.indices, x.row_ids, ceil_div(p.M, height), ceil_div(p.K, DEPTH), width)
            # The copy engine reads blocks from where they are; an array on another boundary is copied.
            data = x.data if x.data.data.ptr % 16 == 0 else x.data.copy()
            launch.finish_arrays()  # synchronize!
            return data, table, filled

        data, table, filled = a.kernel_arrays("steps of block rows", build)
        return InMemory(data, table, 2 * height * DEPTH, filled)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = spmm_bsr.sample_problem("dbsr", (32, 32), "bfloat16", "bfloat16", COL, COL)
        some = [t for t in TILES[32] if str(t) in ("64x32, 6 blocks parts 8", "128x64", "128x192 parts 2", "128x256")]
        return *super().instances(), *(self.instance(t, self.expected_room(p), p) for t in some)

    def expected_room(self, p: Problem) -> int:
        return room_of(2 * p.p["blocksize"][0] * DEPTH)

    def tiles_of_c(self, p: Problem, tile: Tile) -> int:
        """A tile without blocks counts as the share that its time is of the time of a tile with blocks."""
        row_tiles, columns = ceil_div(p.M, tile.rows), ceil_div(p.n, tile.cols)
        filled = ceil_div(round(p.M / spmm_bsr.longer_rows(p)), tile.rows)
        share = min(1.0, EMPTY_STEPS / ceil_div(ceil_div(p.K, DEPTH), tile.parts))
        return round((filled + share * (row_tiles - filled)) * columns)

    def tiles_for(self, p: Problem) -> tuple[Tile, ...]:
        return TILES.get(p.p["blocksize"][0], self.tiles)  # also asked for blocks that are refused

    def leading(self, p: Problem) -> str:
        height, width = p.p["blocksize"]
        return f"{super().leading(p)}, {height}, {width}"
