"""Rows A01 .. A38 that are one array each: right checksums, wrong contents, in every format that has such an array."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue import PARAMS, refused, refused_file, small, small_file
from hostile import change, rewrite

import spformat as sf
from spformat.errors import ArrayError, IndexBoundsError, InvariantError, OrderError, PatternError, PointerError
from spformat.formats import FORMATS

Array = np.ndarray[Any, Any]
Case = tuple[str, str, Callable[[Array], Any], type[sf.errors.SpformatError], str]


def at(index: Any, value: Any) -> Callable[[Array], Array]:
    """The array with one element exchanged."""

    def edit(a: Array) -> Array:
        out = a.copy()
        out[index] = value
        return out

    return edit


def swapped(i: Any, j: Any) -> Callable[[Array], Array]:
    """The array with two elements exchanged for each other."""

    def edit(a: Array) -> Array:
        out = a.copy()
        out[i], out[j] = a[j].copy(), a[i].copy()
        return out

    return edit


def cast(dtype: str) -> Callable[[Array], Array]:
    return lambda a: a.astype(dtype)


ELL, SR, NM, TWO = "ell-buckets", "sr-bcrs", "vector-nm", "two-four"
CASES: dict[str, Case] = {}
for f in FORMATS:
    for d in f.declared_arrays():
        if d.kind in ("INDEX", "POS", "int16", "uint16"):
            natural = {"INDEX": "int32", "POS": "uint8"}.get(d.kind, d.kind)
            for other in sorted({"float32", "int8", "uint64", "bool", "int64", "int16"} - {natural}):
                if d.bound == "nnz-1" and other == "int64":
                    continue  # where no length decides the bound, both index types are accepted
                row = "A34" if d.name == "meta" else "A01"
                CASES[f"{row}-{f.name}-{d.name}-{other}"] = f.name, d.name, cast(other), ArrayError, "expected dtype"
            if d.kind == "INDEX":
                CASES[f"A11-{f.name}-{d.name}-uint16"] = f.name, d.name, cast("uint16"), ArrayError, "expected dtype"
        if d.kind == "VALUE":
            shorter = (ArrayError, "dimension|indptr")
            if f.name == "bitmask":  # data has no other length than the pointer's end
                shorter = (PointerError, "the number of items")
            row = "A02" if len(d.dims) == 1 else "A38"
            CASES[f"{row}-{f.name}-shorter"] = f.name, d.name, lambda a: a[:-1], *shorter
            CASES[f"{row}-{f.name}-longer"] = f.name, d.name, lambda a: np.concatenate([a, a[-1:]]), *shorter
        if d.name == "indices":
            cut = (f.name, d.name, lambda a: a[:-1], ArrayError, "dimension")
            CASES[f"A02-{f.name}-fewer-indices"] = cut

for name, last in {"csr": 20, "csc": 20, "bsr": 11, "dbsr": 13, "sr-bcrs": 6, "bitmask": 20}.items():
    pointer: dict[str, tuple[Callable[[Array], Any], type[sf.errors.SpformatError], str]] = {
        "A03-{}-one-less": (lambda a: a[:-1], ArrayError, "indptr: dimension"),
        "A03-{}-one-more": (lambda a: np.append(a, a[-1:]), ArrayError, "indptr: dimension"),
        "A04-{}-starts-at-1": (at(0, 1), PointerError, r"indptr\[0\]: expected 0, the start, got 1"),
        "A04-{}-starts-at--1": (at(0, -1), PointerError, "expected 0, the start, got -1"),
        "A05-{}-ends-one-early": (at(-1, last - 1), PointerError, f"expected {last}, the number of items.*got"),
        "A05-{}-ends-one-late": (at(-1, last + 1), PointerError, f"expected {last}, the number of items"),
        "A05-{}-ends-far": (at(-1, 2**31 - 1), PointerError, "got 2147483647"),
        "A06-{}-goes-down": (swapped(1, 2) if name not in ("csr", "csc", "bitmask") else at(4, 3), PointerError,
                             r"indptr\[[24]\]: expected >= \d+, the entry before it, got \d"),
        "A07-{}-wraps": (lambda a: np.concatenate([a[:1], np.int32([2**31 - 1, -(2**31), -1])[: len(a) - 2],
                                                   a[4:] if len(a) > 4 else a[-1:]]).astype(np.int32)[: len(a)],
                         PointerError, "indptr"),
        "A08-{}-leaves-and-comes-back": (at(1, 1000), PointerError, r"indptr\[2\]: expected >= 1000"),
    }  # fmt: skip
    for key, (change_to, error, message) in pointer.items():
        CASES[key.format(name)] = name, "indptr", change_to, error, message
    if name == "sr-bcrs":
        for i, (key, (change_to, error, message)) in enumerate(pointer.items()):
            if key[:3] in ("A05", "A06"):
                CASES[f"A26-pointer-{i}"] = name, "indptr", change_to, error, message

for name, bound in {"csr": 12, "csc": 10, "bsr": 4, "dbsr": 4}.items():
    for value in (bound, bound + 1, 2**31 - 1):
        row = "A23" if name == "bsr" else "A09"
        CASES[f"{row}-{name}-{value}"] = (name, "indices", at(1, value), IndexBoundsError,
            rf"indices\[1\]: expected an index in \[0, {bound}\), got {value}")  # fmt: skip
    for value in (-1, -2, -(2**31)):
        CASES[f"A10-{name}-{value}"] = name, "indices", at(1, value), IndexBoundsError, f"got {value}"
    CASES[f"A12-{name}"] = name, "indices", swapped(0, 1), OrderError, "indices.*smaller than"
    CASES[f"A13-{name}"] = name, "indices", at(1, 0), OrderError, "indices.*repeats"

for name, bound in {"row": 10, "col": 12}.items():
    for value in (bound, bound + 1, 2**31 - 1, -1, -2, -(2**31)):
        CASES[f"{'A09' if value > 0 else 'A10'}-coo-{name}-{value}"] = ("coo", name, at(1, value), IndexBoundsError,
            rf"{name}\[1\]: expected an index in \[0, {bound}\), got {value}")  # fmt: skip

CASES |= {
    "A12-coo-rows": ("coo", "row", swapped(4, 5), OrderError, r"row\[5\]: expected at least the row before it"),
    "A12-coo-columns": ("coo", "col", swapped(0, 1), OrderError, r"col\[1\]: expected more than the column before"),
    "A13-coo": ("coo", "col", at(1, 0), OrderError, r"col\[1\]: expected more than the column before"),
    "A09-ell-buckets": (ELL, "indices", at(0, 12), IndexBoundsError, r"expected PAD or an index in \[0, 12\)"),
    "A09-ell-buckets-source": (ELL, "source", at(0, 20), IndexBoundsError, r"PAD or an index in \[0, 20\)"),
    "A09-sr-bcrs": (SR, "indices", at((0, 1), 12), IndexBoundsError, r"indices\[0, 1\]: .*\[0, 12\), got 12"),
    "A10-ell-buckets--2": (ELL, "indices", at(0, -2), IndexBoundsError, "got -2"),
    "A10-ell-buckets-pad-in-live": (ELL, "indices", at(0, -1), IndexBoundsError, "PAD exactly where"),
    "A10-sr-bcrs--2": (SR, "indices", at((0, 0), -2), IndexBoundsError, "got -2"),
    "A12-ell-buckets": (ELL, "indices", swapped(2, 3), OrderError, "smaller than"),
    "A13-ell-buckets": (ELL, "indices", at(3, 2), OrderError, "repeats"),
    "A12-sr-bcrs": (SR, "indices", swapped((0, 0), (0, 1)), OrderError, "increasing columns in a tile"),
    "A13-sr-bcrs": (SR, "indices", at((0, 1), 0), OrderError, "increasing columns in a tile"),
    "A12-dbsr-rows": ("dbsr", "row_ids", swapped(0, 1), OrderError, r"row_ids\[1\]: expected > 1"),
    "A18-pad-value": (ELL, "data", at(9, 1), InvariantError, r"data\[9\]"),
    "A18-pad-value-nan": (ELL, "data", at(9, np.nan), InvariantError, r"data\[9\]"),
    "A18-pad-value-minus-zero": (ELL, "data", at(9, -0.0), InvariantError, r"data\[9\]"),
    "A18-pad-index-0": (ELL, "indices", at(9, 0), IndexBoundsError, "source.*PAD exactly where indices"),
    "A18-pad-source": (ELL, "source", at(9, 3), IndexBoundsError, "PAD exactly where"),
    "A20-row": (ELL, "row_ids", at(0, 10), IndexBoundsError, r"row_ids\[0\]: .*\[0, 10\), got 10"),
    "A20-negative-row": (ELL, "row_ids", at(0, -1), IndexBoundsError, "got -1"),
    "A21-direct-row-twice": (ELL, "row_ids", at(1, 2), InvariantError, "row assigned once.*direct"),
    "A21-split-row-once": (ELL, "row_ids", at(8, 1), InvariantError, "several ELL rows"),
    "A21-position-twice": (ELL, "source", at(0, 19), InvariantError, "each CSR position exactly once"),
    "A24-blocks-transposed": ("bsr", "data", lambda a: np.ascontiguousarray(a.transpose(0, 2, 1)), ArrayError,
                              "data: dimension R = 4, got 3"),
    "A25-row-beyond": ("dbsr", "row_ids", at(3, 5), IndexBoundsError, r"row_ids\[3\]: .*\[0, 5\), got 5"),
    "A25-unsorted": ("dbsr", "row_ids", swapped(1, 2), OrderError, r"row_ids\[2\]: expected > 2"),
    "A25-duplicate": ("dbsr", "row_ids", at(1, 0), OrderError, r"row_ids\[1\]: expected > 0"),
    "A25-empty-listed-row": ("dbsr", "indptr", at(1, 0), PointerError, r"indptr\[1\]: expected > 0"),
    "A27-pad-in-the-live-part": (SR, "indices", at((0, 1), -1), InvariantError, "data.*0 under PAD"),
    "A27-live-column-after-pad": (SR, "indices", at((3, 2), 10), InvariantError, r"indices\[3, 2\]: expected PAD"),
    "A27-value-under-pad": (SR, "data", at((3, 0, 2), 1), InvariantError, r"data\[3, 0, 2\]: expected 0 under PAD"),
    "A27-value-below-the-last-row": (SR, "data", at((4, 3, 0), 1), IndexBoundsError, "0 in rows >= 10"),
    "A28-index-m": (NM, "indices", at((0, 0), 4), PatternError, r"indices\[0, 0\]: expected .* \[0, 4\), got 4"),
    "A28-index-255": (NM, "indices", at((0, 0), 255), PatternError, "got 255"),
    "A28-decreasing": (NM, "indices", swapped((0, 0), (1, 0)), PatternError, "increasing in its window"),
    "A28-equal": (NM, "indices", at((1, 0), 0), PatternError, "increasing in its window"),
    "A28-other-filler": (NM, "indices", at((1, 1), 3), PatternError, "lowest free position"),
    "A29-below-pad": (NM, "col_info", at((0, 0, 0), -2), IndexBoundsError, r"col_info\[0, 0, 0\].*got -2"),
    "A29-tile-cols": (NM, "col_info", at((0, 0, 0), 8), IndexBoundsError, "got 8"),
    "A30-live-after-pad": (NM, "col_info", at((0, 0, 7), 7), InvariantError, r"col_info\[0, 0, 7\]: expected -1"),
    "A30-pad-in-the-live-part": (NM, "col_info", at((0, 0, 1), -1), InvariantError, "ranks.*live col_info"),
    "A31-rank-of-a-pad": (NM, "ranks", at((0, 0, 0), 6), InvariantError, r"ranks\[0, 0, 0\]: .*live.*got 6"),
    "A31-rank-255": (NM, "ranks", at((0, 0, 0), 255), InvariantError, "got 255"),
    "A31-other-rank": (NM, "ranks", at((0, 0, 0), 1), InvariantError, "place of its column"),
    "A34-meta-shorter": (TWO, "meta", lambda a: a[:-1], ArrayError, "meta: dimension"),
    "A34-meta-of-another-tile": (TWO, "meta", lambda a: np.concatenate([a, a]), ArrayError, "meta: dimension"),
    "A38-two-four-vector": (TWO, "data", lambda a: np.ascontiguousarray(a[:, :-8]), ArrayError, "data: dimension"),
    "A38-vector-nm-row": (NM, "data", lambda a: np.ascontiguousarray(a[:, :-1]), ArrayError, "data: dimension"),
    "A19-bitmask-narrow": ("bitmask", "bitmask", lambda a: a[:, :1].copy(), ArrayError, "bitmask: dimension"),
    "A05-bitmask-bit-more": ("bitmask", "bitmask", at((1, 0), 1), InvariantError, "bits set in row 1"),
    "A09-bitmask-bit-past-K": ("bitmask", "bitmask", at((0, 1), 129), IndexBoundsError, "bits of columns >= 12"),
}  # fmt: skip
for nibble in (0x0, 0x5, 0xA, 0xF, 0x1, 0x2, 0x3, 0x6, 0x7, 0xB):
    row = "A32" if nibble in (0x0, 0x5, 0xA, 0xF) else "A33"
    CASES[f"{row}-nibble-{nibble:X}"] = (TWO, "meta", at(0, 0x4440 | nibble), PatternError,
        rf"row 0, group 0.*0x{nibble:X}")  # fmt: skip
CASES["A35-padding-group"] = "two-four", "meta", at(-1, 0x4448), PatternError, "0x4 for the values it holds"


@pytest.mark.parametrize("case", CASES)
def test_array(folder: Path, case: str) -> None:
    fmt, array, edit, error, message = CASES[case]
    params = {"meta_order": "logical"} if fmt == "two-four" else {}
    path = small_file(folder, fmt, **params)
    rewrite(path, change(array, edit))
    refused_file(path, error, message, tensor="w")
    if issubclass(error, ArrayError):
        return
    # The same object, built in memory, is refused with the same message before a product reads it.
    good = sf.by_name(fmt).from_dense(small(), **(params or PARAMS.get(fmt, {})))
    bad = good.with_arrays(**{array: edit(getattr(good, array))})
    B = np.ones((12, 3), np.float16)
    for use in (bad.validate, bad.to_dense, bad.to_csr, lambda: sf.spmm(bad, B), lambda: sf.plan(bad, n=3)):
        with refused(folder, error, message):
            use()
    assert not bad.is_validated
