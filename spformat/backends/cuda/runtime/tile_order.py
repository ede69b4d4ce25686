"""The order in which blocks take tiles of C.  Device: include/spformat/tile_order.cuh.

What was measured is in docs/decisions/0050-weights-that-come-once.md.
"""

from __future__ import annotations

from ....arrays.library import ceil_div

PART_OF_B = 24 << 20
"""Bytes of B that stay in L2 while A passes; about half of it."""
LEAST = 6
"""The fewest columns of tiles that go together. On an H100 6 and more gained, 3 and 4 did not: blocks drift apart,
and the fewer share a line of A, the sooner the next ones take its place."""


def columns_together(b_bytes: int, rows: int, columns: int, parts: int, at_once: int) -> int:
    """How many columns of tiles go together; 1: all rows of tiles, then the next column.

    b_bytes: of B for a column of tiles. rows, columns: of tiles. parts: of K, each with tiles of its own. at_once:
    tiles that run at one time. Where only some columns go together, A comes once for each group of them; groups are
    about equally wide.
    """
    if rows * columns <= at_once or columns < LEAST or parts > 1:
        return 1
    groups = ceil_div(columns, max(1, PART_OF_B // max(1, b_bytes)))
    return ceil_div(columns, groups)
