"""SpMM on vector n:m (NM-SpMM): A becomes dense on its way to wgmma's registers, and B is not gathered.

Kernel: spmm_vector_nm_expanding_sm90a.cu. bf16 and fp16. docs/decisions/0028-few-hundred-columns.md.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ....arrays.library import Array, ceil_div, namespace
from ....products.ideal import b_alignment
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, LINE, Problem
from ....products.roofline import Device, device_of
from ..runtime import expanding, jit, launch, tensor_map
from ..runtime.expanding import DEPTH
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Bound, Launch, Operands, one_after_another
from .vector_nm_launch import C_TYPES, AlignedRows, aligned_data, pattern, vector_reasons
from .vector_nm_tiles import Pattern
from .vector_nm_times import Split

SOURCE, ARCHS = "vector_nm/spmm_vector_nm_expanding_sm90a.cu", ("sm_90a",)
NONE = 64
"""The line of a column that is not kept; as in the kernel."""
ALIGNED = 8
"""The copy engine reads a column-major B only from columns of A whose number is a multiple of this."""


class Expanding(ctypes.Structure):
    """Must match ``vector_nm::Expanding`` in the kernel."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("M", "K", "groups", "length", "n", "m", "tile_windows", "k_tiles")),
        ("k_per_part", ctypes.c_int32), ("row_tiles", ctypes.c_int32), ("pitch", ctypes.c_int64),
    ]  # fmt: skip


@dataclass(frozen=True)
class Tile(expanding.Tile):
    """``stages`` k tiles are in shared memory or on their way there."""

    stages: int

    @property
    def smem(self) -> int:
        """Bytes: stages of A, B and lines, a line of zeros and the barriers. The way of C uses the stages again."""
        stage = 2 * DEPTH * (self.rows + self.cols_loaded) + self.rows // 8 * DEPTH
        return self.stages * (stage + 16) + 16

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{DEPTH}"


TILES = (
    Tile(2, 16, 2, 4), Tile(2, 32, 2, 4), Tile(2, 64, 2, 4), Tile(2, 128, 1, 6), Tile(2, 192, 1, 5),
    Tile(2, 96, 1, 6), Tile(2, 160, 1, 5), Tile(2, 256, 1, 4),
)  # fmt: skip


def lines_of(indices: Array, form: Pattern) -> Array:
    """uint8[k tiles, Q, 16, 4]: the line of a k tile's data that holds column 16*s + j of the tile, at [.., j, s].

    NONE for a column that a row group does not keep, or that lies past K. indices: uint8[W, Q], as in the format.
    """
    xp, (W, Q), windows = namespace(indices), indices.shape, DEPTH // form.m
    kept = windows * form.n
    u = xp.arange(W, dtype="int64")
    window = (u // form.n * form.m)[:, None]
    column = window + indices
    in_tile = xp.where(column < form.K, column - (u // kept * (windows * form.m))[:, None], DEPTH)
    lines = xp.full((ceil_div(W, kept), Q, DEPTH + 1), NONE, "uint8")  # the last place takes columns past K
    lines[(u // kept)[:, None], xp.arange(Q)[None, :], in_tile] = (u % kept).astype("uint8")[:, None]
    by_step = lines[:, :, :DEPTH].reshape(lines.shape[0], Q, 4, 16).transpose(0, 1, 3, 2)
    return xp.ascontiguousarray(by_step)


def _lines(a: Any, form: Pattern) -> Any:
    """``lines_of`` a matrix, complete on every stream."""
    lines = lines_of(a.indices, form)
    launch.finish_arrays()  # synchronize!
    return lines


class SpmmVectorNMExpanding(CudaKernel):
    """``out = A @ B`` for A in VectorNM with vectors of a multiple of 8 rows and m <= 64, on sm_90a only.

    B and C are read and written where they lie, in both layouts. B is copied first where its lines do not start on
    16-byte boundaries, or where it is column-major and k tiles do not start at multiples of 8. Sums are float32. Where
    there are few tiles, the blocks of a cluster sum parts of K and add them in a fixed order: the same bits every run.
    """

    name = "cuda.spmm_vector_nm_expanding_sm90a"
    takes = spmm_of("vector-nm")
    archs = ARCHS
    tiles = tuple(Split(t, parts) for t in TILES for parts in expanding.PARTS)
    terms = (*expanding.TERMS, "second launch", "copy of B")

    def unsupported(self, p: Problem) -> list[str]:
        length, m = p.p["vector_length"], p.p["m"]
        return vector_reasons(p, ("bfloat16", "float16")) + reasons(
            (p.device == "cuda" and p.sm != 90, f"needs sm_90a (wgmma), got {p.sm_name}"),
            (length % 8, f"vector_length must be a multiple of 8 (the lines of ldmatrix), got {length}"),
            (m > DEPTH, f"m must be at most {DEPTH} (a k tile has whole windows), got {m}"),
            (p.M * p.K == 0, f"A must not be empty (a TMA map has no zero extents), got {p.M}x{p.K}"),
        )

    def options(self, p: Problem) -> list[Split[Tile]]:
        """Tiles between a quarter of C's width and twice of it.

        Numbers of parts of K as long as each shortens the way of a block along K, and all clusters run at one time.
        """
        steps, device = steps_of(pattern(p)), device_of(p)
        return [
            Split(t, parts) for t in TILES if expanding.wide_enough(t.cols, p.n)
            for parts in expanding.parts_of(expanding.tiles_of(p, t), t, steps, device)
        ]  # fmt: skip

    def variant(self, p: Problem, tile: Split[Tile]) -> tuple[str, ...]:
        """By tile, whatever the number of parts."""
        return (str(tile.tile),)

    def quantities(self, p: Problem, tile: Split[Tile], device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``: those of ``expanding``, then of the launch that copies B."""
        t, q = tile.tile, p.p
        columns = t.cols if p.b_layout == COL else t.cols_loaded
        loaded = 2.0 * DEPTH * (t.rows * q["n"] / q["m"] + columns)
        copied = b_alignment(p) < LINE or (p.b_layout == COL and not starts_aligned(q["m"]))
        passed = expanding.longest(expanding.tiles_of(p, t), t, tile.splits, steps_of(pattern(p)), device)
        own = expanding.quantities(p, t, tile.splits, passed, t.resident * passed, loaded, device)
        return *own, *expanding.copy_of_b_us(p, float(copied), 1.0, device)

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            instance("float16", "float32", Split(TILES[0], 8), True, False),
            instance("bfloat16", "bfloat16", Split(TILES[1], 4), False, True),
            instance("float16", "float16", Split(TILES[1], 1), False, False),
            instance("bfloat16", "bfloat16", Split(TILES[2], 2), True, True),
            instance("bfloat16", "bfloat16", Split(TILES[3], 4), True, True),
            instance("float16", "float32", Split(TILES[3], 1), False, True),
            instance("bfloat16", "bfloat16", Split(TILES[4], 1), True, True),
            instance("bfloat16", "bfloat16", Split(TILES[4], 2), False, False),
            instance("bfloat16", "float32", Split(TILES[4], 1), True, False),
            instance("bfloat16", "bfloat16", Split(TILES[5], 2), True, True),
            instance("bfloat16", "bfloat16", Split(TILES[6], 1), True, True),
            instance("float16", "float16", Split(TILES[6], 1), False, False),
            instance("bfloat16", "bfloat16", Split(TILES[7], 1), True, True),
            instance("float16", "float16", Split(TILES[7], 2), False, False),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Split[Tile]) -> Prepared:
        """The launches of one tile."""
        form, t, data, indices = pattern(p), tile.tile, aligned_data(a), a.indices
        lines = a.kernel_arrays("expanding lines", lambda: _lines(a, form))
        (W, pitch), (k_tiles, groups) = data.shape, lines.shape[:2]
        windows, row_tiles = DEPTH // form.m, ceil_div(p.M, t.rows)
        parts, b_col, c_col = tile.splits, p.b_layout == COL, p.out_layout == COL
        shape = Expanding(
            p.M, p.K, groups, form.vector_length, form.n, form.m, windows, k_tiles, ceil_div(k_tiles, parts), row_tiles,
            pitch,
        )  # fmt: skip
        a_map = tensor_map.tiled(data.data.ptr, p.a_dtype, (pitch, W), (pitch,), (64, windows * form.n), 128)
        device, signature = p.device_id, (tensor_map.TensorMap, Expanding, *"PPP", *expanding.TAIL)

        def product(b_col: bool) -> Launch:
            name = instance(p.a_dtype, p.out_dtype, tile, b_col, c_col)
            function = jit.load(SOURCE, name, jit.architecture(p.sm or 90, ARCHS), device, t.smem)
            return Launch(function, signature, (a_map, shape, lines, data, indices), t.threads, t.smem, waits=True)

        products = {b_col: product(b_col)}  # the one for a copied B is compiled when operands first need it
        copied_rows = AlignedRows(p)

        def prepare(o: Operands) -> list[Bound]:
            calls: list[Bound] = []
            b, ldb, col = o.b, o.ldb, b_col
            if not tensor_map.aligned(b, ldb, 2) or (b_col and not starts_aligned(form.m)):
                calls, b, pitch_b = copied_rows(o)
                ldb, col = pitch_b // 2, False
            if col not in products:
                products[col] = product(col)
            rest = expanding.tail(o, p, t, parts, b, ldb, col)
            return one_after_another([*calls, products[col].bind(expanding.grid(o, p, t, parts), o.stream, *rest)])

        return Prepared(prepare, str(tile), int(lines.nbytes))


def starts_aligned(m: int) -> bool:
    """Whether every k tile starts at a multiple of ``ALIGNED`` columns.

    From any other column of a column-major B the copy engine of an H200 answered *illegal instruction*.
    """
    return DEPTH // m * m % ALIGNED == 0


def steps_of(form: Pattern) -> int:
    """k tiles of a matrix."""
    return ceil_div(ceil_div(form.K, form.m), DEPTH // form.m)


def instance(dtype: str, out: str, tile: Split[Tile], b_col: bool, c_col: bool) -> str:
    """C++ name of the kernel."""
    t, flags = tile.tile, ", ".join(str(f).lower() for f in (b_col, c_col))
    return (
        f"spformat::vector_nm::spmm_vector_nm_expanding_sm90a<{C_TYPES[dtype]}, {C_TYPES[out]}, {t.rows // 64}, "
        f"{t.cols}, {t.stages}, {tile.splits}, {t.resident}, {flags}>"
    )
