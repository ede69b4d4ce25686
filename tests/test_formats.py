"""The laws over the registry: every format x parameters x case x value type."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import laws
import numpy as np
import pytest
from cases import CASES, params_of, sparse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES
from spformat.formats import registered
from spformat.formats.base import Format
from spformat.formats.csr import CSR

FORMATS = [(f, p) for f in registered() for p in params_of(f.name)]
IDS = [f"{f.name}{list(p.values()) if p else ''}" for f, p in FORMATS]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("fmt", "params"), FORMATS, ids=IDS)
def test_round_trip_and_edge(fmt: type[Format], params: dict[str, Any], case: str) -> None:
    for dtype in laws.DTYPES:
        x = CASES[case](dtype)
        laws.check_roundtrip(fmt, params, x)
        laws.check_edge(fmt, params, x)


@pytest.mark.parametrize(("fmt", "params"), FORMATS, ids=IDS)
def test_container_round_trip(fmt: type[Format], params: dict[str, Any], tmp_path: Path) -> None:
    tried = 0
    for case, make in CASES.items():
        for dtype in ("bfloat16", "float32"):
            try:
                f = fmt.from_dense(make(dtype), **params)
            except sf.errors.StructureError:
                continue
            folder = tmp_path / f"{case}-{dtype}"
            folder.mkdir()
            laws.check_container(f, folder)
            tried += 1
    assert tried >= 8


@pytest.mark.parametrize("n", [0, 1, 7, 17])
@pytest.mark.parametrize(("fmt", "params"), FORMATS, ids=IDS)
def test_reference_product_is_exact(fmt: type[Format], params: dict[str, Any], n: int) -> None:
    for case, make in CASES.items():
        x = laws.integers(make("float16" if "float32" not in fmt.value_dtypes else "float32"))
        try:
            f = fmt.from_dense(x, **params)
        except sf.errors.StructureError:
            continue
        laws.check_spmm(f, x, "reference", n, np.random.default_rng(len(case)))


@pytest.mark.parametrize(("fmt", "params"), FORMATS, ids=IDS)
def test_every_bf16_pattern_survives(fmt: type[Format], params: dict[str, Any]) -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    x = np.zeros((64, 4096), np.uint16)
    x[:, ::4] = patterns.reshape(64, 1024)  # one value in every group of four: fits 2:4 and n:m
    x = x.view(VALUE_TYPES["bfloat16"].numpy)
    f = fmt.from_dense(x, **params)
    back = f.to_dense().view(np.uint16)[:, ::4].reshape(-1)
    if fmt is not sf.Dense:
        patterns = np.where(patterns == 0x8000, np.uint16(0), patterns)
    np.testing.assert_array_equal(back, patterns)


@pytest.mark.parametrize(("fmt", "params"), FORMATS, ids=IDS)
def test_object_habits(fmt: type[Format], params: dict[str, Any]) -> None:
    x = CASES["two_four"]("float16") if fmt.name != "vector-nm" else CASES["vectors"]("float16")
    try:
        f = fmt.from_dense(x, **params)
    except sf.errors.StructureError:
        pytest.skip("these parameters do not hold the case")
    assert pickle.loads(pickle.dumps(f)) == f
    assert f.to("cpu") is f
    assert sf.convert(f, fmt, **params) is f
    changed = f.with_arrays(**{k: a.copy() for k, a in f.arrays().items()})
    assert changed == f
    assert not changed.is_validated
    assert changed.validate().is_validated
    assert fmt.__name__ in repr(f)
    for other in registered():
        try:
            g = sf.convert(f, other, **(params if other is fmt else params_of(other.name)[0]))
        except sf.errors.StructureError:
            continue
        assert laws.same(g.to_dense(), f.to_dense())


def _case(draw: Any) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(laws.DTYPES))
    row = VALUE_TYPES[dtype]
    shape = draw(st.tuples(st.integers(0, 40), st.integers(0, 40)))
    special = [0, 1, int(row.zero_mask), int(row.zero_mask) + 1, int(row.zero_mask) - 1]
    special = [v & (2 ** (8 * row.bits.itemsize) - 1) for v in special]
    top = 2 ** (8 * row.bits.itemsize) - 1
    element = st.one_of(st.sampled_from(special), st.integers(0, top))
    fill = st.just(0)
    return draw(hnp.arrays(row.bits, shape, elements=element, fill=fill)).view(row.numpy)


@given(st.data())
def test_laws_hold_for_drawn_matrices(data: Any) -> None:
    fmt, params = data.draw(st.sampled_from(FORMATS))
    x = _case(data.draw)
    laws.check_roundtrip(fmt, params, x)
    laws.check_edge(fmt, params, x)


@given(st.data())
def test_one_changed_index_is_rejected_or_decodes_otherwise(data: Any) -> None:
    fmt, params = data.draw(st.sampled_from([(f, p) for f, p in FORMATS if f is not sf.Dense]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    x = sparse(rng, (19, 45), "float16", 0.1)
    try:
        f = fmt.from_dense(x, **params)
    except sf.errors.StructureError:
        return
    name = data.draw(st.sampled_from([d.name for d in fmt.declared_arrays() if d.kind != "VALUE"]))
    a = getattr(f, name)
    if not a.size:
        return
    changed = a.copy()
    at = int(rng.integers(a.size))
    delta = data.draw(st.sampled_from([1, -1, 2, 64]))
    changed.reshape(-1)[at : at + 1] += np.array([delta]).astype(a.dtype)  # wraps, as a flipped bit would
    try:
        g = f.with_arrays(**{name: changed}).validate()
    except sf.errors.FormatError:
        return
    assert not laws.same(g.to_dense(), f.to_dense()), f"{fmt.name}.{name}[{at}] changed nothing and passed"


def test_sizes_of_the_specification() -> None:
    """The exact sizes of a 4096 x 4096 matrix with 16-bit values, at two densities."""
    M = K = 4096
    two = np.dtype(np.float16)
    for per_row, csr, bitmask in ((2048, 50_348_036, 18_890_756), (410, 10_092_548, 5_472_260)):
        nnz = M * per_row
        for name, wanted in (("dense", 33_554_432), ("csr", csr), ("bitmask", bitmask)):
            assert _specified(name, (M, K), two, nnz) == wanted
    assert _specified("two-four", (M, K), two, 0) == 18_874_368
    assert _specified("vector-nm", (M, K), two, 0, n=16, m=32, vector_length=32) == 17_039_360
    packed = _specified("vector-nm", (M, K), two, 0, n=16, m=32, vector_length=32, tile_rows=128, tile_cols=64)
    assert packed == 17_563_648
    assert _specified("vector-nm", (M, K), two, 0, n=4, m=32, vector_length=128) == 4_210_688


def _specified(name: str, shape: tuple[int, int], dtype: np.dtype[Any], nnz: int, **params: Any) -> int:
    fmt = sf.by_name(name)
    specs = fmt.array_specs(shape, dtype, nnz, fmt.resolve_params(params))
    assert specs is not None
    return sum(d.itemsize * int(np.prod(s, dtype=object)) for d, s in specs.values())


def test_int64_indices_only_when_the_bound_demands_them() -> None:
    a = CSR.from_coordinates((3, 2**31 + 5), np.array([0, 2]), np.array([1, 2**31 + 4]), np.ones(2, np.float32))
    assert a.indices.dtype == np.int64
    assert a.indptr.dtype == np.int32
    a.validate()
    with pytest.raises(sf.errors.ArrayError, match="indices: expected dtype int64, got int32"):
        a.with_arrays(indices=np.zeros(2, np.int32))
    with pytest.raises(sf.errors.LimitError, match="bytes"):
        a.to_dense()
    for name in ("ell-buckets", "bsr", "dbsr", "sr-bcrs"):
        f = sf.convert(a, name)
        assert f.validate().to_csr() == a


@pytest.mark.parametrize("fmt", registered(), ids=lambda f: f.name)
def test_values_without_a_place_are_refused_by_name(fmt: type[Format]) -> None:
    for dtype in (np.complex64, np.bool_, np.int32, object):
        with pytest.raises(sf.errors.StructureError, match=r"not representable") as e:
            sf.convert(np.zeros((4, 4), dtype), fmt, **params_of(fmt.name)[0])
        assert e.value.exit_code == 3


def test_refilled_buckets_hold_the_new_values() -> None:
    a = CSR.from_dense(CASES["prime"]("float32"))
    values = np.arange(1, a.nnz + 1, dtype=np.float32)
    refilled = sf.convert(a, "ell-buckets", column_parts=3, max_width=4).refill(values)
    refilled.validate()
    assert refilled.to_csr() == a.with_arrays(data=values)


def test_repacking_changes_the_tile_and_not_the_matrix() -> None:
    plain = sf.VectorNM.from_dense(CASES["vectors"]("float16"), n=2, m=4, vector_length=8)
    assert plain.kept_share == 1.0
    packed = plain.repacked(16, 8)
    assert packed == sf.VectorNM.from_dense(
        CASES["vectors"]("float16"), n=2, m=4, vector_length=8, tile_rows=16, tile_cols=8
    )
    assert 0.5 <= packed.kept_share <= 1.0  # two row groups of 2:4 need between 2 and 4 of every 4 columns
    assert packed.kept_share == (packed.col_info >= 0).mean()
    assert packed.repacked(0, 0) == plain


def test_odd_arrays_are_taken_as_the_matrix_they_show() -> None:
    x = np.arange(48, dtype=np.float32).reshape(6, 8)
    for y in (np.asfortranarray(x), x.T.copy().T, x[::-1][::-1], np.broadcast_to(x[0], (6, 8)), x.astype(">f4")):
        f = sf.convert(y, "csr")
        assert laws.same(f.to_dense(), np.ascontiguousarray(y).astype(np.float32))


def test_arrays_that_a_format_does_not_have() -> None:
    a = CSR.from_dense(np.eye(3, dtype=np.float32))
    with pytest.raises(sf.errors.UsageError, match="csr: with_arrays: expected some of indptr, indices, data, got dat"):
        a.with_arrays(dat=a.data)
    total = sf.Sum(parts=(a, sf.convert(1 - np.eye(3, dtype=np.float32), "coo")))
    with pytest.raises(sf.errors.UsageError, match="sum: with_arrays: expected some of no arrays, got data"):
        total.with_arrays(data=a.data)


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_coordinates_of_narrow_integers_do_not_overflow(kind: Any) -> None:
    """Coordinates of scipy have 32 bits: row * K + column overflowed, and values went to other rows, without an error."""
    rows, cols, top = np.array([3, 0, 2], kind), np.array([1, 3, 0], kind), np.iinfo(kind).max
    size = min(int(top), 100_000)
    rows[0], cols[1] = size - 1, size - 1
    a = CSR.from_coordinates((size, size), rows, cols, np.array([1, 2, 3], np.float32))
    np.testing.assert_array_equal(a.rows(), [0, 2, size - 1])
    assert (a.indices.tolist(), a.data.tolist()) == ([size - 1, 0, 1], [2, 3, 1])
    assert a.validate() is a
    with pytest.raises(
        sf.errors.ArrayError, match="csr: from_coordinates: expected integers for rows and columns, got float64"
    ):
        CSR.from_coordinates((size, size), rows.astype(float), cols, np.ones(3, np.float32))
    with pytest.raises(sf.errors.UsageError, match="csr: cols: expected an array on cpu, where data is, got list"):
        CSR.from_coordinates((size, size), rows, [1, 3, 0], np.ones(3, np.float32))


def test_a_tenth_format_takes_one_class_and_one_registration(tmp_path: Path) -> None:
    """A throw-away format: the container, the dispatcher, the CLI's tables and the laws pick it up."""
    from dataclasses import dataclass

    from spformat.formats import register, unregister
    from spformat.formats.base import INDEX, VALUE, array

    @register
    @dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
    class Coordinates(Format):
        """COO, row-major."""

        name, version = "coordinates", 1
        rows: Any = array(INDEX, "nnz", bound="M-1")
        cols: Any = array(INDEX, "nnz", bound="K-1")
        data: Any = array(VALUE, "nnz")

        def dims(self) -> dict[str, int]:
            return {"M-1": self.shape[0] - 1, "K-1": self.shape[1] - 1}

        @classmethod
        def _from_csr(cls, a: CSR, **params: Any) -> Any:
            a = a.without_zeros()
            return cls.trusted(shape=a.shape, rows=a.rows().astype(np.int32), cols=a.indices, data=a.data)

        def _to_csr(self) -> CSR:
            return CSR.from_coordinates(self.shape, self.rows.astype(np.int64), self.cols.astype(np.int64), self.data)

    try:
        for case, make in CASES.items():
            f = laws.check_roundtrip(Coordinates, {}, make("bfloat16"))
            laws.check_edge(Coordinates, {}, make("bfloat16"))
            assert f is not None
            (tmp_path / case).mkdir()
            laws.check_container(f, tmp_path / case)
        x = laws.integers(CASES["prime"]("float32"))
        laws.check_spmm(sf.convert(x, "coordinates"), x, "reference", 5, np.random.default_rng(0))
        assert sf.explain(sf.convert(x, "coordinates")).chosen == "reference.spmm"
        from spformat.preprocess.structure import analyse

        assert analyse(x).nbytes("coordinates") is None  # then a conversion tells
        source = tmp_path / "in.safetensors"
        sf.save_dense(source, {"w": x})
        from spformat.checkpoint import convert_checkpoint

        convert_checkpoint(source, tmp_path / "out", "coordinates")
        assert sf.load(tmp_path / "out" / "spformat-00001-of-00001.safetensors")["w"] == sf.convert(x, "coordinates")
    finally:
        unregister("coordinates")
    for other in (3, None, ["csr"], CSR):
        with pytest.raises(sf.errors.UsageError, match="expected the name of a format, as 'csr', got "):
            sf.by_name(other)  # type: ignore[arg-type]
        if other is not CSR:
            with pytest.raises(
                sf.errors.UsageError, match="register: expected a class derived from Format, with a name"
            ):
                sf.register(other)  # type: ignore[type-var]
    with pytest.raises(sf.errors.UsageError, match="unknown format"):
        sf.by_name("coordinates")


def test_coordinates_of_different_lengths() -> None:
    """Two rows beside one column and one value were a matrix marked as valid, whose pointer led beyond its arrays."""
    one, two = np.array([1]), np.array([0, 1])
    for rows, cols, data in ((two, one, one), (one, two, one), (one, one, two), (two[None], two[None], two)):
        with pytest.raises(
            sf.errors.ArrayError, match=r"csr: from_coordinates: expected rows, columns and values \[nnz\]"
        ):
            CSR.from_coordinates((4, 4), rows, cols, data.astype(np.float32))
