"""The expected time of a dense product by cuBLAS, alone or after an expansion."""

from __future__ import annotations

from typing import Any

from ....arrays.library import ceil_div
from ....products.ideal import arithmetic, library_alignment, memory_us, operands_bytes, product_us
from ....products.kernel import Kernel
from ....products.problem import Problem, itemsize
from ....products.roofline import Device

TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.85), (128, 64, 0.65), (64, 128, 0.65), (64, 64, 0.45),
    (128, 32, 0.4), (64, 32, 0.3), (64, 16, 0.2),
)  # fmt: skip
"""Rows, columns and relative efficiency of the tiles of a dense library, which uses the fastest for each shape."""
SPLITS = (1, 2, 4, 8)
"""Parts that K may be cut into."""
SPLIT_US = 0.5
"""Ideal microseconds to add one more part of K."""


class Gemm(Kernel):
    """The expected time of a dense product; C = A @ B, or A^T @ B, whose rows are the columns of A."""

    name = "vendor.cublas_gemm"
    terms = ("launch", "memory", "tiles", "products", "depth", "slower of memory and tiles")

    def variant(self, p: Problem, tile: Any) -> tuple[str, ...]:
        """By value type, and by how the lines of B and C are aligned.

        Lines that do not start on 16-byte boundaries, or are no multiple of 16 bytes long, take the library to kernels
        that are up to ten times slower.
        """
        kind = "16-bit" if itemsize(p.a_dtype) == 2 else p.a_dtype
        return f"{kind}, lines on {library_alignment(p)} bytes", kind

    def quantities(self, p: Problem, tile: Any, device: Device) -> tuple[float, ...]:
        """Ideal microseconds of each of ``terms``.

        launch: 1. memory: A, B and C once. tiles: rounds of whole tiles (``tiles_us``). products: all operations at the
        peak. depth: a step along K is 64 columns of 16-bit values (128 bytes), and takes 20 ns at least. The last:
        memory and tiles overlap.
        """
        size, kind = itemsize(p.a_dtype), arithmetic(p.a_dtype)
        memory = memory_us(p.M * p.K * size + operands_bytes(p), device)
        tiles, products = tiles_us(p, device), product_us(2.0 * p.M * p.K * p.n, kind, device)
        return 1.0, memory, tiles, products, p.inner * size / 128 * 0.02, max(memory, tiles)


def tiles_us(p: Problem, device: Device) -> float:
    """Time of the best of TILES, with whole rounds of tiles over the multiprocessors."""
    processors, inner = device.processors, p.inner
    unit = 2e6 * processors / device.peak[arithmetic(p.a_dtype)]
    best, rows, n = float("inf"), p.rows, p.n
    for height, width, efficiency in TILES:
        tiles, one = ceil_div(rows, height) * ceil_div(n, width), inner * height * width * unit / efficiency
        if tiles * one > best * processors:  # not even without waiting for the last round
            continue
        for parts in SPLITS:
            taken = ceil_div(tiles * parts, processors) * one / parts + (parts - 1) * SPLIT_US
            if taken < best:
                best = taken
    return best
