"""Foreign matrix files: the real ones count what they should, the hostile ones are refused with a typed error."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.io import mmread, mmwrite

from spformat import limits
from spformat.errors import (
    ArrayError,
    FormatError,
    IndexBoundsError,
    InputError,
    LimitError,
    OrderError,
    OutputError,
    PointerError,
    SpformatError,
    UsageError,
)
from spformat.formats import CSR
from spformat.interop.matrices import read_matrix
from spformat.interop.smtx import filled, read_smtx, write_smtx

MATRICES = Path(__file__).parent.parent / "fixtures" / "matrices"
COUNTS = json.loads((MATRICES / "counts.json").read_text())

SMTX = "3, 4, 4\n0 2 2 4\n0 3 0 2\n"


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_real_matrices(name: str) -> None:
    a = read_matrix(MATRICES / name)
    expected = COUNTS[name]
    lengths = np.diff(a.indptr)
    assert a.shape == tuple(expected["shape"])
    assert (a.nnz, a.stored_zeros) == (expected["nnz"], expected["explicit_zeros"])
    assert (lengths.max(), (lengths == 0).sum()) == (expected["max"], expected["empty"])
    assert round(lengths.mean(), 2) == pytest.approx(expected["mean"], abs=0.05)


def test_matrix_market_values_are_scipys() -> None:
    a, reference = read_matrix(MATRICES / "zenios.mtx"), mmread(MATRICES / "zenios.mtx", spmatrix=False).tocsr()
    reference.sort_indices()
    np.testing.assert_array_equal(a.indptr, reference.indptr)
    np.testing.assert_array_equal(a.indices, reference.indices)
    np.testing.assert_array_equal(a.data, reference.data)


# ------------------------------------------------------------------------------------------------------------- smtx


def test_smtx_by_hand(tmp_path: Path) -> None:
    a = read_smtx(write(tmp_path / "a.smtx", SMTX))
    assert (a.shape, a.dtype, a.is_validated) == ((3, 4), np.float32, True)
    np.testing.assert_array_equal(a.to_dense(), [[1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]])


def test_smtx_trailing_blanks_crlf_and_unsorted_columns(tmp_path: Path) -> None:
    text = "3,4,4 \r\n 0 2 2 4 \r\n3 0 2 0 \r\n\n"
    assert read_smtx(write(tmp_path / "b.smtx", text)) == read_smtx(write(tmp_path / "a.smtx", SMTX))


def test_smtx_vector_rows(tmp_path: Path) -> None:
    a = read_smtx(write(tmp_path / "a.smtx", SMTX), vector_length=2)
    one = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]])
    assert a.shape == (6, 4)
    np.testing.assert_array_equal(a.to_dense(), np.repeat(one, 2, axis=0))


def test_smtx_written_and_read_again(tmp_path: Path) -> None:
    a = read_matrix(MATRICES / "dlmc_transformer_l0_0.9_enc2_ffn2.smtx")
    write_smtx(tmp_path / "a.smtx", a)
    assert read_smtx(tmp_path / "a.smtx") == a
    with pytest.raises(OutputError, match="exists"):
        write_smtx(tmp_path / "a.smtx", a)
    empty = CSR.from_dense(np.zeros((0, 3), np.float32))
    write_smtx(tmp_path / "a.smtx", empty, overwrite=True)
    assert read_smtx(tmp_path / "a.smtx") == empty


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("3, 4, 4\n0 2 2 4", FormatError, "three lines"),
        ("3, 4, 4\n0 2 2 4\n", FormatError, "columns: expected 4 numbers, got 0"),
        ("3 4 4\n0 2 2 4\n0 3 0 2\n", FormatError, "first line b'3 4 4'"),
        (SMTX + "1\n", FormatError, "three lines"),
        ("3, 4, 4\n0 2 x 4\n0 3 0 2\n", FormatError, "digits and blanks"),
        ("3, 4, 4\n0 2 -2 4\n0 3 0 2\n", FormatError, "digits and blanks"),
        ("3, 4, 4\n0 2 4\n0 3 0 2\n", FormatError, "row offsets: expected 4 numbers, got 3"),
        ("3, 4, 4\n0 2 2 4\n0 3 0\n", FormatError, "columns: expected 4 numbers, got 3"),
        ("3, 4, 4\n0 2 2 4\n0 4 0 2\n", IndexBoundsError, r"indices\[1\]: expected an index in \[0, 4\), got 4"),
        ("3, 4, 4\n0 2 2 4\n0 4294967296 0 2\n", IndexBoundsError, r"indices\[1\]"),
        ("3, 4, 4\n0 2 2 4\n0 99999999999999999999 0 2\n", IndexBoundsError, r"indices\[1\]"),
        ("3, 4, 4\n0 2 2 3\n0 3 0 2\n", PointerError, r"indptr\[3\]: expected 4"),
        ("3, 4, 4\n1 2 2 4\n0 3 0 2\n", PointerError, r"indptr\[0\]: expected 0"),
        ("3, 4, 4\n0 3 2 4\n0 3 0 2\n", PointerError, r"indptr\[2\]: expected >= 3"),
        ("3, 4, 4\n0 4294967298 2 4\n0 3 0 2\n", PointerError, r"indptr\[2\]"),
        ("3, 4, 4\n0 2 2 4\n3 3 0 2\n", OrderError, "repeats"),
        ("999999999999999, 4, 0\n0\n\n", FormatError, r"2\^48-1"),
    ],
)
def test_smtx_lies_are_named(tmp_path: Path, text: str, error: type[SpformatError], words: str) -> None:
    path = write(tmp_path / "a.smtx", text)
    with pytest.raises(error, match=words) as e:
        read_smtx(path)
    assert e.value.path == str(path)


@given(st.binary(max_size=60) | st.text("0123456789, \n-", max_size=60).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_smtx_survives_any_bytes(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "a.smtx", content)
    with contextlib.suppress(FormatError):  # anything else fails the test
        read_smtx(path).validate()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_filled_values_keep_the_pattern_and_the_seed(dtype: str) -> None:
    a, b, c = (filled(20_000, values="normal", seed=s, dtype=dtype) for s in (1, 1, 2))
    assert a.dtype.name == dtype
    assert (a.astype(np.float64) != 0).all()
    assert a.tobytes() == b.tobytes() != c.tobytes()
    scale = 32 if dtype == "int8" else 1
    assert abs(a.astype(np.float64).std() / scale - 1) < 0.05
    with pytest.raises(UsageError, match="'ones' or 'normal'"):
        filled(3, values="uniform")


# -------------------------------------------------------------------------------------------------- Matrix Market, npz


@pytest.mark.parametrize("symmetry", ["general", "symmetric", "skew-symmetric"])
def test_matrix_market_round_trip(tmp_path: Path, symmetry: str) -> None:
    x = sp.random_array((9, 9), density=0.3, rng=np.random.default_rng(1))
    x = {"general": x, "symmetric": x + x.T, "skew-symmetric": x - x.T}[symmetry].tocoo()
    mmwrite(tmp_path / "a.mtx", x, symmetry=symmetry, precision=17)
    a = read_matrix(tmp_path / "a.mtx")
    assert a.dtype == np.float64
    np.testing.assert_array_equal(a.to_dense(), x.toarray())


def test_matrix_market_pattern_integer_and_array(tmp_path: Path) -> None:
    head = "%%MatrixMarket matrix "
    a = read_matrix(write(tmp_path / "p.mtx", head + "coordinate pattern general\n% x\n\n2 3 2\n2 3\n1 1\n"))
    assert (a.dtype, a.to_dense().tolist()) == (np.float32, [[1, 0, 0], [0, 0, 1]])
    a = read_matrix(write(tmp_path / "i.mtx", head + "coordinate integer general\n2 3 2\n2 3 0\n1 1 7\n"))
    assert (a.dtype, a.data.tolist(), a.stored_zeros) == (np.float64, [7, 0], 1)
    a = read_matrix(write(tmp_path / "d.mtx", head + "array real general\n2 2\n1\n0\n0\n4\n"))
    assert a.to_dense().tolist() == [[1, 0], [0, 4]]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("2 2 1\n1 1 1\n", FormatError, "first line"),
        ("%%MatrixMarket matrix coordinate complex general\n1 1 1\n1 1 1 1\n", FormatError, "complex"),
        (
            "%%MatrixMarket matrix coordinate real general\n2 2 999999999999\n1 1 1\n",
            FormatError,
            "999999999999 entries",
        ),
        ("%%MatrixMarket matrix array real general\n999999 999999\n1\n", FormatError, "room for"),
        ("%%MatrixMarket matrix coordinate real general\n2 2\n", FormatError, "line of sizes"),
        ("%%MatrixMarket matrix coordinate real general\n% only\n", FormatError, "line of sizes"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 1\n3 1 1\n", FormatError, "mtx:"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1\n", FormatError, "mtx:"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 2\n1 1 1\n1 1 2\n", OrderError, "repeats"),
    ],
)
def test_matrix_market_lies_are_named(tmp_path: Path, text: str, error: type[SpformatError], words: str) -> None:
    path = write(tmp_path / "a.mtx", text)
    with pytest.raises(error, match=words) as e:
        read_matrix(path)
    assert e.value.path == str(path)


@pytest.mark.parametrize("layout", ["csr", "csc", "coo", "bsr"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int64, np.bool_, np.uint16])
def test_scipy_npz(tmp_path: Path, layout: str, dtype: type) -> None:
    x = (sp.random_array((7, 11), density=0.4, rng=np.random.default_rng(2)) * 100).astype(dtype)
    sp.save_npz(tmp_path / "a.npz", x.asformat(layout))
    a = read_matrix(tmp_path / "a.npz")
    np.testing.assert_array_equal(a.to_dense().astype(np.float64), x.toarray().astype(np.float64))


def test_npz_of_blocks(tmp_path: Path) -> None:
    x = np.zeros((8, 12), np.float32)
    x[:4, 6:9], x[4:, 0], x[0, 6] = 2, [1, -0.0, 3, 0], np.nan
    sp.save_npz(tmp_path / "a.npz", sp.bsr_array(x, blocksize=(4, 3)))
    a = read_matrix(tmp_path / "a.npz")
    assert (a.nnz, a.stored_zeros) == (14, 0)
    np.testing.assert_array_equal(a.to_dense(), x)


BLOCKS: dict[str, object] = {
    "format": np.array(b"bsr"), "indptr": np.array([0, 2]), "indices": np.array([0, 1]), "data": np.ones((2, 3, 2)),
}  # fmt: skip


def pieces(**change: object) -> dict[str, object]:
    """The members of a good csr .npz, some exchanged; None leaves one out."""
    good: dict[str, object] = {
        "shape": np.array([3, 4]), "indptr": np.array([0, 2, 2, 4], np.int32), "format": np.array(b"csr"),
        "indices": np.array([0, 3, 0, 2], np.int32), "data": np.array([1.0, 2.0, 3.0, 4.0]),
    }  # fmt: skip
    return {k: v for k, v in (good | change).items() if v is not None}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"indices": np.array([0, 10**8, 0, 2])}, IndexBoundsError, r"indices\[1\].* got 100000000"),
        ({"indices": np.array([0, 2**32, 0, 2])}, IndexBoundsError, r"indices\[1\]"),
        ({"indices": np.array([0, -1, 0, 2])}, IndexBoundsError, r"indices\[1\]"),
        ({"indptr": np.array([0, 2**31 - 1, -(2**31), 4], np.int32)}, PointerError, "indptr"),
        ({"indptr": np.array([0, 2, 4])}, ArrayError, "M\\+1 = 4, got 3"),
        ({"indices": np.array([3, 3, 0, 2])}, OrderError, "repeats"),
        ({"indices": np.array([0.0, 3.0, 0.0, 2.0])}, FormatError, "expected integers"),
        ({"indices": None}, FormatError, "'indices' is missing"),
        ({"data": np.ones(3)}, FormatError, "expected 4 values"),
        ({"data": np.ones(4, np.complex64)}, FormatError, "complex64"),
        ({"data": np.full(4, 2**53 + 1)}, FormatError, r"2\^53"),
        ({"data": np.array([None] * 4)}, FormatError, "Python objects"),
        ({"shape": np.array([3, 4, 5])}, FormatError, "two numbers"),
        ({"shape": np.array([-3, 4])}, FormatError, r"2\^48-1"),
        ({"format": np.array(b"dia")}, FormatError, "csr, csc, coo or bsr, got 'dia'"),
        (BLOCKS | {"data": np.ones(2)}, FormatError, r"expected 2 blocks, got shape \(2,\)"),
        (BLOCKS | {"data": np.ones((3, 3, 2))}, FormatError, r"expected 2 blocks, got shape \(3, 3, 2\)"),
        (BLOCKS | {"data": np.ones((2, 2, 2))}, FormatError, r"blocks that tile \(3, 4\), got 2 x 2"),
        (BLOCKS | {"data": np.ones((2, 0, 2))}, FormatError, "got 0 x 2"),
        (BLOCKS | {"indices": np.array([0, 2])}, IndexBoundsError, r"indices\[1\].* got 2"),
        (BLOCKS | {"indices": np.array([0, 2**32 + 1])}, IndexBoundsError, r"indices\[1\].* got 4294967297"),
        (BLOCKS | {"indices": np.array([1, 1])}, OrderError, "more than once"),
        (BLOCKS | {"indptr": np.array([0, 3])}, PointerError, "indptr"),
        ({"format": np.array(b"coo"), "row": np.array([0, 3]), "col": np.array([0, 1]), "data": np.ones(2)},
         IndexBoundsError, "row indices in 0 .. 2"),
    ],
)  # fmt: skip
def test_npz_lies_are_named(tmp_path: Path, change: dict[str, object], error: type[SpformatError], words: str) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **pieces(**change))  # type: ignore[arg-type]
    with pytest.raises(error, match=words) as e:
        read_matrix(path)
    assert (e.value.path, e.value.exit_code) == (str(path), 65)


def test_npz_of_something_else_is_told_by_what_it_holds(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", edge_index=np.eye(2), **{f"x\x1b{i}": np.eye(1) for i in range(20)})  # type: ignore[arg-type]
    with pytest.raises(
        FormatError, match=r"scipy\.sparse\.save_npz writes, got an archive with edge_index, x\\x1b0, .*\.\.$"
    ):
        read_matrix(tmp_path / "a.npz")


def test_npz_unsorted_columns_are_sorted_with_their_values(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **pieces(indices=np.array([3, 0, 0, 2])))  # type: ignore[arg-type]
    assert read_matrix(tmp_path / "a.npz").to_dense().tolist() == [[2, 0, 0, 1], [0, 0, 0, 0], [3, 0, 4, 0]]


def test_what_an_archive_holds_beside_the_matrix_is_not_unpacked(tmp_path: Path) -> None:
    others = {f"other{i}": np.zeros(1 << 20, np.uint8) for i in range(64)}
    np.savez_compressed(tmp_path / "a.npz", **pieces(), **others)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        assert read_matrix(tmp_path / "a.npz").nnz == 4
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_the_members_of_an_archive_share_one_budget(tmp_path: Path) -> None:
    zeros = np.zeros(1 << 20, np.uint8)
    np.savez_compressed(tmp_path / "a.npz", **pieces(row=zeros, col=zeros))  # type: ignore[arg-type]
    with limits.using(memory=(2 << 20) + 2000):
        assert read_matrix(tmp_path / "a.npz").nnz == 4
    with (
        limits.using(memory=2 << 20),
        pytest.raises(LimitError, match=r"npz: arrays, unpacked: 2,09\d,\d+ bytes requested"),
    ):
        read_matrix(tmp_path / "a.npz")


def test_npz_damage_is_found(tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", **pieces())  # type: ignore[arg-type]
    content = (tmp_path / "good.npz").read_bytes()
    outcomes = set()
    for at in range(0, len(content), 7):
        broken = bytearray(content)
        broken[at] ^= 0x41
        try:
            read_matrix(write(tmp_path / "a.npz", bytes(broken)))
            outcomes.add("read")
        except (FormatError, LimitError) as e:  # anything else fails the test
            outcomes.add(type(e).__name__)
    assert {"read", "FormatError"} <= outcomes  # some bytes of an archive carry nothing
    with pytest.raises(FormatError, match="not a readable archive"):
        read_matrix(write(tmp_path / "a.npz", content[: len(content) // 2]))


# ------------------------------------------------------------------------------------------------------------- border


def test_values_and_dtype_can_be_replaced(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **pieces())  # type: ignore[arg-type]
    assert read_matrix(tmp_path / "a.npz", values="ones").data.tolist() == [1, 1, 1, 1]
    assert read_matrix(tmp_path / "a.npz", dtype="bf16").dtype.name == "bfloat16"
    assert read_matrix(tmp_path / "a.npz", dtype="int8").data.tolist() == [1, 2, 3, 4]
    np.savez(tmp_path / "b.npz", **pieces(data=np.array([1, 1.5, 1e5, np.inf])))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"3 values do not fit int8, the first is 1\.5"):
        read_matrix(tmp_path / "b.npz", dtype="int8")
    with pytest.raises(UsageError, match=r"1 values do not fit float16, the first is 100000\.0"):
        read_matrix(tmp_path / "b.npz", dtype="float16")


def test_suffix_and_kind_of_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.smtx, \.mtx or \.npz"):
        read_matrix(tmp_path / "a.csv")
    with pytest.raises(InputError):
        read_matrix(tmp_path / "none.npz")
    (tmp_path / "folder.mtx").mkdir()
    with pytest.raises(InputError, match="regular file"):
        read_matrix(tmp_path / "folder.mtx")


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("coordinate real", "1 1 1.5D+02"), ("coordinate real", "1 1 1,5"), ("coordinate real", "1 1 1.5 7"),
        ("coordinate real", "1 1 1.5-3"), ("coordinate real", "1 1 0x10"), ("coordinate real", "1 1 1e"),
        ("coordinate integer", "1 1 1.5"), ("coordinate integer", "1 1 1e3"), ("coordinate pattern", "1 1 5"),
        ("array real", "1.5 2"), ("array integer", "1.5"),
    ],
)  # fmt: skip
def test_mtx_entries_that_scipy_would_cut_short(tmp_path: Path, kind: str, entry: str) -> None:
    sizes = "1 1" if kind.startswith("array") else "1 1 1"
    path = write(tmp_path / "a.mtx", f"%%MatrixMarket matrix {kind} general\n% c\n{sizes}\n{entry}\n")
    with pytest.raises(FormatError, match=r"mtx: line 4: expected .*, got ") as caught:
        read_matrix(path)
    assert entry in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        "1 1 1.5e+02",
        " 1\t1 -.5 ",
        "1 1 nan",
        "1 1 Infinity",
        "1 1 -inf",
        "1 1 7.",
        "1 1 3\r",
        "1 1\t+.5e+3",
        "1 1 +inf",
    ],
)
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_mtx_entries_as_they_are_written(tmp_path: Path, entry: str, end: str) -> None:
    path = write(tmp_path / "a.mtx", f"%%MatrixMarket matrix coordinate real general\n\n1 1 1\n{entry}{end}")
    assert np.array_equal(read_matrix(path).data, [float(entry.split()[2])], equal_nan=True)


@pytest.mark.parametrize("text", ["3", "+3", "-3", "007"])
def test_mtx_integers_as_they_are_written(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "a.mtx", f"%%MatrixMarket matrix coordinate integer general\n1 1 1\n1 1 {text}\n")
    assert read_matrix(path, dtype="float32").data.tolist() == [int(text)]


def test_mtx_a_plus_before_values_of_a_dense_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mtx", "%%MatrixMarket matrix array real general\n% 1 + 1\n2 2\n+1\n-2\n 3e+0\n+4.5\n")
    assert read_matrix(path).to_dense().tolist() == [[1, 3], [-2, 4.5]]


@pytest.mark.parametrize("sizes", ["0 2", "2 0", "0 0"])
def test_mtx_values_of_no_element(tmp_path: Path, sizes: str) -> None:  # SciPy 1.17 ends in SIGFPE
    head = f"%%MatrixMarket matrix array real general\n{sizes}\n"
    with pytest.raises(FormatError, match=rf"mtx: expected no values for {sizes[0]} x {sizes[2]}, got '7\.5'"):
        read_matrix(write(tmp_path / "a.mtx", head + "7.5\n"))
    assert read_matrix(write(tmp_path / "b.mtx", head + "\n")).shape == tuple(map(int, sizes.split()))


@pytest.mark.parametrize("symmetry", ["symmetric", "skew-symmetric"])
@pytest.mark.parametrize("head", ["array real {} \n2 5\n", "coordinate integer {} \n2 5 1\n"])
def test_mtx_symmetry_is_of_square_matrices(tmp_path: Path, symmetry: str, head: str) -> None:
    entries = "1\n" * 9 if head.startswith("array") else "2 1 7\n"  # SciPy 1.17 writes behind its memory
    path = write(tmp_path / "a.mtx", "%%MatrixMarket matrix " + head.format(symmetry) + entries)
    with pytest.raises(FormatError, match=rf"mtx: expected a square matrix, as {symmetry} demands, got 2 x 5"):
        read_matrix(path)
