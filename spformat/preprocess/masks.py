"""Magnitude masks: the only place where values are lost.

A mask function takes w [M, K] (numpy, CuPy or Dense; any value type) and returns bool[M, K] in the same library, True
where the value stays. ``apply`` zeroes the other values, and ``error`` says what that changes. ``prune`` converts w to
a format in one step, and on a device writes no mask; ``prune_two_four`` and ``prune_vector_nm`` do so for one format.

Which mask is for which format:

    magnitude            csr, bitmask, ell-buckets, ...     magnitude_vector_nm  vector-nm
    magnitude_nm         two-four (n=2, m=4), vector-nm     magnitude_blocks     bsr, dbsr

The same w gives the same mask on host and device, bit for bit:

- Single values are ranked by their bits: without the sign, the bits of a float are an unsigned integer that grows
  with its magnitude, so no arithmetic is done in the value type.
- Norms of vectors and blocks are summed in float64 in a fixed order, row by row and then column by column. float64
  values are scaled by one power of two for the whole matrix, so that no sum overflows. Squares of values that are
  smaller than the largest magnitude times 3e-154 lose bits, and from 3e-162 on they may be 0: with "l2", vectors and
  blocks of such values rank as zeros do. "l1" tells magnitudes apart down to the largest times 1e-307.
- Of equal magnitudes the lowest index stays (row-major for the global masks). An n:m mask therefore keeps exactly n
  positions of every full window, zeros included, and these are the positions the formats fill up with.

At ragged edges the last window, vector or block is filled up with zeros, which are never kept.
NaN and infinities raise StructureError, unless ``nonfinite="keep"``: then they rank above all finite values, NaN first.
Memory beyond the result: a few MB, and for blocks and vectors 8 bytes each. On a device the masks are written by
kernels (edges to "dense:..-mask"); where there is no edge, the code here and in ``ranking`` runs there, too, and takes
a few hundred MB.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, overload

import numpy as np

from ..arrays.dtypes import bits, largest_finite, value_type
from ..arrays.library import Array, ceil_div, current_device, namespace
from ..arrays.magnitudes import magnitude_keys
from ..errors import StructureError, UsageError
from ..formats import edges, parse_spec
from ..formats.base import Format, checked_values
from ..formats.csr import CSR
from ..formats.dense import Dense
from ..formats.hooks import Blocks, Groups, Pattern, Vectors
from ..formats.two_four import TwoFour
from ..formats.vector_nm import VectorNM
from .pruning_error import PruningError, error
from .ranking import block_norms, keep_largest, keep_nm, power_of, row_chunks

__all__ = [
    "PruningError", "apply", "error", "magnitude", "magnitude_blocks", "magnitude_nm", "magnitude_vector_nm",
    "needs_sparsity", "of_pattern", "prune", "prune_two_four", "prune_vector_nm",
]  # fmt: skip

F = TypeVar("F", bound=Format)


def magnitude(w: Array | Dense, sparsity: float, *, nonfinite: str = "refuse") -> Array:
    """Unstructured pruning: drops the round(sparsity * M*K) smallest values of the whole matrix.

    UsageError for a sparsity outside 0 .. 1, StructureError for NaN or infinities.
    """
    x = _values(w, nonfinite)
    count = _kept(x.size, sparsity)
    mask = _by_edge(x, "dense:magnitude-mask", {"count": count}, nonfinite)
    if mask is not None:
        return mask
    _check_finite(x, nonfinite)
    return keep_largest(lambda s: magnitude_keys(x[s]), list(row_chunks(x)), x.shape, count, namespace(x))


def magnitude_nm(w: Array | Dense, n: int, m: int, *, nonfinite: str = "refuse") -> Array:
    """n:m along rows: of every m consecutive columns the n largest values stay. 1 <= n <= m <= 256.

    UsageError for n or m out of range, StructureError for NaN or infinities.
    """
    n, m = _checked_nm(n, m)
    x = _values(w, nonfinite)
    mask = _by_edge(x, "dense:nm-mask", {"n": n, "m": m}, nonfinite)
    if mask is not None:
        return mask
    _check_finite(x, nonfinite)
    mask = namespace(x).empty(x.shape, np.bool_)
    for s in row_chunks(x):
        mask[s] = keep_nm(magnitude_keys(x[s]), n, m)
    return mask


def magnitude_vector_nm(
    w: Array | Dense, n: int, m: int, vector_length: int, *, norm: str = "l2", nonfinite: str = "refuse"
) -> Array:
    """Vector n:m: of every m consecutive columns, a group of ``vector_length`` rows keeps n, by the norm of the vector.

    A vector is one column of the group; ``norm`` is "l2" or "l1". 1 <= n <= m <= 256, 1 <= vector_length <= 512.
    UsageError for a parameter out of range, StructureError for NaN or infinities. The pattern is NM-SpMM's.
    """
    n, m = _checked_nm(n, m)
    vector_length = _in_range("vector_length", vector_length, 512)
    _check_norm(norm)
    x = _values(w, nonfinite)
    params = {"n": n, "m": m, "vector_length": vector_length, "norm": norm}
    mask = _by_edge(x, "dense:vectors-mask", params, nonfinite)
    if mask is not None:
        return mask
    _check_finite(x, nonfinite)
    xp, power = namespace(x), power_of(x, norm)
    mask = xp.empty(x.shape, np.bool_)
    for s in row_chunks(x, vector_length):
        keep = keep_nm(magnitude_keys(block_norms(x[s], vector_length, 1, power)), n, m)
        mask[s] = xp.repeat(keep, vector_length, axis=0)[: s.stop - s.start]
    return mask


def magnitude_blocks(
    w: Array | Dense, blocksize: tuple[int, int], sparsity: float, *, norm: str = "l2", nonfinite: str = "refuse"
) -> Array:
    """Blocks of R x C: drops the round(sparsity * number of blocks) blocks of smallest norm ("l2" or "l1").

    UsageError for a blocksize outside 1 .. 1024 or a sparsity outside 0 .. 1, StructureError for NaN or infinities.
    """
    try:
        R, C = blocksize
    except (TypeError, ValueError):
        raise UsageError(f"blocksize: expected two ints, got {blocksize!r:.80}", value=blocksize) from None
    R, C = _in_range("blocksize[0]", R, 1024), _in_range("blocksize[1]", C, 1024)
    _check_norm(norm)
    x = _values(w, nonfinite)
    (M, K), xp = x.shape, namespace(x)
    count = _kept(ceil_div(M, R) * ceil_div(K, C), sparsity)
    mask = _by_edge(x, "dense:blocks-mask", {"blocksize": (R, C), "count": count, "norm": norm}, nonfinite)
    if mask is not None:
        return mask
    _check_finite(x, nonfinite)
    power = power_of(x, norm)
    norms = xp.empty((ceil_div(M, R), ceil_div(K, C)), np.float64)
    for s in row_chunks(x, R):
        norms[s.start // R : ceil_div(s.stop, R)] = block_norms(x[s], R, C, power)
    keep = keep_largest(lambda s: magnitude_keys(norms[s]), list(row_chunks(norms)), norms.shape, count, xp)
    return xp.ascontiguousarray(xp.repeat(xp.repeat(keep, R, axis=0)[:M], C, axis=1)[:, :K])


def needs_sparsity(pattern: Pattern) -> bool:
    """Whether a pattern leaves open how many values to prune. "n of every m" does not; blocks and single values do."""
    return not isinstance(pattern, Groups | Vectors)


def of_pattern(
    w: Array | Dense, pattern: Pattern, sparsity: float, *, norm: str = "l2", nonfinite: str = "refuse"
) -> Array:
    """The mask for a pattern (``Format.pattern``). sparsity: the share of values or blocks to drop, if it is needed;
    norm: of vectors and blocks.

    UsageError for a parameter out of range, StructureError for NaN or infinities.
    """
    match pattern:
        case Groups(n, m):
            return magnitude_nm(w, n, m, nonfinite=nonfinite)
        case Vectors(n, m, length):
            return magnitude_vector_nm(w, n, m, length, norm=norm, nonfinite=nonfinite)
        case Blocks(blocksize):
            return magnitude_blocks(w, blocksize, sparsity, norm=norm, nonfinite=nonfinite)
        case None:
            return magnitude(w, sparsity, nonfinite=nonfinite)


@overload
def apply(w: Dense, mask: Array) -> Dense: ...
@overload
def apply(w: Array, mask: Array) -> Array: ...
def apply(w: Array | Dense, mask: Array) -> Array | Dense:
    """A copy of w with +0 where ``mask`` (bool [M, K], same library) is False; kept values keep their bits.

    The result for a Dense is a Dense. UsageError for a mask of another shape or dtype.
    """
    x = checked_values(w.data if isinstance(w, Dense) else w, "apply")
    xp = namespace(x)
    if namespace(mask) is not xp or mask.dtype != np.bool_ or mask.shape != x.shape:
        expected = f"bool of shape {x.shape} in {xp.__name__}"
        got = f"{mask.dtype} of shape {mask.shape} in {namespace(mask).__name__}"
        raise UsageError(f"apply: mask: expected {expected}, got {got}")
    raw = bits(x)
    with current_device(x):
        out = xp.where(mask, raw, raw.dtype.type(0)).view(x.dtype)
    return Dense.trusted(shape=x.shape, data=out) if isinstance(w, Dense) else out


def prune(
    w: Array | Dense,
    target: str | type[Format],
    *,
    sparsity: float | None = None,
    norm: str = "l2",
    nonfinite: str = "refuse",
    **params: Any,
) -> Format:
    """w [M, K] pruned to the pattern of a format, and in that format.

    target and params: as for ``convert``, without "auto". sparsity: the share of values or blocks to drop, for formats
    whose pattern leaves it open (``needs_sparsity``). norm: "l2" or "l1", of blocks and vectors.

    The bytes of ``convert(apply(w, mask), target)`` with the mask of the pattern (``of_pattern``). On a device, w is
    read to select and once more to convert, for csr, bitmask, bsr, dbsr, two-four and vector-nm, and neither a mask nor
    the pruned array is written; other formats without a pattern of their own are converted from that CSR.
    UsageError for a parameter out of range or a missing sparsity, StructureError for values that the format does not
    take, and for NaN or infinities unless ``nonfinite="keep"``.
    """
    x = checked_values(w.data if isinstance(w, Dense) else w, "prune")
    fmt, given = (target, params) if isinstance(target, type) else parse_spec(str(target))
    given = fmt.resolve_params({**given, **params})
    fmt.accepts(x.dtype)
    _check_nonfinite(nonfinite)
    _check_norm(norm)
    pattern = fmt.pattern(given)
    if sparsity is None and needs_sparsity(pattern):
        raise UsageError(f"prune: expected sparsity=.., the share of values or blocks to drop, to prune to {fmt.name}")
    match pattern:
        case Groups() if fmt is TwoFour:
            return prune_two_four(x, nonfinite=nonfinite, **given)
        case Vectors() if fmt is VectorNM:
            return prune_vector_nm(x, norm=norm, nonfinite=nonfinite, **given)
    direct = _pruned_by_edge(x, fmt, given, pattern, sparsity or 0.0, norm, nonfinite)
    if direct is not None:
        return direct
    return fmt.from_dense(apply(x, of_pattern(x, pattern, sparsity or 0.0, norm=norm, nonfinite=nonfinite)), **given)


def _pruned_by_edge(
    x: Array, fmt: type[Format], given: dict[str, Any], pattern: Pattern, sparsity: float, norm: str, nonfinite: str
) -> Format | None:
    """``prune`` by an edge to the format, or by one to CSR where single values are dropped; None without such edges."""
    count = {"count": _kept(_items(x.shape, pattern), sparsity)}
    ranked: dict[str, Any] = {"norm": norm} if isinstance(pattern, Blocks) else {}
    pruned: tuple[Format, int] | None = edges.take(edges.DENSE, f"{fmt.name}:pruned", x, given | count | ranked, x)
    if pruned is not None:
        return _without_nonfinite(x, pruned, nonfinite)
    if pattern is not None or fmt is Dense:
        return None
    pruned = edges.take(edges.DENSE, f"{CSR.name}:pruned", x, count, x)
    return None if pruned is None else fmt.from_csr(_without_nonfinite(x, pruned, nonfinite), **given)


def _items(shape: tuple[int, ...], pattern: Pattern) -> int:
    """Of how many values or blocks of a matrix some are dropped; any number where the pattern says how many."""
    R, C = pattern.blocksize if isinstance(pattern, Blocks) else (1, 1)
    return ceil_div(shape[0], R) * ceil_div(shape[1], C)


def prune_two_four(w: Array | Dense, *, meta_order: str = "ldmatrix", nonfinite: str = "refuse") -> TwoFour:
    """w [M, K] in format two-four with the two largest of every four columns kept.

    The bytes of ``TwoFour.from_dense(apply(w, magnitude_nm(w, 2, 4)))``; large matrices, and those on a device, go
    through compiled code that reads w once. StructureError for other value types, and for NaN or infinities unless
    ``nonfinite="keep"``.
    """
    x = checked_values(w.data if isinstance(w, Dense) else w, "prune")
    order = TwoFour.resolve_params({"meta_order": meta_order})["meta_order"]
    TwoFour.accepts(x.dtype)
    _check_nonfinite(nonfinite)
    pruned: tuple[TwoFour, int] | None = (
        edges.take(edges.DENSE, "two-four:pruned", x, {"meta_order": order} | _uncounted(nonfinite), x)
        if x.dtype.itemsize == 2
        else None
    )
    if pruned is None:
        return TwoFour.from_dense(apply(x, magnitude_nm(x, 2, 4, nonfinite=nonfinite)), meta_order=order)
    return _without_nonfinite(x, pruned, nonfinite)


def prune_vector_nm(
    w: Array | Dense,
    n: int,
    m: int,
    vector_length: int,
    *,
    tile_rows: int = 0,
    tile_cols: int = 0,
    norm: str = "l2",
    nonfinite: str = "refuse",
) -> VectorNM:
    """w [M, K] in format vector-nm with the n vectors of largest norm kept in every window of m columns.

    The bytes of ``VectorNM.from_dense(apply(w, magnitude_vector_nm(w, n, m, vector_length)), ..)``; on a device,
    float16, bfloat16 and float32 are read once. UsageError for a parameter out of range, StructureError for NaN or
    infinities unless ``nonfinite="keep"``.
    """
    x = checked_values(w.data if isinstance(w, Dense) else w, "prune")
    given = {"n": n, "m": m, "vector_length": vector_length, "tile_rows": tile_rows, "tile_cols": tile_cols}
    params = VectorNM.resolve_params(given)
    _check_nonfinite(nonfinite)
    _check_norm(norm)
    ranked = params | {"norm": norm} | _uncounted(nonfinite)
    pruned: tuple[VectorNM, int] | None = edges.take(edges.DENSE, "vector-nm:pruned", x, ranked, x)
    if pruned is None:
        mask = magnitude_vector_nm(x, n, m, vector_length, norm=norm, nonfinite=nonfinite)
        return VectorNM.from_dense(apply(x, mask), **params)
    return _without_nonfinite(x, pruned, nonfinite)


def _without_nonfinite(x: Array, pruned: tuple[F, int], nonfinite: str) -> F:
    """The matrix of ``pruned``. pruned: (matrix, how many values of x are not finite).

    Raises StructureError if there are such values and ``nonfinite`` is "refuse".
    """
    matrix, count = pruned
    if count and nonfinite == "refuse":
        _refuse_nonfinite(x)  # scans x again, to name the first
    return matrix


# ----------------------------------------------------------------------------------------------------------- border


def _values(w: Array | Dense, nonfinite: str) -> Array:
    x = checked_values(w.data if isinstance(w, Dense) else w, "mask")
    _check_nonfinite(nonfinite)
    return x


def _check_finite(x: Array, nonfinite: str) -> None:
    if nonfinite == "refuse":
        _refuse_nonfinite(x)


def _by_edge(x: Array, target: str, params: dict[str, Any], nonfinite: str) -> Array | None:
    """The mask from an edge to ``target``, which also counts the values that are not finite; None if there is none."""
    masked: tuple[Array, int] | None = edges.take(edges.DENSE, target, x, params | _uncounted(nonfinite), x)
    if masked is None:
        return None
    if masked[1]:
        _check_finite(x, nonfinite)  # scans x again, to name the first
    return masked[0]


def _uncounted(nonfinite: str) -> dict[str, Any]:
    """The param that lets an edge leave out how many values are not finite, for which it waits."""
    return {"uncounted": True} if nonfinite == "keep" else {}


def _check_norm(norm: str) -> None:
    if norm not in ("l1", "l2"):
        raise UsageError(f"norm: expected 'l1' or 'l2', got {norm!r}", value=norm)


def _check_nonfinite(nonfinite: str) -> None:
    if nonfinite not in ("refuse", "keep"):
        raise UsageError(f"nonfinite: expected 'refuse' or 'keep', got {nonfinite!r}", value=nonfinite)


def _refuse_nonfinite(x: Array) -> None:
    limit = value_type(x.dtype).bits.type(largest_finite(x.dtype))
    count, first = 0, None
    for s in row_chunks(x):
        bad = magnitude_keys(x[s]) > limit
        here = int(bad.sum())  # synchronize!
        if here and first is None:
            row, col = divmod(int(bad.reshape(-1).argmax()), x.shape[1])
            first = (s.start + row, col)
        count += here
    if first is not None:
        first_value = str(x[first])
        raise StructureError(
            f"mask: expected finite values, got {count} NaN or infinite, the first at row {first[0]}, column "
            f'{first[1]} ({first_value}); nonfinite="keep" (--nonfinite keep) ranks them as largest',
            unit="value", count=count, first=first, found=first_value,
        )  # fmt: skip


def _kept(total: int, sparsity: float) -> int:
    try:
        share = float(sparsity.__float__())  # numpy would round the product to the type of a float16 or float32
    except (AttributeError, TypeError):  # None, text
        share = math.nan
    if not 0 <= share <= 1 or isinstance(sparsity, (bool, np.bool_)):
        raise UsageError(f"sparsity: expected a number in 0 .. 1, got {sparsity!r}", value=sparsity)
    return total - round(share * total)


def _checked_nm(n: int, m: int) -> tuple[int, int]:
    m = _in_range("m", m, 256)
    return _in_range("n", n, m), m


def _in_range(name: str, value: int, high: int) -> int:
    """``value`` as an int of Python: sizes that are computed from one of numpy would overflow its few bits."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= high:
        raise UsageError(f"{name}: expected an int in 1 .. {high}, got {value!r}", value=value)
    return int(value)
