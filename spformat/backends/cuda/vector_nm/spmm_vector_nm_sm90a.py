"""SpMM on vector n:m (NM-SpMM), vectors of 128 rows or more, on Hopper's wgmma.  Kernel: spmm_vector_nm_sm90a.cu.

bf16 and fp16. A tile of 128 rows has one list of columns: rows of B are gathered into shared memory, and the rest is a
dense product over the kept vectors only. Sums are float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ....arrays.library import Array, ceil_div, namespace, round_up
from ....products.kernel import reasons, spmm_of
from ....products.problem import Problem
from ....products.roofline import TENSOR_16, Blocking, Device, device_of
from ..runtime import launch, tensor_map
from ..runtime.kernel import CudaKernel, Prepared
from .vector_nm_launch import C_TYPES, Choice, aligned_data, launcher, pattern, vector_reasons
from .vector_nm_tiles import Pattern
from .vector_nm_times import TERMS, Split, parts, quantities, variant

DEPTH, ROWS = 64, 128
"""Kept vectors and rows of a stage; must match the constants of the kernel."""


class Gathered(ctypes.Structure):
    """Must match ``vector_nm::Gathered`` in the kernel."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("M", "K", "group_rows", "columns_ld", "k_tiles", "k_per_split", "row_tiles", "splits")
    ]


@dataclass(frozen=True)
class Tile:
    """Columns of a tile, ring stages, warps that load."""

    cols: int
    stages: int
    loaders: int

    def smem(self) -> int:
        """Bytes: the ring, four slots in which C is staged (64 x 64 values of 16 bits), and the barriers."""
        return self.stages * DEPTH * 2 * (ROWS + self.cols) + 4 * 8192 + 16 * self.stages

    def blocking(self, form: Pattern) -> Blocking:
        """How the tile cuts a product. Only kept rows are loaded."""
        kept = ceil_div(form.K, form.m) * form.n
        return Blocking(
            rows=ROWS, cols=self.cols, k_tiles=ceil_div(kept, DEPTH), kept=DEPTH, staged=DEPTH, itemsize=2,
            arithmetic=TENSOR_16,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{ROWS}x{self.cols}x{DEPTH}"


TILES = (Tile(256, 4, 4), Tile(128, 6, 4), Tile(64, 6, 4))
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
    terms = TERMS

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
            instance("float16", "float", TILES[1]),
            instance("float16", "__half", TILES[2]),
        )

    def blocking(self, p: Problem) -> Blocking:
        """How the kernel cuts ``p``; read by spformat.dispatch.cost."""
        cut: Blocking = self.best(p).tile.tile.blocking(pattern(p))
        return cut

    def options(self, p: Problem) -> list[Split[Tile]]:
        """All tiles, with one part along K and more."""
        kept, device = ceil_div(p.K, p.p["m"]) * p.p["n"], device_of(p)
        steps, rows = ceil_div(kept, DEPTH), ceil_div(p.M, ROWS)
        return [s for t in TILES for s in parts(t, rows * ceil_div(p.n, t.cols), steps, device)]

    def variant(self, p: Problem, tile: Split[Tile]) -> tuple[str, ...]:
        return variant(p, tile)

    def quantities(self, p: Problem, tile: Split[Tile], device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``. A tile loads only the rows of B that A uses."""
        kept = ceil_div(p.K, p.p["m"]) * p.p["n"]
        extent, steps = (ROWS, tile.tile.cols), ceil_div(kept, DEPTH)
        return quantities(p, extent, kept, kept, steps, tile.splits, TENSOR_16, device)

    def prepared(self, a: Any, p: Problem) -> Prepared:
        form, best, data = pattern(p), self.best(p).tile, aligned_data(a)
        tile, splits = best.tile, best.splits
        columns = a.kernel_arrays("gathered columns", lambda: _columns(a, form))
        W, Mp = data.shape
        row_tiles, k_tiles = ceil_div(p.M, ROWS), columns.shape[1] // DEPTH

        def head(splits: int, per_split: int, cluster: tuple[int, int]) -> tuple[Any, ...]:
            a_map = tensor_map.tiled(data.data.ptr, p.a_dtype, (Mp, W), (Mp,), (64, DEPTH), 128)
            shape = Gathered(p.M, p.K, form.vector_length, columns.shape[1], k_tiles, per_split, row_tiles, splits)
            return a_map, shape, columns

        def c_arguments(c: int, n: int, step_m: int, step_n: int) -> tuple[Any, ...]:
            """C's map, and whether the copy engine can write it: rows on 16-byte boundaries, 16-bit values."""
            if splits > 1 or p.out_dtype != p.a_dtype or step_n != 1 or not tensor_map.writable(c, n, step_m, 2):
                return tensor_map.UNMAPPED, 0
            return tensor_map.tiled(c, p.out_dtype, (n, p.M), (step_m,), (64, 64), 128), 1

        choice = Choice(
            source="vector_nm/spmm_vector_nm_sm90a.cu", archs=self.archs, cols=tile.cols,
            threads=256 + 32 * tile.loaders,
            row_tiles=row_tiles, k_tiles=k_tiles, instance=lambda out, _: instance(p.a_dtype, out, tile),
            smem=lambda _: tile.smem(), head=head, signature=(tensor_map.TensorMap, Gathered, "P"),
            cluster=lambda _: (1, 1), keep=data, splits=splits,
            c_signature=(tensor_map.TensorMap, "i"), c_arguments=c_arguments,
        )  # fmt: skip
        return Prepared(launcher(p, choice), f"{tile}", columns.nbytes)


def instance(dtype: str, out: str, tile: Tile) -> str:
    """C++ name of the kernel."""
    numbers = f"{tile.cols}, {tile.stages}, {tile.loaders}"
    return f"spformat::vector_nm::spmm_vector_nm_sm90a<{C_TYPES[dtype]}, {out}, {numbers}>"
