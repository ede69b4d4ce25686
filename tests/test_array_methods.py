"""What fingers type that know numpy and scipy.sparse."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import spformat as sf
from spformat.checkpoint import Recipe, convert_checkpoint


def dense(rows: int = 64, cols: int = 128, seed: int = 0) -> np.ndarray[Any, Any]:
    """float16 [rows, cols] that every format holds: at most two of four, at most half of every window."""
    x = np.random.default_rng(seed).integers(1, 9, (rows, cols)).astype(np.float16)
    x.reshape(rows, -1, 4)[..., 2:] = 0
    return x


TARGETS = [*(f.name for f in sf.FORMATS if f.name != "vector-nm"), "vector-nm:n=2,m=4,vector_length=1"]


@pytest.mark.parametrize("target", TARGETS)
def test_methods_of_numpy_and_scipy(target: str) -> None:
    x = dense()
    a: Any = sf.convert(x, target)
    assert (a.ndim, a.shape, a.size) == (2, (64, 128), a.nnz)
    for same in (a.toarray(), a.todense(), a.tocsr().toarray(), a.copy().toarray(), a.T.T.toarray()):
        assert np.array_equal(same, x)
    assert a.T.toarray().tolist() == x.T.tolist() == a.T.todense().tolist() == a.T.tocsr().toarray().tolist()
    copied = a.copy()
    assert copied == a
    assert not any(np.shares_memory(m, n) for m, n in zip(a.arrays().values(), copied.arrays().values(), strict=True))
    assert type(a * 2) is type(2 * a) is type(a / 2) is type(-a) is type(a)
    assert np.array_equal((2 * a).toarray(), 2 * x)
    assert np.array_equal((a / 2).toarray(), x / 2)
    assert np.array_equal((-a).toarray(), np.where(x == 0, x, -x))
    assert not (0 * a).toarray().any()
    assert (a * 0.5).dtype == a.dtype
    assert a.sum() == x.sum(dtype=np.float64)
    assert np.array_equal(a.sum(axis=0), x.sum(axis=0, dtype=np.float64))
    assert np.array_equal(a.sum(axis=1), x.sum(axis=1, dtype=np.float64))
    narrow = a.astype("bfloat16")
    assert (type(narrow), narrow.dtype.name) == (type(a), "bfloat16")
    assert np.array_equal(narrow.toarray().astype(np.float32), x.astype(np.float32))
    assert a.astype(np.float16) is a
    with pytest.raises(TypeError, match="@ is the product"):
        a * x


@pytest.mark.parametrize("target", TARGETS)
def test_products_from_both_sides(target: str) -> None:
    x = dense().astype(np.float16)
    a: Any = sf.convert(x, target)
    left, right = np.ones((3, 64), np.float16), np.ones((128, 3), np.float16)
    assert np.array_equal(left @ a, left @ x)
    assert np.array_equal(right.T @ a.T, right.T @ x.T)
    assert np.array_equal(np.asarray(left).T.T @ a, left @ x)
    assert np.array_equal(left[0] @ a, left[0] @ x)
    assert np.array_equal(a.dot(right), a @ right)
    assert np.array_equal(a.T.dot(left.T), x.T @ left.T)


def test_sums_of_more_rows_or_columns_than_fit_in_memory() -> None:
    """They were counted by numpy, whose MemoryError is no refusal."""
    wide = sf.CSR(
        shape=(1, 2**40), indptr=np.array([0, 1], np.int32), indices=np.array([3]), data=np.ones(1, np.float32)
    )
    tall = sf.CSC(
        shape=(2**40, 1), indptr=np.array([0, 1], np.int32), indices=np.array([3]), data=np.ones(1, np.float32)
    )
    for a, axis in ((wide, 0), (wide, -2), (tall, 1), (tall, -1)):
        with pytest.raises(sf.errors.LimitError, match="1,099,511,627,776 sums: 8,796,093,022,208 bytes requested"):
            a.sum(axis)
    assert (wide.sum(), wide.sum(1).tolist()) == (1.0, [1.0])
    assert (tall.sum(), tall.sum(0).tolist()) == (1.0, [1.0])
    a = sf.convert(dense(), "csr")
    with sf.limits.using(memory=8 * 127), pytest.raises(sf.errors.LimitError, match="sum: 128 sums"):
        a.sum(0)
    with sf.limits.using(memory=8 * 127):
        assert a.sum(1).shape == (64,)
    with sf.limits.using(memory=8 * 63), pytest.raises(sf.errors.LimitError, match="sum: 64 sums"):
        a.sum(1)


@pytest.mark.parametrize("target", ["csr", "bsr:4x4"])
@pytest.mark.parametrize(("first", "last"), [(-8, -4), (0, 20), (8, 4), (-4, 4)])
def test_rows_outside_are_no_other_rows(target: str, first: int, last: int) -> None:
    """row_range(-8, -4) was rows -7 .. -4 of a csr, marked as validated."""
    a: Any = sf.convert(np.arange(1, 65, dtype=np.float32).reshape(16, 4), target)
    with pytest.raises(sf.errors.UsageError, match=f"rows: expected 0 <= first <= last <= 16, got {first} .. {last}"):
        a.row_range(first, last)
    assert (a.row_range(4, 16).to_dense() == a.to_dense()[4:]).all()
    assert a.row_range(16, 16).shape == (0, 4)


def test_items_are_chosen_by_booleans() -> None:
    """Zeros and ones as integers were taken for the places 0 and 1, and the result was marked as validated."""
    a = sf.convert(np.arange(1, 9, dtype=np.float32).reshape(2, 4), "csr")
    keep = a.data > 5
    assert a.only(keep).to_dense().tolist() == [[0, 0, 0, 0], [0, 6, 7, 8]]
    for wrong in (keep.astype(np.uint8), np.arange(8), keep[:7], keep[None]):
        with pytest.raises(sf.errors.UsageError, match=r"csr: keep: expected bool of shape \(8,\), one for each"):
            a.only(wrong)
    with pytest.raises(
        sf.errors.UsageError, match="csr: keep: expected an array on cpu, where the matrix is, got list"
    ):
        a.only([True] * 8)


def test_rows_of_csr_and_bsr() -> None:
    x = dense()
    for a in (sf.convert(x, "csr"), sf.convert(x, "bsr", blocksize=16)):
        for rows in (slice(0, 16), slice(16, None), slice(-16, None), slice(None), slice(32, 32)):
            assert type(a[rows]) is type(a)
            assert np.array_equal(a[rows].validate().toarray(), x[rows])
    with pytest.raises(sf.errors.UsageError, match="multiples of 16"):
        sf.convert(x, "bsr", blocksize=16)[3:20]
    odd = sf.convert(x[:50], "bsr", blocksize=16)[32:]
    assert np.array_equal(odd.toarray(), x[32:50])
    for a, index in (
        (sf.convert(x, "csr"), 3),
        (sf.convert(x, "csr"), (0, 1)),
        (sf.convert(x, "csr"), slice("a", 3)),
        (sf.convert(x, "csr"), slice(0.0, 3)),
        (sf.convert(x, "bitmask"), slice(0, 4)),
    ):
        with pytest.raises(sf.errors.UsageError, match=r"to_scipy\(\)"):
            a[index]


@pytest.mark.parametrize("rows", [("a", "b"), (0.0, 16.0), (None, None), (0, [16]), (False, 16)], ids=str)
def test_rows_that_are_no_ints(rows: tuple[Any, Any]) -> None:
    for a in (sf.convert(dense(), "csr"), sf.convert(dense(), "bsr:blocksize=16")):
        with pytest.raises(sf.errors.UsageError, match=rf"{a.name}: rows: expected two ints first, last, got .* \.\. "):
            a.row_range(*rows)


def test_a_matrix_of_the_format_already_needs_no_params() -> None:
    """vector-nm asked for n and m of a matrix that has them, so that no stack could hold one."""
    x = dense()
    a = sf.convert(x, "vector-nm", n=4, m=4, vector_length=8)
    assert sf.convert(a, "vector-nm") is a is sf.convert(a, sf.VectorNM) is sf.convert(a, "vector-nm", vector_length=8)
    assert sf.convert(a, "vector-nm:vector_length=8") is a
    assert sf.stack([a, a]).parts == (a, a)
    assert sf.stack(sf.Stack(parts=(a, a)), "vector-nm")[1] is a
    half = sf.convert(a, "vector-nm", dtype="float16")
    assert half.params() == a.params()
    assert sf.stack([a], dtype="float16")[0] == half
    tall = sf.convert(a, "vector-nm", vector_length=16)
    assert tall == sf.convert(x, "vector-nm", n=4, m=4, vector_length=16)
    with pytest.raises(sf.errors.UsageError, match="parameter n is required"):
        sf.convert(sf.convert(x, "csr"), "vector-nm")
    with pytest.raises(sf.errors.UsageError, match="unknown parameter 'stride'"):
        sf.convert(a, "vector-nm", stride=4)


def test_params_that_are_not_given_are_the_usual_ones_whatever_the_source(tmp_path: Path) -> None:
    """Python, command line and manifest mean the same by a target; a matrix that has what is asked for stays."""
    x = dense()
    a = sf.convert(x, "sr-bcrs", vector_length=4, stride=4)
    assert sf.convert(a, "sr-bcrs") is a is sf.convert(a, "sr-bcrs", vector_length=4)
    usual = sf.convert(x, "sr-bcrs:vector_length=16")
    assert sf.convert(a, "sr-bcrs:vector_length=16") == usual == sf.convert(a, "sr-bcrs", vector_length=16)
    sf.save(tmp_path / "a.safetensors", {"w": a})
    convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b", Recipe(to="sr-bcrs:vector_length=16"))
    assert sf.open(tmp_path / "b")["w"] == usual


def test_convert_takes_what_people_type() -> None:
    x = dense()
    assert isinstance(sf.convert(x, "2:4"), sf.TwoFour)
    assert sf.convert(x, "auto").name == "vector-nm"  # the same columns of every row
    assert sf.convert(sp.eye_array(64, format="csr", dtype="float32"), "auto").name != "dense"
    assert sf.convert(x, "bsr", blocksize=16).blocksize == sf.convert(x, "bsr:blocksize=16").blocksize == (16, 16)
    assert sf.convert(x, "csr", dtype="float32").dtype == np.float32
    ints = x.astype(np.int64)
    for bad in (ints, x != 0, ints.tolist()):
        with pytest.raises(
            sf.errors.StructureError, match=r"np.asarray\(x, 'float32'\) or convert\(x, .., dtype='float32'\)"
        ):
            sf.convert(bad, "csr")
        assert np.array_equal(sf.convert(bad, "csr", dtype="float32").toarray(), np.asarray(bad, "float32"))
    assert sf.convert(sf.convert(x, "csr"), "bitmask", dtype="bfloat16").dtype.name == "bfloat16"
    for given in (x, sf.convert(x, "csr"), sf.convert(x, "bsr")):
        for name in ("x", "a", "cls", "shape"):  # some of them are arguments on the way
            for target in ("csr", "bitmask", "bsr:blocksize=2"):
                with pytest.raises(sf.errors.UsageError, match=f"unknown parameter '{name}'"):
                    sf.convert(given, f"{target}{',' if ':' in target else ':'}{name}=1")


@pytest.mark.parametrize("ragged", [[[1.0, 2.0], [3.0]], [[1, 2], 3], [[1.0, [2.0]]], ([1.0], [1.0, 2.0])])
def test_lists_of_different_lengths(ragged: Any) -> None:
    a = sf.convert(dense(), "csr")
    for call in (
        lambda: sf.convert(ragged, "csr"),
        lambda: sf.convert(ragged, "csr", dtype="float32"),
        lambda: sf.stack([ragged, ragged], "csr"),
        lambda: sf.spmm(ragged, np.ones((2, 1))),
        lambda: sf.spmm(a, ragged),
    ):
        with pytest.raises(sf.errors.UsageError, match=r"array: expected a matrix \[M, K\] as a list of rows"):
            call()


@pytest.mark.parametrize("name", ["data", "shape", "anything"])
def test_setting_an_attribute_says_that_it_is_frozen(name: str) -> None:
    a: Any = sf.convert(dense(), "csr")
    for x in (a, a.T):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"is frozen: '{name}' cannot be changed"):
            setattr(x, name, 1)
        with pytest.raises(dataclasses.FrozenInstanceError, match="is frozen"):
            delattr(x, name)


def test_a_plan_prints_on_one_line_and_is_pickled_as_its_problem() -> None:
    a = sf.convert(dense(), "csr")
    p = sf.plan(a, n=16)
    assert str(p).startswith("Plan(cpu.") or str(p).startswith("Plan(reference.")
    assert "spmm of csr float16[64, 128] with float16[128, 16] on cpu, workspace=" in str(p)
    assert "\n" not in str(p)
    assert len(str(p)) < 200
    again = pickle.loads(pickle.dumps(p))
    assert (again.kernel, again.problem, again.tile) == (p.kernel, p.problem, p.tile)
    for other in (again, copy.copy(p), copy.deepcopy(p)):
        with pytest.raises(
            sf.errors.UsageError, match=r"a plan that was pickled or copied has no matrix: make it again"
        ):
            other(np.ones((128, 16), np.float16))


SCRIPT = """
import numpy as np
import spformat as sf
from spformat.checkpoint import Recipe, convert_checkpoint

w = np.eye(64, dtype=np.float32)
a: sf.CSR = sf.convert(w, "csr")
b: sf.BSR = sf.convert(w, "bsr", blocksize=16)
c: sf.TwoFour = sf.convert(w.astype(np.float16), "2:4")
d: sf.CSR = sf.convert(w, sf.CSR)
e: sf.Format = sf.convert(w, "auto", dtype="float32")
print(a.data.dtype, a.indptr[-1], a.indices.size, b.blocksize[0], c.meta_order, d.T.shape)
f: sf.BSR = b[0:16] * 2.0
g: sf.CSR = a.copy().astype("float16")
total: float = a.sum()
y = a @ w
z = w @ a
sf.save("w.safetensors", {"a": a, "b": b})
"""


def test_a_script_of_a_user_passes_the_strict_type_checker_and_runs(tmp_path: Path) -> None:
    pytest.importorskip("mypy")

    def python(script: str, *args: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "mine.py").write_text(script)
        env = {**os.environ, "MYPYPATH": str(Path(sf.__file__).parents[1])}
        command = [sys.executable, *args, "mine.py"]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)

    strict = ("-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"))
    r = python(SCRIPT, *strict)
    assert r.returncode == 0, r.stdout + r.stderr
    r = python(SCRIPT.replace('sf.convert(w, "bsr", blocksize=16)', 'sf.convert(w, "csr")'), *strict)
    assert 'expression has type "CSR", variable has type "BSR"' in r.stdout
    r = python(SCRIPT)
    assert r.returncode == 0, r.stderr


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed: pip install pyright")
def test_a_script_of_a_user_passes_pyright_in_its_strict_mode(tmp_path: Path) -> None:
    """What an editor shows. pyright is a program of node that its package fetches, so it is no part of the test extra."""
    settings = {"typeCheckingMode": "strict", "include": ["mine.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))

    def findings(script: str) -> list[str]:
        (tmp_path / "mine.py").write_text(script)
        command = ["pyright", "--outputjson", "--pythonpath", sys.executable]
        env = {**os.environ, "PYTHONPATH": str(Path(sf.__file__).parents[1])}
        r = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
        return [f"{d['severity']}: {d['message']}" for d in json.loads(r.stdout)["generalDiagnostics"]]

    assert findings(SCRIPT) == []
    (found,) = findings(SCRIPT.replace('sf.convert(w, "bsr", blocksize=16)', 'sf.convert(w, "csr")'))
    assert 'Type "CSR" is not assignable to declared type "BSR"' in found


@pytest.mark.parametrize("target", ["csr", "csc", "coo"])
def test_values_of_items_change_without_a_conversion(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array([[0, -2, 3], [0, 0, 0], [5, 0, 7], [0, 1, 0]], np.float16)
    stored = sp.csr_array(x.astype(np.float32))
    stored.data[0] = 0  # a stored zero is an item, and stays one
    a: Any = sf.from_scipy(stored.asformat(target))
    x = a.to_dense()
    for method in ("transposed", "to_csr", "from_csr"):
        monkeypatch.setattr(sf.CSR, method, lambda *_, **__: pytest.fail("a conversion"))
        if method != "transposed":
            monkeypatch.setattr(type(a), method, lambda *_, **__: pytest.fail("a conversion"))
    half = a.astype("float16")
    for got, want in ((2 * a, 2 * x), (a / 4, x / 4), (-a, np.where(x == 0, x, -x)), (half, x.astype(np.float16))):
        assert type(got) is type(a)
        assert got.nnz == a.nnz == 5
        assert np.array_equal(got.validate()._to_dense(), want)
        assert not np.shares_memory(got.data, a.data)
    if target == "csc":
        monkeypatch.undo()
        monkeypatch.setattr(sf.CSR, "transposed", lambda *_: pytest.fail("a conversion"))
    if target != "coo":
        for axis, want in ((None, x.sum()), (0, x.sum(0)), (1, x.sum(1)), (-1, x.sum(1)), (-2, x.sum(0))):
            if target == "csr":
                monkeypatch.undo()
            assert np.array_equal(a.sum(axis), want)
        with pytest.raises(sf.errors.UsageError, match="axis"):
            a.sum(2)


def test_items_in_any_order_are_sorted_by_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = sp.random_array((300, 500), density=0.1, rng=rng, dtype=np.float32, format="coo")
    monkeypatch.setattr(np, "lexsort", lambda *_: pytest.fail("several times as slow"))
    want = x.toarray()
    order = rng.permutation(x.nnz)
    mixed = sp.coo_array((x.data[order], (x.row[order], x.col[order])), shape=x.shape)
    for layout in ("coo", "csr", "csc"):
        if layout == "coo":
            given = mixed
        else:
            given = x.asformat(layout)
            given.indices[:2], given.data[:2] = given.indices[:2][::-1].copy(), given.data[:2][::-1].copy()
            given.has_sorted_indices = False
        got = sf.from_scipy(given).validate()
        assert got.name == layout
        assert np.array_equal(got.to_dense(), want)


@pytest.mark.parametrize("spec", ["csr", "bitmask", "dense"])
def test_int8_times_a_wider_integer_of_numpy_is_refused_where_numpy_widens(spec: str) -> None:
    """numpy gives int64, which no format has; in int8 the products would wrap without a word."""
    x = np.array([[100, 0], [0, -3]], np.int8)
    a = sf.convert(x, spec)
    for wide in (np.int64(2), np.int16(2), np.uint8(2)):
        for product in (lambda wide=wide: a * wide, lambda wide=wide: wide * a):
            with pytest.raises(sf.errors.UsageError, match=r"is int\d+, which is no value type: int\(factor\) stays"):
                product()
    np.testing.assert_array_equal((a * np.int8(2)).to_dense(), x * np.int8(2))
    np.testing.assert_array_equal((a * 2).to_dense(), x * 2)  # as numpy has it, in int8
    np.testing.assert_array_equal((a.astype("float64") * np.int64(2)).to_dense(), x * 2.0)
