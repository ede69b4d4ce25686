"""The mark of a validated matrix: nothing that was not scanned gets it, and nothing keeps it that a scan refused."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from cases import params_of

import spformat as sf
from spformat.errors import IndexBoundsError, InvariantError, PointerError, SpformatError
from spformat.formats import CSR, DBSR, Format, registered
from spformat.formats.declare import INDEX
from spformat.preprocess import order

UNCHECKED = {"alias", "to_hub", "check_canonical", "rows", "columns", "block_rows", "group_tiles"}
"""What says that the caller has checked the contents; the last four give arrays."""
FAR = 2_000_000_000
"""An index that no matrix here has."""


def example(fmt: type[Format]) -> Format:
    x = np.zeros((64, 64), np.float32)
    x[::3, ::2] = np.arange(1, 22 * 32 + 1).reshape(22, 32)
    a = CSR.from_dense(x)
    zeros = a.data.copy()
    zeros[5] = 0  # a stored zero, so that dropping zeros changes the arrays
    stored = CSR.trusted(shape=a.shape, indptr=a.indptr, indices=a.indices, data=zeros)
    return fmt.from_csr(stored if fmt.keeps_stored_zeros else a, **params_of(fmt.name)[0])


def damaged() -> list[tuple[str, Format]]:
    """Matrices of every format with an index or a pointer far outside, as a constructor accepts them."""
    out = []
    for fmt in registered():
        if fmt.declared_parts() or not any(d.kind == INDEX for d in fmt.declared_arrays()):
            continue
        a = example(fmt)
        for d in fmt.declared_arrays():
            if d.kind == INDEX and getattr(a, d.name).size:
                wrong = getattr(a, d.name).copy()
                wrong.reshape(-1)[wrong.size // 2] = FAR
                out.append((f"{fmt.name} {d.name}", a.with_arrays(**{d.name: wrong})))
    return out


DAMAGED = damaged()


def methods(a: Format) -> list[str]:
    """Public methods and properties that need no argument."""
    names = []
    for name in dir(type(a)):
        member = inspect.getattr_static(type(a), name)
        if name.startswith("_") or isinstance(member, (classmethod, staticmethod)):
            continue
        if isinstance(member, property):
            names.append(name)
        elif inspect.isfunction(member):
            needed = [p for p in list(inspect.signature(member).parameters.values())[1:] if p.default is p.empty
                      and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]  # fmt: skip
            names += [] if needed else [name]
    return names


@pytest.mark.parametrize("a", [a for _, a in DAMAGED], ids=[name for name, _ in DAMAGED])
def test_no_method_marks_what_was_not_scanned(a: Format) -> None:
    assert not a.is_validated
    tried = 0
    for name in methods(a):
        fresh = type(a)(**a.fields())
        if name in UNCHECKED:
            continue
        try:
            got = getattr(fresh, name)
            got = got() if callable(got) and not isinstance(got, Format) else got
        except (SpformatError, ImportError):
            continue
        tried += 1
        if isinstance(got, Format) and got.is_validated:
            type(got)(**got.fields()).validate()  # raises if the mark is wrong
        assert not fresh.is_validated, f"{name} left the mark on a damaged matrix"
    assert tried


@pytest.mark.parametrize(
    "derive",
    [
        lambda a: a.without_zeros(),
        lambda a: a.only(np.ones(a.nnz, bool)),
        lambda a: a.row_range(0, 2),
        lambda a: a.transposed(),
        lambda a: order.permute_rows(a, np.arange(a.shape[0])[::-1].copy()),
        lambda a: a.T.materialize(),
    ],
    ids=["without_zeros", "only", "row_range", "transposed", "permute_rows", "T"],
)
@pytest.mark.parametrize(
    ("indptr", "indices"), [([0, 1, 2], [0, FAR]), ([0, -1, 2], [0, 1]), ([0, 10**9, 2], [0, 1]), ([0, 2, 2], [1, 0])]
)
def test_what_is_derived_from_a_csr_is_scanned_first(indptr: list[int], indices: list[int], derive: Any) -> None:
    a = CSR(shape=(2, 2), indptr=np.array(indptr, np.int32), indices=np.array(indices, np.int32),
            data=np.array([0, 1], np.float32))  # fmt: skip
    with pytest.raises(InvariantError):
        derive(a)


def test_blocks_are_scanned_before_empty_rows_are_left_out() -> None:
    b = sf.BSR.from_dense(np.ones((4, 4), np.float32), blocksize=(2, 2))
    with pytest.raises(IndexBoundsError):
        DBSR.from_bsr(b.with_arrays(indices=np.array([0, 9, 0, 1], np.int32)))


def test_a_matrix_that_a_scan_refuses_loses_its_mark() -> None:
    a = sf.convert(np.eye(4, dtype=np.float32), "csr")
    B = np.ones((4, 3), np.float32)
    assert (a @ B == 1).all()
    a.indices[1] = FAR
    with pytest.raises(IndexBoundsError):
        a.validate()
    assert not a.is_validated
    with pytest.raises(IndexBoundsError):
        a @ B
    a.indices[1] = 1
    assert (a @ B == 1).all()  # valid again: the product has validated it


def test_a_sum_that_a_scan_refuses_loses_its_mark() -> None:
    x = np.zeros((64, 64), np.float32)
    x[:32, :32], x[40, 50] = 1, 2
    s = sf.decompose(x, "bsr:blocksize=32x32,density>=0.5", "csr")
    s.parts[1].indptr[-1] = FAR
    with pytest.raises(PointerError):
        s.validate()
    assert not s.is_validated
    with pytest.raises(PointerError):
        s @ np.ones((64, 2), np.float32)


@pytest.mark.parametrize("n", [1, 4, 40])
@pytest.mark.parametrize("fmt", [f for f in registered() if not f.declared_parts()], ids=lambda f: f.name)
def test_validate_forgets_what_came_from_the_old_values(fmt: type[Format], n: int) -> None:
    """Values written in place count in every product after ``validate()``, in copies of the transpose, too."""
    a = example(fmt)
    B = np.random.default_rng(n).integers(-3, 4, (64, n)).astype(np.float32)
    before, before_t = a @ B, a.T @ B
    assert before.any()
    assert before_t.any()
    a.values[...] = a.values * 2
    a.validate()
    assert (a @ B == 2 * before).all()
    assert (2 * before_t == a.T @ B).all()


@pytest.mark.parametrize("name", ["indices", "indptr", "data"])
def test_arrays_that_hide_entries_are_refused(name: str) -> None:
    a = sf.convert(np.eye(3, dtype=np.float32), "csr")
    array = getattr(a, name)
    with pytest.raises(sf.errors.ArrayError, match=f"{name}: expected a plain array") as e:
        a.with_arrays(**{name: np.ma.masked_array(array, np.arange(array.size) == 0)})
    assert e.value.fields["array"] == name


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_an_array_with_the_operators_of_a_matrix_is_refused() -> None:
    with pytest.raises(sf.errors.ArrayError, match="data: expected a plain array, got matrix"):
        sf.Dense(shape=(2, 2), data=np.matrix(np.eye(2, dtype=np.float32)))


def test_scipy_matrices_in_another_byte_order_are_converted() -> None:
    sp = pytest.importorskip("scipy.sparse")
    x = np.array([[0, 1.5, 0], [2.5, 0, -3.0]])
    for layout in ("csr", "csc", "coo", "bsr"):
        m = sp.csr_array(x).asformat(layout)
        m.data = m.data.astype(">f8")
        a = sf.convert(m, layout)
        assert a.values.dtype.isnative
        assert (a.to_dense() == x).all()


def test_coordinates_outside_name_index_and_value() -> None:
    sp = pytest.importorskip("scipy.sparse")
    m = sp.coo_array((np.ones(3, np.float32), ([0, 1, 1], [0, 1, 0])), shape=(2, 2))
    m.coords[0][2] = 7
    with pytest.raises(IndexBoundsError, match=r"row\[2\]: expected a row index in 0 \.\. 1, got 7") as e:
        sf.convert(m, "csr")
    assert (e.value.fields["array"], e.value.fields["index"], e.value.fields["value"]) == ("row", 2, 7)


@pytest.mark.parametrize("shape", ["22", ("2", " 2 "), ("2", 2), (2, 2, "2")])
def test_text_is_no_shape(shape: Any) -> None:
    a = sf.convert(np.eye(2, dtype=np.float32), "csr")
    with pytest.raises(sf.errors.UsageError, match="shape: expected two ints"):
        CSR(shape=shape, **a.arrays())
