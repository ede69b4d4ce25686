"""The order in which the blocks of a product take tiles of C.  Device: include/spformat/tile_order.cuh."""

from __future__ import annotations

from ....arrays.library import ceil_div

PART_OF_B = 24 << 20
"""Bytes of B that stay in L2 while A passes; about half of it."""


def columns_together(column_bytes: int, n: int, cols: int) -> int:
    """Columns of tiles that go together: as many as have up to ``PART_OF_B`` bytes of B, about equally many each time.

    column_bytes: of a column of B. n: columns of B. cols: those of a tile. At least 1.
    """
    columns = max(1, ceil_div(n, cols))
    return ceil_div(columns, ceil_div(columns, max(1, PART_OF_B // max(1, column_bytes * cols))))
