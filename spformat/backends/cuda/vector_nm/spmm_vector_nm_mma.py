"""SpMM on vector n:m (NM-SpMM) on the tensor cores of sm_80 and later.  Kernel: spmm_vector_nm_mma.cu.

bf16 and fp16 use m16n8k16 with float32 sums. float32 splits every factor into a leading and a trailing TF32 part and
sums three products: |C - exact| <= (2^-21 + 2 * (K/8 + 1) * 2^-23) * (|A| @ |B|), K the stored columns of a row. A
factor that is not finite, or within 2^-12 of overflow, gives NaN where float32 would give an infinity; if that matters,
use ``cuda.spmm_vector_nm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....products.kernel import reasons, spmm_of
from ....products.problem import Problem
from ....products.roofline import TENSOR_16, TF32_THREE, Device
from ..runtime.kernel import CudaKernel, Prepared
from .vector_nm_launch import C_TYPES, ITEMSIZE, fit, launcher, records_choice, vector_reasons
from .vector_nm_times import TERMS, Split, filling, short_vectors_on_tensor_cores, staged_quantities, variant


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a warp, warps along rows and columns, ring stages, columns of A wanted in a k tile."""

    warp_rows: int
    warp_cols: int
    warps_m: int
    warps_n: int
    stages: int
    depth: int

    @property
    def group_limit(self) -> int:
        return self.warp_rows

    @property
    def rows(self) -> int:
        return self.warp_rows * self.warps_m

    @property
    def cols(self) -> int:
        return self.warp_cols * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def smem(self, itemsize: int, staged: int, slots: int, record: int, out_size: int = 4) -> int:
        """Bytes: the ring of stages and the ring of records (vector_nm.cuh), or the tile of C before it is written."""
        stage = ((staged + 1) * self.cols + slots * self.rows) * itemsize
        ring = self.stages * stage + (2 * self.stages - 1) * 4 * record
        strip = self.threads // 32 * (32 if itemsize == 4 else 16) * (self.warp_cols * out_size + 16)
        return max(ring, strip)

    def slot_scale(self, itemsize: int) -> int:
        return 0

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{self.depth}"


WIDE_16 = (Tile(32, 128, 8, 1, 4, 64), Tile(32, 128, 8, 1, 3, 64), Tile(32, 128, 8, 1, 2, 64))
TALL_16 = (Tile(64, 64, 4, 2, 4, 64), Tile(64, 64, 4, 2, 3, 64), Tile(64, 64, 4, 2, 2, 64))
SMALL_16 = (Tile(32, 64, 4, 2, 4, 64), Tile(32, 64, 4, 2, 2, 64), Tile(32, 32, 4, 1, 2, 64))
NARROW_16 = (Tile(32, 32, 4, 1, 4, 128), Tile(32, 32, 4, 1, 2, 128))
WIDE_32 = (Tile(32, 64, 4, 2, 3, 32), Tile(32, 64, 4, 2, 2, 32))
NARROW_32 = (Tile(32, 32, 4, 2, 3, 64), Tile(32, 32, 4, 2, 2, 64))
"""Value size -> tiles, ordered by speed on large problems. Narrow ones are for few columns of B and for wide windows,
whose rows of B need more shared memory."""


def groups(p: Problem) -> list[tuple[Tile, ...]]:
    """Groups of tiles for the value type and vector length, widest first. Tiles of a group differ in shared memory."""
    if ITEMSIZE[p.a_dtype] == 4:
        return [WIDE_32, NARROW_32]
    return [TALL_16 if p.p["vector_length"] % 64 == 0 else WIDE_16, SMALL_16, NARROW_16]


class SpmmVectorNMTensor(CudaKernel):
    """``out = A @ B`` for A in VectorNM with a vector length that is a multiple of 8."""

    name = "cuda.spmm_vector_nm_mma"
    takes = spmm_of("vector-nm")
    archs = ("sm_80",)
    terms = TERMS
    product_error = 2.0**-21  # float32 as three TF32 products: the product of the two low parts is left out

    def unsupported(self, p: Problem) -> list[str]:
        length = p.p["vector_length"]
        return vector_reasons(p, ("bfloat16", "float16", "float32")) + reasons(
            (length % 8, f"vector_length must be a multiple of 8 (the instruction's row width), got {length}"),
        )

    def options(self, p: Problem) -> list[Split[Tile]]:
        """The first tile of every group that is not far wider than N, with the parts along K that it needs."""
        return [filling(p, tile) for tile, *_ in groups(p) if p.n > 32 or tile.cols < 128]

    def variant(self, p: Problem, tile: Split[Tile]) -> tuple[str, ...]:
        return variant(p, tile)

    def quantities(self, p: Problem, tile: Split[Tile], device: Device) -> tuple[float, ...]:
        kind = TF32_THREE if ITEMSIZE[p.a_dtype] == 4 else TENSOR_16
        slower = short_vectors_on_tensor_cores(p.p["vector_length"])
        return staged_quantities(p, tile, kind, device, packs=True, slower=slower)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            instance("bfloat16", "__nv_bfloat16", 32, WIDE_16[0], False),
            instance("float16", "float", 64, TALL_16[1], True),
            instance("float32", "float", 32, WIDE_32[0], True),
            instance("float32", "float", 8, NARROW_32[0], False),
        )

    def fitting(self, p: Problem) -> list[Tile]:
        """The tiles of the group with the least expected time, then those of narrower groups, for wide windows."""
        wanted = self.best(p).tile.tile
        every = groups(p)
        first = next(i for i, group in enumerate(every) if group[0] == wanted)
        return [tile for group in every[first:] for tile in group]

    def prepared(self, a: Any, p: Problem) -> Prepared:
        size = ITEMSIZE[p.a_dtype]
        tile, records, group = fit(self.fitting(p), a, p, step=32 // size, banks=16 // size, bank_rows=size // 2)
        record = int(records.words.shape[2])
        choice = records_choice(
            a, p, records, source="vector_nm/spmm_vector_nm_mma.cu", archs=self.archs, waits=True, cols=tile.cols,
            threads=tile.threads,
            instance=lambda out, _: instance(p.a_dtype, out, group, tile, records.packed),
            smem=lambda out: tile.smem(size, records.staged, records.slots, record, out),
        )  # fmt: skip
        kind = "packed" if records.packed else "plain"
        return Prepared(launcher(p, choice), f"{tile} {kind}", records.words.nbytes)


def instance(dtype: str, out: str, group: int, tile: Tile, packed: bool) -> str:
    """C++ name of the kernel; ``group``: rows of a warp that share columns."""
    return (
        f"spformat::vector_nm::spmm_vector_nm_mma<{C_TYPES[dtype]}, {out}, {group}, {tile.warp_rows}, "
        f"{tile.warp_cols}, {tile.warps_m}, {tile.warps_n}, {tile.stages}, {str(packed).lower()}>"
    )
