"""``a.refill(values)``: the same structure with new values, for every format."""

from __future__ import annotations

import sys
from typing import Any

import laws
import numpy as np
import pytest
import stand_in_cupy
from cases import CASES, params_of

import spformat as sf
from spformat.arrays.dtypes import bits
from spformat.formats import Format, registered, spec_text

EVERY = [(f, p) for f in registered() for p in params_of(f.name)]
IDS = [spec_text(f, p) for f, p in EVERY]


def nonzeros(count: int, dtype: np.dtype[Any], seed: int = 0) -> np.ndarray[Any, Any]:
    """Bits of any kind (NaN payloads, infinities, subnormals, both signs) but zeros."""
    raw = np.random.default_rng(seed).integers(1, 256, (count, dtype.itemsize), np.uint8)
    raw[:, -1] |= 1
    return raw.view(bits(np.empty(0, dtype)).dtype)[:, 0].view(dtype)


@pytest.mark.parametrize(("fmt", "params"), EVERY, ids=IDS)
def test_new_values_are_what_a_conversion_would_store(fmt: type[Format], params: dict[str, Any]) -> None:
    tried = 0
    for case, make in CASES.items():
        for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int8"):
            x = make(dtype)
            try:
                a = fmt.from_dense(laws.without_negative_zeros(x), **params)
            except sf.errors.StructureError:
                continue
            csr = a.to_csr()
            other = csr.with_arrays(data=nonzeros(csr.nnz, csr.dtype, len(case)))
            b = a.refill(other.data)
            assert b == fmt.from_csr(other, **a.params()), (case, dtype)
            assert b.is_validated
            assert b.with_arrays().validate().to_csr() == other
            assert b.refill(csr.data) == a
            tried += 1
    assert tried >= 16


@pytest.mark.parametrize(("fmt", "params"), EVERY, ids=IDS)
def test_the_second_time_nothing_is_converted(
    fmt: type[Format], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = fmt.from_dense(CASES["vectors" if fmt.name == "vector-nm" else "two_four"]("float16"), **params)
    values = nonzeros(a.to_csr().nnz, a.dtype)
    b = a.refill(values)
    for name in ("to_hub", "_to_csr", "from_hub", "_from_csr", "check_memory", "check_canonical", "quick_check"):
        monkeypatch.setattr(fmt, name, None)
    assert a.refill(values) == b
    c = b.refill(values)  # the places are those of the structure, and come along
    assert c == b
    assert not any(np.shares_memory(c.values, other) for other in (values, a.values, b.values))


def test_zeros_stay_where_a_format_keeps_them() -> None:
    """csr and its kin keep a zero, and its place; a block, a bit or a position of a zero would not be stored."""
    x = np.kron(np.eye(4, dtype=np.float16), np.ones((2, 2), np.float16))
    new = np.arange(16).astype(np.float16)
    new[3] = -0.0
    for name in ("csr", "csc", "coo", "ell-buckets"):
        a = sf.convert(x, name).refill(new)
        assert a.stored_zeros == 2
        assert laws.same(a.to_csr().data, new)
        assert a.refill(new[::-1].copy()).to_csr().data.tolist() == new[::-1].tolist()
    for name in ("dense", "bsr:blocksize=2x2", "sr-bcrs", "two-four", "vector-nm:n=2,m=4,vector_length=2", "bitmask"):
        with pytest.raises(sf.errors.StructureError, match=r"refill: .*, got 2 zeros, the first for item 0; csr") as e:
            sf.convert(x, name).refill(new)
        assert (e.value.fields["count"], e.value.fields["first"]) == (2, 0)


def test_a_sum_is_refilled_part_by_part() -> None:
    x = np.arange(1, 26, dtype=np.int8).reshape(5, 5)
    upper, lower = np.triu(x), np.tril(x, -1)
    a = sf.Sum.from_parts([sf.convert(upper, "bsr:blocksize=2x2"), sf.convert(lower, "csr")])
    b = a.refill(np.arange(-25, 0, dtype=np.int8))
    np.testing.assert_array_equal(b.to_dense(), x - 26)
    assert b.parts[0] == sf.convert(np.triu(x - 26), "bsr:blocksize=2x2")
    assert b.with_arrays().validate() == b


def test_a_stack_takes_the_values_of_its_matrices_one_after_another() -> None:
    x = np.arange(1, 25, dtype=np.int8).reshape(2, 3, 4)
    first = sf.convert(x[0], "csr")
    first = first.with_arrays(data=np.where(first.data == 5, 0, first.data).astype(np.int8)).validate()  # a stored zero
    a = sf.Stack.from_parts([first, sf.convert(x[1], "bsr:blocksize=2x2")])
    b = a.refill(np.arange(100, 123, dtype=np.int8))
    assert b[0].to_csr().data.tolist() == [100, 101, 102, 103, 0, *range(104, 111)]
    assert b[1] == sf.convert((x[1] + 98).astype(np.int8), "bsr:blocksize=2x2")
    assert b.with_arrays().validate() == b


def test_other_values_are_refused() -> None:
    a = sf.convert(CASES["prime"]("float32"), "csr")
    n = a.nnz
    for values, text in (
        (
            np.ones(n - 1, np.float32),
            rf"expected one value for each item of to_csr\(\), shape \({n},\), got \({n - 1},\)",
        ),
        (np.ones((n, 1), np.float32), rf"shape \({n},\), got \({n}, 1\)"),
        (np.ones(n), r"expected values of dtype float32, got float64; use values\.astype\('float32'\)"),
        ([1.0] * n, "expected a numpy or CuPy array, got list"),
    ):
        with pytest.raises(sf.errors.UsageError, match=f"csr: refill: .*{text}"):
            a.refill(values)  # type: ignore[arg-type]
    broken = a.with_arrays(indices=a.indices + np.int32(1000))
    with pytest.raises(sf.errors.IndexBoundsError):
        broken.refill(a.data)


def test_values_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", stand_in_cupy.module())
    a = sf.convert(CASES["prime"]("float32"), "csc")
    with pytest.raises(sf.errors.UsageError, match="expected values on cuda:0, where the matrix is, got some on cpu"):
        a.to("cuda").refill(a.data)


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "params"), EVERY, ids=IDS)
def test_on_a_gpu(fmt: type[Format], params: dict[str, Any]) -> None:
    import cupy

    a = fmt.from_dense(CASES["vectors" if fmt.name == "vector-nm" else "two_four"]("bfloat16"), **params)
    values = nonzeros(a.to_csr().nnz, a.dtype)
    on_device = cupy.asarray(values.view(np.uint16)).view(a.dtype)
    assert a.to("cuda").refill(on_device).to("cpu") == a.refill(values)
