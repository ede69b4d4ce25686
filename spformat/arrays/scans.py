"""The scans that validators consist of. A scan raises an error for the first entry that breaks its rule.

Entries are compared, never subtracted, because int32 differences wrap. Ranges are checked with one unsigned comparison.
Arrays are scanned in chunks, so that temporaries need a few MB for any matrix. The offending entry is looked up only
after a scan has failed. The first argument is the format object, and arrays are given by name:
``pointer(f, "indptr", f.nnz)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..errors import IndexBoundsError, InvariantError, OrderError, PatternError, PointerError
from .dtypes import bits, nonzero_mask, value_type
from .library import Array, is_cupy, namespace, unsigned

CHUNK = 1 << 20
"""Elements that a scan on the host compares at a time, so that its temporaries stay in cache."""


def chunks(n: int, like: Array, step: int = CHUNK) -> Iterator[slice]:
    """Slices that cover 0 .. n-1. On a device it is one slice, because there launches matter more than memory."""
    step = max(1, n if is_cupy(like) else step)
    return (slice(i, min(i + step, n)) for i in range(0, n, step))


def fail(
    f: Any, error: type[InvariantError], array: str, index: Any, value: Any, expected: str, *, count: int | None = None,
    hint: str | None = None,
) -> None:  # fmt: skip
    """Raise ``error`` for the entry ``array[index]``, with the wording that all scans share."""
    place = ", ".join(str(i) for i in index) if isinstance(index, tuple) else str(index)
    more = f" ({count} such)" if count and count > 1 else ""
    raise error(
        f"{f.name}: {array}[{place}]: expected {expected}, got {value}{more}" + (f"; {hint}" if hint else ""),
        array=array, index=index, value=value, expected=expected, count=count, hint=hint,
    )  # fmt: skip


def first_true(mask: Array) -> tuple[int, int] | None:
    """(flat position of the first True, number of them), or None."""
    count = int(mask.sum())  # synchronize!
    if not count:
        return None
    return int(mask.reshape(-1).argmax()), count


def place(flat: int, shape: tuple[int, ...]) -> Any:
    """Flat position -> index tuple, or the int itself for one dimension."""
    if len(shape) == 1:
        return flat
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def pointer(f: Any, name: str, end: int) -> None:
    """Require p[0] = 0, p[-1] = end and p[i] <= p[i+1], in this order. Called before p is used to slice anything."""
    p = getattr(f, name)
    start, last = int(p[0]), int(p[-1])  # synchronize!
    if start != 0:
        fail(f, PointerError, name, 0, start, "0, the start")
    if last != end:
        fail(f, PointerError, name, p.size - 1, last, f"{end}, the number of items it points into")
    for s in chunks(p.size - 1, p):
        down = p[s.start + 1 : s.stop + 1] < p[s]
        offenders = first_true(down)
        if offenders:
            i = s.start + offenders[0] + 1
            fail(f, PointerError, name, i, int(p[i]), f">= {int(p[i - 1])}, the entry before it", count=offenders[1])


def strictly_increasing(f: Any, name: str, error: type[InvariantError] = OrderError) -> None:
    """Require a[i] < a[i+1] over the whole array."""
    a = getattr(f, name)
    for s in chunks(max(0, a.size - 1), a):
        offenders = first_true(a[s.start + 1 : s.stop + 1] <= a[s])
        if offenders:
            i = s.start + offenders[0] + 1
            fail(f, error, name, i, int(a[i]), f"> {int(a[i - 1])}, the entry before it", count=offenders[1])


def within(f: Any, name: str, bound: int, *, pad: bool = False, error: type[InvariantError] = IndexBoundsError) -> None:
    """Require 0 <= a < bound everywhere; with ``pad``, a = PAD is allowed, too. As unsigned, negatives are too
    large."""
    a = getattr(f, name)
    flat = unsigned(a).reshape(-1)
    one = flat.dtype.type(1)
    for s in chunks(flat.size, flat):
        part = flat[s] + one if pad else flat[s]  # PAD = -1 wraps to 0
        limit = bound + 1 if pad else bound
        if int(part.max()) < limit:  # synchronize!
            continue
        offenders = first_true(part >= limit)
        assert offenders is not None  # the maximum is over the limit
        i = s.start + offenders[0]
        expected = f"{'PAD or ' if pad else ''}an index in [0, {bound})"
        fail(f, error, name, place(i, a.shape), int(a.reshape(-1)[i]), expected, count=offenders[1])


def increasing_in_segments(
    f: Any, pointer_name: str, name: str, unsorted_hint: str | None = None, segments: str = "row"
) -> None:
    """Require strictly increasing entries inside each segment of a pointer, which must be valid. ``segments``: what a
    segment is called."""
    p, a = getattr(f, pointer_name), getattr(f, name)
    xp = namespace(a)
    for s in chunks(max(0, a.size - 1), a):
        at = xp.nonzero(a[s.start + 1 : s.stop + 1] <= a[s])[0] + (s.start + 1)  # synchronize!
        if at.size == 0:
            continue
        # An entry may be smaller than the one before it only where a segment starts.
        starts = p[xp.searchsorted(p, at.astype(p.dtype))] == at
        offenders = first_true(~starts)
        if offenders:
            i = int(at[offenders[0]])
            segment = int(xp.searchsorted(p, at[offenders[0] : offenders[0] + 1].astype(p.dtype), side="right")[0]) - 1
            got, before = int(a[i]), int(a[i - 1])
            what = "repeats" if got == before else "is smaller than"
            expected = f"> {before}, the entry before it in {segments} {segment} ({got} {what} it)"
            hint = unsorted_hint if got != before else None
            fail(f, OrderError, name, i, got, expected, count=offenders[1], hint=hint)


def negative_zero_free(f: Any, name: str) -> None:
    """Require that every zero of a value array is +0."""
    a = getattr(f, name)
    row = value_type(a.dtype)
    flat = bits(a).reshape(-1)
    negative = row.bits.type(~row.zero_mask & int(np.iinfo(row.bits).max))  # the sign alone
    for s in chunks(flat.size, flat) if negative else ():
        offenders = first_true(flat[s] == negative)
        if offenders:
            fail(
                f,
                PatternError,
                name,
                place(s.start + offenders[0], a.shape),
                "-0.0",
                "+0, as every zero",
                count=offenders[1],
            )


def zero_in(f: Any, name: str, part: Array, region: str, index_of: Callable[[Any], Any]) -> None:
    """Every value of ``part``, a cut of array ``name``, is zero; ``index_of`` maps its index tuple to the array's."""
    offenders = first_true(nonzero_mask(part)) if part.size else None
    if offenders:
        local = place(offenders[0], part.shape)
        value = part[local]
        value = (value.get() if is_cupy(value) else value).item()
        fail(f, IndexBoundsError, name, index_of(local), value, f"0 {region}", count=offenders[1])


def require_none(f: Any, bad: Array, name: str, expected: str, error: type[InvariantError], start: int = 0) -> None:
    """Raise for the first True of ``bad``; its positions are those of array ``name`` from ``start`` on along axis 0."""
    offenders = first_true(bad) if bad.size else None
    if offenders is None:
        return
    a = getattr(f, name)
    local = place(offenders[0], bad.shape)
    at = (start + local[0], *local[1:]) if isinstance(local, tuple) else start + local
    value = a[at]
    value = (value.get() if is_cupy(value) else value).item()
    fail(f, error, name, at, value, expected, count=offenders[1])


def same_as(f: Any, name: str, wanted: Array, why: str, error: type[InvariantError] = InvariantError) -> None:
    """Require that array ``name`` has exactly the bytes of ``wanted`` (same dtype and shape)."""
    a = getattr(f, name)
    raw = np.dtype(f"uint{8 * a.dtype.itemsize}")
    offenders = first_true(a.view(raw) != wanted.view(raw)) if a.size else None
    if offenders:
        at = place(offenders[0], a.shape)
        got, want = (v.get() if is_cupy(v) else v for v in (a[at], wanted[at]))
        fail(f, error, name, at, got.item(), f"{want.item()}, {why}", count=offenders[1])
