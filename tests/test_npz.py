"""Matrices in .npz archives: what scipy writes is read, what is damaged, hostile or something else is refused."""

from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
from catalogue import command
from test_matrices import write

from spformat import limits
from spformat.errors import (
    ArrayError,
    FormatError,
    IndexBoundsError,
    LimitError,
    OrderError,
    PointerError,
    SpformatError,
    UsageError,
)
from spformat.interop.matrices import read_matrix
from spformat.interop.matrix_output import write_matrix


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
    n = 10_000
    arrays = pieces(shape=[1, n], indptr=[0, n], indices=np.arange(n), data=np.zeros(n))
    np.savez_compressed(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    needed = 16 * n + 4 * 8 + 80 * n  # the arrays, unpacked, and 80 bytes for each item
    with limits.using(memory=needed):
        assert read_matrix(tmp_path / "a.npz").nnz == n
    with (
        limits.using(memory=needed - 1),
        pytest.raises(LimitError, match=rf"reading a matrix of 10,000 items: {needed:,} bytes requested"),
    ):
        read_matrix(tmp_path / "a.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_that_unpack_in_one_step_are_refused(tmp_path: Path, method: int) -> None:
    """zipfile has no bound on what one piece of a bzip2 or LZMA member becomes, and leaks errors of lzma."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as z:
        z.writestr("shape.npy", b"x" * 100)
    with pytest.raises(FormatError, match=r"'shape\.npy': expected a member that is stored or deflated"):
        read_matrix(tmp_path / "a.npz")


HEADER = "{'descr': %s, 'fortran_order': False, 'shape': %s, }"


@pytest.mark.parametrize(
    "text",
    [
        HEADER % ("()", "(2,)"), HEADER % ("'<i8'", "(True,)"), HEADER % ("'<U1'", "(4294967296,)"),
        HEADER % ("'<i8'", "-" * 9000 + "1"), HEADER % ("'<i8'", "(" * 3000), HEADER % ("'<i8'", "(2, 3, 4, 5, 6)"),
        HEADER % ("'<i8'", "(99999999999999999999,)"), HEADER % ("'<f3'", "(2,)"), HEADER % ("'<i0'", "(2,)"),
        HEADER % ("[('a', '<i8')]", "(2,)"), HEADER % ("'<i8'", "(2.0,)"), HEADER % ("'<i8'", "(1,,1)"), "1 +", "{", "",
        "__import__('os').getpid()", HEADER % ("'<i8'", "(2,)") + "\0", "\N{BULLET}", "lambda: 0",
    ],
)  # fmt: skip
def test_npy_headers_are_matched_and_not_evaluated(tmp_path: Path, text: str) -> None:
    raw = text.encode("utf-8")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as z:
        z.writestr("shape.npy", b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little") + raw + bytes(16))
    answer = command("inspect", tmp_path / "a.npz")
    assert answer.code == 65, answer
    assert "array 'shape.npy'" in answer.err


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


def test_files_of_other_names_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a name in \.npz, \.mtx or \.smtx"):
        write_matrix(tmp_path / "a.safetensors", np.eye(3, dtype=np.float32))
    assert not list(tmp_path.iterdir())
