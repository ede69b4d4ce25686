"""What fused products of a sum derive from its parts: the scattered nonzeros, tile after tile or row after row, and
tables of tasks.

All are computed with numpy or CuPy, so this runs, and is tested, without a GPU. The kernels are in spmm_sum.cu and
spmm_sum_rows.cu.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....arrays.dtypes import bits
from ....arrays.library import Array, ceil_div, namespace
from ....arrays.segments import counts_of, offsets_from_counts, pointer, rank_in_row, rows_of, stable_order
from ....formats.csr import CSR

CHUNK = 64
"""Columns of a 2:4 part that are multiplied at a time: those of a tile of its metadata."""


class RowTiles(NamedTuple):
    """How the rows of A are cut: blocks of ``height`` rows, and those into tiles of at most ``rows`` rows."""

    M: int
    height: int
    rows: int

    @property
    def in_block(self) -> int:
        """Tiles of a block."""
        return ceil_div(self.height, self.rows)

    @property
    def number(self) -> int:
        """Tiles of the matrix. Those of the last block may lie beyond M."""
        return ceil_div(self.M, self.height) * self.in_block

    def places(self, rows: Array) -> tuple[Array, Array]:
        """The tile of each row, and its place in that tile."""
        inside = rows % self.height
        return rows // self.height * self.in_block + inside // self.rows, inside % self.rows


class Items(NamedTuple):
    """The scattered nonzeros, ordered by tile, then by row; with ``chunks``, by tile, then by chunk of columns."""

    columns: Array
    """uint32"""
    places: Array
    """uint16: the row in the tile; with chunks, row * CHUNK + the column in the chunk."""
    values: Array
    """As unsigned integers of their width."""
    first: Array
    """int64: the first item of each tile, or of each chunk of each tile, and the number of items."""

    @property
    def nbytes(self) -> int:
        return int(sum(x.nbytes for x in self))


def scattered(parts: list[CSR], tiles: RowTiles, chunks: int = 0) -> Items:
    """The items of several matrices of one shape, one or more. chunks: of columns in a row, where they count."""
    xp = namespace(parts[0].data)
    rows = xp.concatenate([p.rows() for p in parts])
    columns = xp.concatenate([p.indices.astype(np.int64) for p in parts])
    values = xp.concatenate([bits(p.data) for p in parts])
    tile, place = tiles.places(rows)
    if chunks:
        group, groups = tile * chunks + columns // CHUNK, tiles.number * chunks
        place = place * CHUNK + columns % CHUNK
        order = stable_order(group, groups)
    else:
        group, groups = tile, tiles.number
        order = stable_order(rows, tiles.M) if len(parts) > 1 else None
    first = offsets_from_counts(counts_of(group, groups))
    columns, place = columns.astype(np.uint32), place.astype(np.uint16)
    if order is not None:
        columns, place, values = columns[order], place[order], values[order]
    return Items(columns, place, values, first)


class Tasks(NamedTuple):
    """What the thread blocks compute, tasks of cut tiles first, then the longest."""

    table: Array
    """int64[tasks, 4]: first block; first item; number of blocks | of items << 32; tile | number of its cut << 32,
    -1 for a tile that is one task."""
    cuts: Array
    """int32[cut tiles, 2]: first task, number of tasks."""
    pieces: int
    """Tasks of cut tiles."""


def tasks(first_block: Array, blocks: Array, width: int, first_item: Array, budget: int) -> Tasks:
    """The table for tiles with ``blocks`` blocks from ``first_block`` on and the items from ``first_item`` on.

    first_block, blocks: int64[tiles]; first_item: int64[tiles + 1]; width: columns of a block. The work of a task is
    the number of rows of B that it loads: ``width`` for a block, one for an item. A tile of more than twice the
    budget is cut into tasks of equal work within it, blocks before items.
    """
    xp = namespace(blocks)
    items = first_item[1:] - first_item[:-1]
    work = blocks * width + items
    parts = xp.where(work > 2 * budget, -(-work // budget), 1)
    offsets = offsets_from_counts(parts)
    total = int(offsets[-1])  # synchronize!
    tile = rows_of(offsets, total)
    rank = rank_in_row(offsets, tile)
    parts_of, work_of, blocks_of = parts[tile], work[tile], blocks[tile]
    begin, end = work_of * rank // parts_of, work_of * (rank + 1) // parts_of
    block, block_end = xp.minimum(begin // width, blocks_of), xp.minimum(end // width, blocks_of)
    item, item_end = xp.maximum(begin - blocks_of * width, 0), xp.maximum(end - blocks_of * width, 0)
    is_piece = parts_of > 1
    whole = xp.flatnonzero(~is_piece)  # synchronize!
    size = (end - begin)[whole]
    order = xp.concatenate((xp.flatnonzero(is_piece), whole[xp.argsort(-size, kind="stable")]))
    cut_tile = parts > 1
    cut = xp.where(is_piece, (xp.cumsum(cut_tile, dtype=np.int64) - 1)[tile], -1)
    columns = (
        first_block[tile] + block,
        first_item[:-1][tile] + item,
        (block_end - block) | ((item_end - item) << 32),
        tile | (cut << 32),
    )
    counts = parts[cut_tile]
    cuts = xp.stack((offsets_from_counts(counts)[:-1], counts), axis=1).astype(np.int32)
    return Tasks(xp.ascontiguousarray(xp.stack(columns, axis=1)[order]), cuts, int(counts.sum()))  # synchronize!


def merged(parts: list[CSR]) -> CSR:
    """The items of several matrices of one shape as one CSR, row after row, those of each row part after part.

    Columns do not ascend in a row, and stored zeros stay.
    """
    if len(parts) == 1:
        return parts[0]
    xp, (M, _) = namespace(parts[0].data), parts[0].shape
    rows = xp.concatenate([p.rows() for p in parts])
    order = stable_order(rows, M)
    columns = xp.concatenate([p.indices for p in parts])[order]
    values = xp.concatenate([bits(p.data) for p in parts])[order]
    indptr = pointer(counts_of(rows, M), rows.size)
    return CSR.trusted(shape=parts[0].shape, indptr=indptr, indices=columns, data=values.view(parts[0].dtype))


class BlockTasks(NamedTuple):
    """What thread blocks multiply at a time: some neighbouring blocks of a tile of rows."""

    tasks: Array
    """int64[tasks, 3], the longest first: first block; number of blocks | number of the task << 32; tile."""
    of_tile: Array
    """int32[tiles, 2]: the first of the tile's tasks by its number, and how many it has."""

    @property
    def number(self) -> int:
        """Tasks of all tiles."""
        return len(self.tasks)

    @property
    def nbytes(self) -> int:
        return int(self.tasks.nbytes + self.of_tile.nbytes)


def block_tasks(first: Array, counts: Array, most: int) -> BlockTasks:
    """The tasks of tiles with ``counts`` blocks from block ``first`` on, int64[tiles], each of ``most`` blocks or less.

    The blocks of a tile are dealt to its tasks evenly. A tile without blocks has no task.
    """
    xp = namespace(counts)
    parts = -(-counts // most)
    offsets = offsets_from_counts(parts)
    total = int(offsets[-1])  # synchronize!
    tile = rows_of(offsets, total)
    rank, of_tile = rank_in_row(offsets, tile), counts[tile]
    begin, end = of_tile * rank // parts[tile], of_tile * (rank + 1) // parts[tile]
    columns = first[tile] + begin, (end - begin) | (xp.arange(total, dtype=np.int64) << 32), tile
    table = xp.stack(columns, axis=1)[xp.argsort(begin - end, kind="stable")]
    return BlockTasks(xp.ascontiguousarray(table), xp.stack((offsets[:-1], parts), axis=1).astype(np.int32))
