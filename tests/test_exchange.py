"""Matrices of scipy and torch: taken with the values they have, or refused by name."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from catalogue import command

import spformat as sf
from spformat.interop import torch_semi_structured

W = np.diag(np.arange(1, 5)).astype(np.float32)
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_coordinates_stored_twice_are_refused_not_summed() -> None:
    rows, cols = [0, 0, 1], [1, 1, 0]
    with pytest.raises(sf.errors.OrderError, match=r"row 0 stores column 1 more than once \(1 repeats"):
        sf.convert(sp.coo_array(([1.0, 2.0, 3.0], (rows, cols)), shape=(2, 2)), "csr")
    torch = pytest.importorskip("torch")
    t = torch.sparse_coo_tensor([rows, cols], [1.0, 2.0, 3.0], (2, 2), check_invariants=True)
    with pytest.raises(sf.errors.OrderError, match=r"row 0 stores column 1 more than once \(1 repeats"):
        sf.convert(t, "csr")
    assert sf.convert(t.coalesce(), "csr").to_dense().tolist() == [[0, 3], [3, 0]]
    unordered = torch.sparse_coo_tensor([[1, 0], [0, 1]], [1.0, 2.0], (2, 2), check_invariants=True)
    assert sf.convert(unordered, "csr").to_dense().tolist() == [[0, 2], [1, 0]]
    outside = torch.sparse_coo_tensor([[1, 2], [0, 1]], [1.0, 2.0], (2, 2), check_invariants=False)
    with pytest.raises(sf.errors.IndexBoundsError, match=r"coo: row\[1\]: expected a row index in 0 \.\. 1, got 2"):
        sf.convert(outside, "csr")
    before = torch.sparse_coo_tensor([[1, 0], [0, -1]], [1.0, 2.0], (2, 2), check_invariants=False)
    with pytest.raises(sf.errors.IndexBoundsError, match=r"coo: col\[1\]: expected a column index in 0 \.\. 1, got -1"):
        sf.convert(before, "csr")
    zeros = torch.sparse_coo_tensor([rows[:2], [0, 1]], [0.0, 2.0], (2, 2), check_invariants=True)
    assert sf.convert(zeros, "csr").data.tolist() == [2]  # as of a dense tensor


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr"])
def test_a_matrix_of_another_library_keeps_its_layout(layout: str) -> None:
    """In, out and in again: the format of the same name, the same arrays, stored zeros among them."""
    x = np.kron(W, np.ones((2, 3), np.float32))
    s = sp.csr_array(x).tobsr((2, 3)) if layout == "bsr" else sp.csr_array(x).asformat(layout)
    if layout != "bsr":
        s.data[1] = 0
    a = sf.from_scipy(s)
    assert (a.name, a.stored_zeros) == (layout, int(layout != "bsr"))
    np.testing.assert_array_equal(a.to_dense(), s.toarray())
    back = a.to_scipy()
    assert (back.format, back.shape) == (layout, x.shape)
    assert np.shares_memory(back.data, a.values)
    assert sf.from_scipy(back) == a
    np.testing.assert_array_equal(sf.spmm(s, np.ones((12, 2), np.float32)), s @ np.ones((12, 2), np.float32))
    pytest.importorskip("torch")
    b = sf.convert(x, layout, **({"blocksize": (2, 3)} if layout == "bsr" else {}))
    t = b.to_torch()
    assert str(t.layout) == f"torch.sparse_{layout}"
    np.testing.assert_array_equal(t.to_dense().numpy(), x)
    assert sf.from_torch(t) == b


def test_columns_in_any_order_are_sorted_and_repeats_refused() -> None:
    data, indptr = np.array([1, 2, 3], np.float32), np.array([0, 2, 3])
    unordered = sp.csc_array((data, np.array([2, 0, 1]), indptr), shape=(3, 2))
    assert sf.from_scipy(unordered) == sf.convert(unordered.toarray(), "csc")
    a = sf.CSC(shape=(3, 2), indptr=indptr.astype(np.int32), indices=np.array([2, 0, 1], np.int32), data=data)
    with pytest.raises(sf.errors.OrderError, match=r"csc: indices\[1\]: expected > 2, .* column 0 \(0 is smaller"):
        a.validate()
    assert a.in_order().indices.tolist() == [0, 2, 1]
    with pytest.raises(sf.errors.OrderError, match=r"csc: row 1 stores column 0 more than once \(1 repeats"):
        sf.from_scipy(sp.csc_array((data, np.array([1, 1, 2]), indptr), shape=(3, 2)))
    with pytest.raises(sf.errors.IndexBoundsError, match=r"csc: indices\[2\]: expected an index in \[0, 3\), got 3"):
        a.with_arrays(indices=np.array([0, 1, 3], np.int32)).validate()
    b = sf.COO(shape=(3, 2), row=np.array([2, 0, 1], np.int32), col=np.array([0, 0, 1], np.int32), data=data)
    with pytest.raises(sf.errors.OrderError, match=r"coo: row\[1\]: expected at least the row before it"):
        b.validate()
    assert b.in_order() == sf.convert(unordered.toarray(), "coo").with_arrays(data=b.in_order().data)
    assert b.in_order().data.tolist() == [2, 3, 1]
    with pytest.raises(sf.errors.OrderError, match=r"coo: col\[1\]: expected more than the column before it"):
        b.with_arrays(row=np.zeros(3, np.int32)).validate()
    assert b.with_arrays(data=data * [1, 0, 1]).canonical().row.tolist() == [1, 2]
    wide = sf.convert(sp.coo_array((data[:1], ([0], [2**31 + 4])), shape=(1, 2**31 + 5)), "coo")
    assert (wide.row.dtype, wide.col.dtype) == (np.int32, np.int64)
    assert sf.convert(wide, "csr").indices.tolist() == [2**31 + 4]


def test_columns_and_coordinates_are_chosen_by_name_alone(tmp_path: Any) -> None:
    """``auto`` takes csr, whose kernels a GPU has, also where a column pointer or coordinates are smaller."""
    x = np.zeros((1000, 30), np.float32)
    x[::100, ::9] = 1
    sizes = {n: sf.convert(x, n).nbytes for n in ("csr", "csc", "coo")}
    assert sizes == {"csr": 4004 + 40 * 8, "csc": 124 + 40 * 8, "coo": 40 * 12}
    assert sf.convert(x, "auto").name not in ("csc", "coo")
    sf.save_dense(tmp_path / "w.safetensors", {"w": x})
    for name in ("csc", "coo"):
        assert command("convert", tmp_path / "w.safetensors", tmp_path / name, "--to", name).code == 0
        (file,) = (tmp_path / name).glob("*.safetensors")
        assert sf.load(file)["w"] == sf.convert(x, name)
        assert command("convert", tmp_path / "w.safetensors", tmp_path / f"{name}.npz", "--to", name).code == 0
        assert sp.load_npz(tmp_path / f"{name}.npz").format == name
        (loaded,) = sf.load(tmp_path / f"{name}.npz").values()
        assert sf.convert(loaded, name) == sf.convert(x, name)


@pytest.mark.parametrize(
    ("array", "at", "value", "error"),
    [
        ("indices", 0, 99, sf.errors.IndexBoundsError), ("indices", 1, -1, sf.errors.IndexBoundsError),
        ("indptr", 1, 77, sf.errors.PointerError), ("indptr", 0, 1, sf.errors.PointerError),
    ],
)  # fmt: skip
def test_blocks_of_another_library_that_are_nowhere(array: str, at: int, value: int, error: Any) -> None:
    x = sp.bsr_array(np.kron(np.eye(3), np.ones((2, 2))).astype(np.float32), blocksize=(2, 2))
    getattr(x, array)[at] = value
    with pytest.raises(error, match=rf"^bsr: {array}\[\d\]: expected .*, got (-?\d+)$"):
        sf.convert(x, "bsr:blocksize=2x2")


@pytest.mark.parametrize(("columns", "dtype"), [(2**31, np.int32), (2**31 + 1, np.int64)])
def test_the_last_width_of_32_bits(columns: int, dtype: Any) -> None:
    parts = np.ones(1, np.float32), np.array([columns - 1]), np.array([0, 1])
    a = sf.convert(sp.csr_array(parts, shape=(1, columns)), "csr")
    assert isinstance(a, sf.CSR)
    assert (a.indices.dtype, int(a.indices[0])) == (dtype, columns - 1)


def test_sparse_arrays_that_are_no_matrices() -> None:
    for x in (sp.coo_array(np.ones(3, np.float32)), sp.csr_array(np.ones(3, np.float32))):
        with pytest.raises(sf.errors.UsageError, match=r"expected a matrix \[M, K\], got shape \(3,\)"):
            sf.convert(x, "csr")
    torch = pytest.importorskip("torch")
    hybrid = torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 3), (2, 3), check_invariants=True)
    line = torch.sparse_coo_tensor([[0, 1]], torch.ones(2), (3,), check_invariants=True)
    for t in (hybrid, line):
        with pytest.raises(sf.errors.UsageError, match=r"expected a matrix without dense dimensions, got shape"):
            sf.convert(t, "csr")


@pytest.mark.parametrize("kind", ["csr", "coo", "bsr", "dia"])
def test_values_of_a_graph_that_are_no_weights(kind: str) -> None:
    for dtype in (bool, np.int64):  # an adjacency matrix, as graph libraries give it
        with pytest.raises(
            sf.errors.ArrayError, match=r"values of dtype \w+ are not representable; .*a\.astype\('float32'\)"
        ):
            sf.convert(sp.eye_array(4, dtype=dtype).asformat(kind), "csr")


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize(
    ("name", "error"), [("indices", sf.errors.IndexBoundsError), ("indptr", sf.errors.PointerError)]
)
@pytest.mark.parametrize("kind", ["csr", "bsr"])
def test_indices_that_32_bits_would_wrap_into_the_matrix(kind: str, name: str, error: type[Exception]) -> None:
    x = sp.csr_array(W) if kind == "csr" else sp.bsr_array(W, blocksize=(1, 1))
    wide = getattr(x, name).astype(np.int64)
    wide[1:3] += 2**32
    setattr(x, name, wide)
    with pytest.raises(error, match=rf"{kind}: {name}\[1\]: expected .*, got 4294967297 \(2 such\)"):
        sf.convert(x, kind)
    setattr(x, name, wide.astype(np.float64))
    with pytest.raises(sf.errors.ArrayError, match=rf"{kind}: {name}: expected integers, got float64"):
        sf.convert(x, kind)
    torch = pytest.importorskip("torch")
    if kind == "csr":
        parts = {n: torch.tensor(np.asarray(getattr(sp.csr_array(W), n), np.int64)) for n in ("indptr", "indices")}
        parts[name] = torch.tensor(wide)
        t = torch.sparse_csr_tensor(*parts.values(), torch.ones(4), W.shape, check_invariants=False)
        with pytest.raises(error, match=rf"csr: {name}\[1\]: expected .*, got 4294967297"):
            sf.convert(t, "csr")


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_blocks_as_other_libraries_keep_them() -> None:
    # A mask times a weight leaves -0.0; a pruned block may stay stored as zeros; nobody sorts blocks of a row.
    indptr, indices = np.array([0, 2, 3, 3]), np.array([2, 0, 1])
    data = np.array([[[1, -0.0], [-0.0, 2]], [[0, -3], [4, 5]], [[0, -0.0], [0, 0]]], np.float32)
    kinds: list[Any] = [sp.bsr_array((data, indices, indptr), shape=(6, 6))]
    torch = pytest.importorskip("torch")
    parts = (torch.tensor(part) for part in (indptr, indices, data))
    kinds.append(torch.sparse_bsr_tensor(*parts, size=(6, 6), check_invariants=False))
    wanted = np.zeros((6, 6), np.float32)
    wanted[:2, 4:], wanted[:2, :2] = [[1, 0], [0, 2]], [[0, -3], [4, 5]]
    for x in kinds:
        for target in ("bsr:blocksize=2x2", "csr"):
            assert sf.convert(x, target) == sf.convert(wanted, target)
    for bad, error in (([0, 3], sf.errors.IndexBoundsError), ([0, 0], sf.errors.OrderError)):
        for x in (
            sp.bsr_array((data[:2], np.array(bad), np.array([0, 2])), shape=(2, 6)),
            torch.sparse_bsr_tensor(
                torch.tensor([0, 2]), torch.tensor(bad), torch.tensor(data[:2]), size=(2, 6), check_invariants=False
            ),
        ):
            with pytest.raises(error):
                sf.convert(x, "bsr")


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr"])
def test_values_that_do_not_lie_side_by_side(layout: str) -> None:
    """The real part of complex values, which the refusal of complex ones advises, and one weight for all edges."""
    real = getattr(sp, f"{layout}_array")(W * (1 + 2j)).real
    assert not real.data.flags.c_contiguous
    for x in (sf.from_scipy(real), sf.convert(real, "csr", dtype="float64")):
        np.testing.assert_array_equal(x.to_dense(), W)
    torch = pytest.importorskip("torch")
    t = getattr(torch.tensor(W), "to_sparse_bsr" if layout == "bsr" else f"to_sparse_{layout}")(
        *[(2, 2)] * (layout == "bsr")
    )
    parts = {
        "csr": lambda: (t.crow_indices(), t.col_indices()), "csc": lambda: (t.ccol_indices(), t.row_indices()),
        "coo": lambda: (t._indices(),), "bsr": lambda: (t.crow_indices(), t.col_indices()),
    }[layout]()  # fmt: skip
    values = t._values() if layout == "coo" else t.values()
    for other in (torch.ones(1).expand(values.shape), torch.complex(values, values).real):
        strided = getattr(torch, f"sparse_{layout}_tensor")(*parts, other, t.shape, check_invariants=True)
        assert not (strided._values() if layout == "coo" else strided.values()).is_contiguous()
        np.testing.assert_array_equal(sf.from_torch(strided).to_dense(), strided.to_dense().numpy())


def test_batches_are_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(
        sf.errors.UsageError, match=r"torch: expected one matrix, got torch\.sparse_csr of shape \(2, 3, 3\)"
    ):
        sf.convert(torch.ones(2, 3, 3).to_sparse_csr(), "csr")


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", ["dense", "csr", "csc", "coo", "bsr"])
def test_integers_and_booleans_of_torch_are_rounded_to_the_dtype_that_is_asked_for(layout: str) -> None:
    torch = pytest.importorskip("torch")

    def tensor(x: Any) -> Any:
        t = torch.tensor(x)
        if layout == "bsr":
            return t.to_sparse_bsr((1, 2))
        return t if layout == "dense" else t.to_sparse(layout=getattr(torch, f"sparse_{layout}"))

    t = tensor([[0, 7], [-3, 0]])
    a = sf.convert(t, "csr", dtype="float16")
    assert a.dtype == np.float16
    assert a.to_dense().tolist() == [[0, 7], [-3, 0]]
    assert sf.from_torch(t, dtype="int8").name == layout
    if layout != "bsr":  # torch makes no blocks of booleans
        assert sf.convert(tensor([[False, True], [True, False]]), "bitmask", dtype="int8").to_dense().tolist() == [
            [0, 1],
            [1, 0],
        ]
    with pytest.raises(sf.errors.UsageError, match="dtype: 1 values do not fit int8, the first is 300"):
        sf.convert(tensor([[0, 300], [1, 0]]), "csr", dtype="int8")
    with pytest.raises(sf.errors.UsageError, match="dtype: complex values do not fit float32"):
        sf.convert(tensor([[0, 1j], [1, 0]]), "csr", dtype="float32")
    with pytest.raises(sf.errors.SpformatError, match="int64"):  # nothing is rounded unasked
        sf.convert(t, "csr")


def test_without_torch_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    two_four = sf.convert(np.zeros((32, 64), np.float16), "two-four")
    for call in (sf.convert(W, "csr").to_torch, lambda: torch_semi_structured.to_semi_structured(two_four)):
        with pytest.raises(sf.errors.UsageError, match=r"torch is not installed: pip install 'spformat\[torch\]'"):
            call()
    with pytest.raises(sf.errors.UsageError, match=r"from_torch: expected a torch tensor, got ndarray; use convert"):
        sf.from_torch(W)


def test_readers_of_other_libraries_name_what_they_got() -> None:
    with pytest.raises(
        sf.errors.UsageError, match=r"from_scipy: expected a scipy\.sparse matrix, got ndarray; use convert"
    ):
        sf.from_scipy(W)
    with pytest.raises(sf.errors.UsageError, match=r"from_torch: expected a torch tensor, got ndarray; use convert"):
        sf.from_torch(W)


@pytest.mark.parametrize("kind", ["csr", "csc", "bsr"])
def test_room_behind_the_last_item_is_answered_with_what_removes_it(kind: str) -> None:
    x = sp.bsr_array(W, blocksize=(1, 1)) if kind == "bsr" else sp.csr_array(W).asformat(kind)
    n = x.indices.size
    x.indices = np.append(x.indices, x.indices[:2])
    x.data = np.concatenate([x.data, x.data[:2]])
    at = x.indptr.size - 1
    with pytest.raises(
        sf.errors.PointerError, match=rf"{kind}: indptr\[{at}\]: expected {n + 2}, .*, got {n}; x\.prune\(\) .* 2 items"
    ):
        sf.convert(x, kind, blocksize=1) if kind == "bsr" else sf.convert(x, kind)
    x.prune()
    assert np.array_equal(sf.from_scipy(x).to_dense(), W)
