"""SpMM on vector n:m (NM-SpMM), tensor cores fed by Hopper's copy engine.  Kernel: spmm_vector_nm_tma_sm90a.cu.

bf16, fp16 and float32, vector lengths that are multiples of 8. Products, sums and tolerance are those of
``spmm_vector_nm_mma``. Blocks may share what they load in clusters, which did not pay on an H200.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ....arrays.library import ceil_div, round_up
from ....products.kernel import reasons, spmm_of
from ....products.problem import Problem
from ....products.roofline import TENSOR_16, TF32_THREE, Blocking, Device, device_of, shared_limit
from ..runtime import tensor_map
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.row_tiles import device_of as properties_of
from ..runtime.tile_order import columns_together
from .vector_nm_launch import (
    C_TYPES,
    ITEMSIZE,
    aligned_data,
    cached_records,
    launcher,
    pattern,
    records_choice,
    vector_reasons,
)
from .vector_nm_tiles import Pattern, Shape
from .vector_nm_times import TERMS, Split, parts, short_vectors_on_tensor_cores, staged_quantities, variant

_LEAST_STAGES, _MOST_STAGES = 2, 8
_MAX_BOX = 256
CLUSTER = (1, 1)
"""Row tiles x column tiles of a cluster. (2, 1), (1, 2) and (2, 2) work too; on an H200 none was faster."""


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a warp, warps along rows and columns (8 in all), columns of A wanted in a k tile."""

    warp_rows: int
    warp_cols: int
    warps_m: int
    warps_n: int
    depth: int

    @property
    def rows(self) -> int:
        return self.warp_rows * self.warps_m

    @property
    def cols(self) -> int:
        return self.warp_cols * self.warps_n

    def windows(self, form: Pattern, itemsize: int) -> int:
        """Windows in a k tile."""
        return form.windows_per_tile(32 // itemsize, self.depth)

    def stage(self, form: Pattern, itemsize: int) -> int:
        """Bytes of a stage: B and its line of zeros, A, and the record; column blocks of 128 bytes are separate."""
        windows = self.windows(form, itemsize)
        slots, groups = round_up(windows * form.n, 32 // itemsize), self.rows // form.group_rows(self.warp_rows)
        b = self.cols * itemsize // 128 * (windows * form.m + 8) // 8 * 1024
        a = self.rows * itemsize // 128 * ceil_div(slots, 8) * 1024
        return round_up(b + a + 4 * round_up(groups * slots, 4), 1024)

    def rest(self, itemsize: int) -> int:
        """Bytes beside the ring: the strips in which C is staged before it is written, and the barriers."""
        strip = 8 * (32 if itemsize == 4 else 16) * (64 * 4 + 16)
        return strip + 16 * _MOST_STAGES

    def stages(self, form: Pattern, itemsize: int, limit: int) -> int:
        """Stages that fit in ``limit`` bytes."""
        return min(_MOST_STAGES, (limit - self.rest(itemsize)) // self.stage(form, itemsize))

    def blocking(self, form: Pattern, itemsize: int) -> Blocking:
        """How the tile cuts a product."""
        windows = self.windows(form, itemsize)
        return Blocking(
            rows=self.rows, cols=self.cols, k_tiles=ceil_div(ceil_div(form.K, form.m), windows),
            kept=round_up(windows * form.n, 32 // itemsize), staged=windows * form.m, itemsize=itemsize,
            arithmetic=ARITHMETIC[itemsize],
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{self.depth}"


ARITHMETIC = {2: TENSOR_16, 4: TF32_THREE}
"""By value size."""
_SMALL_16 = (
    Tile(32, 64, 4, 2, 128), Tile(32, 64, 4, 2, 64),
    Tile(32, 32, 4, 2, 128), Tile(32, 32, 4, 2, 64),
)  # fmt: skip
TILES_16 = (Tile(32, 128, 8, 1, 128), Tile(32, 128, 8, 1, 64), *_SMALL_16)
TALL_16 = (Tile(64, 64, 4, 2, 128), Tile(64, 64, 4, 2, 64), *_SMALL_16)
TILES_32 = (
    Tile(32, 128, 8, 1, 64), Tile(32, 128, 8, 1, 32),
    Tile(32, 64, 4, 2, 64), Tile(32, 64, 4, 2, 32),
    Tile(32, 32, 4, 2, 128), Tile(32, 32, 4, 2, 64),
)  # fmt: skip
"""The TALL ones for vector lengths that are multiples of 64. Of equal ones, the first is taken."""


def tiles_for(p: Problem) -> tuple[tuple[Tile, int, int], ...]:
    """Tiles with room for enough stages, each with its tiles along M and its steps along K; none if the windows are too
    wide. The same for every N."""
    return _tiles(pattern(p), ITEMSIZE[p.a_dtype], shared_limit(p.sm))


@functools.lru_cache(maxsize=256)
def _tiles(form: Pattern, size: int, limit: int) -> tuple[tuple[Tile, int, int], ...]:
    tiles = TILES_32 if size == 4 else TALL_16 if form.vector_length % 64 == 0 else TILES_16
    windows = ceil_div(form.K, form.m)
    return tuple(
        (t, ceil_div(form.M, t.rows), ceil_div(windows, t.windows(form, size))) for t in tiles
        if t.stages(form, size, limit) >= _LEAST_STAGES and t.windows(form, size) * form.m <= _MAX_BOX
    )  # fmt: skip


class SpmmVectorNMTMA(CudaKernel):
    """``out = A @ B`` for A in VectorNM with a vector length that is a multiple of 8, on sm_90a only."""

    name = "cuda.spmm_vector_nm_tma_sm90a"
    takes = spmm_of("vector-nm")
    archs = ("sm_90a",)
    terms = TERMS
    product_error = 2.0**-21  # as in spmm_vector_nm_mma

    def unsupported(self, p: Problem) -> list[str]:
        length = p.p["vector_length"]
        refused = vector_reasons(p, ("bfloat16", "float16", "float32")) + reasons(
            (p.device == "cuda" and p.sm != 90, f"needs sm_90a (TMA, register hand-over), got {p.sm_name}"),
            (length % 8, f"vector_length must be a multiple of 8 (the instruction's row width), got {length}"),
            (p.M * p.K == 0, f"A must not be empty (a TMA map has no zero extents), got {p.M}x{p.K}"),
            (p.n <= 32, f"N must be more than 32 (a tile has 64 columns), got the class of N <= {p.n}"),
        )
        if not refused and not tiles_for(p):
            q = p.p
            refused.append(
                f"{_LEAST_STAGES} stages of {q['n']}:{q['m']} windows must fit in {shared_limit(p.sm)} bytes"
            )
        return refused

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            instance("bfloat16", "__nv_bfloat16", 32, TILES_16[0], (2, 2)),
            instance("float16", "float", 64, TALL_16[0], (1, 1)),
            instance("float32", "float", 32, TILES_32[0], (2, 2)),
        )

    def blocking(self, p: Problem) -> Blocking:
        """How the kernel cuts ``p``; read by spformat.dispatch.cost."""
        cut: Blocking = self.best(p).tile.tile.blocking(pattern(p), ITEMSIZE[p.a_dtype])
        return cut

    def options(self, p: Problem) -> list[Split[Tile]]:
        """Tiles with room for enough stages, with one part along K and more."""
        n, device = p.n, device_of(p)
        return [s for t, rows, steps in tiles_for(p) for s in parts(t, rows * ceil_div(n, t.cols), steps, device)]

    def variant(self, p: Problem, tile: Split[Tile]) -> tuple[str, ...]:
        return variant(p, tile)

    def quantities(self, p: Problem, tile: Split[Tile], device: Device) -> tuple[float, ...]:
        slower = short_vectors_on_tensor_cores(p.p["vector_length"])
        return staged_quantities(p, tile, ARITHMETIC[ITEMSIZE[p.a_dtype]], device, packs=False, slower=slower)

    def prepared(self, a: Any, p: Problem) -> Prepared:
        best, form, size = self.best(p).tile, pattern(p), ITEMSIZE[p.a_dtype]
        tile = best.tile
        group, stages = form.group_rows(tile.warp_rows), tile.stages(form, size, shared_limit(p.sm))
        records = cached_records(
            a, form, tile_rows=tile.rows, group_rows=group, kept=tile.windows(form, size) * form.n,
            step=32 // size, banks=16 // size if group >= 16 else 1, bank_rows=size // 2, packed=False,
        )  # fmt: skip
        data = aligned_data(a)
        W, Mp = data.shape
        wide, row_tiles, at_once = 128 // size, ceil_div(p.M, tile.rows), properties_of(p.device_id).sms
        a_map = tensor_map.tiled(data.data.ptr, p.a_dtype, (Mp, W), (Mp,), (wide, records.tile_kept), 128)

        def b_arguments(b: int, pitch: int, n: int) -> tuple[Any, ...]:
            box = (wide, records.tile_cols)
            b_map = tensor_map.tiled(b, p.a_dtype, (n, p.K), (pitch // size,), box, 128)
            extent = row_tiles, ceil_div(n, tile.cols)
            return b_map, columns_together(size * p.K * tile.cols, *extent, best.splits, at_once)

        def head(splits: int, per_split: int, cluster: tuple[int, int]) -> tuple[Any, ...]:
            return a_map, records.shape(form, int(data.strides[0]), W, per_split), stages, splits, records.words

        smem = stages * tile.stage(form, size) + tile.rest(size)
        choice = records_choice(
            a, p, records, source="vector_nm/spmm_vector_nm_tma_sm90a.cu", archs=self.archs, waits=True, cols=tile.cols,
            threads=384, head=head,
            instance=lambda out, c: instance(p.a_dtype, out, group, tile, c), smem=lambda _: smem,
            cluster=lambda _: CLUSTER, signature=(tensor_map.TensorMap, Shape, "i", "i", "P"), keep=data,
            b_signature=(tensor_map.TensorMap, "i"), b_arguments=b_arguments, splits=best.splits,
        )  # fmt: skip
        return Prepared(launcher(p, choice), f"{tile} {stages} stages", records.words.nbytes)


def instance(dtype: str, out: str, group: int, tile: Tile, cluster: tuple[int, int]) -> str:
    """C++ name of the kernel; ``group``: rows of a warp that share columns."""
    return (
        f"spformat::vector_nm::spmm_vector_nm_tma<{C_TYPES[dtype]}, {out}, {group}, {tile.warp_rows}, "
        f"{tile.warp_cols}, {tile.warps_m}, {tile.warps_n}, {cluster[0]}, {cluster[1]}>"
    )
