"""The laws every format keeps. Each takes a matrix and raises AssertionError with what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, bits, nonzero_mask
from spformat.formats.base import Format
from spformat.formats.csr import CSR

Array = np.ndarray[Any, Any]


def without_negative_zeros(x: Array) -> Array:
    """A copy in which every zero is +0."""
    out = x.copy()
    bits(out)[~nonzero_mask(out)] = 0
    return out


def same(x: Array, y: Array) -> bool:
    """Same dtype, shape and bytes."""
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def check_roundtrip(fmt: type[Format], params: dict[str, Any], x: Array) -> Format | None:
    """CSR -> F -> CSR gives can(a), F -> CSR -> F gives f, decoding gives the matrix; None when x does not fit."""
    a = CSR.from_dense(x)
    try:
        f = fmt.from_csr(a, **params)
    except sf.errors.StructureError as e:
        check_refusal(fmt, params, x, e)
        return None
    f.validate()
    assert f.to_csr() == a
    assert fmt.from_csr(f.to_csr(), **f.params()) == f
    assert same(f.to_dense(), without_negative_zeros(x))
    assert f.shape == x.shape
    assert f.nbytes == sum(arr.nbytes for arr in f.arrays().values())
    specs = fmt.array_specs(x.shape, x.dtype, int(nonzero_mask(x).sum()), f.params())
    if specs is not None:
        assert specs == {k: (arr.dtype, arr.shape) for k, arr in f.arrays().items()}
    return f


def check_refusal(fmt: type[Format], params: dict[str, Any], x: Array, e: sf.errors.StructureError) -> None:
    """A refusal has the count and the first offender, and both ways of conversion refuse with the same facts."""
    if e.unit == "dtype":
        assert x.dtype.name not in fmt.value_dtypes
        return
    assert e.count >= 1
    assert e.found > e.limit
    assert e.hint.startswith("preprocess.masks.")
    try:
        fmt.from_dense(x, **params)
    except sf.errors.StructureError as direct:
        assert direct.fields == e.fields
    else:
        raise AssertionError("the direct edge accepts what the hub path refuses")


def check_edge(fmt: type[Format], params: dict[str, Any], x: Array) -> None:
    """Dense -> F directly equals the path through CSR, bit for bit; decoding directly equals decoding the CSR."""
    try:
        direct = fmt.from_dense(x, **params)
    except sf.errors.StructureError:
        return
    if fmt is sf.Dense:  # the one format that keeps -0.0
        assert same(direct.to_dense(), x)
        return
    hub = fmt.from_csr(CSR.from_dense(x), **params)
    assert direct == hub, f"{direct} != {hub}"
    assert same(direct.to_dense(), hub.to_csr().to_dense())


def check_container(f: Format, folder: Path) -> None:
    """Saved and loaded: the same object; saved twice: the same bytes."""
    one, two = folder / "one.safetensors", folder / "two.safetensors"
    sf.save(one, {"w": f})
    sf.save(two, {"w": f})
    assert one.read_bytes() == two.read_bytes()
    assert sf.load(one)["w"] == f


def check_spmm(f: Format, x: Array, backend: str, n: int, rng: np.random.Generator) -> None:
    """Integer-valued operands: the product is exact, so it must be equal in every bit."""
    B = rng.integers(-3, 4, (x.shape[1], n)).astype(x.dtype)
    out = np.full((x.shape[0], n), np.nan, np.float64).astype(np.float32)
    sf.spmm(f, B, out=out, backend=backend)
    wanted = x.astype(np.float64) @ B.astype(np.float64)
    np.testing.assert_array_equal(out.astype(np.float64), wanted)


def integers(x: Array) -> Array:
    """The pattern of x with small integer values of the same type: sums of them are exact."""
    held = nonzero_mask(x)
    rng = np.random.default_rng(3)
    out = np.zeros(x.shape, x.dtype)
    out[held] = rng.choice([-3, -2, -1, 1, 2, 3], int(held.sum())).astype(x.dtype)
    return out


DTYPES = tuple(VALUE_TYPES)
