"""save, load, safe_open. Ids d01 .. d25 and a01 .. are rows of the catalogue of bad and odd inputs."""

from __future__ import annotations

import hashlib
import json
import os
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hostile import Edit, make, matrix, rewrite

from spformat import limits, stfile
from spformat.container import create, load, outline, safe_open, save, save_dense
from spformat.dtypes import SAFETENSORS, VALUE_TYPES
from spformat.errors import (
    ArrayError,
    ContainerError,
    DescriptorError,
    DeviceUnavailable,
    IndexBoundsError,
    IntegrityError,
    InvariantError,
    LimitError,
    OutputError,
    PointerError,
    SpformatError,
    UsageError,
    VersionError,
)
from spformat.formats import FORMATS
from spformat.formats.base import Format
from spformat.formats.csr import CSR
from spformat.formats.dense import Dense

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
def test_t10_a45_every_bit_pattern(tmp_path: Path, dtype: str) -> None:
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


def test_c31_a42_foreign_memory_layouts(tmp_path: Path) -> None:
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


def test_c24_c25_names_are_only_keys(tmp_path: Path) -> None:
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


def test_d01_a_dense_file_is_dense_input_but_not_loadable(tmp_path: Path) -> None:
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {"z.weight": w, "a.bias": w[0].copy(), "ids": np.arange(4).reshape(2, 2)}
    safetensors.numpy.save_file(arrays, tmp_path / "x", {"format": "pt"})
    with pytest.raises(DescriptorError, match=r"dense safetensors file.*spformat convert.*safe_open") as e:
        load(tmp_path / "x")
    assert e.value.exit_code == 65
    with safe_open(tmp_path / "x") as f:
        assert not f.described
        assert f.metadata == {"format": "pt"}
        assert isinstance(f["z.weight"], Dense)
        assert f["z.weight"].is_validated
        assert np.array_equal(f["z.weight"].to_dense(), w)
        assert isinstance(f["a.bias"], np.ndarray)
        assert isinstance(f["ids"], np.ndarray)  # int64 is not a value type
        assert np.array_equal(f.array("z.weight", slice(1, 3)), w[1:])
        places = [stfile.SAFETENSORS[f.info(k).arrays[""][0]].itemsize for k in f]
        assert places == sorted(places, reverse=True)  # in the order of their data


def test_foreign_files_of_every_value_type_are_dense(tmp_path: Path) -> None:
    arrays = {dtype: matrix((5, 6), dtype) for dtype in VALUE_TYPES}
    save_dense(tmp_path / "x", arrays)
    with safe_open(tmp_path / "x") as f:
        for dtype, a in arrays.items():
            assert f[dtype] == Dense.from_dense(a)


def test_c27_foreign_tensors_of_unknown_dtype_do_not_spoil_the_rest(tmp_path: Path) -> None:
    with stfile.Writer(tmp_path / "x", [("q", "F4", (3, 8), 12), ("w", "F32", (1, 2))]) as out:
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


# --- writing


def test_streaming_in_panels(tmp_path: Path) -> None:
    w = matrix((100, 12), "float32")
    with create(tmp_path / "x", [outline("w", Dense.from_dense(w)), outline("p", w)]) as f:
        f.put_array("p", "", (w[i : i + 9] for i in range(0, 100, 9)))
        f.put_array("w", "data", (w[i : i + 40] for i in range(0, 100, 40)))
    back = load(tmp_path / "x")
    assert np.array_equal(back["p"], w)
    assert back["w"] == Dense.from_dense(w)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": [1, 2]}, "list; use convert"), ({"w": np.zeros(2, "O")}, "cannot be stored"),
        ({"": np.zeros(2)}, "name"),
        ({3: np.zeros(2)}, "name"), ({"w": make(CSR), "w.data": np.zeros(2)}, "distinct names"),
        ({"a\0": np.zeros(2)}, "NUL"), ({"\ud800": np.zeros(2)}, "surrogate"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved(tmp_path: Path, tensors: Any, message: str) -> None:
    with pytest.raises((UsageError, ArrayError), match=message):
        save(tmp_path / "x", tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_bare_tensor_needs_a_name(tmp_path: Path) -> None:
    for bare in (make(CSR), np.zeros(3), [make(CSR)]):
        with pytest.raises(UsageError, match=r"expected \{name: tensor\}"):
            save(tmp_path / "x", bare)  # type: ignore[arg-type]


def test_t27_no_descriptor_leaks(csr_file: Path, tmp_path: Path) -> None:
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


def test_invalid_contents_are_not_published(tmp_path: Path) -> None:
    good = make(CSR)
    bad = good.with_arrays(indices=good.indices + np.int32(100))
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(IndexBoundsError):
        save(tmp_path / "x", {"a": good, "w": bad}, overwrite=True)
    with pytest.raises(OutputError, match="--force"):
        save(tmp_path / "x", {"a": good})
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]


def test_put_checks_the_outline(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="outline"), create(tmp_path / "x", [outline("w", make(CSR))]) as f:
        f.put("w", make(CSR, (8, 7)))
    with pytest.raises(UsageError, match="no tensor 'v'"), create(tmp_path / "x", [outline("w", make(CSR))]) as f:
        f.put("v", make(CSR))
    with pytest.raises(UsageError, match="were not put"), create(tmp_path / "x", [outline("w", make(CSR))]):
        pass
    with pytest.raises(UsageError, match="got 'values'"), create(tmp_path / "x", [outline("w", make(CSR))]) as f:
        f.put_array("w", "values", [])
    with pytest.raises(UsageError, match="'spformat'"):
        create(tmp_path / "x", [], metadata={"spformat": "x"})
    with pytest.raises(UsageError, match="twice"):
        create(tmp_path / "x", [outline("w", np.zeros(2))] * 2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_can_be_finished_by_hand(tmp_path: Path) -> None:
    f = create(tmp_path / "x", [outline("w", make(CSR))])
    f.put("w", make(CSR))
    f.commit()
    assert load(tmp_path / "x")["w"] == make(CSR)
    f = create(tmp_path / "y", [outline("w", make(CSR))])
    f.abandon()
    f.abandon()
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_an_outline_read_from_a_file_serves_to_write_one(csr_file: Path, tmp_path: Path) -> None:
    with safe_open(csr_file) as f, create(tmp_path / "copy", [f.info(name) for name in f]) as out:
        for name in f:
            out.put(name, f[name])
    assert (tmp_path / "copy").read_bytes() == csr_file.read_bytes()


# --- damage: everything is rejected


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_t3_truncations_and_byte_substitutions(tmp_path: Path, fmt: type[Format]) -> None:
    path = tmp_path / "x"
    save(path, {"w": make(fmt, (3, 5)), "b": np.int8([1])})
    good = path.read_bytes()
    for n in reversed(range(len(good))):
        os.truncate(path, n)
        with pytest.raises(SpformatError):
            load(path)
    path.write_bytes(good)
    accepted = []
    with open(path, "r+b", buffering=0) as f:
        for i in range(len(good)):
            for flip in (0x01, 0x20, 0xFF):
                f.seek(i)
                f.write(bytes([good[i] ^ flip]))
                try:
                    load(path)
                except SpformatError:
                    continue
                accepted.append((i, flip))
            f.seek(i)
            f.write(good[i : i + 1])
    assert accepted == []
    assert load(path)["w"] == make(fmt, (3, 5))


@pytest.mark.slow
def test_t3_substitutions_insertions_and_deletions(tmp_path: Path) -> None:
    rng = random.Random(3)  # 24 values a byte; all 255 were run once and rejected
    path = tmp_path / "x"
    save(path, {"w": make(CSR, (3, 5))})
    good = path.read_bytes()
    accepted = []
    for i in range(len(good)):
        mutants = [good[:i] + bytes([v]) + good[i + 1 :] for v in rng.sample(range(256), 24)]
        mutants += [good[:i] + good[i + 1 :], good[:i] + b" " + good[i:], good[:i] + b"\0" + good[i:]]
        for mutant in mutants:
            if mutant == good:
                continue
            path.write_bytes(mutant)
            try:
                load(path)
            except SpformatError:
                continue
            accepted.append((i, mutant))
    assert accepted == []


# --- 2b: the descriptor, checksums recomputed


def w(tree: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tree["tensors"]["w"]
    return found


def put(**changes: Any) -> Edit:
    return lambda tree, arrays: w(tree).update(changes)


def drop(key: str) -> Edit:
    return lambda tree, arrays: w(tree).pop(key)  # type: ignore[return-value]


def keep(edit: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Edit:
    """Run an edit for its effect; what it returns is not a new descriptor text."""

    def run(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        edit(tree, arrays)

    return run


REQUIRED = ("format", "shape", "dtype", "params", "crc32")
ZEROS = {"indptr": "0" * 8, "indices": "0" * 8, "data": "0" * 8}
DESCRIPTOR: dict[str, tuple[Edit, type[SpformatError], str]] = {
    "d02-newer-container": (lambda t, a: t.update(container=2), VersionError, "expected 1, got '2'; a newer"),
    "d02-older-container": (lambda t, a: t.update(container=0), VersionError, "expected 1, got '0'"),
    "d02-text-container": (lambda t, a: t.update(container="1"), VersionError, "expected 1, got '1'"),
    "d02-true-container": (lambda t, a: t.update(container=True), VersionError, "got 'True'"),
    "d02-no-container": (lambda t, a: t.pop("container"), VersionError, "got none"),
    "d02-newer-format": (put(version=2), VersionError, "csr version: expected 1, got '2'"),
    "d02-text-version": (put(version="1.0"), VersionError, "got '1.0'"),
    "d02-no-version": (drop("version"), VersionError, "got none"),
    "d03-unknown-format": (put(format="csrr"), DescriptorError, "unknown format 'csrr'; did you mean 'csr'"),
    "d03-wrong-case": (put(format="CSR"), DescriptorError, "unknown format 'CSR'"),
    "d03-format-number": (put(format=3), DescriptorError, "format id"),
    "d04-not-json": (lambda t, a: "{", DescriptorError, "not valid JSON"),
    "d04-array": (lambda t, a: "[]", DescriptorError, "expected a JSON object"),
    "d04-nan": (lambda t, a: '{"container":NaN}', DescriptorError, "NaN"),
    "d04-duplicate-key": (lambda t, a: '{"container":1,"container":1}', DescriptorError, "duplicate key 'container'"),
    "d04-empty": (lambda t, a: "", DescriptorError, "not valid JSON"),
    "d04-tensors-list": (lambda t, a: t.update(tensors=[]), DescriptorError, "tensors: expected an object"),
    "d04-tensor-null": (lambda t, a: t["tensors"].update(w=None), DescriptorError, "expected an object"),
    "d04-plain-list": (lambda t, a: t.update(plain=["bias"]), DescriptorError, "plain: expected an object"),
    **{f"d05-no-{key}": (drop(key), DescriptorError, f"'{key}'") for key in REQUIRED},
    "d05-no-tensors": (lambda t, a: t.pop("tensors"), DescriptorError, "'tensors'"),
    "d06-extra-key": (put(colour="red"), DescriptorError, "unknown key 'colour'.*--ignore-unknown"),
    "d06-extra-top-key": (lambda t, a: t.update(extra=1), DescriptorError, "unknown key 'extra'"),
    "d06-extra-param": (put(params={"n": 2}), DescriptorError, "params: unknown key 'n'"),
    "d06-tables-of-none": (put(tables={}), DescriptorError, "unknown key 'tables'"),
    "d07-absent-array": (keep(lambda t, a: a.pop("w.indices")), DescriptorError, "expected the entry 'w.indices'"),
    "d07-absent-plain": (keep(lambda t, a: a.pop("bias")), DescriptorError, "expected the entry 'bias'"),
    "d08-smuggled-array": (keep(lambda t, a: a.update(x=np.zeros(3))), DescriptorError, "'x' of the file is claimed"),
    "d09-claimed-twice": (lambda t, a: t["plain"].update({"w.data": "00000000"}), DescriptorError, "by tensor 'w' too"),
    "d09-name-twice": (
        keep(lambda t, a: (a.update(w=np.zeros(1)), t["plain"].update(w="00000000"))), DescriptorError, "two tensors"),
    "d10-3d": (put(shape=[7, 7, 1]), DescriptorError, r"expected \[M, K\], got 3"),
    "d10-1d": (put(shape=[7]), DescriptorError, "got 1 dim"),
    "d10-0d": (put(shape=[]), DescriptorError, "got 0 dim"),
    "d11-text": (put(shape=["7", "7"]), DescriptorError, "list of ints"),
    "d11-float": (put(shape=[7.0, 7]), DescriptorError, "list of ints"),
    "d11-bool": (put(shape=[True, 7]), DescriptorError, "list of ints"),
    "d11-negative": (put(shape=[-7, 7]), DescriptorError, "list of ints"),
    "d11-huge": (put(shape=[2**48, 7]), DescriptorError, "list of ints"),
    "d11-not-a-list": (put(shape=7), DescriptorError, "list of ints"),
    "d13-rows-without-pointers": (put(shape=[2**31 - 1, 7]), ArrayError, "indptr"),
    "d18-upper-case": (put(crc32=ZEROS | {"indptr": "ABCDEF01"}), DescriptorError, "lower-case hex"),
    "d18-short": (put(crc32=ZEROS | {"indptr": "abc"}), DescriptorError, "8 lower-case"),
    "d18-number": (put(crc32=ZEROS | {"indptr": 1}), DescriptorError, "8 lower-case"),
    "d18-one-missing": (put(crc32={"indptr": "0" * 8, "data": "0" * 8}), DescriptorError, "'indices'.*--allow-unch"),
    "d18-other-algorithm": (
        keep(lambda t, a: w(t).update(sha1=w(t).pop("crc32"))), DescriptorError, "'crc32', got none.*--allow"),
    "d23-huge-descriptor": (put(params={"x" * 100_000: 1}), LimitError, "--max-descriptor-bytes"),
    "d24-other-value-dtype": (put(dtype="bfloat16"), ArrayError, "expected BF16 for dtype bfloat16, got F16"),
    "d24-unknown-dtype": (put(dtype="f16"), DescriptorError, "dtype: expected one of"),
    "d25-pad-in-descriptor": (put(pad=0), DescriptorError, "unknown key 'pad'"),
    "c28-extra-field-in-header": (lambda t, a: None, ContainerError, "unknown field"),
}  # fmt: skip


@pytest.mark.parametrize("case", DESCRIPTOR)
def test_bad_descriptors(csr_file: Path, case: str) -> None:
    edit, error, message = DESCRIPTOR[case]
    text = case in ("d04-not-json", "d04-array", "d04-nan", "d04-duplicate-key", "d04-empty")
    rewrite(csr_file, edit if text else keep(edit), sums=not case.startswith("d18"))
    if case.startswith("c28"):
        data = csr_file.read_bytes()
        n = int.from_bytes(data[:8], "little")
        raw = data[8 : 8 + n].replace(b'"dtype":', b'"x":1,"dtype":', 1)
        csr_file.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + n :])
    with pytest.raises(error, match=message) as e:
        load(csr_file)
    assert e.value.exit_code in (65, 78)
    assert str(csr_file) in str(e.value)


def test_the_rewriting_helper_makes_good_files(csr_file: Path) -> None:
    before = csr_file.read_bytes()
    rewrite(csr_file, lambda tree, arrays: None)
    assert csr_file.read_bytes() == before


def test_d05_d14_tables(tmp_path: Path) -> None:
    fmt = next(f for f in FORMATS if f.declared_tables())
    table = fmt.declared_tables()[0][0]

    def saved() -> Path:
        save(tmp_path / "x", {"w": make(fmt)}, overwrite=True)
        return tmp_path / "x"

    rewrite(saved(), drop("tables"))
    with pytest.raises(DescriptorError, match="'tables'"):
        load(tmp_path / "x")
    rewrite(saved(), keep(lambda t, a: w(t)["tables"].pop(table)))
    with pytest.raises(DescriptorError, match=f"tables: expected a key '{table}'"):
        load(tmp_path / "x")
    rewrite(saved(), keep(lambda t, a: w(t)["tables"][table].append(0)))
    with pytest.raises(ArrayError):
        load(tmp_path / "x")
    rewrite(saved(), keep(lambda t, a: w(t)["tables"][table].__setitem__(0, w(t)["tables"][table][0] + 1)))
    with pytest.raises((ArrayError, InvariantError)):
        load(tmp_path / "x")
    for bad in (-1, 1.0, "1", True, None):
        rewrite(saved(), keep(lambda t, a, bad=bad: w(t)["tables"][table].__setitem__(0, bad)))
        with pytest.raises(DescriptorError, match="list of ints"):
            load(tmp_path / "x")


def test_d06_unknown_keys_can_be_ignored(csr_file: Path) -> None:
    def edit(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        tree["extra"] = w(tree)["colour"] = 1

    rewrite(csr_file, edit)
    assert load(csr_file, ignore_unknown=True)["w"] == make(CSR)


HUGE = 2**20


def test_d12_a_hostile_shape_loads_but_does_not_unfold(tmp_path: Path) -> None:
    one = CSR(
        shape=(HUGE, HUGE),
        indptr=np.concatenate([[0], np.ones(HUGE)]).astype(np.int32),
        indices=np.int32([5]),
        data=np.float32([1]),
    )
    save(tmp_path / "x", {"w": one})
    with pytest.raises(LimitError, match=r"4,398,046,511,104 bytes.*--max-memory"):
        load(tmp_path / "x")["w"].to_dense()


PARAM_CASES = [
    ("bsr", "blocksize", [0, 3]), ("bsr", "blocksize", [-1, 3]), ("bsr", "blocksize", [2**16, 3]),
    ("bsr", "blocksize", [2]),
    ("bsr", "blocksize", "2x3"), ("bsr", "blocksize", [2.0, 3]), ("bsr", "blocksize", None), ("vector-nm", "n", 5),
    ("vector-nm", "n", 0), ("vector-nm", "m", 0), ("vector-nm", "m", 257), ("vector-nm", "vector_length", 0),
    ("vector-nm", "n", "2"), ("vector-nm", "n", True), ("two-four", "meta_order", "linear"),
    ("two-four", "meta_order", 0),
    ("sr-bcrs", "stride", 0), ("ell-buckets", "max_width", 3), ("ell-buckets", "column_parts", 0),
    ("ell-buckets", "max_width", None),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "param", "value"), PARAM_CASES)
def test_d15_d16_params_out_of_range(tmp_path: Path, fmt: str, param: str, value: Any) -> None:
    cls = next(f for f in FORMATS if f.name == fmt)
    save(tmp_path / "x", {"w": make(cls)})
    rewrite(tmp_path / "x", keep(lambda t, a: w(t)["params"].__setitem__(param, value)))
    with pytest.raises(DescriptorError, match=param):
        load(tmp_path / "x")


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.declared_params()], ids=lambda f: f.name)
def test_d05_every_param_is_required(tmp_path: Path, fmt: type[Format]) -> None:
    for d in fmt.declared_params():
        save(tmp_path / "x", {"w": make(fmt)}, overwrite=True)
        rewrite(tmp_path / "x", keep(lambda t, a, key=d.name: w(t)["params"].pop(key)))
        with pytest.raises(DescriptorError, match=f"params: expected a key '{d.name}'"):
            load(tmp_path / "x")


def test_d18_files_without_checksums_need_permission(csr_file: Path) -> None:
    def unchecked(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        del tree["sha256"], w(tree)["crc32"]

    rewrite(csr_file, unchecked, seal=False)
    with pytest.raises(DescriptorError, match="--allow-unchecked"):
        load(csr_file)
    assert load(csr_file, allow_unchecked=True)["w"] == make(CSR)


@pytest.mark.parametrize("sha", ["A" * 64, "0" * 63, 7, "", "sha1:" + "0" * 40])
def test_d18_malformed_sha256(csr_file: Path, sha: Any) -> None:
    rewrite(csr_file, lambda tree, arrays: tree.update(sha256=sha), seal=False)
    for options in ({}, {"allow_unchecked": True}):
        with pytest.raises(DescriptorError, match="64 lower-case hex"):
            load(csr_file, **options)


def test_d19_right_checksums_do_not_replace_validation(csr_file: Path) -> None:
    def edit(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays["w.indices"] = arrays["w.indices"] + np.int32(100)

    rewrite(csr_file, edit)
    with pytest.raises(IndexBoundsError) as e:
        load(csr_file)
    assert (e.value.tensor, e.value.array, e.value.path) == ("w", "indices", str(csr_file))


@pytest.mark.parametrize("entry", ["w.data", "w.indices", "w.indptr", "bias"])
def test_d20_wrong_checksum_names_the_array(csr_file: Path, entry: str) -> None:
    def edit(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        holder = tree["plain"] if entry == "bias" else w(tree)["crc32"]
        key = entry.removeprefix("w.")
        holder[key] = f"{int(holder[key], 16) ^ 1:08x}"

    rewrite(csr_file, edit, sums=False)
    for options in ({}, {"allow_unchecked": True}):
        with pytest.raises(IntegrityError, match="is stored") as e:
            load(csr_file, **options)
        assert (e.value.tensor, e.value.array) == ((entry, None) if entry == "bias" else ("w", entry[2:]))


def test_d20_bytes_passed_on_are_checked_too(csr_file: Path, tmp_path: Path) -> None:
    with safe_open(csr_file) as f:
        assert b"".join(p.tobytes() for p in f.raw("bias", 5)) == np.arange(7, dtype=np.float32).tobytes()
    rewrite(csr_file, lambda tree, arrays: tree["plain"].update(bias="01234567"))
    with safe_open(csr_file) as f:
        with pytest.raises(IntegrityError, match="01234567 is stored"):
            save_dense_from(f, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def save_dense_from(f: Any, path: Path) -> None:
    with stfile.Writer(path, [("bias", "F32", (7,))]) as out:
        out.put("bias", f.raw("bias"))


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
def test_a44_a_dtype_the_device_lacks(tmp_path: Path) -> None:
    import cupy

    save(tmp_path / "x", {"w": make(CSR, dtype="float8_e5m2")})
    try:
        cupy.zeros(1, VALUE_TYPES["float8_e5m2"].numpy)
    except ValueError:
        with pytest.raises(ArrayError, match="cannot hold dtype float8_e5m2"):
            load(tmp_path / "x", device="cuda")
    else:
        assert load(tmp_path / "x", device="cuda")["w"].dtype == "float8_e5m2"


def test_g01_a_device_that_is_not_there(csr_file: Path) -> None:
    with pytest.raises(DeviceUnavailable) as e:
        load(csr_file, device="cuda:99")
    assert e.value.exit_code == 69


def test_d21_header_of_another_sha_or_not_canonical(csr_file: Path) -> None:
    good = csr_file.read_bytes()
    n = int.from_bytes(good[:8], "little")
    header, data = good[8 : 8 + n], good[8 + n :]
    rewrite(csr_file, lambda tree, arrays: tree.update(sha256="0" * 64), seal=False)
    with pytest.raises(IntegrityError, match="sha256"):
        load(csr_file)
    tree = json.loads(header)
    reordered = json.dumps(dict(reversed(tree.items())), separators=(",", ":")).encode()
    spaced = json.dumps(tree).encode()
    more_padding = header + b" " * 64
    for raw in (reordered, spaced, more_padding):
        csr_file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        with pytest.raises(IntegrityError, match="canonical"):
            load(csr_file)
    csr_file.write_bytes(len(b" " + header).to_bytes(8, "little") + b" " + header + data)
    with pytest.raises(ContainerError, match="start with"):  # c20
        load(csr_file)


def test_d23_the_writer_keeps_to_the_limit(tmp_path: Path) -> None:
    with limits.using(descriptor_bytes=100), pytest.raises(LimitError, match="--max-descriptor-bytes"):
        save(tmp_path / "x", {"w": make(CSR)})
    assert list(tmp_path.iterdir()) == []


# --- 2c, where the file layer meets the arrays: checksums are right


def change(array: str, with_: Callable[[np.ndarray[Any, Any]], Any]) -> Edit:
    def edit(tree: dict[str, Any], arrays: dict[str, Any]) -> None:
        arrays[f"w.{array}"] = with_(arrays[f"w.{array}"])

    return edit


ARRAYS: dict[str, tuple[Edit, type[SpformatError]]] = {
    **{f"a01-index-{d}": (change("indices", lambda a, d=d: a.astype(d)), ArrayError)
       for d in ("float32", "int8", "uint64", "bool", "int64", "uint16")},
    "a02-index-shorter": (change("indices", lambda a: a[:-1]), ArrayError),
    "a02-data-shorter": (change("data", lambda a: a[:-1]), ArrayError),
    "a03-pointer-M": (change("indptr", lambda a: a[:-1]), ArrayError),
    "a03-pointer-M+2": (change("indptr", lambda a: np.append(a, a[-1:])), ArrayError),
    "a04-pointer-from-1": (change("indptr", lambda a: np.append(np.int32([1]), a[1:])), PointerError),
    "a04-pointer-from--1": (change("indptr", lambda a: np.append(np.int32([-1]), a[1:])), PointerError),
    "a11-rank": (change("data", lambda a: a[:, None]), ArrayError),
    "d24-same-width": (change("data", lambda a: a.view(np.uint16)), ArrayError),
    "c27-sub-byte": (change("data", lambda a: ("F4", (4 * a.size,), a.tobytes())), ArrayError),
}  # fmt: skip


@pytest.mark.parametrize("case", ARRAYS)
def test_bad_arrays(csr_file: Path, case: str) -> None:
    edit, error = ARRAYS[case]
    rewrite(csr_file, edit)
    with pytest.raises(error) as e:
        load(csr_file)
    assert e.value.tensor == "w"
    assert e.value.path == str(csr_file)


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


def test_a53_t26_good_and_bad_files_in_many_threads(csr_file: Path, tmp_path: Path) -> None:
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
