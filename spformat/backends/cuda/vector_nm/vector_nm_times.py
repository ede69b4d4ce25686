"""The expected times of the vector n:m kernels: tiles with the parts that K is cut into, and ideal times."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ....arrays.library import ceil_div
from ....products.ideal import (
    b_alignment,
    load_us,
    memory_us,
    rounds,
    tile_us,
    traffic_us,
    unaligned_us,
)
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import Device, device_of
from .vector_nm_launch import choose_splits
from .vector_nm_tiles import MAX_PACKED_SHARE

TERMS = ("launch", "memory", "products", "loads", "steps", "tiles", "sums", "copy of B", "second launches",
         "slower of memory and loads", "unaligned C")  # fmt: skip
MOST_PARTS = 32
"""Parts that K may be cut into."""
_Tile = TypeVar("_Tile")


@dataclass(frozen=True)
class Split(Generic[_Tile]):
    """A tile, together with the parts that K is cut into."""

    tile: _Tile
    splits: int

    def __str__(self) -> str:
        return f"{self.tile} splits {self.splits}" if self.splits > 1 else str(self.tile)


def parts(tile: _Tile, tiles: int, steps: int, device: Device) -> Iterator[Split[_Tile]]:
    """The tile with one part along K, and with as many as fill the multiprocessors once and twice."""
    most = min(MOST_PARTS, steps // 2)
    once, twice = device.processors // max(1, tiles), 2 * device.processors // max(1, tiles)
    if twice <= 1:
        yield Split(tile, 1)
        return
    for count in sorted({1, *(max(1, min(most, x)) for x in (once, twice))}):
        yield Split(tile, count)


def filling(p: Problem, tile: Any) -> Split[Any]:
    """A tile of whole windows, with as many parts along K as fill the device about once."""
    steps = ceil_div(ceil_div(p.K, p.p["m"]), max(1, tile.depth // p.p["m"]))
    tiles = ceil_div(p.M, tile.rows) * ceil_div(p.n, tile.cols)
    return Split(tile, choose_splits(tiles, steps, device_of(p).processors))


def variant(p: Problem, split: Split[Any]) -> tuple[str, ...]:
    """By value size and tile."""
    return _variant(itemsize(p.a_dtype), split.tile)


@functools.lru_cache(maxsize=256)
def _variant(size: int, tile: Any) -> tuple[str, ...]:
    return f"{size}-byte values, {tile}", f"{size}-byte values"


def staged_quantities(
    p: Problem, split: Split[Any], kind: str, device: Device, packs: bool, slower: float = 1.0
) -> tuple[float, ...]:
    """``quantities`` for a tile that loads all rows of B in its windows, including those that A does not use.

    packs: where the tile's groups of rows leave many rows of B out, they are not loaded. slower: how much longer the
    products and steps of a tile take because its vectors are shorter than those that the constants were measured with.
    """
    params, tile = p.p, split.tile
    n, m, rows = params["n"], params["m"], tile.rows
    windows = ceil_div(p.K, m)
    staged = float(windows * m)
    groups = max(1, rows // params["vector_length"])
    share = 1 - (1 - n / m) ** groups  # of the rows that a tile names, if its groups choose at random
    if packs and share < MAX_PACKED_SHARE:
        staged *= share
    steps = ceil_div(windows, max(1, tile.depth // m))
    q = quantities(p, (rows, tile.cols), windows * n, staged, steps, split.splits, kind, device)
    return tuple(x * slower if term in ("products", "steps") else x for term, x in zip(TERMS, q, strict=True))


def short_vectors_on_tensor_cores(vector_length: int) -> float:
    """``slower`` for fragments of 16 rows: two lists of columns for each take twice the loads. On an H200 vectors of 8
    rows took 1.8 to 2.3 times as long as the constants for 32 rows say."""
    return 2.0 if vector_length < 16 else 1.0


def short_vectors_on_cuda_cores(vector_length: int) -> float:
    """``slower`` for warps of 32 rows x 64 columns whose threads have 8 x 8 of them.

    In the clocks of a multiprocessor, a column of A takes 16 for the products, 1 for A, and 2 for each row of B that is
    loaded, for as many rows of A as a thread multiplies it with. On an H200 single rows took 3 to 4.8 times as long as
    the constants for 32 rows say.
    """
    lists, together = min(4.0, max(1.0, 32 / vector_length)), min(8, vector_length)
    return (17 + 2 * lists * 8 / together) / 19


def quantities(
    p: Problem, extent: tuple[int, int], kept: float, staged: float, steps: int, splits: int, kind: str, device: Device
) -> tuple[float, ...]:
    """Ideal microseconds of each of TERMS.

    extent: rows and columns of a tile of C. kept, staged: columns of A that a row keeps, rows of B that a tile loads,
    both over all of K. steps: stages along K. splits: parts along K.

    products, loads, steps, tiles: in whole rounds of tiles; a step waits 0.1 us, a tile writes its part of C. sums:
    parts of K, written in float32 and read back. copy of B: a column-major or unaligned B is copied to aligned rows
    first. second launches: of the copy, and of the sums. unaligned C: C once more, where its lines start anywhere.
    """
    (rows, cols), size = extent, itemsize(p.a_dtype)
    turns = rounds(ceil_div(p.M, rows) * ceil_div(p.n, cols) * splits, device.processors)
    products = turns * tile_us(rows, cols, kept / splits, kind, device)
    loads = turns * load_us((rows * kept + cols * staged) * size / splits, device)
    waits = turns * ceil_div(steps, splits) * 0.1
    written = turns * load_us(rows * cols * itemsize(p.out_dtype), device)
    sums = memory_us((splits + 1) * p.M * p.n * 4, device) if splits > 1 else 0.0
    memory, copied, copy = of_every_tile(p, device)
    launches, slower = float(copied) + float(splits > 1), max(memory, loads)
    return 1.0, memory, products, loads, waits, written, sums, copy, launches, slower, unaligned_us(p, device)


@functools.lru_cache(maxsize=256)
def of_every_tile(p: Problem, device: Device) -> tuple[float, bool, float]:
    """Ideal microseconds of memory, whether B is copied, and the microseconds of the copy."""
    copied = p.b_layout == COL or b_alignment(p) < 16
    copy = memory_us(2 * p.K * p.n * itemsize(p.a_dtype), device) if copied else 0.0
    return traffic_us(p, device), copied, copy
