"""The exact errors of readers and limits, and the exact values at which they begin."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import drop, keep, make, put, rewrite

from spformat import limits
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
from spformat.formats import CSR
from spformat.storage import descriptor, stfile
from spformat.storage.container import save, save_dense


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


class OnHost:
    """A DeviceCopy to a device that is the host: what ``read_to`` asks of them, in pieces of 5 bytes."""

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
            pytest.raises(LimitError, match=rf"^{plain}: tensor 't': its values: 24 bytes requested, 23 a"),
        ):
            reader.read_to(lanes, "t")
        with (
            limits.using(memory=23),
            pytest.raises(LimitError, match=rf"^{plain}: tensor 't': its values: 24 bytes requested, 23 a"),
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
