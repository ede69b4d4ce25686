"""Matrices and numbers of columns to calibrate on: layers of real models in every format, drawn with a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.dtypes import VALUE_TYPES, bits
from ..arrays.library import Array
from ..errors import UsageError
from ..formats import by_name
from ..formats.base import Format
from ..preprocess import masks
from ..products.problem import COL, ROW, Problem
from .layers import LAYERS

BINS = ((1, 4), (5, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096))
"""Ranges of N; the draws are spread over all of them."""
FINE_BINS = ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512), (513, 1024), (1025, 4096))
"""The same for a fit of few kernels: as fine as the widths of tiles."""
LARGEST = {"cuda": 1 << 26, "cpu": 1 << 23}
"""Elements of the largest dense matrix that is drawn, by device."""
OPERATIONS = {"cuda": 6e11, "cpu": 4e9}
"""Dense operations of the largest product."""
KINDS: tuple[tuple[str, str, float, tuple[int, int], dict[str, Any]], ...] = (
    ("dense", "bfloat16", 1, (1, 1), {}), ("dense", "float32", 1, (1, 1), {}),
    ("two-four", "bfloat16", 0.5, (1, 1), {}), ("two-four", "float16", 0.5, (1, 1), {}),
    ("vector-nm", "bfloat16", 0.5, (1, 1), {"n": 16, "m": 32, "vector_length": 128}),
    ("vector-nm", "bfloat16", 0.25, (1, 1), {"n": 8, "m": 32, "vector_length": 32}),
    ("vector-nm", "float32", 0.25, (1, 1), {"n": 8, "m": 32, "vector_length": 32}),
    ("bsr", "bfloat16", 0.3, (16, 16), {"blocksize": (16, 16)}),
    ("bsr", "bfloat16", 0.5, (32, 32), {"blocksize": (32, 32)}),
    ("bsr", "bfloat16", 0.2, (64, 64), {"blocksize": (64, 64)}),
    ("bsr", "bfloat16", 0.1, (128, 128), {"blocksize": (128, 128)}),
    ("bsr", "float32", 0.2, (32, 32), {"blocksize": (32, 32)}),
    ("dbsr", "bfloat16", 0.1, (32, 32), {"blocksize": (32, 32)}),
    ("dbsr", "bfloat16", 0.4, (32, 32), {"blocksize": (32, 32)}),
    ("bitmask", "bfloat16", 0.5, (1, 1), {}), ("bitmask", "bfloat16", 0.2, (1, 1), {}),
    ("bitmask", "float32", 0.3, (1, 1), {}),
    ("csr", "bfloat16", 0.1, (1, 1), {}), ("csr", "bfloat16", 0.02, (1, 1), {}), ("csr", "float16", 0.05, (1, 1), {}),
    ("csr", "bfloat16", 0.3, (1, 1), {}), ("csr", "float32", 0.1, (1, 1), {}), ("csr", "float32", 0.02, (1, 1), {}),
    ("sr-bcrs", "bfloat16", 0.1, (8, 1), {"vector_length": 8, "stride": 16}),
    ("sr-bcrs", "bfloat16", 0.3, (8, 1), {"vector_length": 8, "stride": 16}),
    ("sr-bcrs", "float32", 0.1, (8, 1), {"vector_length": 8, "stride": 16}),
    ("ell-buckets", "bfloat16", 0.1, (1, 1), {}), ("ell-buckets", "float32", 0.05, (1, 1), {}),
)  # fmt: skip
"""Format, value type, density of values (or blocks), shape of the blocks that are kept or dropped, parameters."""


@dataclass(frozen=True)
class Spec:
    """A matrix to build, and the products to measure with it."""

    format: str
    dtype: str
    M: int
    K: int
    density: float
    together: tuple[int, int]
    params: tuple[tuple[str, Any], ...]
    widths: tuple[tuple[int, str, str], ...]
    """N, layout of B, layout of C."""

    def __str__(self) -> str:
        return f"{self.format} {self.dtype} {self.M}x{self.K}"

    def problems(self, device: str, sm: int | None) -> Iterator[Problem]:
        """Its products, as far as they are known before the matrix is built: nonzeros are counted by the density."""
        nnz, d = round(self.M * self.K * self.density), self.dtype
        params = tuple(by_name(self.format).resolve_params(dict(self.params)).items())
        for n, b, c in self.widths:
            yield Problem.product(self.format, params, self.M, self.K, n, nnz, d, d, d, b, c, device, sm)


def draw(
    seed: int, device: str, widths: int, formats: Sequence[str] = (), bins: Sequence[tuple[int, int]] = BINS
) -> Iterator[Spec]:
    """An endless sequence of matrices with ``widths`` numbers of columns each. Every kind comes once in each round.

    formats: ids of the only formats that are drawn; all without any. bins: ranges of N.
    """
    kinds = [kind for kind in KINDS if not formats or kind[0] in formats]
    if not kinds:
        known = ", ".join(dict.fromkeys(kind[0] for kind in KINDS))
        raise UsageError(f"formats: expected some of {known}, got {', '.join(formats):.80}", value=formats)
    rng = random.Random(seed)
    shapes = [s for s in LAYERS if s[0] * s[1] <= LARGEST[device]]
    while True:
        for format, dtype, density, together, params in rng.sample(kinds, len(kinds)):
            M, K = rng.choice(shapes)
            products = tuple(_width(rng, M, K, OPERATIONS[device], bins) for _ in range(widths))
            yield Spec(format, dtype, M, K, density, together, tuple(params.items()), products)


def clipped(bins: Sequence[tuple[int, int]], least: int, most: int) -> tuple[tuple[int, int], ...]:
    """The ranges between two numbers of columns, both included. UsageError if nothing is left."""
    some = tuple((max(low, least), min(high, most)) for low, high in bins if low <= most and high >= least)
    if not some or least > most:
        whole = f"{bins[0][0]} to {bins[-1][1]}"
        raise UsageError(f"columns: expected a part of {whole}, got {least} to {most}")
    return some


def _width(rng: random.Random, M: int, K: int, most: float, bins: Sequence[tuple[int, int]]) -> tuple[int, str, str]:
    """A random number of columns and layouts. Half of the numbers are multiples of eight, few are powers of two."""
    low, high = rng.choice(bins)
    n = round(low * (high / low) ** rng.random())
    if rng.random() < 0.5 and high > 8:
        aligned = max(8, round(n / 8) * 8)
        n = aligned if bins[0][0] <= aligned <= bins[-1][1] else n
    n = max(1, min(n, int(most / (2.0 * M * K))))
    b, c = rng.choice(((ROW, ROW), (ROW, ROW), (COL, COL), (COL, COL), (COL, ROW), (ROW, COL)))
    return n, b, c


def build(spec: Spec, xp: Any, seed: int = 0) -> Format:
    """The matrix of a spec in CuPy's or numpy's memory, validated."""
    M, K, dtype = spec.M, spec.K, VALUE_TYPES[spec.dtype].numpy
    kind, params = by_name(spec.format), dict(spec.params)
    rng = xp.random.default_rng(seed)
    x = rng.standard_normal((M, K), dtype=np.float32).astype(dtype)
    a: Format
    if spec.format == "two-four":
        a = masks.prune_two_four(x)
    elif spec.format == "vector-nm":
        a = masks.prune_vector_nm(x, params["n"], params["m"], params["vector_length"])
    else:
        if spec.density < 1:
            high, wide = spec.together
            keep = rng.random((-(-M // high), -(-K // wide)), dtype=np.float32) < spec.density
            if spec.format == "dbsr":
                keep &= rng.random((keep.shape[0], 1), dtype=np.float32) < 0.5
            keep = xp.repeat(xp.repeat(keep, high, axis=0), wide, axis=1)[:M, :K]
            raw = bits(x)
            raw *= keep.astype(raw.dtype)
        a = kind.from_dense(x, **params)
    return a.ensure_valid()


def operand(xp: Any, rows: int, cols: int, layout: str, dtype: str) -> Array:
    """An array [rows, cols] of random numbers, row- or column-major."""
    shape = (rows, cols) if layout == ROW else (cols, rows)
    x = xp.random.default_rng(1).standard_normal(shape, dtype=np.float32).astype(VALUE_TYPES[dtype].numpy)
    return x if layout == ROW else x.T
