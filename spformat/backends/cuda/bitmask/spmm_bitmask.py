"""SpMM on Bitmask, float32 and float64, few columns of B: the weights stream once.  Kernel: spmm_bitmask.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.dtypes import VALUE_TYPES
from ....products.kernel import spmm_of
from ....products.problem import COL, Problem
from ....products.roofline import Device, device_of, shared_limit
from ..runtime import jit
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Launch, over_tiles
from .bitmask_slices import (
    STEP,
    TERMS,
    bitmask_quantities,
    bitmask_reasons,
    bitmask_variant,
    slice_columns,
    values_before,
)


@dataclass(frozen=True)
class Tile:
    """What one block computes: 16 * ``fragments`` rows x ``cols`` columns of C, K shared by ``warps``."""

    fragments: int
    cols: int
    warps: int

    @property
    def rows(self) -> int:
        return 16 * self.fragments

    def smem(self, itemsize: int, b_col: bool) -> int:
        """bytes: per warp the expanded tile, two staged pieces of B and the row table; ``Layout`` in the kernel."""
        lines, line = (self.cols, STEP) if b_col else (STEP, self.cols)
        warp = self.rows * (STEP + 2) * itemsize + 2 * lines * (line + 16 // itemsize) * itemsize + self.rows * 16
        return self.warps * max(warp, self.rows * self.cols * itemsize)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}, {self.warps} warps"


def choose(p: Problem, sms: int, smem: int) -> Tile:
    """Narrowest tile that holds N, 32 rows where they fill the machine, as many warps as fit ``smem`` bytes."""
    itemsize = VALUE_TYPES[p.a_dtype].numpy.itemsize
    cols = 16 if p.n > 8 and itemsize == 4 else 8
    row_tiles = -(-p.M // 32)
    fragments = 2 if itemsize == 4 and row_tiles >= 0.75 * sms else 1
    tiles = (Tile(fragments, cols, warps) for warps in (8, 4, 2, 1))
    return next(t for t in tiles if t.smem(itemsize, p.b_layout == COL) <= smem)


class SpmmBitmask(CudaKernel):
    """C = A @ B for ``Bitmask`` A; tuned for few columns, correct for any M, K, N, layout and leading dimension."""

    name = "cuda.spmm_bitmask"
    takes = spmm_of("bitmask")
    terms = TERMS

    def unsupported(self, p: Problem) -> list[str]:
        return bitmask_reasons(p, ("float32", "float64"), (p.a_dtype,))

    def options(self, p: Problem) -> tuple[Tile]:
        """The one tile that suits the shape."""
        return (choose(p, device_of(p).processors, shared_limit(p.sm)),)

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        return bitmask_variant(p)

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        return bitmask_quantities(p, tile.rows, tile.cols, device)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return ("spmm_bitmask<float, int, 16, 2, 8, true>", "spmm_bitmask<double, long long, 8, 1, 8, false>")

    def prepared(self, a: Any, p: Problem) -> Prepared:
        tile = self.best(p).tile
        b_col, out_col = p.b_layout == COL, p.out_layout == COL
        smem = tile.smem(VALUE_TYPES[p.a_dtype].numpy.itemsize, b_col)
        before = values_before(a, p, tile.warps)
        types = f"{VALUE_TYPES[p.a_dtype].cuda}, {'int' if a.indptr.dtype == 'int32' else 'long long'}"
        instance = f"spmm_bitmask<{types}, {tile.cols}, {tile.fragments}, {tile.warps}, {str(b_col).lower()}>"
        function = jit.load("bitmask/spmm_bitmask.cu", instance, jit.architecture(p.sm or 80, ()), p.device_id, smem)
        fixed = (a.indptr, a.bitmask, a.data, before, p.M, p.K, slice_columns(p.K, tile.warps))
        launch = Launch(function, "PPPPqqqPPqqqq", fixed, 32 * tile.warps, smem, waits=True)
        prepare = over_tiles(launch, -(-p.M // tile.rows), tile.cols, out_col)
        return Prepared(prepare, str(tile), before.nbytes)
