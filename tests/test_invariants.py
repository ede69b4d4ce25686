"""The validator of every format: the words for each broken invariant, however the passes are cut, and its bounds."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spformat.errors import ArrayError, LimitError, SpformatError, UsageError
from spformat.formats import BSR, CSR, DBSR, FORMATS, SRBCRS, Bitmask, Dense, ELLBuckets, TwoFour, VectorNM
from spformat.formats.base import Format
from spformat.formats.convert import convert

HALF = np.float16
Change = Callable[[Any], Any]


def grid(*rows: str) -> Any:
    """float16 from text, a point for each zero."""
    return np.array([[float(c) if c != "." else 0 for c in r.split()] for r in rows], HALF)


X = grid("1 . 2 . 3", "4 5 . . .", ". . . . .", "6 . . 7 8", "9 . 1 . 2")
WIDE = grid(". . . . . . . . 1", "2 2 2 . . . . . .", "3 . . . . . . . .")
PAIRS = grid("1 . 2 . 3 .", "4 . 5 . . .", ". . . . . .")
MADE: dict[str, Format] = {
    "csr": CSR.from_dense(X),
    "bsr": BSR.from_dense(X, blocksize=(2, 3)),
    "dbsr": DBSR.from_dense(X, blocksize=(2, 3)),
    "bitmask": Bitmask.from_dense(WIDE),
    "sr-bcrs": SRBCRS.from_dense(X, vector_length=2, stride=2),
    "ell-buckets": ELLBuckets.from_dense(X, column_parts=2, max_width=2),
    "vector-nm": VectorNM.from_dense(PAIRS, n=2, m=4, vector_length=2),
    "vector-nm packed": VectorNM.from_dense(PAIRS[:, :4], n=2, m=4, vector_length=2, tile_rows=4, tile_cols=8),
    "two-four": TwoFour.from_dense(PAIRS),
    "two-four logical": TwoFour.from_dense(np.tile(X, (8, 16))[:, :75] * (np.arange(75) % 4 < 2), meta_order="logical"),
}


def at(index: Any, value: Any) -> Change:
    """A copy of an array with one place, or several, changed."""

    def change(a: Any) -> Any:
        a = a.copy()
        a[index] = value
        return a

    return change


ALL = slice(None)
# what, arrays that differ, message after the format's name; class by what is broken
BROKEN: dict[str, tuple[str, dict[str, Change], str]] = {
    "csr, column": ("csr", {"indices": at(0, 5)}, "indices[0]: expected an index in [0, 5), got 5"),
    "csr, order": (
        "csr", {"indices": at(2, 1)},
        "indices[2]: expected > 2, the entry before it in row 0 (1 is smaller than it), got 1; in_order() sorts the"
        " columns; for a file, spformat convert --sort",
    ),
    "csr, pointer": ("csr", {"indptr": at(1, 9)}, "indptr[2]: expected >= 9, the entry before it, got 5"),
    "csr, end": ("csr", {"indptr": at(5, 10)}, "indptr[5]: expected 11, the number of items it points into, got 10"),
    **{
        f"{name}, {what}": (name, change, text)
        for name in ("bsr", "dbsr")
        for what, change, text in (
            ("rows outside", {"data": at((4, 1, 2), 1)}, "data[4, 1, 2]: expected 0 in rows >= 5, got 1.0"),
            ("the last rows outside", {"data": at((5, 1, 0), 1)}, "data[5, 1, 0]: expected 0 in rows >= 5, got 1.0"),
            ("columns outside", {"data": at((3, 1, 2), 1)}, "data[3, 1, 2]: expected 0 in columns >= 5, got 1.0"),
            ("later columns outside", {"data": at((5, 0, 2), 1)}, "data[5, 0, 2]: expected 0 in columns >= 5, got 1.0"),
            ("empty blocks", {"data": at((slice(2, 4)), 0)},
             "data[2]: expected a nonzero in each block, got all zeros (2 such)"),
            ("-0", {"data": at((0, 0, 1), -0.0)}, "data[0, 0, 1]: expected +0, as every zero, got -0.0"),
            ("column", {"indices": at(1, 2)}, "indices[1]: expected an index in [0, 2), got 2"),
            ("order", {"indices": at(3, 0)},
             "indices[3]: expected > 0, the entry before it in row 1 (0 repeats it), got 0"),
            ("pointer", {"indptr": at(1, 5)}, "indptr[2]: expected >= 5, the entry before it, got 4"),
        )
    },
    "dbsr, row": ("dbsr", {"row_ids": at(2, 3)}, "row_ids[2]: expected an index in [0, 3), got 3"),
    "dbsr, rows": ("dbsr", {"row_ids": at(1, 0)}, "row_ids[1]: expected > 0, the entry before it, got 0"),
    "dbsr, empty row": ("dbsr", {"indptr": at(1, 0)}, "indptr[1]: expected > 0, the entry before it, got 0"),
    "bitmask, bits outside": (
        "bitmask", {"bitmask": at((slice(1, 3), 1), 0x80)},
        "bitmask[1, 1]: expected 0 in the bits of columns >= 9, got 128 (2 such)",
    ),
    "bitmask, one bit outside, counted": (
        "bitmask", {"bitmask": at((0, 1), 3), "indptr": at(slice(1, 4), [2, 5, 6]), "data": lambda a: np.ones(6, HALF)},
        "bitmask[0, 1]: expected 0 in the bits of columns >= 9, got 3",
    ),
    "bitmask, count": (
        "bitmask", {"bitmask": at((1, 0), 3)}, "indptr[2]: expected indptr[1] + the 2 bits set in row 1, got 4",
    ),
    "bitmask, the last count": (
        "bitmask", {"bitmask": at((2, 0), 3)}, "indptr[3]: expected indptr[2] + the 2 bits set in row 2, got 5",
    ),
    "bitmask, zeros": ("bitmask", {"data": at(slice(1, 3), 0)}, "data[1]: expected a value that is not zero, got 0.0"),
    "bitmask, -0 last": ("bitmask", {"data": at(4, -0.0)}, "data[4]: expected a value that is not zero, got -0.0"),
    "sr-bcrs, column": (
        "sr-bcrs", {"indices": at((0, 1), 5)}, "indices[0, 1]: expected PAD or an index in [0, 5), got 5",
    ),
    "sr-bcrs, below PAD": (
        "sr-bcrs", {"indices": at((5, 1), -2)}, "indices[5, 1]: expected PAD or an index in [0, 5), got -2",
    ),
    "sr-bcrs, value under PAD": ("sr-bcrs", {"data": at((3, 0, 1), 1)}, "data[3, 0, 1]: expected 0 under PAD, got 1.0"),
    "sr-bcrs, rows outside": (
        "sr-bcrs", {"data": at((5, 1, 0), 1)}, "data[5, 1, 0]: expected 0 in rows >= 5, got 1.0",
    ),
    "sr-bcrs, a later column outside": (
        "sr-bcrs", {"data": at((4, 1, 1), 1)}, "data[4, 1, 1]: expected 0 in rows >= 5, got 1.0",
    ),
    "sr-bcrs, order at the start of the last group": (
        "sr-bcrs 3", {"indices": at((1, 0), 1)}, "indices[1, 0]: expected increasing columns in a tile, got 1",
    ),
    "sr-bcrs, more rows outside": (
        "sr-bcrs", {"data": at((4, 1, ALL), 1)}, "data[4, 1, 0]: expected 0 in rows >= 5, got 1.0 (2 such)",
    ),
    "sr-bcrs, bare": (
        "sr-bcrs", {"data": at((1, ALL, 0), 0)}, "indices[1, 0]: expected a vector with a nonzero, got 2",
    ),
    "sr-bcrs, order": (
        "sr-bcrs", {"indices": at((1, 0), 0)}, "indices[1, 0]: expected increasing columns in a tile, got 0",
    ),
    "sr-bcrs, order at the start": (
        "sr-bcrs", {"indices": at((0, 1), 0)}, "indices[0, 1]: expected increasing columns in a tile, got 0",
    ),
    "sr-bcrs, order in a group": (
        "sr-bcrs", {"indices": at((2, 1), 0)}, "indices[2, 1]: expected increasing columns in a tile, got 0",
    ),
    "sr-bcrs, PAD inside a tile": (
        "sr-bcrs", {"indices": at((0, 1), -1), "data": at((0, ALL, 1), 0)},
        "indices[0, 1]: expected PAD in a tile's last group only, got -1",
    ),
    "sr-bcrs, PAD first": (
        "sr-bcrs", {"indices": at((5, ALL), -1), "data": at(5, 0)},
        "indices[5, 0]: expected a live column first in each group, got -1",
    ),
    "sr-bcrs, live after PAD": (
        "sr-bcrs 3", {"indices": at((1, 1), -1), "data": at((1, ALL, 1), 0)},
        "indices[1, 2]: expected PAD, as in the slot before, got 5",
    ),
    "ell-buckets, row": ("ell-buckets", {"row_ids": at(6, 5)}, "row_ids[6]: expected an index in [0, 5), got 5"),
    "ell-buckets, column": (
        "ell-buckets", {"indices": at(10, 5)}, "indices[10]: expected PAD or an index in [0, 5), got 5",
    ),
    "ell-buckets, PAD alone": (
        "ell-buckets", {"indices": at(1, -1)}, "source[1]: expected PAD exactly where indices is PAD, got 3",
    ),
    "ell-buckets, source": (
        "ell-buckets", {"source": at(0, 11)}, "source[0]: expected PAD or an index in [0, 11), got 11",
    ),
    "ell-buckets, source twice": (
        "ell-buckets", {"source": at(1, 4)}, "source[1]: expected each CSR position exactly once, got 4 (2 such)",
    ),
    "ell-buckets, one ELL row of a split row": (
        "ell-buckets", {"row_ids": at(6, 4)},
        "row_ids[0]: expected a row with several ELL rows, as this one is split, got 3",
    ),
    "ell-buckets, a direct row twice": (
        "ell-buckets", {"row_ids": at(2, 1)},
        "row_ids[1]: expected a row assigned once, as its ELL row is direct, got 1",
    ),
    "vector-nm, position": (
        "vector-nm", {"indices": at((0, 0), 4)}, "indices[0, 0]: expected an index in [0, 4), got 4",
    ),
    "vector-nm, order": (
        "vector-nm", {"indices": at((1, 0), 0)}, "indices[1, 0]: expected increasing in its window, got 0",
    ),
    "vector-nm, order in the last window": (
        "vector-nm", {"indices": at((3, 0), 0)}, "indices[3, 0]: expected increasing in its window, got 0",
    ),
    "vector-nm, rows outside": ("vector-nm", {"data": at((2, 3), 1)}, "data[2, 3]: expected 0 in rows >= 3, got 1.0"),
    "vector-nm, columns outside": (
        "vector-nm", {"indices": at((3, 0), 3), "data": at((3, 1), 1)},
        "data[3, 1]: expected 0 in columns >= 6, got 1.0",
    ),
    "vector-nm, filler": (
        "vector-nm", {"indices": at((3, 1), 2)},
        "indices[3, 1]: expected the lowest free position, as the values there are zero, got 2",
    ),
    "vector-nm, -0": ("vector-nm", {"data": at((2, 1), -0.0)}, "data[2, 1]: expected +0, as every zero, got -0.0"),
    "vector-nm, a whole window outside": (
        "vector-nm packed", {"data": at((2, 0), 1)}, "data[2, 0]: expected 0 in columns >= 4, got 1.0",
    ),
    "vector-nm, col_info": (
        "vector-nm packed", {"col_info": at((0, 0, 0), 8)},
        "col_info[0, 0, 0]: expected PAD or an index in [0, 8), got 8",
    ),
    "vector-nm, rank": (
        "vector-nm packed", {"ranks": at((0, 0, 0), 7)},
        "ranks[0, 0, 0]: expected a place of a live col_info entry, got 7",
    ),
    "vector-nm, another rank": (
        "vector-nm packed", {"ranks": at((0, 0, 0), 1)},
        "ranks[0, 0, 0]: expected 0, the place of its column in col_info, got 1",
    ),
    "two-four, rows outside": ("two-four", {"data": at((3, 0), 1)}, "data[3, 0]: expected 0 in rows >= 3, got 1.0"),
    "two-four, columns outside": (
        "two-four logical", {"data": at((39, 38), 2)}, "data[39, 38]: expected 0 in columns >= 75, got 2.0",
    ),
    "two-four, a nibble": (
        "two-four logical", {"meta": at((0), 0x4440)},
        "meta: row 0, group 0: expected nibble one of 4 8 9 C D E, got 0x0",
    ),
    "two-four, two nibbles": (
        "two-four logical", {"meta": at((9), 0xFA44)},
        "meta: row 1, group 6: expected nibble one of 4 8 9 C D E, got 0xA (2 such)",
    ),
    "two-four, another nibble": (
        "two-four logical", {"meta": at((7), 0x8444)},
        "meta: row 0, group 31: expected nibble 0x4 for the values it holds, got 0x8",
    ),
}  # fmt: skip
MADE["sr-bcrs 3"] = SRBCRS.from_dense(grid("1 1 1 1 1 1"), vector_length=1, stride=3)


@pytest.mark.parametrize("case", BROKEN)
def test_the_first_offender(cut: int, case: str) -> None:
    name, changes, message = BROKEN[case]
    arrays = MADE[name].arrays()
    broken = MADE[name].with_arrays(**{key: change(arrays[key]) for key, change in changes.items()})
    with pytest.raises(SpformatError) as caught:
        broken.validate()
    e = caught.value
    if cut > 5:
        assert message in (
            "",
            e.message.partition(": ")[2].removesuffix(f" ({e.count} such)"),
            e.message.partition(": ")[2],
        )
        assert (e.count or 1) == int(
            message.partition(" (")[2].partition(" such)")[0] if "such)" in message else e.count or 1
        )
    place = ", ".join(map(str, e.index)) if isinstance(e.index, tuple) else e.index
    assert e.array == "meta" or f": {e.array}[{place}]: expected {e.expected}, got {e.value}" in e.message
    assert not broken.is_validated


@pytest.mark.parametrize("name", MADE)
def test_what_is_sound_passes(cut: int, name: str) -> None:
    f = MADE[name]
    assert f.with_arrays().validate().is_validated


SHAPES = [(0, 0), (0, 9), (9, 0), (1, 1), (5, 3), (3, 5), (7, 16), (16, 7), (5, 4), (33, 40)]
PARAMS: dict[str, dict[str, Any]] = {
    "bsr": {"blocksize": (2, 3)}, "dbsr": {"blocksize": (2, 3)}, "sr-bcrs": {"vector_length": 3, "stride": 2},
    "vector-nm": {"n": 2, "m": 4, "vector_length": 3, "tile_rows": 6, "tile_cols": 8},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_full_and_empty_matrices_of_every_shape_pass(cut: int, fmt: type[Format], shape: tuple[int, int]) -> None:
    for x in (np.zeros(shape, HALF), np.ones(shape, HALF) * (np.arange(shape[1]) % 4 < 2)):
        fmt.from_dense(x.astype(HALF), **PARAMS.get(fmt.name, {})).with_arrays().validate()


# --- bounds of what an index may need


I32, I64 = np.zeros(0, np.int32), np.zeros(0, np.int64)
POINTER, NOTHING = np.zeros(1, np.int32), np.zeros(0, HALF)
M = 2**31
INDEXED: dict[str, Callable[[int, Any], Format]] = {
    "csr": lambda k, i: CSR(shape=(0, k), indptr=POINTER, indices=i, data=NOTHING),
    "bsr": lambda k, i: BSR(
        shape=(0, k * 2), blocksize=(1, 2), indptr=POINTER, indices=i, data=NOTHING.reshape(0, 1, 2)
    ),
    "dbsr, columns": lambda k, i: DBSR(
        shape=(4, k * 2), blocksize=(1, 2), row_ids=I32, indptr=POINTER, indices=i, data=NOTHING.reshape(0, 1, 2)
    ),
    "dbsr, rows": lambda k, i: DBSR(
        shape=(k * 2, 4), blocksize=(2, 1), row_ids=i, indptr=POINTER, indices=I32, data=NOTHING.reshape(0, 2, 1)
    ),
    "sr-bcrs": lambda k, i: SRBCRS(
        shape=(0, k), vector_length=1, stride=1, indptr=POINTER, indices=i.reshape(0, 1), data=NOTHING.reshape(0, 1, 1)
    ),
    "ell-buckets, columns": lambda k, i: ELLBuckets(
        shape=(4, k), column_parts=1, max_width=1, rows_per_bucket=(0,), split_per_bucket=(0,), row_ids=I32, indices=i,
        data=NOTHING, source=I32,
    ),
    "ell-buckets, rows": lambda k, i: ELLBuckets(
        shape=(k, 4), column_parts=1, max_width=1, rows_per_bucket=(0,), split_per_bucket=(0,), row_ids=i, indices=I32,
        data=NOTHING, source=I32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXED)
def test_int64_begins_where_int32_ends(case: str) -> None:
    make = INDEXED[case]
    make(M, I32)
    make(M + 1, I64)
    for k, wrong in ((M, I64), (M + 1, I32)):
        with pytest.raises(ArrayError, match=r"(indices|row_ids): expected dtype int(32|64), got int(32|64)$"):
            make(k, wrong)


def test_positions_of_few_slots_are_int32() -> None:
    f = ELLBuckets.from_dense(np.ones((9, 9), HALF))
    for g in (f, MADE["ell-buckets"]):
        with pytest.raises(ArrayError, match=r"source: expected dtype int32, got int64"):
            g.with_arrays(source=g.arrays()["source"].astype(np.int64))


@pytest.mark.parametrize("shape", [(2**40, 0), (0, 2**40)])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_extents_without_elements_are_not_believed(fmt: type[Format], shape: tuple[int, int]) -> None:
    """No byte of an input stands behind them: LimitError before anything of that size, or nothing of that size."""
    params = PARAMS.get(fmt.name, {})
    sources: list[Callable[[], Any]] = [lambda: fmt.from_dense(np.zeros(shape, HALF), **params)]
    if shape[0] == 0:
        a = CSR(shape=shape, indptr=POINTER, indices=I64, data=NOTHING)
        sources.append(lambda: fmt.from_csr(a, **params))
    else:
        rows = DBSR(
            shape=shape, blocksize=(2, 2), row_ids=I64, indptr=POINTER, indices=I32, data=NOTHING.reshape(0, 2, 2)
        )
        sources.append(lambda: convert(rows, fmt.name, **params))
    tracemalloc.start()
    try:
        for make in sources:
            with contextlib.suppress(LimitError):
                make()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- layouts


LAYOUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "row_ids, a list": (
        lambda: MADE["dbsr"].with_arrays(row_ids=[0, 1, 2]),
        "dbsr: row_ids: expected a numpy or CuPy array, got list; indptr: dimension nrb+1 = 1, got 4 (shape (4,))",
    ),
    "row_ids, 2-D": (
        lambda: MADE["dbsr"].with_arrays(row_ids=np.zeros((1, 3), np.int32)),
        "dbsr: row_ids: expected 1 dimensions [nrb], got shape (1, 3); indptr: dimension nrb+1 = 1, got 4 (shape (4,))",
    ),
    "plain with tiles": (
        lambda: MADE["vector-nm"].with_arrays(
            col_info=np.zeros((1, 2, 0), np.int16), ranks=np.zeros((1, 4, 3), np.uint8)
        ),
        "vector-nm: col_info: dimension Tr = 0, got 1 (shape (1, 2, 0)); col_info: dimension Tk = 0, got 2 (shape"
        " (1, 2, 0)); ranks: dimension Tr = 0, got 1 (shape (1, 4, 3)); ranks: dimension Qs = 0, got 3 (shape"
        " (1, 4, 3))",
    ),
    "more split rows than rows": (
        lambda: ELLBuckets(
            shape=X.shape, **MADE["ell-buckets"].params(), **MADE["ell-buckets"].arrays(), rows_per_bucket=(1, 3, 2, 1),
            split_per_bucket=(1, 2, 3, 2),
        ),
        "ell-buckets: split_per_bucket[2]: expected at most rows_per_bucket[2] = 2, got 3; split_per_bucket[3]:"
        " expected at most rows_per_bucket[3] = 1, got 2",
    ),
    "dense, 1-D": (
        lambda: Dense(shape=(2, 3), data=np.zeros(6, HALF)),
        "dense: data: expected 2 dimensions [M, K], got shape (6,)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case: str) -> None:
    act, message = LAYOUTS[case]
    with pytest.raises(ArrayError) as caught:
        act()
    assert str(caught.value) == message
    assert caught.value.array == message.split(": ")[1].partition("[")[0].replace("split_per", "tables.split_per")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 5, "m": 4}, "n: expected at most m = 4, got 5"),
        ({"n": 2, "m": 4, "tile_rows": 4}, "tile_rows, tile_cols: expected both 0 or both positive, got 4 and 0"),
        ({"n": 2, "m": 4, "tile_cols": 4}, "tile_rows, tile_cols: expected both 0 or both positive, got 0 and 4"),
        ({"n": 2, "m": 4, "tile_rows": 3, "tile_cols": 6},
         "tile_rows: expected a multiple of vector_length = 2, got 3; tile_cols: expected a multiple of m = 4, got 6"),
    ],
)  # fmt: skip
def test_params_that_contradict(params: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        VectorNM.from_dense(PAIRS, vector_length=2, **params)
    assert str(caught.value) == f"vector-nm: {message}"
    with pytest.raises(UsageError, match="max_width: expected a power of two, got 6"):
        ELLBuckets.from_dense(X, max_width=6)
