"""SpMM on Bitmask with wgmma: A becomes dense on its way to the registers.

Kernel: spmm_bitmask_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0035-bitmask-in-registers.md.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, round_up
from ....products.ideal import b_alignment, load_us, memory_us, rounds, tile_us, traffic_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, LINE, Problem, itemsize
from ....products.roofline import TENSOR_16, Device, device_of
from ..runtime import jit, tensor_map
from ..runtime.copy_lines import copy_of
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands
from ..runtime.scratch import Scratch
from . import bitmask_records
from .bitmask_records import expected_room, room_of
from .bitmask_slices import STEP, bitmask_reasons

SOURCE, ARCHS = "bitmask/spmm_bitmask_expanding_sm90a.cu", ("sm_90a",)
SLOT, MOST_STAGES = 2048, 6
"""Bytes in which a warp stages C, as in the kernel; steps in shared memory at most."""
SHARED = 226 << 10
"""Bytes of shared memory of a multiprocessor that blocks may have, what each needs beside it left out."""
ALIGNED = 8
"""Elements: lines of a copy of B start at multiples of so many."""
PARTS = (1, 2, 4, 8)
"""Parts of K, each a block of a cluster."""


class Extents(ctypes.Structure):
    """Must match ``Extents`` in the kernel."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("M", "K", "steps", "steps_per_part", "row_tiles", "room", "stages_end")
    ]  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """128 rows x ``cols`` columns of C, ``parts`` blocks of a cluster that have a part of K each.

    resident: blocks of threads that a multiprocessor runs at a time.
    """

    cols: int
    resident: int
    parts: int = 1

    rows = 128
    threads = 288

    @property
    def extent(self) -> str:
        """What tiles that differ in ``parts`` alone have in common."""
        return f"{self.rows}x{self.cols}" + (", two blocks" if self.resident == 2 else "")

    def stages(self, room: int) -> int:
        """Steps in shared memory or on their way there, for records of ``room`` bytes; at least 2."""
        return max(2, min(MOST_STAGES, (SHARED // self.resident - (2 << 10)) // self.stage(room)))

    def stage(self, room: int) -> int:
        """Bytes of a step: 64 rows of B, eight records."""
        return 2 * STEP * self.cols + 8 * room

    def stages_end(self, room: int) -> int:
        """Bytes of the stages, or of what takes their place on the way of C."""
        sums = 4 * self.rows * self.cols if self.parts > 1 else 0
        return max(self.stages(room) * self.stage(room), sums + 8 * SLOT)

    def smem(self, room: int) -> int:
        """Bytes of shared memory."""
        return self.stages_end(room) + 16 * self.stages(room)

    def __str__(self) -> str:
        return f"{self.extent}" + (f" parts {self.parts}" if self.parts > 1 else "")


TILES = tuple(
    Tile(cols, resident, parts)
    for cols, resident in ((16, 2), (32, 2), (64, 2), (64, 1), (128, 1), (192, 1))
    for parts in PARTS
)  # fmt: skip


class SpmmBitmaskExpanding(CudaKernel):
    """``out = A @ B`` for A in Bitmask with 16-bit values, on sm_90a only.

    B and C are read and written where they lie, in both layouts. B is copied first where its lines do not start on
    16-byte boundaries. Sums are float32. Where there are few tiles, the blocks of a cluster sum parts of K and add them
    in a fixed order: the same bits every run.
    """

    name = "cuda.spmm_bitmask_expanding_sm90a"
    takes = spmm_of("bitmask")
    archs = ARCHS
    tiles = TILES
    terms = (
        "launch", "steps", "memory", "loads", "products", "clusters", "parts", "column-major C", "second launch",
        "copy of B",
    )  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        return bitmask_reasons(p, ("bfloat16", "float16"), (p.a_dtype, "float32")) + reasons(
            (p.device == "cuda" and p.sm != 90, f"needs sm_90a (wgmma), got {p.sm_name}"),
            (bitmask_records.pieces_at_most(p) >= 1 << 32, f"records must stay below 64 GiB, got nnz = {p.nnz}"),
            (p.M * p.K == 0, f"A must not be empty (a TMA map has no zero extents), got {p.M}x{p.K}"),
        )

    def options(self, p: Problem) -> list[Tile]:
        """Tiles between a quarter of C's width and twice of it.

        Parts of K until there are two blocks for each that can run.
        """
        steps, processors = ceil_div(p.K, STEP), device_of(p).processors
        return [
            t for t in TILES
            if min(p.n, 256) <= 4 * t.cols < 8 * max(p.n, 16)
            and (t.parts == 1 or (t.parts <= steps and tiles_of(p, t) * t.parts <= 2 * processors * t.resident))
        ]  # fmt: skip

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By columns of the tile, whatever the number of parts."""
        return (tile.extent,)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``. Products are those of a dense A.

        launch, clusters (their barriers), second launch (which copies B): constants. parts: their number. steps: 64
        columns of A that a block passes one after the other, in microseconds of one each.
        """
        turns = rounds(tiles_of(p, tile) * tile.parts, device.processors * tile.resident)
        steps = turns * ceil_div(ceil_div(p.K, STEP), tile.parts)
        products = tile.resident * steps * tile_us(tile.rows, tile.cols, STEP, TENSOR_16, device)
        loads = tile.resident * steps * load_us(tile.stage(expected_room(p)), device)
        copied = b_alignment(p) < LINE
        copy = memory_us(2 * p.K * p.n * itemsize(p.b_dtype), device) if copied else 0.0
        clusters, parts = (1.0, float(tile.parts)) if tile.parts > 1 else (0.0, 0.0)
        column_major = memory_us(p.M * p.n * itemsize(p.out_dtype), device) if p.out_layout == COL else 0.0
        memory = traffic_us(p, device)
        return 1.0, steps, memory, loads, products, clusters, parts, column_major, float(copied), copy

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = Problem.product("bitmask", (), 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        col = p.changed(b_layout=COL, out_layout=COL)
        wide = p.changed(a_dtype="float16", out_dtype="float32", b_layout=COL)
        return tuple(
            instance(Tile(cols, 2 if cols < 128 else 1, parts), 1280, q, index)
            for cols, parts, q, index in (
                (16, 8, col, "int"), (32, 1, p, "int"), (64, 4, wide, "long long"), (64, 1, col, "int"),
                (128, 4, col, "int"), (128, 1, wide, "int"), (192, 1, col, "int"), (192, 2, p, "long long"),
            )
        )  # fmt: skip

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        records = bitmask_records.records(a, p)
        room = room_of(records)
        b_col, c_col, size = p.b_layout == COL, p.out_layout == COL, itemsize(p.out_dtype)
        row_tiles = ceil_div(p.M, tile.rows)
        shape = Extents(
            p.M, p.K, records.steps, ceil_div(records.steps, tile.parts), row_tiles, room, tile.stages_end(room)
        )
        name = instance(tile, room, p, "int" if a.indptr.dtype == "int32" else "long long")
        smem = tile.smem(room)
        function = jit.load(SOURCE, name, jit.architecture(p.sm or 90, ARCHS), p.device_id, smem)
        signature = (Extents, *"PPPPP", tensor_map.TensorMap, *"Pqq", tensor_map.TensorMap, *"iPiq")
        fixed = (shape, a.indptr, a.bitmask, a.data, records.data, records.starts)
        launch = Launch(function, signature, fixed, tile.threads, smem)
        columns = min(tile.cols, 64)
        strip = columns if tile.parts == 1 else 16
        copy, room_for_b = copy_of(p.K, 2, p.b_layout, p.b_layout, p), Scratch()

        def prepare(o: Operands) -> list[Bound]:
            calls: list[Bound] = []
            b, ldb = o.b, o.ldb
            if not tensor_map.aligned(b, ldb, 2):
                lines, along = (o.n, p.K) if b_col else (p.K, o.n)
                ldb = round_up(along, ALIGNED)
                b = room_for_b.buffer(o.stream, lines * ldb * 2)
                calls = [copy(o.stream, o.b, b, o.n, o.ldb, ldb)]
            extents, box = ((p.K, o.n), (STEP, tile.cols)) if b_col else ((o.n, p.K), (columns, STEP))
            b_map = tensor_map.tiled(b, p.b_dtype, extents, (ldb,), box, 2 * box[0])
            b_steps = (1, ldb) if b_col else (ldb, 1)
            c_map, by_copies = tensor_map.UNMAPPED, 0
            if size == 2 and tensor_map.writable(o.c, p.M if c_col else o.n, o.ldc, 2):
                c_box = (16, strip) if c_col else (strip, 16)
                c_extents = (p.M, o.n) if c_col else (o.n, p.M)
                c_map, by_copies = tensor_map.tiled(o.c, p.out_dtype, c_extents, (o.ldc,), c_box, 2 * c_box[0]), 1
            grid = (row_tiles * ceil_div(o.n, tile.cols) * tile.parts, 1, 1)
            return [*calls, launch.bind(grid, o.stream, b_map, b, *b_steps, c_map, by_copies, o.c, o.n, o.ldc)]

        return Prepared(prepare, str(tile), records.nbytes)


def tiles_of(p: Problem, tile: Tile) -> int:
    """Tiles of C."""
    return ceil_div(p.M, tile.rows) * ceil_div(p.n, tile.cols)


def instance(tile: Tile, room: int, p: Problem, index: str) -> str:
    """C++ name of the kernel for records of ``room`` bytes; index: the C type of ``indptr``."""
    flags = ", ".join(str(f).lower() for f in (p.b_layout == COL, p.out_layout == COL))
    types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}, {index}"
    shape = f"{tile.rows // 64}, {tile.cols}, {tile.stages(room)}, {tile.parts}, {tile.resident}"
    return f"spmm_bitmask_expanding_sm90a<{types}, {shape}, {flags}>"
