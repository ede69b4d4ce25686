"""SpMM on Bitmask with wgmma: A becomes dense on its way to the registers.

Kernel: spmm_bitmask_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0035-bitmask-in-registers.md.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div, round_up
from ....products.ideal import b_alignment, memory_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, LINE, Problem, itemsize, pitch_of
from ....products.roofline import Device, device_of
from ..runtime import expanding, jit, tensor_map
from ..runtime.copy_lines import Copy, copy_of
from ..runtime.expanding import DEPTH, SLOT
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands
from ..runtime.scratch import Scratch
from . import bitmask_records
from .bitmask_records import MOST_PIECES, expected_room, room_of
from .bitmask_slices import bitmask_reasons

SOURCE, ARCHS = "bitmask/spmm_bitmask_expanding_sm90a.cu", ("sm_90a",)
MOST_STAGES = 6
"""Steps in shared memory at most."""
SHARED = 226 << 10
"""Bytes of shared memory of a multiprocessor that blocks may have, what each needs beside it left out."""


class Extents(ctypes.Structure):
    """Must match ``Extents`` in the kernel."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("M", "K", "steps", "steps_per_part", "row_tiles", "room", "stages_end")
    ]  # fmt: skip


@dataclass(frozen=True)
class Tile(expanding.Tile):
    """``parts`` blocks of a cluster have a part of K each."""

    parts: int = 1

    @property
    def extent(self) -> str:
        """What tiles that differ in ``parts`` alone have in common."""
        return f"{self.rows}x{self.cols}" + (f", {self.resident} blocks" if self.resident > 1 else "")

    @property
    def ahead(self) -> bool:
        """Whether a warp decodes a step while it multiplies the one before. Else other warps use the time."""
        return self.resident == 1 and self.warpgroups == 2 and self.cols <= 128

    def stages(self, room: int) -> int:
        """Steps in shared memory or on their way there, for records of ``room`` bytes; at least 2."""
        return max(2, min(MOST_STAGES, (SHARED // self.resident - (2 << 10)) // self.stage(room)))

    def stage(self, room: int) -> int:
        """Bytes of a step: 64 rows of B, and a record for every 16 rows. Boxes of B start on 1024 bytes."""
        return round_up(2 * DEPTH * self.cols + self.rows // 16 * room, 1024)

    def stages_end(self, room: int) -> int:
        """Bytes of the stages, or of what takes their place on the way of C."""
        sums = 4 * self.rows * self.cols if self.parts > 1 else 0
        return max(self.stages(room) * self.stage(room), sums + self.rows // 16 * SLOT)

    def smem(self, room: int) -> int:
        """Bytes of shared memory."""
        return self.stages_end(room) + 16 * self.stages(room)

    def __str__(self) -> str:
        return f"{self.extent}" + (f" parts {self.parts}" if self.parts > 1 else "")


_EXTENTS = ((2, 16, 3), (2, 32, 3), (2, 64, 2), (2, 64, 1), (2, 128, 1), (3, 128, 1), (2, 192, 1))
TILES = tuple(Tile(*extent, parts) for extent in _EXTENTS for parts in expanding.PARTS)


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
    terms = (*expanding.TERMS, "column-major C", "second launch", "copy of B")

    def unsupported(self, p: Problem) -> list[str]:
        return bitmask_reasons(p, ("bfloat16", "float16"), (p.a_dtype, "float32")) + reasons(
            (p.device == "cuda" and p.sm != 90, f"needs sm_90a (wgmma), got {p.sm_name}"),
            (bitmask_records.pieces_at_most(p) >= MOST_PIECES, f"records must stay below 64 GiB, got nnz = {p.nnz}"),
            (p.M * p.K == 0, f"A must not be empty (a TMA map has no zero extents), got {p.M}x{p.K}"),
        )

    def options(self, p: Problem) -> list[Tile]:
        """Tiles between a quarter of C's width and twice of it.

        Numbers of parts of K as long as each shortens the way of a block along K.
        """
        steps, device = ceil_div(p.K, DEPTH), device_of(p)
        some = [t for t in TILES if expanding.wide_enough(t.cols, p.n)]
        return [t for t in some if t.parts in expanding.parts_of(p, t, steps, device)]

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By columns of the tile, whatever the number of parts."""
        return (tile.extent,)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``: those of ``expanding``, then of a column-major C and of the launch
        that copies B."""
        loaded = tile.stage(expected_room(p))
        own = expanding.quantities(p, tile, tile.parts, ceil_div(p.K, DEPTH), loaded, device)
        column_major = memory_us(p.M * p.n * itemsize(p.out_dtype), device) if p.out_layout == COL else 0.0
        return *own, column_major, *expanding.copy_of_b_us(p, b_alignment(p) < LINE, device)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = Problem.product("bitmask", (), 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        col = p.changed(b_layout=COL, out_layout=COL)
        wide = p.changed(a_dtype="float16", out_dtype="float32", b_layout=COL)
        return tuple(
            instance(Tile(*tile), 1280, q)
            for tile, q in (
                ((2, 16, 3, 8), col), ((2, 32, 3, 1), p), ((2, 64, 2, 4), wide), ((2, 64, 2, 1), col),
                ((2, 64, 1, 1), col), ((2, 128, 1, 3), col), ((2, 128, 1, 1), wide), ((3, 128, 1, 3), col),
                ((3, 128, 1, 1), p), ((2, 192, 1, 1), col), ((2, 192, 1, 2), p),
            )
        )  # fmt: skip

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        records = bitmask_records.records(a, p)
        room = room_of(records)
        b_col, row_tiles = p.b_layout == COL, ceil_div(p.M, tile.rows)
        shape = Extents(
            p.M, p.K, records.steps, ceil_div(records.steps, tile.parts), row_tiles, room, tile.stages_end(room)
        )
        name = instance(tile, room, p)
        smem = tile.smem(room)
        function = jit.load(SOURCE, name, jit.architecture(p.sm or 90, ARCHS), p.device_id, smem)
        fixed = (shape, records.data, records.starts)
        launch = Launch(function, (Extents, *"PP", *expanding.TAIL), fixed, tile.threads, smem, waits=True)
        room_for_b = Scratch()

        @functools.lru_cache(maxsize=1)
        def copy() -> Copy:
            return copy_of(p.K, 2, p.b_layout, p.b_layout, p)

        def prepare(o: Operands) -> list[Bound]:
            calls: list[Bound] = []
            b, ldb = o.b, o.ldb
            if not tensor_map.aligned(b, ldb, 2):
                lines, along = (o.n, p.K) if b_col else (p.K, o.n)
                ldb = pitch_of(along, 2)
                b = room_for_b.buffer(o.stream, lines * ldb * 2)
                calls = [copy()(o.stream, o.b, b, o.n, o.ldb, ldb)]
            rest = expanding.tail(o, p, tile, tile.parts, b, ldb, b_col)
            return [*calls, launch.bind(expanding.grid(o, p, tile, tile.parts), o.stream, *rest)]

        return Prepared(prepare, str(tile))


def instance(tile: Tile, room: int, p: Problem) -> str:
    """C++ name of the kernel for records of ``room`` bytes."""
    flags = ", ".join(str(f).lower() for f in (tile.ahead, p.b_layout == COL, p.out_layout == COL))
    types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"
    shape = f"{tile.warpgroups}, {tile.cols}, {tile.stages(room)}, {tile.parts}, {tile.resident}"
    return f"spmm_bitmask_expanding_sm90a<{types}, {shape}, {flags}>"
