"""Every scan: values at its bounds, the message about the first offender, and the same answer for every chunk size."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spformat.arrays import scans
from spformat.errors import InvariantError, OrderError, PatternError, SpformatError

Act = Callable[[Any], None]


def of(**arrays: Any) -> Any:
    """A stand-in for a format object: a name and arrays."""
    return SimpleNamespace(
        name="f", **{k: v if isinstance(v, np.ndarray) else np.array(v, np.int32) for k, v in arrays.items()}
    )


def pointer(end: int) -> Act:
    return lambda f: scans.pointer(f, "p", end)


def within(bound: int, **options: Any) -> Act:
    return lambda f: scans.within(f, "a", bound, **options)


def increasing(**options: Any) -> Act:
    return lambda f: scans.strictly_increasing(f, "a", **options)


def segments(hint: str | None = None) -> Act:
    return lambda f: scans.increasing_in_segments(f, "p", "a", hint)


def positive(f: Any) -> None:
    scans.negative_zero_free(f, "a")


HALF, BRAIN, TINY = np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
MOST, LEAST = 2**31 - 1, -(2**31)

# arrays, scan, (class, message after "f: ", index, value, count)
BAD: dict[str, tuple[dict[str, Any], Act, tuple[str, str, Any, Any, int | None]]] = {
    "pointer, start": ({"p": [1, 2]}, pointer(2), ("PointerError", "p[0]: expected 0, the start, got 1", 0, 1, None)),
    "pointer, end": (
        {"p": [0, 1, 3]}, pointer(2),
        ("PointerError", "p[2]: expected 2, the number of items it points into, got 3", 2, 3, None),
    ),
    "pointer, end first": ({"p": [0, 9, 1]}, pointer(2), ("PointerError", "", 2, 1, None)),
    "pointer, down": (
        {"p": [0, 3, 2, 2, 1, 4]}, pointer(4),
        ("PointerError", "p[2]: expected >= 3, the entry before it, got 2 (2 such)", 2, 2, 2),
    ),
    "pointer, the last step": (
        {"p": [0, 1, 2, 5, 4]}, pointer(4),
        ("PointerError", "p[4]: expected >= 5, the entry before it, got 4", 4, 4, 1),
    ),
    "pointer, wrapped": (  # differences of int32 would all be positive
        {"p": [0, MOST, LEAST, -1, 4]}, pointer(4),
        ("PointerError", f"p[2]: expected >= {MOST}, the entry before it, got {LEAST}", 2, LEAST, 1),
    ),
    "within, above": (
        {"a": [0, 5, 4]}, within(5), ("IndexBoundsError", "a[1]: expected an index in [0, 5), got 5", 1, 5, 1),
    ),
    "within, negative": (
        {"a": [0, 1, 2, 3, -1, -2]}, within(5),
        ("IndexBoundsError", "a[4]: expected an index in [0, 5), got -1 (2 such)", 4, -1, 2),
    ),
    "within, nothing fits": (
        {"a": [0]}, within(0), ("IndexBoundsError", "a[0]: expected an index in [0, 0), got 0", 0, 0, 1),
    ),
    "within, PAD": (
        {"a": [-1, 4, -2]}, within(5, pad=True),
        ("IndexBoundsError", "a[2]: expected PAD or an index in [0, 5), got -2", 2, -2, 1),
    ),
    "within, PAD above": (
        {"a": [-1, 5, 4]}, within(5, pad=True, error=PatternError),
        ("PatternError", "a[1]: expected PAD or an index in [0, 5), got 5", 1, 5, 1),
    ),
    "within, 2-D": (
        {"a": [[0, 1], [7, 1], [8, 9]]}, within(7),
        ("IndexBoundsError", "a[1, 0]: expected an index in [0, 7), got 7 (3 such)", (1, 0), 7, 3),
    ),
    "increasing": (
        {"a": [1, 2, 2, 5, 4]}, increasing(),
        ("OrderError", "a[2]: expected > 2, the entry before it, got 2 (2 such)", 2, 2, 2),
    ),
    "increasing, the last step": (
        {"a": [1, 2, 3, 4, 0]}, increasing(error=PatternError),
        ("PatternError", "a[4]: expected > 4, the entry before it, got 0", 4, 0, 1),
    ),
    "segments, repeated": (
        {"p": [0, 2, 5], "a": [3, 4, 1, 2, 2]}, segments("sort it"),
        ("OrderError", "a[4]: expected > 2, the entry before it in row 1 (2 repeats it), got 2", 4, 2, 1),
    ),
    "segments, smaller": (
        {"p": [0, 0, 2, 5, 5], "a": [3, 1, 1, 4, 0]}, segments("sort it"),
        ("OrderError",
         "a[1]: expected > 3, the entry before it in row 1 (1 is smaller than it), got 1 (2 such); sort it", 1, 1, 2),
    ),
    "segments, no hint": (
        {"p": [0, 3], "a": [0, 2, 1]}, segments(),
        ("OrderError", "a[2]: expected > 2, the entry before it in row 0 (1 is smaller than it), got 1", 2, 1, 1),
    ),
    "segments, after empty rows": (
        {"p": [0, 1, 1, 1, 4], "a": [9, 0, 5, 5]}, segments(),
        ("OrderError", "a[3]: expected > 5, the entry before it in row 3 (5 repeats it), got 5", 3, 5, 1),
    ),
    "-0": (
        {"a": np.array([0, 1, -0.0, -1, -0.0], HALF)}, positive,
        ("PatternError", "a[2]: expected +0, as every zero, got -0.0 (2 such)", 2, "-0.0", 2),
    ),
    "-0, bfloat16": (
        {"a": np.array([[0, 1], [-1, -0.0]], BRAIN)}, positive,
        ("PatternError", "a[1, 1]: expected +0, as every zero, got -0.0", (1, 1), "-0.0", 1),
    ),
    "-0, eight bits": ({"a": np.array([1, -0.0], TINY)}, positive, ("PatternError", "", 1, "-0.0", 1)),
    "zero in": (
        {"a": np.array([[1, 2], [3, 4]], HALF)},
        lambda f: scans.zero_in(f, "a", f.a[1:], "in rows >= 1", lambda i: (i[0] + 1, i[1])),
        ("IndexBoundsError", "a[1, 0]: expected 0 in rows >= 1, got 3.0 (2 such)", (1, 0), 3.0, 2),
    ),
    "none": (
        {"a": [7, 8, 9]},
        lambda f: scans.require_none(f, np.array([False, True]), "a", "less", PatternError, 1),
        ("PatternError", "a[2]: expected less, got 9", 2, 9, 1),
    ),
    "none, 2-D": (
        {"a": [[7, 8], [9, 6]]},
        lambda f: scans.require_none(f, np.array([[False, True], [True, True]]), "a", "less", OrderError),
        ("OrderError", "a[0, 1]: expected less, got 8 (3 such)", (0, 1), 8, 3),
    ),
    "none, 2-D, further on": (
        {"a": [[7, 8], [9, 6]]},
        lambda f: scans.require_none(f, np.array([[False, True]]), "a", "less", OrderError, 1),
        ("OrderError", "a[1, 1]: expected less, got 6", (1, 1), 6, 1),
    ),
    "same": (
        {"a": [1, 2, 3]}, lambda f: scans.same_as(f, "a", np.array([1, 0, 0], np.int32), "as it was"),
        ("InvariantError", "a[1]: expected 0, as it was, got 2 (2 such)", 1, 2, 2),
    ),
    "same, by bits": (
        {"a": np.array([0, -0.0], HALF)}, lambda f: scans.same_as(f, "a", np.zeros(2, HALF), "so", PatternError),
        ("PatternError", "a[1]: expected 0.0, so, got -0.0", 1, 0.0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 20])
@pytest.mark.parametrize("case", BAD)
def test_the_first_offender(monkeypatch: pytest.MonkeyPatch, case: str, chunk: int) -> None:
    arrays, act, (kind, message, index, value, count) = BAD[case]
    monkeypatch.setattr(scans.chunks, "__defaults__", (chunk,))
    with pytest.raises(SpformatError) as caught:
        act(of(**arrays))
    e = caught.value
    assert (type(e).__name__, e.index, e.value) == (kind, index, value)
    assert e.array == ("p" if "pointer" in case else "a")
    if chunk > 3:
        assert message in ("", str(e).removeprefix("f: "))
        assert e.count == count
    else:  # the count is that of the chunk with the first offender
        assert not message or str(e).removeprefix("f: ").split(" (")[0] == message.split(" (")[0]
    assert str(e).startswith(f"f: {e.array}[")
    assert f"expected {e.expected}, got {e.value}" in str(e)
    assert e.hint == ("sort it" if case == "segments, smaller" else None)


GOOD: dict[str, tuple[dict[str, Any], Act]] = {
    "pointer": ({"p": [0, 0, 2, 2, 4, 4]}, pointer(4)),
    "pointer of nothing": ({"p": [0]}, pointer(0)),
    "within": ({"a": [0, 4, 0, 4, 3]}, within(5)),
    "within, PAD": ({"a": [-1, 4, -1, 0]}, within(5, pad=True)),
    "within, nothing": ({"a": []}, within(0)),
    "within, all of a byte": ({"a": np.arange(256, dtype=np.uint8)}, within(256)),
    "within, 2-D": ({"a": [[0, 1], [2, 3]]}, within(4)),
    "increasing": ({"a": [0, 1, 5, 6, 7]}, increasing()),
    "increasing, one": ({"a": [3]}, increasing()),
    "increasing, none": ({"a": []}, increasing()),
    "segments": ({"p": [0, 2, 2, 3, 5], "a": [7, 8, 1, 0, 1]}, segments()),
    "segments, all alone": ({"p": [0, 1, 2, 3], "a": [2, 1, 0]}, segments()),
    "segments, none": ({"p": [0, 0], "a": []}, segments()),
    "no -0": ({"a": np.array([0, 1, -1, np.nan, -np.inf], HALF)}, positive),
    "no -0, integers": ({"a": np.array([0, -128], np.int8)}, positive),
    "zero in": (
        {"a": np.array([1, 0, -0.0], HALF)}, lambda f: scans.zero_in(f, "a", f.a[1:], "", lambda i: i),
    ),
    "zero in nothing": ({"a": np.zeros((0, 2), HALF)}, lambda f: scans.zero_in(f, "a", f.a, "", lambda i: i)),
    "none": ({"a": [1]}, lambda f: scans.require_none(f, np.array([False]), "a", "", OrderError)),
    "none of nothing": ({"a": []}, lambda f: scans.require_none(f, np.zeros(0, bool), "a", "", OrderError)),
    "same": ({"a": [1, 2]}, lambda f: scans.same_as(f, "a", np.array([1, 2], np.int32), "")),
    "same, NaN": ({"a": np.array([np.nan], HALF)}, lambda f: scans.same_as(f, "a", np.array([np.nan], HALF), "")),
    "same, nothing": ({"a": []}, lambda f: scans.same_as(f, "a", np.zeros(0, np.int32), "")),
}  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 20])
@pytest.mark.parametrize("case", GOOD)
def test_what_is_sound_passes(monkeypatch: pytest.MonkeyPatch, case: str, chunk: int) -> None:
    arrays, act = GOOD[case]
    monkeypatch.setattr(scans.chunks, "__defaults__", (chunk,))
    act(of(**arrays))


def test_chunks_cover_everything_once() -> None:
    like = np.zeros(1)
    for n, step in ((0, 3), (1, 3), (3, 3), (7, 3), (5, 0), (9, 1 << 30)):
        found = list(scans.chunks(n, like, step))
        assert [i for s in found for i in range(s.start, s.stop)] == list(range(n))
        assert all(0 < s.stop - s.start <= max(1, step) for s in found)
    assert len(list(scans.chunks((1 << 20) + 1, like))) == 2


def test_the_first_true_of_any_shape() -> None:
    assert scans.first_true(np.zeros((2, 2), bool)) is None
    assert scans.first_true(np.array([[False, False], [True, True]])) == (2, 2)
    assert (scans.place(5, (9,)), scans.place(5, (3, 3)), scans.place(5, (2, 2, 2))) == (5, (1, 2), (1, 0, 1))
    with pytest.raises(InvariantError, match=r"^f: a\[1, 2\]: expected e, got v \(2 such\); h$"):
        scans.fail(of(), InvariantError, "a", (1, 2), "v", "e", count=2, hint="h")
    with pytest.raises(InvariantError, match=r"^f: a\[x\]: expected e, got v$"):
        scans.fail(of(), InvariantError, "a", "x", "v", "e", count=1)
