"""From a VectorNM on the device to a launch closure: what the vector n:m kernels do alike around their own function.

B reaches the kernels as aligned rows (pointer and pitch multiples of 16 bytes). A column-major or unaligned B is first
copied into the plan's workspace. A product with too few tiles for the device is split along K, and the parts are summed
in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ....arrays.library import BOUNDARY, ceil_div, round_up
from ....errors import InternalError, LimitError
from ....products.kernel import reasons
from ....products.problem import COL, ROW, Problem, pitch_of
from ....products.roofline import shared_limit
from ..runtime import jit, launch, refusals
from ..runtime.copy_lines import copy_of
from ..runtime.occupancy import max_clusters
from ..runtime.scratch import Scratch
from .vector_nm_sums import Sums
from .vector_nm_tiles import Packing, Pattern, Records, Shape, records

C_TYPES = {"bfloat16": "__nv_bfloat16", "float16": "__half", "float32": "float", "float64": "double"}
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_INT32_MAX = 2**31 - 1
_PITCH_MAX = 2**31
"""Kernels take the bytes between rows of data and of B as 32-bit numbers."""


def pattern(p: Problem) -> Pattern:
    """The pattern of a problem."""
    q = p.p
    return Pattern(p.M, p.K, q["n"], q["m"], q["vector_length"])


def vector_reasons(p: Problem, dtypes: tuple[str, ...]) -> list[str]:
    """The reasons for which every vector n:m kernel refuses ``p``; ``dtypes``: the value types it takes."""
    outs = (p.a_dtype, "float32") if ITEMSIZE.get(p.a_dtype) == 2 else (p.a_dtype,)
    return refusals.every(p, 80, dtypes, outs) + reasons(
        (p.M * ITEMSIZE.get(p.a_dtype, 8) >= _PITCH_MAX - 8192, f"a row of data must stay below 2 GiB, got M = {p.M}"),
        (max(p.M, p.K) > _INT32_MAX - 1024, f"M and K must stay below 2^31 - 1024, got {p.M} and {p.K}"),
    )


class AlignedRows:
    """B with rows whose address and pitch are multiples of 16 bytes: B itself, or a copy written on the same stream."""

    def __init__(self, p: Problem) -> None:
        self._size, self._rows, self._col = ITEMSIZE[p.b_dtype], p.K, p.b_layout == COL
        self._scratch = Scratch()
        self._copy = functools.lru_cache(maxsize=1)(lambda: copy_of(p.K, self._size, p.b_layout, ROW, p, fills=True))

    def __call__(self, x: launch.Operands) -> tuple[list[launch.Bound], int, int]:
        """The launches that copy B, if any; the address of the rows; bytes between rows."""
        size = self._size
        if not self._col and x.b % 16 == 0 and x.ldb * size % 16 == 0 and x.ldb * size < _PITCH_MAX:
            return [], x.b, x.ldb * size
        pitch = pitch_of(x.n, size)
        if pitch * size >= _PITCH_MAX:
            raise LimitError(f"B: a row of {x.n:,} columns passes 2 GiB; multiply fewer columns at a time")
        if self._rows == 0:
            return [], x.b, pitch * size
        to = self._scratch.buffer(x.stream, self._rows * pitch * size)
        return [self._copy()(x.stream, x.b, to, x.n, x.ldb, pitch)], to, pitch * size


def aligned_data(a: Any) -> Any:
    """``a.data`` with rows on 16-byte boundaries: itself, or a zero-padded copy (odd vector lengths)."""
    import cupy

    data, size = a.data, a.data.dtype.itemsize
    if data.shape[1] * size % BOUNDARY == 0:
        return data

    def build() -> Any:
        padded = cupy.zeros((data.shape[0], round_up(data.shape[1], BOUNDARY // size)), f"uint{8 * size}")
        padded[:, : data.shape[1]] = data.view(padded.dtype)
        launch.finish_arrays()  # synchronize!
        return padded

    return a.kernel_arrays("padded data", build)


def cached_records(a: Any, form: Pattern, **cut: Any) -> Records:
    """``records`` of a matrix, built once for each way to cut it."""

    def build() -> Records:
        stored = Packing.of(a, cut["tile_rows"], cut["kept"])
        packed = records(a.indices, form, stored=stored, **cut)
        launch.finish_arrays()  # synchronize!
        return packed

    built: Records = a.kernel_arrays(("records", *sorted(cut.items())), build)
    return built


class TileSize(Protocol):
    """The properties of a kernel's tile that ``fit`` reads."""

    @property
    def rows(self) -> int: ...
    @property
    def depth(self) -> int:
        """Columns of A wanted in a k tile."""
        ...

    @property
    def group_limit(self) -> int:
        """Most rows a group of slots may have."""
        ...

    def slot_scale(self, itemsize: int) -> int:
        """What staged rows are multiplied by in the records, or 0 (records: ``line_bytes``)."""
        ...

    def smem(self, itemsize: int, staged: int, slots: int, record: int) -> int: ...


_Tile = TypeVar("_Tile", bound=TileSize)


def fit(
    tiles: Iterable[_Tile], a: Any, p: Problem, *, step: int, banks: int = 1, bank_rows: int = 1
) -> tuple[_Tile, Records, int]:
    """The first tile whose stages fit in shared memory, with its records and the rows of a group.

    Tiles of whole windows come first. They are packed if packing saves enough, or if shared memory has no room for all
    rows of B. For wide windows then come tiles of fewer and fewer vectors of a window; the smallest always fits.
    """
    form, size, limit = pattern(p), ITEMSIZE[p.a_dtype], shared_limit(p.sm)
    tiles = tuple(tiles)
    whole = [(t, form.windows_per_tile(step, t.depth) * form.n) for t in tiles]
    parts = [(t, kept) for kept in (64, 32, 16, 8, 4, 1) for t in tiles if kept % step == 0 or kept < step]
    for tile, kept in whole + parts:
        group = form.group_rows(tile.group_limit)
        slots, groups = round_up(kept, step), tile.rows // group
        width = kept // form.n * form.m if kept % form.n == 0 else form.m * (kept // form.n + 2)
        roomy = tile.smem(size, width, slots, groups * slots + width + 4) <= limit
        if not roomy and tile.smem(size, kept, slots, groups * slots + kept) > limit:
            continue
        packed = cached_records(
            a, form, tile_rows=tile.rows, group_rows=group, kept=kept, step=step,
            bank_rows=bank_rows,
            banks=banks if group >= 16 else 1, packed=None if roomy else True, line_bytes=tile.slot_scale(size),
        )  # fmt: skip
        if tile.smem(size, packed.staged, packed.slots, int(packed.words.shape[2])) <= limit:
            return tile, packed, group
    raise InternalError(f"vector-nm: no tile fits in {limit} bytes of shared memory for {p}")


def choose_splits(tiles: int, k_tiles: int, processors: int) -> int:
    """Number of parts along K that lets the grid fill the device about once; a part has at least four k tiles."""
    if tiles * 2 > processors:
        return 1
    return max(1, min(processors // max(1, tiles), k_tiles // 4, 32))


@dataclass(frozen=True)
class Choice:
    """What a kernel chose for a problem: its function for each output type, its tile and its leading arguments."""

    source: str
    archs: tuple[str, ...]
    instance: Callable[[str, tuple[int, int]], str]
    """C++ name of the function that writes a C type, for cluster extents."""
    cols: int
    """Columns of a tile."""
    threads: int
    smem: Callable[[int], int]
    """Bytes of shared memory for an output item size."""
    row_tiles: int
    k_tiles: int
    signature: tuple[Any, ...]
    head: Callable[[int, int, tuple[int, int]], tuple[Any, ...]]
    """The arguments before B, by splits, k tiles per split and cluster extents; ``signature`` names their types."""
    cluster: Callable[[int], tuple[int, int]] | None = None
    """Cluster extents (row tiles, column tiles) by the tiles along N, for a kernel whose blocks take tiles in turn."""
    b_signature: tuple[Any, ...] = ("P", "i")
    b_arguments: Callable[[int, int, int], tuple[Any, ...]] = lambda b, pitch, n: (b, pitch)
    """How B is passed: from its pointer, bytes between rows, and columns."""
    keep: Any = None
    """An array of which ``head`` has only the address; the launches keep it alive."""
    splits: int = 0
    """Parts along K; 0: ``choose_splits``."""
    waits: bool = False
    """As for ``Launch``."""


def records_choice(a: Any, p: Problem, table: Records, **rest: Any) -> Choice:
    """The Choice of a kernel that reads records; its first arguments are shape, data and records."""
    data, W = aligned_data(a), int(a.indices.shape[0])
    row_tiles, k_tiles = table.words.shape[:2]

    def head(splits: int, per_split: int, cluster: tuple[int, int]) -> tuple[Any, ...]:
        return table.shape(pattern(p), int(data.strides[0]), W, per_split), data, table.words

    return Choice(**{"row_tiles": row_tiles, "k_tiles": k_tiles, "signature": (Shape, "P", "P"), "head": head} | rest)


def launcher(p: Problem, choice: Choice) -> launch.Prepare:
    """The ``Prepare`` of a plan for these choices."""
    import cupy

    row_tiles, cols, threads = choice.row_tiles, choice.cols, choice.threads
    processors = cupy.cuda.Device(p.device_id).attributes["MultiProcessorCount"]
    wanted = choice.splits or choose_splits(row_tiles * ceil_div(max(p.n, 1), cols), choice.k_tiles, processors)
    per_split = max(1, ceil_div(choice.k_tiles, wanted))
    splits = max(1, ceil_div(choice.k_tiles, per_split))

    def choose_cluster(n: int) -> tuple[int, int]:
        return choice.cluster(ceil_div(n, cols)) if choice.cluster and splits == 1 else (1, 1)

    out_type = C_TYPES[p.out_dtype]
    sum_type = "double" if p.a_dtype == "float64" else "float"
    written = sum_type if splits > 1 else out_type
    size = {"double": 8, "float": 4}.get(written, 2)
    arch = jit.architecture(p.sm or 80, choice.archs)
    signature, smem = (*choice.signature, *choice.b_signature, *"Piqqq"), choice.smem(size)

    @functools.cache
    def product(cluster: tuple[int, int]) -> tuple[launch.Launch, int]:
        """The launch, and the number of clusters that run at the same time."""
        function = jit.load(choice.source, choice.instance(written, cluster), arch, p.device_id, smem)
        prepared = launch.Launch(function, signature, choice.head(splits, per_split, cluster), threads, smem,
                                 choice.waits)  # fmt: skip
        size = cluster[0] * cluster[1]
        return prepared, processors if size == 1 else max_clusters(function, size, threads, smem)

    def start(x: launch.Operands, c: int, step_m: int, step_n: int, split_stride: int) -> list[launch.Bound]:
        calls, b, pitch = rows_of_b(x)
        down, across = cluster = choose_cluster(x.n)
        column_tiles, (function, resident) = ceil_div(x.n, cols), product(cluster)
        if choice.cluster is None:
            grid = (row_tiles * column_tiles, 1, splits)
        else:
            items = ceil_div(row_tiles, down) * ceil_div(column_tiles, across) * splits
            grid = (min(items, resident) * down * across, 1, 1)
        operands = b_arguments(b, pitch, x.n)
        return [*calls, function.bind(grid, x.stream, *operands, c, x.n, step_m, step_n, split_stride)]

    product(choose_cluster(max(p.n, 1)))  # compile now, not in the first call
    rows_of_b = AlignedRows(p)
    c_col, M, keep = p.out_layout == COL, p.M, choice.keep
    b_arguments = choice.b_arguments

    if splits == 1:

        def prepare(x: launch.Operands, keep: Any = keep) -> list[launch.Bound]:
            return start(x, x.c, *((1, x.ldc) if c_col else (x.ldc, 1)), 0)

        return prepare

    sums, parts = Sums(p, sum_type, out_type, processors), Scratch()

    def prepare_split(x: launch.Operands, keep: Any = keep) -> list[launch.Bound]:
        partial = parts.buffer(x.stream, splits * M * x.n * size)
        # Partial sums lie as C does, so that both are read and written along lines.
        lines, along, steps = (x.n, M, (1, M)) if c_col else (M, x.n, (x.n, 1))
        product_of_parts = start(x, partial, *steps, M * x.n)
        return [*product_of_parts, sums.bind(x.stream, partial, x.c, splits, lines, along, x.ldc)]

    return prepare_split
