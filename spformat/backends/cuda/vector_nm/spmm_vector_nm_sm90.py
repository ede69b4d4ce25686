"""SpMM on vector n:m (NM-SpMM) in exact float32 on the CUDA cores of Hopper.  Kernel: spmm_vector_nm_sm90.cu.

The same sums as ``cuda.spmm_vector_nm``, bit by bit: float32, in ascending k, one fused multiply-add per stored item.
The copy engine brings every row of B and every line of A (decision 0045).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....products.kernel import reasons
from ....products.problem import Problem
from ..runtime import launch
from ..runtime.kernel import Prepared
from . import spmm_vector_nm
from .spmm_vector_nm import STEP, SpmmVectorNM, deepest
from .vector_nm_launch import fit, launcher, records_choice
from .vector_nm_times import Split, filling

SOURCE, ARCHS = "vector_nm/spmm_vector_nm_sm90.cu", ("sm_90",)


@dataclass(frozen=True)
class Tile(spmm_vector_nm.Tile):
    """A tile of the kernel for sm_80, with other shared memory."""

    def smem(self, itemsize: int, staged: int, slots: int, record: int) -> int:
        """Bytes: the ring of stages, and two records, a barrier and a counter for each (spmm_vector_nm_sm90.cu)."""
        stage = ((staged + 1) * self.cols + slots * self.rows) * itemsize
        return self.stages * (stage + 2 * 4 * record + 8 + 4)


def _of(tiles: Sequence[spmm_vector_nm.Tile]) -> tuple[Tile, ...]:
    return tuple(Tile(t.warps_m, t.warps_n, t.stages, t.depth, t.quads, t.group_limit) for t in tiles)


TILES = _of(spmm_vector_nm.TILES)
LARGE, SMALL = TILES[0], TILES[2]
DEEP, WIDE = _of(spmm_vector_nm.DEEP), _of(spmm_vector_nm.WIDE)


class SpmmVectorNMSm90(SpmmVectorNM):
    """``out = A @ B`` for A in VectorNM with a vector length that is a multiple of 8, without tensor cores.

    The copy engine copies multiples of 16 bytes: a call whose number of columns is no multiple of 4 runs
    ``cuda.spmm_vector_nm``.
    """

    name = "cuda.spmm_vector_nm_sm90"
    archs = ARCHS
    constants_of = SpmmVectorNM.name

    def unsupported(self, p: Problem) -> list[str]:
        length = p.p["vector_length"]
        return super().unsupported(p) + reasons(
            (p.device == "cuda" and (p.sm or 0) < 90, f"needs sm_90 (bulk copies), got {p.sm_name}"),
            (p.a_dtype != "float32", f"takes float32, got {p.a_dtype}"),
            (length % 8, f"vector_length must be a multiple of 8 (the rows of a thread), got {length}"),
        )

    def options(self, p: Problem) -> list[Split[Any]]:
        """A large and a small tile, with as many parts along K as they need."""
        tiles = deepest(p, (*DEEP, LARGE)), deepest(p, WIDE), SMALL
        return [filling(p, tile) for tile in tiles]

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            instance("float", DEEP[0], True), instance("float", LARGE, False), instance("float", WIDE[0], True),
            instance("float", SMALL, False),
        )  # fmt: skip

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile.tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile, or of a later one for windows too wide for it."""
        tiles = TILES[TILES.index(tile) :] if tile in TILES else (tile, *TILES)
        tile, records, _ = fit(tiles, a, p, step=STEP)
        smem = tile.smem(4, records.staged, records.slots, int(records.words.shape[2]))
        choice = records_choice(
            a, p, records, source=SOURCE, archs=ARCHS, cols=tile.cols, threads=tile.threads,
            instance=lambda out, _: instance(out, tile, records.packed), smem=lambda _: smem,
        )  # fmt: skip
        copied = launcher(p, choice)

        @functools.lru_cache(maxsize=1)
        def plain() -> Any:
            return SpmmVectorNM().prepared(a, p).prepare

        def prepare(x: launch.Operands) -> Sequence[launch.Bound]:
            bound: Sequence[launch.Bound] = (plain() if x.n % 4 else copied)(x)
            return bound

        kind = "packed" if records.packed else "plain"
        return Prepared(prepare, f"{tile} {kind}", records.words.nbytes)


def instance(out: str, tile: spmm_vector_nm.Tile, packed: bool) -> str:
    """C++ name of the kernel."""
    return (
        f"spformat::vector_nm::spmm_vector_nm_sm90<{out}, {tile.warps_m}, {tile.warps_n}, {tile.quads}, {tile.stages}, "
        f"{str(packed).lower()}>"
    )
