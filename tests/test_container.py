"""save, load, safe_open. What must be refused is in rows/test_descriptor_rows.py and rows/test_array_rows.py."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hostile import change, make, matrix, rewrite

import spformat as sf
from spformat import limits
from spformat.arrays import threads
from spformat.arrays.dtypes import SAFETENSORS, VALUE_TYPES
from spformat.errors import (
    ArrayError,
    ContainerError,
    DeviceUnavailable,
    IndexBoundsError,
    IntegrityError,
    LimitError,
    OutputError,
    UsageError,
)
from spformat.formats import FORMATS
from spformat.formats.base import Format
from spformat.formats.csr import CSR
from spformat.formats.dense import Dense
from spformat.storage import stfile, stwriter, tensorfile
from spformat.storage.container import load, safe_open, save, save_dense
from spformat.storage.filewriter import create, outline

SHAPES = [(7, 7), (33, 70), (1, 1), (0, 5), (5, 0), (0, 0)]


@pytest.fixture
def csr_file(tmp_path: Path) -> Path:
    """Tensor "w": CSR of shape (7, 7) with 14 or so items, and a plain "bias"."""
    path = tmp_path / "w.safetensors"
    save(path, {"w": make(CSR), "bias": np.arange(7, dtype=np.float32)})
    return path


# --- what is saved comes back


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_round_trip_of_every_format_and_dtype(tmp_path: Path, fmt: type[Format], shape: tuple[int, int]) -> None:
    tensors: dict[str, Any] = {f"layer.{dtype}": make(fmt, shape, dtype) for dtype in fmt.value_dtypes}
    save(tmp_path / "x", tensors, verify=True)
    back = load(tmp_path / "x")
    assert list(back) == sorted(tensors)
    for name, f in back.items():
        assert type(f) is fmt
        assert f == tensors[name]
        assert f.is_validated
        assert all(not a.flags.writeable and a.flags.aligned for a in f.arrays().values())


@pytest.mark.parametrize("code", SAFETENSORS)
def test_plain_arrays_of_every_dtype_and_rank(tmp_path: Path, code: str) -> None:
    raw = np.random.default_rng(1).integers(0, 2, 24 * SAFETENSORS[code].itemsize, np.uint8)
    flat = raw.view(SAFETENSORS[code])
    arrays = {str(len(s)): flat[: int(np.prod(s))].reshape(s) for s in ((), (24,), (4, 6), (2, 3, 4), (1, 2, 3, 4))}
    save(tmp_path / "x", arrays | {"empty": flat[:0].reshape(0, 3), "a.data": flat[:1]})
    back = load(tmp_path / "x")
    for name, a in arrays.items():
        got = back[name]
        assert isinstance(got, np.ndarray)  # a plain 2-D array stays one
        assert (got.dtype, got.shape, got.tobytes()) == (a.dtype, a.shape, a.tobytes())
    assert back["empty"].shape == (0, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_bit_pattern(tmp_path: Path, dtype: str) -> None:
    row = VALUE_TYPES[dtype]
    patterns = np.arange(2 ** (8 * row.numpy.itemsize), dtype=row.bits)  # NaN payloads, infinities, subnormals, -0
    x = patterns.view(row.numpy).reshape(16, -1)
    save(tmp_path / "x", {"plain": x, "dense": Dense.from_dense(x), "csr": CSR.from_dense(x)})
    back = load(tmp_path / "x")
    assert np.array_equal(back["plain"].view(row.bits).reshape(-1), patterns)
    assert np.array_equal(back["dense"].data.view(row.bits).reshape(-1), patterns)
    zero = (patterns & row.bits.type(row.zero_mask)) == 0
    assert np.array_equal(back["csr"].data.view(row.bits), patterns[~zero])
    assert np.array_equal(back["csr"].to_dense().view(row.bits).reshape(-1), np.where(zero, 0, patterns))


def test_foreign_memory_layouts(tmp_path: Path) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"f": np.asfortranarray(base), "t": base.T, "b": base.astype(">f4"), "n": base[::-1], "s": np.float32(3)}
    save(tmp_path / "x", arrays | {"dense": Dense.from_dense(base.T)})
    back = load(tmp_path / "x")
    for name, a in arrays.items():
        assert np.array_equal(back[name], a)
        assert back[name].dtype.isnative
    assert np.array_equal(back["dense"].to_dense(), base.T)


def test_names_select_and_unknown_ones_get_a_hint(csr_file: Path) -> None:
    assert list(load(csr_file, ["w"])) == ["w"]
    assert list(load(csr_file, "bias")) == ["bias"]
    assert load(csr_file, []) == {}
    with pytest.raises(UsageError, match="did you mean 'bias'"):
        load(csr_file, ["biass"])
    with pytest.raises(UsageError, match="device: expected"):
        load(csr_file, device="tpu")


def test_names_are_only_keys(tmp_path: Path) -> None:
    names = ["../../x", "a/b", "a.b.c", "重み", "e\u0301", "\u00e9", "tensors", "w", "w.w", "\x1b[31m"]
    save(tmp_path / "x", {name: make(CSR, (i, 3)) for i, name in enumerate(names)})
    back = load(tmp_path / "x")
    assert {name: back[name].shape[0] for name in names} == {name: i for i, name in enumerate(names)}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_the_lazy_reader(csr_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with safe_open(csr_file) as f:
        monkeypatch.setattr(stfile.Reader, "_owned", lambda *_: pytest.fail("data was read"))
        assert (f.keys(), len(f), list(f)) == (["bias", "w"], 2, ["bias", "w"])
        assert "w" in f
        assert "w.data" not in f
        info = f.info("w")
        assert info.format is CSR
        assert (info.shape, info.dtype, info.params, info.tables) == ((7, 7), "float16", {}, {})
        assert info.arrays["indptr"] == ("I32", (8,))
        assert f.info("bias").format is None
        assert (f.info("bias").dtype, f.info("bias").shape) == ("float32", (7,))
        assert f.described
        monkeypatch.undo()
        assert f["w"] == make(CSR)
        assert f.array("bias").tolist() == list(range(7))
        assert (f.nbytes("bias"), f.nbytes("w"), f.info("w").stored) == (28, make(CSR).nbytes, make(CSR).stored)
        assert repr(f) == f"TensorFile({str(csr_file)!r}, 2 tensors, described)"
        assert f.array("bias", slice(2, 4)).tolist() == [2, 3]
        with pytest.raises(UsageError, match="got csr"):
            f.array("w")
    with pytest.raises(UsageError, match="closed"):
        f["w"]


# --- bytes


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_the_same_bytes_in_any_order(tmp_path: Path, fmt: type[Format]) -> None:
    tensors: dict[str, Any] = {"b": make(fmt, (33, 70)), "a": make(fmt), "bias": np.arange(3)}
    save(tmp_path / "1", tensors, metadata={"z": "1", "a": "2"})
    save(tmp_path / "2", dict(reversed(tensors.items())), metadata={"a": "2", "z": "1"})
    with create(tmp_path / "3", [outline(k, x) for k, x in tensors.items()], metadata={"a": "2", "z": "1"}) as f:
        for name in ("bias", "a", "b"):
            f.put(name, tensors[name])
    first = (tmp_path / "1").read_bytes()
    assert first == (tmp_path / "2").read_bytes() == (tmp_path / "3").read_bytes()
    save(tmp_path / "4", load(tmp_path / "1"), metadata={"z": "1", "a": "2"})
    assert first == (tmp_path / "4").read_bytes()


@pytest.mark.parametrize("metadata", [{None: "x"}, {1: "x"}, {("a",): "x"}, ["a"], [1], 3, "text"], ids=repr)
def test_metadata_that_is_no_text(tmp_path: Path, metadata: Any) -> None:
    x = np.eye(4, dtype=np.float32)
    for call in (
        lambda: save(tmp_path / "w", {"w": x}, metadata=metadata),
        lambda: save_dense(tmp_path / "w", {"w": x}, metadata=metadata),
        lambda: create(tmp_path / "w", [outline("w", x)], metadata=metadata),
    ):
        with pytest.raises(UsageError, match=r"metadata: expected (\{name: text\}|names that are text), got "):
            call()
    assert not list(tmp_path.iterdir())


def test_golden_bytes(tmp_path: Path) -> None:
    # Container version 1 as released: if this changes, the version must change.
    w = CSR(shape=(2, 3), indptr=np.int32([0, 1, 2]), indices=np.int32([2, 0]), data=np.float32([1.5, -2]))
    save(tmp_path / "x", {"w": w, "b": np.int8([7])})
    header = (
        '{"__metadata__":{"spformat":"{\\"container\\":1,\\"plain\\":{\\"b\\":\\"4e0811a1\\"},\\"sha256\\":'
        '\\"SHA\\",\\"tensors\\":{\\"w\\":{\\"crc32\\":{\\"data\\":\\"CRC0\\",\\"indices\\":\\"CRC1\\",'
        '\\"indptr\\":\\"CRC2\\"},\\"dtype\\":\\"float32\\",\\"format\\":\\"csr\\",\\"params\\":{},\\"shape\\":[2,3],'
        '\\"version\\":1}}}"},"w.data":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w.indices":{"dtype":"I32",'
        '"shape":[2],"data_offsets":[8,16]},"w.indptr":{"dtype":"I32","shape":[3],"data_offsets":[16,28]},'
        '"b":{"dtype":"I8","shape":[1],"data_offsets":[28,29]}}'
    )
    data = w.data.tobytes() + w.indices.tobytes() + w.indptr.tobytes() + b"\7"
    header = header.replace("4e0811a1", f"{zlib.crc32(bytes([7])):08x}")
    for i, a in enumerate((w.data, w.indices, w.indptr)):
        header = header.replace(f"CRC{i}", f"{zlib.crc32(a.tobytes()):08x}")

    def padded(sha: str) -> bytes:
        raw = header.replace("SHA", sha).encode()
        return raw + b" " * (-(len(raw) + 8) % 64)

    sha = hashlib.sha256(padded("0" * 64)).hexdigest()
    raw = padded(sha)
    assert (tmp_path / "x").read_bytes() == len(raw).to_bytes(8, "little") + raw + data


def test_official_package_reads_our_files(tmp_path: Path) -> None:
    tensors = {f.name: make(f) for f in FORMATS}
    save(tmp_path / "x", tensors)
    theirs = safetensors.numpy.load_file(tmp_path / "x")
    expected = {f"{name}.{array}": a for name, f in tensors.items() for array, a in f.arrays().items()}
    assert theirs.keys() == expected.keys()
    for name, a in expected.items():
        assert np.array_equal(theirs[name], a)
        assert theirs[name].dtype == a.dtype


# --- somebody else's files


def test_foreign_files_of_every_value_type_are_dense(tmp_path: Path) -> None:
    arrays = {dtype: matrix((5, 6), dtype) for dtype in VALUE_TYPES}
    save_dense(tmp_path / "x", arrays)
    with safe_open(tmp_path / "x") as f:
        for dtype, a in arrays.items():
            assert f[dtype] == Dense.from_dense(a)


def test_foreign_tensors_of_unknown_dtype_do_not_spoil_the_rest(tmp_path: Path) -> None:
    with stwriter.Writer(tmp_path / "x", [("q", "F4", (3, 8), 12), ("w", "F32", (1, 2))]) as out:
        out.put("q", [bytes(range(12))])
        out.put("w", np.float32([[1, 2]]))
    with safe_open(tmp_path / "x") as f:
        assert f["w"].to_dense().tolist() == [[1, 2]]
        assert f.info("q").dtype == "F4"
        assert b"".join(p.tobytes() for p in f.raw("q", 5)) == bytes(range(12))
        with pytest.raises(ArrayError, match="not supported"):
            f["q"]


def test_dense_output_is_an_ordinary_file(tmp_path: Path) -> None:
    w = matrix((4, 6), "float32")
    save_dense(tmp_path / "x", {"w": Dense.from_dense(w), "b": np.arange(3)})
    with safetensors.safe_open(tmp_path / "x", "numpy") as f:
        assert f.metadata() == {"format": "pt"}
        assert np.array_equal(f.get_tensor("w"), w)
    with pytest.raises(UsageError, match=r"got csr; call to_dense"):
        save_dense(tmp_path / "y", {"w": make(CSR)})


def test_no_descriptor_leaks(csr_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(csr_file.read_bytes()[:-1])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        load(csr_file)
        with pytest.raises(ContainerError):
            load(bad)
        with pytest.raises(OutputError):
            save(csr_file, {})
        with pytest.raises(UsageError, match="were not put"), create(tmp_path / "y", [outline("w", make(CSR))]):
            pass
    assert len(os.listdir("/proc/self/fd")) == before


# --- 2b: the descriptor, checksums recomputed


def test_the_rewriting_helper_makes_good_files(csr_file: Path) -> None:
    before = csr_file.read_bytes()
    rewrite(csr_file, lambda tree, arrays: None)
    assert csr_file.read_bytes() == before


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_loading_to_a_device(tmp_path: Path, fmt: type[Format]) -> None:
    save(tmp_path / "x", {"w": make(fmt, (33, 70)), "b": np.arange(5)})
    back = load(tmp_path / "x", device="cuda")
    assert back["w"].device == "cuda:0"
    assert back["w"].is_validated
    assert back["w"] == make(fmt, (33, 70))
    assert back["b"].get().tolist() == list(range(5))
    save(tmp_path / "y", back)
    assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()


@pytest.mark.gpu
def test_a_dtype_the_device_lacks(tmp_path: Path) -> None:
    import cupy

    save(tmp_path / "x", {"w": make(CSR, dtype="float8_e5m2")})
    try:
        cupy.zeros(1, VALUE_TYPES["float8_e5m2"].numpy)
    except ValueError:
        with pytest.raises(ArrayError, match="cannot hold dtype float8_e5m2"):
            load(tmp_path / "x", device="cuda")
    else:
        assert load(tmp_path / "x", device="cuda")["w"].dtype == "float8_e5m2"


def test_a_device_that_is_not_there(csr_file: Path) -> None:
    with pytest.raises(DeviceUnavailable) as e:
        load(csr_file, device="cuda:99")
    assert e.value.exit_code == 69


# --- 2c, where the file layer meets the arrays: checksums are right


def test_errors_name_file_and_tensor_and_escape_names(tmp_path: Path) -> None:
    name = "a\n\x1b[31mb"
    save(tmp_path / "x", {name: make(CSR)})
    data = bytearray((tmp_path / "x").read_bytes())
    data[-1] ^= 1
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(IntegrityError) as e:
        load(tmp_path / "x")
    assert name not in str(e.value)
    assert "a\\n\\x1b[31mb" in str(e.value)
    assert json.loads(json.dumps(e.value.to_json()))["code"] == "IntegrityError"


def test_good_and_bad_files_in_many_threads(csr_file: Path, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    bad = tmp_path / "bad"
    bad.write_bytes(csr_file.read_bytes())
    rewrite(bad, change("indices", lambda a: a + np.int32(100)))

    def verdict(i: int) -> bool:
        try:
            load(bad if i % 3 == 0 else csr_file)
        except IndexBoundsError:
            return i % 3 == 0
        return i % 3 != 0

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(verdict, range(300)))


def test_tensors_read_side_by_side_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors, under the limits of the caller; the error is about the first damaged one in the requested order."""
    rng = np.random.default_rng(0)
    dense = rng.integers(0, 2, (20, 40, 30)).astype(np.float32)
    tensors = {f"t{i}": CSR.from_dense(x) for i, x in enumerate(dense)}
    save(tmp_path / "x.safetensors", tensors)
    monkeypatch.setattr(tensorfile, "_WORTH_THREADS", 0)
    monkeypatch.setattr(threads, "cores", lambda: 3)
    names = [f"t{i}" for i in (3, 19, 0, 7, 11, 12, 4)]
    assert load(tmp_path / "x.safetensors", names) == {n: tensors[n] for n in names}
    with limits.using(memory=100), pytest.raises(LimitError):
        load(tmp_path / "x.safetensors", names)
    raw = bytearray((tmp_path / "x.safetensors").read_bytes())
    with safe_open(tmp_path / "x.safetensors") as f:
        for name in ("t4", "t12", "t7"):
            raw[next(iter(f.ranges(name)))[1] - 1] ^= 1
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(IntegrityError) as e:
        load(tmp_path / "x.safetensors", names)
    assert e.value.fields["tensor"] == "t7"


def test_an_open_file_is_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    sf.save(path, {"w": sf.convert(np.eye(4, dtype=np.float32), "csr"), "b": np.arange(3)})
    with sf.safe_open(path) as f:
        assert [name for name, _ in f.items()] == ["b", "w"] == list(f)
        assert [x.dtype.name for x in f.values()] == ["int64", "float32"]
        assert dict(f.items())["w"] == f["w"] == f.get("w")
        assert f.get("none") is None
        assert f.get("none", 3) == 3


def test_a_url_is_no_place_to_save_to() -> None:
    with pytest.raises(
        sf.errors.OutputError, match=r"s3://b/a\.safetensors: cannot open .*`spformat convert` alone takes URLs"
    ):
        sf.save("s3://b/a.safetensors", {"b": np.arange(3)})
