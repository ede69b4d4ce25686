"""Products on Hopper whose A is in records: what the kernels of include/spformat/record_products.cuh have in common."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import Array, ceil_div, round_up
from ....products.ideal import b_alignment, load_us, memory_us, stored_bytes
from ....products.kernel import reasons
from ....products.problem import COL, LINE, PITCH, ROW, Problem, itemsize, pitch_of
from ....products.roofline import Device, device_of
from . import expanding, jit, tensor_map
from .copy_lines import Copy, copy_of
from .expanding import DEPTH
from .kernel import CudaKernel, Prepared
from .launch import Bound, Launch, Operands, one_after_another
from .own_copy import NO_COPY, CopyTo, OwnCopies, OwnCopy, copying
from .scratch import Scratch

ARCHS = ("sm_90a",)
WARP_ROWS = 16
"""Rows of A that a warp multiplies."""
REGISTERS = 16 << 10
"""Registers of each of the four schedulers of a multiprocessor."""
BESIDE_SUMS = 94
"""Registers that a thread needs beside its sums to read a step while those before it are multiplied: of these kernels
the one for bitmask needs the most."""
MOST_STAGES = 6
"""Steps in shared memory at most."""
SHARED = 226 << 10
"""Bytes of shared memory of a multiprocessor that blocks may have, what each needs beside it left out."""
MOST_PIECES = 1 << 32
"""Pieces of 16 bytes are counted in 32 bits."""
OWN_COPY = 0.6, 1.45
"""What a copy of B by the blocks of the product costs: before its bytes count, measured in launches of a copy, and how
much longer than in such a launch its bytes take."""
EXTENTS = (
    (1, 16, 6), (1, 16, 4), (2, 16, 3), (1, 32, 6), (2, 32, 3), (1, 64, 4), (1, 64, 3), (2, 64, 2), (2, 64, 1),
    (1, 128, 3), (1, 128, 2), (2, 128, 1), (3, 128, 1), (2, 192, 1), (2, 256, 1),
)  # fmt: skip
"""Of tiles: warpgroups, columns, blocks of threads that a multiprocessor runs at a time."""


@dataclass(frozen=True, eq=False)
class Records:
    """A matrix in records, and what is common to its orders (``formats.kernel_order.KernelOrder``)."""

    rows: ClassVar[int]
    """Rows of a record; it has DEPTH columns."""
    filled: ClassVar[None] = None
    """As of ``InMemory``: all lines have records."""
    data: Any
    """uint8, record after record"""
    starts: Any
    """uint32[records + 1], where each starts, in pieces of 16 bytes"""
    shape: tuple[int, int]
    """(M, K) of the matrix"""
    nnz: int
    """stored elements of the matrix"""
    longest: int
    """bytes of the longest record"""

    @property
    def steps(self) -> int:
        """records side by side along K"""
        return ceil_div(self.shape[1], DEPTH)

    @property
    def count(self) -> int:
        """records of the matrix"""
        return ceil_div(self.shape[0], self.rows) * self.steps

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes + self.starts.nbytes)

    def arrays(self) -> tuple[Array, ...]:
        return self.data, self.starts


class InMemory(NamedTuple):
    """What a launch reads of a matrix in records, for orders that other kernels share."""

    data: Any
    starts: Any
    longest: int
    filled: int | None = None
    """Where lines of records may be in another order than in C: the first ones, which have records. Behind the starts
    of these are the numbers of all lines. None: all lines have records and are in order."""


class Extents(ctypes.Structure):
    """Must match ``RecordExtents`` in the header."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("M", "K", "steps", "steps_per_part", "row_tiles", "filled", "listed", "room", "images", "barriers")
    ]  # fmt: skip


@dataclass(frozen=True)
class Tile(expanding.Tile):
    """``parts`` blocks of a cluster have a part of K each."""

    parts: int = 1
    rest_parts: int = 1
    """The same for the tiles of C that are left when as many as run at one time have run (``expanding.rest_of``): a
    launch of their own, which begins as multiprocessors become free."""
    record_rows: int = WARP_ROWS
    """Rows of a record."""
    record_steps: int = 1
    """Steps that a record covers, of DEPTH columns each: 1 or 2."""
    notes: bool = False
    """Whether a record has a word in shared memory beside it."""
    image: int = 0
    """Bytes of shared memory in which each warp puts its rows of a record together."""

    @property
    def extent(self) -> str:
        """What tiles that differ in ``parts`` alone have in common."""
        return f"{self.rows}x{self.cols}" + (f", {self.resident} blocks" if self.resident > 1 else "")

    @property
    def ahead(self) -> bool:
        """Whether a warp decodes a step while it multiplies the one before. Else other warps use the time."""
        of_scheduler = ceil_div(self.resident * self.threads, 4 * 32)
        registers = REGISTERS // (32 * of_scheduler) // 8 * 8  # threads have them in eights
        return self.hands_over or registers >= self.cols // 2 + BESIDE_SUMS

    @property
    def images(self) -> int:
        """Bytes in which all warps put their rows together."""
        return self.rows // WARP_ROWS * self.image

    @property
    def stage(self) -> int:
        """Bytes of a step of B."""
        return 2 * DEPTH * self.cols

    def records(self, stages: int) -> int:
        """Records in shared memory or on their way there, for all rows of the tile."""
        at_once = stages if self.record_steps == 1 else stages // 2 + 1
        return at_once * (self.rows // self.record_rows)

    def staged(self, stages: int, room: int) -> int:
        """Bytes of so many steps of B, and of the records beside them, of ``room`` bytes each."""
        return stages * self.stage + self.records(stages) * room

    def stages(self, room: int) -> int:
        """Steps in shared memory or on their way there, for records of ``room`` bytes; at least 2."""
        free = SHARED // self.resident - (2 << 10) - self.images
        return max([2, *(n for n in range(2, MOST_STAGES + 1) if self.staged(n, room) <= free)])

    def stages_end(self, room: int) -> int:
        """Bytes of the stages, or of what takes their place on the way of C."""
        return max(self.staged(self.stages(room), room), expanding.way_out(self, self.parts))

    def barriers(self, room: int) -> int:
        """Where the barriers start."""
        return self.stages_end(room) + self.images

    def smem(self, room: int) -> int:
        """Bytes of shared memory."""
        stages = self.stages(room)
        return self.barriers(room) + 16 * stages + (4 * self.records(stages) if self.notes else 0)

    def __str__(self) -> str:
        parts = f" parts {self.parts}" if self.parts > 1 else ""
        return self.extent + parts + (f" rest in parts {self.rest_parts}" if self.rest_parts > 1 else "")


def tiles_of(**records: Any) -> tuple[Tile, ...]:
    """The tiles of a kernel with every number of parts of K, of all tiles or of those that are left.

    records: what a ``Tile`` says about its records.
    """
    some = [Tile(*extent, **records) for extent in EXTENTS]
    whole = tuple(replace(tile, parts=parts) for tile in some for parts in expanding.PARTS)
    return whole + tuple(replace(tile, rest_parts=parts) for tile in some for parts in expanding.PARTS if parts > 1)


@functools.lru_cache(maxsize=64)
def _by_extent(tiles: tuple[Tile, ...]) -> tuple[tuple[tuple[Tile, ...], tuple[Tile, ...]], ...]:
    """By extent: the tiles whose parts of K are of all tiles, one part first, and those where they are of the rest."""
    extents: dict[str, tuple[list[Tile], list[Tile]]] = {}
    for t in tiles:
        extents.setdefault(t.extent, ([], []))[t.rest_parts > 1].append(t)
    return tuple((tuple(whole), tuple(rests)) for whole, rests in extents.values())


def room_of(longest: int) -> int:
    """Bytes of shared memory for records of up to ``longest`` bytes, so that what follows starts on a row of banks."""
    return 128 * ceil_div(max(1, longest), 128)


class RecordProducts(CudaKernel):
    """``out = A @ B`` for A with 16-bit values in records, on sm_90a only. Subclasses name the records.

    B and C are read and written where they lie, in both layouts. B is copied first where its lines do not start on
    16-byte boundaries: by a launch of its own or, with parts of K, by the blocks of the product. Sums are float32.
    Where there are few tiles, the blocks of a cluster sum parts of K and add them in a fixed order: the same bits every
    run.
    """

    source: ClassVar[str]
    """Path of the ``.cu`` file, whose kernel has its name."""
    archs = ARCHS
    tiles: ClassVar[tuple[Tile, ...]]
    compiled: ClassVar[tuple[tuple[str, str], ...]] = (
        ("64x16, 6 blocks parts 8", "col"), ("64x16, 4 blocks", "wide"), ("128x16, 3 blocks", "col"),
        ("64x32, 6 blocks", "col"), ("128x32, 3 blocks", "row"), ("64x64, 4 blocks", "wide"),
        ("64x64, 3 blocks", "row"), ("128x64, 2 blocks parts 4", "wide"), ("128x64", "col"),
        ("64x128, 3 blocks", "row"), ("64x128, 2 blocks parts 2", "col"), ("128x128 parts 3", "col"),
        ("128x128", "wide"), ("192x128 parts 3", "col"), ("192x128", "row"), ("128x192", "col"),
        ("128x256 parts 2", "row"),
    )  # fmt: skip
    """Names of tiles that the compile tests build, each with the operands: row, col, or wide (float16, float32 C)."""
    compiled_params: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """of the format, for the compile tests"""
    compiled_room: ClassVar[int]
    """``room_of`` their records."""
    terms = (*expanding.TERMS, "steps of all blocks", "records", "column-major C", "second launch", "copy of B")

    def records(self, a: Any, p: Problem) -> Records | InMemory:
        """The records of a matrix, the same for every plan of it."""
        raise NotImplementedError(f"{type(self).__name__} does not implement records")

    def expected_room(self, p: Problem) -> int:
        """``room_of`` the longest record, estimated before there are any."""
        raise NotImplementedError(f"{type(self).__name__} does not implement expected_room")

    def tiles_for(self, p: Problem) -> tuple[Tile, ...]:
        """The tiles for the records of a problem."""
        return self.tiles

    def tiles_of_c(self, p: Problem, tile: Tile) -> int:
        """Tiles of C. A kernel may count tiles that take less time than the others as parts of one."""
        return expanding.tiles_of(p, tile)

    def options(self, p: Problem) -> Iterable[Tile]:
        """Tiles between a quarter of C's width and twice of it.

        Numbers of parts of K as long as each shortens the way of a block along K; for the tiles that are left, as many
        as can be, if all tiles take the same time.
        """
        steps, device = ceil_div(p.K, DEPTH), device_of(p)
        for whole, rests in _by_extent(self.tiles_for(p)):
            if not expanding.wide_enough(whole[0].cols, p.n):
                continue
            parts: dict[int, tuple[int, ...]] = {}  # by tiles of C
            for t in whole:
                tiles = self.tiles_of_c(p, t)
                if tiles not in parts:
                    parts[tiles] = tuple(expanding.parts_of(tiles, t, steps, device))
                if t.parts in parts[tiles]:
                    yield t
            tiles = expanding.tiles_of(p, whole[0])
            if tiles == self.tiles_of_c(p, whole[0]):
                wanted = expanding.rest_parts(tiles, whole[0], steps, device)
                yield from (t for t in rests if t.rest_parts == wanted)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By columns of the tile, whatever the number of parts."""
        return (tile.extent,)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``: those of ``expanding``, of the steps that all blocks of a
        multiprocessor pass, which share what it can do in a time, and of the records that these load; then of a
        column-major C and of the launch that copies B."""
        tiles, steps = self.tiles_of_c(p, tile), ceil_div(p.K, DEPTH)
        left = expanding.rest_of(tiles, tile, device) if tile.rest_parts > 1 else 0
        passed = expanding.longest(tiles - left, tile, tile.parts, steps, device)
        of_all = expanding.of_all_blocks(tiles - left, tile.parts, steps, device)
        if left:
            passed += expanding.longest(left, tile, tile.rest_parts, steps, device)
            of_all += expanding.of_all_blocks(left, tile.rest_parts, steps, device)
        launch, *own = expanding.quantities(
            p, tile, max(tile.parts, tile.rest_parts), passed, of_all, tile.stage, device
        )
        records = of_all * load_us(stored_bytes(p) * tile.rows / (p.M * steps), device)
        by_columns = p.out_layout == COL or p.n == 1
        column_major = memory_us(p.M * p.n * itemsize(p.out_dtype), device) if by_columns else 0.0
        launches = 2 * launch if left else launch  # the second starts and ends like the first
        launches_of_copy, slower = 0.0, 1.0
        if p.n > 1 and b_alignment(p) < LINE:
            launches_of_copy, slower = OWN_COPY if tile.parts > 1 else (1.0, 1.0)
        copied = expanding.copy_of_b_us(p, launches_of_copy, slower, device)
        return launches, *own, of_all, records, column_major, *copied

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        records, device, room_for_b, own_copies = self.records(a, p), device_of(p), Scratch(), OwnCopies()
        room, steps = room_of(records.longest), ceil_div(p.K, DEPTH)
        listed = records.filled is not None
        filled = records.filled if listed else ceil_div(p.M, tile.record_rows)
        in_parts = replace(tile, parts=tile.rest_parts, rest_parts=1)

        @functools.cache
        def variant(of: Tile, b_col: bool, c_col: bool) -> tuple[Problem, Launch]:
            q = p.changed(b_layout=COL if b_col else ROW, out_layout=COL if c_col else ROW)
            own = of.record_steps * ceil_div(ceil_div(steps, of.record_steps), of.parts)
            shape = Extents(
                p.M, p.K, steps, own, ceil_div(p.M, of.rows), filled, listed, room,
                of.stages_end(room), of.barriers(room),
            )  # fmt: skip
            arch, smem = jit.architecture(p.sm or 90, ARCHS), of.smem(room)
            function = jit.load(self.source, self.instance(of, room, q), arch, p.device_id, smem)
            fixed = (shape, records.data, records.starts)
            return q, Launch(
                function, (Extents, *"PP", *expanding.TAIL, "i", CopyTo), fixed, of.threads, smem, waits=True
            )

        def launch(
            of: Tile, o: Operands, b_col: bool, c_col: bool, b: int, ldb: int, tiles: range, own: OwnCopy = NO_COPY
        ) -> Bound:
            q, own_launch = variant(of, b_col, c_col)
            tail = expanding.tail(o, q, of, of.parts, b, ldb, b_col, own.mapped)
            return own_launch.bind((len(tiles) * of.parts, 1, 1), o.stream, *tail, tiles.start, own.to)

        @functools.cache
        def copy(layout: str) -> Copy:
            return copy_of(p.K, 2, layout, layout, p)

        def prepare(o: Operands) -> list[Bound]:
            calls: list[Bound] = []
            b_col, c_col = p.b_layout == COL, p.out_layout == COL
            if o.n == 1:  # a contiguous vector is in both layouts, and no distance between columns counts
                b_col, c_col = b_col or o.ldb == 1, c_col or o.ldc == 1
                ldb, ldc = round_up(p.K, PITCH) if b_col else o.ldb, round_up(p.M, PITCH) if c_col else o.ldc
                o = o._replace(ldb=ldb, ldc=ldc)
            b, ldb, own = o.b, o.ldb, NO_COPY
            tiles = expanding.tiles_of(p, tile, o.n)
            if not tensor_map.aligned(b, ldb, 2):
                lines, along = (o.n, p.K) if b_col else (p.K, o.n)
                pitch = pitch_of(along, 2)
                if tile.parts > 1:  # where a launch of its own ends, clusters do not find room side by side
                    own = own_copies.of(o.stream, lines, pitch, copying(tiles, tile.parts, tile.resident, device))
                else:
                    b, ldb = room_for_b.buffer(o.stream, lines * pitch * 2), pitch
                    calls = [copy(COL if b_col else ROW)(o.stream, o.b, b, o.n, o.ldb, ldb)]
            whole = tiles - (expanding.rest_of(tiles, tile, device) if tile.rest_parts > 1 else 0)
            calls.append(launch(replace(tile, rest_parts=1), o, b_col, c_col, b, ldb, range(whole), own))
            if whole < tiles:
                calls.append(launch(in_parts, o, b_col, c_col, b, ldb, range(whole, tiles)))
            return one_after_another(calls)

        vector = p.n == 1
        for of in {replace(tile, rest_parts=1), in_parts} if tile.rest_parts > 1 else {tile}:
            # Compile it now, another when it is needed.
            variant(of, vector or p.b_layout == COL, vector or p.out_layout == COL)
        return Prepared(prepare, str(tile))

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        row = Problem.product(min(self.formats), self.compiled_params, 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        col = row.changed(b_layout=COL, out_layout=COL)
        wide = row.changed(a_dtype="float16", out_dtype="float32", b_layout=COL)
        problems, tiles = {"row": row, "col": col, "wide": wide}, {str(t): t for t in self.tiles}
        return tuple(self.instance(tiles[tile], self.compiled_room, problems[kind]) for tile, kind in self.compiled)

    def instance(self, tile: Tile, room: int, p: Problem) -> str:
        """C++ name of the kernel for records of ``room`` bytes."""
        flags = ", ".join(str(f).lower() for f in (tile.ahead, p.b_layout == COL, p.out_layout == COL))
        shape = f"{tile.warpgroups}, {tile.cols}, {tile.stages(room)}, {tile.parts}, {tile.resident}"
        return f"{self.name.partition('.')[2]}<{self.leading(p)}, {shape}, {flags}>"

    def leading(self, p: Problem) -> str:
        """The first template arguments: the types of A and C, and what the records of a kernel need."""
        return f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"


def refused(p: Problem, pieces: int) -> list[str]:
    """An architecture without wgmma, records of more ``pieces`` of 16 bytes than can be numbered, an empty A."""
    return reasons(
        (pieces >= MOST_PIECES, f"records must stay below 64 GiB, got nnz = {p.nnz}"),
        (p.device == "cuda" and p.sm != 90, f"needs sm_90a (wgmma), got {p.sm_name}"),
        (p.M * p.K == 0, f"A must not be empty (a TMA map has no zero extents), got {p.M}x{p.K}"),
    )
