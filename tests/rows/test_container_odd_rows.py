"""Rows C04 .. C38 that are more than one bad header: limits, special files, odd but legal input."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import resource
import socket
import time
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from catalogue import (
    EXIT,
    blob,
    command,
    python,
    refused,
    refused_file,
    shell,
    tensor,
    unharmed,
    unprivileged,
    weights,
    write,
)

import spformat as sf
from spformat import limits
from spformat.arrays.dtypes import SAFETENSORS
from spformat.storage import stfile

F32_2 = tensor()
D8 = bytes(8)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_C04_a_huge_header_length_costs_no_memory(folder: Path, length: int) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(blob({"a": F32_2}, D8, length=length))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused_file(path, sf.errors.ContainerError, "header length: expected at most .*, got " + str(length))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


def test_C05_a_legal_header_of_90_mb_is_refused_at_once(folder: Path) -> None:
    path = folder / "x.safetensors"
    with open(path, "wb") as f:
        f.write((90_000_000).to_bytes(8, "little"))
        f.truncate(8 + 90_000_000)
    with refused(folder, sf.errors.LimitError, "--max-header-bytes", limit=16 * 2**20, value=90_000_000):
        sf.load(path)
    begin = time.process_time()
    with pytest.raises(sf.errors.LimitError):
        sf.load(path)
    assert time.process_time() - begin < 0.1
    assert command("validate", path).code == 78


def test_C05_many_entries_hit_a_limit_that_a_flag_raises(folder: Path) -> None:
    path = folder / "x.safetensors"
    item = b'"%07d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
    path.write_bytes(blob(b"{" + b"".join(item % i for i in range(150_000))[:-1] + b"}"))
    with refused(
        folder, sf.errors.LimitError, "number of tensors: expected at most 100,000, got 150,000", "--max-tensors"
    ):
        sf.safe_open(path)
    begin = time.process_time()
    with pytest.raises(sf.errors.LimitError):
        sf.safe_open(path)
    assert time.process_time() - begin < 0.1
    path.write_bytes(blob(b"{" + b"".join(item % i for i in range(30))[:-1] + b"}"))
    assert command("inspect", path, "--max-tensors", 20).code == 78
    assert command("inspect", path, "--max-tensors", 30).code == 0
    escaped = path.read_bytes().replace(b"data_offsets", b"data\\u005foffsets")  # not seen by the count before parsing
    path.write_bytes(blob(escaped[8:]))
    with limits.using(tensors=20), refused(folder, sf.errors.LimitError, "number of tensors"):
        sf.safe_open(path)


def test_C06_every_truncation_is_refused(folder: Path) -> None:
    path = folder / "x.safetensors"
    write(path, {"a": np.arange(5, dtype=np.float32), "b": np.zeros((0, 3)), "c": np.int8([1, 2, 3])}, {"k": "v"})
    data = path.read_bytes()
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with refused(folder, sf.errors.ContainerError):
            stfile.Reader(path)
        if n % 50 == 0:
            assert command("convert", path, folder / "out").code == 65
    assert not (folder / "out").exists()


def test_C13_extents_without_bytes_behind_them_hit_a_limit(folder: Path) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(blob({"a": tensor(shape=(0, 2**24), offsets=(0, 0))}))
    assert sf.safe_open(path).array("a").shape == (0, 2**24)
    for shape in ((0, 2**24 + 1), (2**40, 3, 0)):
        path.write_bytes(blob({"a": tensor(shape=shape, offsets=(0, 0))}))
        refused_file(path, sf.errors.LimitError, "tensor 'a' without elements", "--max-empty-extent")


def test_C20_C28_blanks_and_unknown_fields_of_foreign_files_are_noted(folder: Path) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(blob(b"  " + json.dumps({"a": tensor(extra=1)}).encode() + b"   ", D8))
    with unharmed(folder), sf.safe_open(path) as f:
        assert f.array("a").tolist() == [0, 0]
        assert [("'{'" in o, "'extra'" in o) for o in f.oddities] == [(True, False), (False, True)]
    sf.save(path, weights(), overwrite=True)
    good = path.read_bytes()
    n = int.from_bytes(good[:8], "little")
    for raw in (b" " + good[8 : 8 + n], good[8 : 8 + n].replace(b'"dtype":', b'"x":1,"dtype":', 1)):
        path.write_bytes(blob(raw, good[8 + n :]))
        refused_file(path, sf.errors.ContainerError, "a file with a descriptor follows the specification")


def test_C22_names_are_escaped_in_every_message(folder: Path) -> None:
    path = folder / "x.safetensors"
    for name in ("a\nb", "\x1b[31m", "\u202eabc"):
        path.write_bytes(blob({name: F32_2, name + "2": F32_2}, D8))
        with refused(folder, sf.errors.ContainerError) as caught:
            sf.safe_open(path)
        assert name not in str(caught.value)
        path.write_bytes(blob({name: F32_2}, D8))
        with sf.safe_open(path) as f:
            assert f.keys() == [name]  # accepted from others, and only a key
        for args in (["inspect", path], ["convert", path, folder / "out", "--dry-run"]):
            answer = command(*args)
            assert answer.code == 0
            assert name not in answer.out + answer.err


def test_C23_long_names_hit_a_limit(folder: Path) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(blob({"x" * 1024: F32_2}, D8))
    assert len(sf.safe_open(path)) == 1
    for name in ("x" * 1025, "é" * 513, "x" * 1_000_000):
        path.write_bytes(blob({name: F32_2}, D8))
        refused_file(path, sf.errors.LimitError, "tensor name 'xxx|tensor name 'ééé", "--max-name-bytes")


NAMES = ["../../x", "C:\\x", "a/b", "/etc/passwd", "\x1b[31mred", "重み", "e\u0301", "\u00e9", "__metadata", "a.b"]


def test_C24_C25_odd_names_are_only_keys(folder: Path) -> None:
    names = set(NAMES)
    tensors = {name: np.full((2, 3), i, np.float32) for i, name in enumerate(NAMES)}
    with unharmed(folder, but="x.safetensors"):
        sf.save_dense(folder / "x.safetensors", tensors)
    for target in ("csr", "dense"):
        out = folder / f"{target}.safetensors"
        with unharmed(folder, but=out.name):
            assert command("convert", folder / "x.safetensors", out, "--to", target).code == 0
        with sf.safe_open(out) as f:
            assert set(f) == names  # NFC and NFD stay apart, bytes as they were
            assert all(np.array_equal(sf.convert(f[name], "dense").to_dense(), tensors[name]) for name in names)
    assert set(safetensors.numpy.load_file(folder / "dense.safetensors")) == names


def test_C26_no_metadata_is_dense_input(folder: Path) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(blob({"a": F32_2}, D8))
    with sf.safe_open(path) as f:
        assert (f.described, f.metadata) == (False, {})
    with refused(folder, sf.errors.DescriptorError, "dense safetensors file", "spformat convert"):
        sf.load(path)


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "I3"])
def test_C27_unknown_dtypes_are_refused_where_they_are_read(folder: Path, code: str) -> None:
    path, data = folder / "x.safetensors", os.urandom(12)
    path.write_bytes(blob({"a": tensor(code, ({"F4": 24}.get(code, 16),), (0, 12)), "b": tensor(offsets=(12, 20))},
                          data + D8))  # fmt: skip
    refused_part = f"dtype '{code}' not supported; supported: .*BF16"
    with refused(folder, sf.errors.ArrayError, refused_part, tensor="a"), sf.safe_open(path) as f:
        f["a"]
    answer = command("validate", path, "--json")
    assert answer.code == 65
    assert [t["ok"] for t in json.loads(answer.out)["tensors"]] == [False, True]  # the rest is not spoiled
    with unharmed(folder, but="out.safetensors"):
        assert command("convert", path, folder / "out.safetensors").code == 0
    with sf.safe_open(folder / "out.safetensors") as f:
        assert b"".join(p.tobytes() for p in f.raw("a")) == data  # passed on as bytes


def test_C29_bool_bytes(folder: Path) -> None:
    path = folder / "x.safetensors"
    path.write_bytes(blob({"a": tensor("BOOL", (3,), (0, 3))}, b"\0\1\0"))
    assert sf.safe_open(path).array("a").tolist() == [False, True, False]
    path.write_bytes(blob({"a": tensor("BOOL", (3,), (0, 3))}, b"\0\1\2"))
    with refused(
        folder, sf.errors.ArrayError, "expected bytes 0 or 1, got 2 at element 2", tensor="a", index=2, value=2
    ):
        sf.safe_open(path).array("a")
    assert command("validate", path).code == 65


@pytest.mark.parametrize("shift", range(1, 8))
def test_C30_unaligned_arrays_come_out_aligned(folder: Path, shift: int) -> None:
    path = folder / "x.safetensors"
    header = {"a": tensor("U8", (shift,), (0, shift)), "b": tensor("F64", (1, 3), (shift, shift + 24))}
    path.write_bytes(blob(header, b"\7" * shift + np.arange(3.0).tobytes()))
    with unharmed(folder), sf.safe_open(path) as f:
        for a in (f["a"], f["b"].data, f.array("b")):
            assert a.ctypes.data % 64 == 0
            assert a.flags.aligned
        assert f["b"].data.tolist() == [[0, 1, 2]]


def test_C30_our_arrays_are_aligned_in_the_file(folder: Path) -> None:
    arrays = {f"{c}{i}": np.zeros(i, d) for c, d in SAFETENSORS.items() for i in (0, 1, 3)}
    write(folder / "x", arrays)
    with stfile.Reader(folder / "x") as reader:
        assert reader.header.data_start % 64 == 0
        for e in reader.entries.values():
            assert (reader.header.data_start + e.begin) % SAFETENSORS[e.dtype].itemsize == 0
        sizes = [(-SAFETENSORS[e.dtype].itemsize, e.name) for e in reader.entries.values()]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("code", [c for c, d in SAFETENSORS.items() if d.kind in "iuf" and d.itemsize > 1] + ["BF16"])
def test_C31_files_are_little_endian_whatever_comes_in(folder: Path, code: str) -> None:
    native = np.arange(1, 25).reshape(4, 6).astype(ml_dtypes.bfloat16 if code == "BF16" else SAFETENSORS[code])
    given = native if code == "BF16" else native.astype(native.dtype.newbyteorder(">"))
    write(folder / "x", {"a": given, "t": given.T})
    raw = (folder / "x").read_bytes()
    assert raw.endswith(native.tobytes() + native.T.tobytes())  # this machine is little-endian: stfile refuses others
    with stfile.Reader(folder / "x") as reader:
        assert reader.read("a").dtype.isnative
        assert reader.read("t").tobytes() == native.T.tobytes()


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_C32_other_files_under_our_name_are_named_and_never_unpickled(folder: Path) -> None:
    mark = str(folder / "unpickled")
    evil = pickle.dumps(Payload(mark), protocol=4)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as z:
        z.writestr("archive/data.pkl", evil)
    npz = io.BytesIO()
    np.savez(npz, w=np.array([Payload(mark)], dtype=object))
    for data, what in (
        (evil, "PyTorch file.*never reads"), (packed.getvalue(), "zip archive.*never unpickled"),
        (npz.getvalue(), "zip archive"), (gzip.compress(evil), "gzip"), (b"GGUF" + bytes(60), "GGUF"),
    ):  # fmt: skip
        (folder / "x.safetensors").write_bytes(data)
        refused_file(folder / "x.safetensors", sf.errors.ContainerError, what)
    assert not os.path.exists(mark)


def test_C33_only_regular_files_open_and_nothing_blocks(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "socket"))
    begin = time.monotonic()
    for path, kind in ((folder / "fifo", "got a FIFO"), ("/dev/zero", "got a device"), (folder / "socket", "")):
        with refused(folder, sf.errors.InputError, "regular file|cannot open", kind, path=str(path)):
            sf.load(path)
        assert command("inspect", path).code == 66
        assert command("convert", path, folder / "out").code == 66
    with refused(folder, sf.errors.InputError, "got a folder"):
        sf.safe_open(folder)  # load takes folders
    server.close()
    assert time.monotonic() - begin < 5
    done = shell("echo x | spformat inspect /dev/stdin")
    assert (done.returncode, "FIFO" in done.stderr) == (66, True), done.stderr


def test_C34_truncated_or_rewritten_while_it_is_read(folder: Path) -> None:
    path = folder / "x.safetensors"
    sf.save(path, {"a": np.arange(1000.0), "b": np.arange(1000.0)})
    with sf.safe_open(path) as f:
        assert f.array("a").sum() == 499_500
        with open(path, "r+b") as other:
            other.truncate(path.stat().st_size - 100)
        with refused(folder, sf.errors.IntegrityError, "changed while it was being read"):
            f.array("a")
        with refused(folder, sf.errors.IntegrityError, "short read"):
            f.array("b")
    refused_file(path, sf.errors.ContainerError, "truncated")


def test_C35_a_hole_of_8_eib(folder: Path) -> None:
    path = folder / "x.safetensors"
    with open(path, "wb") as f:
        f.write(blob({"a": tensor("U8", (2**31, 2**32 - 1), (0, 2**63 - 2**31))}))
        f.truncate(2**63 - 4096)
    begin = time.monotonic()
    with refused(folder, sf.errors.LimitError, "size of the file: expected at most .*, got 9,223", "--max-file-bytes"):
        sf.safe_open(path)
    os.truncate(path, 0)
    raw = blob({"a": tensor("U8", (2**42,), (0, 2**42))})
    with open(path, "wb") as f:
        f.write(raw)
        f.truncate(len(raw) + 2**42)
    with (
        refused(folder, sf.errors.LimitError, "4,398,046,511,104 bytes requested", "--max-memory"),
        sf.safe_open(path) as g,
    ):
        g.array("a")
    assert command("validate", path).code == 78
    assert time.monotonic() - begin < 60


def test_C36_missing_unreadable_dangling_looping(folder: Path) -> None:
    (folder / "dangling").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")
    for name, why in (("missing", "No such file"), ("dangling", "No such file"), ("loop", "symbolic links")):
        with refused(folder, sf.errors.InputError, why, path=str(folder / name)):
            sf.load(folder / name)
        assert command("validate", folder / name).code == EXIT["InputError"]
    with refused(folder, sf.errors.InputError, "null"):
        sf.load(folder / "a\0b")
    sf.save(folder / "secret", weights())
    (folder / "secret").chmod(0)
    folder.chmod(0o755)
    with refused(folder, sf.errors.InputError, "Permission denied"), unprivileged(folder):
        sf.load("secret")
    with unprivileged(folder):
        assert command("validate", "secret").code == 66


def test_C37_a_git_lfs_pointer_says_what_to_run(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    refused_file(path, sf.errors.ContainerError, "looks like a Git LFS pointer: run `git lfs pull`")


def test_C38_an_incomplete_download(folder: Path) -> None:
    path = folder / "model.safetensors.incomplete"
    path.write_bytes(blob({"a": F32_2}, bytes(3)))
    refused_file(path, sf.errors.ContainerError, "truncated.*the name says that a download is incomplete")


def test_C04_under_an_address_space_of_2_gib(folder: Path) -> None:
    for length in (2**63, 2**64 - 1, 100_000_001):
        (folder / "x").write_bytes(blob({}, D8, length=length))
        code = (
            "import resource, spformat as sf\nresource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
            "try: sf.load(sys.argv[1])\nexcept sf.errors.ContainerError: sys.exit(65)\n"
        )
        assert python(code, folder / "x").returncode == 65
