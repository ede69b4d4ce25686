"""Every format against the golden vectors of its specification, and against known counts on real matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_vectors import Case, cases, csr_of, described, meta_order_objects, numbers, vectors

from spformat import errors
from spformat.formats import BSR, CSR, DBSR, FORMATS, SRBCRS, ELLBuckets, TwoFour
from spformat.formats.base import Format
from spformat.interop.matrices import read_matrix

MATRICES = Path(__file__).parent.parent / "fixtures" / "matrices"
COUNTS = json.loads((MATRICES / "counts.json").read_text())
CASES = [pytest.param(c, id=f"{c.fmt.name}-{c.name}") for fmt in FORMATS for c in cases(fmt)]


def converted(case: Case) -> Format:
    if case.operation == "canonical":
        assert case.csr is not None
        return case.csr.canonical()
    source = case.csr if case.operation == "from_csr" else case.dense
    return getattr(case.fmt, case.operation)(source, **case.params)


@pytest.mark.parametrize("case", CASES)
def test_conversion(case: Case) -> None:
    if "error" in case.expect:
        fields = dict(case.expect["error"])
        with pytest.raises(getattr(errors, fields.pop("type"))) as e:
            converted(case)
        got = {k: getattr(e.value, k) for k in fields}
        assert got == {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return
    made, expected = converted(case), case.object()
    assert made.arrays().keys() == case.expect["arrays"].keys()
    for name, array in expected.arrays().items():
        assert made.arrays()[name].dtype == array.dtype, name
        np.testing.assert_array_equal(made.arrays()[name], array, err_msg=name)
    assert made == expected  # also params, tables and the sign of zeros
    assert made.nbytes == case.expect["nbytes"]
    made.validate()
    expected.validate()


OBJECTS = [c for c in CASES if "error" not in c.values[0].expect and c.values[0].fmt is not CSR]


@pytest.mark.parametrize("case", OBJECTS)
def test_way_back(case: Case) -> None:
    made, back = case.object(), case.expect.get("to_csr")
    if back is not None:
        assert made.to_csr() == csr_of(back, made.shape, made.dtype.name)
    else:
        assert case.csr is not None
        assert made.to_csr() == (case.csr if made.keeps_stored_zeros else case.csr.without_zeros())


def test_meta_orders_are_permutations_of_the_same_words() -> None:
    same = vectors("two-four-meta-orders")
    dense = numbers(
        {"dtype": same["input"]["dtype"], "shape": same["input"]["shape"], "values": same["input"]["dense"]}
    )
    objects = {x.meta_order: x for x in meta_order_objects()}
    logical = objects["logical"].meta.reshape(32, 8)
    for order, x in objects.items():
        assert TwoFour.from_dense(dense, meta_order=order) == x
        np.testing.assert_array_equal(x.meta[np.array(same["orders"][order]["offset"])], logical)
        np.testing.assert_array_equal(x.to_dense(), dense)


# ---------------------------------------------------------------------------------------------------- invalid objects


def broken(case: dict[str, Any]) -> Format:
    """The base object of a case with one number changed."""
    row = vectors("invalid")["bases"][case["base"]]
    where, at, to = case["change"]["in"], tuple(case["change"]["at"]), case["change"]["to"]
    if where.startswith("tables."):
        row["tables"][where.removeprefix("tables.")][at[0]] = to
        return described(row)
    f = described(row)
    changed = f.arrays()[where].copy()
    changed[at] = to
    return f.with_arrays(**{where: changed})


@pytest.mark.parametrize("key", vectors("invalid")["bases"])
def test_bases_are_valid(key: str) -> None:
    assert described(vectors("invalid")["bases"][key]).validate().is_validated


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{c['base']}-{c['why']}") for c in vectors("invalid")["cases"]])
def test_validate_names_the_first_broken_level(case: dict[str, Any]) -> None:
    f = broken(case)
    if case["level"] == "memory-safety":
        with pytest.raises(errors.InvariantError):
            f.check_memory()
    else:
        f.check_memory()
    with pytest.raises(errors.InvariantError) as e:
        f.validate()
    assert e.value.array is not None
    assert not f.is_validated


# --------------------------------------------------------------------------------------------------- real matrices


def check_counts(a: CSR, expected: dict[str, Any], *, zeros_dropped: bool) -> None:
    """What each format holds; formats that drop stored zeros only where ``a`` has none."""
    hyb = ELLBuckets.from_csr(a)
    assert hyb.max_width == 1 << expected["k"]
    assert list(hyb.rows_per_bucket) == expected["hyb1_rows"]
    assert round(100 * (hyb.stored - a.nnz) / hyb.stored, 2) == expected["hyb1_pad"]
    parts = ELLBuckets.from_csr(a, column_parts=4, max_width=hyb.max_width)
    assert round(100 * (parts.stored - a.nnz) / parts.stored, 2) == expected["hyb4_pad"]
    if not zeros_dropped:
        return
    for vectors_key, groups_key, t, g in (("sr8", "sr8g16", 8, 16), ("tc16", "tc16x8blocks", 16, 8)):
        sr = SRBCRS.from_csr(a, vector_length=t, stride=g)
        assert int((sr.indices >= 0).sum()) == expected[vectors_key]
        assert len(sr.indices) == expected[groups_key]
    for size in (16, 32):
        assert len(BSR.from_csr(a, blocksize=(size, size)).indices) == expected[f"bsr{size}"]
    dbsr = DBSR.from_csr(a, blocksize=(32, 32))
    assert len(dbsr.row_ids) == expected["bsr32_nonempty_rows"]
    assert len(BSR.from_csr(a, blocksize=(32, 32)).indptr) - 1 == expected["bsr32_rows"]


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_counts_on_real_matrices(name: str) -> None:
    a, expected = read_matrix(MATRICES / name), COUNTS[name]
    check_counts(a, expected, zeros_dropped=not expected["explicit_zeros"])
    if "canonical" in expected:
        assert a.canonical().nnz == expected["canonical"]["nnz"]
        check_counts(a.canonical(), expected["canonical"], zeros_dropped=True)


@pytest.mark.parametrize("name", sorted(COUNTS))
@pytest.mark.parametrize(
    ("fmt", "params"),
    [
        pytest.param(ELLBuckets, {}, id="ell-buckets"),
        pytest.param(BSR, {"blocksize": (16, 8)}, id="bsr"),
        pytest.param(DBSR, {"blocksize": (8, 32)}, id="dbsr"),
        pytest.param(SRBCRS, {"vector_length": 8, "stride": 16}, id="sr-bcrs"),
    ],
)
def test_real_matrices_go_round(name: str, fmt: type[Format], params: dict[str, Any]) -> None:
    a = read_matrix(MATRICES / name)
    packed = fmt.from_csr(a, **params).validate()
    back = packed.to_csr()
    assert back == (a if fmt.keeps_stored_zeros else a.canonical())
    assert fmt.from_csr(back, **packed.params()) == packed
