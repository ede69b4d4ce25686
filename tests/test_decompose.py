"""Decomposing a matrix: every rule takes what its definition says, and the parts are the matrix, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import laws
import numpy as np
import pytest
import strict_cupy
from cases import CASES, values
from catalogue import command
from hypothesis import given, settings
from hypothesis import strategies as st

import spformat as sf
from spformat.arrays.dtypes import VALUE_TYPES, bits, nonzero_mask
from spformat.errors import StructureError, UsageError
from spformat.formats import edges, parse_spec, registered, spec_text, unregister
from spformat.formats.csr import CSR
from spformat.formats.hooks import LINES
from spformat.interop.matrices import read_matrix
from spformat.preprocess import masks

ROOT = Path(__file__).parent.parent
Array = np.ndarray[Any, Any]
Oracle = Callable[[Array, Array], Array]
"""(values, which are left) -> which the rule takes, by definition, on dense arrays."""


def in_cells(held: Array, R: int, C: int) -> Array:
    """For each place the number of values in its R x C cell."""
    M, K = held.shape
    full = np.zeros((-(-M // R) * R, -(-K // C) * C), int)
    full[:M, :K] = held
    sums = full.reshape(full.shape[0] // R, R, full.shape[1] // C, C).sum(axis=(1, 3))
    return np.kron(sums, np.ones((R, C), int))[:M, :K]


def cells(R: int, C: int, least: float, most: float = 1) -> Oracle:
    def oracle(x: Array, held: Array) -> Array:
        density = in_cells(held, R, C) / (R * C)
        return held & (density >= least) & (density <= most)

    return oracle


def rows(least: int, most: int) -> Oracle:
    return lambda x, held: held & (held.sum(axis=1) >= least)[:, None] & (held.sum(axis=1) <= most)[:, None]


def columns(least: int) -> Oracle:
    return lambda x, held: held & (held.sum(axis=0) >= least)


def largest(n: int, m: int, L: int) -> Oracle:
    """The n vectors of L rows with the largest squared norm in each window of m columns, the first among equals."""

    def oracle(x: Array, held: Array) -> Array:
        taken, size = np.zeros(held.shape, bool), np.where(held, np.abs(x.astype(np.float64)), 0)
        size = np.where(np.isnan(size), np.inf, size) ** 2
        for top in range(0, held.shape[0], L):
            for left in range(0, held.shape[1], m):
                here = slice(top, top + L), slice(left, left + m)
                norms = [(-c.sum(), j) for j, c in enumerate(size[here].T) if held[here][:, j].any()]
                for _, j in sorted(norms)[:n]:
                    taken[top : top + L, left + j] = held[top : top + L, left + j]
        return taken

    return oracle


def then(first: Oracle, second: Oracle) -> Oracle:
    return lambda x, held: second(x, first(x, held))


TAKES: dict[str, Oracle] = {
    "bsr:4x4": cells(4, 4, 0.5),
    "bsr:blocksize=2x3,density>=0.7": cells(2, 3, 0.7),
    "dbsr:4x2,density<=0.4": cells(4, 2, 0, 0.4),
    "bsr:blocksize=2x2,density>=0.5,row_length>=3": then(rows(3, 10**9), cells(2, 2, 0.5)),
    "sr-bcrs:vector_length=4,stride=2": cells(4, 1, 0.5),
    "sr-bcrs:vector_length=3,stride=2,density>=1": cells(3, 1, 1),
    "ell-buckets:max_width=4": rows(0, 4),
    "ell-buckets:max_width=2,row_length<=6": rows(0, 6),
    "csr:row_length>=5": rows(5, 10**9),
    "csr:row_length>=2,row_length<=4": rows(2, 4),
    "csr:column_degree>=3": columns(3),
    "bitmask:column-degree>=2": columns(2),
    "2:4": largest(2, 4, 1),
    "two-four:logical,column_degree>=2": then(columns(2), largest(2, 4, 1)),
    "vector-nm:n=1,m=3,vector_length=2": largest(1, 3, 2),
}
LAST = ("csr", "bitmask", "ell-buckets", "bsr:2x2", "dense")


def matrix(seed: int, shape: tuple[int, int], density: float) -> Array:
    """Small integers of both signs, many of the same magnitude, among zeros of both signs; infinities and NaN."""
    rng = np.random.default_rng(seed)
    x = rng.choice([-3, -2, -1, 1, 2, 3, np.inf, np.nan, -0.0], shape, p=[0.18] * 4 + [0.08] * 2 + [0.04] * 3)
    x[rng.random(shape) >= density] = 0
    return x.astype(np.float16)


def check(x: Array, rules: list[str]) -> sf.Sum:
    """The laws of every sum that was decomposed; returns it."""
    s = sf.decompose(x, *rules)
    assert s.is_validated
    sf.Sum(parts=s.parts).validate()  # disjoint, and each part as its format demands
    assert laws.same(s.to_dense(), laws.without_negative_zeros(x))
    assert s.to_csr() == CSR.from_dense(x)
    assert s.count_nonzeros() == sum(p.count_nonzeros() for p in s.parts) == int(nonzero_mask(x).sum())
    assert len(s.parts) == len(rules)
    text = "+".join(rules)
    fmt, params = parse_spec(text)
    assert sf.convert(x, text) == sf.convert(CSR.from_dense(x), text) == s
    full = spec_text(fmt, fmt.resolve_params(params))
    assert sf.convert(x, full) == s
    assert spec_text(fmt, fmt.resolve_params(parse_spec(full)[1])) == full
    return s


@settings(max_examples=settings.default.max_examples // 3)  # each example tries up to three rules
@given(
    st.integers(0, 2**32), st.tuples(st.integers(0, 13), st.integers(0, 13)), st.sampled_from([0.1, 0.5, 0.9]),
    st.lists(st.sampled_from(list(TAKES)), min_size=1, max_size=2), st.sampled_from(LAST),
)  # fmt: skip
def test_each_rule_takes_what_its_definition_says(
    seed: int, shape: tuple[int, int], density: float, rules: list[str], last: str
) -> None:
    x = matrix(seed, shape, density)
    s = check(x, [*rules, last])
    left = nonzero_mask(x)
    for rule, part in zip(rules, s.parts, strict=False):
        taken = TAKES[rule](x, left)
        wanted = np.where(taken, bits(x), 0).astype(np.uint16).view(np.float16)
        assert laws.same(part.to_dense(), wanted), rule
        left &= ~taken
    assert laws.same(s.parts[-1].to_dense(), np.where(left, bits(x), 0).astype(np.uint16).view(np.float16))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_every_value_type_and_corner(case: str, dtype: str, tmp_path: Path) -> None:
    x = CASES[case](dtype)
    rules = ["bsr:8x4,density>=0.6", "two-four", "vector-nm:n=1,m=4,vector_length=4", "ell-buckets:max_width=2", "csr"]
    s = check(x, [rule for rule in rules if dtype in parse_spec(rule.split(",")[0])[0].value_dtypes])
    laws.check_container(s, tmp_path)


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_the_largest_values_are_those_of_the_masks(dtype: str) -> None:
    """2:4 and vectors rank by the same numbers as the masks that prune to them, whatever the bits."""
    x = values(np.random.default_rng(5), (37, 66), dtype)
    some = nonzero_mask(x)
    wide = sf.decompose(x, "vector-nm:n=3,m=8,vector_length=4", "csr").parts[0].to_dense()
    kept = masks.magnitude_vector_nm(x, 3, 8, 4, nonfinite="keep") & some
    assert laws.same(wide, np.where(kept, bits(x), 0).astype(bits(x).dtype).view(x.dtype))
    if dtype in sf.TwoFour.value_dtypes:
        pairs = sf.decompose(x, "two-four", "csr").parts[0].to_dense()
        kept = masks.magnitude_nm(x, 2, 4, nonfinite="keep") & some
        assert laws.same(pairs, np.where(kept, bits(x), 0).astype(bits(x).dtype).view(x.dtype))


def test_stored_zeros_are_in_no_part() -> None:
    stored = np.array([0.0, -0.0, 5.0, 0.0], np.float32)
    a = CSR(shape=(2, 4), indptr=np.array([0, 3, 4], np.int32), indices=np.array([0, 1, 2, 3], np.int32), data=stored)
    s = sf.decompose(a, "csr:row_length>=2", "ell-buckets:max_width=1")
    assert [p.nnz for p in s.parts] == [0, 1], "a zero counts in no row"
    assert s.stored_zeros == 0
    np.testing.assert_array_equal(s.to_dense(), [[0, 0, 5, 0], [0, 0, 0, 0]])


def test_parts_stay_in_their_places_and_rounding_comes_first() -> None:
    x = np.eye(4)
    s = sf.decompose(x, "bsr:4x4+csr:row_length>=9", "two-four", dtype="bfloat16")
    assert [(p.name, p.nnz) for p in s.parts] == [("bsr", 0), ("csr", 0), ("two-four", 4)]
    assert s.dtype.name == "bfloat16"
    assert sf.convert(s, "csr:row_length>=1+csr").parts[0].nnz == 4, "a sum is divided anew by other rules"
    assert sf.convert(s, "sum") is s


def test_a_part_that_cannot_hold_its_values_is_named() -> None:
    with pytest.raises(StructureError, match=r"sum: part 1: two-four: 3 group\(s\).* first: row 1") as e:
        sf.decompose(np.triu(np.ones((4, 4), np.float32))[[3, 0, 1, 0]], "csr:row_length<=1", "two-four")
    assert (e.value.count, e.value.first) == (3, (1, 0))
    with pytest.raises(StructureError, match="sum: part 0: two-four: values of dtype float64"):
        sf.decompose(np.ones((2, 2)), "two-four", "csr")


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "one rule": (("csr",), "expected the rules of two parts or more, got 1; the last takes the rest"),
    "none": ((), "say what each part takes|two parts or more, got 0"),
    "an empty rule": (("bsr", ""), "part 1: unknown format ''"),
    "a plus too many": (("bsr++csr",), "part 1: unknown format ''"),
    "unknown format": (("bsx:16x16", "csr"), r"part 0: unknown format 'bsx'; did you mean 'bsr'\?"),
    "auto": (("auto", "csr"), "part 0: unknown format 'auto'"),
    "a sum": (("sum", "csr"), "part 0: sum: say what each part takes"),
    "unknown condition": (("bsr:fill>=0.5", "csr"),
                          r"unknown condition 'fill'; bsr has density \(share of .*\), row_length \(values in the row\)"),
    "of another format": (("csr:density>=0.5", "csr"), "unknown condition 'density'; csr has row_length"),
    "strictly": (("bsr:density>0.5", "csr"), "expected a condition with >= or <=, got density>0.5"),
    "equal": (("csr:row_length==5", "csr"), "expected a condition with >= or <=, got row_length==5"),
    "turned round": (("bsr:32x32,density=>0.5", "csr"), "expected a condition with >= or <=, got density=>0.5"),
    "a measure as a parameter": (("csr:row_length=5", "csr"), "expected a condition with >= or <=, got row_length=5"),
    "no share": (("bsr:density>=50", "csr"), "density: expected a share in 0 .. 1, got '50'"),
    "nan": (("bsr:density>=nan", "csr"), "density: expected a share in 0 .. 1, got 'nan'"),
    "no int": (("csr:row_length>=1.5", "csr"), "row_length: expected an int >= 0, got '1.5'"),
    "negative": (("csr:row_length>=-1", "csr"), "row_length: expected an int >= 0, got '-1'"),
    "no bound": (("csr:row_length>=", "csr"), "row_length: expected an int >= 0, got ''"),
    "twice": (("csr:row_length>=1,row-length>=2", "csr"), "row_length is bounded twice with >="),
    "param twice": (("bsr:16x16,blocksize=8x8", "csr"), "blocksize is given twice, as 16x16 and 8x8"),
    "param range": (("bsr:0x4", "csr"), r"part 0: bsr: blocksize: expected two ints in 1 .. 1024, got '0x4'"),
    "a lone value": (("sr-bcrs:8", "csr"), "expected name=value after ':', got '8'"),
    "takes all": (("csr", "bsr"), "csr: it would take every value.* expected a condition on row_length or column_degree"),
    "conditions of the rest": (("bsr", "csr:row_length>=4"),
                               "part 1: csr: the last part takes all that the others leave.* got row_length>=4"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_texts(what: str, tmp_path: Path) -> None:
    rules, text = REFUSED[what]
    with pytest.raises(UsageError, match=text):
        sf.decompose(np.eye(4, dtype=np.float32), *rules)
    if len("+".join(rules).split("+")) > 1:
        sf.save_dense(tmp_path / "w.safetensors", {"w": np.eye(4, dtype=np.float32)})
        answer = command("convert", tmp_path / "w.safetensors", tmp_path / "out", "--to", "+".join(rules))
        assert (answer.code, (tmp_path / "out").exists()) == (2, False)


def test_other_refusals() -> None:
    x = np.eye(4, dtype=np.float32)
    with pytest.raises(UsageError, match=r"a condition says which values a part .*'bsr:density>=0.5\+csr'"):
        sf.convert(x, "bsr:density>=0.5")
    with pytest.raises(UsageError, match="sum: unknown parameter 'blocksize'; each part has its own"):
        sf.convert(x, "bsr+csr", blocksize=4)
    with pytest.raises(UsageError, match=r"spformat\.decompose"):
        sf.convert(x, "sum")
    with pytest.raises(UsageError, match="rules: expected a text for each part, got 7"):
        sf.convert(x, "sum", rules=7)
    assert spec_text(sf.Sum, sf.Sum.resolve_params({"rules": ["bsr:2x2,density>=-0,density<=1e-3", "csr"]})) == (
        "bsr:blocksize=2x2,density>=0,density<=0.001+csr"
    )
    assert sf.convert(x, "bsr:2x2") == sf.convert(x, "bsr", blocksize=2), "a lone value is the only parameter"


def test_real_matrices(tmp_path: Path) -> None:
    """A pruned layer of a transformer, and a citation graph with hubs."""
    layer = read_matrix(
        ROOT / "fixtures/matrices/dlmc_transformer_l0_0.9_enc2_ffn2.smtx", values="normal", dtype="float16"
    )
    graph = read_matrix(ROOT / "fixtures/matrices/cora.npz")
    for x, rules in (
        (layer, ["bsr:2x2,density>=0.75", "two-four", "csr"]),
        (graph, ["csr:column_degree>=60", "csr:row_length>=30", "ell-buckets:max_width=8", "csr"]),
    ):
        s = sf.decompose(x, *rules)
        assert s.to_csr() == x.to_csr()
        assert all(p.nnz for p in s.parts)
        B = np.random.default_rng(0).integers(-2, 3, (x.shape[1], 3)).astype(np.float32)
        if x.dtype == np.float32:
            np.testing.assert_allclose(sf.spmm(s, B), x.to_dense() @ B, rtol=1e-5)


# ------------------------------------------------------------------ devices, plug-ins


def test_on_the_arrays_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is mixed with arrays of the host, and no function is called that CuPy lacks."""
    x = matrix(3, (40, 50), 0.5)
    a = sf.convert(x, "csr")
    cupy: Any = strict_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(edges, "_registered", lambda *_: ())
    for rules in (*([rule, "csr"] for rule in TAKES), ["csr:row_length>=20", "2:4", "ell-buckets"]):
        there = sf.decompose(a.to("cuda"), *rules)
        assert all(isinstance(v, cupy.ndarray) for v in there.all_arrays().values())
        assert there.to("cpu") == sf.decompose(a, *rules)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for seed in range(3):
        a = sf.convert(matrix(seed, (140, 250), 0.5), "csr")
        for rule in TAKES:
            assert sf.decompose(a.to("cuda"), rule, "csr").to("cpu") == sf.decompose(a, rule, "csr"), rule


def test_a_format_of_a_plug_in_brings_its_rule() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
    class Diagonal(sf.Bitmask):
        name, selective = "diagonal", True

        @classmethod
        def covered(cls, a: CSR, params: dict[str, Any], conditions: Any) -> Any:
            return a.rows() == a.indices

        @classmethod
        def _from_csr(cls, a: CSR, **params: Any) -> Self:
            return cls.trusted(**sf.Bitmask.from_csr(a).fields())

    sf.register(Diagonal)
    try:
        x = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
        s = sf.decompose(x, "diagonal", "csr")
        np.testing.assert_array_equal(s.parts[0].to_dense(), np.diag(np.diag(x)))
        np.testing.assert_array_equal(s.to_dense(), x)
    finally:
        unregister("diagonal")


def test_every_format_can_be_a_rule_and_the_rest() -> None:
    x = np.zeros((40, 64), np.float32)
    x[::3, ::5] = 1
    for fmt in registered():
        for params in fmt.examples():
            text = spec_text(fmt, params)
            condition = ("," if ":" in text else ":") + "row_length>=1"
            check(x, [text + condition, "csr"])
            check(x, ["csr:row_length>=999", text])


def test_the_page_lists_the_measures() -> None:
    page = (ROOT / "docs/formats/sum.md").read_text().split("| measure | is |")[1].split("\n\n")[0]
    lines = [line.replace("\\*", "*").split("|")[1:5] for line in page.splitlines() if line.startswith("| `")]
    listed = {(m.strip(" `"), doc.split(":")[0].replace("`", "").strip(), f.strip(" `")) for m, doc, fs, _ in lines
              for f in fs.split(",")}  # fmt: skip
    declared = {(m.name, m.doc, fmt.name) for fmt in registered() for m in fmt.measures}
    assert listed == declared | {(m.name, m.doc, "all") for m in LINES}
    usual = {str(c) for fmt in registered() for c in fmt.usual_conditions({"max_width": 8})}
    assert usual == {"density>=0.5", "row_length<=8"}


def test_rules_are_texts() -> None:
    for rule in (sf.BSR, None, 3):
        with pytest.raises(UsageError, match="expected a text for each part"):
            sf.decompose(np.eye(4, dtype=np.float32), rule, "csr")  # type: ignore[arg-type]
