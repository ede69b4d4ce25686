"""SpMM on vector n:m (NM-SpMM) in exact float32 on the CUDA cores of Hopper.  Kernel: spmm_vector_nm_sm90.cu.

The same sums as ``cuda.spmm_vector_nm``, bit by bit: float32, in ascending k, one fused multiply-add per stored item.
The copy engine brings A and B, and all rows of B (decision 0045).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....arrays.library import round_up
from ....products.kernel import reasons, spmm_of
from ....products.problem import Problem
from ....products.roofline import CUDA_32, Device, shared_limit
from ..runtime import tensor_map
from ..runtime.kernel import CudaKernel, Prepared
from . import spmm_vector_nm
from .spmm_vector_nm import STEP
from .vector_nm_launch import aligned_data, cached_records, launcher, pattern, records_choice, vector_reasons
from .vector_nm_tiles import Pattern, Shape
from .vector_nm_times import TERMS, Split, filling, short_vectors_on_cuda_cores, staged_quantities

MOST_BOX = 256
"""Rows of B in a box at most."""
SOURCE, ARCHS = "vector_nm/spmm_vector_nm_sm90.cu", ("sm_90",)


@dataclass(frozen=True)
class Tile(spmm_vector_nm.Tile):
    """A tile of the kernel for sm_80 whose threads have 4 * ``quads`` columns."""

    quads: int = 2

    @property
    def cols(self) -> int:
        return 32 * self.quads * self.warps_n

    def smem(self, itemsize: int, staged: int, slots: int, record: int) -> int:
        """Bytes: the ring of stages, and two records, two barriers and a counter for each (spmm_vector_nm_sm90.cu)."""
        stage = ((staged + 1) * self.cols + slots * self.rows) * itemsize
        return self.stages * (stage + 2 * 4 * record + 16 + 4)

    def fits(self, form: Pattern, limit: int) -> bool:
        """Whether k tiles of whole windows are boxes that the copy engine takes and that fit into shared memory."""
        windows = form.windows_per_tile(STEP, self.depth)
        width, slots = windows * form.m, round_up(windows * form.n, STEP)
        record = self.rows // form.group_rows(self.group_limit) * slots
        return width <= MOST_BOX and self.smem(4, round_up(width, STEP), slots, round_up(record, 4)) <= limit

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{self.depth} 8x{4 * self.quads}"


TILES = Tile(4, 1, 2, 64, quads=4), Tile(8, 1, 2, 128, quads=4)
"""The second where little is kept of a deep k tile, so that its stages fit."""


class SpmmVectorNMSm90(CudaKernel):
    """``out = A @ B`` for A in VectorNM with a vector length that is a multiple of 8, without tensor cores."""

    name = "cuda.spmm_vector_nm_sm90"
    takes = spmm_of("vector-nm")
    archs = ARCHS
    terms = TERMS

    def unsupported(self, p: Problem) -> list[str]:
        q = p.p
        refused = vector_reasons(p, ("float32",)) + reasons(
            (p.device == "cuda" and (p.sm or 0) < 90, f"needs sm_90 (TMA), got {p.sm_name}"),
            (
                q["vector_length"] % 8,
                f"vector_length must be a multiple of 8 (the rows of a thread), got {q['vector_length']}",
            ),
            (p.M * p.K == 0, f"A must not be empty (a TMA map has no zero extents), got {p.M}x{p.K}"),
        )
        if not refused and not self.options(p):
            refused.append(f"two stages of {q['n']}:{q['m']} windows must fit in {shared_limit(p.sm)} bytes and a box")
        return refused

    def options(self, p: Problem) -> list[Split[Tile]]:
        """The tiles whose stages fit, with as many parts along K as they need."""
        form, limit = pattern(p), shared_limit(p.sm)
        return [filling(p, tile) for tile in TILES if tile.fits(form, limit)]

    def variant(self, p: Problem, tile: Split[Tile]) -> tuple[str, ...]:
        """By tile, whatever the number of parts."""
        return (str(tile.tile),)

    def quantities(self, p: Problem, tile: Split[Tile], device: Device) -> tuple[float, ...]:
        slower = short_vectors_on_cuda_cores(p.p["vector_length"])
        return staged_quantities(p, tile, CUDA_32, device, packs=False, slower=slower)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return tuple(instance("float", tile) for tile in TILES)

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile.tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        form = pattern(p)
        records = cached_records(
            a, form, tile_rows=tile.rows, group_rows=form.group_rows(tile.group_limit),
            kept=form.windows_per_tile(STEP, tile.depth) * form.n, step=STEP, banks=1, bank_rows=1,
            packed=False, line_bytes=tile.slot_scale(4),
        )  # fmt: skip
        smem = tile.smem(4, records.staged, records.slots, int(records.words.shape[2]))
        data = aligned_data(a)
        W, Mp = data.shape
        a_map = tensor_map.tiled(data.data.ptr, p.a_dtype, (Mp, W), (Mp,), (tile.rows, records.tile_kept), 0)
        box = (tile.cols, records.tile_cols)

        def b_arguments(b: int, pitch: int, n: int) -> tuple[Any, ...]:
            return (tensor_map.tiled(b, "float32", (n, p.K), (pitch // 4,), box, 0),)

        def head(splits: int, per_split: int, cluster: tuple[int, int]) -> tuple[Any, ...]:
            return a_map, records.shape(form, int(data.strides[0]), W, per_split), records.words

        choice = records_choice(
            a, p, records, source=SOURCE, archs=ARCHS, cols=tile.cols, threads=tile.threads, head=head,
            instance=lambda out, _: instance(out, tile), smem=lambda _: smem,
            signature=(tensor_map.TensorMap, Shape, "P"), keep=data,
            b_signature=(tensor_map.TensorMap,), b_arguments=b_arguments,
        )  # fmt: skip
        return Prepared(launcher(p, choice), str(tile), records.words.nbytes)


def instance(out: str, tile: Tile) -> str:
    """C++ name of the kernel."""
    extents = tile.warps_m, tile.warps_n, tile.quads, tile.stages
    return f"spformat::vector_nm::spmm_vector_nm_sm90<{out}, {', '.join(map(str, extents))}>"
