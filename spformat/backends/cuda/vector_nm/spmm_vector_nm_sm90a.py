"""SpMM on vector n:m (NM-SpMM), vectors of 128 rows or more, on Hopper's wgmma.  Kernel: spmm_vector_nm_sm90a.cu.

bf16 and fp16. A tile of 128 rows has one list of columns: rows of B are gathered into shared memory, and the rest is a
dense product over the kept vectors only. Sums are float32. Tiles are whole, or blocks take equal shares of their steps
along K (even_shares.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....arrays.library import Array, ceil_div, namespace, round_up
from ....products.ideal import load_us, tile_us, unaligned_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import TENSOR_16, Blocking, Device
from ..runtime import jit, launch, row_tiles, tensor_map
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands
from ..runtime.scratch import Scratch
from ..runtime.tile_order import columns_together
from .vector_nm_launch import C_TYPES, AlignedRows, aligned_data, pattern, vector_reasons
from .vector_nm_tiles import Pattern
from .vector_nm_times import of_every_tile

SOURCE = "vector_nm/spmm_vector_nm_sm90a.cu"
DEPTH, ROWS, WORKERS = 64, 128, 256
"""Kept vectors and rows of a stage, threads that multiply; must match the constants of the kernel."""
LEAST_STEPS = 4
"""Steps along K that a share has at least where there are fewer tiles than multiprocessors."""


class Gathered(ctypes.Structure):
    """Must match ``vector_nm::Gathered`` in the kernel."""

    _fields_ = [(name, ctypes.c_int32) for name in ("M", "K", "group_rows", "columns_ld", "k_tiles", "row_tiles")]


@dataclass(frozen=True)
class Tile:
    """Columns of a tile, ring stages, warps that load; even: blocks share out the last rounds of tiles by steps along
    K."""

    cols: int
    stages: int
    loaders: int
    even: bool

    def smem(self) -> int:
        """Bytes: the ring, four slots in which C is staged (64 x 64 values of 16 bits), barriers, the block's place."""
        return self.stages * DEPTH * 2 * (ROWS + round_up(self.cols, 64)) + 4 * 8192 + 16 * self.stages

    def blocks(self, tiles: int, steps: int, processors: int) -> int:
        """Blocks for so many tiles of so many steps on so many multiprocessors: each has work."""
        if not self.even or tiles >= processors:
            return min(tiles, processors)
        return min(processors, max(tiles, tiles * steps // LEAST_STEPS))

    def blocking(self, form: Pattern) -> Blocking:
        """How the tile cuts a product. Only kept rows are loaded."""
        kept = ceil_div(form.K, form.m) * form.n
        return Blocking(
            rows=ROWS, cols=self.cols, k_tiles=ceil_div(kept, DEPTH), kept=DEPTH, staged=DEPTH, itemsize=2,
            arithmetic=TENSOR_16,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{ROWS}x{self.cols}x{DEPTH} {'even' if self.even else 'whole'}"


STAGES = {256: 4, 224: 4, 192: 4, 160: 4, 128: 6, 96: 6, 64: 6}
"""Columns of a tile -> stages that fit in shared memory."""
TILES = tuple(Tile(cols, stages, 4, even) for even in (False, True) for cols, stages in STAGES.items())
"""Widest first."""


def gathered_columns(indices: Array, pattern: Pattern) -> Array:
    """int32[Q, W padded to a multiple of DEPTH]: the column of every kept vector; -1 where there is none inside K."""
    xp, (W, Q) = namespace(indices), indices.shape
    columns = xp.full((Q, round_up(W, DEPTH)), -1, "int32")
    windows = xp.arange(W, dtype="int64") // pattern.n * pattern.m
    at = windows + indices.T
    columns[:, :W] = xp.where(at < pattern.K, at, -1)
    return columns


def _columns(a: Any, form: Pattern) -> Any:
    """``gathered_columns`` of a matrix, complete on every stream."""
    columns = gathered_columns(a.indices, form)
    launch.finish_arrays()  # synchronize!
    return columns


class SpmmVectorNMSm90a(CudaKernel):
    """``out = A @ B`` for A in VectorNM with a vector length that is a multiple of 128, on sm_90a only."""

    name = "cuda.spmm_vector_nm_sm90a"
    takes = spmm_of("vector-nm")
    archs = ("sm_90a",)
    tiles = TILES
    terms = ("launch", "memory", "steps", "products", "loads", "slower of the two", "tiles", "handed over", "sums",
             "copy of B", "second launches", "unaligned C")  # fmt: skip

    def unsupported(self, p: Problem) -> list[str]:
        length = p.p["vector_length"]
        return vector_reasons(p, ("bfloat16", "float16")) + reasons(
            (p.device == "cuda" and p.sm != 90, f"needs sm_90a (wgmma), got {p.sm_name}"),
            (length % ROWS, f"vector_length must be a multiple of {ROWS} (one column list per tile), got {length}"),
            (p.M * p.K == 0, f"A must not be empty (a TMA map has no zero extents), got {p.M}x{p.K}"),
        )

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            instance("bfloat16", "__nv_bfloat16", TILES[0]),
            instance("float16", "float", TILES[4]),
            instance("float16", "__half", TILES[6]),
            instance("bfloat16", "__nv_bfloat16", TILES[3]),
            instance("float16", "__half", TILES[1]),
        )

    def blocking(self, p: Problem) -> Blocking:
        """How the kernel cuts ``p``; read by spformat.dispatch.cost."""
        cut: Blocking = self.best(p).tile.blocking(pattern(p))
        return cut

    def options(self, p: Problem) -> tuple[Tile, ...]:
        """Tiles that are not much wider than C."""
        return tuple(t for t in TILES if t.cols < p.n + 64) or TILES[-1:]

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of the block with the most work. A tile loads only the rows of B that A uses.

        launch: constant. steps: their number, in microseconds. products, loads (A, and rows of B from L2): of these
        steps. tiles: C of the tiles that a block writes. handed over: constant where a tile has several blocks. sums:
        handed over and added once for each further one. copy of B, second launches: of a column-major or unaligned B,
        which is copied first. unaligned C: C once more, where its lines start anywhere.
        """
        steps, size = ceil_div(ceil_div(p.K, p.p["m"]) * p.p["n"], DEPTH), itemsize(p.a_dtype)
        tiles = ceil_div(p.M, ROWS) * ceil_div(p.n, tile.cols)
        blocks = tile.blocks(tiles, steps, device.processors)
        turns = ceil_div(tiles, blocks)
        longest, handed, sums = turns * steps, 0.0, 0.0
        if tile.even and tiles % blocks:
            longest = ceil_div(tiles * steps, blocks)
            handed, sums = 1.0, (1 + ceil_div(steps, longest)) * load_us(ROWS * tile.cols * 4, device)
        products = longest * tile_us(ROWS, tile.cols, DEPTH, TENSOR_16, device)
        loads = longest * load_us((ROWS + tile.cols) * DEPTH * size, device)
        written = turns * load_us(ROWS * tile.cols * itemsize(p.out_dtype), device)
        memory, copied, copy = of_every_tile(p, device)
        slower, unaligned = max(products, loads), unaligned_us(p, device)
        return (
            1.0, memory, longest, products, loads, slower, written, handed, sums, copy, float(copied), unaligned,
        )  # fmt: skip

    def prepared(self, a: Any, p: Problem) -> Prepared:
        form, tile, data = pattern(p), self.best(p).tile, aligned_data(a)
        columns = a.kernel_arrays("gathered columns", lambda: _columns(a, form))
        W, Mp = data.shape
        row_count, steps, c_col = ceil_div(p.M, ROWS), columns.shape[1] // DEPTH, p.out_layout == COL
        arch, smem, threads = jit.architecture(p.sm or 80, self.archs), tile.smem(), WORKERS + 32 * tile.loaders
        function = jit.load(SOURCE, instance(p.a_dtype, C_TYPES[p.out_dtype], tile), arch, p.device_id, smem)
        a_map = tensor_map.tiled(data.data.ptr, p.a_dtype, (Mp, W), (Mp,), (64, DEPTH), 128)
        shape = Gathered(p.M, p.K, form.vector_length, columns.shape[1], steps, row_count)
        signature = (tensor_map.TensorMap, Gathered, *"PPi", tensor_map.TensorMap, *"iPiqqiPPi")
        product = Launch(function, signature, (a_map, shape, columns), threads, smem, waits=True)
        processors, rows_of_b = row_tiles.device_of(p.device_id).sms, AlignedRows(p)
        sums, flags = Scratch(), Scratch(zeros=True)

        def prepare(o: Operands, keep: Any = data) -> Sequence[Bound]:  # a_map has only the address of data
            calls, b, pitch = rows_of_b(o)
            step_m, step_n = (1, o.ldc) if c_col else (o.ldc, 1)
            c_map, by_copies = tensor_map.UNMAPPED, 0
            if p.out_dtype == p.a_dtype and (c_col or tile.cols % 64 == 0):
                c_map, by_copies = tensor_map.of_c(o.c, p.out_dtype, p.M, o.n, o.ldc, c_col)
            column_count = ceil_div(o.n, tile.cols)
            tiles = row_count * column_count
            blocks, sums_at, flags_at = tile.blocks(tiles, steps, processors), 0, 0
            shared = bool(tile.even and tiles % blocks)
            if shared:
                sums_at = sums.buffer(o.stream, blocks * ROWS * tile.cols * 4)
                flags_at = flags.buffer(o.stream, 2 * blocks * 4)
            rest = c_map, by_copies, o.c, o.n, step_m, step_n, int(shared), sums_at, flags_at
            together = columns_together(2 * p.K * tile.cols, row_count, column_count, 1, processors)
            return [*calls, product.bind((blocks, 1, 1), o.stream, b, pitch, *rest, together)]

        return Prepared(prepare, f"{tile}", columns.nbytes)


def instance(dtype: str, out: str, tile: Tile) -> str:
    """C++ name of the kernel."""
    numbers = f"{tile.cols}, {tile.stages}, {tile.loaders}"
    return f"spformat::vector_nm::spmm_vector_nm_sm90a<{C_TYPES[dtype]}, {out}, {numbers}>"
