"""``a.T``: a view, and the exact transposes that formats build from it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import laws
import numpy as np
import pytest
import stand_in_cupy
from cases import CASES, params_of

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, bits
from spformat.arrays.segments import stable_order
from spformat.formats import Format, registered, spec_text
from spformat.formats.csr import CSR
from spformat.formats.transposed import Transposed

EVERY = [(f, p) for f in registered() for p in params_of(f.name)]
IDS = [spec_text(f, p) for f, p in EVERY]


@pytest.mark.parametrize(("fmt", "params"), EVERY, ids=IDS)
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float64"])
def test_the_transpose_of_every_format(fmt: type[Format], params: dict[str, Any], dtype: str) -> None:
    tried = 0
    for make in CASES.values():
        x = make(dtype)
        try:
            a = fmt.from_dense(x, **params)
        except sf.errors.StructureError:
            continue
        tried += 1
        wanted = np.ascontiguousarray(a.to_dense().T)
        t = a.T
        assert (t.shape, t.dtype, t.device, t.nnz) == (wanted.shape, a.dtype, "cpu", a.nnz)
        assert t.T is a
        assert laws.same(t.to_dense(), wanted)
        stored = t.materialize()
        kind = {"bsr": "bsr", "dbsr": "bsr", "dense": "dense"}.get(fmt.name, "csr")
        assert stored.name == kind
        for f in (t.to_csr(), stored):
            f.with_arrays().validate()
            assert laws.same(laws.without_negative_zeros(f.to_dense()), laws.without_negative_zeros(wanted))
        if kind == "bsr":
            assert stored == sf.BSR.from_dense(wanted, blocksize=a.params()["blocksize"][::-1])
        else:
            assert t.to_csr() == CSR.from_dense(wanted) or a.stored_zeros
        assert sf.convert(t, "csr") == sf.convert(wanted, "csr")
    assert tried or dtype not in fmt.value_dtypes


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_stored_zeros_and_all_bits_come_along(dtype: str) -> None:
    """Two rows, a stored zero of either sign, in the order of columns and then rows."""
    raw = np.array([0, 1, 2, 1 << (8 * VALUE_TYPES[dtype].numpy.itemsize - 1)], VALUE_TYPES[dtype].bits)
    a = CSR(shape=(2, 3), indptr=np.array([0, 2, 4], np.int32), indices=np.array([0, 2, 0, 1], np.int32),
            data=raw.view(VALUE_TYPES[dtype].numpy))  # fmt: skip
    t = a.T.to_csr()
    assert (t.indptr.tolist(), t.indices.tolist()) == ([0, 2, 3, 4], [0, 1, 1, 0])
    assert bits(t.data).tolist() == raw[[0, 2, 3, 1]].tolist()
    assert t.T.to_csr() == a


def test_wide_columns_are_sorted_digit_by_digit() -> None:
    keys = np.random.default_rng(0).integers(0, 2**40, 5000) // 2**7 * 2**7
    np.testing.assert_array_equal(stable_order(keys, 2**40), np.argsort(keys, kind="stable"))
    few = (keys % 70_001).astype(np.int32)
    np.testing.assert_array_equal(stable_order(few, 70_001), np.argsort(few, kind="stable"))


def test_a_view_is_frozen_and_no_array() -> None:
    a = sf.convert(np.eye(3, 5, dtype=np.float32), "csr")
    t = a.T
    assert repr(t) == f"Transposed({a!r}, shape=(5, 3))"
    with pytest.raises(dataclasses.FrozenInstanceError):
        t.matrix = a  # type: ignore[misc]
    with pytest.raises(TypeError, match="use to_dense"):
        np.asarray(t)
    assert isinstance(t, Transposed)
    assert t.to("cpu") is t
    assert t == a.copy().T  # each T is another view: they were never equal
    assert t != (a * 2).T
    assert t != a
    assert a != t


def test_the_memory_budget_holds() -> None:
    a = sf.CSR.from_coordinates((1, 2**40), np.array([0]), np.array([7]), np.array([1], np.float32))
    with sf.limits.using(memory=1 << 20):
        with pytest.raises(sf.errors.LimitError):
            a.T.to_dense()
        with pytest.raises(sf.errors.LimitError):
            a.T.to_csr()


def test_an_invalid_matrix_is_refused() -> None:
    a = sf.convert(np.ones((4, 4), np.float32), "bsr:blocksize=2x2")
    for bad in (a.with_arrays(indices=a.indices + np.int32(9)), sf.convert(a, "csr")):
        broken = bad.with_arrays(indices=bad.indices + np.int32(9))
        with pytest.raises(sf.errors.IndexBoundsError):
            broken.T.materialize()


def test_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = stand_in_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    a = sf.convert(np.eye(3, 5, dtype=np.float32), "csr")
    there = a.T.to("cuda")
    assert (there.device, there.shape) == ("cuda:0", (5, 3))
    assert isinstance(there.matrix.values, cupy.ndarray)


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "params"), EVERY, ids=IDS)
def test_on_a_gpu_like_on_the_host(fmt: type[Format], params: dict[str, Any]) -> None:
    for make in CASES.values():
        try:
            a = fmt.from_dense(make("float16"), **params)
        except sf.errors.StructureError:
            continue
        assert a.to("cuda").T.materialize().to("cpu") == a.T.materialize()
        assert a.to("cuda").T.to_csr().to("cpu") == a.T.to_csr()
