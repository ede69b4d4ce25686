"""SpMM on vector n:m (NM-SpMM) in exact float32 on the CUDA cores of Hopper.  Kernel: spmm_vector_nm_sm90.cu.

The same sums as ``cuda.spmm_vector_nm``, bit by bit: float32, in ascending k, one fused multiply-add per stored item.
The copy engine brings every row of B and every line of A (decision 0045).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....arrays.library import round_up
from ....products.kernel import reasons
from ....products.problem import Problem
from ....products.roofline import shared_limit
from ..runtime import tensor_map
from ..runtime.kernel import Prepared
from . import spmm_vector_nm
from .spmm_vector_nm import STEP, SpmmVectorNM, deepest
from .vector_nm_launch import aligned_data, cached_records, launcher, pattern, records_choice
from .vector_nm_tiles import Pattern, Shape
from .vector_nm_times import Split, filling

MOST_BOX = 256
"""Rows of B in a box at most."""
LINE = 128
"""Columns of a row of B that a warp copies at a time, where the rows that a tile needs are copied one by one."""
SOURCE, ARCHS = "vector_nm/spmm_vector_nm_sm90.cu", ("sm_90",)


@dataclass(frozen=True)
class Tile(spmm_vector_nm.Tile):
    """A tile of the kernel for sm_80, with other shared memory."""

    def smem(self, itemsize: int, staged: int, slots: int, record: int) -> int:
        """Bytes: the ring of stages, and two records, a barrier and a counter for each (spmm_vector_nm_sm90.cu)."""
        stage = ((staged + 1) * self.cols + slots * self.rows) * itemsize
        return self.stages * (stage + 2 * 4 * record + 8 + 4 + 8) + 4

    def fits(self, form: Pattern, limit: int) -> bool:
        """Whether k tiles of whole windows are boxes that the copy engine takes and that fit into shared memory."""
        windows = form.windows_per_tile(STEP, self.depth)
        width, slots = windows * form.m, round_up(windows * form.n, STEP)
        record = self.rows // form.group_rows(self.group_limit) * slots
        return width <= MOST_BOX and self.smem(4, round_up(width, STEP), slots, round_up(record, 4)) <= limit


def _of(tiles: Sequence[spmm_vector_nm.Tile]) -> tuple[Tile, ...]:
    return tuple(Tile(t.warps_m, t.warps_n, t.stages, t.depth, t.quads, t.group_limit) for t in tiles)


TILES = _of(spmm_vector_nm.TILES)
LARGE, SMALL = TILES[0], TILES[2]
DEEP, WIDE = _of(spmm_vector_nm.DEEP), _of(spmm_vector_nm.WIDE)


class SpmmVectorNMSm90(SpmmVectorNM):
    """``out = A @ B`` for A in VectorNM with a vector length that is a multiple of 8, without tensor cores."""

    name = "cuda.spmm_vector_nm_sm90"
    archs = ARCHS
    constants_of = SpmmVectorNM.name
    by_name_only = "its times are not measured; cuda.spmm_vector_nm gives the same sums"

    def unsupported(self, p: Problem) -> list[str]:
        length = p.p["vector_length"]
        refused = super().unsupported(p) + reasons(
            (p.device == "cuda" and (p.sm or 0) < 90, f"needs sm_90 (TMA), got {p.sm_name}"),
            (p.a_dtype != "float32", f"takes float32, got {p.a_dtype}"),
            (length % 8, f"vector_length must be a multiple of 8 (the rows of a thread), got {length}"),
            (p.M * p.K == 0, f"A must not be empty (a TMA map has no zero extents), got {p.M}x{p.K}"),
        )
        if not refused and not TILES[-1].fits(pattern(p), shared_limit(p.sm)):
            q = p.p
            refused.append(f"two stages of {q['n']}:{q['m']} windows must fit in {shared_limit(p.sm)} bytes and a box")
        return refused

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
        form, limit = pattern(p), shared_limit(p.sm)
        tiles = TILES[TILES.index(tile) :] if tile in TILES else (tile, *TILES)
        tile = next(t for t in tiles if t.fits(form, limit))
        records = cached_records(
            a, form, tile_rows=tile.rows, group_rows=form.group_rows(tile.group_limit),
            kept=form.windows_per_tile(STEP, tile.depth) * form.n, step=STEP, banks=1, bank_rows=1,
            packed=None if tile.cols % LINE == 0 else False, line_bytes=tile.slot_scale(4),
        )  # fmt: skip
        smem = tile.smem(4, records.staged, records.slots, int(records.words.shape[2]))
        data, packed = aligned_data(a), records.packed
        W, Mp = data.shape
        a_map = tensor_map.tiled(data.data.ptr, p.a_dtype, (Mp, W), (Mp,), (tile.rows, records.tile_kept), 0)
        box = (tile.cols, records.tile_cols)

        def b_arguments(b: int, pitch: int, n: int) -> tuple[Any, ...]:
            b_map = tensor_map.UNMAPPED if packed else tensor_map.tiled(b, "float32", (n, p.K), (pitch // 4,), box, 0)
            return b_map, b, pitch

        def head(splits: int, per_split: int, cluster: tuple[int, int]) -> tuple[Any, ...]:
            return a_map, records.shape(form, int(data.strides[0]), W, per_split), records.words

        choice = records_choice(
            a, p, records, source=SOURCE, archs=ARCHS, cols=tile.cols, threads=tile.threads, head=head,
            instance=lambda out, _: instance(out, tile, packed), smem=lambda _: smem,
            signature=(tensor_map.TensorMap, Shape, "P"), keep=data,
            b_signature=(tensor_map.TensorMap, "P", "i"), b_arguments=b_arguments,
        )  # fmt: skip
        return Prepared(launcher(p, choice), f"{tile} {'packed' if packed else 'plain'}", records.words.nbytes)


def instance(out: str, tile: spmm_vector_nm.Tile, packed: bool) -> str:
    """C++ name of the kernel."""
    return (
        f"spformat::vector_nm::spmm_vector_nm_sm90<{out}, {tile.warps_m}, {tile.warps_n}, {tile.quads}, {tile.stages}, "
        f"{str(packed).lower()}>"
    )
