"""Random products, and the law that every kernel gives those of numpy.

A case is drawn from a seed and a kernel: a matrix of one of the kernel's formats, shapes that fill no tile, both layouts of B and
C, lines with gaps, addresses off a boundary, types, alpha, beta and bias, and one of the kernel's tiles. Integers must be exact;
other values stay below a bound that grows with K. C is filled with NaN (where it is not read), lies between guard bytes, and
the gaps between lines of B are NaN. The second run of a plan repeats the bytes of the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from conversions import drawn_params, drawn_places
from strict_cupy import Array, Device

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.backends.cuda.runtime import row_tiles
from spformat.formats.base import Format
from spformat.formats.csr import CSR
from spformat.products import roofline
from spformat.products.kernel import Kernel
from spformat.products.problem import Operand, Problem, result_dtype
from spformat.products.tiles import forced

from .stand_in import guarded

DTYPES = ("float16", "bfloat16", "float32", "float64")
SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 70, 97, 130, 200)
DEEP = (257, 390, 515, 1030)
"""What sums may run over, too: copies for later steps then pass through all of a kernel's stages several times."""
COLUMNS = (1, 2, 3, 5, 8, 13, 16, 17, 24, 33, 64, 65, 72, 130)
ATTEMPTS = 400
"""Draws until a kernel takes one."""
FRONT, GUARD = 64, 0xA5
"""Guard elements before C and behind it, and the byte that they are filled with."""


@dataclass(frozen=True)
class Case:
    """One product. Lines of B and C are ``gaps`` elements apart and start ``shifts`` elements behind a boundary."""

    seed: int
    operation: str
    a: Format
    x: np.ndarray[Any, Any] = field(repr=False)
    n: int
    layouts: tuple[str, str]
    out_dtype: str
    gaps: tuple[int, int]
    shifts: tuple[int, int]
    integers: bool
    affine: tuple[float, float, bool] | None
    """alpha, beta, and whether there is a bias."""
    tile: str
    processors: int
    """Multiprocessors of the device: from their number launchers decide how to cut the work."""


def drawn(kernel: Kernel, seed: int, sm: int, dtypes: tuple[str, ...] = DTYPES, largest: int = 1030) -> Case | None:
    """Case number ``seed`` of a kernel; None if no draw is one that it takes."""
    rng = np.random.default_rng([seed, *kernel.name.encode()])
    takes = sorted(kernel.takes)
    for _ in range(ATTEMPTS):
        operation, name = takes[rng.integers(len(takes))]
        fmt, dtype = sf.by_name(name), str(rng.choice(dtypes))
        if dtype not in fmt.value_dtypes:
            continue
        params = {"rules": drawn_rules(rng)} if name == "sum" else drawn_params(rng, name)
        M, K = (int(s) for s in rng.choice([s for s in SIZES if s <= largest], 2))
        if rng.random() < 0.4 and largest >= max(DEEP):
            K = int(rng.choice(DEEP))
        M, K = (K, M) if operation == "spmm_transposed" else (M, K)
        n, layouts = int(rng.choice([n for n in COLUMNS if n <= largest])), ("row", "col")
        layouts = str(rng.choice(layouts)), str(rng.choice(layouts))
        out_dtype = str(rng.choice([result_dtype(dtype, dtype), "float64" if dtype == "float64" else "float32"]))
        affine = (float(rng.choice((1, 0.5, -2, 0))), float(rng.choice((0, 0, 1, -0.5))), bool(rng.random() < 0.5))
        integers = bool(rng.random() < 0.7)
        x = _values(rng, (M, K), dtype, integers)
        x[~drawn_places(rng, name, params, (M, K))] = 0
        try:
            a = fmt.from_csr(CSR.from_dense(x).validate(), **params).validate()
        except sf.errors.SpformatError:
            continue
        rows, inner = (K, M) if operation == "spmm_transposed" else (M, K)
        lines = [n if layout == "row" else extent for layout, extent in zip(layouts, (inner, rows), strict=True)]
        gaps, shifts = zip(*(_lines(rng, line) for line in lines), strict=True)
        case = Case(
            seed, operation, a, x, n, layouts, out_dtype,
            gaps=gaps, shifts=shifts,
            integers=integers, affine=affine if rng.random() < 0.3 else None, tile="",
            processors=int(rng.choice((1, 3, 16, 132))),
        )  # fmt: skip
        problem = problem_of(case, sm)
        if refusals := kernel.unsupported(problem):
            if any(r.startswith("needs sm_") for r in refusals):
                return None
            continue
        with device(case, sm):
            tiles = [str(t) for t in getattr(kernel, "options", lambda p: [])(problem)]
        return case if not tiles or rng.random() < 0.3 else _with_tile(case, str(rng.choice(tiles)))
    return None


def drawn_rules(rng: np.random.Generator) -> tuple[str, ...]:
    """Rules of the parts of a sum: blocks, 2:4 or none, and one or two formats for the rest."""
    R, C = rng.choice((1, 5, 8, 16, 24, 32, 64, 96, 130), 2)
    blocks = tuple(f"{f}:blocksize={R}x{C},density>=0.4" for f in ("bsr", "dbsr"))
    structured = str(rng.choice((*blocks, "two-four", "ell-buckets:widths=2", "csr:row_length>=9")))
    rest = ("ell-buckets:widths=3x16,row_length>=3", "ell-buckets:widths=8", "csr")
    return (structured, *rest[int(rng.choice((0, 1, 2, 2))) :][:: int(rng.choice((1, 2)))])


def _lines(rng: np.random.Generator, line: int) -> tuple[int, int]:
    """Elements between lines, and before the first one; half of the time whole lines of 16 bytes."""
    if rng.random() < 0.5:
        return -line % 8 + int(rng.choice((0, 8))), int(rng.choice((0, 0, 8)))
    return int(rng.choice((0, 1, 3, 8))), int(rng.choice((0, 0, 1)))


def _with_tile(case: Case, tile: str) -> Case:
    return replace(case, tile=tile)


@contextlib.contextmanager
def device(case: Case, sm: int) -> Iterator[None]:
    """Inside, the emulated device has the multiprocessors of the case."""
    before = Device.attributes
    Device.attributes = MappingProxyType(before | {"MultiProcessorCount": case.processors})
    row_tiles.device_of.cache_clear()
    try:
        with roofline.on(replace(roofline.device_of(problem_of(case, sm)), processors=case.processors)):
            yield
    finally:
        Device.attributes = before


def problem_of(case: Case, sm: int) -> Problem:
    """The problem without alpha, beta and bias, as the kernel is asked."""
    f = case.a
    return Problem.product(
        f.name, tuple(f.params().items()), *f.shape, case.n, f.stored, f.dtype.name, f.dtype.name, case.out_dtype,
        *case.layouts, device="cuda", sm=sm, operation=case.operation,
        parts=Operand.of(f, "cuda").parts,
    )  # fmt: skip


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, integers: bool) -> np.ndarray[Any, Any]:
    x = rng.choice([-3, -2, -1, 1, 2, 3], shape) if integers else rng.standard_normal(shape)
    return x.astype(VALUE_TYPES[dtype].numpy)


class Placed:
    """A matrix on the device between bytes that are known; ``behind``: elements after its last one."""

    def __init__(
        self, shape: tuple[int, int], dtype: Any, layout: str, gap: int, first: int, behind: int, fill: int
    ) -> None:
        kind, (lines, line) = np.dtype(dtype), shape if layout == "row" else shape[::-1]
        length = (lines - 1) * (line + gap) + line if lines and line else 0
        self._raw = guarded((first + length + behind) * kind.itemsize, np.uint8, fill).host
        flat = self._raw.view(kind)[first : first + length]
        steps = ((line + gap) * kind.itemsize, kind.itemsize)
        host = np.lib.stride_tricks.as_strided(flat, shape, steps if layout == "row" else steps[::-1], writeable=True)
        self.array, self._fill = Array(host), fill

    def intact(self) -> bool:
        """Whether nothing but the matrix was written. Afterwards the matrix is lost."""
        self.array.host[...] = np.frombuffer(bytes([self._fill]) * 8, self.array.dtype, 1)
        return bool((self._raw == self._fill).all())


def differences(case: Case, kernel: Kernel, sm: int) -> Iterator[str]:
    """What a kernel computes and numpy does not, in words."""
    rng = np.random.default_rng([case.seed, 1])
    dtype = case.a.dtype.name
    rows, inner = case.x.shape[:: -1 if case.operation == "spmm_transposed" else 1]
    A = case.x.astype(np.float64).T if case.operation == "spmm_transposed" else case.x.astype(np.float64)
    b = Placed((inner, case.n), case.a.dtype, case.layouts[0], case.gaps[0], case.shifts[0], 0, 0xFF)
    B = _values(rng, (inner, case.n), dtype, case.integers)
    b.array.host[...] = B
    alpha, beta, biased = case.affine or (1.0, 0.0, False)
    old = _values(rng, (rows, case.n), case.out_dtype, True)
    bias = _values(rng, (rows,), case.out_dtype, True)
    wanted = alpha * (A @ B.astype(np.float64))
    wanted += (beta * old if beta else 0) + (bias[:, None] if biased else 0)
    options: dict[str, Any] = {}
    if case.affine:
        import cupy

        options = {"alpha": alpha, "beta": beta, "bias": cupy.asarray(bias) if biased else None}
    there: Any = case.a.to("cuda")
    there = there.T if case.operation == "spmm_transposed" else there
    out_type = VALUE_TYPES[case.out_dtype].numpy
    first = None
    with device(case, sm), forced(kernel.name, case.tile) if case.tile else contextlib.nullcontext():
        for _ in range(4 if case.seed % 5 == 0 else 2):  # the third run of several launches is a graph
            c = Placed(
                (rows, case.n),
                out_type,
                case.layouts[1],
                case.gaps[1],
                FRONT + case.shifts[1],
                FRONT * (case.seed % 2),
                GUARD,
            )
            c.array.host[...] = old if beta else np.nan
            sf.spmm(there, b.array, c.array, kernel.name, **options)
            got = c.array.host.copy()
            if not c.intact():
                yield "writes outside of C"
            if first is not None and got.tobytes() != first.tobytes():
                yield "another run gives other bytes"
            if first is None and (
                text := _difference(case, got, wanted, np.abs(A) @ np.abs(B.astype(np.float64)), kernel)
            ):
                yield text
            first = got


def _difference(case: Case, got: Any, wanted: Any, magnitude: Any, kernel: Kernel) -> str:
    """Exact for integers, else within the bound of sums in the type that the kernel adds in."""
    unit = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[case.out_dtype]
    sums = 2.0**-53 if case.a.dtype.name == "float64" else 2.0**-24
    got64 = got.astype(np.float64)
    if case.integers:
        bad = got64 != wanted.astype(got.dtype).astype(np.float64)
    else:
        alpha = abs(case.affine[0]) if case.affine else 1.0
        bound = 2 * unit * np.abs(wanted) + 2.0**-24 * (case.out_dtype == "float16")
        bound += (
            alpha * magnitude * (2 * (case.x.size and -(-max(case.x.shape) // 16) + 1) * sums + kernel.product_error)
        )
        bound += 8 * sums * (np.abs(wanted) + alpha * magnitude + 8) * (case.affine is not None)
        bad = ~(np.abs(got64 - wanted) <= bound)
    places = np.argwhere(bad)
    if not len(places):
        return ""
    first = tuple(places[0].tolist())
    return f"C{first}: expected {wanted[first]!r}, got {got64[first]!r}; {len(places)} of {bad.size} differ"
