"""SpMM on SR-BCRS with tensor cores: bf16/f16 in, f32 sums, any (t, g).  Kernel: spmm_sr_bcrs_tc.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...dtypes import VALUE_TYPES
from ...problem import COL, STRIDED, Plan, Problem, reasons
from . import jit
from .launch import Launch, Operands, device_plan

SOURCE = "spmm_sr_bcrs_tc.cu"
MMA_TYPES = ("bfloat16", "float16")
DEPTH = 128  # columns of A in a chunk
BLOCK_ROWS = 128  # rows of the largest tile, which share what they load of B
MAX_GRID_Y = 65535
SLACK = 32  # steps that the kernel may read past the last one


@dataclass(frozen=True)
class Tile:
    """Warps of a block: ``wm`` panels of 16 * ``fragments`` rows x ``wn`` strips of 8 * ``strip`` columns x ``wk``.

    ``wk`` warps share the steps of a panel; ``stages`` chunks of B are in shared memory.
    """

    fragments: int
    wm: int
    wn: int
    wk: int
    strip: int
    stages: int

    @property
    def rows(self) -> int:
        return self.wm * self.fragments * 16

    @property
    def cols(self) -> int:
        return self.wn * self.strip * 8

    @property
    def threads(self) -> int:
        return 32 * self.wm * self.wn * self.wk

    @property
    def smem(self) -> int:
        """bytes: the staged chunks of B, or the sums that warps exchange where those are larger."""
        slabs = self.stages * (DEPTH + 1) * (self.cols + 8) * 2
        return max(slabs, self.threads * self.fragments * self.strip * 16 if self.wk > 1 else 0)

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}x{DEPTH}, {self.wk} warps a panel"


LARGE = Tile(2, 4, 2, 1, 8, 3)
MEDIUM = Tile(2, 2, 2, 2, 4, 3)
SMALL = Tile(1, 1, 1, 8, 4, 3)


def choose(M: int, n: int, sms: int, smem: int) -> Tile:
    """The largest tile that still fills the machine. ``smem``: bytes a block may have."""
    for tile in (LARGE, MEDIUM):
        if tile.smem <= smem and -(-M // tile.rows) * -(-n // tile.cols) * 5 >= 4 * sms:
            return tile
    return SMALL


def index_type(array: Any) -> str:
    """C++ name of the elements of an INDEX array."""
    return "int" if array.dtype == "int32" else "long long"


@dataclass(frozen=True)
class Panels:
    """A re-chunked into panels of rows and steps of 16 columns; the kernel's file says what each array holds."""

    first: Any
    columns: Any
    values: Any

    @property
    def nbytes(self) -> int:
        return int(self.first.nbytes + self.columns.nbytes + self.values.nbytes)


def panels(a: Any, p: Problem, fragments: int) -> Panels:
    """The panels of ``a``, made on its device once and kept with the matrix for the plans that follow."""
    key = (SOURCE, fragments)
    if key not in a._derived:
        a._derived[key] = _panels(a, p, fragments)
    made: Panels = a._derived[key]
    return made


def _panels(a: Any, p: Problem, fragments: int) -> Panels:
    import cupy

    rows = 16 * fragments
    count, chunks = -(-p.M // rows), -(-p.K // DEPTH)
    arch, stream = jit.architecture(p.sm or 80, ()), cupy.cuda.get_current_stream().ptr
    types = f"{index_type(a.indptr)}, {index_type(a.indices)}"
    grid = (-(-count * chunks // 8), 1, 1)
    first = cupy.zeros(count * chunks + 1, "uint32")
    if count * chunks:
        steps = cupy.empty(count * chunks, "uint32")
        counted = (a.indptr, a.indices, p.M, a.vector_length, a.stride, rows, count, chunks, steps)
        Launch(jit.load(SOURCE, f"panel_steps<{types}>", arch, p.device_id), "PPqiiiqqP", counted, 256)(grid, stream)
        cupy.cumsum(steps, out=first[1:])
    total = int(first[-1]) + SLACK  # synchronize!
    columns = cupy.full(total * 16, DEPTH, "uint8")
    values = cupy.zeros(total * rows * 16, "uint16")
    if count * chunks:
        fill = jit.load(SOURCE, f"panel_fill<{VALUE_TYPES[p.a_dtype].cuda}, {types}>", arch, p.device_id)
        extents = (p.M, a.vector_length, a.stride, rows, count, chunks)
        filled = (a.indptr, a.indices, a.data, *extents, first, columns, values)
        Launch(fill, "PPPqiiiqqPPP", filled, 256)(grid, stream)
    return Panels(first, columns, values)


class SpmmSRBCRSTensor:
    """C = A @ B for 16-bit ``SRBCRS`` A of any vector_length and stride; any M, K, N, layout and leading dimension."""

    name = "cuda.spmm_sr_bcrs_tc"
    formats = frozenset({"sr-bcrs"})

    def unsupported(self, p: Problem) -> list[str]:
        # Rows of B that blocks of BLOCK_ROWS rows load, against those that the vectors name.
        staged, named = -(-p.M // BLOCK_ROWS) * p.K, p.nnz // max(1, p.p.get("vector_length", 1))
        return reasons(
            (p.format not in self.formats, f"takes sr-bcrs, got {p.format}"),
            (p.device != "cuda", f"operands are on {p.device}; move them with .to('cuda')"),
            (p.a_dtype not in MMA_TYPES, f"a.dtype must be one of {', '.join(MMA_TYPES)}, got {p.a_dtype}"),
            (p.b_dtype != p.a_dtype, f"b.dtype must equal a.dtype ({p.a_dtype}), got {p.b_dtype}"),
            (p.out_dtype not in (p.a_dtype, "float32"), f"out.dtype must be {p.a_dtype} or float32, got {p.out_dtype}"),
            (STRIDED in (p.b_layout, p.out_layout), "B and out must be row- or column-major; use ascontiguousarray"),
            (p.sm is None or p.sm < 80, f"needs sm_80 or newer, got {p.sm_name}"),
            (
                named and staged > 4 * named,
                f"{BLOCK_ROWS} rows share what they load of B: that pays from {staged // 4} vectors on, got {named}",
            ),
        )

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        return (
            "panel_steps<int, long long>",
            "panel_fill<__half, int, int>",
            "spmm_sr_bcrs_tc<__half, __half, int, int, 2, 4, 2, 1, 8, 3, false>",
            "spmm_sr_bcrs_tc<__nv_bfloat16, __nv_bfloat16, int, int, 2, 2, 2, 2, 4, 3, false>",
            "spmm_sr_bcrs_tc<__nv_bfloat16, float, long long, int, 1, 1, 1, 8, 4, 3, true>",
        )

    def plan(self, a: Any, p: Problem) -> Plan:
        import cupy

        limits = cupy.cuda.Device(p.device_id).attributes
        tile = choose(p.M, p.n, limits["MultiProcessorCount"], limits["MaxSharedMemoryPerBlockOptin"])
        return self.plan_with(a, p, tile)

    def plan_with(self, a: Any, p: Problem, tile: Tile) -> Plan:
        """The plan for one tile; ``plan`` chooses it."""
        b_col, out_col = p.b_layout == COL, p.out_layout == COL
        made = panels(a, p, tile.fragments)
        types = f"{VALUE_TYPES[p.a_dtype].cuda}, {VALUE_TYPES[p.out_dtype].cuda}"
        types = f"{types}, {index_type(a.indptr)}, {index_type(a.indices)}"
        shape = f"{tile.fragments}, {tile.wm}, {tile.wn}, {tile.wk}, {tile.strip}, {tile.stages}"
        instance = f"spmm_sr_bcrs_tc<{types}, {shape}, {str(b_col).lower()}>"
        function = jit.load(SOURCE, instance, jit.architecture(p.sm or 80, ()), p.device_id, tile.smem)
        arrays = (made.first, made.columns, made.values, a.indptr, a.indices, a.data)
        fixed = (*arrays, a.vector_length, a.stride, p.M, p.K)
        launch = Launch(function, "PPPPPPiiqqPPqqqq", fixed, tile.threads, tile.smem)
        blocks = -(-p.M // tile.rows)

        def run(o: Operands) -> None:
            grid = (blocks, min(MAX_GRID_Y, -(-o.n // tile.cols)), 1)
            c_row, c_col = (1, o.ldc) if out_col else (o.ldc, 1)
            launch(grid, o.stream, o.b, o.c, o.n, o.ldb, c_row, c_col)

        return device_plan(self.name, p, run, str(tile), made.nbytes)
