"""How kernels for few columns load B, straight from memory to registers.  In C++: include/spformat/few_columns.cuh."""

from __future__ import annotations

from ....arrays.library import ceil_div, power_of_two
from ....products.ideal import b_alignment
from ....products.problem import COL, LINE, Problem, itemsize

SINGLE, ALONG_K, ALONG_N = "SINGLE", "ALONG_K", "ALONG_N"
"""Element by element, several values of a column, several values of a row; names in C++ as well."""


def column_tiles(p: Problem, most: int) -> int:
    """Fragments of 8 columns of a tile that holds the columns of B, ``most`` columns at most: to the next multiple of 8
    where B is read along K, else to a power of two, as lanes that read along a row need it."""
    n = min(max(p.n, 8), most)
    return ceil_div(n, 8) if p.b_layout == COL or p.n == 1 else power_of_two(n) // 8


def way_of(size: int, several: int, columns: int, address: int, n: int, k_step: int, n_step: int) -> str:
    """How lanes may load a B of elements of ``size`` bytes.

    several: rows of B that a lane takes at once. columns: neighbouring columns of a lane. address: of B, modulo 16.
    n: columns of B, whose rows are ``k_step`` elements apart and whose columns ``n_step``.
    """
    if k_step == 1 and address % (size * several) == 0 and (n == 1 or n_step % several == 0):
        return ALONG_K
    along = min(columns, 16 // size)
    if n_step == 1 and along > 1 and address % (size * along) == 0 and k_step % along == 0:
        return ALONG_N
    return SINGLE


def expected_way(p: Problem, several: int, columns: int) -> str:
    """The same for a problem, if B starts on a 16-byte boundary."""
    size = itemsize(p.b_dtype)
    pitch = LINE if p.n == 1 else b_alignment(p) // size
    steps = (1, pitch) if p.n == 1 or p.b_layout == COL else (pitch, 1)
    return way_of(size, several, columns, 0, p.n, *steps)


def steps_of(b_col: bool, n: int, ldb: int) -> tuple[int, int]:
    """Elements between rows and between columns of B. A vector is contiguous along K in both layouts."""
    return (1, ldb) if b_col or (n == 1 and ldb == 1) else (ldb, 1)
