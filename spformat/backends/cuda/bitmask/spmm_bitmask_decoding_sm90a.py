"""SpMM on Bitmask with wgmma: some warps decode A into tiles in shared memory while others multiply.

Kernel: spmm_bitmask_decoding_sm90a.cu. bf16 and fp16. docs/decisions/0047-decoding-beside-products.md.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, round_up
from ....products.ideal import b_alignment, load_us, memory_us, tile_us, traffic_us, unaligned_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, LINE, Problem, itemsize
from ....products.roofline import TENSOR_16, Device
from ..runtime import expanding, jit, row_tiles, tensor_map
from ..runtime.copy_lines import Copy, copy_of
from ..runtime.expanding import DEPTH, SLOT
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands
from ..runtime.scratch import Scratch
from . import bitmask_records
from .bitmask_records import expected_room, room_of
from .bitmask_slices import bitmask_reasons
from .spmm_bitmask_expanding_sm90a import ALIGNED

SOURCE, ARCHS = "bitmask/spmm_bitmask_decoding_sm90a.cu", ("sm_90a",)
ROWS, WORKERS, RECORDS = 128, 256, 8
"""Rows of a tile, threads that multiply, records of a step; as in the kernel."""
SHARED = 226 << 10
"""Bytes of shared memory of a block, what the kernel declares beside it left out."""
MOST_STAGES = 6
"""Steps in shared memory or on their way there at most."""
LEAST_STEPS = 4
"""Steps along K that a share has at least where there are fewer tiles than multiprocessors."""


class Extents(ctypes.Structure):
    """Must match ``Extents`` in the kernel."""

    _fields_ = [(name, ctypes.c_int32) for name in ("M", "K", "steps", "row_tiles", "room")]


@dataclass(frozen=True)
class Tile:
    """Tiles of 128 x ``cols``; ``groups`` warpgroups decode and load.

    even: blocks share out the last rounds of tiles by steps along K.

    ``cols`` is what accumulators have room for: ptxas wants those of one instruction, and 26 registers more, in what a
    thread has when a block starts.
    """

    cols: int
    groups: int
    even: bool

    @property
    def threads(self) -> int:
        return WORKERS + 128 * self.groups

    @property
    def decoded(self) -> int:
        """Tiles of A in shared memory."""
        return 3 if self.cols <= 128 else 2

    def stage(self, room: int) -> int:
        """Bytes of a step: 64 rows of B, and eight records of ``room`` bytes. Boxes of B start on 1024 bytes."""
        return round_up(2 * DEPTH * self.cols + RECORDS * room, 1024)

    def stages(self, room: int) -> int:
        """Steps in shared memory or on their way there; at least 2."""
        left = SHARED - self.decoded * ROWS * DEPTH * 2 - WORKERS // 32 * SLOT - 256
        return max(2, min(MOST_STAGES, left // self.stage(room)))

    def smem(self, room: int) -> int:
        """Bytes of shared memory: tiles of A, stages, slots for C, barriers and the number of the block."""
        stages = self.stages(room)
        tiles = self.decoded * ROWS * DEPTH * 2
        return tiles + stages * self.stage(room) + WORKERS // 32 * SLOT + 16 * (stages + self.decoded) + 16

    def blocks(self, tiles: int, steps: int, processors: int) -> int:
        """Blocks for so many tiles of so many steps on so many multiprocessors: each has work."""
        if not self.even or tiles >= processors:
            return min(tiles, processors)
        return min(processors, max(tiles, tiles * steps // LEAST_STEPS))

    def __str__(self) -> str:
        return f"{ROWS}x{self.cols} {'even' if self.even else 'whole'}"


GROUPS = {16: 4, 32: 4, 48: 4, 64: 4, 96: 4, 128: 3, 160: 2, 192: 2}
"""Columns of a tile -> warpgroups that decode."""
TILES = tuple(Tile(cols, groups, even) for even in (False, True) for cols, groups in GROUPS.items())


class SpmmBitmaskDecoding(CudaKernel):
    """``out = A @ B`` for A in Bitmask with 16-bit values, on sm_90a only.

    B and C are read and written where they lie, in both layouts. B is copied first where its lines do not start on
    16-byte boundaries. Sums are float32 and added in the order of K: the same bits every run. With equal shares a plan
    has for each stream a workspace of at most 512 * multiprocessors * columns of a tile bytes.
    """

    name = "cuda.spmm_bitmask_decoding_sm90a"
    takes = spmm_of("bitmask")
    archs = ARCHS
    tiles = TILES
    terms = ("launch", "memory", "steps", "products", "loads", "slower of the two", "tiles", "handed over", "sums",
             "column-major C", "second launch", "copy of B", "C by stores")  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        return bitmask_reasons(p, ("bfloat16", "float16"), (p.a_dtype, "float32")) + reasons(
            (p.device == "cuda" and p.sm != 90, f"needs sm_90a (wgmma), got {p.sm_name}"),
            (bitmask_records.pieces_at_most(p) >= 1 << 32, f"records must stay below 64 GiB, got nnz = {p.nnz}"),
            (p.M * p.K == 0, f"A must not be empty (a TMA map has no zero extents), got {p.M}x{p.K}"),
        )

    def options(self, p: Problem) -> tuple[Tile, ...]:
        """Tiles that are not much wider than C."""
        return tuple(t for t in TILES if t.cols < max(32, 2 * p.n))

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By columns of the tile."""
        return (f"{ROWS}x{tile.cols}",)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of the block with the most work.

        launch: constant. steps: their number, in microseconds. products (those of a dense A), loads (records and B from
        L2): of these steps. tiles: C of the tiles that a block writes. handed over: constant where a tile has several
        blocks. sums: handed over and added once for each further one. C by stores: C, where the copy engine cannot
        write its lines.
        """
        steps, size = ceil_div(p.K, DEPTH), itemsize(p.out_dtype)
        tiles = ceil_div(p.M, ROWS) * ceil_div(p.n, tile.cols)
        blocks = tile.blocks(tiles, steps, device.processors)
        turns = ceil_div(tiles, blocks)
        longest, handed, sums = turns * steps, 0.0, 0.0
        if tile.even and tiles % blocks:
            longest = ceil_div(tiles * steps, blocks)
            handed, sums = 1.0, (1 + ceil_div(steps, longest)) * load_us(ROWS * tile.cols * 4, device)
        products = longest * tile_us(ROWS, tile.cols, DEPTH, TENSOR_16, device)
        loads = longest * load_us(tile.stage(expected_room(p)), device)
        written = turns * load_us(ROWS * tile.cols * size, device)
        column_major = memory_us(p.M * p.n * size, device) if p.out_layout == COL else 0.0
        stored = memory_us(p.M * p.n * size, device) if size > 2 else unaligned_us(p, device)
        copied = expanding.copy_of_b_us(p, b_alignment(p) < LINE, device)
        slower = max(products, loads)
        return (
            1.0, traffic_us(p, device), longest, products, loads, slower, written, handed, sums, column_major, *copied,
            stored,
        )  # fmt: skip

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = Problem.product("bitmask", (), 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        col = p.changed(b_layout=COL, out_layout=COL)
        wide = p.changed(a_dtype="float16", out_dtype="float32", b_layout=COL)
        cases = ((16, col, "int"), (48, p, "int"), (64, wide, "long long"), (96, col, "int"), (128, p, "int"),
                 (160, wide, "int"), (192, col, "long long"))  # fmt: skip
        return tuple(instance(Tile(cols, GROUPS[cols], True), 1280, q, index) for cols, q, index in cases)

    def prepared(self, a: Any, p: Problem) -> Prepared:
        records, tile = bitmask_records.records(a, p), self.best(p).tile
        room, b_col, row_count = room_of(records), p.b_layout == COL, ceil_div(p.M, ROWS)
        name = instance(tile, room, p, "int" if a.indptr.dtype == "int32" else "long long")
        smem, steps = tile.smem(room), records.steps
        function = jit.load(SOURCE, name, jit.architecture(p.sm or 90, ARCHS), p.device_id, smem)
        shape = Extents(p.M, p.K, steps, row_count, room)
        fixed = (shape, a.indptr, a.bitmask, a.data, records.data, records.starts)
        product = Launch(function, (Extents, *"PPPPPiPP", *expanding.TAIL), fixed, tile.threads, smem)
        processors = row_tiles.device_of(p.device_id).sms
        sums, flags, room_for_b = Scratch(), Scratch(zeros=True), Scratch()

        @functools.lru_cache(maxsize=1)
        def copy() -> Copy:
            return copy_of(p.K, 2, p.b_layout, p.b_layout, p)

        def prepare(o: Operands) -> Sequence[Bound]:
            calls: list[Bound] = []
            b, ldb = o.b, o.ldb
            if not tensor_map.aligned(b, ldb, 2):
                lines, along = (o.n, p.K) if b_col else (p.K, o.n)
                ldb = round_up(along, ALIGNED)
                b = room_for_b.buffer(o.stream, lines * ldb * 2)
                calls = [copy()(o.stream, o.b, b, o.n, o.ldb, ldb)]
            tiles = row_count * ceil_div(o.n, tile.cols)
            blocks, sums_at, flags_at = tile.blocks(tiles, steps, processors), 0, 0
            shared = bool(tile.even and tiles % blocks)
            if shared:
                sums_at = sums.buffer(o.stream, blocks * ROWS * tile.cols * 4)
                flags_at = flags.buffer(o.stream, (2 * blocks + 1) * 4)
            rest = expanding.tail(o, p, tile.cols, 1, b, ldb, b_col)
            return [*calls, product.bind((blocks, 1, 1), o.stream, int(shared), sums_at, flags_at, *rest)]

        return Prepared(prepare, str(tile), records.nbytes)


def instance(tile: Tile, room: int, p: Problem, index: str) -> str:
    """C++ name of the kernel for records of ``room`` bytes; index: the C type of ``indptr``."""
    flags = ", ".join(str(f).lower() for f in (p.b_layout == COL, p.out_layout == COL))
    types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}, {index}"
    shape = f"{tile.cols}, {tile.groups}, {tile.stages(room)}, {tile.decoded}"
    return f"spmm_bitmask_decoding_sm90a<{types}, {shape}, {flags}>"
