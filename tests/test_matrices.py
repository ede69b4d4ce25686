"""Foreign matrix files: the real ones count what they should, the hostile ones are refused with a typed error."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.io import mmread, mmwrite

from spformat.errors import (
    FormatError,
    IndexBoundsError,
    InputError,
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


# ------------------------------------------------------------------------------------------------------ Matrix Market


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


# ------------------------------------------------------------------------------------------------------------- border


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


@pytest.mark.parametrize(("symmetry", "mirrored"), [("symmetric", 1), ("skew-symmetric", -1)])
def test_mtx_patterns_are_mirrored_with_the_sign_of_their_symmetry(
    tmp_path: Path, symmetry: str, mirrored: int
) -> None:
    path = write(tmp_path / "a.mtx", f"%%MatrixMarket matrix coordinate pattern {symmetry}\n3 3 1\n3 1\n")
    a = read_matrix(path)
    assert a.dtype == np.float32
    assert a.to_dense().tolist() == [[0, 0, mirrored], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("symmetry", ["symmetric", "skew-symmetric"])
@pytest.mark.parametrize("head", ["array real {} \n2 5\n", "coordinate integer {} \n2 5 1\n"])
def test_mtx_symmetry_is_of_square_matrices(tmp_path: Path, symmetry: str, head: str) -> None:
    entries = "1\n" * 9 if head.startswith("array") else "2 1 7\n"  # SciPy 1.17 writes behind its memory
    path = write(tmp_path / "a.mtx", "%%MatrixMarket matrix " + head.format(symmetry) + entries)
    with pytest.raises(FormatError, match=rf"mtx: expected a square matrix, as {symmetry} demands, got 2 x 5"):
        read_matrix(path)
