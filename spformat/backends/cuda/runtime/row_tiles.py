"""Tiles of the kernels that gather a row of B for every item of A: lanes, loads, slots, and how many items a slot gets.

A slot is some lanes of a warp that compute one row, or a segment of it, for some columns (row_work.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from ....arrays.library import ceil_div

BATCH = 8
"""Least number of items a slot takes at a time."""


class Device(NamedTuple):
    """What the choice of a tile depends on."""

    sms: int = 132
    l2: int = 50 << 20
    smem: int = 227 << 10
    """Most shared memory of a block."""


@dataclass(frozen=True)
class Tile:
    """How one launch cuts rows and columns; the template parameters of the kernels (gather.cuh)."""

    vec: int
    lanes: int
    tiles: int
    batch: int
    depth: int
    threads: int
    blocks: int
    fill: int
    """Items a slot should get."""
    prefetch: bool = False
    """Ask for all of A and B in L2 at the start."""
    tasks: int = 1
    """Tasks a block works on one after the other, with the loads of the next ones under way."""
    resident: bool = False
    """One block per SM keeps its column panel of B in shared memory (CSR only)."""

    @property
    def columns(self) -> int:
        return self.lanes * self.vec * self.tiles

    @property
    def slots(self) -> int:
        return self.threads // self.lanes

    @property
    def early(self) -> bool:
        """Whether a launch may begin before the copies before it are over. In large products, whose blocks have several
        tasks, it took 3 % longer then (docs/decisions/0071-columns-of-b-for-csr.md)."""
        return self.tasks == 1

    def template(self) -> str:
        return f"{self.vec}, {self.lanes}, {self.tiles}, {self.batch}, {self.depth}, {self.threads}, {self.blocks}"

    def __str__(self) -> str:
        resident = ", resident" if self.resident else ""
        return (
            f"{self.columns} columns, {self.lanes} lanes of {self.vec}, fill {self.fill}, {self.tasks} tasks{resident}"
        )

    def blocks_of(self, blocks: int, panels: int, device: Device) -> int:
        """Thread blocks along x for ``blocks`` tasks in each of ``panels`` column panels."""
        return min(blocks, max(1, device.sms // panels)) if self.resident else ceil_div(blocks, self.tasks)


@functools.cache
def device_of(device_id: int) -> Device:
    """The ``Device`` of a CUDA device id."""
    import cupy

    attributes = cupy.cuda.Device(device_id).attributes
    sms, l2, smem = (attributes[k] for k in ("MultiProcessorCount", "L2CacheSize", "MaxSharedMemoryPerBlockOptin"))
    return Device(sms, l2, smem)


def vector_width(value_size: int, out_size: int, n: int, b: int, c: int, ldb: int, ldc: int) -> int:
    """Elements of B in one load: the most (at most 16 bytes, a power of two) that addresses, strides and n allow."""
    vec = max(1, 16 // value_size)
    while vec > 1 and (n % vec or ldb % vec or ldc % vec or b % (vec * value_size) or c % min(16, vec * out_size)):
        vec //= 2
    return vec


def choose_tile(
    vec: int, value_size: int, n: int, K: int, rows: int, items: int, device: Device, resident: bool = False
) -> Tile:
    """The tile for ``rows`` rows with ``items`` stored items, times n columns of B. Measured on an H200.

    ``resident``: the kernel can keep a panel of B in shared memory.

    Few lanes per slot, so that a warp works on several rows, and several loads per lane and item when n is wide
    (docs/decisions/0010-irregular-kernels.md).
    """
    vectors, work = ceil_div(n, vec), items * n
    panel = 16 * vec * K * value_size
    copies = max(device.sms, ceil_div(vectors, 16))
    fits = 0 < panel <= device.smem - (16 << 10)  # beside the sums of the slots
    if resident and vectors >= 16 and fits and work * value_size >= 12 * copies * panel:
        return Tile(vec, 8, 2, BATCH, 4, 512, 1, 64, resident=True)

    short = items < 8 * rows and work > 1e7
    if vectors <= 8:
        lanes, tiles, depth, blocks = max(1, 1 << (vectors - 1).bit_length()), 1, 8, 3
    elif work > 3e8 and K * n * value_size > device.l2 // 2 and value_size >= 4:
        lanes, tiles, depth, blocks = 4, 4, 4, 2  # B does not stay in L2: rows side by side meet in L1
    elif vectors <= 16 and work < (1e7 if short else 2e7):
        lanes, tiles, depth, blocks = 8, 1, 8, 3
    elif (vectors <= 32 and not (short and value_size >= 4)) or work > 3e8:
        lanes, tiles, depth, blocks = 8, 2, 8, 2
    else:
        lanes, tiles, depth, blocks = 8, 4, 4, 2

    return filled(vec, (lanes, tiles, depth, blocks), value_size, n, K, rows, items, device)


def filled(
    vec: int, shape: tuple[int, int, int, int], value_size: int, n: int, K: int, rows: int, items: int, device: Device
) -> Tile:
    """The tile of these lanes, loads of a lane, depth and blocks of a multiprocessor, with the rest by rule."""
    lanes, tiles, depth, blocks = shape
    # A row gets a power of two of slots: on average 1.5 times as many as its items fill.
    capacity = device.sms * blocks * 256 // lanes  # slots that work at a time
    panels = ceil_div(ceil_div(n, vec), lanes * tiles)
    share = 1.5 * items * panels / capacity
    fill = 8 if share <= 8 else 16 if share <= 24 else 32
    waves = max(rows, items // fill) * panels / capacity
    prefetch = K * n * value_size <= 8 << 20 and 2 * items >= K
    return Tile(vec, lanes, tiles, BATCH, depth, 256, blocks, fill, prefetch, 4 if waves > 4.5 else 1)


SHAPES = ((4, 4, 4, 2), (8, 1, 8, 3), (8, 2, 8, 2), (8, 4, 4, 2))
"""Lanes, loads of a lane, depth and blocks of a multiprocessor that are compared with the rule of ``choose_tile``."""
