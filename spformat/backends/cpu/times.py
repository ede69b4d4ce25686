"""The expected times of host kernels: numba loops over a format's arrays, and numpy's BLAS.

Quantities are ideal microseconds on ``roofline.HOST``.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from ...arrays.library import ceil_div
from ...products.ideal import memory_us, plain_arithmetic, product_us, stored_bytes
from ...products.kernel import Best, Kernel
from ...products.problem import COL, ROW, Problem, itemsize
from ...products.roofline import Device

VECTOR = 64
"""Bytes of a vector of the compiled loops; a tile of B is one or two of them wide."""
SMALL = 1 << 24
"""Multiply-adds up to which the loops stay on one thread."""
FEW, FEW_SMALL = 16, 1 << 21
"""Columns of B up to which loops of their own are used, and the multiply-adds for which another thread is worth while
there: 0.03 to 0.1 ms, as its threads are awake or woken without waiting (``team``)."""
IN_PANELS = {
    "two-four": 96, "vector-nm": 80, "sr-bcrs": 96, "bitmask": 64, "bsr": 48, "dbsr": 48, "csr": 32, "ell-buckets": 32,
}  # fmt: skip
"""Format -> columns of B up to which these loops are faster, FEW at a time, than the loop for any number of columns."""
MOST_OF_SMALL, SMALL_MATRIX = 48, 1 << 20
"""The most columns that go in panels with an A of fewer elements: copies of B then take longer than products."""
ITEM = 4
"""Multiply-adds that take as long as one with an item that has a column of its own."""
SHARED = 1 << 20
"""Bytes of tiles of B that all rows of A are multiplied with before the next tiles are read."""
DECODED = {"two-four": 2.0, "bitmask": 1.0}
"""Positions that are decoded to find the columns of A, as a share of its elements; other formats store columns."""


def turn(format: str, rows: int) -> int:
    """The columns of B from which on a lane is a column of B, where blocks or tiles of ``rows`` rows share columns.

    Up to there lanes are items of A: with tiles of few rows, gathering columns of B for them soon takes longer.
    """
    if format == "sr-bcrs":
        return 5 if rows < 16 else 8
    return 14


def has_few_columns(p: Problem, n: int) -> bool:
    """Whether the loops for few columns of B are used for ``n``, if the format has them."""
    most = IN_PANELS.get(p.format, FEW)
    return n <= (most if p.M * p.K >= SMALL_MATRIX else min(most, MOST_OF_SMALL))


def sums_size(p: Problem) -> int:
    """Bytes of a sum: float64 where anything is float64, else float32."""
    return 8 if "float64" in (p.a_dtype, p.b_dtype, p.out_dtype) else 4


def sums_arithmetic(p: Problem) -> str:
    """The arithmetic of the sums."""
    return plain_arithmetic("float64" if sums_size(p) == 8 else "float32")


class LoopTimes(Kernel):
    """The expected time of a loop over the arrays of a format."""

    terms: ClassVar[tuple[str, ...]] = (
        "start", "threads", "products", "values", "decoding", "widening", "B into tiles", "C", "rows",
        "column-major operands",
    )  # fmt: skip

    def variant(self, p: Problem, tile: Any) -> tuple[str, ...]:
        """By the bytes of a value of A."""
        return (f"{itemsize(p.a_dtype)}-byte values",)

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        start: 1. threads: 1 where a second thread is woken. products: on the threads that work, with columns of B
        padded to whole vectors. values: A's arrays, read once for each group of tiles that fits the cache. decoding:
        1 ns for each position that is decoded to find columns, as often. widening: 1 ns for each stored value narrower
        than a sum, as often. B into tiles: each element read and written. C: written, in tiles and then in its own
        type. rows: 10 ns for each row and tile. column-major operands: B and C that are transposed.
        """
        size, n = sums_size(p), p.n
        lanes = VECTOR // size
        width = min(2, ceil_div(max(1, n), lanes)) * lanes
        tiles = ceil_div(max(1, n), width)
        columns = tiles * width
        decoded = DECODED.get(p.format, 0.0) * p.M * p.K
        several = p.nnz * columns + decoded > SMALL
        share = 1.0 if several else float(device.processors)
        groups = ceil_div(tiles, max(1, SHARED // max(1, p.inner * width * size)))
        products = share * product_us(2.0 * p.nnz * columns, sums_arithmetic(p), device)
        values = share * memory_us(groups * stored_bytes(p), device)
        decoding = share * groups * decoded * 1e-3
        widening = share * groups * p.nnz * 1e-3 if itemsize(p.a_dtype) < size else 0.0
        b_size, out_size = itemsize(p.b_dtype), itemsize(p.out_dtype)
        filled = memory_us(p.inner * (n * b_size + columns * size), device)
        plain = p.out_layout == ROW and out_size == size and n == columns
        written = memory_us(p.rows * columns * size + (0 if plain else p.rows * n * (size + out_size)), device)
        turned = n * ((p.b_layout == COL) * p.inner * b_size + (p.out_layout == COL) * p.rows * size)
        rows = p.M * tiles * share * 0.01
        return (
            1.0, float(several), products, values, decoding, widening, filled, written, rows, memory_us(turned, device),
        )  # fmt: skip


class TiledTimes(LoopTimes):
    """The expected time of the loop for any number of columns of another kernel, whatever that kernel uses for few."""

    def __init__(self, kernel: str) -> None:
        self.name = self.constants_of = kernel


class FewTimes(LoopTimes):
    """The same, where up to FEW columns of B have loops of their own, which read the arrays once and pad nothing.

    Up to IN_PANELS columns they run once for each FEW columns.
    """

    @functools.cached_property
    def tiled(self) -> TiledTimes:
        """Expects the time of the loop for any number of columns."""
        return TiledTimes(self.name)

    def best(self, p: Problem) -> Best:
        """For few columns never more than the loop for any number of columns would take."""
        best = super().best(p)
        return min(best, self.tiled.best(p), key=lambda b: b.us) if has_few_columns(p, p.n) else best

    def variant(self, p: Problem, tile: Any) -> tuple[str, ...]:
        """One column and few columns apart, then by the bytes of a value of A."""
        names = super().variant(p, tile)
        if not has_few_columns(p, p.n):
            return names
        one = tuple(f"one column, {name}" for name in names) if p.n == 1 else ()
        return (*one, *(f"few columns, {name}" for name in names), "few columns")

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """For few columns: the terms of ``LoopTimes`` with one tile that is as wide as B; rows: 10 ns for each sum."""
        if not has_few_columns(p, p.n):
            return super().quantities(p, tile, device)
        if p.n > FEW:
            panels = [p.changed(n=min(FEW, p.n - first)) for first in range(0, p.n, FEW)]
            return tuple(map(sum, zip(*[self.quantities(q, tile, device) for q in panels], strict=True)))
        size, n = sums_size(p), max(1, p.n)
        alone = p.format in ("csr", "ell-buckets")
        several = p.nnz * (ITEM if alone else 1) * max(4, n) >= FEW_SMALL
        share = 1.0 if several else float(device.processors)
        out_size, b_size = itemsize(p.out_dtype), itemsize(p.b_dtype)
        columns = 1 << (n - 1).bit_length() if alone or self._by_columns(p) else n
        products = share * product_us(2.0 * p.nnz * columns, sums_arithmetic(p), device)
        values = share * memory_us(stored_bytes(p), device)
        decoding = share * DECODED.get(p.format, 0.0) * p.M * p.K * 1e-3
        widening = share * p.nnz * 1e-3 if itemsize(p.a_dtype) < size else 0.0
        filled = memory_us(p.inner * n * (b_size + size), device)
        plain = p.out_layout == ROW and out_size == size
        written = memory_us(p.rows * n * (size if plain else 2 * size + out_size), device)
        turned = n * ((p.b_layout == COL) * p.inner * b_size + (p.out_layout == COL) * p.rows * size)
        rows = p.M * n * share * 0.01
        return (
            1.0, float(several), products, values, decoding, widening, filled, written, rows, memory_us(turned, device),
        )  # fmt: skip

    @staticmethod
    def _by_columns(p: Problem) -> bool:
        """Whether a lane is a column of B, so that B is padded to a power of two."""
        params = p.p
        rows = params["blocksize"][0] if "blocksize" in params else params.get("vector_length", 1)
        return p.format in ("bsr", "dbsr", "sr-bcrs") and p.n >= turn(p.format, int(rows))


class DenseTimes(Kernel):
    """The expected time of a dense product by BLAS."""

    name = "cpu.spmm_dense"
    terms: ClassVar[tuple[str, ...]] = (
        "start", "products", "memory", "A widened", "B widened", "C converted", "column-major operands",
    )  # fmt: skip

    def variant(self, p: Problem, tile: Any) -> tuple[str, ...]:
        """By value type; a vector B apart, for which BLAS has another routine."""
        return (f"{p.a_dtype}, a vector", p.a_dtype) if p.n == 1 else (p.a_dtype,)

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        products: on all cores, columns padded to a multiple of four. memory: A, B and C as BLAS reads and writes them.
        A widened, B widened, C converted: elements of a type that BLAS does not take, once each. column-major operands:
        B and C of that layout, which are packed or transposed.
        """
        size, n = sums_size(p), p.n
        columns = 4 * ceil_div(max(1, n), 4)
        products = product_us(2.0 * p.M * p.K * columns, sums_arithmetic(p), device)
        counts = p.M * p.K, p.inner * n, p.rows * n
        memory = memory_us(size * sum(counts), device)
        sizes = zip(counts, map(itemsize, (p.a_dtype, p.b_dtype, p.out_dtype)), strict=True)
        a, b, c = (memory_us(count * (size + own), device) if own != size else 0.0 for count, own in sizes)
        turned = size * ((p.b_layout == COL) * p.inner * n + (p.out_layout == COL) * p.rows * n)
        return 1.0, products, memory, a, b, c, memory_us(turned, device)
