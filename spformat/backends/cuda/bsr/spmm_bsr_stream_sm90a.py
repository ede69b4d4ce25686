"""SpMM on BSR and DBSR with blocks of multiples of 64, whose blocks are shared out evenly whatever row they are in.

Kernel: spmm_bsr_stream_sm90a.cu. sm_90a only, bf16 and fp16. docs/decisions/0036-bsr-stream.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....arrays.library import Array, ceil_div, namespace, round_up
from ....products.ideal import load_us, memory_us, operands_bytes, stored_bytes, tile_us, unaligned_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, ROW, Problem, itemsize
from ....products.roofline import TENSOR_16, Device
from ..runtime import jit, launch, refusals, row_tiles, tensor_map
from ..runtime.kernel import CopyEngineKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands
from ..runtime.scratch import Scratch
from . import spmm_bsr

SOURCE, ARCHS = "bsr/spmm_bsr_stream_sm90a.cu", ("sm_90a",)
VALUES = "bfloat16", "float16"
ROWS, DEPTH, WORKERS = 64, 64, 128
"""Rows of a tile, columns of A in a step, threads that multiply; as in the kernel."""
PIECE, SCRATCH = ROWS * DEPTH * 2, 4 * 16 * 128
"""Bytes of a piece of A, and of the rows of C that four warps stage."""
SHARED, RESERVED = 228 << 10, 1 << 10
"""Bytes of shared memory of a multiprocessor, and those of it that each block of threads takes beside its own."""
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Tile:
    """Tiles of 64 x ``cols`` of C; ``resident`` blocks of threads run on a multiprocessor."""

    cols: int
    resident: int

    @property
    def stage(self) -> int:
        """Bytes of a step at most: a piece of A, and 64 rows of B, which come 64 columns at a time if row-major."""
        return PIECE + DEPTH * 2 * round_up(self.cols, 64)

    @property
    def stages(self) -> int:
        """Steps in shared memory or on their way there."""
        room = SHARED // self.resident - RESERVED - 1024 - SCRATCH - 256  # 256: barriers
        return min(8, room // self.stage)

    @property
    def smem(self) -> int:
        """Bytes: the stages, 16 rows of 128 bytes of C for each warp, room to align to 1024."""
        return self.stages * self.stage + SCRATCH + 1024

    def __str__(self) -> str:
        return f"{ROWS}x{self.cols}x{DEPTH} {self.resident} resident"


WIDTHS = (*range(16, 129, 16), 160, 192, 224, 256)
TILES = tuple(t for cols in WIDTHS for t in (Tile(cols, 1), Tile(cols, 2), Tile(cols, 3)) if t.stages >= 3)


class Steps(NamedTuple):
    """Which pieces of A each strip of 64 rows has. Their layouts are described in spmm_bsr_stream_sm90a.cu."""

    steps: Array
    places: Array

    @property
    def nbytes(self) -> int:
        return int(self.steps.nbytes + self.places.nbytes)


def steps_of(indptr: Array, indices: Array, M: int, blocksize: tuple[int, int]) -> Steps:
    """int32[count, 2] and int32[count, 4] of a BSR with at least one block; M >= 1. numpy or CuPy.

    A strip without blocks has one step, so that some block of threads writes its zeros.
    """
    xp, (height, width) = namespace(indices), blocksize
    down, across = height // ROWS, width // DEPTH
    strip = xp.arange(ceil_div(M, ROWS))
    blocks = (indptr[1:] - indptr[:-1])[strip // down]
    starts = xp.concatenate([xp.zeros(1, "int64"), xp.cumsum(xp.maximum(1, across * blocks.astype("int64")))])
    count = int(starts[-1])  # synchronize!
    at = xp.arange(count)
    mine = xp.searchsorted(starts[1:], at, side="right")
    inside, empty = at - starts[mine], blocks[mine] == 0
    block = xp.where(empty, 0, indptr[mine // down] + inside // across)
    k = indices[block].astype("int64") * width + inside % across * DEPTH
    steps = xp.stack([xp.where(empty, -1, k), block * height + mine % down * ROWS], axis=1).astype("int32")
    places = xp.stack([mine, starts[mine], starts[mine + 1], xp.zeros_like(mine)], axis=1).astype("int32")
    return Steps(xp.ascontiguousarray(steps), xp.ascontiguousarray(places))


class SpmmBSRStream(CopyEngineKernel):
    """``out = A @ B`` for A in BSR or DBSR on Hopper, where rows of different lengths or few tiles leave a device idle.

    The same bits every run. The plan keeps 24 bytes for each 64 x 64 values of A, and for each stream 256 *
    multiprocessors * resident blocks * columns of a tile bytes. The copy engine needs B on a 16-byte boundary with
    a pitch of a multiple of 16 bytes; a call with another B runs ``cuda.spmm_bsr``.
    """

    name = "cuda.spmm_bsr_stream_sm90a"
    takes = spmm_of("bsr", "dbsr")
    otherwise = spmm_bsr.KERNEL
    archs = ARCHS
    tiles = TILES
    terms = ("launch", "memory", "steps", "latency", "sums", "shares", "column-major C", "unaligned C")

    def unsupported(self, p: Problem) -> list[str]:
        height, width = p.p["blocksize"]
        return (
            refusals.on_device(p)
            + refusals.types(p, VALUES)
            + refusals.strides(p)
            + reasons(
                (p.device == "cuda" and p.sm != 90, f"needs sm_90 (wgmma), got {p.sm_name}"),
                (height % ROWS or width % DEPTH, f"blocks must be multiples of 64 high and wide, got {height}x{width}"),
                (p.K > spmm_bsr.K_MAX, f"K must be at most {spmm_bsr.K_MAX}, got {p.K}"),
                (p.b_layout == COL and p.K % 8, f"TMA needs column-major B with K a multiple of 8, got K = {p.K}"),
            )
        )

    def options(self, p: Problem) -> tuple[Tile, ...]:
        """Tiles that are not wider than C needs."""
        most = round_up(max(p.n, 1), 16)
        return tuple(t for t in TILES if t.cols < most + 32)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of a multiprocessor. Shares are even, so that lengths of rows play no part.

        launch: constant. memory: A, B and C once. steps: each as long as its products, or as loading A and B from L2.
        latency: of steps that a block takes one by one, in proportion to their columns. sums: written by a block and
        read by another, for each further share of a tile. shares: of a tile, one after the other. unaligned C: C once
        more, where its lines start anywhere.
        """
        strips, columns = ceil_div(p.M, ROWS), ceil_div(p.n, tile.cols)
        steps = max(strips, ceil_div(p.nnz, ROWS * DEPTH)) * columns
        blocks = min(steps, tile.resident * device.processors)
        longest, per_tile = ceil_div(steps, blocks), steps / (strips * columns)
        at_once = ceil_div(blocks, device.processors)  # blocks of a multiprocessor, which share its rates
        step = max(tile_us(ROWS, tile.cols, DEPTH, TENSOR_16, device), load_us(PIECE + DEPTH * 2 * tile.cols, device))
        # Most blocks hand over once; a tile's first block reads the sums of all others one after the other.
        sums = 0.0
        if blocks > 1:
            sums = (at_once + per_tile / longest) * load_us(ROWS * tile.cols * 4, device)
        memory = memory_us(stored_bytes(p) + operands_bytes(p), device)
        column_major = memory_us(p.M * p.n * itemsize(p.out_dtype), device) if p.out_layout == COL else 0.0
        latency = longest * tile.cols / DEPTH
        steps_us, unaligned = at_once * longest * step, unaligned_us(p, device)
        return 1.0, memory, steps_us, latency, sums, per_tile / longest, column_major, unaligned

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = spmm_bsr.sample_problem("bsr", (64, 64), "bfloat16", "bfloat16", COL, COL)
        rows = p.changed(b_layout=ROW, out_layout=ROW)
        wide = p.changed(a_dtype="float16", b_dtype="float16", out_dtype="float32", b_layout=ROW)
        cases = ((16, 3, rows), (64, 3, p), (112, 2, wide), (128, 2, p), (128, 2, rows), (192, 2, wide), (256, 1, rows))
        return tuple(_instance(Tile(cols, resident), q) for cols, resident, q in cases)

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        x, (height, width), b_col = spmm_bsr.arrays_of(a), p.p["blocksize"], p.b_layout == COL
        stored, pointer, device, shape = int(x.indices.size), x.data.data.ptr, p.device_id, p.p["blocksize"]

        @functools.lru_cache(maxsize=1)
        def plain() -> launch.Prepare:
            return spmm_bsr.launcher(x, p)

        def fall_back(o: Operands) -> Sequence[Bound]:
            return plain()(o)

        if not stored or p.M == 0 or pointer % 16 or max(stored * height, p.M) > INT32_MAX:
            return Prepared(fall_back, "")  # no map of an empty A; coordinates of a map are 32-bit

        def build() -> Steps:
            indptr = x.indptr if x.row_ids is None else spmm_bsr.every_row(x.row_ids, x.indptr, ceil_div(p.M, height))
            steps = steps_of(indptr, x.indices, p.M, shape)
            launch.finish_arrays()  # synchronize!
            return steps

        table = a.kernel_arrays("stream steps", build)
        count, processors = int(table.steps.shape[0]), row_tiles.device_of(device).sms
        a_map = tensor_map.tiled(pointer, p.a_dtype, (width, stored * height), (width,), (DEPTH, ROWS), 128)
        signature = (tensor_map.TensorMap, *"PPiii", tensor_map.TensorMap, *"PiqPP")
        function = jit.load(SOURCE, _instance(tile, p), jit.architecture(p.sm or 90, ARCHS), device, tile.smem)
        fixed = (a_map, table.steps, table.places, count, width, p.M)
        product = Launch(function, signature, fixed, WORKERS + 32, tile.smem, waits=True)
        sums, flags, box = Scratch(), Scratch(zeros=True), (DEPTH, tile.cols if b_col else DEPTH)

        def prepare(o: Operands) -> Sequence[Bound]:
            total = count * ceil_div(o.n, tile.cols)
            if not tensor_map.aligned(o.b, o.ldb, 2) or max(total, o.n) > INT32_MAX - 1024:
                return fall_back(o)
            extents = (p.K, o.n) if b_col else (o.n, p.K)
            b_map = tensor_map.tiled(o.b, p.b_dtype, extents, (o.ldb,), box, 128)
            blocks = min(total, tile.resident * processors)
            sums_at = sums.buffer(o.stream, blocks * ROWS * tile.cols * 4)
            flags_at = flags.buffer(o.stream, blocks * 4)
            return (product.bind((blocks, 1, 1), o.stream, b_map, o.c, o.n, o.ldc, sums_at, flags_at),)

        return Prepared(prepare, str(tile), table.nbytes)


def _instance(tile: Tile, p: Problem) -> str:
    types = f"{spmm_bsr.C_TYPES[p.a_dtype]}, {spmm_bsr.C_TYPES[p.out_dtype]}"
    flags = ", ".join(str(f).lower() for f in (p.b_layout == COL, p.out_layout == COL))
    return f"spmm_bsr_stream_sm90a<{types}, {tile.cols}, {tile.stages}, {tile.resident}, {flags}>"


KERNEL = SpmmBSRStream()
