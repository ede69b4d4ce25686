"""SpMM on BSR and DBSR with low blocks: strips of several block rows, whose steps are shared out evenly.

Kernel: spmm_bsr_strips_sm90a.cu. sm_90a only, bf16 and fp16. docs/decisions/0056-strips-of-block-rows.md.
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

SOURCE, ARCHS = "bsr/spmm_bsr_strips_sm90a.cu", ("sm_90a",)
VALUES = "bfloat16", "float16"
HEIGHTS, WIDTHS_OF_BLOCKS = (16, 32), (16, 32)
"""Heights of blocks; their widths, beside multiples of 64."""
ROWS, DEPTH, THREADS = 64, 64, 256
"""Rows of a tile, columns of A in a step, threads of a block; as in the kernel."""
SCRATCH = 4 * 16 * 128
"""Bytes of C that four warps stage: 16 rows of 128 bytes each."""
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
        """Bytes of a step at most: 64 columns of A, and 64 rows of B, which come 64 columns at a time if row-major."""
        return DEPTH * 2 * (ROWS + round_up(self.cols, 64))

    @property
    def stages(self) -> int:
        """Steps in shared memory or on their way there."""
        room = SHARED // self.resident - RESERVED - 1024 - SCRATCH - 256  # 256: barriers
        return min(8, room // self.stage)

    @property
    def smem(self) -> int:
        """Bytes: the stages, C on its way out, room to align to 1024."""
        return self.stages * self.stage + SCRATCH + 1024

    def __str__(self) -> str:
        return f"{ROWS}x{self.cols}x{DEPTH} {self.resident} resident"


WIDTHS = (16, 32, 48, 64, 96, 128)
TILES = tuple(Tile(cols, resident) for cols in WIDTHS for resident in (1, 2) if cols * resident <= 192)
"""Two blocks with 128 columns would not have the registers."""


class Steps(NamedTuple):
    """What each step multiplies. The layouts are described in spmm_bsr_strips_sm90a.cu."""

    units: Array
    blocks: Array
    places: Array
    rows: Array

    @property
    def nbytes(self) -> int:
        return int(sum(x.nbytes for x in self))


def steps_of(indptr: Array, indices: Array, shape: tuple[int, int], blocksize: tuple[int, int]) -> Steps:
    """The tables of a BSR with at least one block; M >= 1. numpy or CuPy, O(blocks log blocks).

    Block rows that have blocks come first, in their order, so that few strips multiply zeros for rows without any. The
    strips of rows without blocks then stand evenly between the others: each is a single step, and a share of many of
    them would write more of C than the other shares.
    """
    xp, (M, K), (height, width) = namespace(indices), shape, blocksize
    unit, high = min(DEPTH, width), ROWS // height
    side, parts, block_columns, block_rows = DEPTH // unit, width // unit, ceil_div(K, width), ceil_div(M, height)
    lengths, stored = xp.diff(indptr), int(indices.size)
    order = _spread(xp.flatnonzero(lengths > 0), xp.flatnonzero(lengths == 0), high)  # synchronize!
    position = xp.empty(block_rows, "int64")
    position[order] = xp.arange(block_rows)
    at = position[xp.searchsorted(indptr[1:], xp.arange(stored), side="right")]  # of the row of each block
    key = (at // high * block_columns + indices)[:, None] * parts + xp.arange(parts)
    keys, number = xp.unique(key, return_inverse=True)  # synchronize!
    strip, column = keys // (block_columns * parts), keys % (block_columns * parts) * unit
    strips = ceil_div(block_rows, high)
    first = xp.searchsorted(strip, xp.arange(strips + 1))
    needed = xp.maximum(1, -(-xp.diff(first) // side))
    starts = xp.concatenate([xp.zeros(1, "int64"), xp.cumsum(needed)])
    count = int(starts[-1])  # synchronize!
    to = starts[strip] * side + xp.arange(keys.size) - first[strip]  # where each unit stands
    units = xp.full(count * side, block_columns * width, "int32")
    units[to] = column
    units.reshape(count, side)[starts[:-1][xp.diff(first) == 0]] = -1  # synchronize!
    blocks = xp.full((count * side, high), stored * height, "int32")
    blocks[to[number.reshape(-1)], xp.repeat(at % high, parts)] = xp.repeat(xp.arange(stored) * height, parts)
    of_step = xp.searchsorted(starts[1:], xp.arange(count), side="right")
    ends = [of_step, starts[of_step], starts[of_step + 1], xp.zeros_like(of_step)]
    piece = 16 * xp.arange(ROWS // 16)  # rows of a strip where each warp begins
    listed = xp.concatenate([order * height, xp.full(strips * high - block_rows, M)]).reshape(strips, high)
    rows = xp.minimum(listed[:, piece // height] + piece % height, M)
    return Steps(units.reshape(count, side), blocks.reshape(count, side, high), xp.stack(ends, axis=1).astype("int32"),
                 xp.ascontiguousarray(rows.astype("int32")))  # fmt: skip


def _spread(filled: Array, empty: Array, high: int) -> Array:
    """The block rows in the order of their strips, of ``high`` each. The last strip may have fewer: it stays last."""
    xp = namespace(filled)
    order, rows = xp.concatenate([filled, empty]), int(filled.size + empty.size)
    strips, first = rows // high, ceil_div(int(filled.size), high)  # whole ones; those that have blocks
    others = max(0, strips - first)
    where = xp.concatenate([xp.arange(strips - others) / max(1, first), (xp.arange(others) + 0.5) / max(1, others)])
    whole = order[: strips * high].reshape(strips, high)[xp.argsort(where)]
    return xp.concatenate([whole.reshape(-1), order[strips * high :]])


class SpmmBSRStrips(CopyEngineKernel):
    """``out = A @ B`` for A in BSR or DBSR with blocks 16 or 32 high on Hopper: block rows share rows of B.

    The same bits every run. A plan keeps tables, up to a tenth of the bytes of A, and for each stream 256 *
    multiprocessors * resident blocks * columns of a tile bytes. Zeros take the place of blocks that a row of a strip
    does not have: inf in B may give NaN there. The copy engine needs B on a 16-byte boundary with a pitch of a multiple
    of 16 bytes; a call with another B runs ``cuda.spmm_bsr``.
    """

    name = "cuda.spmm_bsr_strips_sm90a"
    takes = spmm_of("bsr", "dbsr")
    otherwise = spmm_bsr.KERNEL
    archs = ARCHS
    tiles = TILES
    multiplies_zeros = True
    terms = ("launch", "memory", "steps", "latency", "boxes", "sums", "shares", "column-major C", "unaligned C")

    def unsupported(self, p: Problem) -> list[str]:
        height, width = p.p["blocksize"]
        return (
            refusals.on_device(p)
            + refusals.types(p, VALUES)
            + refusals.strides(p)
            + reasons(
                (p.device == "cuda" and p.sm != 90, f"needs sm_90 (wgmma), got {p.sm_name}"),
                (
                    height not in HEIGHTS or (width not in WIDTHS_OF_BLOCKS and width % DEPTH != 0),
                    f"blocks must be 16 or 32 high, and 16, 32 or a multiple of 64 wide, got {height}x{width}",
                ),
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
        latency: 0.1 us for each step that a block takes one by one. boxes: 10 ns for each box of these steps. sums:
        written by a block and read by another, for each further share of a tile. shares: of a tile, one after the
        other. unaligned C: C once more, where its lines start anywhere.
        """
        (height, width), cols = p.p["blocksize"], tile.cols
        strips, columns, block_columns = ceil_div(p.M, ROWS), ceil_div(p.n, cols), ceil_div(p.K, width)
        longer = spmm_bsr.longer_rows(p)
        filled = max(1, round(strips / longer))  # strips with blocks, if these lie at random in the rows that have any
        share = min(1.0, p.nnz * longer / max(1, p.M * p.K))
        union = block_columns * (1 - (1 - share) ** (ROWS // height)) * width
        union = max(union, p.nnz / (filled * ROWS))
        steps = (filled * max(1, ceil_div(round(union), DEPTH)) + strips - filled) * columns
        blocks = min(steps, tile.resident * device.processors)
        longest, per_tile = ceil_div(steps, blocks), steps / (strips * columns)
        at_once = ceil_div(blocks, device.processors)  # blocks of a multiprocessor, which share its rates
        loaded = 2 * p.nnz * columns / steps + 2 * DEPTH * cols
        step = max(tile_us(ROWS, cols, DEPTH, TENSOR_16, device), load_us(loaded, device))
        # Most blocks hand over once; a tile's first block reads the sums of all others one after the other.
        sums = (at_once + per_tile / longest) * load_us(ROWS * cols * 4, device) if blocks > 1 else 0.0
        memory = memory_us(stored_bytes(p) + operands_bytes(p), device)
        column_major = memory_us(p.M * p.n * itemsize(p.out_dtype), device) if p.out_layout == COL else 0.0
        units = DEPTH // min(DEPTH, width)
        boxes = units * (ROWS // height + (1 if p.b_layout == COL else ceil_div(cols, 64)))
        steps_us, unaligned = at_once * longest * step, unaligned_us(p, device)
        return (1.0, memory, steps_us, 0.1 * longest, 0.01 * at_once * longest * boxes, sums, per_tile / longest,
                column_major, unaligned)  # fmt: skip

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = spmm_bsr.sample_problem("bsr", (32, 32), "bfloat16", "bfloat16", COL, COL)
        rows = p.changed(b_layout=ROW, out_layout=ROW)
        low = p.changed(params=(("blocksize", (16, 16)),))
        wide = rows.changed(
            params=(("blocksize", (32, 64)),), a_dtype="float16", b_dtype="float16", out_dtype="float32"
        )
        cases = ((16, 2, rows), (48, 2, p), (64, 2, low), (96, 2, rows), (96, 2, p), (128, 1, wide), (128, 1, p))
        return tuple(_instance(Tile(cols, resident), q) for cols, resident, q in cases)

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        x, (height, width), b_col = spmm_bsr.arrays_of(a), p.p["blocksize"], p.b_layout == COL
        stored, pointer, device, unit = int(x.indices.size), x.data.data.ptr, p.device_id, min(DEPTH, width)
        shape, blocksize = (p.M, p.K), (height, width)

        @functools.lru_cache(maxsize=1)
        def plain() -> launch.Prepare:
            return spmm_bsr.launcher(x, p)

        def fall_back(o: Operands) -> Sequence[Bound]:
            return plain()(o)

        if not stored or p.M == 0 or pointer % 16 or max((stored + 1) * height, p.M, p.K + width) > INT32_MAX:
            return Prepared(fall_back, "")  # no map of an empty A; coordinates of a map are 32-bit

        def build() -> Steps:
            indptr = x.indptr if x.row_ids is None else spmm_bsr.every_row(x.row_ids, x.indptr, ceil_div(p.M, height))
            steps = steps_of(indptr, x.indices, shape, blocksize)
            launch.finish_arrays()  # synchronize!
            return steps

        table = a.kernel_arrays("steps of strips", build)
        count, processors = int(table.places.shape[0]), row_tiles.device_of(device).sms
        swizzle = 2 * unit
        a_map = tensor_map.tiled(pointer, p.a_dtype, (width, stored * height), (width,), (unit, height), swizzle)
        signature = (tensor_map.TensorMap, *"PPPPiii", tensor_map.TensorMap, *"PiqPP")
        function = jit.load(SOURCE, _instance(tile, p), jit.architecture(p.sm or 90, ARCHS), device, tile.smem)
        fixed = (a_map, *table, count, width, p.M)
        product = Launch(function, signature, fixed, THREADS, tile.smem, waits=True)
        sums, flags = Scratch(), Scratch(zeros=True)

        def prepare(o: Operands) -> Sequence[Bound]:
            total = count * ceil_div(o.n, tile.cols)
            if not tensor_map.aligned(o.b, o.ldb, 2) or max(total, o.n) > INT32_MAX - 1024:
                return fall_back(o)
            if b_col:
                b_map = tensor_map.tiled(o.b, p.b_dtype, (p.K, o.n), (o.ldb,), (unit, tile.cols), swizzle)
            else:
                b_map = tensor_map.tiled(o.b, p.b_dtype, (o.n, p.K), (o.ldb,), (64, unit), 128)
            blocks = min(total, tile.resident * processors)
            sums_at = sums.buffer(o.stream, blocks * ROWS * tile.cols * 4)
            flags_at = flags.buffer(o.stream, blocks * 4)
            return (product.bind((blocks, 1, 1), o.stream, b_map, o.c, o.n, o.ldc, sums_at, flags_at),)

        return Prepared(prepare, str(tile), table.nbytes)


def _instance(tile: Tile, p: Problem) -> str:
    height, width = p.p["blocksize"]
    types = f"{spmm_bsr.C_TYPES[p.a_dtype]}, {spmm_bsr.C_TYPES[p.out_dtype]}, {height}, {min(DEPTH, width)}"
    flags = ", ".join(str(f).lower() for f in (p.b_layout == COL, p.out_layout == COL))
    return f"spmm_bsr_strips_sm90a<{types}, {tile.cols}, {tile.stages}, {tile.resident}, {flags}>"


KERNEL = SpmmBSRStrips()
