"""Rows of matrices put below each other, and taken out again, in the layout of their format.

vstack((a, b))          the rows of a, then those of b: numpy's name
row_range(w, 0, 64)     the rows 0 .. 63

Both cut the arrays where ``Format.row_layout`` says that the rows of a matrix end, so that values, padding and their
order stay as they are: ``vstack`` of all row ranges of a matrix is the matrix, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..arrays.library import Array, ceil_div, current_device, index_dtype, namespace
from ..errors import UsageError
from .base import Format, RowChunks
from .declare import arrays_counted_by, parse_rows

F = TypeVar("F", bound=Format)


def vstack(matrices: Sequence[F]) -> F:
    """The rows [M1 + M2 + .., K] of matrices [M1, K], [M2, K], .. of one format, as a new validated matrix.

    All matrices must have the same columns, params, dtype and device, and rows that the format can cut: a multiple of
    ``row_layout(params).rows`` (32 for two-four, the vector length, the height of blocks) in all but the last. Raises
    UsageError with everything that does not fit.
    """
    check_vstack(matrices)
    first = matrices[0]
    layout = _layout(first)
    parts = [a.ensure_valid().restored() for a in matrices]
    with current_device(parts[0].values):
        xp = namespace(parts[0].values)
        arrays: dict[str, Array] = {}
        for name in parts[0].arrays():
            pieces = [getattr(a, name) for a in parts]
            if name in layout.pointers:
                arrays[name] = _continued(xp, pieces, [_counted(a, name) for a in parts])
            else:
                whole = xp.concatenate([_words(x) for x in pieces], axis=layout.axis(name))
                arrays[name] = whole.view(pieces[0].dtype)
    shape = (sum(a.shape[0] for a in matrices), first.shape[1])
    return type(first).trusted(shape=shape, **first.params(), **arrays)


def check_vstack(matrices: Sequence[Format]) -> None:
    """UsageError, with every reason, for matrices that ``vstack`` does not put together. Contents do not matter."""
    if not isinstance(matrices, Sequence) or isinstance(matrices, str):
        raise UsageError(f"vstack: expected a list or tuple of matrices, got {type(matrices).__name__}")
    if not matrices:
        raise UsageError("vstack: expected one matrix or more, got none")
    other = next((i for i, a in enumerate(matrices) if not isinstance(a, Format)), None)
    if other is not None:
        kind = type(matrices[other]).__name__
        raise UsageError(f"vstack: matrix {other}: expected one of spformat, got {kind}; use convert(x, 'csr')")
    first = matrices[0]
    layout = _layout(first)
    problems = []
    for what, of in (("format", lambda a: a.name), ("columns", lambda a: a.shape[1]), ("params", lambda a: a.params()),
                     ("dtype", lambda a: str(a.dtype)), ("device", lambda a: a.device)):  # fmt: skip
        values = [of(a) for a in matrices]
        if any(v != values[0] for v in values):
            problems.append(f"{what}: expected one for all matrices, got {', '.join(map(str, values))}")
        if what == "format" and problems:
            break  # their params differ anyway
    uneven = [a.shape[0] for a in matrices[:-1] if a.shape[0] % layout.rows]
    if uneven:
        problems.append(f"rows: expected a multiple of {layout.rows} in all matrices but the last, got {uneven[0]}")
    if problems:
        raise UsageError(f"{first.name}: vstack: " + "; ".join(problems))


def row_range(matrix: F, first: int, last: int) -> F:
    """The rows first .. last-1 of a valid matrix; its arrays share the memory of the matrix where they can.

    UsageError for rows at which the format cannot cut.
    """
    layout, (M, K) = _layout(matrix), matrix.shape
    first, last = parse_rows(matrix.name, first, last)
    if not 0 <= first <= last <= M or first % layout.rows or (last % layout.rows and last != M):
        raise UsageError(
            f"{matrix.name}: rows: expected multiples of {layout.rows}, or the end, in 0 .. {M}, got {first} .. {last}"
        )
    a = matrix.ensure_valid().restored()
    begin, end, units = first // layout.rows, ceil_div(last, layout.rows), ceil_div(M, layout.rows)
    with current_device(a.values):
        xp = namespace(a.values)
        arrays: dict[str, Array] = {}
        for pointer in layout.pointers:
            offsets = getattr(a, pointer)
            lo, hi = int(offsets[begin]), int(offsets[end])  # synchronize!
            arrays[pointer] = (offsets[begin : end + 1] - offsets[begin]).astype(index_dtype(hi - lo))
            arrays |= {name: getattr(a, name)[lo:hi] for name in arrays_counted_by(type(a), pointer)}
        for name, whole in a.arrays().items():
            if name not in arrays:
                axis = layout.axis(name)
                step = whole.shape[axis] // max(1, units)
                cut = (slice(None),) * axis + (slice(begin * step, end * step),)
                arrays[name] = xp.ascontiguousarray(_words(whole)[cut]).view(whole.dtype)
    return type(a).trusted(shape=(last - first, K), **a.params(), **arrays)


def _layout(matrix: Format) -> RowChunks:
    if not isinstance(matrix, Format):
        kind = type(matrix).__name__
        raise UsageError(f"expected a matrix of spformat, got {kind}; use convert(x, 'csr')")
    layout = type(matrix).row_layout(matrix.params())
    if layout is None:
        params = "".join(f", {k}={v}" for k, v in matrix.params().items())
        raise UsageError(
            f"{matrix.name}{params}: its arrays do not follow from those of its rows, so rows cannot be put together "
            "or taken out; convert it to csr, bitmask, bsr or two-four"
        )
    return layout


def _words(a: Array) -> Array:
    """The same memory as unsigned integers, since libraries do not know every type of values."""
    return a.view(f"uint{8 * a.dtype.itemsize}")


def _counted(a: Format, pointer: str) -> int:
    """How many entries a pointer counts."""
    return int(getattr(a, arrays_counted_by(type(a), pointer)[0]).shape[0])


def _continued(xp: Any, pointers: Sequence[Array], counts: Sequence[int]) -> Array:
    """One pointer [n1 + n2 + .. + 1] that counts on from matrix to matrix."""
    dtype, start, pieces = index_dtype(sum(counts)), 0, []
    for at, (p, n) in enumerate(zip(pointers, counts, strict=True)):
        pieces.append((p if at == 0 else p[1:]).astype(dtype) + dtype.type(start))
        start += n
    return xp.concatenate(pieces)
