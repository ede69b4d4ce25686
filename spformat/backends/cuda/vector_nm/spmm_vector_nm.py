"""SpMM on vector n:m (NM-SpMM) on the CUDA cores, any vector length.  Kernel: spmm_vector_nm.cu.

float32, float64, bf16, fp16. Sums are float32 (float64 for float64), in ascending k, one fused multiply-add per
stored item.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ....arrays.library import round_up
from ....products.kernel import spmm_of
from ....products.problem import Problem, itemsize
from ....products.roofline import CUDA_32, CUDA_64, Device, shared_limit
from ..runtime.kernel import CudaKernel, Prepared
from .vector_nm_launch import C_TYPES, ITEMSIZE, fit, launcher, pattern, records_choice, vector_reasons
from .vector_nm_tiles import MAX_PACKED_SHARE, Pattern
from .vector_nm_times import TERMS, Split, filling, short_vectors_on_cuda_cores, staged_quantities, variant

STEP = 4
"""Slots that a thread reads at a time."""


@dataclass(frozen=True)
class Tile:
    """Warps along rows (32 each) and columns (64 each), ring stages, columns of A in a k tile."""

    warps_m: int
    warps_n: int
    stages: int
    depth: int
    group_limit: int = 32

    @property
    def rows(self) -> int:
        return 32 * self.warps_m

    @property
    def cols(self) -> int:
        return 64 * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def smem(self, itemsize: int, staged: int, slots: int, record: int) -> int:
        """Bytes: the ring of stages and the ring of records (vector_nm.cuh)."""
        stage = ((staged + 1) * self.cols + slots * self.rows) * itemsize
        return self.stages * stage + (2 * self.stages - 1) * 4 * record

    def slot_scale(self, itemsize: int) -> int:
        return self.cols * itemsize

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{self.depth}"


TILES = (Tile(4, 2, 3, 32), Tile(4, 2, 2, 32), Tile(2, 1, 3, 32), Tile(2, 1, 2, 32), Tile(1, 1, 2, 1))
"""Ordered by speed on large problems. The later ones are for small problems and for wide windows, whose rows of B need
more shared memory."""
LARGE, SMALL = TILES[0], TILES[2]
DEEP = tuple(Tile(4, 2, 2, depth) for depth in (128, 64))


def deepest(p: Problem, tiles: tuple[Tile, ...]) -> Tile:
    """The first of ``tiles``, which differ in depth, of which two blocks fit into a multiprocessor's shared memory
    beside each other; the last one if none does. Deep tiles wait less often (decision 0045)."""
    form = pattern(p)
    for tile in tiles[:-1]:
        if form.m > tile.depth:
            continue
        windows = form.windows_per_tile(STEP, tile.depth)
        width, slots = windows * form.m, round_up(windows * form.n, STEP)
        staged, groups = most_staged(form, tile.rows, width), tile.rows // form.group_rows(tile.group_limit)
        if 2 * tile.smem(4, staged, slots, groups * slots + staged + 4) <= shared_limit(p.sm):
            return tile
    return tiles[-1]


def most_staged(form: Pattern, rows: int, width: int) -> int:
    """Rows of B that a tile stages of ``width`` columns: if its groups choose at random, hardly any needs more."""
    share = 1 - (1 - form.n / form.m) ** max(1, rows // form.vector_length)
    if share >= MAX_PACKED_SHARE:
        return round_up(width, 4)
    return min(round_up(width, 4), round_up(int(width * share + 4 * math.sqrt(width * share * (1 - share))), 4))


class SpmmVectorNM(CudaKernel):
    """``out = A @ B`` for A in VectorNM, without tensor cores."""

    name = "cuda.spmm_vector_nm"
    takes = spmm_of("vector-nm")
    archs = ("sm_80",)
    terms = TERMS

    def unsupported(self, p: Problem) -> list[str]:
        return vector_reasons(p, tuple(C_TYPES))

    def options(self, p: Problem) -> list[Split[Tile]]:
        """A large and a small tile, with as many parts along K as they need; for float64 only small tiles fit."""
        if p.a_dtype == "float64":
            return [filling(p, SMALL)]
        large = deepest(p, (*DEEP, LARGE)) if p.a_dtype == "float32" else LARGE
        return [filling(p, tile) for tile in (large, SMALL)]

    def variant(self, p: Problem, tile: Split[Tile]) -> tuple[str, ...]:
        """By value size and tile. The deep tile has the constants of the other large one: a step costs the same."""
        own = variant(p, tile)
        return (*own[:-1], *variant(p, Split(LARGE, tile.splits))) if tile.tile in DEEP else own

    def quantities(self, p: Problem, tile: Split[Tile], device: Device) -> tuple[float, ...]:
        kind = CUDA_64 if itemsize(p.a_dtype) == 8 else CUDA_32
        return staged_quantities(
            p, tile, kind, device, packs=True, slower=short_vectors_on_cuda_cores(p.p["vector_length"])
        )

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            instance("float32", "float", 8, LARGE, False),
            instance("float32", "float", 8, DEEP[0], True),
            instance("float64", "double", 1, SMALL, False),
            instance("bfloat16", "__nv_bfloat16", 4, LARGE, True),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        wanted = self.best(p).tile.tile
        # The later ones for windows too wide for it.
        tiles = TILES[TILES.index(wanted) :] if wanted in TILES else (wanted, *TILES)
        tile, records, group = fit(tiles, a, p, step=STEP)
        smem = tile.smem(ITEMSIZE[p.a_dtype], records.staged, records.slots, int(records.words.shape[2]))
        choice = records_choice(
            a, p, records, source="vector_nm/spmm_vector_nm.cu", archs=self.archs, waits=True, cols=tile.cols,
            threads=tile.threads,
            instance=lambda out, _: instance(p.a_dtype, out, min(group, 8), tile, records.packed), smem=lambda _: smem,
        )  # fmt: skip
        kind = "packed" if records.packed else "plain"
        return Prepared(launcher(p, choice), f"{tile} {kind}", records.words.nbytes)


def instance(dtype: str, out: str, run_rows: int, tile: Tile, packed: bool) -> str:
    """C++ name of the kernel; ``run_rows``: rows of a thread that share columns."""
    sums = "double" if dtype == "float64" else "float"
    return (
        f"spformat::vector_nm::spmm_vector_nm<{C_TYPES[dtype]}, {sums}, {out}, {run_rows}, {tile.warps_m}, "
        f"{tile.warps_n}, {tile.stages}, {str(packed).lower()}>"
    )
