"""Rows of matrices put below each other and taken out again, in the layouts of all formats that can be cut."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import strict_cupy

import spformat as sf
from spformat.errors import UsageError
from spformat.formats import by_name, registered
from spformat.formats.vstack import row_range, vstack

CUT = {"dense", "csr", "bsr", "sr-bcrs", "vector-nm", "two-four", "bitmask"}
PARAMS = {
    "vector-nm": {"n": 2, "m": 4, "vector_length": 4},
    "bsr": {"blocksize": (16, 8)},
    "sr-bcrs": {"vector_length": 8, "stride": 4},
}


def drawn(rows: int, cols: int = 200, seed: int = 1, dtype: str = "float16") -> np.ndarray:
    """Values in which every four columns have two of them, the same two for 4 rows; some groups of rows are empty."""
    rng = np.random.default_rng(seed)
    groups = -(-rows // 4)
    keep = rng.permuted(np.tile([1, 1, 0, 0], (groups, cols // 4, 1)), axis=2).reshape(groups, cols)
    keep[rng.random(groups) < 0.2] = 0
    x = rng.integers(1, 99, (rows, cols)) * keep.repeat(4, 0)[:rows]
    return np.asarray(x).astype(sf.arrays.dtypes.VALUE_TYPES[dtype].numpy)


def params_of(fmt: type[sf.Format]) -> dict:
    return fmt.resolve_params(PARAMS.get(fmt.name, {}))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fmt", registered(), ids=lambda f: f.name)
def test_rows_put_below_each_other_are_the_conversion_of_the_whole(fmt: type[sf.Format], dtype: str) -> None:
    layout = fmt.row_layout(params_of(fmt))
    assert (layout is not None) == (fmt.name in CUT)
    if layout is None:
        return
    x = drawn(32 * 5 + 7, dtype=dtype)
    at = [0, 32, 32, 128, x.shape[0]]  # one of the matrices has no rows
    whole = fmt.from_dense(x, **params_of(fmt))
    parts = [fmt.from_dense(x[i:j], **params_of(fmt)) for i, j in itertools.pairwise(at)]
    assert vstack(parts) == whole
    assert vstack(parts[:1]) == parts[0]
    for part, i, j in zip(parts, at[:-1], at[1:], strict=True):
        taken = row_range(whole, i, j)
        assert taken == part
        assert taken.is_validated
        assert taken.validate() is taken
    assert vstack(parts).validate()


@pytest.mark.parametrize("name", sorted(CUT))
def test_on_a_device_nothing_goes_over_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", strict_cupy.module())
    fmt, x = by_name(name), drawn(167, dtype="bfloat16")
    whole = fmt.from_dense(x, **params_of(fmt))
    parts = [fmt.from_dense(x[i:j], **params_of(fmt)) for i, j in ((0, 64), (64, 167))]
    there = vstack([part.to("cuda") for part in parts])
    assert there.device == "cuda:0"
    assert there == whole
    assert row_range(whole.to("cuda"), 64, 167) == parts[1]
    with pytest.raises(UsageError, match="device: expected one for all matrices, got cuda:0, cpu"):
        vstack([parts[0].to("cuda"), parts[1]])


def test_packed_vector_nm_is_cut_between_tiles() -> None:
    params = PARAMS["vector-nm"] | {"tile_rows": 8, "tile_cols": 16}
    x = drawn(61)
    whole = sf.convert(x, "vector-nm", **params)
    parts = [sf.convert(x[i:j], "vector-nm", **params) for i, j in ((0, 24), (24, 61))]
    assert vstack(parts) == whole
    assert [row_range(whole, 0, 24), row_range(whole, 24, 61)] == parts
    with pytest.raises(
        UsageError, match=r"vector-nm: rows: expected multiples of 8, or the end, in 0 .. 61, got 4 .. 61"
    ):
        row_range(whole, 4, 61)


def test_every_difference_is_named() -> None:
    a = sf.convert(drawn(30), "two-four")
    b = sf.convert(drawn(32, 100, dtype="float32"), "two-four", meta_order="logical")
    with pytest.raises(
        UsageError,
        match=r"columns: .* 200, 100; params: .*logical.*; dtype: .* float16, float32; rows: .* 32 .* got 30",
    ):
        vstack([a, b])
    with pytest.raises(UsageError, match=r"format: expected one for all matrices, got csr, bitmask"):
        vstack([sf.convert(drawn(8), "csr"), sf.convert(drawn(8), "bitmask")])
    with pytest.raises(
        UsageError, match=r"two-four, meta_order=cutlass-sm80: its arrays do not follow from those of its rows"
    ):
        vstack([sf.convert(drawn(32), "two-four", meta_order="cutlass-sm80")])
    with pytest.raises(UsageError, match="expected one matrix or more"):
        vstack([])
    with pytest.raises(UsageError, match=r"in 0 .. 32, got 0 .. 33"):
        row_range(sf.convert(drawn(32), "csr"), 0, 33)


def test_what_is_no_matrix_and_no_row_is_named() -> None:
    a, x = sf.convert(drawn(32), "csr"), drawn(32)
    for given, got in ((None, "NoneType"), (3, "int"), (x, "ndarray"), ("ab", "str"), (a, "CSR"), ({1: a}, "dict")):
        with pytest.raises(UsageError, match=rf"vstack: expected a list or tuple of matrices, got {got}"):
            vstack(given)
    for given, at, got in (([x], 0, "ndarray"), ((a, 3), 1, "int"), ([a, None], 1, "NoneType")):
        with pytest.raises(UsageError, match=rf"vstack: matrix {at}: expected one of spformat, got {got}; use convert"):
            vstack(given)
    with pytest.raises(UsageError, match=r"expected a matrix of spformat, got ndarray; use convert"):
        row_range(x, 0, 8)
    for rows in (("a", "b"), (0.0, 8.0), (None, 8), (True, 8)):
        with pytest.raises(UsageError, match=r"csr: rows: expected two ints first, last, got "):
            row_range(a, *rows)
