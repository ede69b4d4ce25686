"""SpMM on 2:4 weights with mma.sp, both operands by TMA; sm_90 and later.  Kernel: spmm_two_four_sm90.cu."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....arrays.library import ceil_div
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import Device, shared_limit
from ..runtime import jit, tensor_map
from ..runtime.kernel import CopyEngineKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands, Prepare
from .spmm_two_four import DEPTH, KERNEL, TERMS, c_type, launcher, mma_quantities, mma_reasons
from .two_four_records import WORDS, TwoFourRecords, record_map

SOURCE = "two_four/spmm_two_four_sm90.cu"


@dataclass(frozen=True)
class Tile:
    """A block computes ``rows`` x 128 of C, a warp 64 x 64; ``stages`` slabs are in shared memory."""

    rows: int
    stages: int

    cols = 128

    @property
    def threads(self) -> int:
        return self.rows // 64 * (self.cols // 64) * 32

    def smem(self, item: int) -> int:
        """bytes: the ring, its barriers, 16 rows of each warp's part of C (``item`` bytes), room to align to 1024."""
        slab = self.rows // 16 * WORDS * 4 + self.cols * DEPTH * 2
        return self.stages * slab + 64 + self.threads // 32 * 16 * 64 * item + 1024

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{DEPTH} stages {self.stages}"


TILES = (Tile(256, 5), Tile(256, 4), Tile(128, 4), Tile(128, 3))
RESERVED = 1024  # bytes of shared memory that the driver keeps for itself in a block


class SpmmTwoFourSm90(CopyEngineKernel):
    """C = A @ B for ``TwoFour`` A, without wgmma: for Blackwell, and for Hopper where spmm_two_four_sm90a cannot run.

    TMA needs B on a 16-byte boundary with a pitch of a multiple of 16 bytes; a call with another B, and a product too
    small for these tiles, run the sm_80 kernel.
    """

    name = "cuda.spmm_two_four_sm90"
    takes = spmm_of("two-four")
    otherwise = KERNEL
    epilogue = True
    tiles = TILES
    terms = TERMS

    def unsupported(self, p: Problem) -> list[str]:
        return mma_reasons(p, 90) + reasons(
            (not (p.M and p.K), f"no tensor map of an empty matrix: M = {p.M}, K = {p.K}"),
            (p.b_layout == COL and p.K % 8, f"TMA needs column-major B with K a multiple of 8, got K = {p.K}"),
        )

    def options(self, p: Problem) -> list[Tile]:
        """The tiles that shared memory has room for."""
        return [t for t in TILES if t.smem(itemsize(p.out_dtype)) <= shared_limit(p.sm)]

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By tile."""
        return (str(tile),)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        return mma_quantities(p, tile, device)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = Problem.product("two-four", (), 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        wide = p.changed(a_dtype="float16", out_dtype="float32", b_layout=COL, out_layout=COL, epilogue=True)
        return _instance(TILES[0], p), _instance(TILES[-1], wide)

    def prepared(self, a: Any, p: Problem) -> Prepared:
        import cupy

        weights = TwoFourRecords().of(a, p)
        limits = cupy.cuda.Device(p.device_id).attributes
        sms, best = limits["MultiProcessorCount"], self.best(p).tile
        room = best.smem(itemsize(p.out_dtype))
        function = jit.load(SOURCE, _instance(best, p), jit.architecture(p.sm or 90, ()), p.device_id, room)
        at_once = limits["MaxSharedMemoryPerMultiprocessor"] // (room + RESERVED)
        resident = sms * min(at_once, 2 if best.threads == 128 else 1)  # registers leave room for 256 threads
        a_map = record_map(weights, p, best.rows)
        row_tiles = ceil_div(p.M, best.rows)
        kind = tensor_map.TensorMap
        launch = Launch(function, (kind, kind, *"iiPiqPff"), (a_map,), best.threads, room)

        @functools.lru_cache(maxsize=1)
        def unaligned() -> Prepare:
            return launcher(weights, p)[0]

        b_item = VALUE_TYPES[p.b_dtype].numpy.itemsize

        def prepare(o: Operands) -> Sequence[Bound]:
            if not tensor_map.aligned(o.b, o.ldb, b_item):
                return unaligned()(o)
            extents = (p.K, o.n) if p.b_layout == COL else (o.n, p.K)
            b_map = tensor_map.tiled(o.b, p.b_dtype, extents, (o.ldb,), (DEPTH, DEPTH), 128)
            grid = min(row_tiles * ceil_div(o.n, best.cols), resident), 1, 1
            return (launch.bind(grid, o.stream, b_map, p.M, p.K, o.c, o.n, o.ldc, o.bias, o.alpha, o.beta),)

        return Prepared(prepare, str(best))


def _instance(tile: Tile, p: Problem) -> str:
    flags = (p.b_layout == COL, p.out_layout == COL, p.epilogue)
    shape = f"{tile.rows}, {tile.cols}, {tile.stages}, {', '.join(str(f).lower() for f in flags)}"
    return f"spmm_two_four_sm90<{c_type(p.a_dtype)}, {c_type(p.out_dtype)}, {shape}>"
