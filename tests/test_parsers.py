"""What readers, declarations and limits say, word for word, and where exactly they begin to say it."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import drop, keep, make, put, rewrite

from spformat import descriptor, limits, stfile
from spformat.container import save, save_dense
from spformat.errors import (
    ArrayError,
    ContainerError,
    DescriptorError,
    InputError,
    IntegrityError,
    LimitError,
    SpformatError,
    UsageError,
)
from spformat.formats import BSR, CSR, TwoFour, by_name, declare
from spformat.formats.declare import ParamDeclaration, parse_shape, parse_table, plain_int


def said(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}"


# --- files


def broken(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(SpformatError) as caught:
        stfile.Reader(path)
    assert caught.value.path == str(path)
    return caught.value.message


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert broken(tmp_path / "a", b"abc") == "truncated: 8-byte length expected, the file has 3 bytes"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    assert broken(tmp_path / "b", pointer).endswith(
        "not a safetensors file, or truncated; it looks like a Git LFS pointer: run `git lfs pull`"
    )
    assert broken(tmp_path / "c.incomplete", b"") == (
        "truncated: 8-byte length expected, the file has 0 bytes; the name says that a download is incomplete"
    )
    assert broken(tmp_path / "d.incomplete", b"GGUF" + bytes(9)).endswith(
        "; it looks like a GGUF file, which is not read"
    )
    assert broken(tmp_path / "e", (2).to_bytes(8, "little") + b"{}x") == (
        "bytes not covered: 1 after the start of the data"
    )
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    with limits.using(file_bytes=10):
        assert broken(tmp_path / "f", (2).to_bytes(8, "little") + b"{} ").startswith(
            "size of the file: expected at most 10, got 11; raise it with --max-file-bytes"
        )
    assert not before or set(os.listdir("/proc/self/fd")) == before  # the refused file is closed


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    tensors = {"t": np.arange(12, dtype=np.int16).reshape(4, 3), "s": np.float32(2)}
    save_dense(
        tmp_path / "p",
        tensors | {"f": np.array([0, 1, 1], bool), "e": np.zeros((0, 2), np.int8), "z": np.zeros(0, bool)},
    )
    return tmp_path / "p"


def test_rows_and_bytes_of_a_tensor(plain: Path) -> None:
    whole = np.arange(12, dtype=np.int16).reshape(4, 3)
    with stfile.Reader(plain) as reader:
        for rows in (slice(0, 4), slice(1, 3), slice(2, 2), slice(3, 1), slice(-1, None), slice(1, 99)):
            np.testing.assert_array_equal(reader.read("t", rows=rows), whole[rows])
        assert reader.read("e", rows=slice(0, 1)).shape == (0, 2)
        with pytest.raises(UsageError) as caught:
            reader.read("s", rows=slice(0, 1))
        assert said(caught.value) == "UsageError: tensor 's': rows: expected a tensor with rows, got a scalar"
        pieces = [p.tobytes() for p in reader.pieces("t", 10)]
        assert [len(p) for p in pieces] == [10, 10, 4]
        assert b"".join(pieces) == whole.tobytes() == reader.read_bytes("t").tobytes()
        room = bytearray(24)
        reader.read_into("t", 0, memoryview(room))
        assert room == whole.tobytes()
        reader.read_into("t", 20, memoryview(room)[:4])
        assert room[:4] == whole.tobytes()[20:]
        for at, n in ((-1, 4), (21, 4)):
            with pytest.raises(UsageError) as caught:
                reader.read_into("t", at, memoryview(room)[:n])
            text = f"{plain}: tensor 't': read_into: expected bytes 0..24, got {at}..{at + n}"
            assert str(caught.value) == text
        with pytest.raises(ContainerError) as refused:
            reader.entry("x")
        assert str(refused.value) == f"{plain}: tensor 'x': expected the tensor in the file, got none of that name"
    with pytest.raises(UsageError) as caught:
        reader.read("t")
    assert str(caught.value) == f"{plain}: the file is closed; read inside the `with` block"
    reader.close()


def test_sums_bools_and_dtypes(tmp_path: Path, plain: Path) -> None:
    with stfile.Reader(plain) as reader:
        with pytest.raises(IntegrityError) as caught:
            reader.read("t", crc32=1)
        e = caught.value
        assert (e.path, e.tensor, e.expected) == (str(plain), "t", "00000001")
        assert e.message == f"crc32 00000001 is stored, {e.value} computed: the file is damaged"
        reader.read("t", crc32=int(e.value, 16))
        start = reader.header.data_start + reader.entry("f").begin
    for element, value in ((2, 2), (1, 255)):
        data = bytearray(plain.read_bytes())
        data[start + element] = value
        plain.write_bytes(data)
        with stfile.Reader(plain) as reader, pytest.raises(ArrayError) as refused:
            reader.read("f")
        r = refused.value
        assert str(r) == f"{plain}: tensor 'f': BOOL: expected bytes 0 or 1, got {value} at element {element}"
        assert (r.index, r.value) == (element, value)
    raw = b'{"a": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}'
    (tmp_path / "f4").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with stfile.Reader(tmp_path / "f4") as reader, pytest.raises(ArrayError) as refused:
        reader.read("a")
    assert str(refused.value).startswith(
        f"{tmp_path}/f4: tensor 'a': dtype 'F4' not supported; supported: F64, F32, F16"
    )


def test_a_file_that_changes_or_goes(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stfile.Reader(plain) as reader:
        os.utime(plain, ns=(0, 0))
        with pytest.raises(IntegrityError) as caught:
            reader.read("t")
        assert str(caught.value) == f"{plain}: the file was changed while it was being read"
        os.truncate(plain, reader.header.data_start)
        with pytest.raises(IntegrityError) as caught:
            reader.read("t")
        assert str(caught.value) == f"{plain}: tensor 't': short read: the file was truncated while open"

        def fails(*args: Any) -> int:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch, pytest.raises(InputError) as failed:
            patch.setattr(os, "preadv", fails)
            reader.read("t")
        assert str(failed.value) == f"{plain}: cannot read the file: Input/output error"
        with monkeypatch.context() as patch, pytest.raises(InputError) as failed:
            patch.setattr(os, "fstat", fails)
            reader.read("e")
        assert str(failed.value) == f"{plain}: cannot read the file: Input/output error"


# --- declarations


def test_params() -> None:
    pair = ParamDeclaration("p", "pair", 1, 4, (), None, "")
    number = ParamDeclaration("n", "int", 1, 4, (), None, "")
    choice = ParamDeclaration("c", "choice", 0, 0, ("a", "b"), None, "")
    assert [pair.parse(v) for v in ("1x4", "4X1", (1, 4), [np.int64(4), 1])] == [(1, 4), (4, 1), (1, 4), (4, 1)]
    assert [number.parse(v) for v in (1, 4, "1", np.int8(4))] == [1, 4, 1, 4]
    assert type(number.parse(np.int8(4))) is int
    assert [choice.parse(v) for v in ("a", "b")] == ["a", "b"]
    refused = {
        pair: ["0x1", "1x5", "1", "1x1x1", (1, True), (1, 2.0), 3, None, "ax1"],
        number: [0, 5, True, np.bool_(True), 2.0, "x", None, (1,)],
        choice: ["c", None, 1],
    }
    ranges = {pair: "two ints in 1 .. 4", number: "an int in 1 .. 4", choice: "one of a, b"}
    for declared, values in refused.items():
        assert declared.range_text() == ranges[declared]
        for value in values:
            with pytest.raises(UsageError) as caught:
                declared.parse(value)
            assert str(caught.value) == f"{declared.name}: expected {ranges[declared]}, got {value!r}"
            assert caught.value.value == value
    with pytest.raises(UsageError) as caught:
        number.parse("9" * 99)
    assert str(caught.value) == f"n: expected an int in 1 .. 4, got '{'9' * 79}"


def test_plain_ints() -> None:
    assert [plain_int(v) for v in (3, "3", np.uint8(3))] == [3, 3, 3]
    assert type(plain_int(np.uint8(3))) is int
    for value in (True, np.bool_(False), 3.0, None, b"3", [3]):
        with pytest.raises(TypeError):
            plain_int(value)


def test_shapes_and_tables() -> None:
    assert parse_shape("x", [np.int32(0), 2**48 - 1]) == (0, 2**48 - 1)
    for shape in ((1,), (1, 2, 3), (-1, 0), (0, -1), (2**48, 0), (0, 2**48), (1.0, 2), 5, None, "1x", (True, 1)):
        with pytest.raises(UsageError) as caught:
            parse_shape("x", shape)
        assert str(caught.value) == f"x: shape: expected two ints (M, K) in 0 .. 2^48-1, got {shape!r}"
        assert caught.value.value == shape
    assert parse_table("x", "t", [0, np.int32(2)]) == (0, 2)
    assert parse_table("x", "t", ()) == ()
    for values in ((0, -1), (1.0,), (True,), 5, None):
        with pytest.raises(ArrayError) as refused:
            parse_table("x", "t", values)
        assert str(refused.value) == f"x: t: expected ints >= 0, got {values!r}"
        assert refused.value.array == "tables.t"
    with pytest.raises(ArrayError) as refused:
        parse_table("x", "t", "y" * 99)
    assert str(refused.value) == f"x: t: expected ints >= 0, got '{'y' * 79}"
    with pytest.raises(UsageError, match=rf"got \('{'y' * 78}$"):
        parse_shape("x", ("y" * 99, 1))


I32, F32 = np.int32, np.float32
BUILT: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "a list": ({"indptr": [0, 1, 1]}, "indptr", "indptr: expected a numpy or CuPy array, got list"),
    "2-D": ({"indices": np.zeros((1, 1), I32)}, "indices", "indices: expected 1 dimensions [nnz], got shape (1, 1)"),
    "short pointer": ({"indptr": np.array([0, 1], I32)}, "indptr", "indptr: dimension M+1 = 3, got 2 (shape (2,))"),
    "other length": ({"indices": np.zeros(2, I32)}, "data", "data: dimension nnz = 2, got 1 (shape (1,))"),
    "strided": ({"data": np.zeros(2, F32)[::2]}, None, ""),
    "float index": ({"indices": np.zeros(1, F32)}, "indices", "indices: expected dtype int32, got float32"),
    "int64 index": ({"indices": np.zeros(1, np.int64)}, "indices", "indices: expected dtype int32, got int64"),
    "big-endian": ({"indices": np.zeros(1, ">i4")}, "indices", "indices: expected dtype int32, got >i4"),
    "bool": (
        {"data": np.zeros(1, bool)}, "data",
        "data: expected dtype float64 or float32 or float16 or bfloat16 or float8_e4m3fn or float8_e5m2 or int8, got"
        " bool",
    ),
    "several": (
        {"indptr": np.array([0, 1], I32), "indices": np.zeros(1, F32)}, "indptr",
        "indptr: dimension M+1 = 3, got 2 (shape (2,)); indices: expected dtype int32, got float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BUILT)
def test_arrays_that_do_not_fit(case: str) -> None:
    changed, array, message = BUILT[case]
    arrays: dict[str, Any] = {"indptr": np.array([0, 1, 1], I32), "indices": np.zeros(1, I32), "data": np.ones(1, F32)}
    if not message:
        assert CSR(shape=(2, 3), **arrays | changed).nnz == 1
        return
    with pytest.raises(ArrayError) as caught:
        CSR(shape=(2, 3), **arrays | changed)
    assert (str(caught.value), caught.value.array) == (f"csr: {message}", array)


def test_order_of_memory_and_positions() -> None:
    f = BSR.from_dense(np.ones((4, 4), F32), blocksize=(2, 2))
    with pytest.raises(ArrayError) as caught:
        BSR(shape=f.shape, blocksize=(2, 2), indptr=f.indptr, indices=f.indices, data=np.asfortranarray(f.data))
    assert (str(caught.value), caught.value.array) == ("bsr: data: expected C order; use ascontiguousarray", "data")
    g = make(by_name("vector-nm"))
    with pytest.raises(ArrayError, match=r"indices: expected dtype uint8, got int8"):
        g.with_arrays(indices=g.arrays()["indices"].astype(np.int8))
    t = make(TwoFour)
    with pytest.raises(ArrayError, match=r"meta: expected dtype uint16, got int16"):
        t.with_arrays(meta=t.arrays()["meta"].view(np.int16))
    e = make(by_name("ell-buckets"))
    with pytest.raises(ArrayError) as caught:
        type(e)(shape=e.shape, **e.params(), **e.arrays(), **e.tables() | {"rows_per_bucket": (1,)})
    assert "rows_per_bucket: expected" in str(caught.value)
    assert caught.value.array == "rows_per_bucket"


def test_the_validated_mark() -> None:
    f = make(CSR)
    assert f.is_validated
    assert f.ensure_valid() is f
    changed = f.with_arrays(data=f.values.copy())
    assert not changed.is_validated
    assert changed == f
    assert changed.validate() is changed
    assert changed.is_validated
    bad = f.with_arrays(indices=np.full_like(f.arrays()["indices"], 99))
    for act in (bad.ensure_valid, bad.validate):
        with pytest.raises(SpformatError):
            act()
        assert not bad.is_validated


class OnHost:
    """Lanes of a device that is the host: what ``read_to`` asks of them, in pieces of 5 bytes."""

    def fill(self, shape: tuple[int, ...], dtype: Any, fetch: Any, *, summed: bool = False) -> tuple[Any, int]:
        out = np.empty(shape, dtype)
        room = out.reshape(-1).view(np.uint8).data if out.size else memoryview(bytearray())
        for at in range(0, room.nbytes, 5):
            fetch(room[at : at + 5], at)
        return out, zlib.crc32(room) if summed else 0


def test_a_tensor_for_a_device(plain: Path) -> None:
    lanes: Any = OnHost()
    with stfile.Reader(plain) as reader:
        for name in "tfesz":
            found = reader.read_to(lanes, name, zlib.crc32(reader.read(name)))
            np.testing.assert_array_equal(found, reader.read(name))
            assert (found.dtype, found.shape) == (reader.read(name).dtype, reader.read(name).shape)
            np.testing.assert_array_equal(reader.read_to(lanes, name), found)
        with pytest.raises(IntegrityError, match=r"tensor 't': crc32 00000001 is stored"):
            reader.read_to(lanes, "t", 1)
        with (
            limits.using(memory=23),
            pytest.raises(LimitError, match=rf"^tensor 't' of {plain}: 24 bytes requested, 23 a"),
        ):
            reader.read_to(lanes, "t")
        with (
            limits.using(memory=23),
            pytest.raises(LimitError, match=rf"^tensor 't' of {plain}: 24 bytes requested, 23 a"),
        ):
            reader.read("t")
        start = reader.header.data_start + reader.entry("f").begin
    data = bytearray(plain.read_bytes())
    data[start + 1] = 2
    plain.write_bytes(data)
    with stfile.Reader(plain) as reader:
        with pytest.raises(ArrayError) as caught:
            reader.read_to(lanes, "f")
        assert str(caught.value) == f"{plain}: tensor 'f': BOOL: expected bytes 0 or 1, got others"
        os.utime(plain, ns=(0, 0))
        for act in (lambda: reader.read_to(lanes, "e"), lambda: reader.read_into("t", 0, memoryview(bytearray(1)))):
            with pytest.raises(IntegrityError, match="the file was changed while it was being read"):
                act()


def test_f17_reads_may_be_short(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stfile.Reader(plain) as reader:
        wanted = {name: reader.read(name) for name in reader.entries}
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, rooms, at: real(fd, [rooms[0][:5]], at))
    with stfile.Reader(plain) as reader:
        for name, a in wanted.items():
            np.testing.assert_array_equal(reader.read(name, zlib.crc32(a)), a)


def test_f34_a_file_may_be_the_first_one_a_process_opens(plain: Path) -> None:
    kept = os.dup(0)
    os.close(0)  # a caller that closed stdin: the next file is number 0
    try:
        with stfile.Reader(plain) as reader:
            assert reader.read("s") == 2
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_what_is_read_lies_on_a_cache_line(plain: Path) -> None:
    with stfile.Reader(plain) as reader:
        kept = [reader.read(name) for name in "ttffss"]
    assert [a.ctypes.data % 64 for a in kept] == [0] * 6


def test_fields_are_kept_in_their_own_types() -> None:
    f = make(BSR)
    fields: dict[str, Any] = {"shape": [np.int64(7), 7], "blocksize": "2x3"}
    g = BSR(**fields, **f.arrays())
    assert (g.shape, g.blocksize) == ((7, 7), (2, 3))
    assert all(type(n) is int for n in (*g.shape, *g.blocksize))
    e = make(by_name("ell-buckets"))
    again = type(e)(shape=e.shape, **e.params(), **e.arrays(), **{k: list(v) for k, v in e.tables().items()})
    assert again.tables() == e.tables()


def test_checks_are_on_unless_asked_otherwise(tmp_path: Path) -> None:
    for name, edit in (("a", keep(drop("crc32"))), ("b", put(x=1))):
        save(tmp_path / name, {"w": make(CSR)})
        rewrite(tmp_path / name, edit, sums=False)
        with stfile.Reader(tmp_path / name) as reader:
            with pytest.raises(DescriptorError, match=r"'crc32', got none|unknown key 'x'"):
                descriptor.read(reader.header)
            descriptor.read(reader.header, allow_unchecked=True, ignore_unknown=True)


# --- limits


def test_products_are_exact_and_of_sizes() -> None:
    assert limits.product() == 1
    assert limits.product(2**32, np.int64(2**32), 3) == 3 * 2**64
    assert limits.product(0, 2**63) == 0
    with pytest.raises(UsageError) as caught:
        limits.product(2, -1)
    assert str(caught.value) == "size: expected a number >= 0, got -1"
    with pytest.raises(TypeError):
        limits.product(2.0)  # type: ignore[arg-type]


def test_d12_the_budget_names_bytes_and_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(n: int, given: int = 0) -> str:
        with pytest.raises(LimitError) as caught:
            limits.check_bytes(n, "x", given)
        e = caught.value
        assert (e.value, e.hint) == (n, "--max-memory")
        assert f"{n:,} bytes requested, {e.limit:,} allowed" in str(e)
        assert e.exit_code == 78
        return str(e)

    monkeypatch.setattr(limits, "host_memory", lambda: 10 << 30)
    assert limits.check_bytes(4 << 30, "x") == 4 << 30
    assert refused((4 << 30) + 1) == (
        "x: 4,294,967,297 bytes requested, 4,294,967,296 allowed; raise the budget with --max-memory (in Python:"
        " spformat.limits.using(memory=...))"
    )
    assert limits.check_bytes(8 << 30, "x", 1 << 30) == 8 << 30
    assert "8,589,934,592 allowed" in refused((8 << 30) + 1, 1 << 30)
    assert "10,737,418,240 allowed" in refused((10 << 30) + 1, 9 << 30)
    with limits.using(memory=7):
        assert limits.check_bytes(7, "x", 1 << 30) == 7
        assert "7 allowed" in refused(8, 1 << 30)
        with limits.using(tensors=3) as inner:
            assert (inner.memory, inner.tensors, limits.current()) == (7, 3, inner)
        assert limits.current().tensors == 100_000
    assert limits.current().memory is None


def test_limits_by_name() -> None:
    with limits.using(tensors=3):
        limits.check("tensors", 3, "n")
        with pytest.raises(LimitError) as caught:
            limits.check("tensors", 1234, "n")
    e = caught.value
    assert (e.limit, e.value, e.hint) == (3, 1234, "--max-tensors")
    limits.check("memory", 1 << 60, "no limit is set")
    with pytest.raises(UsageError) as unknown, limits.using(tensor=3, x=1):
        pass
    assert str(unknown.value).startswith("limits: expected some of file_bytes, header_bytes, ")
    assert str(unknown.value).endswith(", link_roots, got tensor, x")
    with limits.using(limits.Limits(tensors=5), name_bytes=6) as both:
        assert (both.tensors, both.name_bytes, both.memory) == (5, 6, None)


def test_arrays_lie_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    f = make(BSR)
    monkeypatch.setattr(declare, "device_of", lambda a: f"cuda:{a.ndim}")
    with pytest.raises(ArrayError) as caught:
        f.with_arrays()
    assert str(caught.value) == "bsr: arrays on several devices: indptr cuda:1, indices cuda:1, data cuda:3"
    assert caught.value.array is None
