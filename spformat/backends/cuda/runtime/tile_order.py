"""The order in which blocks take tiles of C, and whether L2 keeps A.  Device: include/spformat/tile_order.cuh.

What was measured is in docs/decisions/0050-weights-that-come-once.md.
"""

from __future__ import annotations

from typing import NamedTuple

from ....arrays.library import ceil_div

STAYS = 12 << 20
"""Bytes of A that stay in L2 beside B and C, a quarter of it: up to here A comes from memory once in any order."""
PART_OF_B = 24 << 20
"""Bytes of B that stay in L2 while A passes; about half of it."""
IN_STEP = 6
"""Least tiles of a row of tiles that go together where blocks take several tiles. On an H100 6, 8 and 12 gained, 3 and
4 did not: blocks drift apart, and the fewer share a line of A, the sooner the next ones take its place."""


class TileOrder(NamedTuple):
    """The arguments of a kernel."""

    together: int
    """Columns of tiles that go together; 1: all rows of tiles, then the next column."""
    once: int
    """1: A is evicted from L2 first, as all blocks that need a part of it do so at one time."""


def read_once(a_bytes: int, columns: int, tiles: int, at_once: int) -> bool:
    """Whether A, too large to stay in L2, is read at one time only in any order of the tiles.

    columns: of tiles. tiles: all of them, those of every part of K. at_once: how many run at one time.
    """
    return a_bytes > STAYS and (columns == 1 or tiles <= at_once)


def tile_order(a_bytes: int, b_bytes: int, rows: int, columns: int, parts: int, at_once: int) -> TileOrder:
    """The order of rows x columns tiles.

    a_bytes: of A as it is stored. b_bytes: of B for a column of tiles. parts: of K, each with tiles of its own.
    at_once: tiles that run at one time. Where only some columns go together, A comes once for each group
    of them; groups are about equally wide.
    """
    if read_once(a_bytes, columns, rows * columns * parts, at_once):
        return TileOrder(1, 1)
    if a_bytes <= STAYS or columns < IN_STEP or parts > 1:
        return TileOrder(1, 0)
    groups = ceil_div(columns, max(1, PART_OF_B // max(1, b_bytes)))
    return TileOrder(ceil_div(columns, groups), int(groups == 1))
