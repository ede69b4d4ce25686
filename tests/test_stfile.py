"""Safetensors reading and writing. What must be refused is in rows/test_container_rows.py."""

from __future__ import annotations

import json
import os
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from catalogue import blob, tensor, write

from spformat import limits
from spformat.arrays.dtypes import SAFETENSORS
from spformat.errors import (
    ArrayError,
    ContainerError,
    InputError,
    IntegrityError,
    LimitError,
    SpformatError,
    UsageError,
    WriteError,
)
from spformat.storage import crc, stfile, stheader, stwriter


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[bytes], stfile.Reader]]:
    readers = []

    def open_bytes(data: bytes) -> stfile.Reader:
        path = tmp_path / "x.safetensors"
        path.write_bytes(data)
        readers.append(stfile.Reader(path))
        return readers[-1]

    yield open_bytes
    for reader in readers:
        reader.close()


def sample(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    n = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == np.bool_ else 256, n, np.uint8)
    return raw.view(dtype).reshape(shape)


def test_the_helper_makes_a_good_file(opened: Callable[[bytes], stfile.Reader]) -> None:
    reader = opened(blob({"a": F32_2}, np.float32([1, 2]).tobytes()))
    assert reader.read("a").tolist() == [1, 2]
    assert reader.header.oddities == ()


F32_2 = tensor()
D8 = bytes(8)


def test_the_largest_dimension() -> None:
    raw = json.dumps({"a": tensor(shape=(0, 2**48 - 1), offsets=(0, 0))}).encode()
    with limits.using(empty_extent=2**60):
        assert stheader.parse(raw, 0).entries["a"].shape == (0, 2**48 - 1)
        with pytest.raises(ContainerError, match="dimension"):
            stheader.parse(raw.replace(str(2**48 - 1).encode(), str(2**48).encode()), 0)


def test_the_longest_header() -> None:
    with pytest.raises(LimitError, match="--max-header-bytes"):
        stheader.length((100_000_000).to_bytes(8, "little"), 2**40)
    with pytest.raises(ContainerError, match="at most 100000000"):
        stheader.length((100_000_001).to_bytes(8, "little"), 2**40)


@pytest.mark.parametrize(
    ("code", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8)]
)
def test_sizes_of_dtypes_without_a_numpy_type(code: str, bits: int) -> None:
    raw = json.dumps({"a": tensor(code, (8,), (0, bits))}).encode()
    assert stheader.parse(raw, bits).entries["a"].nbytes == bits
    with pytest.raises(ContainerError, match="bits"):
        stheader.parse(raw.replace(b"[8]", b"[9]"), bits)


def test_an_unreadable_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x", {"a": np.arange(9)})

    def fail(*_: object) -> None:
        raise OSError(5, "I/O error")

    with stfile.Reader(tmp_path / "x") as reader:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(InputError, match="cannot read the file: I/O error"):
            reader.read("a")


def test_replaced_by_another_writer_the_open_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path, {"a": np.arange(10)})
    with stfile.Reader(path) as reader:
        write(path, {"a": np.zeros(10)}, overwrite=True)
        assert reader.read("a").tolist() == list(range(10))


# --- odd but legal


NAMES = [
    "../../x",
    "C:\\x",
    "a/b",
    "a\nb",
    "\x1b[31mred",
    "\u202eabc",
    "重み",
    "e\u0301",
    "\u00e9",
    "__metadata",
    "a.b.c",
]


def test_odd_names_are_only_keys(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write(path, {name: np.array([i]) for i, name in enumerate(NAMES)})
    with stfile.Reader(path) as reader:
        assert set(reader.entries) == set(NAMES)  # NFC and NFD stay apart
        assert [reader.read(name)[0] for name in NAMES] == list(range(len(NAMES)))
    assert set(safetensors.numpy.load_file(path)) == set(NAMES)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2", "I3"])
def test_other_dtypes_pass_through_as_bytes(
    opened: Callable[[bytes], stfile.Reader], code: str, tmp_path: Path
) -> None:
    data = os.urandom(12)
    shape = {"F4": 24}.get(code, 16)
    reader = opened(blob({"a": tensor(code, (shape,), (0, 12))}, data))
    with pytest.raises(ArrayError, match=f"dtype '{code}' not supported; supported: .*BF16"):
        reader.read("a")
    raw = reader.read_bytes("a")
    assert raw.tobytes() == data
    with stwriter.Writer(tmp_path / "y", [("a", code, (shape,), 12)]) as out:
        out.put("a", raw)
    with stfile.Reader(tmp_path / "y") as copy:
        assert copy.entries == reader.entries
        assert copy.read_bytes("a").tobytes() == data


def test_byte_orders_and_c42_strides(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "big": base.astype(">f4"), "fortran": np.asfortranarray(base), "transposed": base.T, "back": base[::-1, ::-2],
        "broadcast": np.broadcast_to(np.float32(7), (3, 5)), "scalar": np.array(2.5), "empty": base[:0, 1:3],
        "inner": base[1:3, 2:4], "swapped": base.astype(">f4").T, "bf16": base.astype(ml_dtypes.bfloat16).T,
    }  # fmt: skip
    arrays["readonly"] = base.copy()
    arrays["readonly"].flags.writeable = False
    write(tmp_path / "x", arrays)
    theirs = safetensors.numpy.load_file(tmp_path / "x")
    with stfile.Reader(tmp_path / "x") as reader:
        for name, a in arrays.items():
            got = reader.read(name)
            assert got.dtype == a.dtype.newbyteorder("=")
            assert got.shape == a.shape
            assert np.array_equal(got, a)
            assert np.array_equal(theirs[name], a)


@pytest.mark.parametrize("bad", [np.zeros(2, "O"), np.zeros(2, "M8[s]"), np.zeros(2, "U3"), np.zeros(2, "f4,i4"),
                                 np.zeros(2, np.complex128)])  # fmt: skip
def test_other_arrays_are_refused(bad: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ArrayError, match="cannot be stored"):
        stwriter.code_of(bad.dtype)


# --- with the official package


@pytest.mark.parametrize("code", SAFETENSORS)
def test_official_package_reads_ours(tmp_path: Path, code: str) -> None:
    a = sample(SAFETENSORS[code], (3, 5))
    write(tmp_path / "x", {"a": a, "empty": a[:0], "scalar": a[0, :1].reshape(())}, {"format": "pt", "note": "ü"})
    for name, info in safetensors.deserialize((tmp_path / "x").read_bytes()):
        expected = {"a": a, "empty": a[:0], "scalar": a[0, :1].reshape(())}[name]
        assert info["dtype"] == code
        assert tuple(info["shape"]) == expected.shape
        assert bytes(info["data"]) == expected.tobytes()
    with safetensors.safe_open(tmp_path / "x", "numpy") as f:
        assert f.metadata() == {"format": "pt", "note": "ü"}


def foreign(name: str, a: np.ndarray[Any, Any]) -> Any:
    """What ``safetensors.serialize`` takes: a TensorSpec since 0.8, a dict before."""
    if hasattr(safetensors, "TensorSpec"):
        return safetensors.TensorSpec(dtype=name, shape=list(a.shape), data_ptr=a.ctypes.data, data_len=a.nbytes)
    return {"dtype": name, "shape": list(a.shape), "data": a.tobytes()}


@pytest.mark.parametrize("code", SAFETENSORS)
def test_we_read_the_official_package(tmp_path: Path, code: str) -> None:
    names = {
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "BOOL": "bool",
        "BF16": "bfloat16", "C64": "complex64",
    }  # fmt: skip
    a = sample(SAFETENSORS[code], (4, 3))
    name = names.get(code, SAFETENSORS[code].name)
    raw = bytes(safetensors.serialize({"a": foreign(name, a), "z": foreign(name, a.reshape(-1))}, {"b": "2", "a": "1"}))
    (tmp_path / "x").write_bytes(raw)
    with stfile.Reader(tmp_path / "x") as reader:
        assert reader.header.metadata == {"a": "1", "b": "2"}
        assert reader.header.oddities == ()
        assert reader.read("a").dtype == a.dtype
        assert reader.read("a").tobytes() == a.tobytes()
        assert reader.read("z", zlib.crc32(a.tobytes())).shape == (12,)


# --- reading


def test_checksums_rows_and_pieces(tmp_path: Path) -> None:
    a = sample(np.dtype(np.uint16), (100, 7))
    write(tmp_path / "x", {"a": a, "scalar": np.array(1)})
    with stfile.Reader(tmp_path / "x") as reader:
        assert np.array_equal(reader.read("a", zlib.crc32(a.tobytes())), a)
        with pytest.raises(IntegrityError, match="is stored") as e:
            reader.read("a", zlib.crc32(a.tobytes()) ^ 1)
        assert e.value.tensor == "a"
        assert np.array_equal(reader.read("a", rows=slice(10, 33)), a[10:33])
        assert np.array_equal(reader.read("a", rows=slice(90, 500)), a[90:])
        assert reader.read("a", rows=slice(50, 20)).shape == (0, 7)
        with pytest.raises(UsageError, match="scalar"):
            reader.read("scalar", rows=slice(0, 1))
        assert b"".join(p.tobytes() for p in reader.pieces("a", 999)) == a.tobytes()
        with pytest.raises(ContainerError, match="none of that name"):
            reader.read("b")
    with pytest.raises(UsageError, match="closed"):
        reader.read("a")


@pytest.mark.parametrize("n", [0, 1, 31, 32, 1000, 12_345])
def test_threads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(crc, "SEGMENT", 1000)
    monkeypatch.setattr(crc, "PIECE", 300)
    a = sample(np.dtype(np.uint8), (n,))
    sums: list[Any] = []
    write(tmp_path / "x", {"a": a}, lambda found: sums.append(dict(found)) or {})
    assert sums[-1] == {"a": zlib.crc32(a.tobytes())}
    with stfile.Reader(tmp_path / "x") as reader:
        assert np.array_equal(reader.read("a", zlib.crc32(a.tobytes())), a)


# --- writing


def test_the_same_bytes_every_time_in_any_order_and_pieces(tmp_path: Path) -> None:
    arrays = {"w": sample(np.dtype(np.float32), (64, 9)), "b": sample(np.dtype(np.int8), (5,)), "i": np.arange(9)}
    write(tmp_path / "1", arrays, {"b": "1", "a": "2"})
    write(tmp_path / "2", dict(reversed(arrays.items())), {"a": "2", "b": "1"}, verify=True)
    specs = [(name, stwriter.code_of(a.dtype), a.shape) for name, a in arrays.items()]
    with stwriter.Writer(tmp_path / "3", specs, {"a": "2", "b": "1"}) as out:
        out.put("w", (arrays["w"][i : i + 7] for i in range(0, 64, 7)))  # row chunks
        out.put("i", [arrays["i"].tobytes()[:11], b"", bytearray(arrays["i"].tobytes()[11:])])
        out.put("b", arrays["b"])
    first = (tmp_path / "1").read_bytes()
    assert first == (tmp_path / "2").read_bytes() == (tmp_path / "3").read_bytes()


def test_checksums_are_filled_in_at_the_end(tmp_path: Path) -> None:
    a = np.arange(10)
    write(tmp_path / "x", {"a": a}, lambda found: {"crc": f"{found['a']:08x}"})
    with stfile.Reader(tmp_path / "x") as reader:
        assert reader.header.metadata == {"crc": f"{zlib.crc32(a.tobytes()):08x}"}


def row_chunks(rows: int) -> Iterator[np.ndarray[Any, Any]]:
    for i in range(rows):
        yield np.full((1, 1024), i, np.float32)


def test_other_memory_layouts_are_copied_in_row_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stwriter, "_CHUNK_BYTES", 2**20)
    a = np.arange(2**22, dtype=np.float32).reshape(1024, 4096)  # 16 MiB
    swapped = a.astype(">f4")
    with stwriter.Writer(tmp_path / "x", [("a", "F32", (4096, 1024)), ("b", "F32", (1024, 4096))]) as out:
        tracemalloc.start()
        out.put("a", a.T)
        out.put("b", swapped)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 * 2**20
    with stfile.Reader(tmp_path / "x") as reader:
        assert np.array_equal(reader.read("a"), a.T)
        assert np.array_equal(reader.read("b"), a)


def test_row_chunks_are_written_in_bounded_memory(tmp_path: Path) -> None:
    rows = 4096  # 16 MiB of 4 KiB rows
    with stwriter.Writer(tmp_path / "x", [("a", "F32", (rows, 1024))]) as out:
        tracemalloc.start()
        out.put("a", row_chunks(rows))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20
    with stfile.Reader(tmp_path / "x") as reader:
        assert np.array_equal(reader.read("a", rows=slice(4000, 4001)), np.full((1, 1024), 4000, np.float32))


MISUSE: dict[str, tuple[Callable[[stwriter.Writer], None], str]] = {
    "unknown": (lambda w: w.put("b", np.zeros(3)), "unknown name"),
    "dtype": (lambda w: w.put("a", np.zeros(3, np.float32)), "as declared"),
    "shape": (lambda w: w.put("a", np.zeros((3, 1))), "as declared"),
    "short": (lambda w: w.put("a", [bytes(23)]), "expected 24 bytes, got 23"),
    "long": (lambda w: w.put("a", [bytes(20), bytes(5)]), "got more"),
    "twice": (lambda w: [w.put("a", np.zeros(3)) for _ in range(2)] and None, "already"),  # type: ignore[func-returns-value]
    "missing": (lambda w: None, "were not put"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_wrong_use_of_the_writer_publishes_nothing(tmp_path: Path, case: str) -> None:
    use, message = MISUSE[case]
    with pytest.raises(UsageError, match=message), stwriter.Writer(tmp_path / "x", [("a", "F64", (3,))]) as out:
        use(out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("specs", "error"),
    [
        ([("a\0", "F32", (1,))], UsageError), ([("a", "F32", (1,) * 9)], UsageError),
        ([("a", "F32", (-1,))], UsageError), ([("a", "F4", (2,))], UsageError), ([("\ud800", "F32", (1,))], UsageError),
        ([("a", "F32", (1,)), ("a", "F32", (1,))], UsageError), ([("a", "F32", (0, 2**48))], UsageError),
        ([("x" * 2000, "F32", (1,))], LimitError),
    ],
)  # fmt: skip
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, specs: Any, error: type[SpformatError]) -> None:
    with pytest.raises(error):
        stwriter.Writer(tmp_path / "x", specs)
    assert list(tmp_path.iterdir()) == []


def test_a_header_over_the_limit_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(LimitError, match="--max-header-bytes"):
        stwriter.Writer(tmp_path / "x", [], {"long": "x" * (17 * 2**20)})
    assert list(tmp_path.iterdir()) == []


def test_verify_sees_a_device_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def flip(fd: int, buffers: list[memoryview], offset: int) -> int:
        done = real(fd, buffers, offset)
        buffers[0][0] ^= 1
        return done

    monkeypatch.setattr(os, "preadv", flip)
    with pytest.raises(WriteError, match="other bytes"):
        write(tmp_path / "x", {"a": np.arange(9)}, verify=True)
    assert list(tmp_path.iterdir()) == []


def test_no_arrays_at_all(tmp_path: Path) -> None:
    write(tmp_path / "x", {})
    with stfile.Reader(tmp_path / "x") as reader:
        assert reader.entries == {}
    assert safetensors.numpy.load_file(tmp_path / "x") == {}
