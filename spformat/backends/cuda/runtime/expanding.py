"""What the kernels for Hopper share that expand A into the registers of wgmma (include/spformat/expanding.cuh).

K may be cut into parts, each a block of a cluster. The copy engine loads B and
writes C, in both layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ....arrays.library import ceil_div, round_up
from ....products.ideal import load_us, memory_us, rounds, tile_us, traffic_us, unaligned_us
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import TENSOR_16, Device
from . import tensor_map
from .launch import Operands

DEPTH, SLOT, STRIP = 64, 2048, 16 * 16
"""Columns of A in a step, bytes in which a warp stages C, elements of C that a block adds up at a time; as in the
kernels."""
HANDS_OVER = 384
"""Columns of all warpgroups of a tile from which on those that multiply take registers from one that loads; as in the
header."""
PARTS = range(1, 9)
"""Parts of K, each a block of a cluster."""
TERMS = ("launch", "steps", "memory", "loads", "products", "clusters", "parts", "C by stores")
"""What ``quantities`` are."""
TAIL = (tensor_map.TensorMap, *"Pqq", tensor_map.TensorMap, *"iPiq")
"""The types of ``tail``."""


@dataclass(frozen=True)
class Tile:
    """``rows`` x ``cols`` of C, by warpgroups that multiply 64 rows each and a warp that loads.

    resident: blocks of threads that a multiprocessor runs at a time.
    """

    warpgroups: int
    cols: int
    resident: int

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def cols_loaded(self) -> int:
        """Columns of a row-major B that a step loads: boxes of 64 columns, if a tile has more than 32."""
        return self.cols if self.cols < 64 else round_up(self.cols, 64)

    @property
    def hands_over(self) -> bool:
        """Whether the warp that loads has a warpgroup of its own, which hands its registers over to the others."""
        return self.warpgroups * self.cols >= HANDS_OVER

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.hands_over else 32)


def run_strips(tile: Tile, parts: int) -> int:
    """With parts of K: strips of 16 columns that a warp adds up and stores together; as in the header."""
    of_warp = tile.cols // 16 // parts
    return next((run for run in (4, 2) if of_warp >= run and tile.cols % (16 * run) == 0), 1)


def way_out(tile: Tile, parts: int) -> int:
    """Bytes of shared memory in which sums become C; as in the header."""
    runs = tile.rows * tile.cols // STRIP // run_strips(tile, parts)
    own = ceil_div(runs, parts) * run_strips(tile, parts)
    handed_over = own * parts * STRIP * 4 + 128 if parts > 1 else 0
    return handed_over + tile.rows // 16 * (2 * SLOT if parts == 1 and tile.cols > 128 else SLOT)


def wide_enough(cols: int, n: int) -> bool:
    """Whether a tile has between a quarter of C's columns and twice as many; a quarter of 256 is always enough."""
    return min(n, 256) <= 4 * cols < 8 * max(n, 16)


def tiles_of(p: Problem, tile: Tile, n: int | None = None) -> int:
    """Tiles of C; n: of so many columns instead of those of ``p``."""
    return ceil_div(p.M, tile.rows) * ceil_div(p.n if n is None else n, tile.cols)


def longest(tiles: int, tile: Tile, parts: int, steps: int, device: Device) -> int:
    """Steps of K that a multiprocessor passes one after the other, out of ``steps`` along all of K.

    Clusters that do not fit at the same time wait for the others.
    """
    return rounds(tiles, device.clusters(parts, tile.resident)) * ceil_div(steps, parts)


def of_all_blocks(tiles: int, parts: int, steps: int, device: Device) -> int:
    """Steps that all blocks of the multiprocessor that has the most of them pass, at a time or one after the other."""
    return rounds(tiles, device.clusters(parts)) * ceil_div(steps, parts)


def parts_of(tiles: int, tile: Tile, steps: int, device: Device) -> Iterator[int]:
    """Numbers of parts that are worth considering for so many ``tiles`` of C: each leaves a multiprocessor fewer steps
    than all smaller ones, and all clusters run at one time.

    Clusters that wait for others were the fastest way in 36 of 1,283 measured products, by 1.21 times at most, and took
    up to 2.8 times as long as expected: each round of them starts and ends by barriers.
    """
    least = None
    for parts in PARTS[: max(1, steps)]:
        if parts > 1 and tiles > device.clusters(parts, tile.resident):
            return
        own = longest(tiles, tile, parts, steps, device)
        if least is None or own < least:
            least = own
            yield parts


def rest_of(tiles: int, tile: Tile, device: Device) -> int:
    """Of so many ``tiles`` of C those that are left when as many as run at one time have run, once or more often."""
    at_once = device.clusters(1, tile.resident)
    return tiles % at_once if tiles > at_once else 0


def rest_parts(tiles: int, tile: Tile, steps: int, device: Device) -> int:
    """In how many parts of K the tiles of ``rest_of`` run at one time; 1 if that is not worth considering."""
    left = rest_of(tiles, tile, device)
    fitting = [parts for parts in PARTS[: max(1, steps)] if left <= device.clusters(parts, tile.resident)]
    return max(fitting, default=1) if left else 1


def quantities(
    p: Problem, tile: Tile, parts: int, passed: int, of_all: int, step_bytes: float, device: Device
) -> tuple[float, ...]:
    """Ideal microseconds of each of ``TERMS``. passed: ``longest``; of_all: steps that all blocks of a multiprocessor
    pass; step_bytes: loaded from L2 in each. Products are those of a dense A.

    launch, clusters (their barriers): constants. parts: their number. steps: those that a block passes one after the
    other, in microseconds of one each. C by stores: C, where the copy engine cannot write its lines.
    """
    products = of_all * tile_us(tile.rows, tile.cols, DEPTH, TENSOR_16, device)
    loads = of_all * load_us(step_bytes, device)
    several, size = parts > 1, itemsize(p.out_dtype)
    stored = memory_us(p.M * p.n * size, device) if size > 2 else unaligned_us(p, device)
    return 1.0, passed, traffic_us(p, device), loads, products, float(several), float(several * parts), stored


def copy_of_b_us(p: Problem, launches: float, slower: float, device: Device) -> tuple[float, float]:
    """What a copy of B costs before its bytes count, in launches, and the ideal microseconds of its bytes, as many
    times as ``slower`` says; zeros where B is not copied."""
    return launches, slower * memory_us(2 * p.K * p.n * itemsize(p.b_dtype), device) if launches else 0.0


def grid(o: Operands, p: Problem, tile: Tile, parts: int) -> tuple[int, int, int]:
    """The blocks of a product."""
    return tiles_of(p, tile, o.n) * parts, 1, 1


def tail(
    o: Operands, p: Problem, tile: Tile, parts: int, b: int, ldb: int, b_col: bool,
    mapped: tuple[int, int] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of a kernel behind those of A.

    b, ldb, b_col: address, pitch in elements and layout of B, or of a copy of it that the copy engine can address.
    mapped: address and pitch of a copy that the product itself writes, which the copy engine loads instead.
    """
    at, pitch = mapped or (b, ldb)
    extents, box = ((p.K, o.n), (DEPTH, tile.cols)) if b_col else ((o.n, p.K), (min(tile.cols, 64), DEPTH))
    b_map = tensor_map.tiled(at, p.b_dtype, extents, (pitch,), box, 2 * box[0])
    b_steps = (1, ldb) if b_col else (ldb, 1)
    c_col, strip = p.out_layout == COL, math.gcd(tile.cols, 64) if parts == 1 else 16 * run_strips(tile, parts)
    c_map, by_copies = tensor_map.UNMAPPED, 0
    if itemsize(p.out_dtype) == 2 and tensor_map.writable(o.c, p.M if c_col else o.n, o.ldc, 2):
        c_box, c_extents = ((16, strip), (p.M, o.n)) if c_col else ((strip, 16), (o.n, p.M))
        c_map, by_copies = tensor_map.tiled(o.c, p.out_dtype, c_extents, (o.ldc,), c_box, 2 * c_box[0]), 1
    return b_map, b, *b_steps, c_map, by_copies, o.c, o.n, o.ldc
