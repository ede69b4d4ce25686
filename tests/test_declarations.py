"""The exact errors about params, tables and arrays that follow from the declaration of a format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hostile import make

from spformat.errors import ArrayError, SpformatError, UsageError
from spformat.formats import BSR, CSR, TwoFour, array_checks, by_name
from spformat.formats.declare import ParamDeclaration, parse_shape, parse_table, plain_int


def test_params() -> None:
    pair = ParamDeclaration("p", "pair", 1, 4, (), None, "")
    number = ParamDeclaration("n", "int", 1, 4, (), None, "")
    choice = ParamDeclaration("c", "choice", 0, 0, ("a", "b"), None, "")
    assert [pair.parse(v) for v in ("1x4", "4X1", (1, 4), [np.int64(4), 1])] == [(1, 4), (4, 1), (1, 4), (4, 1)]
    assert [pair.parse(v) for v in ("3", 3, np.int32(3))] == [(3, 3)] * 3
    assert [number.parse(v) for v in (1, 4, "1", np.int8(4))] == [1, 4, 1, 4]
    assert type(number.parse(np.int8(4))) is int
    assert [choice.parse(v) for v in ("a", "b")] == ["a", "b"]
    refused = {
        pair: ["0x1", "1x5", "5", "1x1x1", (1, True), (1, 2.0), 5, True, 2.0, None, "ax1", "x"],
        number: [0, 5, True, np.bool_(True), 2.0, "x", None, (1,)],
        choice: ["c", None, 1],
    }
    ranges = {pair: "two ints in 1 .. 4", number: "an int in 1 .. 4", choice: "one of a, b"}
    for declared, values in refused.items():
        assert declared.range_text() == ranges[declared]
        for value in values:
            with pytest.raises(UsageError) as caught:
                declared.parse(value)
            assert str(caught.value) == f"{declared.name}: expected {ranges[declared]}, got {value!r}"
            assert caught.value.value == value
    with pytest.raises(UsageError) as caught:
        number.parse("9" * 99)
    assert str(caught.value) == f"n: expected an int in 1 .. 4, got '{'9' * 79}"


def test_plain_ints() -> None:
    assert [plain_int(v) for v in (3, "3", np.uint8(3))] == [3, 3, 3]
    assert type(plain_int(np.uint8(3))) is int
    for value in (True, np.bool_(False), 3.0, None, b"3", [3]):
        with pytest.raises(TypeError):
            plain_int(value)


def test_shapes_and_tables() -> None:
    assert parse_shape("x", [np.int32(0), 2**48 - 1]) == (0, 2**48 - 1)
    for shape in ((1,), (1, 2, 3), (-1, 0), (0, -1), (2**48, 0), (0, 2**48), (1.0, 2), 5, None, "1x", (True, 1)):
        with pytest.raises(UsageError) as caught:
            parse_shape("x", shape)
        assert str(caught.value) == f"x: shape: expected two ints (M, K) in 0 .. 2^48-1, got {shape!r}"
        assert caught.value.value == shape
    assert parse_table("x", "t", [0, np.int32(2)]) == (0, 2)
    assert parse_table("x", "t", ()) == ()
    for values in ((0, -1), (1.0,), (True,), 5, None):
        with pytest.raises(ArrayError) as refused:
            parse_table("x", "t", values)
        assert str(refused.value) == f"x: t: expected ints >= 0, got {values!r}"
        assert refused.value.array == "tables.t"
    with pytest.raises(ArrayError) as refused:
        parse_table("x", "t", "y" * 99)
    assert str(refused.value) == f"x: t: expected ints >= 0, got '{'y' * 79}"
    with pytest.raises(UsageError, match=rf"got \('{'y' * 78}$"):
        parse_shape("x", ("y" * 99, 1))


I32, F32 = np.int32, np.float32
BUILT: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "a list": ({"indptr": [0, 1, 1]}, "indptr", "indptr: expected a numpy or CuPy array, got list"),
    "2-D": ({"indices": np.zeros((1, 1), I32)}, "indices", "indices: expected 1 dimensions [nnz], got shape (1, 1)"),
    "short pointer": ({"indptr": np.array([0, 1], I32)}, "indptr", "indptr: dimension M+1 = 3, got 2 (shape (2,))"),
    "other length": ({"indices": np.zeros(2, I32)}, "data", "data: dimension nnz = 2, got 1 (shape (1,))"),
    "strided": ({"data": np.zeros(2, F32)[::2]}, None, ""),
    "float index": ({"indices": np.zeros(1, F32)}, "indices", "indices: expected dtype int32, got float32"),
    "int64 index": ({"indices": np.zeros(1, np.int64)}, "indices", "indices: expected dtype int32, got int64"),
    "big-endian": ({"indices": np.zeros(1, ">i4")}, "indices", "indices: expected dtype int32, got >i4"),
    "bool": (
        {"data": np.zeros(1, bool)}, "data",
        "data: expected dtype float64 or float32 or float16 or bfloat16 or float8_e4m3fn or float8_e5m2 or int8, got"
        " bool",
    ),
    "several": (
        {"indptr": np.array([0, 1], I32), "indices": np.zeros(1, F32)}, "indptr",
        "indptr: dimension M+1 = 3, got 2 (shape (2,)); indices: expected dtype int32, got float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BUILT)
def test_arrays_that_do_not_fit(case: str) -> None:
    changed, array, message = BUILT[case]
    arrays: dict[str, Any] = {"indptr": np.array([0, 1, 1], I32), "indices": np.zeros(1, I32), "data": np.ones(1, F32)}
    if not message:
        assert CSR(shape=(2, 3), **arrays | changed).nnz == 1
        return
    with pytest.raises(ArrayError) as caught:
        CSR(shape=(2, 3), **arrays | changed)
    assert (str(caught.value), caught.value.array) == (f"csr: {message}", array)


def test_order_of_memory_and_positions() -> None:
    f = BSR.from_dense(np.ones((4, 4), F32), blocksize=(2, 2))
    with pytest.raises(ArrayError) as caught:
        BSR(shape=f.shape, blocksize=(2, 2), indptr=f.indptr, indices=f.indices, data=np.asfortranarray(f.data))
    assert (str(caught.value), caught.value.array) == ("bsr: data: expected C order; use ascontiguousarray", "data")
    g = make(by_name("vector-nm"))
    with pytest.raises(ArrayError, match=r"indices: expected dtype uint8, got int8"):
        g.with_arrays(indices=g.arrays()["indices"].astype(np.int8))
    t = make(TwoFour)
    with pytest.raises(ArrayError, match=r"meta: expected dtype uint16, got int16"):
        t.with_arrays(meta=t.arrays()["meta"].view(np.int16))
    e = make(by_name("ell-buckets"))
    with pytest.raises(ArrayError) as caught:
        type(e)(shape=e.shape, **e.params(), **e.arrays(), **e.tables() | {"rows_per_bucket": (1,)})
    assert "rows_per_bucket: expected" in str(caught.value)
    assert caught.value.array == "rows_per_bucket"


def test_the_validated_mark() -> None:
    f = make(CSR)
    assert f.is_validated
    assert f.ensure_valid() is f
    changed = f.with_arrays(data=f.values.copy())
    assert not changed.is_validated
    assert changed == f
    assert changed.validate() is changed
    assert changed.is_validated
    bad = f.with_arrays(indices=np.full_like(f.arrays()["indices"], 99))
    for act in (bad.ensure_valid, bad.validate):
        with pytest.raises(SpformatError):
            act()
        assert not bad.is_validated


def test_fields_are_kept_in_their_own_types() -> None:
    f = make(BSR)
    fields: dict[str, Any] = {"shape": [np.int64(7), 7], "blocksize": "2x3"}
    g = BSR(**fields, **f.arrays())
    assert (g.shape, g.blocksize) == ((7, 7), (2, 3))
    assert all(type(n) is int for n in (*g.shape, *g.blocksize))
    e = make(by_name("ell-buckets"))
    again = type(e)(shape=e.shape, **e.params(), **e.arrays(), **{k: list(v) for k, v in e.tables().items()})
    assert again.tables() == e.tables()


def test_arrays_lie_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    f = make(BSR)
    monkeypatch.setattr(array_checks, "device_of", lambda a: f"cuda:{a.ndim}")
    with pytest.raises(ArrayError) as caught:
        f.with_arrays()
    assert str(caught.value) == "bsr: arrays on several devices: indptr cuda:1, indices cuda:1, data cuda:3"
    assert caught.value.array is None
