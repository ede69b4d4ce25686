"""SpMM on vector n:m (NM-SpMM) with tensor cores for few columns: streams the values once; sm_80 up.

Kernel: spmm_vector_nm_tokens_tc.cu. bf16 and fp16.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

from ....arrays.library import Array, ceil_div, namespace, power_of_two, round_up
from ....products.ideal import cache_us, memory_us, rounds, stored_bytes, tile_us
from ....products.kernel import reasons, spmm_of
from ....products.problem import COL, Problem, itemsize
from ....products.roofline import TENSOR_16, Device, device_of, shared_limit
from ..runtime import jit, launch, token_sums
from ..runtime.kernel import CudaKernel, Prepared
from ..runtime.launch import Launch
from .vector_nm_launch import C_TYPES, aligned_data, pattern, vector_reasons
from .vector_nm_tiles import Pattern

SOURCE = "vector_nm/spmm_vector_nm_tokens_tc.cu"
MAX_COLS = 16
WARPS = 8
MOST_LINES = 255
"""Lines of B in a slab: ``places`` are bytes."""
MOST_SLOTS = 8


class Slabs(ctypes.Structure):
    """Must match ``vector_nm::Slabs`` in the kernel."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ("M", "K", "W", "slabs", "kept", "steps", "columns", "lines", "column", "slot")
        ),
        ("pitch", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class Slab:
    """Whole windows that a warp takes at a time: ``kept`` of ``columns`` columns of A."""

    windows: int
    kept: int
    columns: int

    @property
    def padded(self) -> int:
        """Kept columns, to the next step of 16."""
        return round_up(self.kept, 16)

    @property
    def lines(self) -> int:
        """Lines of B: the columns, to the next multiple of 8, and a line of zeros."""
        return round_up(self.columns, 8) + 1

    @property
    def column(self) -> int:
        """Bytes between columns of a column-major B: 16-byte pieces of eight of them fall into different banks."""
        return 16 * (round_up(self.columns, 8) // 8 | 1)


@functools.lru_cache(maxsize=256)
def slab_of(n: int, m: int) -> Slab | None:
    """The smallest slab that starts at a multiple of 8 columns and wastes at most a third; None: m is too large.

    A small slab leaves room for more of them; kept columns that fill up a step cost no memory traffic.
    """
    slabs = [Slab(w, w * n, w * m) for w in range(1, 65) if w == 1 or (w * n <= 48 and w * m <= 128)]

    def order(s: Slab) -> tuple[Any, ...]:
        waste = s.padded / s.kept
        return s.columns % 8 != 0, waste > 1.34, s.padded, waste, s.windows

    return min(slabs, key=order) if round_up(m, 8) < MOST_LINES else None


@dataclass(frozen=True)
class Tile:
    """A block computes 16 * ``fragments`` rows and ``cols`` columns of C.

    ``splits`` blocks share the slabs of the same rows; ``blocks`` run on a multiprocessor at once.
    """

    fragments: int
    cols: int
    blocks: int
    splits: int

    @property
    def rows(self) -> int:
        return 16 * self.fragments

    def slot(self, slab: Slab, share: int, b_col: bool) -> int:
        """Bytes of a slab in a warp's ring: of A, of its places, of B. Lines of 128 bytes start on as many."""
        b = self.cols * slab.column if b_col else slab.lines * self.cols * 2
        return round_up(slab.padded * (2 * self.rows + self.fragments // share) + b, 128)

    def lines(self, slab: Slab, b_col: bool) -> int:
        """Bytes in which a warp has the slab at hand of a column-major B, transposed."""
        return slab.lines * self.cols * 2 if b_col else 0

    def slots(self, slab: Slab, share: int, b_col: bool, limit: int) -> int:
        """Slabs of a warp that are in shared memory or on their way there."""
        free = token_sums.room(limit, self.blocks) // WARPS - self.lines(slab, b_col)
        return min(MOST_SLOTS, free // self.slot(slab, share, b_col))

    def smem(self, slab: Slab, share: int, b_col: bool, limit: int) -> int:
        """Bytes of shared memory: the rings, or the sums of all warps."""
        ring = self.slots(slab, share, b_col, limit) * self.slot(slab, share, b_col) + self.lines(slab, b_col)
        return WARPS * max(ring, 4 * self.rows * self.cols)

    def __str__(self) -> str:
        return (
            f"{self.rows}x{self.cols}"
            + (f", {self.blocks} blocks" if self.blocks > 1 else "")
            + (f", split {self.splits}" if self.splits > 1 else "")
        )


def share_of(length: int, fragments: int) -> int:
    """Fragments of 16 rows below each other that share their kept columns, out of ``fragments``, a power of two."""
    return math.gcd(length // 16, fragments)


def places_of(indices: Array, form: Pattern, slab: Slab, fragments: int) -> Array:
    """uint8[row tiles, slabs, groups, padded]: the line of B in its slab for each kept column. indices: uint8[W, Q]."""
    xp, (W, Q) = namespace(indices), indices.shape
    share = share_of(form.vector_length, fragments)
    windows, slabs = W // form.n, ceil_div(W // form.n, slab.windows)
    lines = xp.full((slabs * slab.windows, form.n, Q), slab.lines - 1, "uint8")
    first = xp.arange(windows, dtype="int64") % slab.windows * form.m
    lines[:windows] = (first[:, None, None] + indices.reshape(windows, form.n, Q)).astype("uint8")
    padded = xp.full((slabs, slab.padded, Q), slab.lines - 1, "uint8")
    padded[:, : slab.kept] = lines.reshape(slabs, slab.kept, Q)
    tiles, groups = ceil_div(form.M, 16 * fragments), fragments // share
    row = xp.arange(tiles * groups) * (16 * share)
    of_group = padded[:, :, xp.minimum(row // form.vector_length, Q - 1)].reshape(slabs, slab.padded, tiles, groups)
    return xp.ascontiguousarray(of_group.transpose(2, 0, 3, 1))


class SpmmVectorNMTokensTensor(CudaKernel):
    """``out = A @ B`` for A in VectorNM with vectors of a multiple of 16 rows, N <= 16. Each value is read once.

    B is read where it lies, in both layouts. Sums are float32; those of the ranges of K are added in a fixed order:
    inside a thread block cluster on sm_90 and later, else by the block that finishes last.
    """

    name = "cuda.spmm_vector_nm_tokens_tc"
    epilogue = True
    takes = spmm_of("vector-nm")
    archs = ("sm_80",)
    terms = ("launch", "memory of A", "memory of B and C", "B by every block", "products", "slabs", "splits")

    def unsupported(self, p: Problem) -> list[str]:
        length, n, m = (p.p[key] for key in ("vector_length", "n", "m"))
        refused = vector_reasons(p, ("bfloat16", "float16")) + reasons(
            (p.n > MAX_COLS, f"takes at most {MAX_COLS} columns, got up to {p.n}"),
            (length % 16, f"vector_length must be a multiple of 16 (the rows of a fragment), got {length}"),
            (slab_of(n, m) is None, f"m must be at most {MOST_LINES - 7} (places are bytes), got {m}"),
        )
        if not refused and not self.options(p):
            refused.append(
                f"two slabs of {n}:{m} windows for each of {WARPS} warps must fit in {shared_limit(p.sm)} bytes"
            )
        return refused

    def options(self, p: Problem) -> list[Tile]:
        """Tiles of 32 to 128 rows; numbers of ranges of K as long as each shortens the way of a warp along K."""
        cols = power_of_two(min(max(p.n, 8), MAX_COLS))
        return list(_tiles(pattern(p), cols, device_of(p), shared_limit(p.sm)))

    def variant(self, p: Problem, tile: Tile) -> tuple[str, ...]:
        """By columns and layout of B: a column-major B is transposed in shared memory."""
        layout = "col-major B" if p.b_layout == COL or p.n == 1 else "row-major B"
        return f"{layout}, {tile.cols} columns", layout

    def quantities(self, p: Problem, tile: Tile, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        B by every block: from L2, once for each tile of rows. slabs: that a warp takes one after the other, 10 ns each.
        splits: ranges of K that are added up.
        """
        form = pattern(p)
        slab, tiles = _slab(form), ceil_div(p.M, tile.rows)
        shared = cache_us(tiles * p.K * tile.cols * 2, device)
        turns = rounds(tiles, device.clusters(tile.splits, tile.blocks))
        slabs = ceil_div(ceil_div(ceil_div(p.K, form.m), slab.windows), tile.splits * WARPS)
        products = (
            turns * tile.blocks * tile_us(tile.rows, tile.cols, p.K * form.n / form.m / tile.splits, TENSOR_16, device)
        )
        others = memory_us(p.K * p.n * 2 + p.M * p.n * itemsize(p.out_dtype), device)
        return (
            1.0, memory_us(stored_bytes(p), device), others, shared, products, turns * slabs * 0.01,
            (tile.splits - 1) * 0.5,
        )  # fmt: skip

    def instances(self) -> tuple[str, ...]:
        """C++ names that the compile tests build."""
        p = Problem.product("vector-nm", (), 1, 1, 0, 0, "bfloat16", "bfloat16", "bfloat16")
        wide = Problem.product("vector-nm", (), 1, 1, 0, 0, "float16", "float16", "float32", COL, COL, epilogue=True)
        return (
            instance(Tile(8, 16, 1, 4), p, 4, 2, True, False),
            instance(Tile(4, 16, 1, 2), wide, 2, 1, False, True),
            instance(Tile(2, 8, 2, 1), p, 8, 2, False, True),
            instance(Tile(8, 16, 2, 1), wide, 3, 8, False, True),
        )

    def prepared(self, a: Any, p: Problem) -> Prepared:
        return self.prepared_with(a, p, self.best(p).tile)

    def prepared_with(self, a: Any, p: Problem, tile: Tile) -> Prepared:
        """The launches of one tile."""
        form, data, indices, limit = pattern(p), aligned_data(a), a.indices, shared_limit(p.sm)
        slab, share = _slab(form), share_of(form.vector_length, tile.fragments)

        def build() -> Any:
            places = places_of(indices, form, slab, tile.fragments)
            launch.finish_arrays()  # synchronize!
            return places

        places = a.kernel_arrays(("token places", tile.fragments), build)
        (W, pitch), slabs = data.shape, places.shape[1]

        @functools.lru_cache(maxsize=2)
        def variant(b_col: bool) -> Launch:
            slots, smem = tile.slots(slab, share, b_col, limit), tile.smem(slab, share, b_col, limit)
            shape = Slabs(
                p.M, p.K, W, slabs, slab.kept, slab.padded // 16, slab.columns, slab.lines, slab.column,
                tile.slot(slab, share, b_col), pitch,
            )  # fmt: skip
            name = instance(tile, p, slots, share, token_sums.clustered(p, tile), b_col)
            function = jit.load(SOURCE, name, jit.architecture(p.sm or 80, ()), p.device_id, smem)
            return Launch(function, (Slabs, *"PP", *token_sums.TAIL), (shape, data, places), WARPS * 32, smem)

        prepare, kept = token_sums.launches(p, tile, variant)
        return Prepared(prepare, str(tile), int(places.nbytes) + kept)


def _slab(form: Pattern) -> Slab:
    slab = slab_of(form.n, form.m)
    assert slab is not None, form
    return slab


@functools.lru_cache(maxsize=256)
def _tiles(form: Pattern, cols: int, device: Device, limit: int) -> tuple[Tile, ...]:
    """Tiles that fit in shared memory. Each number of splits leaves a warp fewer slabs than all smaller ones."""
    slab, tiles = _slab(form), []
    slabs = ceil_div(ceil_div(form.K, form.m), slab.windows)
    for fragments in (2, 4, 8):
        row_tiles, share = ceil_div(max(1, form.M), 16 * fragments), share_of(form.vector_length, fragments)
        if fragments > 2 and 8 * fragments >= form.M:  # half of the rows would not exist
            continue
        for blocks in (1, 2):
            least = math.inf
            for splits in range(1, 9):
                tile = Tile(fragments, cols, blocks, splits)
                turns = rounds(row_tiles, device.clusters(splits, blocks)) * ceil_div(slabs, splits * WARPS)
                room = token_sums.room(limit, blocks)
                fits = all(
                    tile.slots(slab, share, col, limit) >= 2 and tile.smem(slab, share, col, limit) <= room
                    for col in (False, True)
                )
                if fits and turns < least:
                    least = turns
                    tiles.append(tile)
    return tuple(tiles)


def instance(tile: Tile, p: Problem, slots: int, share: int, cluster: bool, b_col: bool) -> str:
    """C++ name of the kernel."""
    flags = ", ".join(str(f).lower() for f in (cluster, b_col, p.out_layout == COL, p.epilogue))
    shape = f"{tile.fragments}, {tile.cols // 8}, {WARPS}, {slots}, {tile.blocks}, {tile.splits}, {share}"
    return (
        f"spformat::vector_nm::spmm_vector_nm_tokens_tc<{C_TYPES[p.a_dtype]}, {C_TYPES[p.out_dtype]}, {shape}, {flags}>"
    )
